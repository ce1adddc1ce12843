"""Pictures of tables: text by eye, tracks by their rows, pictures by their
pixels and words."""

import builtins
import json

import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_kit import one_f_one_b, table

from asgd import tracks
from asgd.pipeline import analyze, render, spans
from asgd.pipeline.spans import TaskSpan

quick = settings(deadline=None, derandomize=True, max_examples=40)


TABLE = one_f_one_b(3, 4)
TIMING = analyze.times(TABLE, analyze.costs(3))
BLOCKS = table("0 | F0 . . F1&B0 . . B1", "1 | . F0 B0 . F1 B1 .")
BLOCK_TIMING = analyze.times(BLOCKS, analyze.costs(2, overlap=2.0))


def spans_of(table, timing, *, begin=100.0, factor=2.0):
  """Spans that take `factor` as long as the plan says."""
  return [
    TaskSpan(*task[1:], begin + factor * start, begin + factor * end)
    for task, start, end in zip(
      table.tasks, timing.start.tolist(), timing.end.tolist(), strict=True
    )
  ]


# Text.


def test_a_task_is_as_wide_as_it_is_long():
  assert render.to_text(TABLE, TIMING) == (
    "# 1f1b; a column is 0.5\n"
    "0 | F0F1F2........B0--F3B1--..B2--..B3--\n"
    "1 | ..F0F1....B0--F2B1--F3B2--..B3--....\n"
    "2 | ....F0B0--F1B1--F2B2--F3B3--........\n"
  )


def test_what_has_no_room_is_left_out():
  made = render.to_text(TABLE, TIMING, columns=18).splitlines()
  assert made[:2] == ["# 1f1b; a column is 1", "0 | FFF....B0FB1.B2.B3"]
  made = render.to_text(TABLE, TIMING, columns=5).splitlines()
  assert [len(line) for line in made[1:]] == [9] * 3
  assert "F" in made[1] and not any(c.isdigit() for c in made[1][4:])


def test_a_block_has_both_names():
  lines = render.to_text(BLOCKS, BLOCK_TIMING, columns=200).splitlines()
  assert "F1&B0" in lines[1]
  lines = render.to_text(BLOCKS, BLOCK_TIMING, columns=22).splitlines()
  assert "F&B-" in lines[1] and "F1&B0" not in lines[1]


def test_what_takes_no_time_is_not_drawn():
  made = table("0 | F0 sync B0", every=1)
  timing = analyze.times(made, analyze.costs(1, forward=0))
  assert render.to_text(made, timing) == "# t; a column is 1\n0 | B0\n"
  timing = analyze.times(made, analyze.costs(1, forward=0, backward=0))
  assert render.to_text(made, timing).splitlines()[1].strip() == "0 |"


@quick
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_lengths_in_text_are_in_proportion(p, m, data):
  lengths = st.lists(st.integers(1, 5), min_size=p, max_size=p)
  cost = analyze.costs(
    p, forward=data.draw(lengths), backward=data.draw(lengths)
  )
  table = one_f_one_b(p, m)
  found = analyze.analyze(table, cost)
  columns = int(found.makespan) * 2
  grid = render.to_text(table, found.timing, columns=columns)
  head, *lines = grid.splitlines()
  column = float(head.split()[-1])
  for device, line in enumerate(lines):
    worked = sum(c != "." for c in line.split("| ")[1])
    assert len(line.split("| ")[1]) == round(found.makespan / column)
    # Ends are rounded, each by half a column at most.
    assert abs(worked * column - found.busy[device]) <= 2 * m * column
    for i in range(m):
      assert f"F{i}" in line and f"B{i}" in line


def test_arguments_of_text_are_checked():
  with pytest.raises(ValueError, match="columns must be positive, not 0"):
    render.to_text(TABLE, TIMING, columns=0)
  with pytest.raises(ValueError, match="timing is of 8 tasks, and 1f1b has 24"):
    render.to_text(TABLE, BLOCK_TIMING)


# Tracks.


