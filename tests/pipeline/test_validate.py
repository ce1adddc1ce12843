"""What cannot be run is refused, with the cell; what can be run is not."""

import re

import kit
import numpy as np
import pipeline_kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_kit import gpipe, one_f_one_b, table

from asgd.pipeline import table as table_lib
from asgd.pipeline import validate
from asgd.pipeline.table import ScheduleError

quick = settings(deadline=None, derandomize=True, max_examples=60)


def refusal(made, **limits):
  """Returns the first line of what is said, and the marked cells."""
  with pytest.raises(ScheduleError) as caught:
    validate.validate(made, **limits)
  why, _, grid = str(caught.value).partition("\n")
  return why, re.findall(r"!([^!\s]+)!", grid)


# One for each rule: (table, what it says, the marked cells).

BROKEN = {
  "no stage": (table("0 | U U0"),
    "t: the table has no task of a stage", []),
  "forward twice": (table("0 | F0 F1 B0 F1 B1"),
    "F of stage 0, microbatch 1 (device 0, slot 3) was done before, as F of"
    " stage 0, microbatch 1 (device 0, slot 1)", ["F1", "F1"]),
  "inputs twice": (table("0 | F0 I0 B0", every=1),
    "B of stage 0, microbatch 0 (device 0, slot 2) was done before, as I of",
    ["I0", "B0"]),
  "weights twice": (table("0 | F0 B0 W0", every=1),
    "W of stage 0, microbatch 0 (device 0, slot 2) was done before, as B of",
    ["B0", "W0"]),
  "twice, on another device": (table("0 | F0@0 B0@0", "1 | F0@0 .", every=1),
    "F of stage 0, microbatch 0 (device 1, slot 0) was done before, as F of"
    " stage 0, microbatch 0 (device 0, slot 0)", ["F0@0", "F0@0"]),
  "two forwards": (table("0 | F0&F1 B0 B1"),
    "F of stage 0, microbatch 1 (device 0, slot 0) while the device does F of"
    " stage 0, microbatch 0 (device 0, slot 0): one task at a time, or one"
    " forward and one backward",
    ["F0&F1"]),
  "two backwards": (table("0 | F0 F1 B0&B1"), "B of stage 0, m", ["B0&B1"]),
  "forward and weights": (table("0 | F0 I0 F1&W0 B1"),
    "W of stage 0, microbatch 0 (device 0, slot 2) while the device does F of",
    ["F1&W0"]),
  "three": (table("0 | F0 I0 F1&I1&sync W0 W1"),
    "sync of stage -1, microbatch -1 (device 0, slot 2) while", ["F1&I1&sync"]),
  "own and forward": (table("0 | F0&log B0", every=1),
    "log of stage -1, microbatch -1 (device 0, slot 0) while the device does",
    ["F0&log"]),
  "no forward": (table("0 | F0 . B0 B1", "1 | . F0 B0 B1"),
    "F of stage 0, microbatch 1 is missing", ["B1"]),
  "no forward at the end": (table("0 | F0 F1", "1 | . F0"),
    "t: F of stage 1, microbatch 1 is missing", []),
  "a misprint": (table("0 | F0 F2000000000"),
    "t: F of stage 0, microbatch 1 is missing", []),
  "no backward": (table("0 | F0 F1 B0"),
    "B or I of stage 0, microbatch 1 is missing", ["F1"]),
  "no inputs": (table("0 | F0 W0", every=1),
    "B or I of stage 0, microbatch 0 is missing", ["F0", "W0"]),
  "no weights": (table("0 | F0 I0", every=1),
    "B or W of stage 0, microbatch 0 is missing", ["F0", "I0"]),
  "backward elsewhere": (table("0 | F0@0 .", "1 | . B0@0", every=1),
    "B of stage 0, microbatch 0 (device 1, slot 1) is not on the device of its"
    " forward (0)", ["F0@0", "B0@0"]),
  "weights elsewhere": (table("0 | F0@0 I0@0", "1 | . . W0@0", every=1),
    "W of stage 0, microbatch 0 (device 1, slot 2) is not on the device of its",
    ["F0@0", "W0@0"]),
  "forward with the one before": (table("0 | F0 F1", "1 | F0 . F1"),
    "F of stage 1, microbatch 0 (device 1, slot 0) needs F of stage 0,"
    " microbatch 0 (device 0, slot 0), which is not done before", ["F0", "F0"]),
  "backward before forward": (table("0 | F0 B1 F1 B0"),
    "B of stage 0, microbatch 1 (device 0, slot 1) needs F of stage 0,"
    " microbatch 1 (device 0, slot 2), which is not done before", ["B1", "F1"]),
  "backward with its forward": (table("0 | F0&B0", every=1),
    "B of stage 0, microbatch 0 (device 0, slot 0) needs F of stage 0,",
    ["F0&B0"]),
  "backward before the next stage's": (
    table("0 | F0 . B0", "1 | . F0 B0", every=1),
    "B of stage 0, microbatch 0 (device 0, slot 2) needs B of stage 1,"
    " microbatch 0 (device 1, slot 2)",
    ["B0", "B0"],
  ),
  "inputs before the next stage's": (
    table("0 | F0 . I0 W0", "1 | . F0 W0 I0", every=1),
    "I of stage 0, microbatch 0 (device 0, slot 2) needs I of stage 1,",
    ["I0", "I0"],
  ),
  "weights before inputs": (table("0 | F0 W0 I0", every=1),
    "W of stage 0, microbatch 0 (device 0, slot 1) needs I of stage 0,",
    ["W0", "I0"]),
  "no whole batch": (table("0 | F0 B0 F1 B1 F2 B2"),
    "t: 3 microbatches are not a multiple of the 2 of one update: the last 1"
    " would never count", []),
  "no flush": (table("0 | F0 F1 B0 F2 B1 F3 B2 B3", flush=True),
    "F of stage 0, microbatch 2 (device 0, slot 3) is of batch 1, and the stage"
    " is updated only after B of stage 0, microbatch 1 (device 0, slot 4):"
    " flush first",
    ["F2", "B1"]),
  "weights after the flush": (table("0 | F0 I0 F1 W0 B1", every=1, flush=True),
    "F of stage 0, microbatch 1 (device 0, slot 2) is of batch 1, and the stage"
    " is updated only after W of stage 0, microbatch 0 (device 0, slot 3)",
    ["F1", "W0"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_names_and_marks_the_cell(case):
  made, message, marked = BROKEN[case]
  why, cells = refusal(made)
  assert message in why
  assert cells == marked


def test_the_message_by_eye():
  made = table("0 | F0 F1 . B0 B1", "1 | . F0 B0 B1 F1")
  with pytest.raises(ScheduleError) as caught:
    validate.validate(made)
  assert str(caught.value) == (
    "t: B of stage 1, microbatch 1 (device 1, slot 3) needs F of stage 1,"
    " microbatch 1 (device 1, slot 4), which is not done before\n"
    "# t; every 2\n"
    "0 | F0 F1 .  B0   B1\n"
    "1 | .  F0 B0 !B1! !F1!\n"
  )


def swap(made, one, other):
  """Exchanges the times of two (action, stage, microbatch)."""
  rows = made.tasks
  at = {(t.action, t.stage, t.microbatch): i for i, t in enumerate(rows)}
  a, b = at[one], at[other]
  rows[a], rows[b] = (
    rows[a]._replace(time=rows[b].time),
    rows[b]._replace(time=rows[a].time),
  )
  return table_lib.make(made.name, rows, every=made.every, flush=made.flush)


def test_a_large_table_is_shown_around_the_cell():
  made = swap(one_f_one_b(2, 60), ("F", 1, 40), ("B", 1, 40))
  with pytest.raises(ScheduleError) as caught:
    validate.validate(made)
  why, slots, head, *lines = str(caught.value).splitlines()
  assert "(device 1, slot 81) needs F of stage 1, microbatch 40" in why
  assert slots == "(slots from 69)"
  assert len(lines) == 2 and "!B40! !F40!" in lines[1]
  assert len(lines[1].split("|")[1].split()) == 2 * 12 + 2


def test_many_devices_are_shown_around_the_cell():
  made = swap(one_f_one_b(40, 2), ("F", 30, 1), ("B", 30, 1))
  with pytest.raises(ScheduleError) as caught:
    validate.validate(made)
  lines = str(caught.value).splitlines()[3:]
  shown = [int(line.split("|")[0]) for line in lines]
  assert shown == list(range(22, 22 + len(shown))) and 31 in shown
  marked = [line.split("|")[0] for line in lines if "!F1!" in line]
  assert marked == ["30 ", "31 "]


def test_of_a_long_way_the_later_end_is_shown():
  rows = [(0, 0, 0, 0, "B"), *((t, 0, 0, t, "F") for t in range(1, 90))]
  rows += [(100, 0, 0, 0, "F")]
  rows += [(100 + t, 0, 0, t, "B") for t in range(1, 90)]
  made = table_lib.make("t", rows, every=90, flush=False)
  why, marked = refusal(made)
  assert "slot 0) needs F" in why
  assert marked == ["F0"]  # and no other, though B0 is out of sight


# What can be run.

GOOD = {
  "1f1b": one_f_one_b(3, 5),
  "1f1b, two batches": one_f_one_b(3, 6, every=3, flush=False),
  "gpipe": gpipe(4, 3),
  "one device": gpipe(1, 2),
  "inference": gpipe(3, 4, "F"),
  "split": gpipe(3, 2, "FIW"),
  "weights all late": table("0 | F0 I0 F1 I1 W1 W0"),
  "split and whole": table("0 | F0 I0 F1 B1 W0"),
  "block": table("0 | F0 F1&B0 B1"),
  "block, split": table("0 | F0 F1&I0 W0 B1"),
  "flush": table("0 | F0 B0 F1 B1", every=1, flush=True),
  "own": table("0 | F0 sync B0 U0 step", every=1),
}
REPLICAS = table(
  "0 | F0@0 .    .    B0@0 .",
  "1 | F1@0 .    .    .    B1@0",
  "2 | .    F0@1 B0@1 .    .",
  "3 | .    F1@1 .    B1@1 .",
)
BOTH_WAYS = table(
  "0 | F0@0 F1@1 B1@1 B0@0", "1 | F1@0 F0@1 B0@1 B1@0", flush=True
)
GOOD.update({"replicas": REPLICAS, "both ways": BOTH_WAYS})


@pytest.mark.parametrize("case", GOOD)
def test_what_can_be_run_is_returned(case):
  assert validate.validate(GOOD[case]) is GOOD[case]


def runnable(made):
  """Whether a table can be run, by running it slot by slot."""
  stages, count = made.stages, made.microbatches
  trains = bool((made.action != "F").any())
  done, device = set(), {}
  for block in (
    block for order in pipeline_kit.orders(made) for block in order
  ):
    actions = "".join(task.action for task in block)
    if len(block) > 1 and actions not in ("FB", "FI"):
      return False
  for slot in range(made.slots):
    new = []
    for task in (task for task in made.tasks if task.time == slot):
      s, i, action = task[2:]
      forward, inputs, weights = ("f", s, i), ("i", s, i), ("w", s, i)
      needs, batch = set(), i // made.every
      if action == "F" and s:
        needs.add(("f", s - 1, i))
      if action == "F" and trains and made.flush:
        needs |= {("w", s, j) for j in range(made.every * batch)}
      if action in "BI":
        needs |= {forward} | ({("i", s + 1, i)} if s + 1 < stages else set())
      if action == "W":
        needs.add(inputs)
      makes = {"F": [forward], "B": [inputs, weights], "I": [inputs]}
      new += makes.get(action, [weights])
      if not needs <= done or device.setdefault((s, i), task.device) != (
        task.device
      ):
        return False
    if len(set(new) | done) < len(new) + len(done):
      return False
    done |= set(new)
  kinds = "fiw" if trains else "f"
  all_done = {
    (k, s, i) for k in kinds for s in range(stages) for i in range(count)
  }
  return done == all_done and (not trains or count % made.every == 0)


@settings(quick, max_examples=200)
@given(
  st.sampled_from(
    ["1f1b", "split", "inference", "replicas", "both ways", "block", "flush"]
  ),
  st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 4), st.integers(0, 9)),
    max_size=2,
  ),
  st.integers(1, 2),
)
def test_validate_agrees_with_running_it(case, changes, every):
  made = GOOD[case]._replace(every=every)
  rows = made.tasks
  for row, what, value in changes:
    row %= len(rows)
    if what == 4:
      del rows[row]
    else:
      field = made._fields[1 + what]
      limit = (made.slots, made.devices, made.stages, made.microbatches)[what]
      rows[row] = rows[row]._replace(**{field: value % limit})
    if not rows:
      return
  made = table_lib.make("t", rows, every=every, flush=made.flush)
  try:
    validate.validate(made)
  except ScheduleError:
    accepted = False
  else:
    accepted = True
  assert accepted == runnable(made)


