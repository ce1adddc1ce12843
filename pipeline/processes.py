"""Stages in processes of their own, on one machine or many: actors of Ray.

Each process has some of a table's lanes and obeys them as `executor.Executor`
does; entries for a lane of another process are sent as NumPy arrays, through
shared memory (`pipeline.channels`), or to another machine by a call from actor
to actor. The driver receives losses and records, and the state when
it fetches it.

Processes of `jax.distributed` run one program and end together; stages run
different programs, each when its input is there, and a pipeline has to report a
stage that died. On one machine, too, each process has its own threads of XLA.

Ray must have been started before, by `ray.init` or by
`asgd.experiment.ray_runtime.start`, which keeps it on the loopback interface.
Then

  def make():  # called in each process
    return {"schedule": table, "parts": parts_of(seed), "extra": extra_of(seed)}

  with contextlib.closing(Processes(make, table, 2)) as engine:
    result = engine.run(engine.start())
    params = engine.params(result.state)

is what an Executor of the same arguments does, to the bit.
"""

import contextlib
import functools
import itertools
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd.live import ray_waits
from asgd.live.hosts.site import node_id
from pipeline import channels, executor
from pipeline import state as state_lib
from pipeline.lane_threads import Stop
from pipeline.lanes import PipelineError, copier_of
from pipeline.state import PipelineResult, PipelineState
from pipeline.table import Schedule

_CALLS = 32  # at once, of an actor: its run, and what is put into its lanes
_PATIENCE = 20.0  # seconds for the others to stop after one has failed
_SILENT = 300.0  # seconds until one that gives no sign of life is given up
_OPTIONS = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}


class ProcessDied(PipelineError):
  """A process is gone; the same work may well be done by a new one."""


class RemoteState(NamedTuple):
  """A state that the processes hold."""

  slot: int
  microbatch: int
  serial: int  # only the latest is held


class _RemoteSender:
  """The way to a process of another machine; as `channels.Sender`."""

  def __init__(self, actor):
    self._actor, self._calls = actor, []

  def put(self, lane, key, value):
    self._calls.append(self._actor.put.remote(lane, key, value))

  def flush(self):
    import ray

    ray.get(self._calls)
    self._calls.clear()


class _Away(NamedTuple):
  """The queue of a lane that another process has."""

  lane: int
  sender: channels.Sender | _RemoteSender  # to its process

  def put(self, item):
    """Sends (key, value). The driver stops the other process's lanes."""
    if item is not Stop:
      key, value = item
      self.sender.put(self.lane, key, state_lib.to_host(value))


class _StageProcess:
  """What an actor does: some lanes of a table."""

  def __init__(self, lanes, cores):
    # Before JAX starts its threads.
    if cores is not None and hasattr(os, "sched_setaffinity"):
      os.sched_setaffinity(0, cores)
    self._lanes, self._state = lanes, None
    self._untaken: str | None = None  # what came and could not be taken
    self._senders: list[channels.Sender | _RemoteSender] = []

  def listen(self):
    """Returns the machine, and the path where this process listens."""
    self._receivers = channels.Receivers(self._take)
    return node_id(), self._receivers.path

  def open(self, make, others, x64):
    """Starts JAX and compiles the stages of the lanes that are here; `others`
    are the actor, lanes, machine and path of every process."""
    jax.config.update("jax_enable_x64", x64)
    # Where there are others than CPUs, this does no harm.
    jax.config.update("jax_num_cpu_devices", len(self._lanes))
    others = [other for other in others if other[1] != self._lanes]
    near = [machine == node_id() for *_, (machine, _) in others]
    away, accepting = {}, self._receivers.accept(sum(near))
    for (actor, lanes, (_, path)), is_near in zip(others, near, strict=True):
      sender = channels.Sender(path) if is_near else _RemoteSender(actor)
      self._senders.append(sender)
      away.update((lane, _Away(lane, sender)) for lane in lanes)
    accepting.join()
    here = jax.local_devices()
    self._executor = executor.Executor(
      **make(),
      devices=[here[i % len(here)] for i in range(len(self._lanes))],
      elsewhere=away,
    )

  def put(self, lane, key, value):
    """Takes what another process has made for a lane."""
    try:
      # A copy: this is memory of others, and a lane may donate its entries.
      value = copier_of(self._executor.devices[lane], value)(value)
      jax.block_until_ready(value)
    except Exception as error:  # a lane waits for it
      self._untaken = f"what came for device {lane} cannot be taken: {error}"
      self.stop()
      raise
    self._executor.inboxes[lane].put((key, value))

  def _take(self, *entry):
    with contextlib.suppress(Exception):  # of which the next run says more
      self.put(*entry)

  def is_alive(self):
    return True

  def forget(self):
    """Drops what was on its way to lanes that are here."""
    for inbox in self._executor.inboxes.values():
      inbox.take()

  def start(self):
    self._enter(self._executor.start())

  def again(self):
    self._enter(self._executor.again(self._state))

  def run(self, until):
    """Returns losses, records (None of stages elsewhere) and spans."""
    result = self._executor.run(self._state, until)
    if self._untaken:
      raise PipelineError(self._untaken)
    self._enter(result.state)
    pairs = zip(result.state.servers, result.records, strict=True)
    records = [server and rows for server, rows in pairs]
    return jax.device_get(result.losses), records, result.spans

  def stop(self):
    """Ends a run: another process has failed."""
    for inbox in self._executor.inboxes.values():
      inbox.put(Stop)

  def fetch(self):
    """Returns its part of the state. All runs have returned."""
    # A run of no slot takes in the entries that have arrived since.
    self._state = self._executor.run(self._state, self._state.slot).state
    return state_lib.to_host(self._state)

  def place(self, state):
    """Takes its part of a whole state."""
    self._state = self._executor.place(state_lib.with_keys(state))

  def params(self):
    return state_lib.to_host(self._executor.params(self._state))

  def _enter(self, state):
    """Keeps a state, when all entries that were sent elsewhere have arrived. If
    one never does, the driver finds the other process silent, and ends this."""
    self._state = state
    for sender in self._senders:
      sender.flush()


