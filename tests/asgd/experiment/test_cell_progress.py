"""progress.json: its totals are those of the records, whatever the cuts."""

import json
import time
import types

import kit
import numpy as np
import pytest

from asgd import base
from asgd.experiment import cell_files, cell_progress, engines
from asgd.experiment.engines import live_batches, live_server
from asgd.orders import durations, network, play, protocol
from asgd.orders.trace import events
from asgd.pages import run_files


def drawn(seed, count=500, most=700):
  """Returns some columns of records."""
  rng = np.random.default_rng(seed)
  return types.SimpleNamespace(
    loss=rng.normal(2, 1, count).astype(np.float32),
    staleness=rng.integers(0, most, count),
    gap=(rng.integers(0, 2, count) * rng.lognormal(-5, 3, count)),
    bytes_up=rng.integers(0, 99, count),
    bytes_down=rng.integers(0, 99, count),
  )


def part(rows, start, end):
  return types.SimpleNamespace(
    **{name: column[start:end] for name, column in vars(rows).items()}
  )


@pytest.mark.parametrize("seed", range(4))
def test_totals_of_parts_are_those_of_all(seed):
  rows = drawn(seed)
  at_once, in_parts = cell_progress._Totals(), cell_progress._Totals()
  at_once.add(rows)
  cuts = sorted(np.random.default_rng(seed).integers(0, 500, 5))
  for start, end in zip([0, *cuts], [*cuts, 500], strict=True):
    in_parts.add(part(rows, start, end))
  content = at_once.content()
  assert in_parts.content() == content
  width = content["staleness"]["width"]
  assert width == 8  # 128 bins of 8 hold 700
  counts = np.bincount(rows.staleness // width).tolist()
  assert content["staleness"]["counts"] == counts
  assert sum(content["gap"]["counts"]) == 500
  assert content["gap"]["counts"][0] >= (rows.gap == 0).sum()
  assert content["bytes"] == [rows.bytes_up.sum(), rows.bytes_down.sum()]


class Fake:
  """An engine that returns some rows at a time."""

  unit, quantum, ended = "s", 1, False

  def __init__(self, rows, step=10):
    self.rows, self.step, self.done = rows, step, 0
    self.total = len(rows.loss)

  def advance(self, until):
    start, self.done = self.done, min(self.done + self.step, until)
    rows = part(self.rows, start, self.done)
    return engines.Progress(rows.loss, rows=rows)

  def records(self):
    return part(self.rows, 0, self.done)

  def work(self):
    return []


def test_curves_keep_their_means_when_they_are_thinned(tmp_path, monkeypatch):
  for name in ("_FIRST_WRITE", "_INTERVAL", "_PAUSE_FACTOR"):
    monkeypatch.setattr(cell_progress, name, 0.0)
  rows = drawn(0, count=3010)
  engine = Fake(rows)
  file = cell_progress.ProgressFile(tmp_path, {"workers": 2}, engine)
  while engine.done < engine.total:
    file.advance(engine.total)
  file.finish()
  content = run_files.read_progress(tmp_path)
  points = np.array(content["points"], float)
  assert 100 < len(points) <= cell_progress._MAX_POINTS
  counts = np.diff(points[:, 1], prepend=0)
  covered = int(points[-1, 1])
  assert covered > 3000 - 40
  sent = rows.bytes_up[:covered].sum() + rows.bytes_down[:covered].sum()
  assert points[:, 4].sum() == sent
  for column, name in ((2, "loss"), (3, "staleness")):
    mean = getattr(rows, name)[:covered].mean()
    assert counts @ points[:, column] / covered == pytest.approx(mean, abs=1e-4)
  assert content["messages"] == 3010


def test_the_engines_clock_counts_without_its_start_up(tmp_path, monkeypatch):
  for name in ("_FIRST_WRITE", "_INTERVAL", "_PAUSE_FACTOR"):
    monkeypatch.setattr(cell_progress, name, 0.0)
  wall = iter(range(1000, 10**6, 100))  # 100 s between two looks at the clock
  clock = types.SimpleNamespace(monotonic=lambda: next(wall))
  monkeypatch.setattr(cell_progress, "time", clock)

  class Clocked(Fake):
    """An engine whose workers start late, by a clock of the test."""

    clock = iter([0.0, 0.0, 1.0, 2.5, 2.0])

    def advance(self, until):
      seconds = next(self.clock)
      self.step = 10 if seconds else 0
      return super().advance(until)._replace(seconds=seconds)

  file = cell_progress.ProgressFile(tmp_path, {}, Clocked(drawn(0)))
  for _ in range(5):
    file.advance(500)
  file.finish()
  content = run_files.read_progress(tmp_path)
  assert content["seconds"] == 2.5
  assert content["messages"] == 30


def test_a_cell_that_resumes_counts_what_its_records_have(tmp_path):
  rows = drawn(1)
  first = Fake(rows)
  file = cell_progress.ProgressFile(tmp_path, {}, first)
  for _ in range(20):
    file.advance(500)
  file._write(9.0)
  second = Fake(rows)
  second.done = 50  # the last checkpoint
  lines = ["worker 1 exited"]
  file = cell_progress.ProgressFile(tmp_path, {}, second, lines)
  while second.done < 500:
    file.advance(500)
  assert file._totals.messages <= 500
  file.finish()
  content = run_files.read_progress(tmp_path)
  whole = cell_progress._Totals()
  whole.add(rows)
  assert content.items() >= json.loads(json.dumps(whole.content())).items()
  assert not lines  # another attempt at the cell does not repeat them
  texts = [text for _, text in content["events"]]
  assert texts == ["resumed at message 50", "worker 1 exited"]
  messages = [point[1] for point in content["points"]]
  assert messages == sorted(messages)
  assert messages[-1] == 500


def test_a_cell_that_resumes_without_a_message_left_ends_at_its_last_point(
  tmp_path, monkeypatch
):
  engine = Fake(drawn(1))
  file = cell_progress.ProgressFile(tmp_path, {}, engine)
  while engine.done < 500:
    file.advance(500)
  file._write(9.0)
  file = cell_progress.ProgressFile(tmp_path, {}, engine)
  ended = time.monotonic() + 100.0
  clock = types.SimpleNamespace(monotonic=lambda: ended)
  monkeypatch.setattr(cell_progress, "time", clock)
  file.advance(500)
  file.finish()
  assert run_files.read_progress(tmp_path)["seconds"] == 9.0


def test_the_strip_of_a_network_is_wire_and_computation():
  wire = network.Network(latency=1.0)
  played = play.begin(
    protocol.Rules(), durations.constant(3.0), 2, network=wire
  )
  played.until(4)
  parts = cell_progress.segments(played.rows, played.compute_times)
  of_first = [each for each in parts if each.lane == 0][:3]
  # A ticket, a job and a message, as in the example of `Play`.
  assert [each[1:] for each in of_first] == [
    *(("wire", 0.0, 1.0), ("compute", 1.0, 4.0), ("wire", 4.0, 5.0)),
  ]
  whole = cell_progress.segments(played.rows, kind="job")
  ended = [each for each in whole if each.end - each.start == 5.0]
  spent = sum(each.end - each.start for each in parts if each.end <= 5.0)
  assert spent == sum(
    each.end - each.start for each in ended if each.end <= 5.0
  )


def test_a_worker_with_two_tickets_computes_one_job_at_a_time():
  trace = kit.trace(
    "0,0,0,send", "0,0,1,send", "2,0,0,receive", "2,0,2,send",
    "3,0,1,receive", "3,0,3,send",
  )
  parts = cell_progress.segments(list(events(trace)))
  assert [each[2:] for each in parts] == [(0.0, 2.0), (2.0, 3.0)]


def test_the_strips_of_live_runs_are_in_seconds():
  for engine in (live_batches.LiveBatchEngine, live_server.LiveServerEngine):
    assert engine.unit == "s"


def test_a_line_that_is_cut_is_no_stretch_of_work(tmp_path):
  rows = [
    kit.row(0.0, 0, 0, base.SEND, seq=0),
    kit.row(1.0, 0, 0, base.RECEIVE, seq=0),
  ]
  place = kit.write_live_cell(tmp_path, rows)
  work = cell_progress.read_work(place)
  assert work == [(0, "job", 0.0, 1.0)]
  with (place / "trace-0.csv").open("a") as file:
    file.write("1.0,0,1,1,se")
  (place / "spans-1.csv").write_text("compute,0.5,2.0,0,0,1234\npu\npush,2.0")
  assert cell_progress.read_work(place) == [(1, "compute", 0.5, 2.0), *work]
  assert cell_progress.last_lines(place / "missing") == []
  text = "\n".join(map(str, range(9000)))
  (place / "long").write_text(text)
  lines = cell_progress.last_lines(place / "long", size=100)
  assert lines[-1] == "8998"  # the last one may be cut
  assert len(lines) == 19


def test_every_engine_shows_what_its_workers_did(tmp_path):
  runs = {
    "server": {"recipe": "asgd"},
    "peers": {"recipe": "d_psgd", "engine": "simulate"},
    "staged": {"engine": "pipeline"},
    "mesh": {"engine": "mesh", "workers": (1,)},
  }
  exp = kit.train_tiny(tmp_path, runs=runs)
  for cell in exp.cells:
    place = tmp_path / "cells" / cell.name
    content = run_files.read_progress(place)
    kinds = {part[1] for part in content["work"]}
    assert kinds <= {"compute", "forward", "backward"}
    assert kinds, cell.name
    records = cell_files.read_records(place)
    assert content["messages"] == len(records["loss"])
    if "staleness" in records:
      counts = np.bincount(records["staleness"].ravel()).tolist()
      assert content["staleness"] == {"width": 1, "counts": counts}


@pytest.mark.parametrize(
  "content", ["{", "[]", '{"points": [[1]]}', '{"points": 3}']
)
def test_a_damaged_file_does_not_stop_a_run(tmp_path, content):
  (tmp_path / run_files.PROGRESS).write_text(content)
  engine = Fake(drawn(2))
  file = cell_progress.ProgressFile(tmp_path, {}, engine)
  file.advance(10)
  file.finish()
  assert run_files.read_progress(tmp_path)["messages"] == 10
