"""All cells of an experiment: one after the other, or several at once.

Cells are independent: what a cell computes is a function of the config and its
seed. So they can be trained by several processes of this machine, as tasks of a
Ray cluster, or in shares by commands on several machines with one results
folder, and come to the same bits. Where seconds are a result (live runs,
pipelines, meshes), cells are trained one at a time, after the others.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

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
    experiment: that the cells are of.
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
    if loop.finished(experiment, cell, workdir) is None:
      waiting.append(cell)
    else:
      bar.skip(experiment.plan(cell).messages)
  together = [cell for cell in waiting if not experiment.kind(cell).timed]
  # The longest first, so that processes end together.
  groups = sorted(
    cells_lib.groups(together),
    key=lambda group: -len(group) * experiment.plan(group[0]).messages,
  )
  count = len(groups) if jobs == "ray" else min(jobs, len(groups))
  if count > 1 or (jobs == "ray" and count):
    spec = _spec(experiment, together, data_dir, workdir)
    if jobs == "ray":
      dataset = machine.share(experiment.dataset)
      ends = _on_ray(spec, groups, dataset, bar, signals)
    else:
      ends = _in_processes(spec, groups, count, bar, signals)
    _conclude(ends, signals)
    waiting = [cell for cell in waiting if cell not in set(together)]
  in_use = []
  for number, cell in enumerate(waiting):
    try:
      loop.train(
        experiment, cell, workdir, bar=bar, machine=machine, signals=signals
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

_TOLD = ("skip", "update", "line", "finish")  # methods of a bar
_ENDS = ("crash", "error", "stopped")  # of a process, the worst first


class _Spec(NamedTuple):
  """What another process needs to train cells."""

  config: dict[str, Any]  # of runs that are not timed, resolved
  engines: list[str]
  data_dir: str | None
  workdir: Path


def _spec(experiment, cells, data_dir, workdir) -> _Spec:
  labels = list(dict.fromkeys(cell.label for cell in cells))
  names = list(dict.fromkeys(experiment.runs[x].engine for x in labels))
  engines = {name: experiment.engines[name] for name in names}
  config = cells_lib.sections_of(experiment.config, engines)
  config["runs"] = {label: config["runs"][label] for label in labels}
  return _Spec({**config, "only": labels}, names, data_dir, workdir)


def _work(spec, groups, put, signals):
  """Trains groups of cells as they come, in another process."""
  from asgd.experiment import ENGINES

  def telling(kind):
    return lambda *arguments: put((kind, *arguments))

  bar = types.SimpleNamespace(**{kind: telling(kind) for kind in _TOLD})
  surroundings = {"bar": bar, "machine": Machine(), "signals": signals}
  experiment = None
  try:
    for group in groups:
      experiment = experiment or cells_lib.build(
        spec.config,
        engines={name: ENGINES[name] for name in spec.engines},
        data_dir=spec.data_dir,
      )
      for cell in group:
        loop.train(experiment, Cell(*cell), spec.workdir, **surroundings)
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

  def next_group():
    parent.send(("next",))
    return parent.recv()

  threading.Thread(target=end_with_parent, daemon=True).start()
  _work(spec, iter(next_group, None), parent.send, _Asked(stop))


def _in_processes(spec, groups, count, bar, signals):
  """Trains groups of cells in `count` processes of this machine; returns how
  these ended."""
  context = multiprocessing.get_context("spawn")
  stop, children = context.Event(), {}
  # Or spawned processes would import the command that started them.
  main_module = mock.patch.multiple(
    sys.modules["__main__"], create=True, __spec__=None, __file__=None
  )
  try:
    with main_module:
      for _ in range(count):
        ours, theirs = context.Pipe()
        arguments = spec, theirs, stop
        child = context.Process(target=_child, args=arguments, daemon=True)
        child.start()
        theirs.close()
        children[ours] = child
    return _watch(children, groups, stop, bar, signals)
  finally:
    for child in children.values():
      if child.is_alive():
        child.kill()


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
        event = pipe.recv()
      except EOFError:  # it has ended
        open_pipes.remove(pipe)
        child = children[pipe]
        child.join()
        if child.exitcode:
          why = f"process {child.pid} ended with status {child.exitcode}"
          ends.append(("error", f"{why}; run the same command again to go on"))
          stop.set()
        continue
      if event == ("next",):
        more = waiting and not stop.is_set()
        pipe.send([tuple(cell) for cell in waiting.pop(0)] if more else None)
      elif _is_end(event, bar):
        ends.append(event)
        stop.set()
  return ends


def _is_end(event, bar) -> bool:
  """Whether a process ends by what it tells; anything else is shown."""
  kind, *rest = event
  if kind in _ENDS:
    return True
  getattr(bar, kind)(*rest)
  return False


def _on_ray(spec, groups, dataset, bar, signals):
  """Trains groups of cells as tasks of a Ray cluster, which sees the folder;
  returns how they ended."""
  import ray

  spec = spec._replace(workdir=spec.workdir.absolute())

  @ray.remote(num_cpus=1)
  def task(spec, dataset, group):
    del dataset  # holds the reference; the task reads its own
    events: list[tuple] = []
    _work(spec, [group], events.append, NoSignals)
    return [event for event in events if event[0] != "update"]

  left = [
    task.remote(spec, dataset, [tuple(cell) for cell in group])
    for group in groups
  ]
  ends = []
  while left and not signals.received:
    done, left = ray.wait(left, timeout=_LOOK)
    for finished in done:
      ends += [event for event in ray.get(finished) if _is_end(event, bar)]
  for reference in left:
    ray.cancel(reference, force=True)
  return ends


def _conclude(ends, signals):
  """Raises what the processes ended with, the worst first."""
  worst = min(ends, key=lambda end: _ENDS.index(end[0]), default=None)
  if worst is None and signals.received:
    worst = "stopped", "stopped; run the same command again to go on", 0
  if worst is None:
    return
  kind, text, *number = worst
  if kind == "crash":
    raise RuntimeError(f"a process that trained cells failed:\n{text}")
  if kind == "error":
    raise ValueError(text)
  raise Stopped(text, signals.received or number[0])
