"""Peers that say what no worker and no follower of the run would say: it ends
their connection (BadFrame), and changes nothing for others."""

import pytest
from shard_bench import Bench, Hand, audit, crew, one, team

from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.shard.role import MOST_AHEAD
from asgd.live.slots import MESSAGES, message_stamp
from asgd.orders.protocol import Rules


def refused(hand, shard, frame, why):
  """A shard refuses a frame, and its connection ends."""
  before = hand.bench.rows(shard)
  with pytest.raises(frames.BadFrame, match=why):
    hand.tell(shard, frame)
  assert hand.bench.rows(shard) == before
  hand.bench.shards[shard].disconnect(
    hand.worker, hand.bench.now, hand.ways[shard]
  )


# Messages that are not there.


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("make", [crew, team])
def test_a_message_that_was_not_written_is_not_taken(make, shard):
  bench = Bench(make())
  hand = bench.join(0)
  ticket = hand.tickets[0][shard]
  bench.memories[shard].write(MESSAGES, ticket.message, None, 0)
  push = Frame(frames.PUSH, 0, 0, ticket.job, flag=1, message=ticket.message)
  refused(hand, shard, push, "message 0, which does not lie in slot")
  hand.vanish()
  bench.finish()
  bench.check_once(shard)


def test_a_message_that_another_memory_has_is_an_error(monkeypatch):
  bench = Bench(one())
  hand = bench.join(0)

  def replaced():
    raise ValueError("the shared memory is gone")

  monkeypatch.setattr(bench.memories[0], "adopt", replaced)
  slot = hand.tickets[0][0].message
  bench.memories[0].write(MESSAGES, slot, None, message_stamp(1, 0))
  with pytest.raises(ValueError, match="the shared memory is gone"):
    hand.tell(0, Frame(frames.PUSH, 0, 0, 0, flag=1, message=slot))


# What followers say.


def test_only_a_follower_tells_what_it_has():
  bench = Bench(team())
  hand = bench.join(0)
  pushes = hand.work(0)
  hand.tell(0, pushes[0])
  stranger = Hand(bench, 1)
  stranger.tell(0, Frame(frames.PREPARED, 0, 0, job=1))
  bench.settle()
  assert bench.received[0] == 0
  hand.tell(1, pushes[1])
  bench.settle()
  assert bench.received == [1, 1]


def test_a_follower_is_heard_of_open_tickets_alone():
  bench = Bench(team())
  bench.join(0)
  said = []
  bench.lead.handle(Frame(frames.FOLLOW, 1), said.append, 0.0)
  for seq in range(50):
    frame = Frame(frames.PREPARED, 0, seq, job=1)
    bench.lead.handle(frame, said.append, 0.0)
  assert bench.lead.role._prepared == {(0, 0): {1}}


# Numbers of holders.


@pytest.mark.parametrize("make", [crew, team])
def test_a_holder_that_cannot_be_is_refused(make):
  bench = Bench(make())
  hand = bench.join(0)
  hand.listen()
  stranger = Hand(bench, 0)
  for number in (MOST_AHEAD + 1, 2**31 - 1, 2**40):
    hello = Frame(frames.HELLO, 0, job=number)
    refused(stranger, 1, hello, "cannot receive Frame|sends Frame")
  hand.reconnect(1)
  assert hand.listen() == ["welcome 0", "ticket 0: job 0 v0"]
  bench.finish()
  bench.check_once(1)


@pytest.mark.parametrize("make", [crew, team])
@pytest.mark.parametrize("killed", [False, True])
def test_a_shard_may_have_missed_some_holders(make, killed):
  bench = Bench(make())
  for _ in range(3):
    bench.join(0).vanish()
  if killed:
    bench.start_shard(1)
    bench.settle()
  assert bench.shards[1].state.latest_incarnations == {0: 2}
  hand = Hand(bench, 0)
  hand.tell(1, Frame(frames.HELLO, 0, job=2 + MOST_AHEAD))
  assert hand.listen() == [f"welcome {2 + MOST_AHEAD}"]


# What an independent shard is asked for.


def fetch(seq, job=0):
  return Frame(frames.FETCH, 0, seq, job)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_worker_holds_no_more_tickets_than_the_rules_allow(depth):
  bench = Bench(crew(rules=Rules(depth=depth)))
  bench.join(0).vanish()
  hand = Hand(bench, 0)
  hand.tell(1, Frame(frames.HELLO, 0, job=1))
  for number in range(depth):
    hand.tell(1, fetch(depth + number, job=number))
  assert len(bench.shards[1].state.tickets) == depth
  refused(hand, 1, fetch(2 * depth, job=8), "asks shard 1 for job 8")
  audit(bench.shards[1])
  bench.finish()
  bench.check_once(1)


