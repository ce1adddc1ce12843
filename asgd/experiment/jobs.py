"""Trains all cells of an experiment, one after the other or several at once.

The result of a cell is a function of the config and its seed. So processes of
this machine, tasks of a Ray cluster, or commands on several machines with one
results folder may share the cells, and compute the same bits. The seconds of
live runs, pipelines and meshes are a result, so their cells are trained one by
one at the end.

Commands call `train_all`. Other processes run `_train_groups`, and report by
events.
"""

import collections
import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection, process, synchronize
from multiprocessing import context as contexts
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from asgd import internals
from asgd.checks import RERUN
from asgd.experiment import (
  cell_files,
  code,
  folder,
  loop,
  provenance,
  schema,
  storage,
)
from asgd.experiment import cells as cells_lib
from asgd.experiment.cells import Cell, Experiment
from asgd.experiment.machine import Machine
from asgd.experiment.signals import NoSignals, Stopped
from asgd.live import ray_waits
from asgd.parallel import processes

_POLL_SECONDS = 0.5  # between two checks for signals and exited processes
_FETCH_SECONDS = 60.0  # to fetch the events of a finished task of Ray

Group = Sequence[Cell]  # cells that share a plan
# A process reports events (kind, arguments...) to the process that started it.
Event = tuple[Any, ...]
_BAR_EVENTS = ("skip", "update", "line", "finish")  # kinds with a bar's method
# Kinds of the last event of a process, the worst first.
_END_EVENTS = ("crash", "error", "stopped")


def cells_of_command(
  cells: Sequence[Cell], index: int, count: int
) -> list[Cell]:
  """Returns the cells of command `index` of `count` commands.

  Cells with one plan are a group. The command gets every count-th group, from
  `index` on.
  """
  groups = cells_lib.groups(cells)[index::count]
  return list(itertools.chain.from_iterable(groups))


def default_jobs() -> int:
  """Returns the number of this machine's cores; with an accelerator, 1."""
  return provenance.cores() if jax.default_backend() == "cpu" else 1


def _warn_of_changes(
  experiment: Experiment,
  finished: Sequence[Cell],
  waiting: Sequence[Cell],
  cells: Path,
  bar: Any,
) -> None:
  """Warns of the user's modules that have changed since the `finished` cells in
  the folder `cells` were trained, or since those of the `waiting` cells that
  can resume were started."""
  if not code.describe(experiment.config):
    return  # reading all cells would take time
  paths = [cells / cell.name / "cell.json" for cell in waiting]
  contents = [("an unfinished", storage.read_json(path)) for path in paths]
  for cell in finished:
    contents.append(("a finished", folder.read_cell(cells / cell.name)))
  changed: collections.Counter[tuple[str, str]] = collections.Counter()
  for kind, content in contents:
    modules = code.changed_modules((content or {}).get("modules") or {})
    changed.update((module, kind) for module in modules)
  for (module, kind), count in changed.items():
    ending = ", which resumes with the new code" * (kind == "an unfinished")
    bar.line(
      f"warning: {module} has changed since {kind} cell ({count} in all) was"
      f" trained{ending}; to train again, remove what is in {cells}, or choose"
      " another folder"
    )


