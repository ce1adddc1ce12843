"""The lead: what it says to workers, exactly once, and when it expels them."""

import numpy as np
import pytest
from kit import bits
from shard_bench import WORKERS, Bench, Hand, one

from asgd import base
from asgd.live import frames
from asgd.live.deadlines import Ladder
from asgd.live.frames import Frame
from asgd.live.slots import MESSAGES, message_stamp
from asgd.orders.protocol import Rules

# What is said.


def test_a_conversation():
  bench = Bench(one(jobs=4))
  first, second = bench.join(0, 1)
  assert first.listen() == ["welcome 0", "ticket 0: job 0 v0"]
  assert second.listen() == ["welcome 0", "ticket 0: job 1 v0"]
  first.push()
  assert first.listen() == ["ack 0", "ticket 1: job 2 v1"]
  second.push()
  assert second.listen() == ["ack 0", "ticket 1: job 3 v2"]
  first.push()
  assert first.listen() == ["ack 1"]
  assert not bench.lead.stopped
  second.push()
  assert second.listen() == ["ack 1", "stop"]
  assert first.listen() == ["stop"]
  assert bench.lead.stopped
  assert bench.lead.status() == {
    "received": 4,
    "rows": 10,
    "stopped": True,
    "busy": False,
    "workers": [0, 1],
    "late": [],
    "expelled": [],
    "news": [],
    "refused": 0,
    "rollback": None,
    "kept_params": [],
  }
  third = bench.join(2)  # too late
  assert third.listen() == ["welcome 0", "stop"]
  bench.check_once()
  bench.check_replay()


def test_a_place_that_is_not_there():
  bench = Bench(one())
  for worker in (-1, WORKERS):
    with pytest.raises(frames.BadFrame, match="shard 0 of 1 cannot receive"):
      Hand(bench, worker).hello()
  assert bench.rows() == []


def test_a_ticket_that_is_kept_says_so():
  bench = Bench(one(rules=Rules(fetch_every=2)), "dana_zero")
  hand = bench.join(0)
  hand.push()
  hand.push()
  assert hand.listen() == [
    *("welcome 0", "ticket 0: job 0 v0"),
    *("ack 0", "ticket 1: job 1 kept v1"),
    *("ack 1", "ticket 2: job 2 v2"),
  ]
  bench.complete()


# Exactly once.


def test_a_doubled_message_counts_once():
  bench = Bench(one())
  hand = bench.join(0)
  hand.listen()
  frame = hand.push()
  state = bits(bench.server_state)
  hand.tell(0, frame)
  hand.tell(0, frame)
  assert hand.listen() == ["ack 0", "ticket 1: job 1 v1", "ack 0", "ack 0"]
  assert bits(bench.server_state) == state
  assert bench.received[0] == 1


def test_a_message_that_waits_is_not_taken_twice():
  bench = Bench(one(rules=Rules(round=2)), "ssgd", every=2)
  first, second = bench.join(0, 1)
  frame = first.push()
  # Neither received yet, nor lost. What is said first counts.
  first.tell(0, frame)
  first.tell(0, frame._replace(flag=0))
  assert first.listen() == ["welcome 0", "ticket 0: job 0 v0"]
  second.push()
  assert first.listen() == ["ack 0", "ticket 1: job 2 v1"]
  assert bench.received[0] == 2


def test_a_message_of_an_expelled_holder_is_not_taken():
  bench = Bench(one())
  first, second = bench.join(0, 1)
  pushes = first.work(0)
  bench.lead.disconnect(0, 1.0)
  first.listen()
  first.tell(0, pushes[0])
  assert first.listen() == ["expel"]
  new = bench.join(0)
  first.tell(0, pushes[0])
  assert first.listen() == ["expel 1"]  # another has its place
  assert bench.received[0] == 0
  assert new.listen() == ["welcome 1", "ticket 1: job 0 v0"]
  second.listen()
  bench.finish()
  bench.check_once()


def test_a_message_of_somebody_else_is_not_taken():
  bench = Bench(one())
  first, _ = bench.join(0, 1)
  frame = first.work(0)[0]
  stranger = Hand(bench, 0)
  stranger.tell(0, frame)
  assert stranger.listen() == ["expel 1"]
  assert bench.received[0] == 0


