"""Tables: laid out by hand, written, read again; what is none is refused."""

import re

import numpy as np
import pipeline_kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_kit import one_f_one_b

from asgd.pipeline import table as table_lib
from asgd.pipeline.table import ScheduleError, Task

quick = settings(deadline=None, derandomize=True, max_examples=60)


def assert_same(table, other):
  for name, mine, theirs in zip(table._fields, table, other, strict=True):
    np.testing.assert_array_equal(mine, theirs, err_msg=name)
    if isinstance(mine, np.ndarray):
      assert mine.dtype.kind == theirs.dtype.kind, name


# The table.


def test_rows_are_sorted_and_counted():
  first, second, third = (1, 0, 0, 0, "F"), (1, 1, 2, 0, "F"), (2, 0, 0, 1, "F")
  table = table_of(third, second, Task(*first), every=2)
  assert table.tasks == [first, second, third]
  assert table.tasks[0].microbatch == 0
  assert (table.devices, table.stages) == (2, 3)
  assert (table.microbatches, table.slots) == (2, 3)
  assert all(column.dtype == np.int32 for column in table[1:5])


def test_in_a_block_the_forward_comes_first():
  rows = [(0, 0, 0, 0, a) for a in ("sync", "W", "B", "I", "F")]
  table = table_of(*rows)
  assert table.action.tolist() == ["F", "B", "I", "W", "sync"]
  assert pipeline_kit.orders(table) == [[tuple(table.tasks)]]


def test_places_are_the_devices_of_a_stage():
  rows = [(0, 0, 0, 0, "F"), (0, 2, 0, 1, "F"), (1, 1, 1, 0, "F")]
  rows.append((1, 2, -1, -1, "sync"))
  table = table_of(*rows)
  assert table.places() == [[0, 2], [1]]
  assert [len(order) for order in pipeline_kit.orders(table)] == [1, 1, 2]


def test_own_actions_of_a_stage_may_be_anywhere():
  table = table_of(ROW, (1, 1, 0, 0, "K"), (2, 0, 0, 0, "B"))
  assert table.places() == [[0]] and table.devices == 2


def test_a_table_without_rows():
  table = table_lib.make("t", [], every=1, flush=True)
  assert (table.devices, table.stages) == (0, 0)
  assert (table.microbatches, table.slots) == (0, 0)
  for form in ("text", "csv", "json"):
    assert_same(table, round_trip(table, form))


# Laying out.


IN_A_BLOCK = [
  [("F", 0, 0), (("F", 0, 1), ("B", 0, 0)), ("B", 0, 1)],
  [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)],
]
# Orders of devices, and the table that they lead to.
DRAWN = [
  ([[(action, stage, 0) for action in "FIW"] for stage in range(2)],
   "# t; every 1; flush\n0 | F0 .  .  I0 W0\n1 | .  F0 I0 W0 .\n"),
  (  # waits for both tasks of the block
    IN_A_BLOCK,
    "# t; every 2; flush\n"
    "0 | F0 .  .  F1&B0 .  .  B1\n"
    "1 | .  F0 B0 .     F1 B1 .\n",
  ),
  (  # own actions wait for nothing
    [[("F", 0, 0), ("sync", -1, -1), ("B", 0, 0), ("log", 0, 0)]],
    "# t; every 1; flush\n0 | F0 sync B0 log0\n",
  ),
  (  # stages elsewhere
    [[("F", 0, 0), ("F", 2, 0)], [("F", 1, 0)]],
    "# t; every 1; flush\n0 | F0@0 .    F0@2\n1 | .    F0@1 .\n",
  ),
]


def test_1f1b_is_the_picture():
  assert table_lib.to_text(one_f_one_b(3, 4)) == (
    "# 1f1b; every 4; flush\n"
    "0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3\n"
    "1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .\n"
    "2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .\n"
  )


@pytest.mark.parametrize("orders, picture", DRAWN, ids=range(len(DRAWN)))
def test_each_task_is_as_soon_as_it_can_be(orders, picture):
  every = 1 + (orders is IN_A_BLOCK)
  table = table_lib.lay_out("t", orders, every=every, flush=True)
  assert table_lib.to_text(table) == picture
  assert_same(table, table_lib.from_text(picture))
  blocks = [len(block) for block in pipeline_kit.orders(table)[0]]
  assert max(blocks) == every


