"""Facts of tables: by hand, by closed form, and by running them naively."""

import collections
from random import Random

import kit
import numpy as np
import pipeline_kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_kit import one_f_one_b

from asgd import base
from asgd.pipeline import analyze, validate
from asgd.pipeline import table as table_lib
from asgd.pipeline.table import ScheduleError

quick = settings(deadline=None, derandomize=True, max_examples=60)


def valid(*lines, **options):
  return validate.validate(pipeline_kit.table(*lines, **options))


def pieces(made, cost):
  """{F0@0: (start, end)} by device-free names."""
  timing = analyze.times(made, cost)
  return {
    f"{task.action}{task.microbatch}@{task.stage}": (start, end)
    for task, start, end in zip(
      made.tasks, timing.start.tolist(), timing.end.tolist(), strict=True
    )
  }


# Times.


def test_uneven_costs_and_transfers_by_hand():
  made = valid("0 | F0 F1 . . B0 B1", "1 | . F0 F1 B0 B1 .")
  cost = analyze.costs(
    2, forward=[1, 3], backward=[2, 4], transfer=0.5, transfer_back=[0.25]
  )
  assert pieces(made, cost) == {
    "F0@0": (0, 1),
    "F1@0": (1, 2),
    "F0@1": (1.5, 4.5),  # the activation was half on its way
    "F1@1": (4.5, 7.5),
    "B0@1": (7.5, 11.5),
    "B1@1": (11.5, 15.5),
    "B0@0": (11.75, 13.75),
    "B1@0": (15.75, 17.75),
  }
  found = analyze.analyze(made, cost)
  assert found.makespan == 17.75
  assert found.busy.tolist() == [6, 14]
  assert found.idle.tolist() == [11.75, 3.75]
  assert found.bubble_of_total == pytest.approx(15.5 / 35.5)
  assert found.bubble_of_ideal == pytest.approx(15.5 / 20)
  assert found.sent.tolist() == [2, 2]


def test_a_transfer_on_the_same_device_takes_nothing():
  made = valid("0 | F0@0 F0@1 B0@1 B0@0", every=1)
  cost = analyze.costs(2, transfer=9)
  found = analyze.analyze(made, cost, boundary=7)
  assert found.makespan == 6
  assert found.bubble_of_total == found.bubble_of_ideal == 0
  assert found.sent.tolist() == [0]


def test_one_stage_sends_nothing():
  found = analyze.analyze(valid("0 | F0 B0", every=1))
  assert (found.makespan, found.sent.tolist()) == (3, [0])


def test_split_backward_by_hand():
  made = valid("0 | F0 . . I0 W0", "1 | . F0 I0 W0 .", every=1)
  cost = analyze.costs(2, input=2, weight=5, transfer=1)
  assert pieces(made, cost) == {
    "F0@0": (0, 1),
    "F0@1": (2, 3),
    "I0@1": (3, 5),
    "W0@1": (5, 10),
    "I0@0": (6, 8),  # does not wait for W0@1
    "W0@0": (8, 13),
  }


@pytest.mark.parametrize("overlap, length", [(None, 3), (2.5, 2.5)])
def test_a_block_begins_when_both_can_and_takes_overlap(overlap, length):
  made = valid("0 | F0 . . F1&B0 . . B1", "1 | . F0 B0 . F1 B1 .")
  cost = analyze.costs(2, overlap=overlap)
  times = pieces(made, cost)
  assert times["F1@0"] == times["B0@0"] == (4, 4 + length)
  assert times["F1@1"][0] == 4 + length
  found = analyze.analyze(made, cost)
  assert found.makespan == 9 + length
  assert found.busy.tolist() == [3 + length, 6]


