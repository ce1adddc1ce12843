"""From live runs to the simulations that predict them, and the comparison."""

import csv
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asgd import base, dispatch, durations, orders
from asgd.runtimes.protocol import Entry
from asgd.runtimes.worker_loop import Span
from launch import compare, live_cell, measured

ROOT = Path(__file__).parent.parent
# Multiples of a power of two: sums of them are exact.
TIMES = [[1.0, 1.25, 0.75, 1.5], [2.0, 1.75], [0.5, 3.0, 0.625]]
PROTOCOLS = {
  "asynchronous": dispatch.Rules(),
  "stale synchronous": dispatch.Rules(bound=1),
  "with a cache": dispatch.Rules(bound=2, cache=True),
  "two tickets": dispatch.Rules(depth=2),
  "two jobs on a ticket": dispatch.Rules(fetch_every=2),
  "synchronous": dispatch.Rules(round=3),
  "backup workers": dispatch.Rules(round=2, backup=1),
}


def streams(rows):
  return [itertools.cycle(row) for row in rows]


def journal_of(trace):
  """A trace as a journal, and the spans that tell when a job was pushed: when
  its worker had done all before it, and it."""
  started, opened, at, out, spans = {}, {}, {}, [], {}
  times, free = streams(TIMES), {}
  for time, worker, job, action in zip(
    *(column.tolist() for column in trace), strict=True
  ):
    seq = -1
    if action in (base.SEND, base.KEEP):
      seq = opened[worker, job] = started.get(worker, 0)
      started[worker] = seq + 1
      at[worker, job] = max(time, free.get(worker, 0)) + next(times[worker])
      free[worker] = at[worker, job]
    elif action == base.RECEIVE:
      seq, end = opened[worker, job], at[worker, job]
      spans.setdefault(worker, []).append(Span("push", end, end, seq, job))
    out.append(Entry(time, worker, job, action, seq))
  return out, spans


@pytest.mark.parametrize("comes", [[0.0, 0.0, 0.0], [0.0, 2.5, 1.0]])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_measured_times_play_the_run_again(name, comes):
  rules = PROTOCOLS[name]
  trace = measured.play(rules, streams(TIMES), comes, 24)
  assert (trace.action == base.RECEIVE).sum() == 24
  orders.check(trace, depth=24)  # a message may wait for its round
  journal, spans = journal_of(trace)
  assert measured.joins(journal, 3) == comes
  rows = measured.in_order(measured.jobs(journal, spans), 3)
  for row, expected in zip(rows, streams(TIMES), strict=True):
    assert row == [next(expected) for _ in row]
  again = measured.play(rules, streams(rows), comes, 24)
  for column, expected in zip(again, trace, strict=True):
    np.testing.assert_array_equal(column, expected)


def test_what_is_played_is_the_order_that_is_simulated():
  """But for who joined, and what is begun and not received."""
  trace = measured.play(dispatch.Rules(), streams(TIMES), [0.0] * 3, 12)
  joined = trace.action == base.JOIN
  expected = orders.asynchronous(
    durations.measured(TIMES), workers=3, messages=12
  )
  sent = expected.job < 12
  for column, other in zip(trace, expected, strict=True):
    np.testing.assert_array_equal(column[~joined], other[sent])


def receive(time, *keys):
  return [
    Entry(time, worker, seq, base.RECEIVE, seq) for worker, seq in keys
  ]


def send(time, *keys):
  return [Entry(time, worker, seq, base.SEND, seq, 0) for worker, seq in keys]


def join(time, *workers):
  return [Entry(time, worker, 0, base.JOIN) for worker in workers]


# Two rounds of two workers; worker 1 takes twice the time. What it pushes is
# received a quarter of a second later.
ROUNDS = [
  *(*join(0.0, 0, 1), *send(0.0, (0, 0), (1, 0))),
  *(*receive(3.0, (0, 0), (1, 0)), *send(3.0, (0, 1), (1, 1))),
  *receive(5.25, (0, 1), (1, 1)),
]
PUSHES = {
  0: [Span("push", 1.0, 1.25, 0, 0), Span("push", 3.75, 4.0, 1, 1)],
  1: [Span("push", 2.5, 2.75, 0, 0), Span("push", 4.75, 5.0, 1, 1)],
}


def test_waiting_for_others_of_a_round_is_no_work():
  found = measured.jobs(ROUNDS, PUSHES)
  assert [(job.worker, job.start, job.end) for job in found] == [
    (0, 0.0, 1.5),
    (1, 0.0, 3.0),
    (0, 3.0, 4.25),
    (1, 3.0, 5.25),
  ]
  assert [job.received for job in found] == [3.0, 3.0, 5.25, 5.25]
  assert measured.in_order(found, 2) == [[1.5, 1.25], [3.0, 2.25]]