def test_a_flush_is_waited_for_at_every_stage():
  order = [(a, 0, i) for i in (0, 1) for a in "FB"]
  other = [(a, 1, i) for i in (0, 1) for a in "FB"]
  made = [
    table_lib.to_text(
      table_lib.lay_out("t", [order, other], every=1, flush=flush)
    )
    for flush in (True, False)
  ]
  # With one microbatch in flight nothing can come sooner without it.
  assert made[0].splitlines()[1:] == [
    "0 | F0 .  .  B0 F1 .  .  B1",
    "1 | .  F0 B0 .  .  F1 B1 .",
  ]
  assert made[1].splitlines()[1:] == made[0].splitlines()[1:]
  ahead = [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)], other]
  with pytest.raises(ScheduleError, match="deadlock"):
    table_lib.lay_out("t", ahead, every=1, flush=True)
  free = table_lib.lay_out("t", ahead, every=1, flush=False)
  assert table_lib.to_text(free).splitlines()[1] == "0 | F0 F1 .  B0 .  B1"


def test_a_deadlock_shows_who_waits_for_what():
  orders = [
    [("F", 0, 0), ("B", 0, 0), ("F", 0, 1)],
    [("F", 1, 0), (("F", 1, 1), ("B", 1, 0))],
  ]
  with pytest.raises(ScheduleError) as caught:
    table_lib.lay_out("bad", orders, every=2, flush=False)
  assert str(caught.value) == (
    "deadlock: each device waits for a task of another.\n"
    "# bad; every 2\n"
    "0 | F0 .\n"
    "1 | .  F0\n"
    "waiting:\n"
    "  device 0: B0@0\n"
    "  device 1: F1@1 & B0@1"
  )


