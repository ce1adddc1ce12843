"""The run loop: what diverged is told, and kept or refused."""

import signal

import kit
import numpy as np
import pytest

from asgd import experiment
from asgd.checks import RERUN
from asgd.experiment import folder, jobs, loop, storage
from asgd.experiment.engines import (
  NonFiniteResult,
  ProcessExited,
  evaluation_messages,
)
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.experiment.signals import NoSignals, Stopped
from asgd.live import faults

# When evaluations are.


def test_evaluations_are_evenly_spaced_and_the_last_is_at_the_end():
  assert evaluation_messages(4, 100) == [25, 50, 75, 100]
  assert evaluation_messages(3, 10) == [3, 7, 10]
  assert evaluation_messages(9, 4) == [1, 2, 3, 4]
  assert evaluation_messages(3, 24, quantum=4) == [8, 16, 24]
  assert evaluation_messages(10, 12, quantum=6) == [6, 12]


# Whether a run diverged.


def losses(*parts):
  """The losses of so many messages each, with a little noise."""
  rng = np.random.default_rng(0)
  values = np.concatenate([np.linspace(a, b, n) for n, a, b in parts])
  return values + rng.normal(0, 0.02, len(values))


GUESS = np.log(10)


@pytest.mark.parametrize(
  ("loss", "diverged"),
  [
    # Falling, though it is above that of guessing throughout.
    (losses((400, 3.7, 2.4)), False),
    (losses((44, 3.7, 3.2)), False),
    # Flat: it has learnt nothing, but nothing blew up.
    (losses((400, GUESS, GUESS)), False),
    (losses((400, 0.1, 0.1)), False),
    # Up and down again, to something learnt.
    (losses((50, 2.5, 5.0), (350, 5.0, 1.5)), False),
    # It ends above where it began, in the end or all the time.
    (losses((350, 2.5, 0.5), (50, 3.5, 3.5)), True),
    (losses((400, 2.5, 25.0)), True),
    (losses((400, 0.3, 0.5)), True),
    # Up, and then dead.
    (losses((50, 2.6, 6.0), (350, GUESS, GUESS)), True),
    (losses((100, 2.4, np.nan)), True),
    # Too few to tell beginning and end.
    (losses((15, 1.0, 3.0)), False),
    (np.zeros(0), False),
  ],
)
def test_a_run_has_diverged_if_it_ends_above_where_it_began(loss, diverged):
  for workers in (1, 4, 8):
    assert loop.has_diverged(loss, workers, GUESS) is diverged


# What is not finite.


def exploding(**config):
  broken = {"recipe": "nag_asgd", "learning_rate": 1e30}
  runs = {"broken": broken, "fine": {"recipe": "asgd"}}
  return kit.tiny(**{"runs": runs, "evaluations": 2, **config})


def train_all(exp, workdir):
  jobs.train_all(exp, workdir, bar=Silent(), machine=Machine())


def result_of(workdir, cell):
  return folder.finished_result(workdir / "cells" / cell)


def test_a_nan_stops_or_is_recorded_and_the_next_cell_goes_on(tmp_path):
  with pytest.raises(NonFiniteResult) as caught:
    train_all(exploding(), tmp_path)
  line = str(caught.value)
  assert line.startswith("broken-n2-s0: the loss is ")
  assert "lower --config.learning_rate" in line
  assert line.endswith(
    "or set --config.on_nan=record to keep the cell as diverged and continue"
  )
  assert "\n" not in line
  assert not list(tmp_path.glob("cells/*/cell.npz"))
  # The remedy that the line names works, and the run resumes in its folder.
  train_all(exploding(on_nan="record"), tmp_path)
  broken = result_of(tmp_path, "broken-n2-s0")
  assert broken["diverged"] is True
  assert broken["evaluations"] == 1
  rows = folder.read_rows(tmp_path / "cells" / "broken-n2-s0")
  assert [row["diverged"] for row in rows] == [True]
  fine = result_of(tmp_path, "fine-n2-s0")
  assert fine["diverged"] is False
  assert fine["evaluations"] == 2
  assert len(folder.read_results(tmp_path)) == 2


# What dies.


class Mortal:
  """The engine of a cell that dies at some calls of `advance`."""

  def __init__(self, engine, deaths):
    self._engine, self._deaths = engine, deaths

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def advance(self, until):
    if self._deaths and self._deaths[0] <= self._engine.done:
      self._deaths.pop(0)
      raise ProcessExited("a process died")
    return self._engine.advance(min(until, self._engine.done + 1))


class Lines(Silent):
  def __init__(self):
    self.lines = []

  def line(self, text):
    self.lines.append(text)


def mortal(exp, deaths):
  (cell,) = exp.cells
  kind = exp.engine_kind(cell)

  def start(context):
    return Mortal(kind.start(context), deaths)

  exp.engines = {**exp.engines, "simulate": kind._replace(start=start)}
  return cell