def test_perfetto_has_a_track_for_each_device():
  events = render.perfetto(TABLE, TIMING)["traceEvents"]
  assert json.loads(json.dumps(events)) == events
  assert list(kit.track_names(events).values()) == [
    f"device {device}" for device in range(3)
  ]
  found = [e for e in events if e["ph"] == "X"]
  assert len(found) == len(TABLE.time)
  names = kit.track_names(events)
  task = next(e for e in found if e["args"]["stage"] == 2)
  assert names[task["pid"], task["tid"]] == "device 2"
  assert task["name"] == "F0"
  assert (task["ts"], task["dur"]) == (2_000_000, 1_000_000)
  assert task["args"] == {"stage": 2, "microbatch": 0, "action": "F"}
  assert [e["ts"] for e in found] == sorted(e["ts"] for e in found)


def test_plan_and_run_have_tracks_of_the_same_names():
  run = spans_of(TABLE, TIMING)
  events = render.perfetto(TABLE, TIMING, run)["traceEvents"]
  groups = [e["args"]["name"] for e in events if e["name"] == "process_name"]
  assert groups == ["planned", "measured"]
  names = kit.track_names(events)
  assert len(set(names)) == 6
  for pid in (1, 2):
    mine = [name for (group, _), name in names.items() if group == pid]
    assert mine == ["device 0", "device 1", "device 2"]
  ends = {
    pid: max(
      e["ts"] + e["dur"] for e in events if e.get("pid") == pid and "dur" in e
    )
    for pid in (1, 2)
  }
  assert ends == {1: 18_000_000, 2: 36_000_000}  # the run begins at 0, too


def test_pieces_of_a_track_do_not_overlap():
  events = render.perfetto(BLOCKS, BLOCK_TIMING)["traceEvents"]
  names = kit.track_names(events)
  assert sorted(names.values()) == [
    "device 0",
    "device 0, beside 1",
    "device 1",
  ]
  for where in names:
    mine = [e for e in events if "dur" in e and (e["pid"], e["tid"]) == where]
    for one, other in zip(mine, mine[1:], strict=False):
      assert one["ts"] + one["dur"] <= other["ts"]


def test_lanes_are_taken_again():
  lanes = tracks.Lanes()
  assert [lanes.take(0, 2), lanes.take(1, 3), lanes.take(2, 4)] == [0, 1, 0]
  assert lanes.take(2.5, 2.6) == 2


# Runs and their comparison.


def test_a_run_begins_at_0_and_keeps_its_lengths():
  run = spans.measured(TABLE, spans_of(TABLE, TIMING)[::-1])
  plan = spans.planned(TABLE, TIMING)
  for mine, theirs in zip(run[:4], plan[:4], strict=True):
    np.testing.assert_array_equal(mine, theirs)
  np.testing.assert_allclose(run.start, 2 * plan.start)
  np.testing.assert_allclose(run.end, 2 * plan.end)


def test_bubbles_of_a_plan_and_a_run_by_hand():
  made = table("0 | F0 . . B0", "1 | . F0 B0 .", every=1)
  run = [
    TaskSpan(0, 0, 0, "F", 5.0, 6.0),
    TaskSpan(1, 1, 0, "F", 7.0, 8.0),
    TaskSpan(1, 1, 0, "B", 8.0, 10.0),
    TaskSpan(0, 0, 0, "B", 11.0, 13.0),
    TaskSpan(0, -1, -1, "update", 12.0, 15.0),  # half of it beside the backward
  ]
  facts = analyze.analyze(made)
  assert facts.makespan == 6 and facts.idle.tolist() == [3, 3]
  found = spans.idle(spans.measured(made, run), made.devices)
  assert found.makespan == 10
  assert found.busy.tolist() == [5, 3]
  assert found.idle.tolist() == [5, 7]
  assert found.bubble.tolist() == [0.5, 0.7]
  assert found.of_total == pytest.approx(12 / 20)
  assert found.of_ideal == pytest.approx(12 / 8)
  for measured, said in ((run, ""), (run[:2], "2 tasks of the table were not")):
    text = render.describe(render.Drawing(made, facts, "stash", measured))
    assert ("were not measured" in text) == bool(said) and said in text