def test_without_spans_a_round_is_all_work():
  found = measured.jobs(ROUNDS, {})
  assert measured.in_order(found, 2) == [[3.0, 2.25], [3.0, 2.25]]


def test_a_message_of_its_own_ends_when_it_is_received():
  journal = [*join(0.0, 0), *send(0.0, (0, 0)), *receive(2.0, (0, 0))]
  pushed = {0: [Span("push", 1.0, 1.25, 0, 0)]}
  ((_, start, end, _, first),) = measured.jobs(journal, pushed)
  assert (start, end, first) == (0.0, 2.0, True)


STARTING = [  # worker 1 comes when worker 0 has done two jobs
  *(*join(1.0, 0), *send(1.0, (0, 0))),
  *(*receive(5.0, (0, 0)), *send(5.0, (0, 1))),
  *(*receive(6.0, (0, 1)), *send(6.0, (0, 2))),
  *(*join(6.5, 1), *send(6.5, (1, 0))),
  *(*receive(7.0, (0, 2)), *send(7.0, (0, 3))),
  *(*receive(7.5, (1, 0)), *send(7.5, (1, 1))),
  *(*receive(8.5, (0, 3)), *send(8.5, (0, 4))),
  *(*receive(9.0, (1, 1)), *send(9.0, (1, 2))),
  *receive(11.0, (0, 4)),
]


def test_in_order_all_jobs_are_there():
  found = measured.jobs(STARTING, {})
  assert measured.in_order(found, 2) == [[4, 1, 1, 1.5, 2.5], [1, 1.5]]
  assert measured.joins(STARTING, 3) == [0, 5.5, 5.5]


def test_who_waits_for_the_others_has_come_when_the_first_ticket_is_sent():
  journal = [*join(1.0, 0), *join(4.0, 1), *send(4.0, (0, 0), (1, 0))]
  assert measured.joins(journal, 2) == [0.0, 0.0]
  late = [*journal, *join(6.0, 2), *send(6.0, (2, 0))]
  assert measured.joins(late, 3) == [0.0, 0.0, 2.0]
  # With two tickets each: all get their first before anybody a second.
  rules = dispatch.Rules(depth=2)
  trace = measured.play(rules, streams(TIMES), [0.0] * 3, 12)
  assert trace.worker[:9].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_settled_times_begin_when_all_are_there():
  found = measured.jobs(STARTING, {})
  assert measured.all_there(np.array([j.worker for j in found]), 2) == 4
  # At 7.5, so that the job from 7 to 8.5 is left out.
  assert measured.settled(found, 2) == [[2.5], [1.5]]


def test_the_first_job_of_a_worker_that_came_again_is_left_out():
  journal = [
    *(*join(0.0, 0), *send(0.0, (0, 0)), *receive(1.0, (0, 0))),
    *(*send(1.0, (0, 1)), *receive(3.0, (0, 1)), *send(3.0, (0, 2))),
    Entry(8.0, 0, 2, base.LOST, 2),
    Entry(8.0, 0, 0, base.LEAVE),
    *(*join(9.0, 0), *send(9.0, (0, 3)), *receive(13.0, (0, 3))),
    *(*send(13.0, (0, 4)), *receive(16.0, (0, 4))),
  ]
  found = measured.jobs(journal, {})
  assert [job.first for job in found] == [True, False, True, False]
  assert measured.settled(found, 1) == [[2.0, 3.0]]


def test_who_did_nothing_cannot_be_measured():
  found = measured.jobs(STARTING, {})
  with pytest.raises(ValueError, match="worker 2 handed in nothing"):
    measured.settled(found, 3)
  with pytest.raises(ValueError, match="worker 0 did no job after all 2"):
    measured.settled(found[:5], 2)


def run_of(time, loss, worker=None, staleness=None, began=0.0, accuracy=0.5):
  nothing = np.zeros(len(time), int)
  return measured.Run(
    *(began, np.array(time, float)),
    nothing if worker is None else np.array(worker),
    nothing if staleness is None else np.array(staleness),
    *(np.array(loss, float), accuracy),
  )


def test_losses_are_smoothed_over_a_fortieth_of_the_run():
  np.testing.assert_array_equal(
    measured.smooth([1.0, 3.0, 5.0, 1.0], 2), [2, 4, 3]
  )
  run = run_of(np.arange(1.0, 82), np.arange(82.0, 1, -1))
  curve = measured.curve(run, 1)  # 80 messages, two at a time
  assert (curve.time[0], curve.loss[0]) == (2.0, 80.5)
  assert (curve.time[-1], curve.loss[-1]) == (80.0, 2.5)
  whole = measured.curve(run._replace(began=0.5), 0)
  assert (whole.time[0], whole.loss[0]) == (1.5, 81.5)