# Forwards in flight.


def test_in_flight_counts_what_is_held_when_a_row_is_done():
  made = table(
    "0 | F0 F1 .    F2&B0 .  B1 B2",
    "1 | .  F0 B0   F1 B1 F2 B2",
    every=3,
  )
  held = validate.in_flight(made)
  of_device = {d: held[made.device == d].tolist() for d in (0, 1)}
  assert of_device[0] == [1, 2, 3, 3, 2, 1]
  assert of_device[1] == [1, 1, 1, 1, 1, 1]
  split = table("0 | F0 I0 F1 I1 W0 W1")
  assert validate.in_flight(split).tolist() == [1, 1, 2, 2, 2, 1]


@pytest.mark.parametrize("p, m", [(1, 1), (3, 5), (4, 2)])
def test_1f1b_needs_as_many_in_flight_as_stages(p, m):
  made, most = one_f_one_b(p, m), min(p, m)
  validate.validate(made, max_in_flight=most)
  assert validate.in_flight(made).max() == most
  if most > 1:
    why, cells = refusal(made, max_in_flight=most - 1)
    assert cells == [f"F{most - 1}"]
    assert (
      f"makes {most} in flight on its device; max_in_flight={most - 1}" in (why)
    )


# Sends that wait.


def test_rendezvous_1f1b_deadlocks_and_gpipe_does_not():
  """Device 0 sends its second activation while device 1 sends back its first
  gradient. GPipe's last stage receives everything before it sends anything."""
  for p, m in ((2, 2), (2, 5), (4, 8)):
    made = one_f_one_b(p, m)
    validate.validate(made)
    why, cells = refusal(made, transfers="rendezvous")
    assert "deadlock, if sends wait for the other side" in why
    assert "Use buffered transfers, or exchange in both directions at once" in (
      why
    )
    assert len(cells) >= 4
  for p, m in ((1, 3), (2, 2), (4, 8)):
    validate.validate(gpipe(p, m), transfers="rendezvous")
    validate.validate(one_f_one_b(p, 1), transfers="rendezvous")