def test_a_flush_waits_at_every_replica_of_the_stage():
  lines = (
    "0 | F0@0 .    .    B0@0 .    .    F2@0 .    .    B2@0 .    .",
    "1 | F1@0 .    .    .    .    B1@0 F3@0 .    .    .    .    B3@0",
    "2 | .    F0@1 B0@1 F1@1 B1@1 .    .    F2@1 B2@1 F3@1 B3@1 .",
  )
  cost = analyze.costs(2)
  waits = pieces(valid(*lines, flush=True), cost)
  goes = pieces(valid(*lines), cost)
  # Device 0 has done its part at 6, device 1 at 9.
  assert waits["B0@0"] == (4, 6) and waits["B1@0"] == (7, 9)
  assert waits["F2@0"] == waits["F3@0"] == (9, 10)
  assert goes["F2@0"] == (6, 7) and goes["F3@0"] == (9, 10)
  # The replica that is last in time counts, not the last in the table.
  late = valid(lines[0].replace(".   ", "slow", 1), *lines[1:], flush=True)
  waits = pieces(late, cost._replace(own={"slow": 20.0}))
  assert waits["B0@0"] == (21, 23) and waits["B1@0"] == (7, 9)
  assert waits["F2@0"] == waits["F3@0"] == (23, 24)


def test_own_actions_take_the_time_they_are_given():
  made = valid("0 | F0 sync B0 log0", every=1)
  found = analyze.analyze(made, analyze.costs(1, own={"sync": 4.0}))
  assert found.timing.start.tolist() == [0, 1, 5, 7]
  assert (found.makespan, found.busy.tolist()) == (7, [7])


# Costs.


def test_numbers_stand_for_all_stages():
  cost = analyze.costs(3, forward=2, weight=[1, 2, 3], transfer=[4, 5])
  assert cost.forward.tolist() == [2, 2, 2]
  assert cost.backward.tolist() == [2, 3, 4]  # inputs and weights
  assert cost.transfer_back.tolist() == [4, 5]
  assert analyze.costs(1).transfer.tolist() == []


test_costs_are_checked = kit.refuses(
  [
    ({"forward": [1, 2]}, r"forward must be a number or 3 .* of shape \(2,\)"),
    ({"transfer": [1, 2, 3]}, "transfer must be a number or 2 of them"),
    ({"backward": -1}, "backward must be finite and not negative, not -1"),
    ({"input": float("nan")}, "input must be finite and not negative, not nan"),
    ({"overlap": -0.5}, "overlap must be finite and not negative"),
    ({"own": {"sync": float("inf")}}, "sync must be finite"),
    ({"own": {"B": 1.0}}, "own='B' is no action of the user's own"),
    ({"forward": 1e300}, r"forward must be at most 1e\+30, not 1e\+300"),
  ],
  lambda kwargs: analyze.costs(3, **kwargs),
)


def test_costs_must_be_of_the_table_s_stages():
  made = one_f_one_b(3, 3)
  for stages in (2, 4):
    said = rf"of {stages} stages, .* 3: make them with analyze.costs\(3"
    with pytest.raises(ValueError, match=said):
      analyze.analyze(made, analyze.costs(stages))


# Bubbles, memory, transfers.


@quick
@given(
  st.integers(1, 6),
  st.integers(1, 9),
  st.sampled_from([0.5, 1.0, 3.0]),
  st.sampled_from([0.5, 2.0]),
)
def test_1f1b_is_its_closed_form(p, m, forward, backward):
  made = one_f_one_b(p, m)
  cost = analyze.costs(p, forward=forward, backward=backward)
  found = analyze.analyze(made, cost)
  both = forward + backward
  assert found.makespan == pytest.approx((m + p - 1) * both)
  assert found.bubble_of_total == pytest.approx((p - 1) / (m + p - 1))
  assert found.bubble_of_ideal == pytest.approx((p - 1) / m)
  np.testing.assert_allclose(found.idle, (p - 1) * both)
  np.testing.assert_array_equal(
    found.peak_activations, np.minimum(p - np.arange(p), m)
  )
  assert found.sent.sum() == 2 * (p - 1) * m


def test_64_stages_and_1024_microbatches_are_the_closed_form():
  p, m = 64, 1024
  made = validate.validate(one_f_one_b(p, m, every=1, flush=False))
  found = analyze.analyze(made)
  assert found.makespan == 3 * (m + p - 1)
  assert found.bubble_of_total == pytest.approx((p - 1) / (m + p - 1))
  stages = np.arange(p)
  np.testing.assert_array_equal(found.peak_activations, p - stages)
  np.testing.assert_array_equal(found.weight_versions, p - stages)
  behind = np.minimum(np.arange(m)[None], p - 1 - stages[:, None])
  np.testing.assert_array_equal(found.staleness.forward, behind)