def test_a_log_tells_the_last_tasks_by_the_clock_of_the_training():
  for every in (1, 2):  # with a flush, and without
    log = spans.SpanLog(table("0 | F0 B0 F1 B1", every=every))
    log.add([TaskSpan(0, 0, 0, "F", 1e6, 1e6 + 1)])
    log.add([TaskSpan(0, 0, 0, "B", 2e6, 2e6 + 2)])
    (last, *_) = log.last(10, end=5.0)
    assert last == (0, "backward", 3.0, 5.0)


def test_costs_are_the_medians_of_what_was_measured():
  run = spans_of(TABLE, TIMING)
  late = run[0]._replace(end=run[0].end + 50)  # one of stage 0's forwards
  sync = TaskSpan(0, -1, -1, "sync", 0.0, 0.5)
  cost = analyze.measured_costs(TABLE, [late, *run[1:], sync])
  assert cost.forward.tolist() == [2, 2, 2]
  assert cost.backward.tolist() == [4, 4, 4]
  assert cost.own == {"sync": 0.5}
  assert not cost.transfer.any()


def test_spans_are_written_and_read():
  run = spans_of(TABLE, TIMING)
  assert spans.from_json(spans.to_json(run)) == run
  numbers = [tuple(map(np.float32, s[4:])) for s in run]
  same = [(*s[:4], *n) for s, n in zip(run, numbers, strict=True)]
  assert spans.from_json(spans.to_json(same)) == run