def test_when_a_loss_is_reached():
  curve = measured.Curve(np.array([1.0, 2.0, 3.0]), np.array([5.0, 1.0, 2.0]))
  assert curve.way(0.5) == 3.0
  assert curve.reaches(3.0) == 2.0
  assert np.isnan(curve.reaches(0.5))


def test_the_rate_is_that_after_the_start():
  run = run_of([1.0, 10.0, 10.5, 11.0], [1] * 4)
  assert measured.rate(run, 2) == 2.0
  assert np.isnan(measured.rate(run, 4))


def comparison(name="a-n2-s0", factor=2.0):
  """A live run, and simulations that take `factor` times its time."""
  time = np.arange(1.0, 11)
  loss = [9.0, 9, 8, 7, 6, 5, 4, 3, 2, 1]
  live = run_of(time, loss, [0, 1] * 5, [0, 1] + [1] * 7 + [3])
  other = live._replace(time=factor * time, accuracy=1.0)
  runs = {"live": live, "in order": other, "drawn": other}
  return compare.Comparison(name, runs, 2, None)


def test_the_table_has_ratios():
  rows = {row["quantity"]: row for row in compare.quantities(comparison())}
  rate = rows["messages/s"]
  assert (rate["live"], rate["in order"]) == (1.0, 0.5)
  assert rate["in order, ratio"] == rate["drawn, ratio"] == 0.5
  assert rows["staleness, mean"]["live"] == 10 / 8
  assert rows["staleness, max"]["drawn"] == 3
  # From 8 to 1, after the second message: 4.5 is the half of the way.
  assert rows["s to loss 4.5 (50 % of the way)"]["live"] == 5
  assert rows["s to loss 4.5 (50 % of the way)"]["drawn"] == 10
  assert rows["s to loss 1.7 (90 % of the way)"]["in order, ratio"] == 2
  assert rows["accuracy %"]["drawn, ratio"] == 2
  text = compare.table(list(rows.values()))
  assert text.splitlines()[0].split() == [
    *("live", "in", "order", "ratio", "drawn", "ratio")
  ]
  assert text.splitlines()[2].split() == [
    *("messages/s", "1", "0.5", "0.50", "0.5", "0.50")
  ]


def test_what_is_not_known_is_a_dash():
  both = comparison()
  live = both.runs["live"]._replace(accuracy=float("nan"))
  both = both._replace(runs={**both.runs, "live": live})
  text = compare.table(compare.quantities(both))
  assert text.splitlines()[-1].split() == [
    *("accuracy", "%", "-", "100", "-", "100", "-")
  ]


def test_the_numbers_of_the_picture():
  points = compare.points(comparison())

  def chosen(panel, kind):
    return [
      (point["x"], point["value"])
      for point in points
      if (point["panel"], point["series"]) == (panel, kind)
    ]

  assert chosen("staleness", "live") == [(0, 0), (1, 7 / 8), (2, 0), (3, 1 / 8)]
  # Bins of 0.4 s, up to the end of the slower run; eight messages in 16 s.
  slow, fast = (chosen("throughput", kind) for kind in ("drawn", "live"))
  assert slow[-1][0] == pytest.approx(15.6)
  assert sum(rate for _, rate in slow) * 0.4 == pytest.approx(8)
  assert fast[-1][0] == pytest.approx(7.6)
  assert chosen("loss", "live")[0] == (1, 8)
  assert chosen("loss", "drawn")[0] == (2, 8)


def test_a_race_is_to_a_loss_that_all_reach():
  slow, fast = comparison("slow", 3.0), comparison("fast", 0.5)
  loss = compare.common_loss([slow, fast])
  assert loss == pytest.approx(9 - 0.9 * 8)
  rows = compare.race([slow, fast], 2.0)
  times = [[row[f"{kind}, seconds"] for kind in slow.runs] for row in rows]
  assert times == [[9, 27, 27], [9, 4.5, 4.5]]
  assert [row["drawn, faster"] for row in rows] == [1, 6]
  lines = compare.race_table(rows, 2.0).splitlines()
  assert lines[3].split() == [
    *("fast", "1", "2", "2", "9", "4.5", "4.5", "1.00", "6.00", "6.00")
  ]


def test_pictures_are_drawn(tmp_path):
  pytest.importorskip("matplotlib")
  both = comparison("a$b")
  compare.draw(both, tmp_path / "one")
  compare.draw_race([both, comparison()], 2.0, tmp_path / "two")
  assert {path.name for path in tmp_path.iterdir()} == {
    *("one.png", "one.svg", "two.png", "two.svg")
  }