def test_a_job_is_open_once_at_a_place():
  bench = Bench(crew(rules=Rules(depth=2)))
  hand = Hand(bench, 0)
  hand.tell(1, Frame(frames.HELLO, 0, job=0))
  hand.tell(1, fetch(0, job=4))
  hand.tell(1, fetch(0, job=4))  # it did not hear the answer
  assert hand.listen() == ["welcome 0", *2 * ["ticket 0: job 4 v0"]]
  refused(hand, 1, fetch(1, job=4), r"has \[4\] open")


def test_tickets_of_all_places_fit_into_the_memory():
  bench = Bench(crew(rules=Rules(round=2, backup=1)))
  hands = [Hand(bench, worker) for worker in range(3)]
  with pytest.raises(frames.BadFrame, match="asks shard 1"):
    for worker, hand in enumerate(hands):
      hand.tell(1, Frame(frames.HELLO, worker, job=0))
      for seq in range(4):
        hand.tell(1, Frame(frames.FETCH, worker, seq, seq))
  audit(bench.shards[1])


def test_a_place_whose_number_a_stranger_has_used_is_not_lost():
  bench = Bench(crew())
  hand = Hand(bench, 0)
  hand.tell(1, Frame(frames.HELLO, 0, job=0))
  refused(hand, 1, fetch(bench.setup.jobs + MOST_AHEAD + 1), "as its 110")
  hand.tell(1, Frame(frames.HELLO, 0, job=0))
  hand.tell(1, fetch(3))
  bench.shards[1].disconnect(0, 0.0, hand.ways[1])
  honest = bench.join(0)
  for _ in range(5):
    if honest.out:  # its job was another's: it begins anew, with the next
      honest.send(frames.BYE)
      honest = bench.join(0)
  assert honest.ready() == [4]
  bench.finish()
  bench.check_once(1)


# What is said again, and what is said first.


@pytest.mark.parametrize("make", [crew, team])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_push_that_is_said_again_is_acknowledged_again(make, shard):
  """Its acknowledgement was lost: a worker without it hands in no more."""
  bench = Bench(make())
  hand = bench.join(0)
  hand.push()
  push = [f for s, f in hand.heard if (s, f.kind) == (shard, frames.ACK)]
  assert len(push) == 1
  hand.heard.clear()
  hand.tell(shard, Frame(frames.PUSH, 0, 0, 0, flag=1))
  bench.settle()
  assert hand.heard == [(shard, Frame(frames.ACK, 0, 0))]


@pytest.mark.parametrize("missing", [1, 2])
def test_a_message_waits_for_each_follower(missing):
  bench = Bench(team(shards=3))
  hand = bench.join(0)
  pushes = hand.work(0)
  for shard in {0, 1, 2} - {missing}:
    hand.tell(shard, pushes[shard])
  bench.settle()
  assert bench.rows() == ["join 0:0", "send 0:0"]
  hand.tell(missing, pushes[missing])
  bench.settle()
  for index in range(3):
    assert bench.rows(index, start=2) == ["receive 0:0", "send 0:1"]


@pytest.mark.parametrize("make", [crew, team])
def test_no_frame_tells_of_a_row_that_is_not_in_the_journal(make):
  """A shard that is killed in between would not know what it had said."""
  bench = Bench(make())
  role, journal = bench.lead.role, bench.journals[0]
  written, said = [], []
  journal.watch = lambda count: written.append(len(said))

  def send(frame):
    said.append((frame.kind, len(journal.events())))

  if bench.setup.consistent:
    role.followers = {1: send}
  bench.lead.handle(Frame(frames.HELLO, 0, job=-1), send, 0.0)
  rows = frames.ROW, frames.TICKET, frames.ACK
  told = [(kind, count) for kind, count in said if kind in rows]
  assert written[0] == 0
  if bench.setup.consistent:  # each row, once it is there
    assert told[:2] == [(frames.ROW, 1), (frames.ROW, 2)]
  assert told[-1] == (frames.TICKET, 2)


def test_a_loop_in_whose_place_another_was_started_is_late():
  # It was expelled, and began anew before it heard that it is replaced.
  bench = Bench(one())
  old, new = Hand(bench, 0), Hand(bench, 0)
  old.hello()
  new.hello(restarts=1)
  rows = bench.rows()
  old.hello()
  assert bench.rows() == rows
  assert bench.lead.status()["workers"] == [0]
  ahead = Frame(frames.HELLO, 0, 2 + MOST_AHEAD, -1)
  refused(new, 0, ahead, "too far ahead of loop 1")