class Processes:
  """An executor with its lanes in processes; used like `executor.Executor`. It
  holds one state, the latest that `start`, `run`, `again` or `place` returned.
  """

  def __init__(
    self,
    make: Callable[[], Mapping[str, Any]],
    schedule: Schedule,
    count: int,
    *,
    cores: Sequence[Sequence[int]] | None = None,
    options: Mapping[str, Any] | None = None,
  ):
    """Starts the processes. Ray has been started.

    Args:
      make: gives arguments of `executor.Executor`, but devices and elsewhere.
        It is called in each process, where it comes by Ray's own pickling.
      schedule: the table, the same that `make` gives.
      count: processes; each has D / count lanes in a row, some one more.
      cores: of each process; None leaves that to the system.
      options: of each actor, of `ray.remote`. By default Ray reserves no core
        and spreads actors over machines.

    Raises:
      ValueError: for a count that is not from 1 to D, or that `cores` does not
        have, and if Ray was not started.
      PipelineError: if a process cannot start.
    """
    import ray

    if not ray.is_initialized():  # it would start, and listen on all interfaces
      raise ValueError(
        "stages in processes need Ray: call ray.init first, or"
        " asgd.experiment.ray_runtime.start, which keeps others out"
      )
    devices = schedule.devices
    if not 1 <= count <= devices:
      raise ValueError(
        f"the {devices} devices of {schedule.name} are in 1 to {devices}"
        f" processes, not {count}"
      )
    if cores is not None and len(cores) != count:
      raise ValueError(
        f"{count} processes need a list of cores each, not {list(cores)}"
      )
    self._ray, self.schedule = ray, schedule
    self.lanes = [
      lanes.tolist() for lanes in np.array_split(np.arange(devices), count)
    ]
    actor = ray.remote(_StageProcess).options(
      **{**_OPTIONS, **(options or {}), "max_concurrency": _CALLS}
    )
    self._actors = list(map(actor.remote, self.lanes, cores or [None] * count))
    self._broken, self._serial = None, 0
    pairs = zip(self._actors, self.lanes, strict=True)
    try:
      addresses = self._all("listen")
      others = [(*pair, at) for pair, at in zip(pairs, addresses, strict=True)]
      self._all("open", make, others, bool(jax.config.jax_enable_x64))
    except BaseException:
      self.close()
      raise

  def _all(self, name, *args):
    """Calls all processes; returns their answers in order."""
    if self._broken:
      raise PipelineError(
        f"these processes are of no use any more ({self._broken}): make new"
        " ones, and go on from a checkpoint"
      )
    calls = [getattr(actor, name).remote(*args) for actor in self._actors]
    waiting, signs, heard = list(calls), [], time.monotonic()
    while waiting:
      done, waiting = ray_waits.wait(waiting, count=1)
      try:
        self._ray.get(done, timeout=_SILENT)
      except self._ray.exceptions.RayError as error:
        kind, self._broken = self._why(calls, waiting)
        raise kind(self._broken) from error
      if done:
        continue
      silent = ray_waits.wait(signs, timeout=0.0)[1]
      if not silent:
        heard = time.monotonic()
        signs = [actor.is_alive.remote() for actor in self._actors]
      elif time.monotonic() - heard > _SILENT:
        pairs = zip(signs, self.lanes, strict=True)
        who = " and ".join(_name(lanes) for x, lanes in pairs if x in silent)
        self._broken = f"{who} has given no sign of life for {_SILENT:g} s"
        raise ProcessDied(self._broken)
    return self._ray.get(calls, timeout=_SILENT)

  def _why(self, calls, waiting):
    """Stops all; returns what has gone wrong, as a kind of error and a text."""
    for actor in self._actors:
      with contextlib.suppress(self._ray.exceptions.RayError):
        actor.stop.remote()
    if waiting:  # for tasks that have begun
      ray_waits.wait(waiting, timeout=_PATIENCE)
    reasons = []
    for call, lanes in zip(calls, self.lanes, strict=True):
      process = _name(lanes)
      try:
        self._ray.get(call, timeout=0.0)
      except self._ray.exceptions.RayTaskError as error:
        cause = error.cause
        what = 2, f"{process} failed: {type(cause).__name__}: {cause}"
        if isinstance(cause, PipelineError):
          what = 1, str(cause)
        elif isinstance(
          cause, (ConnectionError, self._ray.exceptions.RayError)
        ):
          what = 3, f"{process} cannot reach another"
        reasons.append(what)
      except self._ray.exceptions.RayActorError:
        reasons.append((0, f"{process} has died"))
      except self._ray.exceptions.RayError as error:  # it does not answer
        reasons.append((4, f"{process} does not stop: {type(error).__name__}"))
    first, text = min(reasons)
    return (PipelineError if first in (1, 2) else ProcessDied), text

  def _new_state(self, slot, microbatch):
    self._serial += 1
    return RemoteState(slot, microbatch, self._serial)

  def _check(self, state):
    if state.serial != self._serial:
      raise ValueError(
        "the processes hold another state by now: use the one that the last"
        " call of start, run, again or place returned, and fetch what you want"
        " to keep"
      )

  def start(self) -> RemoteState:
    """As `Executor.start`."""
    self._all("forget")  # before any process sends the first tickets
    self._all("start")
    return self._new_state(0, 0)

  def run(self, state: RemoteState, until: int | None = None) -> PipelineResult:
    """As `Executor.run`; losses are NumPy's. Raises ProcessDied if a process
    died, and ValueError for a state that is no longer held."""
    self._check(state)
    until = executor.check_until(self.schedule, state.slot, until)
    losses, records, spans = zip(*self._all("run", until), strict=True)
    return PipelineResult(
      self._new_state(until, state.microbatch),
      functools.reduce(operator.or_, losses),
      _of_stages(records),
      tuple(sorted(itertools.chain(*spans), key=lambda span: span.start)),
    )

  def again(self, state: RemoteState) -> RemoteState:
    """As `Executor.again`."""
    self._check(state)
    self._all("again")
    return self._new_state(0, state.microbatch + self.schedule.microbatches)

  def fetch(self, state: RemoteState) -> PipelineState:
    """Returns the whole state, in NumPy arrays."""
    self._check(state)
    parts = [state_lib.with_keys(part) for part in self._all("fetch")]
    entries = functools.reduce(operator.or_, (part.entries for part in parts))
    servers = _of_stages(part.servers for part in parts)
    return PipelineState(state.slot, state.microbatch, servers, entries)

  def place(self, state: PipelineState) -> RemoteState:
    """Gives each process its part of a state."""
    self._all("forget")
    self._all("place", self._ray.put(state_lib.to_host(state)))
    return self._new_state(state.slot, state.microbatch)

  def params(self, state: RemoteState) -> list[Any]:
    """As `Executor.params`, in NumPy arrays."""
    self._check(state)
    return list(_of_stages(self._all("params")))

  def close(self) -> None:
    """Ends the processes, unless Ray has died with them."""
    for actor in () if ray_waits.dead() else self._actors:
      self._ray.kill(actor)


def _name(lanes):
  return f"the process of devices {', '.join(map(str, lanes))}"


def _of_stages(parts):
  """What each stage's process has, of processes with None for the others."""
  return tuple(
    next(value for value in values if value is not None)
    for values in zip(*parts, strict=True)
  )