def train_all(
  experiment: Experiment,
  workdir: Path | None,
  *,
  bar: Any,
  machine: Machine,
  jobs: int | str = 1,
  cells: Sequence[Cell] | None = None,
  signals: Any = NoSignals,
  data_dir: str | None = None,
  crew: Any = None,
) -> list[Cell]:
  """Trains the cells that are not finished, each as `loop.train` does.

  Args:
    experiment: the experiment.
    workdir: its folder; None on a process that writes no files.
    bar: shows the progress.
    machine: the resources of engines.
    jobs: the number of processes that train at once, or "ray": tasks of a Ray
      cluster.
    cells: the cells to train; None: all.
    signals: as in `loop.train`.
    data_dir: as in `cells.build`, for other processes.
    crew: the processes to use; None: new ones.

  Returns:
    The cells that had finished before this call.

  Raises:
    Stopped: after a signal, when the state is saved.
    folder.Incomplete: at the end, if the folder has no valid result of a cell
      (another command may be training it), or if a cell lacks messages.
    ValueError: if a cell fails.
  """
  cells = experiment.cells if cells is None else cells
  # [1] Skip the finished cells.
  waiting, finished = [], []
  for cell in cells:
    if loop.finished_result(experiment, cell, workdir) is None:
      waiting.append(cell)
    else:
      bar.skip(experiment.plan(cell).messages)
      finished.append(cell)
  if workdir is not None:
    _warn_of_changes(experiment, finished, waiting, workdir / "cells", bar)
  # [2] Cells that other processes can train at the same time.
  parallel = [
    cell for cell in waiting if not experiment.engine_kind(cell).timed
  ]
  # The longest group first, so that all processes end at about one time.
  groups = sorted(
    cells_lib.groups(parallel),
    key=lambda group: -len(group) * experiment.plan(group[0]).messages,
  )
  on_ray = isinstance(jobs, str)  # "ray"
  count = len(groups) if isinstance(jobs, str) else min(jobs, len(groups))
  if count > 1 or (on_ray and count):
    # A task of Ray has another working directory.
    shared_workdir = workdir.absolute() if on_ray and workdir else workdir
    work = _make_work(experiment, parallel, data_dir, shared_workdir)
    if on_ray:
      dataset = machine.ray_reference(experiment.dataset)
      end_events = _train_on_ray(work, groups, dataset, bar, signals)
    else:
      end_events = _train_in_processes(work, groups, count, bar, signals, crew)
    _raise_worst(end_events, signals)
    waiting = [cell for cell in waiting if cell not in set(parallel)]
  # [3] The other cells, one by one in this process.
  for index, cell in enumerate(waiting):
    train_options = {"bar": bar, "machine": machine, "signals": signals}
    _train_unless_in_use(experiment, cell, workdir, **train_options)
    # On several hosts, a signal to any process stops all of them.
    signal_number = int(processes.gather([signals.received]).max())
    if signal_number and index + 1 < len(waiting):
      raise Stopped(f"stopped after {cell.name}; {RERUN}", signal_number)
  # [4] Another command may still train a cell, or may have failed.
  cell_names = [cell.name for cell in cells]
  reason = processes.share(workdir and folder.incomplete(workdir, cell_names))
  if reason:
    raise folder.Incomplete(reason)
  return finished


def _train_unless_in_use(
  experiment: Experiment,
  cell: Cell,
  workdir: Path | None,
  *,
  bar: Any,
  **train_options: Any,
) -> None:
  """Trains a cell, or warns that another process has locked it. `train_options`
  are further arguments of `loop.train`."""
  try:
    loop.train(experiment, cell, workdir, bar=bar, **train_options)
  except cell_files.CellInUse as error:
    bar.line(f"warning: {cell.name} is not trained here: {error}")


# Several processes.


def _make_work(
  experiment: Experiment, cells: Sequence[Cell], *folders: Any
) -> Callable[..., None]:
  """Returns `_train_groups` for other processes, with its first arguments: the
  runs of `cells`, and `folders`, which are (data_dir, workdir)."""
  labels = dict.fromkeys(cell.label for cell in cells)
  runs = {label: experiment.runs[label] for label in labels}
  # A process gets the checked config, as plain data, and builds the rest.
  resolved = schema.Resolved(experiment.config, runs)
  return functools.partial(_train_groups, resolved, *folders)


def _train_groups(
  resolved: schema.Resolved,
  data_dir: str | None,
  workdir: Path | None,
  groups: Iterable[Group],
  put: Callable[..., None],
  signals: Any,
) -> None:
  """Trains groups of cells from an iterator; another process runs this.

  `put(kind, *arguments)` sends an event.
  """
  from asgd.experiment import ENGINES

  methods = {kind: functools.partial(put, kind) for kind in _BAR_EVENTS}
  bar = types.SimpleNamespace(**methods)
  train_options = {"bar": bar, "machine": Machine(), "signals": signals}
  experiment = None
  try:
    for cell in itertools.chain.from_iterable(groups):
      # Built for the first cell: a process without cells loads no data. The
      # parent has planned, and so checked, all cells.
      experiment = experiment or cells_lib.build(
        resolved, engines=ENGINES, data_dir=data_dir, plans_all=False
      )
      _train_unless_in_use(experiment, cell, workdir, **train_options)
      if signals.received:
        return
  except Stopped as stop:
    put("stopped", stop.message, stop.signal_number)
  except (ValueError, OSError) as error:
    put("error", " ".join(str(error).split()))  # in one line
  except KeyboardInterrupt:
    pass
  except BaseException:
    put("crash", traceback.format_exc())