@quick
@given(st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_1f1b_has_no_slot_too_many(p, m, flush):
  table = one_f_one_b(p, m, flush=flush)
  assert table.slots == 2 * (m + p - 1)
  assert len(table.time) == 2 * p * m


# Forms.


def round_trip(table, form):
  write = getattr(table_lib, f"to_{form}")
  return getattr(table_lib, f"from_{form}")(write(table))


ACTIONS = st.sampled_from(["F", "B", "I", "W", "U", "all_reduce", "_"])


@st.composite
def tables(draw):
  """Tables of all that can be written, most of which cannot be run."""
  cells = draw(
    st.sets(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=20)
  )
  rows = []
  for time, device in sorted(cells):
    for _ in range(draw(st.integers(1, 2))):
      action = draw(ACTIONS)
      numbers = draw(st.integers(0, 11)), draw(st.integers(0, 11))
      if action not in table_lib.KNOWN and draw(st.booleans()):
        numbers = -1, -1
      if draw(st.booleans()) and numbers[0] >= 0:
        numbers = device, numbers[1]
      rows.append((time, device, *numbers, action))
  name = draw(st.sampled_from(["", "1f1b", "a b, #2 | 'é'"]))
  return table_lib.make(
    name, rows, every=draw(st.integers(1, 99)), flush=draw(st.booleans())
  )


@quick
@given(tables(), st.sampled_from(["text", "csv", "json"]))
def test_what_is_written_is_read_again(table, form):
  assert_same(table, round_trip(table, form))


@quick
@given(tables(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(table, random):
  cells = {(task.time, task.device, task.action) for task in table.tasks}
  if len(cells) < len(table.tasks):
    return  # two of an action in a cell stay in the order they came in
  own = [task for task in table.tasks if task.action not in table_lib.KNOWN]
  if len({task[:2] for task in own}) < len(own):
    return  # so do users' own
  rows = table.tasks
  random.shuffle(rows)
  again = table_lib.make(table.name, rows, every=table.every, flush=table.flush)
  assert_same(table, again)


def test_forms_by_eye():
  table = table_lib.make(
    "two", [(0, 0, 0, 0, "F"), (1, 0, 0, 0, "B")], every=1, flush=True
  )
  assert table_lib.to_csv(table) == (
    "# two; every 1; flush\n"
    "time,device,stage,microbatch,action\n"
    "0,0,0,0,F\n"
    "1,0,0,0,B\n"
  )
  assert table_lib.to_json(table) == (
    '{"name": "two", "every": 1, "flush": true, "columns": ["time", "device",'
    ' "stage", "microbatch", "action"], "tasks": [[0, 0, 0, 0, "F"], [1, 0, 0,'
    ' 0, "B"]]}'
  )
  marked = table_lib.to_text(table, {(0, 1): "!", (0, -1): "?", (0, 2): "?"})
  assert marked.splitlines()[1] == "0 | F0 !B0!"


def test_text_may_be_written_by_hand():
  text = "\n  # mine;  every 2 ; flush\n\n1|F0   F1\n\n 0 | .\n"
  with pytest.raises(ScheduleError, match="line 2: .* must be '# NAME; every"):
    table_lib.from_text(text)
  table = table_lib.from_text(text.replace(";  every 2 ;", "; every 2;"))
  assert [task[:4] for task in table.tasks] == [(0, 1, 1, 0), (1, 1, 1, 1)]
  table = table_lib.from_csv(table_lib.to_csv(table) + "\n\n")
  assert len(table.tasks) == 2


# Refusals.

ROW = (0, 0, 0, 0, "F")


def table_of(*rows, every=1, name="t"):
  return table_lib.make(name, rows, every=every, flush=False)


HEAD = "# t; every 1\n"
COLUMNS = "time,device,stage,microbatch,action\n"
# What is refused by each reader of a table, and what the error says.
REFUSED = {
  table_of: [
    (((0, 0, 0, "F"),), "(0, 0, 0, 'F') must be (time, device, stage, microba"),
    (((0, 0, 0, 0, "F1"),), "action 'F1' of (0, 0, 0, 0, 'F1') must be a name"),
    (((0, 0, 0, 0, 7),), "action 7 of"),
    (((0.5, 0, 0, 0, "F"),),
     "time, device, stage and microbatch must be whole numbers below 2**31"),
    ((("a", 0, 0, 0, "F"),), "must be whole numbers"),
    (((0, None, 0, 0, "F"),), "must be whole numbers"),
    (((0, 2**31, 0, 0, "F"),), "below 2**31"),
    (((0, 0, 0, 2**70, "F"),), "below 2**31"),
    ((ROW, (-2, 1, 0, 0, "F")),
     "time -2 of 'F' (slot -2, device 1) must not be negative"),
    (((0, -1, 0, 0, "F"),), "device -1 of 'F'"),
    (((3, 1, -1, 0, "B"),),
     "stage -1 of 'B' (slot 3, device 1) must not be negative"),
    (((0, 0, 0, -1, "W"),), "microbatch -1 of 'W'"),
    (((0, 0, -2, -2, "U"),), "stage -2 of 'U'"),
    (((4, 1, 2, -1, "U"),),
     "'U' (slot 4, device 1) has stage 2 and microbatch -1: give both, or -1"
     " for both"),
  ],
  lambda every: table_of(ROW, every=every): [
    ((0,), "every must be a positive whole number of microbatches, not 0"),
    ((1.5,), "microbatches, not 1.5"),
  ],
  lambda name: table_of(ROW, name=name): [
    (("a\nb",), r"a schedule's name must be one line without ;, not 'a\nb'"),
    (("a; b",), "without ;, not 'a; b'"),
    ((" a",), "name must not begin or end in a space"),
    ((None,), "not None"),
  ],
  table_lib.from_text: [
    ((" \n",), "there is no table: the text is empty"),
    (("1f1b\n0 | F0",),
     "line 1: '1f1b' must be '# NAME; every N', and '; flush' if the schedule"),
    ((HEAD + "\n0 F0 F1",),
     "line 3: '0 F0 F1' must be a device, | and its cells"),
    ((HEAD + "a | F0",), "line 2: 'a | F"),
    ((HEAD + "² | F0",), "line 2: '² | F"),
    ((HEAD + "0 | F0 . 3F",),
     "line 2, slot 2: '3F' must be an action and a microbatch, such as F3 or,"
     " with its stage, F3@1"),
    ((HEAD + "0 | F0 F1&",), "line 2, slot 1: '' must be an action"),
    ((HEAD + "0 | F" + "9" * 5000,), "line 2, slot 0: 'F999"),
    ((HEAD + "0 | F0 F",),
     "stage -1 of 'F' (slot 1, device 0) must not be negative"),
  ],
  table_lib.from_csv: [
    (("",), "line 1: '' must be '# NAME"),
    ((HEAD + "time,device\n",),
     "line 2 must be time,device,stage,microbatch,action"),
    ((HEAD + COLUMNS + "0,0,0,0,F\n0,x,0,0,F",),
     "line 4: '0,x,0,0,F' must be four whole numbers and an action"),
    ((HEAD + COLUMNS + "0,0,0,0",), "line 3: '0,0,0,0' must be"),
    ((HEAD + COLUMNS + "0,0,0,0,F,1",), "line 3: '0,0,0,0,F,1' must be"),
    ((HEAD + COLUMNS + "0,0,0,0," + "F" * 200_000,),
     "not a schedule in CSV: field larger than"),
  ],
  table_lib.from_json: [
    (("[1",), "not a schedule in JSON"),
    (  # it would be true
      ('{"name": "a", "every": 1, "flush": "false", "tasks": []}',),
      "flush must be true or false, not 'false'",
    ),
    (("[" * 10**5,), "RecursionError"),
    (("[1]",), "it must have name, every, flush and tasks"),
    (('{"name": "a"}',), "not a schedule in JSON (KeyError: 'every')"),
    (('{"name": "a", "every": 1, "flush": true, "tasks": [1]}',), "TypeError"),
  ],
}
CASES = [(call, *case) for call, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize("call, args, message", CASES, ids=range(len(CASES)))
def test_what_is_no_table_is_refused(call, args, message):
  with pytest.raises(ScheduleError, match=re.escape(message)):
    call(*args)
