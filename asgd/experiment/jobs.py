"""Trains all cells of an experiment, one after the other or several at once.

The result of a cell is a function of the config and its seed. So processes of
this machine, tasks of a Ray cluster, or commands on several machines with one
results folder may share the cells, with the same bits. Cells whose seconds are
a result (live runs, pipelines, meshes) are trained one by one at the end.
"""

import collections
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
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from asgd import internals
from asgd.experiment import cell_files, code, folder, loop, provenance, schema
from asgd.experiment import cells as cells_lib
from asgd.experiment.cells import Cell, Experiment
from asgd.experiment.machine import Machine
from asgd.experiment.signals import GO_ON, NoSignals, Stopped
from asgd.live import ray_waits
from asgd.parallel import processes

_LOOK = 0.5  # seconds between two checks for signals and exited processes
_SECONDS = 60.0  # to fetch the events of a finished task of Ray


def share(cells: Sequence[Cell], index: int, count: int) -> list[Cell]:
  """Returns the cells of command `index` of `count` commands.

  Cells with one plan are a group. The command gets every count-th group, from
  `index` on.
  """
  groups = cells_lib.groups(cells)[index::count]
  return list(itertools.chain.from_iterable(groups))


def default_jobs() -> int:
  """Returns the number of this machine's cores; with an accelerator, 1."""
  return provenance.cores() if jax.default_backend() == "cpu" else 1


def _warn_of_changes(experiment, finished, place, bar) -> None:
  """Warns of the user's modules that have changed since cells were trained."""
  if not code.describe(experiment.config):  # reading every cell takes time
    return
  changed = collections.Counter()
  for cell in finished:
    described = folder.read_cell(place / cell.name).get("modules") or {}
    config = cells_lib.only(experiment.runs[cell.label], cell)
    changed.update(code.changed(described, config))
  for module, count in changed.items():
    bar.line(
      f"warning: {module} has changed since {count} finished"
      f" {'cell was' if count == 1 else 'cells were'} trained; to train"
      f" again, remove what is in {place}, or choose another folder"
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
) -> None:
  """Trains the cells that are not finished, each as `loop.train` does.

  Args:
    experiment: the experiment.
    workdir: its folder; None where another process has it.
    bar: shows the progress.
    machine: the resources of engines.
    jobs: the number of processes that train at once, or "ray": tasks of a Ray
      cluster.
    cells: the cells to train; None: all.
    signals: as in `loop.train`.
    data_dir: as in `cells.build`, for other processes.
    crew: the processes to use; None: new ones.

  Raises:
    Stopped: after a signal, when the state is saved.
    folder.Incomplete: at the end, if the folder has no valid result of a cell
      (another command may be training it), or if messages of one are missing.
    ValueError: if a cell fails.
  """
  cells = experiment.cells if cells is None else cells
  waiting, finished = [], []
  for cell in cells:
    if loop.finished(experiment, cell, workdir) is None:
      waiting.append(cell)
    else:
      bar.skip(experiment.plan(cell).messages)
      finished.append(cell)
  if workdir is not None:
    _warn_of_changes(experiment, finished, workdir / "cells", bar)
  together = [cell for cell in waiting if not experiment.kind(cell).timed]
  # The longest group first, so that all processes end at about one time.
  groups = sorted(
    cells_lib.groups(together),
    key=lambda group: -len(group) * experiment.plan(group[0]).messages,
  )
  count = len(groups) if jobs == "ray" else min(jobs, len(groups))
  if count > 1 or (jobs == "ray" and count):
    place = workdir.absolute() if jobs == "ray" else workdir
    work = _elsewhere(experiment, together, data_dir, place)
    if jobs == "ray":
      dataset = machine.share(experiment.dataset)
      ends = _on_ray(work, groups, dataset, bar, signals)
    else:
      ends = _in_processes(work, groups, count, bar, signals, crew)
    _conclude(ends, signals)
    waiting = [cell for cell in waiting if cell not in set(together)]
  for number, cell in enumerate(waiting):
    surroundings = {"bar": bar, "machine": machine, "signals": signals}
    _train_unless_in_use(experiment, cell, workdir, **surroundings)
    asked = int(processes.gather([signals.received]).max())
    if asked and number + 1 < len(waiting):
      raise Stopped(f"stopped after {cell.name}; {GO_ON}", asked)
  names = [cell.name for cell in cells]
  why = processes.share(workdir and folder.incomplete(workdir, names))
  if why:
    raise folder.Incomplete(why)