class _ParentSignals:
  """The signals of a child: `received` is set when its parent asks to stop."""

  def __init__(self, event: synchronize.Event):
    self._event = event

  @property
  def received(self) -> int:
    return signal.SIGTERM if self._event.is_set() else 0


def _child_main(parent: connection.Connection, stop: synchronize.Event) -> None:
  """The main function of a child process.

  The child ignores signals: its parent receives them and sets the event `stop`.
  The child exits when its parent exits for any reason.
  """
  for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signal_number, signal.SIG_IGN)

  starter = multiprocessing.parent_process()
  assert starter is not None, "this is the main function of a child"

  def end_with_parent() -> None:
    connection.wait([starter.sentinel])
    os._exit(1)

  def put(*event: Any) -> None:
    parent.send(event)

  def next_group() -> Group | None:
    put("next")
    return parent.recv()

  threading.Thread(target=end_with_parent, daemon=True).start()
  # [1] The work; None if the command needs fewer processes.
  work = parent.recv()
  # [2] Groups, one after the other, until the parent sends None.
  if work is not None:
    work(iter(next_group, None), put, _ParentSignals(stop))


class Crew:
  """Processes of this machine that train cells; each waits for its work.

  A forked process has all modules that this process has imported. A spawned one
  imports them again, which takes seconds of a core. JAX forbids a fork after it
  has found its devices.
  """

  def __init__(self, count: int, *, forks: bool = False):
    """Starts `count` processes."""
    context: contexts.ForkContext | contexts.SpawnContext
    if forks:
      context = multiprocessing.get_context("fork")
    else:
      context = multiprocessing.get_context("spawn")
    self.stop = context.Event()  # set: processes save and end
    # Pipe to a process -> the process.
    self.pipes: dict[connection.Connection, process.BaseProcess] = {}
    # Without this patch spawned processes would import the main module, which
    # is the command that started them.
    main_module = mock.patch.multiple(
      sys.modules["__main__"], create=True, __spec__=None, __file__=None
    )
    with main_module:
      for _ in range(count):
        parent_end, child_end = context.Pipe()
        child = context.Process(
          target=_child_main, args=(child_end, self.stop), daemon=True
        )
        child.start()
        # The child alone then holds its end, and its exit closes the pipe.
        child_end.close()
        self.pipes[parent_end] = child

  def close(self) -> None:
    """Ends the processes."""
    for child in self.pipes.values():
      if child.is_alive():
        child.kill()


def start_crew(
  runs: Iterable[schema.Run], engines: schema.Engines, count: int
) -> Crew:
  """Forks at most `count` processes for the cells of these runs. Forks none if
  one process trains all cells, or if JAX has found its devices."""
  kinds = [(engines[run.engine], run) for run in runs]
  groups = sum(
    len(run.config["workers"]) for kind, run in kinds if not kind.timed
  )
  count = min(count, groups)
  forks = count > 1 and not internals.has_devices()
  return Crew(count if forks else 0, forks=True)


def _train_in_processes(
  work: Callable[..., None],
  groups: Sequence[Group],
  count: int,
  bar: Any,
  signals: Any,
  crew: Crew | None = None,
) -> list[Event]:
  """Trains groups of cells in `count` processes: those of `crew` if it has so
  many, else new ones.

  Returns the events that ended the processes.
  """
  if crew is None or len(crew.pipes) < count:
    crew = Crew(count)
  try:
    for index, pipe in enumerate(crew.pipes):
      _send(pipe, work if index < count else None)
    return _watch(crew, groups, bar, signals)
  finally:
    crew.close()


def _send(pipe: connection.Connection, value: Any) -> None:
  """Sends a value to a process; does nothing if it has exited."""
  with contextlib.suppress(BrokenPipeError, ConnectionResetError):
    pipe.send(value)