def test_the_peak_is_in_the_units_of_each_stage():
  made = valid("0 | F0@0 F0@1 F1@0 B0@1 B0@0 F1@1 B1@1 B1@0")
  found = analyze.analyze(made, activation=[10, 1])
  assert found.peak_activations.tolist() == [21]
  found = analyze.analyze(made, activation=[1, 10])
  assert found.peak_activations.tolist() == [12]


def test_activations_are_held_until_the_weights_are_done():
  late = valid("0 | F0 I0 F1 I1 W0 W1")
  early = valid("0 | F0 I0 W0 F1 I1 W1")
  assert analyze.analyze(late).peak_activations.tolist() == [2]
  assert analyze.analyze(early).peak_activations.tolist() == [1]


def test_a_block_holds_both():
  made = valid("0 | F0 F1&B0 B1")
  assert analyze.analyze(made).peak_activations.tolist() == [2]


def test_bytes_go_with_the_border():
  made = one_f_one_b(3, 2)
  found = analyze.analyze(made, boundary=[10, 100])
  # Forward from 0 and 1, back from 1 and 2, two microbatches each.
  assert found.sent.tolist() == [20, 2 * (100 + 10), 200]


def test_inference_has_times_and_no_versions():
  made = valid("0 | F0 F1 .", "1 | . F0 F1")
  found = analyze.analyze(made)
  assert (found.makespan, found.sent.tolist()) == (3, [2, 0])
  assert found.weight_versions.tolist() == [1, 1]
  assert not found.staleness.forward.any()
  with pytest.raises(ValueError, match="t has no backward"):
    analyze.traces(made)


# Versions. 1F1B without a flush, three stages, an update for each microbatch:
#
#   slot  0  1  2  3  4  5  6  7  8  9 10 11
#   0  |  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
#   1  |  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
#   2  |  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
#
# Backward i is update i everywhere, so what is read is what has been before.

THREE = one_f_one_b(3, 4, every=1, flush=False)
LATEST_FORWARD = [[0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3]]
LATEST_BACKWARD = [[0, 1, 2, 3]] * 3


NINE = one_f_one_b(3, 9, every=3, flush=False)
READ_BY_THE_FIRST = [LATEST_FORWARD[0]] * 3
# The last stage is at 2 when it does B2 with version 0 of "vertical", and keeps
# 1 for B3.
BY_HAND = {
  "latest": (THREE, LATEST_FORWARD, LATEST_BACKWARD, [1, 1, 1]),
  "stash": (THREE, LATEST_FORWARD, LATEST_FORWARD, [3, 2, 1]),
  "vertical": (THREE, READ_BY_THE_FIRST, READ_BY_THE_FIRST, [3, 3, 3]),
  "2bw": (NINE, *[[[0] * 6 + [1] * 3] * 3] * 2, [2, 2, 2]),
}
OLD = {
  "latest": ([[0, 1, 2, 2], [0, 1, 1, 1], [0] * 4], [[0] * 4] * 3),
  "stash": ([[0, 1, 2, 2], [0, 1, 1, 1], [0] * 4],) * 2,  # p - 1 - s at last
  "vertical": ([[0, 1, 2, 2]] * 3,) * 2,  # the first one's
  "2bw": ([[0] * 3 + [1] * 6] * 3,) * 2,
}