def test_a_cell_whose_engine_dies_goes_on_to_the_same_bits(tmp_path):
  config = {"only": ("fine",), "examples": 16 * 12}
  expected = kit.train(exploding(**config)).result
  exp = exploding(**config, checkpoint_seconds=0.0)
  bar = Lines()
  cell = mortal(exp, [3, 3, 9])
  result = loop.train(exp, cell, tmp_path / "died", bar=bar)
  died = "fine-n2-s0: a process died; resuming from the last checkpoint"
  resuming = "fine-n2-s0: resuming at message {}".format
  expected_lines = [(died, resuming(done)) for done in (3, 3, 9)]
  assert bar.lines == [line for lines in expected_lines for line in lines]
  result["wall_seconds"] = expected["wall_seconds"]
  assert storage.to_json(result) == storage.to_json(expected)


def test_a_save_that_was_killed_is_no_checkpoint(tmp_path):
  exp = exploding()
  bare = exp.cells[0], tmp_path, Silent(), Machine(), NoSignals
  place = tmp_path / "cells" / exp.cells[0].name / "checkpoints"
  for name, has_saved in (("8.orbax-checkpoint-tmp", False), ("8", True)):
    (place / name).mkdir(parents=True)
    assert loop._Attempt(exp, *bare).has_saved is has_saved


def test_an_engine_that_dies_without_progress_is_given_up(tmp_path):
  exp = exploding(only=("fine",))
  cell = mortal(exp, [0, 0, 0, 0])
  words = "^fine-n2-s0: a process died; run .* to resume from the beginning, as"
  bar = Lines()
  with pytest.raises(ValueError, match=words):
    loop.train(exp, cell, tmp_path, bar=bar)
  assert bar.lines == [
    "fine-n2-s0: a process died; starting again, as no checkpoint was saved yet"
  ] * 2
  machine = Machine(faults=[faults.parse("kill:0:1")])
  cell = mortal(exp, [0, 0, 0, 0])
  words = "The faults of --fault occur again each .*: leave them out and"
  with pytest.raises(ValueError, match=words):
    loop.train(exp, cell, tmp_path, bar=Silent(), machine=machine)


# Shares of the cells.


def test_shares_are_whole_groups_and_together_everything():
  exp = exploding(seeds=(0, 1), workers=(2, 3))
  for count in (1, 2, 3, 7):
    shares = [jobs.cells_of_command(exp.cells, i, count) for i in range(count)]
    assert sorted(c for share in shares for c in share) == sorted(exp.cells)
    for share in shares:
      assert len(share) % 2 == 0


def test_all_cells_that_were_stopped_are_named(tmp_path, monkeypatch):
  ends = [
    ("stopped", f"stopped in {cell} at message 1; {RERUN}", signal.SIGTERM)
    for cell in "ab"
  ]
  monkeypatch.setattr(jobs, "_train_in_processes", lambda *_: ends)
  exp, where = exploding(workers=(2, 3)), Machine()
  with pytest.raises(Stopped) as stop:
    jobs.train_all(exp, tmp_path, bar=Silent(), machine=where, jobs=2)
  places = "in a at message 1, in b at message 1"
  assert str(stop.value) == f"stopped {places}; {RERUN}"
  assert stop.value.signal_number == signal.SIGTERM


# Live runs.


@pytest.mark.process
@pytest.mark.parametrize("has_work", [False, True])
def test_a_process_that_is_killed_before_it_reads_its_work_is_named(has_work):
  crew = jobs.Crew(1)
  ((pipe, child),) = crew.pipes.items()
  if has_work:
    pipe.send(None)  # it is still importing
  child.kill()
  child.join()
  (end,) = jobs._train_in_processes(None, [], 1, None, NoSignals, crew)
  assert end == ("error", f"process {child.pid} ended with status -9; {RERUN}")


def test_an_evaluation_is_compiled_before_a_live_run_begins(tmp_path):
  calls = []

  def start(context):
    calls.append(context.cell.seed)
    raise ValueError("begun")

  live = experiment.ENGINES["threads"]._replace(start=start)
  exp = experiment.build(
    {**kit.TINY_RUN, "engine": "threads", "seeds": (0, 1)},
    engines={"threads": live},
  )
  (problem,) = exp._problems.values()
  counted = problem._replace(evaluate=lambda _: calls.append("evaluated"))
  exp._problems, exp._problems_of_runs = {16: counted}, {}
  for cell in exp.cells:
    with pytest.raises(ValueError, match="begun"):
      loop.train(exp, cell, tmp_path, bar=Silent())
  assert calls == ["evaluated", 0, 1]


# A trace of the profiler.


def test_a_machine_with_a_profile_leaves_one_trace(tmp_path):
  exp = kit.tiny(seeds=(0, 1), evaluations=1)
  machine = Machine(profile=str(tmp_path / "trace"))
  for cell in exp.cells:
    loop.train(exp, cell, tmp_path, bar=Silent(), machine=machine)
  machine.close()
  (trace,) = tmp_path.glob("trace/plugins/profile/*/*.xplane.pb")
  assert trace.stat().st_size