def test_where_the_time_of_a_job_goes():
  spans = {
    0: [
      *(Span("fetch", 0.25, 0.25, 0, 0), Span("compute", 0.25, 1.0, 0, 0)),
      Span("push", 1.0, 1.25, 0, 0),
      *(Span("fetch", 2.5, 2.75, 1, 1), Span("compute", 2.75, 3.0, 1, 1)),
      Span("push", 3.0, 3.25, 1, 1),
    ]
  }
  journal = [
    *(*join(0.0, 0), *send(0.0, (0, 0))),
    *(*receive(2.0, (0, 0)), *send(2.0, (0, 1)), *receive(4.0, (0, 1))),
  ]
  parts = measured.where_time_goes(journal, spans, 0.0)
  assert list(parts.values()) == [
    *(0.375, 0.125, 0.5, 0.25, 0.75),
    (0.25 + 0.5) / 4,  # the server: until it was heard of
  ]
  text = compare.parts_text(parts)
  assert "computing 500.00" in text
  assert "busy 19 % of the time" in text
  later = measured.where_time_goes(journal, spans, 2.0)
  assert later["computing"] == 0.25
  assert measured.where_time_goes(journal, {}, 0.0) is None
  assert "--config.live.spans=True" in compare.parts_text(None)


# The command, on a run of its own.


def launch(module, *arguments):
  return subprocess.run(
    [sys.executable, "-m", f"launch.{module}", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=600,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A live run of two workers, and what was said when it was compared."""
  out = tmp_path_factory.mktemp("trained") / "out"
  done = launch(
    "compare",
    "--config=configs/straggler_digits.py",
    "--config.workers=2",
    "--config.model.hidden=16",
    "--config.batch_size=64",
    "--config.epochs=12",
    "--config.live.slowdown=1,2",
    f"--out={out}",
  )
  assert done.returncode == 0, done.stderr
  return out, done.stdout


def test_in_order_the_simulation_is_the_live_run(trained):
  out, said = trained
  place = out / "cells" / "asgd-n2-s0"
  text = (place / "compare-table.csv").read_text()
  rows = csv.DictReader(text.splitlines())
  ratios = {row["quantity"]: row["in order, ratio"] for row in rows}
  assert float(ratios["messages/s"]) == pytest.approx(1, rel=0.05)
  assert "times faster" in said
  for name in ("compare.csv", "compare.png", "compare.svg"):
    assert (place / name).stat().st_size
    assert (out / name).stat().st_size
  for name in ("asgd-n2-s0", "ssgd-n2-s0"):
    assert f"{name}: live, and simulated" in said


def test_a_live_run_in_threads_writes_its_spans(trained):
  out, _ = trained
  read = live_cell.read(out / "cells" / "asgd-n2-s0")
  messages = sum(len(spans) for spans in read.spans.values()) / 3
  assert messages == len(read.records[0].loss) > 0
  for spans in read.spans.values():
    names = [span.name for span in spans]
    assert names == ["fetch", "compute", "push"] * (len(names) // 3)
    ends = [(span.start, span.end) for span in spans]
    flat = [moment for piece in ends for moment in piece]
    assert flat == sorted(flat)


def test_a_timeline_of_it(trained, tmp_path):
  out, _ = trained
  file = tmp_path / "timeline.json"
  done = launch("timeline", str(out / "cells" / "asgd-n2-s0"), f"--out={file}")
  assert done.returncode == 0, done.stderr
  events = json.loads(file.read_text())["traceEvents"]
  ends = {}
  for event in events:
    if event["ph"] == "X":
      assert event["ts"] >= ends.get(event["tid"], 0)
      ends[event["tid"]] = event["ts"] + event["dur"]
  assert len(ends) == 3  # two workers and the shard


def test_the_board_is_beside_that_of_the_evaluations(trained):
  out, _ = trained
  pytest.importorskip("tensorboardX")
  assert list((out / "tensorboard" / "asgd-n2-s0" / "live").iterdir())


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["{}"], "--config to train one|holds no finished run"),
    ([], "which run"),
    (["{}", "--config=configs/straggler_digits.py"], "brings its own config"),
    (["{}/cells/nope"], "is no folder of a live run|no event"),
  ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, message):
  (tmp_path / "cells").mkdir()
  arguments = [argument.format(tmp_path) for argument in arguments]
  done = launch("compare", *arguments)
  assert done.returncode == 2
  (line,) = done.stderr.strip().splitlines()
  assert any(text in line for text in message.split("|")), line
