"""Damage: what happens to the files of an experiment is never silent.

A byte of a file of a finished or a stopped experiment is changed, or the file
is cut, emptied or removed. The same call then comes to the same bits (a live
run: to those of its trace), or refuses in one line that names the file and a
remedy. ASGD_DAMAGE=2000 tries so many cases, and -s shows what came of them.
"""

import collections
import contextlib
import copy
import io
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import kit
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from asgd import base, experiment, text_table
from asgd.experiment import cell_files, cell_log, folder, jobs, report, storage
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.experiment.protocols import server
from asgd.experiment.signals import NoSignals, Stopped
from asgd.live.faults import Fault
from asgd.live.journal import journal_path, read_journal
from asgd.orders.trace import from_events
from asgd.pipeline.engine import PIPELINE

CASES = int(os.environ.get("ASGD_DAMAGE", "80"))
ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
TINY = {**kit.TINY_RUN, "checkpoint_seconds": 0.0}
CONFIGS: dict[str, Any] = {
  "simulate": {},
  "mesh": {},
  # Cuts by time are those of measurements.json.
  "pipeline": {"pipeline": {"stages": 2, "microbatches": 4, "cuts": "time"}},
  "threads": {"server": {"log": 4}, "live": {"spans": True}},
}
ENDED, STOPPED, MEMORY_LOST = "ended", "stopped", "memory lost"
STATES = [
  *((engine, state) for engine in CONFIGS for state in (ENDED, STOPPED)),
  ("threads", MEMORY_LOST),
]
PARAMS = "params.msgpack"
KINDS = "changed", "cut", "changed", "emptied", "changed", "removed"
REMEDY = re.compile(
  "[Pp]ut .* back|[Rr]estore|[Rr]emove|(start|start anew) in another folder"
  "|choose another folder"
)
class Case(NamedTuple):
  """An experiment that ended or was stopped, to be damaged again and again."""

  engine: str
  experiment: Any
  place: Path  # its folder, and the memory of a live run
  template: Path  # the place as it was
  # Its files and their sizes, those of a kind under one name.
  groups: dict[str, list[tuple[Path, int]]]

  @property
  def workdir(self):
    return self.place / "out"

  @property
  def cell(self):
    return self.workdir / "cells" / self.experiment.cells[0].name

  def restore(self):
    shutil.rmtree(self.place)
    shutil.copytree(self.template, self.place)

  def run(self, faults=(), bar=None, signals=NoSignals):
    """Does what launch.train does."""
    memory = self.place / "memory"
    memory.mkdir(exist_ok=True)
    exp = self.experiment
    workdir = folder.open_folder(str(self.workdir), "x", exp)
    assert folder.read_measurements(workdir) in (None, exp.measurements)
    jobs.train_all(
      exp,
      workdir,
      bar=bar or Silent(),
      machine=Machine(str(memory), faults=faults),
      signals=signals,
    )
    with contextlib.redirect_stdout(io.StringIO()):
      report.write(workdir, exp)


def group_of(path):
  """A name for a file in a folder; checkpoints have many of a kind."""
  parts = path.parts[2:] if path.parts[0] == "cells" else path.parts
  many = {"checkpoints", "tensorboard"} & set(parts)
  return many.pop() if many else "/".join(parts)


def prepare(exp, engine, state, place):
  """Trains an experiment to its end, or until it is stopped."""
  case = Case(engine, exp, place, place.with_name(f"{place.name}-template"), {})
  place.mkdir()
  if state == ENDED:
    case.run()
  else:
    # The driver of a live run looks up before all is done.
    slow = [Fault(worker, 6, "slow", 0.5) for worker in range(2)]
    stop = kit.StopAfter(10)
    with pytest.raises(Stopped):
      case.run(slow if engine == "threads" else (), stop, stop)
  if state == MEMORY_LOST:
    shutil.rmtree(place / "memory")
  no_sockets = shutil.ignore_patterns("*.sock")
  shutil.copytree(place, case.template, ignore=no_sockets)
  groups = collections.defaultdict(list)
  for path in sorted(case.workdir.rglob("*")):
    if path.is_file() and path.name != ".lock":
      relative = path.relative_to(case.workdir)
      size = path.stat().st_size
      groups[group_of(relative)].append((relative, size))
  exp = copy.copy(exp)  # what was compiled is shared
  exp.config = {**exp.config, "checkpoint_seconds": 1e9}
  return case._replace(experiment=exp, groups=dict(groups))