def test_rendezvous_names_who_waits():
  why, cells = refusal(one_f_one_b(2, 2), transfers="rendezvous")
  assert (
    "F of stage 0, microbatch 1 (device 0, slot 1) sends to F of stage 1,"
    " microbatch 1 (device 1, slot 3), which first waits" in why
  )
  assert cells == ["F1", "B0", "B0", "F1"]


def test_rendezvous_in_a_ring():
  """Two devices that send to each other in the same slot stand still."""
  orders = [
    [("F", 0, 0), ("F", 0, 1), ("F", 2, 0), ("F", 2, 1)],
    [("F", 1, 0), ("F", 1, 1)],
  ]
  ring = table_lib.lay_out("ring", orders, every=2, flush=False)
  why, _ = refusal(ring, transfers="rendezvous")
  assert "deadlock" in why
  orders[0] = [("F", 0, 0), ("F", 2, 0), ("F", 0, 1), ("F", 2, 1)]
  ring = table_lib.lay_out("ring", orders, every=2, flush=False)
  validate.validate(ring, transfers="rendezvous")


def test_a_block_receives_for_both_before_it_sends_for_both():
  made = table("0 | F0 . . F1&B0 . . B1", "1 | . F0 B0 . F1 B1")
  validate.validate(made, transfers="rendezvous")
  one_by_one = table("0 | F0 . . F1 B0 . B1", "1 | . F0 B0 . F1 B1")
  refusal(one_by_one, transfers="rendezvous")


def test_transfers_are_between_devices_only():
  made = table("0 | F0@0 F0@1 . . . B0@0", "1 | . . F0@2 B0@2 B0@1", every=1)
  found = validate.transfers(made, validate.rows(made))
  tasks = made.tasks
  assert [(tasks[a][3:], tasks[b][3:]) for a, b in found] == [
    ((0, "F"), (0, "F")),
    ((0, "B"), (0, "B")),
  ]
  assert [tasks[b].stage for _, b in found] == [2, 0]


test_arguments_are_checked = kit.refuses(
  [
    ({"transfers": "slow"}, "buffered, rendezvous, not 'slow'"),
    ({"max_in_flight": 0}, "max_in_flight must be positive, or None, not 0"),
  ],
  lambda limits: validate.validate(GOOD["gpipe"], **limits),
)


def test_rows_are_found():
  where = validate.rows(table("0 | F0 I0 F1 B1 W0"))
  np.testing.assert_array_equal(where.forward, [[0, 2]])
  np.testing.assert_array_equal(where.backward, [[1, 3]])
  np.testing.assert_array_equal(where.weight, [[4, 3]])