@pytest.mark.parametrize("weights", BY_HAND)
def test_versions_by_hand(weights):
  made, forward, backward, held = BY_HAND[weights]
  read = analyze.versions(made, weights)
  updates = [i // made.every for i in range(made.microbatches)]
  assert read.update.tolist() == [updates] * 3
  assert read.forward.tolist() == forward
  assert read.backward.tolist() == backward
  old = analyze.staleness(made, weights)
  assert (old.forward.tolist(), old.backward.tolist()) == OLD[weights]
  assert analyze.weight_versions(made, weights).tolist() == held


def test_2bw_needs_as_many_microbatches_in_an_update_as_stages():
  with pytest.raises(ScheduleError) as caught:
    analyze.versions(THREE, "2bw")
  assert str(caught.value) == (
    "1f1b: stage 0 needs version 1 for microbatch 2 and has made 0:"
    " weights='2bw' needs more microbatches in an update (every=1, 3 stages)"
  )
  for p in (2, 3, 5):
    made = one_f_one_b(p, 4 * p, every=p, flush=False)
    assert analyze.weight_versions(made, "2bw").max() == 2


def test_a_flush_leaves_nothing_stale():
  orders = [
    [(a, 0, i) for i in (0, 1, 2) for a in "FB"],
    [(a, 1, i) for i in (0, 1, 2) for a in "FB"],
  ]
  made = table_lib.lay_out("t", orders, every=1, flush=True)
  for weights in ("latest", "stash", "vertical"):
    read = analyze.versions(made, weights)
    assert read.forward.tolist() == [[0, 1, 2]] * 2
    assert not any(column.any() for column in analyze.staleness(made, weights))
    assert analyze.weight_versions(made, weights).tolist() == [1, 1]


# Three forwards before the first update, then one backward and one forward.
TRUTH = {
  ("latest", 1): 1,
  ("stash", 1): 3,
  ("vertical", 1): 3,
  ("latest", 3): 1,
  ("2bw", 3): 2,
  ("stash", 3): 2,
}


@pytest.mark.parametrize("weights, every", TRUTH)
def test_versions_held_with_three_forwards_before_an_update(weights, every):
  made = valid("0 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5", every=every)
  found = analyze.weight_versions(made, weights)
  assert found.tolist() == [TRUTH[weights, every]]


def test_replicas_count_their_updates_together():
  made = valid("0 | F0@0 B0@0 F2@0 B2@0", "1 | F1@0 B1@0 F3@0 B3@0")
  read = analyze.versions(made, "stash")
  assert read.forward.tolist() == [[0, 0, 1, 1]]
  assert read.update.tolist() == [[0, 0, 1, 1]]
  # In the same slot, the first device's comes first.
  made = made._replace(every=1)
  assert analyze.versions(made, "stash").update.tolist() == [[0, 1, 2, 3]]
  assert analyze.versions(made, "stash").forward.tolist() == [[0, 0, 2, 2]]


def test_other_weights_are_refused():
  for call in (analyze.versions, analyze.staleness, analyze.weight_versions):
    with pytest.raises(ValueError, match="latest, stash, 2bw, vertical, not"):
      call(THREE, "newest")


# Orders for the simulator.


def rows_of(trace):
  names = {base.SEND: "s", base.RECEIVE: "r"}
  return " ".join(
    f"{names[action]}{job}"
    for job, action in zip(
      trace.job.tolist(), trace.action.tolist(), strict=True
    )
  )


def test_traces_of_stashed_weights_by_hand():
  found = analyze.traces(THREE)
  assert [rows_of(trace) for trace in found] == [
    "s0 s1 s2 r0 s3 r1 r2 r3",
    "s0 s1 r0 s2 r1 s3 r2 r3",
    "s0 r0 s1 r1 s2 r2 s3 r3",
  ]
  for trace in found:
    assert trace.time.tolist() == list(range(8))
    assert trace.worker.tolist() == [0] * 8
    np.testing.assert_array_equal(trace.seq, trace.job)
    kinds = [column.dtype for column in trace]
    assert kinds == [np.float64, *[np.int32] * 3, np.int8]


def test_traces_of_2bw_by_hand():
  made = one_f_one_b(2, 6, every=2, flush=False)
  for trace in analyze.traces(made, "2bw"):
    assert rows_of(trace) == "s0 s1 s2 s3 r0 r1 s4 s5 r2 r3 r4 r5"


def test_traces_of_latest_are_of_synchronous_tables_only():
  with pytest.raises(ValueError, match="no ticket holds both; use 'stash'"):
    analyze.traces(THREE, "latest")
  for trace in analyze.traces(one_f_one_b(2, 2), "latest"):
    assert rows_of(trace) == "s0 s1 r0 r1"


@quick
@given(
  st.integers(1, 4),
  st.integers(1, 4),
  st.integers(1, 3),
  st.sampled_from(["stash", "vertical", "2bw"]),
)
def test_a_trace_has_the_versions_of_the_table(p, batches, every, weights):
  every = p if weights == "2bw" else every
  made = one_f_one_b(p, batches * every, every=every, flush=False)
  read = analyze.versions(made, weights)
  for stage, trace in enumerate(analyze.traces(made, weights)):
    received, sent = 0, {}
    for job, action in zip(trace.job.tolist(), trace.action, strict=True):
      if action == base.SEND:
        sent[job] = received // every
      else:
        assert read.update[stage, job] == received // every
        received += 1
    assert [sent[job] for job in sorted(sent)] == read.forward[stage].tolist()


# Against running it naively.


def run_slots(made, cost):
  """{(action, stage, microbatch): (start, end)}, by asking again and again
  whether the next block of a device may start."""
  place = {(t.stage, t.microbatch): t.device for t in made.tasks}
  left = collections.Counter(
    (t.stage, t.microbatch // made.every)
    for t in made.tasks
    if t.action in "BW"
  )
  length = {"F": cost.forward, "B": cost.backward}
  length.update({"I": cost.input, "W": cost.weight})
  queues = [list(order) for order in pipeline_kit.orders(made)]
  free = [0.0] * made.devices
  done, gone = {}, {}
  updated = collections.defaultdict(float)

  def ready(task):
    """When what a task needs is there; None if that is not known."""
    action, s, i = task.action, task.stage, task.microbatch
    needs = []
    if action == "F" and s:
      needs.append(("f", s - 1, i, cost.transfer[s - 1]))
    if action in "BI":
      needs.append(("f", s, i, 0))
      if s + 1 < made.stages:
        needs.append(("i", s + 1, i, cost.transfer_back[s]))
    if action == "W":
      needs.append(("i", s, i, 0))
    when = 0.0
    for kind, stage, i, transfer in needs:
      if (kind, stage, i) not in gone:
        return None
      moved = place[stage, i] != task.device
      when = max(when, gone[kind, stage, i] + (transfer if moved else 0))
    before = s, i // made.every - 1
    if action == "F" and made.flush and before[1] >= 0:
      return None if left[before] else max(when, updated[before])
    return when

  while any(queues):
    for device, queue in enumerate(queues):
      whens = [ready(task) for task in queue[0]] if queue else [None]
      if None in whens:
        continue
      start = max(free[device], *whens)
      block = queue.pop(0)
      lengths = [length[t.action][t.stage] for t in block]
      overlap = len(block) > 1 and cost.overlap is not None
      end = free[device] = start + (cost.overlap if overlap else sum(lengths))
      for task in block:
        done[task.action, task.stage, task.microbatch] = start, end
        for kind in {"F": "f", "B": "iw", "I": "i", "W": "w"}[task.action]:
          gone[kind, task.stage, task.microbatch] = end
        if task.action in "BW":
          key = task.stage, task.microbatch // made.every
          left[key] -= 1
          updated[key] = max(updated[key], end)
  return done


@st.composite
def valid_tables(draw):
  """Tables of all kinds that can be run: a device takes any task that it may
  do, at random."""
  stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
  devices = draw(st.integers(1, stages))
  every = draw(st.sampled_from([1, count]))
  flush, seed = draw(st.booleans()), draw(st.integers(0, 10**6))
  random = Random(seed)
  place = {
    (s, i): s % devices if random.random() < 0.8 else random.randrange(devices)
    for s in range(stages)
    for i in range(count)
  }
  todo = {("F", s, i) for s in range(stages) for i in range(count)}
  for s in range(stages):
    for i in range(count):
      split = random.random() < 0.5
      todo |= {("I", s, i), ("W", s, i)} if split else {("B", s, i)}
  done, rows, slot = set(), [], 0

  def may(task):
    action, s, i = task
    if action == "F":
      batch = range(i // every * every) if flush else ()
      return (not s or ("f", s - 1, i) in done) and all(
        ("w", s, j) in done for j in batch
      )
    if action == "W":
      return ("i", s, i) in done
    last = s + 1 == stages
    return ("f", s, i) in done and (last or ("i", s + 1, i) in done)

  while todo:
    new = set()
    for device in range(devices):
      mine = [t for t in sorted(todo) if place[t[1:]] == device and may(t)]
      if not mine or random.random() < 0.1:
        continue
      block = [random.choice(mine)]
      back = [t for t in mine if t[0] in "BI"]
      if block[0][0] == "F" and back and random.random() < 0.5:
        block.append(random.choice(back))
      for action, s, i in block:
        todo.remove((action, s, i))
        rows.append((slot, device, s, i, action))
        kinds = {"F": "f", "B": "iw", "I": "i", "W": "w"}[action]
        new |= {(kind, s, i) for kind in kinds}
    done |= new
    slot += 1
  return table_lib.make("t", rows, every=every, flush=flush)


LENGTHS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 4.0])


@settings(quick, max_examples=100)
@given(valid_tables(), st.data())
def test_times_are_those_of_running_it(made, data):
  validate.validate(made)
  stages = made.stages

  def some(count):
    return data.draw(st.lists(LENGTHS, min_size=count, max_size=count))

  cost = analyze.costs(
    stages,
    forward=some(stages),
    backward=some(stages),
    input=some(stages),
    weight=some(stages),
    transfer=some(stages - 1),
    transfer_back=some(stages - 1),
    overlap=data.draw(st.none() | LENGTHS),
  )
  found = analyze.analyze(made, cost)
  expected = run_slots(made, cost)
  busy = np.zeros(made.devices)
  for task, *piece in zip(made.tasks, *found.timing, strict=True):
    assert tuple(piece) == expected[task[4], task[2], task[3]]
  for device, order in enumerate(pipeline_kit.orders(made)):
    for block in order:
      start, end = expected[block[0][4], block[0][2], block[0][3]]
      busy[device] += end - start
  assert found.makespan == max(end for _, end in expected.values())
  np.testing.assert_array_equal(found.busy, busy)
  total = found.makespan * made.devices
  if busy.any():
    assert found.bubble_of_total == pytest.approx(1 - busy.sum() / total)
    assert found.bubble_of_ideal == pytest.approx(total / busy.sum() - 1)


@settings(quick, max_examples=100)
@given(valid_tables(), st.sampled_from(["latest", "stash", "vertical"]))
def test_versions_are_those_of_running_it(made, weights):
  """Weights are a counter of each stage; tasks of a slot read it before any of
  them changes it."""
  if weights == "vertical" and made.flush:
    weights = "stash"
  received = [0] * made.stages
  kept = collections.defaultdict(dict)  # stage -> microbatch -> version
  forward, backward, update = {}, {}, {}
  for slot in range(made.slots):
    tasks = [task for task in made.tasks if task.time == slot]
    for task in tasks:
      key, now = task[2:4], received[task.stage] // made.every
      if task.action == "F":
        first = not task.stage or weights != "vertical"
        forward[key] = now if first else forward[0, task.microbatch]
        kept[task.stage][task.microbatch] = forward[key]
      elif task.action in "BI":
        backward[key] = now if weights == "latest" else forward[key]
    for task in tasks:
      if task.action in "BW":
        update[task[2:4]] = received[task.stage] // made.every
        received[task.stage] += 1
  found = analyze.versions(made, weights)
  for column, expected in zip(found, (forward, backward, update), strict=True):
    for key, version in expected.items():
      assert column[key] == version
  if weights == "latest":
    return
  # A version is held from when it is made until its last gradient is.
  for stage, held in enumerate(analyze.weight_versions(made, weights).tolist()):
    last, done, most = collections.Counter(), collections.Counter(), 1
    for task in made.tasks:
      if task.action in "BW" and task.stage == stage:
        version = forward[task[2:4]]
        last[version] = max(last[version], task.time)
        done[task.time] += 1
    for slot in range(made.slots):
      newest = sum(n for time, n in done.items() if time < slot) // made.every
      older = [v for v, time in last.items() if v < newest and time >= slot]
      most = max(most, 1 + len(older))
    assert held == most