def contents(cell):
  """Returns what a finished cell came to, times left out."""
  result = folder.finished_result(cell)
  assert result is not None
  columns = cell_files.read_records(cell).items()
  records = {name: column.tobytes() for name, column in columns}
  rows = [kit.lasting(row) for row in folder.read_rows(cell)]
  return kit.lasting(result), rows, records, cell_files.read_file(cell, PARAMS)


class World(NamedTuple):
  """What the cases share."""

  cases: dict[tuple[str, str], Case]  # by engine and state
  expected: dict[str, Any]  # engine -> what a run of it comes to
  outcomes: collections.Counter  # of (engine, state, file, outcome)

  def __repr__(self):
    return "World"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  root, cases = tmp_path_factory.mktemp("damage"), {}
  exps = {
    name: kit.build(TINY, **{"engine": name, **own})
    for name, own in CONFIGS.items()
  }
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("asgd.experiment.figure.draw", lambda *args: [])
    for engine, state in STATES:
      place = root / f"{engine}-{state.replace(' ', '-')}"
      cases[engine, state] = prepare(exps[engine], engine, state, place)
    expected = {name: contents(cases[name, ENDED].cell) for name in CONFIGS}
    outcomes = collections.Counter()
    yield World(cases, expected, outcomes)
  rows = [(*key, str(count)) for key, count in sorted(outcomes.items())]
  header = ["engine", "state", "file", "outcome", "cases"]
  print(text_table.format_table(header, rows))


def written_so_far(cell):
  """Returns (evaluations, journal) of a live run, before it goes on."""
  try:
    events = read_journal(journal_path(cell, 0))
    rows = cell_log.read_rows_so_far(cell)
  except ValueError:
    return [], []  # it will be refused
  received = sum(event.action == base.RECEIVE for event in events)
  return [row for row in rows if row["message"] <= received], events


def check_live(case, rows, events):
  """Asserts that a run went on from its evaluations and its journal, and came
  to what its trace says."""
  journal = read_journal(journal_path(case.cell, 0))
  assert journal[: len(events)] == events
  assert folder.read_rows(case.cell)[: len(rows)] == rows
  result = folder.finished_result(case.cell)
  exp = case.experiment
  (cell,) = exp.cells
  plan = exp.plan(cell)
  options = {"group": plan.devices}
  traces = [from_events(journal)]
  params, records = server.train_in_order(plan, cell.seed, traces, **options)
  assert storage.digest(params) == result["params_sha256"]
  if not result["rolled_back"]:
    with np.load(case.cell / "records.npz") as file:
      for name, column in records._asdict().items():
        np.testing.assert_array_equal(file[name], column)


def damage(path, kind, at, bits):
  """Does something to a file, or to its byte `at`."""
  content = bytearray(path.read_bytes())
  if kind == "changed" and content:
    content[at] ^= bits
  elif kind in ("cut", "emptied"):
    del content[at if kind == "cut" else 0 :]
  path.write_bytes(content)
  if kind == "removed":
    path.unlink()


def assert_clear(error, path):
  """Asserts that an error is one line that names the file and a remedy."""
  line = str(error)
  assert line.isprintable()
  assert len(line) <= 600
  assert path.name in line
  assert REMEDY.search(line)


# What orbax leaves to be collected of a checkpoint that it could not read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@settings(
  max_examples=CASES,
  deadline=None,
  derandomize=True,
  database=None,
  phases=(Phase.generate, Phase.shrink),
  suppress_health_check=list(HealthCheck),
)
@given(
  state=st.sampled_from(STATES),
  seed=st.integers(0, 2**32 - 1),  # of the file
  kind=st.sampled_from(KINDS),
  at=st.integers(0, 99_999),
  bits=st.integers(1, 255),
)
def test_damage_is_harmless_or_refused(world, state, seed, kind, at, bits):
  case, choose = world.cases[state], random.Random(seed).choice
  group = choose(sorted(case.groups))
  path, size = choose(case.groups[group])
  note(f"{path} of {size} bytes")
  path, at = case.workdir / path, at % max(size, 1)
  case.restore()
  damage(path, kind, at, bits)
  live = case.engine == "threads"
  before = written_so_far(case.cell) if live else None
  try:
    case.run()
  except ValueError as error:
    assert_clear(error, path)
    world.outcomes[(*state, group, "refused")] += 1
    return
  if live and state[1] != ENDED:
    check_live(case, *before)
  else:
    assert contents(case.cell) == world.expected[case.engine]
  if live and path.name.startswith(("trace-", "records-")):
    # What was done to them is told also where the cell has ended.
    original = (case.template / path.relative_to(case.place)).read_bytes()
    assert state[1] != ENDED or path.read_bytes() == original
  assert "not finished" not in (case.workdir / "table.txt").read_text()
  world.outcomes[(*state, group, "the same")] += 1
