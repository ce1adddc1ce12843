"""A killed shard recovers without a loss, or reports which updates are lost."""


import numpy as np
import pytest
from kit import bits
from shard_bench import KINDS, Bench, Memory, audit, crew, describe, one, play

from asgd import base
from asgd.live import frames
from asgd.live.deadlines import Ladder
from asgd.live.frames import Frame
from asgd.live.shard import images
from asgd.orders.protocol import Rules
from asgd.orders.trace import follow


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_by_hand_is_replayed_to_the_same_bits(kind):
  rules, name, options = KINDS[kind]
  bench = Bench(one(jobs=24, rules=rules, log=3), name, **options)
  for _ in play(bench, seed=1):
    audit(bench.lead)
  bench.complete()


def incarnations_of(events):
  """Returns worker -> incarnation of the workers present after these rows."""
  ledger = follow(events)
  return {worker: ledger.incarnations[worker] for worker in ledger.present}


def open_slots(events):
  """Slots of the parameters of tickets that are open."""
  tickets = follow(events).open.values()
  return {event.params for seqs in tickets for event in seqs.values()}


@pytest.mark.slow
@pytest.mark.parametrize("too_early", [False, True])
@pytest.mark.parametrize("kind", ["cache", "depth", "fetch_every", "round"])
def test_a_shard_that_is_killed_at_any_entry_is_as_it_was(kind, too_early):
  """The shard is killed after it wrote an event and before it sent a frame, or
  after it applied the event and before it wrote it."""
  rules, name, options = KINDS[kind]
  setup = one(jobs=15, rules=rules, log=3)

  bench = Bench(setup, name, **options)
  was = [(describe(bench.lead), audit(bench.lead))]
  bench.journals[0].watch = lambda count: was.append(
    (describe(bench.lead), audit(bench.lead))
  )
  for _ in play(bench, seed=2, steps=20):
    pass
  events, rows = bench.journals[0].events(), bench.rows()
  assert {base.LOST, base.REJECT, base.LEAVE} < {e.action for e in events}

  for kill_at in range(1, len(events) + 1):
    bench = Bench(setup, name, **options)
    journal = bench.journals[0]
    journal.kill_at, journal.too_early = kill_at, too_early
    for _ in play(bench, seed=2, steps=20):
      if bench.lead is None:
        break
    assert bench.lead is None
    written = journal.events()
    assert written == events[: kill_at - too_early]
    # Workers go on meanwhile, and read what they were sent.
    bench.memories[0].guarded = open_slots(written)
    bench.start_shard(0)
    bench.memories[0].guarded = ()
    # Somebody who was leaving has left.
    recovered = bench.journals[0].events()
    assert bench.rows() == rows[: len(recovered)]
    assert recovered == written or written[-1].action in (
      base.LOST,
      base.REJECT,
    )
    state, free = was[len(recovered)]
    assert describe(bench.lead) == state
    # A snapshot may have been made for the event that was not written. Of a
    # message that had come it is not known that it had: its slot rests.
    params, messages = audit(bench.lead)
    assert too_early or params == free[0]
    assert too_early or set(messages) <= set(free[1])
    incarnations = incarnations_of(recovered)
    assert bench.lead.workers == sorted(incarnations)
    for worker, hand in bench.hands.items():
      hand.listen()
      hand.reconnect(0)
      if not hand.out and worker in incarnations:
        assert hand.listen()[0] == f"welcome {incarnations[worker]}"
    bench.complete()
    assert journal.events()[: len(written)] == written


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_log_a_shard_goes_back_to_its_last_snapshot(kind):
  rules, name, options = KINDS[kind]
  bench = Bench(one(jobs=30, rules=rules, log=0), name, **options)
  saved, row = bits(bench.server_state), 0  # none so far: where it began
  for step, _ in enumerate(play(bench, seed=3, steps=40)):
    if step in (12, 27):
      images.save_snapshot(bench.lead.state)
      saved, row = bits(bench.server_state), bench.lead.state.rows
    if step in (8, 20, 25, 38):
      before = describe(bench.lead)
      assert before["state"] != saved
      bench.start_shard(0)
      audit(bench.lead)
      assert bench.rows()[-1] == f"rollback 0:{row}"
      after = describe(bench.lead)
      assert after == {**before, "state": saved, "rows": before["rows"] + 1}
      for hand in bench.hands.values():
        hand.reconnect(0)
      bench.settle()
  assert step == 40
  bench.complete(some=True)


def test_a_shard_that_lost_nothing_does_not_say_so():
  bench = Bench(one(log=0))
  hand = bench.join(0)
  hand.push()
  images.save_snapshot(bench.lead.state)
  bench.join(1)
  state, rows = bits(bench.server_state), bench.rows()
  bench.start_shard(0)
  assert bits(bench.server_state) == state
  assert bench.rows() == rows
  assert rows == [
    *("join 0:0", "send 0:0", "receive 0:0", "send 0:1", "join 1:0", "send 1:2")
  ]