def _train_unless_in_use(experiment, cell, workdir, *, bar, **surroundings):
  """Trains a cell, or warns that another process holds it."""
  try:
    loop.train(experiment, cell, workdir, bar=bar, **surroundings)
  except cell_files.CellInUse as error:
    bar.line(f"warning: {cell.name} is not trained here: {error}")


# Several processes.

# A process sends events (kind, arguments...) to the process that started it.
_SHOWN = ("skip", "update", "line", "finish")  # kinds: methods of a bar
_ENDS = ("crash", "error", "stopped")  # kinds that end it, the worst first


def _elsewhere(
  experiment: Experiment, cells: Sequence[Cell], *places: Any
) -> Callable[..., None]:
  """Returns `_work` for other processes, with the runs of these cells only."""
  labels = dict.fromkeys(cell.label for cell in cells)
  runs = {label: experiment.runs[label] for label in labels}
  resolved = schema.Resolved(experiment.config, runs)
  return functools.partial(_work, resolved, *places)


def _work(resolved, data_dir, workdir, groups, put, signals):
  """Trains groups of cells from an iterator, in another process.

  `put(kind, *arguments)` sends an event.
  """
  from asgd.experiment import ENGINES

  methods = {kind: functools.partial(put, kind) for kind in _SHOWN}
  bar = types.SimpleNamespace(**methods)
  surroundings = {"bar": bar, "machine": Machine(), "signals": signals}
  experiment = None
  try:
    for cell in itertools.chain.from_iterable(groups):
      experiment = experiment or cells_lib.build(
        resolved, engines=ENGINES, data_dir=data_dir
      )
      _train_unless_in_use(experiment, cell, workdir, **surroundings)
      if signals.received:
        return
  except Stopped as stop:
    put("stopped", stop.message, stop.signal_number)
  except (ValueError, OSError) as error:
    put("error", " ".join(str(error).split()))
  except KeyboardInterrupt:
    pass
  except BaseException:
    put("crash", traceback.format_exc())


class _Asked:
  """The signals of a child: `received` is set when its parent asks to stop."""

  def __init__(self, event):
    self._event = event

  @property
  def received(self):
    return signal.SIGTERM if self._event.is_set() else 0


def _child(parent: connection.Connection, stop: Any) -> None:
  """The main function of a child process.

  The child ignores signals: its parent receives them and sets the event `stop`.
  The child exits when its parent exits for any reason.
  """
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)

  def end_with_parent():
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)

  def put(*event):
    parent.send(event)

  def next_group():
    put("next")
    return parent.recv()

  threading.Thread(target=end_with_parent, daemon=True).start()
  work = parent.recv()
  if work is not None:
    work(iter(next_group, None), put, _Asked(stop))


class Crew:
  """Processes of this machine that train cells; each waits for its work.

  A forked process has all modules that this process has imported. A spawned one
  imports them again, which takes seconds of a core. JAX forbids a fork after it
  has found its devices.
  """

  def __init__(self, count: int, *, forks: bool = False):
    """Starts `count` processes."""
    context = multiprocessing.get_context("fork" if forks else "spawn")
    self.stop = context.Event()
    self.pipes: dict[Any, Any] = {}  # to each process
    # Without this patch spawned processes would import the main module, which
    # is the command that started them.
    main_module = mock.patch.multiple(
      sys.modules["__main__"], create=True, __spec__=None, __file__=None
    )
    with main_module:
      for _ in range(count):
        ours, theirs = context.Pipe()
        child = context.Process(
          target=_child, args=(theirs, self.stop), daemon=True
        )
        child.start()
        theirs.close()
        self.pipes[ours] = child

  def close(self) -> None:
    """Ends the processes."""
    for child in self.pipes.values():
      if child.is_alive():
        child.kill()