# Coming back, and taking a place.


def test_who_comes_back_gets_its_tickets_again():
  bench = Bench(one(rules=Rules(depth=2)))
  hand = bench.join(0)
  tickets = [frame for _, frame in hand.heard if frame.kind == frames.TICKET]
  assert len(tickets) == 2
  hand.heard.clear()
  hand.reconnect(0)
  bench.settle()
  assert [frame for _, frame in hand.heard[1:]] == tickets  # the same slots
  assert hand.listen()[0] == "welcome 0"
  assert bench.rows() == ["join 0:0", "send 0:0", "send 0:1"]
  bench.complete()


def test_a_ticket_whose_message_is_there_is_not_sent_again():
  bench = Bench(one(rules=Rules(round=2)), "ssgd", every=2)
  first, second = bench.join(0, 1)
  first.push()
  first.listen()
  first.reconnect(0)
  assert first.listen() == ["welcome 0"]
  second.push()
  assert first.listen() == ["ack 0", "ticket 1: job 2 v1"]


def test_somebody_new_takes_the_place():
  bench = Bench(one())
  first, second = bench.join(0, 1)
  first.listen()
  new = bench.join(0)
  assert first.listen() == ["expel 1"]
  assert new.listen() == ["welcome 1", "ticket 1: job 0 v0"]
  assert bench.rows(start=4) == [
    "lost 0:0",
    "leave 0:0",
    "join 0:1",
    "send 0:0",
  ]
  assert second.listen() == ["welcome 0", "ticket 0: job 1 v0"]


def test_a_first_hello_said_twice_is_one():
  """A worker that has to wait long for an answer, as its shard compiles, says
  everything again, and is not its own successor."""
  bench = Bench(one())
  hand = Hand(bench, 0)
  hand.tell(0, Frame(frames.HELLO, 0, job=-1))
  hand.tell(0, Frame(frames.HELLO, 0, job=-1))
  heard = hand.listen()
  assert "expel 1" not in heard
  assert heard[:2] == ["welcome 0", "ticket 0: job 0 v0"]
  assert bench.rows() == ["join 0:0", "send 0:0"]


def test_a_holder_from_before_is_told_to_go():
  bench = Bench(one())
  first = bench.join(0)
  bench.lead.disconnect(0, 1.0)
  first.listen()
  first.hello(holder=0)
  assert first.listen() == ["expel"]  # it may join as somebody new
  first.hello()
  assert first.listen() == ["welcome 1", "ticket 1: job 0 v0"]
  other = Hand(bench, 0)
  other.hello(holder=0)
  assert other.listen() == ["expel 1"]  # it may not
  first.push()
  assert first.listen() == ["ack 1", "ticket 2: job 1 v1"]


def test_a_message_that_is_not_finite_costs_the_place():
  bench = Bench(one(rules=Rules(depth=2), jobs=6))
  first, second = bench.join(0, 1)
  first.listen()
  first.push(finite=False)
  assert first.listen() == ["expel"]
  assert bench.lead.role.n_refused == 1
  assert bench.lead.workers == [1]
  assert bench.rows(start=6) == ["reject 0:0", "lost 0:1", "leave 0:0"]
  second.push()  # gets the job that was refused
  assert bench.rows(start=9) == ["receive 1:2", "send 1:0"]
  assert bench.lead.role.n_refused == 1  # of job 0
  first.hello()
  assert first.listen() == [
    *("welcome 1", "ticket 2: job 1 v1", "ticket 3: job 4 v1"),
  ]
  bench.finish()
  assert bench.lead.role.n_refused == 0
  bench.check_once()
  bench.check_replay()


def test_who_drains_gets_nothing_new_and_leaves():
  bench = Bench(one())
  first, second = bench.join(0, 1)
  first.send(frames.DRAIN)
  first.push()
  assert first.listen() == ["welcome 0", "ticket 0: job 0 v0", "ack 0"]
  first.send(frames.BYE)
  assert bench.lead.workers == [1]
  assert bench.rows(start=4) == ["receive 0:0", "leave 0:0"]
  second.push()
  assert bench.received[0] == 2