def _watch(
  crew: Crew, groups: Sequence[Group], bar: Any, signals: Any
) -> list[Event]:
  """Sends groups of cells to processes and shows their events on the bar.

  When a process fails or a signal arrives, the processes save and end. Returns
  the events that ended the processes.
  """
  end_events: list[Event] = []
  waiting, open_pipes = list(groups), set(crew.pipes)
  while open_pipes:
    # [1] Forward a request to stop, after which the processes end.
    if signals.received:
      crew.stop.set()
    # [2] Take an event from each process that has one.
    ready_pipes = connection.wait(list(open_pipes), timeout=_POLL_SECONDS)
    for pipe in open_pipes.intersection(ready_pipes):
      try:
        event = pipe.recv()
      except (EOFError, ConnectionResetError):  # the process has exited
        open_pipes.remove(pipe)
        exited = crew.pipes[pipe]
        exited.join()
        if exited.exitcode:
          reason = f"process {exited.pid} ended with status {exited.exitcode}"
          end_events.append(("error", f"{reason}; {RERUN}"))
          crew.stop.set()
        continue
      # [3] Answer a process that is idle, or show the event.
      if event == ("next",):
        has_work = waiting and not crew.stop.is_set()
        _send(pipe, waiting.pop(0) if has_work else None)
      elif _handle_event(event, bar):
        end_events.append(event)
        crew.stop.set()
  return end_events


def _handle_event(event: Event, bar: Any) -> bool:
  """Returns whether an event ends its process; shows other events."""
  kind, *arguments = event
  if kind not in _END_EVENTS:
    getattr(bar, kind)(*arguments)
  return kind in _END_EVENTS


def _train_on_ray(
  work: Callable[..., None],
  groups: Sequence[Group],
  dataset: Any,
  bar: Any,
  signals: Any,
) -> list[Event]:
  """Trains groups of cells as tasks of Ray; returns their last events.
  `dataset` is a reference to the data in Ray's object store."""
  import ray

  @ray.remote(num_cpus=1)
  def task(
    work: Callable[..., None], dataset: Any, group: Group
  ) -> list[Event]:
    del dataset  # holds the reference; `work` loads its own copy
    events: list[Event] = []
    work([group], lambda *event: events.append(event), NoSignals)
    # All events arrive together at the end, so updates show nothing new.
    return [event for event in events if event[0] != "update"]

  if ray.cluster_resources().get("CPU", 0) < 1:
    raise ValueError(
      "--jobs=ray needs a core for each task, and Ray has none to give: start"
      " it with --num-cpus, or use --jobs=1"
    )
  references = [task.remote(work, dataset, group) for group in groups]
  end_events: list[Event] = []
  while references and not signals.received:
    finished_tasks, references = ray_waits.wait(
      references, count=1, timeout=_POLL_SECONDS
    )
    for reference in finished_tasks:
      try:
        events = ray.get(reference, timeout=_FETCH_SECONDS)
      except ray.exceptions.RayError as error:
        last_line = " ".join(str(error).strip().splitlines()[-1:])[:200]
        reason = f"a task of Ray has died ({type(error).__name__}: {last_line})"
        events = [("error", f"{reason}; {RERUN}")]
      end_events += [event for event in events if _handle_event(event, bar)]
  # Nothing is lost: a cell resumes from its checkpoint in the results folder.
  for reference in references:
    ray.cancel(reference, force=True)
  return end_events


def _raise_worst(end_events: Sequence[Event], signals: Any) -> None:
  """Raises the worst error of the processes, or Stopped."""
  if not end_events:
    if signals.received:
      raise Stopped(f"stopped; {RERUN}", signals.received)
    return
  kind, text, *signal_numbers = min(
    end_events, key=lambda event: _END_EVENTS.index(event[0])
  )
  if kind == "crash":
    raise RuntimeError(f"a process that trained cells failed:\n{text}")
  if kind == "error":
    raise ValueError(text)
  # Each event is ("stopped", "stopped in CELL at ...; RERUN", signal).
  cells = (
    text.removeprefix("stopped ").removesuffix(f"; {RERUN}")
    for _, text, _ in end_events
  )
  text = f"stopped {', '.join(cells)}; {RERUN}"
  raise Stopped(text, signals.received or signal_numbers[0])
