"""All cells of an experiment: one after the other, or several at once.

Cells are independent: what a cell computes is a function of the config and its
seed. So they can be trained by several processes of this machine, as tasks of a
Ray cluster, or in shares by commands on several machines with one results
folder, and come to the same bits. Cells of engines whose seconds are a result
(live runs, pipelines, meshes) are trained one at a time, after the others.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import jax

from asgd.experiment import cells as cells_lib
from asgd.experiment import folder, loop
from asgd.experiment.cells import Cell, Experiment
from asgd.experiment.machine import Machine
from asgd.experiment.signals import NoSignals, Stopped
from asgd.parallel import processes

_LOOK = 0.5  # seconds between two looks at whether a process has died


class Share(NamedTuple):
  """Which of the cells one command trains: every count-th, from index on."""

  index: int = 0
  count: int = 1

  def of(self, cells: Sequence[Cell]) -> list[Cell]:
    """Returns the share, in whole groups of cells that have a plan together."""
    groups = cells_lib.groups(cells)[self.index :: self.count]
    return [cell for group in groups for cell in group]


def default_jobs() -> int:
  """Returns how many processes train at once unless a number is asked for: one
  for each core, or one where there is an accelerator."""
  if jax.default_backend() != "cpu":
    return 1
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def train_all(
  experiment: Experiment,
  workdir: Path | None,
  *,
  bar: Any,
  machine: Machine,
  jobs: int | str = 1,
  share: Share = Share(),  # noqa: B008
  signals: Any = NoSignals,
  data_dir: str | None = None,
) -> None:
  """Trains the cells that are not finished.

  Args:
    experiment: whose cells they are.
    workdir: its folder; None where another process has it.
    bar: told how far it is.
    machine: what engines run on.
    jobs: processes that train at once, or "ray": tasks of a Ray cluster.
    share: which cells this command trains.
    signals: its `received` says whether to stop.
    data_dir: where other processes find the data.

  Raises:
    Stopped: once all is saved.
    ValueError: if a cell fails, or is trained by another command.
  """
  waiting = []
  for cell in share.of(experiment.cells):
    place = workdir and workdir / "cells" / cell.name
    result = processes.share(place and folder.finished_result(place))
    if result is not None:
      if place is not None:
        experiment.kind(cell).clean(place)
      bar.skip(experiment.plan(cell).messages)
    else:
      waiting.append(cell)
  together = [cell for cell in waiting if not experiment.kind(cell).timed]
  groups = cells_lib.groups(together)
  count = len(groups) if jobs == "ray" else min(jobs, len(groups))
  if count > 1 or (jobs == "ray" and count):
    spec = _Spec(_config_of(experiment, together), data_dir, str(workdir))
    run = _on_ray if jobs == "ray" else _in_processes
    run(spec, groups, count, experiment, bar, machine, signals)
    waiting = [cell for cell in waiting if cell not in set(together)]
  in_use = []
  for number, cell in enumerate(waiting):
    try:
      loop.train(
        *(experiment, cell, workdir),
        bar=bar,
        machine=machine,
        signals=signals,
      )
    except folder.CellInUse as error:
      in_use.append(error)
    asked = int(processes.gather([signals.received]).max())
    if asked and number + 1 < len(waiting):
      raise Stopped(
        f"stopped after {cell.name}; run the same command again to go on", asked
      )
  if in_use:
    raise in_use[0]


# Several processes.


class _Spec(NamedTuple):
  """What another process needs to train cells."""

  config: dict[str, Any]  # of runs that are not timed, resolved
  data_dir: str | None
  workdir: str


def _config_of(experiment, cells) -> dict[str, Any]:
  """The config of some cells' runs, all simulated: plain data."""
  labels = list(dict.fromkeys(cell.label for cell in cells))
  engines = {
    experiment.runs[label].engine: experiment.engines[
      experiment.runs[label].engine
    ]
    for label in labels
  }
  config = cells_lib.sections_of(experiment.config, engines)
  return {**config, "only": labels, "runs": experiment.config["runs"]}


def _build(spec: _Spec) -> Experiment:
  from asgd.experiment import ENGINES

  config = dict(spec.config)
  config["runs"] = {k: config["runs"][k] for k in config["only"]}
  engines = {
    name: kind
    for name, kind in ENGINES.items()
    if set(kind.sections) <= set(config)
  }
  config = cells_lib.sections_of(config, engines)
  return cells_lib.build(config, engines=engines, data_dir=spec.data_dir)


class _Teller:
  """A bar whose lines another process shows."""

  def __init__(self, put: Callable[[tuple], None]):
    self._put = put

  def skip(self, messages):
    """Counts messages that an earlier run received."""
    self._put(("skip", messages))

  def update(self, cell, progress):
    """Counts messages and shows what they were like."""
    self._put(("update", cell, progress))

  def line(self, text):
    """Shows a line."""
    self._put(("line", text))

  def finish(self, cell, result):
    """Shows what a cell came to."""
    self._put(("finish", cell, result))