def test_what_a_lost_worker_had_is_done_by_others():
  bench = Bench(one(rules=Rules(bound=0)))
  first, second = bench.join(0, 1)
  second.push()
  second.listen()
  first.vanish()
  assert second.listen() == ["ticket 1: job 0 v1"]
  assert bench.rows(start=5) == ["lost 0:0", "leave 0:0", "send 1:0"]


# Deadlines: the clock is the test's.


def test_a_worker_that_hangs_is_late_and_then_dead():
  bench = Bench(one(ladder=Ladder(start=10.0), rules=Rules(bound=0)))
  first, second = bench.join(0, 1)
  bench.now = 1.0
  second.push()
  second.listen()
  for now, late in ((9.0, set()), (10.0, set()), (10.5, {0}), (30.0, {0})):
    bench.tick(now)
    assert bench.lead.role.watch.late_workers == late
    assert bench.lead._expelled == []
  bench.tick(30.5)
  assert bench.lead.role.watch.late_workers == set()
  assert bench.lead._expelled == [0]
  assert first.listen()[-1] == "expel"
  assert second.listen() == ["ticket 1: job 0 v1"]
  trace = bench.trace()
  assert bench.rows(start=5) == ["lost 0:0", "leave 0:0", "send 1:0"]
  assert trace.time[5:].tolist() == [30.5] * 3
  assert bench.lead.status()["expelled"] == [0]
  assert bench.lead.status()["expelled"] == []  # it is told once


def after_five_jobs():
  """Worker 1 has done five jobs of one second, and worker 0 none."""
  ladder = Ladder(k=10.0, floor=2.0, start=100.0)
  bench = Bench(one(jobs=20, ladder=ladder))
  first, second = bench.join(0, 1)
  for now in (1.0, 2.0, 3.0, 4.0, 5.0):
    bench.now = now
    second.push()
  return bench, first, second


def test_the_ladder_is_that_of_the_jobs_that_ended():
  bench, first, _ = after_five_jobs()
  # T = 3 medians, dead after 9.
  for now, late, expelled in (
    *((3.0, set(), []), (3.1, {0}, []), (8.0, {0}, [])),
    (9.1, {1}, [0]),  # worker 1's ticket is of 5.0
  ):
    bench.tick(now)
    assert bench.lead.role.watch.late_workers == late
    assert bench.lead._expelled == expelled
  assert first.listen()[-1] == "expel"


def test_who_waits_for_others_is_not_late():
  setup = one(ladder=Ladder(start=10.0), rules=Rules(round=2))
  bench = Bench(setup, "ssgd", every=2)
  first, _ = bench.join(0, 1)
  first.push()
  bench.tick(15.0)
  assert bench.lead.role.watch.late_workers == {1}
  bench.tick(31.0)
  assert bench.lead._expelled == [1]


def test_who_is_there_waits_for_the_others():
  bench = Bench(one(together=True, ladder=Ladder(start=10.0)))
  first, second = bench.join(0, 1)
  bench.tick(9.0)
  assert first.listen() + second.listen() == 2 * ["welcome 0"]
  third = bench.join(2)
  for job, hand in enumerate((first, second, third)):
    assert hand.listen()[-1] == f"ticket 0: job {job} v0"
  bench.lead.disconnect(2, 9.5)  # once it has begun, nobody waits
  first.push()
  assert first.listen()[-1].startswith("ticket 1: job ")


def test_nobody_waits_for_ever_for_who_does_not_come():
  bench = Bench(one(together=True, ladder=Ladder(start=10.0)))
  first, second = bench.join(0, 1)
  for now, tickets in ((9.9, 0), (10.0, 1), (12.0, 0)):
    bench.tick(now)
    for hand in (first, second):
      assert sum("ticket" in said for said in hand.listen()) == tickets


def test_the_first_round_waits_for_a_worker_for_each_of_its_messages():
  setup = one(ladder=Ladder(start=10.0), rules=Rules(round=2))
  bench = Bench(setup, "ssgd", every=2)
  first = bench.join(0)
  assert first.listen() == ["welcome 0"]
  second = bench.join(1)
  first.push()
  assert first.listen() == ["ticket 0: job 0 v0"]  # the round is not over
  second.push()
  assert bench.rows(start=2) == [
    *("send 0:0", "send 1:1", "receive 0:0", "receive 1:1"),
    *("send 0:2", "send 1:3"),
  ]