RUN = spans_of(TABLE, TIMING)
REFUSED = {
  "none": ([], "there is no span: nothing was measured"),
  "device": ([RUN[0]._replace(device=3)], "1f1b has devices 0 to 2"),
  "backwards": ([RUN[0]._replace(end=99.0)],
    "F of stage 0, microbatch 0 on device 0 is from 100.0 to 99.0: these must"),
  "nan": ([RUN[0]._replace(start=float("nan"))], "must be finite"),
  "another table": ([RUN[0]._replace(microbatch=9)],
    "F of stage 0, microbatch 9 on device 0 is not in the table 1f1b: was"),
  "twice": ([RUN[0], RUN[0]],
    "F of stage 0, microbatch 0 on device 0 was measured twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_spans_of_something_else_are_refused(case):
  run, message = REFUSED[case]
  for call in (spans.measured, analyze.measured_costs):
    with pytest.raises(ValueError, match=message):
      call(TABLE, run)
  with pytest.raises(ValueError, match=message):
    render.perfetto(TABLE, TIMING, run)


test_other_json_is_refused = kit.refuses(
  [
    ("{", "not spans in JSON .JSONDecodeError"),
    ("[]", "not spans in JSON .TypeError"),
    ('{"rows": []}', "not spans in JSON .KeyError: 'spans'"),
    ('{"spans": 3}', "not spans in JSON .TypeError"),
    ('{"spans": [[0, 0, 0, "F", 0.0]]}', r'span 0 \[0, 0, 0, "F", 0.0\] must'),
    ('{"spans": [[0, 0, 0, "F", 0, 1], [0, 0, 0.5, "F", 0, 1]]}',
     r"span 1 .* must be \[device, stage, microbatch, action, start, end\]"),
    ('{"spans": [[0, 0, 0, 7, 0, 1]]}', "span 0 .* must be"),
    ('{"spans": [[0, 0, 0, "F", null, 1]]}', "span 0 .* must be"),
    ('{"spans": [[0, 0, 0, "F", 0, 1e400]]}', "must be .* above 1e15"),
    ('{"spans": [[0, 0, 0, "\\ud800", 0, 1]]}', "span 0 .* must be"),
    ("[" * 10**5, "not spans in JSON .RecursionError"),
  ],
  spans.from_json,
)


# Pictures.


def picture_pixels(path):
  from matplotlib import image

  return image.imread(path)[..., :3]


def share_of(picture, colour):
  wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  return float((abs(picture - wanted).max(-1) < 0.02).mean())


def test_gantt_draws_bars_in_proportion(tmp_path):
  # One stage: nothing is paler. The backward is three times the forward.
  made = table("0 | F0 B0 . F1 B1 .", every=1)
  timing = analyze.times(made, analyze.costs(1, backward=3))
  render.gantt(made, timing, tmp_path / "a.png")
  picture = picture_pixels(tmp_path / "a.png")
  forward = share_of(picture, render._COLOURS["F"])
  backward = share_of(picture, render._COLOURS["B"])
  assert forward > 0.02
  assert backward / forward == pytest.approx(3, rel=0.15)


def test_gantt_says_the_numbers(tmp_path):
  path = tmp_path / "a.svg"
  run = spans_of(TABLE, TIMING)
  render.gantt(TABLE, TIMING, path)
  words = words_of(path)
  for word in (
    "1f1b: 3 stages on 3 devices, 4 microbatches",
    "makespan 18; bubble 33.3% of the total, 50.0% of the ideal",
    *("device 0", "device 2", "33.3%", "F forward", "B backward"),
    *("stage 0", "stage 2"),
  ):
    assert word in words, word
  assert words.count("33.3%") == 3
  assert "time" in words
  for i in "0123":
    assert words.count(i) >= 6  # on F and B of three devices
  render.gantt(TABLE, TIMING, path, measured=run)
  words = words_of(path)
  assert "seconds" in words
  assert words.count("planned 33.3%") == words.count("measured 33.3%") == 3
  assert any(word.startswith("measured makespan 36;") for word in words)


def words_of(path):
  """What letters say: matplotlib keeps texts as comments beside their paths."""
  import re

  return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_the_same_picture_for_the_same_run(tmp_path):
  for name in ("a", "b"):
    paths = tmp_path / f"{name}.png", tmp_path / f"{name}.svg"
    render.gantt(BLOCKS, BLOCK_TIMING, *paths)
  for kind in ("png", "svg"):
    a, b = (tmp_path / f"{name}.{kind}" for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_tasks_that_overlap_share_the_row():
  run = spans.planned(BLOCKS, BLOCK_TIMING)
  lane, lanes = render._lanes(run)
  beside = {
    (action, microbatch): pair
    for action, microbatch, device, *pair in zip(
      run.action.tolist(),
      run.microbatch.tolist(),
      *(run.device.tolist(), lane.tolist(), lanes.tolist()),
      strict=True,
    )
    if device == 0
  }
  assert beside == {
    ("F", 0): [0, 1],
    ("F", 1): [0, 2],
    ("B", 0): [1, 2],
    ("B", 1): [0, 1],
  }
  bars = render._bars(run, 0, 1)
  assert (bars[:, 2] < bars[:, 3]).all()
  assert (bars[:, 2] >= run.device).all() and (
    bars[:, 3] < run.device + 1
  ).all()


@pytest.mark.parametrize(
  "made",
  [
    table("0 | F0 sync B0 log0", every=1),
    table("0 | F0 F1", "1 | . F0 F1"),
    table(
      "0 | F0@0 F0@2 . I0@2 W0@2 . I0@0 W0@0", "1 | . F0@1 . . . I0@1 W0@1"
    ),
  ],
  ids=["own", "inference", "split"],
)
def test_all_kinds_are_drawn(tmp_path, made):
  made = made._replace(name="$a_b$ & <c>")
  timing = analyze.times(made, analyze.costs(made.stages, own={"sync": 1.0}))
  render.gantt(made, timing, tmp_path / "a.png")
  assert (tmp_path / "a.png").stat().st_size > 1000
  nothing = analyze.costs(made.stages, forward=0, input=0, weight=0)
  render.gantt(made, analyze.times(made, nothing), tmp_path / "a.png")


def test_large_tables_are_drawn_as_pixels(tmp_path, monkeypatch):
  monkeypatch.setattr(render, "_MAX_VECTORS", 10)
  monkeypatch.setattr(render, "_MAX_NUMBERED", 10)
  render.gantt(TABLE, TIMING, tmp_path / "a.svg")
  drawn = (tmp_path / "a.svg").read_text()
  assert "<image" in drawn and "<!-- 3 -->" not in drawn


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
  real = builtins.__import__

  def without(name, *args, **kwargs):
    if name.startswith("matplotlib"):
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", without)
  with pytest.raises(ImportError, match=r"pip install 'asgd\[viz\]'"):
    render.gantt(TABLE, TIMING, tmp_path / "a.png")
  assert not list(tmp_path.iterdir())