def test_without_a_log_a_snapshot_is_made_now_and_then():
  bench = Bench(one(log=0, snapshot_seconds=10.0, ladder=Ladder(start=99.0)))
  hand = bench.join(0)
  hand.push()
  bench.tick(9.0)
  assert bench.memories[0].load() is None
  bench.tick(10.5)
  state = bits(bench.server_state)
  assert bits(bench.memories[0].load()[0]) == state
  hand.push()
  bench.tick(20.0)
  assert bits(bench.memories[0].load()[0]) == state
  bench.tick(21.0)
  assert bits(bench.memories[0].load()[0]) == bits(bench.server_state)


def test_with_a_log_a_snapshot_is_made_when_it_is_full():
  bench = Bench(one(jobs=9, log=3))
  hand = bench.join(0)
  saved = []
  for _ in range(8):
    hand.push()
    snapshot = bench.memories[0].load()
    saved.append(snapshot and snapshot[1]["received"])
  # Before the ticket that follows on the third, sixth, ... message.
  assert saved == [None, None, 3, 3, 3, 6, 6, 6]


def test_records_that_were_flushed_are_not_made_twice():
  bench = Bench(one(log=8))
  hand = bench.join(0)
  for _ in range(3):
    hand.push()
  bench.tick(1.0)  # flushes them
  assert bench.sinks[0].records().job.tolist() == [0, 1, 2]
  bench.start_shard(0)
  bench.complete()


def test_parameters_are_kept_for_evaluations():
  bench = Bench(one(jobs=6, log=2, keep_params_at=(2, 5)))
  hand = bench.join(0)
  states = []
  while hand.ready():
    hand.push()
    states.append(np.array(bench.server_state.params))
  kept = bench.lead.state.messages.kept_params
  assert sorted(kept) == bench.lead.status()["kept_params"] == [2, 5]
  for received, params in kept.items():
    np.testing.assert_array_equal(params, states[received - 1])