def test_a_round_that_lacks_a_worker_is_made_by_the_others_in_the_end():
  setup = one(ladder=Ladder(start=10.0), rules=Rules(round=2, backup=1))
  bench = Bench(setup, "ssgd", every=2, drop_late=True)
  bench.join(0)
  second = bench.join(1)
  bench.tick(9.0)
  assert second.listen() == ["welcome 0"]
  bench.tick(10.0)
  assert second.listen() == ["ticket 0: job 1 v0"]
  bench.finish()
  bench.check_once()


def test_a_shard_that_comes_back_waits_for_nobody():
  bench = Bench(one(together=True, ladder=Ladder(start=10.0)))
  first, *_ = bench.join(0, 1, 2)
  bench.shards[0] = None
  bench.mend()
  first.push()
  assert first.listen()[-1].startswith("ticket 1: job ")


def test_of_two_tickets_one_is_worked_on_at_a_time():
  bench = Bench(one(ladder=Ladder(start=10.0), rules=Rules(depth=2)))
  bench.join(0)
  bench.tick(19.0)
  assert bench.lead.role.watch.late_workers == set()
  bench.tick(21.0)
  assert bench.lead.role.watch.late_workers == {0}
  bench.tick(59.0)
  assert bench.lead._expelled == []
  bench.tick(61.0)
  assert bench.lead._expelled == [0]


def test_who_does_not_come_back_to_a_new_shard_is_given_up():
  bench = Bench(one(ladder=Ladder(start=10.0)))
  first, second = bench.join(0, 1)
  bench.now = 5.0
  bench.start_shard(0)
  second.reconnect(0)
  bench.settle()
  bench.tick(6.0)
  bench.tick(14.0)
  second.push()
  bench.tick(35.5)
  assert bench.lead._expelled == [0]
  assert bench.lead.workers == [1]
  del bench.hands[0]
  bench.complete()


def test_a_lead_that_comes_back_knows_how_long_jobs_take():
  """Or a worker that hangs as the lead is killed is waited for as at the start,
  if the others wait for it."""
  bench, first, second = after_five_jobs()
  bench.start_shard(0)
  for hand in (first, second):
    hand.reconnect(0)
  bench.now = 10.0
  second.push()
  # T is 3, as before; nothing was heard of worker 0 since the lead came back.
  bench.tick(13.9)
  assert bench.lead.role.watch.late_workers == {0, 1}
  bench.tick(14.1)
  assert bench.lead._expelled == [0]
  # When all have ended it is not known how quick those are that come.
  bench.hands.clear()
  bench.start_shard(0, resumed=True)
  bench.join(0)
  bench.tick(40.0)
  assert bench.lead.role.watch.late_workers == set()
  bench.complete()


# Messages of the dead.


def test_a_message_that_is_written_too_late_spoils_no_other():
  """A worker that was taken for dead may still be alive and write where it was
  told to write. Nothing that counts may lie there."""
  bench = Bench(one(jobs=6, log=6))
  zombie, other = bench.join(0, 1)
  slot = zombie.tickets[0][0].message
  bench.lead.expel(0, 1.0)
  other.push()
  other.push()  # the job that the dead one had
  state = bits(bench.server_state)
  late = np.full_like(bench.lead.state.server.params, 9.0)
  bench.memories[0].write(MESSAGES, slot, late, message_stamp(0, 0))
  bench.start_shard(0)
  assert bits(bench.server_state) == state


def test_after_a_pause_nothing_is_started_at_those_who_join_later_either():
  bench = Bench(one())
  hand = bench.join(0)
  bench.lead.pause()
  hand.push()
  bench.join(1)
  assert bench.lead.workers == [0, 1]
  assert not bench.lead.status()["busy"]
  starts = [e for e in bench.journals[0].events() if e.action == base.SEND]
  assert [event.worker for event in starts] == [0]