def start_crew(
  runs: Iterable[schema.Run], engines: schema.Engines, count: int
) -> Crew:
  """Forks at most `count` processes for the cells of these runs; none if one
  process trains all of them, or JAX has its devices."""
  kinds = [(engines[run.engine], run) for run in runs]
  groups = sum(
    len(run.config["workers"]) for kind, run in kinds if not kind.timed
  )
  count = min(count, groups)
  forks = count > 1 and not internals.has_devices()
  return Crew(count if forks else 0, forks=True)


def _in_processes(work, groups, count, bar, signals, crew=None):
  """Trains groups of cells in `count` processes, those of a large enough crew.

  Returns the events that ended the processes.
  """
  if crew is None or len(crew.pipes) < count:
    crew = Crew(count)
  try:
    for number, pipe in enumerate(crew.pipes):
      pipe.send(work if number < count else None)
    return _watch(crew.pipes, groups, crew.stop, bar, signals)
  finally:
    crew.close()


def _watch(children, groups, stop, bar, signals) -> list[tuple]:
  """Sends groups of cells to processes and shows their events on the bar.

  When a process fails or a signal arrives, the others save and end. Returns the
  events that ended the processes.
  """
  ends, waiting, open_pipes = [], list(groups), set(children)
  while open_pipes:
    if signals.received:
      stop.set()
    for pipe in connection.wait(list(open_pipes), timeout=_LOOK):
      try:
        event = pipe.recv()
      except EOFError:  # the process has exited
        open_pipes.remove(pipe)
        child = children[pipe]
        child.join()
        if child.exitcode:
          why = f"process {child.pid} ended with status {child.exitcode}"
          ends.append(("error", f"{why}; {GO_ON}"))
          stop.set()
        continue
      if event == ("next",):
        more = waiting and not stop.is_set()
        pipe.send(waiting.pop(0) if more else None)
      elif _is_end(event, bar):
        ends.append(event)
        stop.set()
  return ends


def _is_end(event, bar) -> bool:
  """Returns whether an event ends its process; shows other events."""
  kind, *rest = event
  if kind not in _ENDS:
    getattr(bar, kind)(*rest)
  return kind in _ENDS


def _on_ray(work, groups, dataset, bar, signals):
  """Trains groups of cells as tasks of Ray; returns their last events."""
  import ray

  @ray.remote(num_cpus=1)
  def task(work, dataset, group):
    del dataset  # holds the reference; `work` loads its own copy
    events: list[tuple] = []
    work([group], lambda *event: events.append(event), NoSignals)
    return [event for event in events if event[0] != "update"]

  if ray.cluster_resources().get("CPU", 0) < 1:
    raise ValueError(
      "--jobs=ray needs a core for each task, and Ray has none to give: start"
      " it with --num-cpus, or use --jobs=1"
    )
  left = [task.remote(work, dataset, group) for group in groups]
  ends = []
  while left and not signals.received:
    done, left = ray_waits.wait(left, count=1, timeout=_LOOK)
    for finished in done:
      try:
        events = ray.get(finished, timeout=_SECONDS)
      except ray.exceptions.RayError as error:
        last = " ".join(str(error).strip().splitlines()[-1:])[:200]
        why = f"a task of Ray has died ({type(error).__name__}: {last})"
        events = [("error", f"{why}; {GO_ON}")]
      ends += [event for event in events if _is_end(event, bar)]
  for reference in left:
    ray.cancel(reference, force=True)
  return ends


def _conclude(ends, signals):
  """Raises the worst error of the processes, or Stopped."""
  if not ends:
    if signals.received:
      raise Stopped(f"stopped; {GO_ON}", signals.received)
    return
  kind, text, *number = min(ends, key=lambda end: _ENDS.index(end[0]))
  if kind == "crash":
    raise RuntimeError(f"a process that trained cells failed:\n{text}")
  if kind == "error":
    raise ValueError(text)
  places = (  # each text is "stopped in CELL at ...; GO_ON"
    text.removeprefix("stopped ").removesuffix(f"; {GO_ON}")
    for _, text, _ in ends
  )
  text = f"stopped {', '.join(places)}; {GO_ON}"
  raise Stopped(text, signals.received or number[0])