def _work(spec, groups, put, signals):
  """Trains groups of cells as they come, in another process."""
  experiment, machine = None, Machine()
  bar = _Teller(put)
  try:
    for group in groups:
      experiment = experiment or _build(spec)
      for cell in group:
        loop.train(
          *(experiment, Cell(*cell), Path(spec.workdir)),
          bar=bar,
          machine=machine,
          signals=signals,
        )
        if signals.received:
          return
  except Stopped as stop:
    put(("stopped", stop.message, stop.signal_number))
  except (ValueError, OSError) as error:
    put(("error", " ".join(str(error).split())))
  except KeyboardInterrupt:
    pass
  except BaseException:
    put(("crash", traceback.format_exc()))


class _Asked:
  """Whether the process that started this one wants it to stop."""

  def __init__(self, event):
    self._event = event

  @property
  def received(self) -> int:
    """As `Signals.received`."""
    return signal.SIGTERM if self._event.is_set() else 0


def _child(spec, parent, stop):
  """The main function of a process. Signals are for its parent, which says when
  to stop; it ends with its parent, however that ends."""
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)

  def end_with_parent():
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)

  def groups():
    while True:
      parent.send(("next",))
      group = parent.recv()
      if group is None:
        return
      yield group

  threading.Thread(target=end_with_parent, daemon=True).start()
  _work(spec, groups(), parent.send, _Asked(stop))


def _in_processes(spec, groups, count, experiment, bar, machine, signals):
  """Trains groups of cells in `count` processes of this machine."""
  del machine
  context = multiprocessing.get_context("spawn")
  # The longest first, so that processes end together.
  groups = sorted(
    groups,
    key=lambda group: -len(group) * experiment.plan(group[0]).messages,
  )
  stop, children = context.Event(), {}
  try:
    with _main_module_hidden():
      for _ in range(count):
        ours, theirs = context.Pipe()
        arguments = spec, theirs, stop
        child = context.Process(target=_child, args=arguments, daemon=True)
        child.start()
        theirs.close()
        children[ours] = child
    ends = _watch(children, groups, stop, bar, signals)
  finally:
    for child in children.values():
      if child.is_alive():
        child.kill()
  _conclude(ends, signals)


@contextlib.contextmanager
def _main_module_hidden():
  """Keeps spawned processes from importing the command that started them."""
  main = sys.modules["__main__"]
  spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
  main.__spec__ = None
  if path is not None:
    del main.__file__
  try:
    yield
  finally:
    main.__spec__ = spec
    if path is not None:
      main.__file__ = path


def _watch(children, groups, stop, bar, signals):
  """Gives groups of cells to processes and shows what they tell, until all have
  ended; returns how they ended. When one fails, or a signal comes, the others
  save what they have and end."""
  ends, waiting, open_pipes = [], list(groups), set(children)
  while open_pipes:
    if signals.received:
      stop.set()
    for pipe in connection.wait(list(open_pipes), timeout=_LOOK):
      try:
        kind, *rest = event = pipe.recv()
      except EOFError:  # it has ended
        open_pipes.remove(pipe)
        child = children[pipe]
        child.join()
        if child.exitcode:
          why = f"process {child.pid} ended with status {child.exitcode}"
          ends.append(("error", f"{why}; run the same command again to go on"))
          stop.set()
        continue
      if kind == "next":
        more = waiting and not stop.is_set()
        pipe.send([tuple(cell) for cell in waiting.pop(0)] if more else None)
      elif kind in ("stopped", "error", "crash"):
        ends.append(event)
        stop.set()
      else:
        getattr(bar, kind)(*rest)
  return ends


def _conclude(ends, signals):
  """Raises what the processes ended with, the worst first."""
  for kind in ("crash", "error", "stopped"):
    for end in ends:
      if end[0] != kind:
        continue
      if kind == "crash":
        raise RuntimeError(f"a process that trained cells failed:\n{end[1]}")
      if kind == "error":
        raise ValueError(end[1])
      raise Stopped(end[1], signals.received or end[2])
  if signals.received:
    raise Stopped(
      "stopped; run the same command again to go on", signals.received
    )


def _on_ray(spec, groups, count, experiment, bar, machine, signals):
  """Trains groups of cells as tasks of a Ray cluster, which sees the folder."""
  del count
  import ray

  reference = machine.share(experiment.dataset)
  spec = spec._replace(workdir=os.path.abspath(spec.workdir))

  @ray.remote(num_cpus=1)
  def task(spec, dataset, group):
    del dataset  # holds the reference; the task reads its own
    events: list[tuple] = []
    _work(spec, [group], events.append, NoSignals)
    return [event for event in events if event[0] != "update"]

  left = [
    task.remote(spec, reference, [tuple(cell) for cell in group])
    for group in groups
  ]
  ends = []
  while left and not signals.received:
    done, left = ray.wait(left, timeout=_LOOK)
    for finished in done:
      for kind, *rest in ray.get(finished):
        if kind in ("stopped", "error", "crash"):
          ends.append((kind, *rest))
        else:
          getattr(bar, kind)(*rest)
  for reference in left:
    ray.cancel(reference, force=True)
  _conclude(ends, signals)