@pytest.mark.parametrize("log", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_outlives_the_memory(kind, log):
  """All processes have exited and the memory is lost; only the journal and an
  image of the state remain."""
  rules, name, options = KINDS[kind]
  bench = Bench(one(jobs=24, rules=rules, log=log), name, **options)
  image, saved, row = None, bits(bench.server_state), 0
  for step, _ in enumerate(play(bench, seed=4, steps=24)):
    if step == 12:
      image = bench.lead.image()
      saved, row = bits(bench.server_state), bench.lead.state.rows
    if step in (8, 20):
      bench.memories[0] = Memory()
      bench.memories[0].is_new = True
      bench.hands.clear()
      events = len(bench.journals[0].events())
      was_open = sorted((w, held.job) for (w, _), held in tickets_of(bench))
      bench.start_shard(0, image=image, resumed=True)
      audit(bench.lead)
      assert bits(bench.server_state) == saved
      rows = bench.rows(start=events)
      assert rows[0] == f"rollback 0:{row}"
      lost = [text for text in rows if text.startswith("lost")]
      assert sorted(lost) == sorted(f"lost {w}:{job}" for w, job in was_open)
      assert bench.lead.workers == bench.lead.role.dispatcher.workers == []
      assert not bench.lead.state.tickets
      bench.memories[0].is_new = False
  bench.complete(some=True)


# Files that another program changed or cut short.


def lose_everything(bench, **kwargs):
  """Kills all processes; only the arguments remain."""
  bench.hands.clear()
  bench.start_shard(0, resumed=True, **kwargs)
  bench.settle()
  audit(bench.lead)


def forget_memory(bench):
  bench.memories[0] = Memory()
  bench.memories[0].is_new = True


@pytest.mark.parametrize("log", [0, 4])
@pytest.mark.parametrize("resumed", [False, True])
def test_without_its_snapshot_a_shard_goes_back_to_the_checkpoint(log, resumed):
  bench = Bench(one(jobs=24, log=log), "dana_zero")
  play_on = play(bench, seed=4, steps=24)
  for step, _ in enumerate(play_on):
    if step == 8:
      image, saved = bench.lead.image(), bits(bench.server_state)
      row, received = bench.lead.state.rows, bench.received[0]
    if step == 16:
      images.save_snapshot(bench.lead.state)
      before = bench.received[0]
      bench.memories[0].damaged = True
      if resumed:
        bench.hands.clear()
      bench.start_shard(0, image=image, resumed=resumed)
      audit(bench.lead)
      assert bits(bench.server_state) == saved
      assert f"rollback 0:{row}" in bench.rows()
      back = bench.lead.status()["rollback"]
      assert back[:3] == (row, received, before - received)
      assert back.reason == "the snapshot is damaged"
      bench.memories[0].damaged = False
      # It has saved where it is: to be killed again costs nothing more.
      bench.start_shard(0, image=image)
      audit(bench.lead)
      assert bits(bench.server_state) == saved
      assert sum("rollback" in text for text in bench.rows()) == 1
      for hand in bench.hands.values():
        hand.reconnect(0)
      bench.settle()
  bench.complete(some=True)


def test_killed_again_after_a_rollback_it_does_not_begin_anew():
  bench = Bench(one(jobs=12, log=8))
  hand = bench.join(0)
  hand.push()
  image, saved = bench.lead.image(), bits(bench.server_state)
  hand.push()
  forget_memory(bench)
  lose_everything(bench, image=image)
  bench.memories[0].is_new = False
  assert bits(bench.server_state) == saved
  for before in (True, False):  # it has saved that, or was killed before
    if before:
      bench.memories[0].forget()
    lose_everything(bench, image=image)
    assert bits(bench.server_state) == saved
  bench.complete(some=True)


def test_without_a_log_it_goes_back_to_the_beginning_as_often_as_it_is_killed(
  monkeypatch,
):
  # If it gave up the memory for that, one that is killed meanwhile would take
  # it for removed.
  bench = Bench(one(jobs=12, log=0))
  start = bits(bench.server_state)
  monkeypatch.setattr(bench.memories[0], "forget", lambda: pytest.fail("given"))
  hand = bench.join(0)
  for _ in range(3):
    hand.push()
    bench.start_shard(0)
    assert bench.rows()[-1] == "rollback 0:0"
    assert bits(bench.server_state) == start
    hand.reconnect(0)
    bench.settle()
  bench.complete(some=True)


def test_a_checkpoint_of_before_a_rollback_is_of_no_use():
  # A damaged snapshot takes the shard to its beginning; then the memory goes,
  # before the driver has made a checkpoint of that.
  bench = Bench(one(jobs=12, log=8))
  start = bits(bench.server_state)
  hand = bench.join(0)
  hand.push()
  image = bench.lead.image()
  bench.memories[0].damaged = True
  bench.start_shard(0)
  bench.memories[0].damaged = False
  assert bits(bench.server_state) == start
  forget_memory(bench)
  lose_everything(bench, image=image)
  assert bits(bench.server_state) == start
  bench.complete(some=True)


def test_a_trace_that_was_cut_short_goes_back_to_the_checkpoint():
  bench = Bench(one(jobs=12, log=3))
  hand = bench.join(0)
  hand.push()
  image, saved = bench.lead.image(), bits(bench.server_state)
  for _ in range(6):
    hand.push()
  rows = bench.lead.state.rows
  del bench.journals[0]._events[7:]
  with pytest.raises(ValueError, match="has 7 rows, the snapshot is of"):
    bench.start_shard(0, image=image)  # workers live, and know better
  lose_everything(bench, image=image)
  assert bits(bench.server_state) == saved
  why = bench.lead.status()["rollback"].reason
  assert why.startswith("journal has 7 rows, the snapshot is of row")
  assert bench.lead.state.rows < rows
  bench.complete(some=True)


def test_a_trace_shorter_than_the_checkpoint_is_refused():
  bench = Bench(one(jobs=12))
  hand = bench.join(0)
  hand.push()
  hand.push()
  image = bench.lead.image()
  del bench.journals[0]._events[3:]
  forget_memory(bench)
  message = f"journal has 3 rows, the checkpoint is of row {image[1]['rows']}"
  with pytest.raises(ValueError, match=message):
    lose_everything(bench, image=image)


def test_records_that_are_gone_are_missed():
  bench = Bench(one(jobs=12, log=3))
  hand = bench.join(0)
  for _ in range(7):
    hand.push()
  bench.sinks[0].truncate(2)
  with pytest.raises(ValueError, match="records has 2 records where"):
    lose_everything(bench)


def change(bench, row, **fields):
  events = bench.journals[0]._events
  events[row] = events[row]._replace(**fields)


def test_a_row_that_was_changed_is_no_riddle():
  bench = Bench(one(jobs=12, log=3))
  hand = bench.join(0)
  for _ in range(7):
    hand.push()
  saved = bench.memories[0].load()[1]["rows"]
  whole = bench.journals[0].events()
  last = max(i for i, e in enumerate(whole) if e.action == base.RECEIVE)
  early = next(i for i, e in enumerate(whole) if e.action == base.RECEIVE)
  assert early < saved < last
  for row, fields in (
    (last, dict(seq=999)),
    (last, dict(worker=1)),
    (last + 1, dict(message=99)),
    (early, dict(worker=1)),
    (early, dict(action=base.LOST)),
  ):
    change(bench, row, **fields)
    unusable = "^journal (cannot be replayed|is not)"
    with pytest.raises(ValueError, match=unusable):
      lose_everything(bench)
    bench.journals[0]._events[:] = whole
  lose_everything(bench)
  bench.complete()


def tickets_of(bench):
  return bench.lead.state.tickets.items()


def test_a_kill_between_the_end_of_tickets_and_their_leave_forgets_nobody():
  # A connection broke; the shard was killed before it wrote that the worker
  # has left. What that believes to be there is lost: it is no holder any more.
  bench = Bench(crew(rules=Rules(depth=2)))
  bench.join(0)
  bench.shards[1].disconnect(0, bench.now)
  events = bench.journals[1]._events
  assert [e.action for e in events[-3:]] == [base.LOST, base.LOST, base.LEAVE]
  del events[-1]
  bench.start_shard(1)
  said = []
  hello = Frame(frames.HELLO, 0, job=0)
  bench.shards[1].handle(hello, said.append, bench.now)
  assert [frame.kind for frame in said] == [frames.EXPEL]
