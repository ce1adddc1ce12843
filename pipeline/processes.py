"""Stages in several processes, on one machine or many: actors of Ray.

Each process executes some of a table's lanes with an `executor.Executor`. It
sends entries for a lane of another process as NumPy arrays: through shared
memory on one machine (`channels`), and by a call from actor to actor
between machines. The driver receives losses and records after each run, and
the state when the driver fetches it.

Why not `jax.distributed`: its processes run one program and end together.
Stages run different programs, each when its input has arrived, and a pipeline
must report a stage after its process exited. Processes help on one machine,
too: each has its own XLA threads.

The caller starts Ray first, by `ray.init` or by
`asgd.experiment.ray_runtime.start`, which listens on the loopback interface
only. Then

  def make():  # called in each process
    return {"schedule": table, "parts": parts_of(seed), "extra": extra_of(seed)}

  with contextlib.closing(Processes(make, table, 2)) as engine:
    result = engine.run(engine.start())
    params = engine.params(result.state)

gives the same result as an Executor of the same arguments, to the bit.
"""

import contextlib
import functools
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd.live import ray_waits
from asgd.live.hosts.site import node_id
from asgd.pipeline import channels, executor
from asgd.pipeline import state as state_lib
from asgd.pipeline.lane_threads import Stop
from asgd.pipeline.lanes import PipelineError, copier_of
from asgd.pipeline.state import PipelineResult, PipelineState
from asgd.pipeline.table import Schedule

_CONCURRENT_CALLS = 32  # of one actor: its run, and `put` for its lanes
_STOP_TIMEOUT = 20.0  # seconds for the other processes to stop after a failure
# Seconds without a heartbeat, until a process counts as lost.
_HEARTBEAT_TIMEOUT = 300.0
_OPTIONS = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}


class ProcessDied(PipelineError):
  """A process exited or does not answer; new processes may do its work."""


class RemoteState(NamedTuple):
  """A handle of the state in the processes."""

  slot: int
  microbatch: int
  serial: int  # the processes store only the latest state


class _RemoteSender:
  """Sends to a process of another machine; used like `channels.Sender`."""

  def __init__(self, actor):
    self._actor, self._calls = actor, []

  def put(self, lane, key, value):
    self._calls.append(self._actor.put.remote(lane, key, value))

  def flush(self):
    import ray

    ray.get(self._calls)
    self._calls.clear()


class _RemoteLane(NamedTuple):
  """The queue of a lane of another process."""

  lane: int
  sender: channels.Sender | _RemoteSender  # to its process

  def put(self, item):
    """Sends (key, value). Ignores `Stop`: the driver stops other processes."""
    if item is not Stop:
      key, value = item
      self.sender.put(self.lane, key, state_lib.to_host(value))


class _StageProcess:
  """The actor: executes some lanes of a table for the driver."""

  def __init__(self, lanes, cores):
    # XLA's threads inherit the cores, so they are set before JAX starts.
    if cores is not None and hasattr(os, "sched_setaffinity"):
      os.sched_setaffinity(0, cores)
    self._lanes, self._state = lanes, None
    self._put_error: str | None = None  # of an entry that could not be stored
    self._senders: list[channels.Sender | _RemoteSender] = []

  def listen(self):
    """Returns the machine, and the path where this process listens."""
    self._receivers = channels.Receivers(self._receive)
    return node_id(), self._receivers.path

  def open(self, make, peers, x64):
    """Starts JAX, connects to the other processes, compiles local stages.

    `peers` has (actor, lanes, (machine, path)) of every process.
    """
    jax.config.update("jax_enable_x64", x64)
    # Has no effect if JAX uses GPUs.
    jax.config.update("jax_num_cpu_devices", len(self._lanes))
    peers = [peer for peer in peers if peer[1] != self._lanes]
    count = sum(machine == node_id() for *_, (machine, _) in peers)
    remote_lanes, accept_thread = {}, self._receivers.accept(count)
    for actor, lanes, (machine, path) in peers:
      is_local = machine == node_id()
      sender = channels.Sender(path) if is_local else _RemoteSender(actor)
      self._senders.append(sender)
      remote_lanes.update((lane, _RemoteLane(lane, sender)) for lane in lanes)
    accept_thread.join()
    local_devices = jax.local_devices()
    self._executor = executor.Executor(
      **make(),
      devices=[
        local_devices[i % len(local_devices)] for i in range(len(self._lanes))
      ],
      elsewhere=remote_lanes,
    )

  def put(self, lane, key, value):
    """Puts an entry from another process into a local lane's inbox."""
    try:
      # A copy: the sender reuses this memory, and a lane may donate entries.
      value = copier_of(self._executor.devices[lane], value)(value)
      jax.block_until_ready(value)
    except Exception as error:
      # The lane would wait forever for this entry, so the run is stopped.
      self._put_error = f"an entry for device {lane} was not stored: {error}"
      self.stop()
      raise
    self._executor.inboxes[lane].put((key, value))

  def _receive(self, *entry):
    with contextlib.suppress(Exception):  # `run` raises `_put_error`
      self.put(*entry)

  def is_alive(self):
    return True

  def forget(self):
    """Drops entries in transit to local lanes."""
    for inbox in self._executor.inboxes.values():
      inbox.take()

  def start(self):
    self._keep_state(self._executor.start())

  def next_pass(self):
    self._keep_state(self._executor.next_pass(self._state))

  def run(self, until):
    """Returns losses, records (None for stages elsewhere) and spans."""
    result = self._executor.run(self._state, until)
    if self._put_error:
      raise PipelineError(self._put_error)
    self._keep_state(result.state)
    pairs = zip(result.state.servers, result.records, strict=True)
    records = [server and rows for server, rows in pairs]
    return jax.device_get(result.losses), records, result.spans

  def stop(self):
    """Stops the run of this process, after another process failed."""
    for inbox in self._executor.inboxes.values():
      inbox.put(Stop)

  def fetch(self):
    """Returns this process's part of the state, between two runs."""
    # A run of no slots adds the entries that have arrived since the last run to
    # the state.
    self._state = self._executor.run(self._state, self._state.slot).state
    return state_lib.to_host(self._state)

  def place(self, state):
    """Puts this process's part of a complete state on its devices."""
    self._state = self._executor.place(state_lib.with_keys(state))

  def params(self):
    return state_lib.to_host(self._executor.params(self._state))

  def _keep_state(self, state: PipelineState) -> None:
    """Stores a state, and waits until every entry that this process sent has
    arrived. If an entry never arrives, because its receiver is silent, the
    driver raises ProcessDied, and `Processes.close` kills this process too."""
    self._state = state
    for sender in self._senders:
      sender.flush()


class Processes:
  """An executor with its lanes in processes; used like `executor.Executor`.

  The processes store one state: the latest that `start`, `run`, `next_pass` or
  `place` returned.
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
    """Starts the processes. The caller has started Ray.

    Args:
      make: returns the arguments of `executor.Executor` without devices and
        elsewhere. Ray pickles it, and each process calls it.
      schedule: the table, the same that `make` returns.
      count: number of processes. Each has D / count consecutive lanes, rounded
        down or up; D is the table's number of devices.
      cores: the cores of each process; None leaves the choice to the system.
      options: the options of each actor, for `ray.remote`. By default Ray
        reserves no core and spreads actors over machines.

    Raises:
      ValueError: if `count` is not from 1 to D, if `cores` does not have
        `count` lists, or if Ray was not started.
      PipelineError: if a process cannot start.
    """
    import ray

    # Ray would start by itself, and listen on all interfaces.
    if not ray.is_initialized():
      raise ValueError(
        "stages in processes need Ray: call ray.init first, or"
        " asgd.experiment.ray_runtime.start, which listens on this machine only"
      )
    devices = schedule.devices
    if not 1 <= count <= devices:
      raise ValueError(
        f"count={count}: the {devices} devices of {schedule.name} need 1 to"
        f" {devices} processes"
      )
    if cores is not None and len(cores) != count:
      raise ValueError(
        f"cores={list(cores)}: {count} processes need a list of cores each"
      )
    self._ray, self.schedule = ray, schedule
    self.lanes = [
      lanes.tolist() for lanes in np.array_split(np.arange(devices), count)
    ]
    actor = ray.remote(_StageProcess).options(
      **{**_OPTIONS, **(options or {}), "max_concurrency": _CONCURRENT_CALLS}
    )
    self._actors = list(map(actor.remote, self.lanes, cores or [None] * count))
    self._failure: str | None = None
    self._serial = 0
    pairs = zip(self._actors, self.lanes, strict=True)
    try:
      addresses = self._call_all("listen")
      peers = [
        (*pair, address)
        for pair, address in zip(pairs, addresses, strict=True)
      ]
      self._call_all("open", make, peers, bool(jax.config.jax_enable_x64))
    except BaseException:
      self.close()
      raise

  def _call_all(self, name: str, *args: Any) -> list[Any]:
    """Calls a method of all actors; returns the results in order of lanes."""
    if self._failure:
      raise PipelineError(
        f"these processes have failed ({self._failure}): start new ones, and"
        " resume from a checkpoint"
      )
    calls = [getattr(actor, name).remote(*args) for actor in self._actors]
    open_calls, heartbeats, last_heartbeat = list(calls), [], time.monotonic()
    while open_calls:
      # [1] Wait for the next result, and raise the error of a failed call.
      done_calls, open_calls = ray_waits.wait(open_calls, count=1)
      try:
        self._ray.get(done_calls, timeout=_HEARTBEAT_TIMEOUT)
      except self._ray.exceptions.RayError as error:
        error_type, self._failure = self._first_cause(calls, open_calls)
        raise error_type(self._failure) from error
      if done_calls:
        continue
      # [2] A run may take long: only missing heartbeats show a lost process.
      silent = ray_waits.wait(heartbeats, timeout=0.0)[1]
      if not silent:
        last_heartbeat = time.monotonic()
        heartbeats = [actor.is_alive.remote() for actor in self._actors]
      elif time.monotonic() - last_heartbeat > _HEARTBEAT_TIMEOUT:
        pairs = zip(heartbeats, self.lanes, strict=True)
        names = (_process_name(lanes) for x, lanes in pairs if x in silent)
        processes = " and ".join(names)
        self._failure = (
          f"{processes} has sent no heartbeat for {_HEARTBEAT_TIMEOUT:g} s"
        )
        raise ProcessDied(self._failure)
    return self._ray.get(calls, timeout=_HEARTBEAT_TIMEOUT)

  def _first_cause(
    self, calls: Sequence[Any], open_calls: Sequence[Any]
  ) -> tuple[type[PipelineError], str]:
    """Stops all processes; returns the first cause as error type and text.

    One failure makes other calls fail, too. So causes have ranks: an exited
    process, a failed task, another error, a lost connection, no answer.
    """
    for actor in self._actors:
      with contextlib.suppress(self._ray.exceptions.RayError):
        actor.stop.remote()
    if open_calls:  # tasks that have begun still run to their end
      ray_waits.wait(open_calls, timeout=_STOP_TIMEOUT)
    reasons = []
    for call, lanes in zip(calls, self.lanes, strict=True):
      process = _process_name(lanes)
      try:
        self._ray.get(call, timeout=0.0)
      except self._ray.exceptions.RayTaskError as error:
        cause = error.cause
        reason = 2, f"{process} failed: {type(cause).__name__}: {cause}"
        if isinstance(cause, PipelineError):
          reason = 1, str(cause)
        elif isinstance(
          cause, (ConnectionError, self._ray.exceptions.RayError)
        ):
          reason = 3, f"{process} cannot reach another process"
        reasons.append(reason)
      except self._ray.exceptions.RayActorError:
        reasons.append((0, f"{process} has died"))
      except self._ray.exceptions.RayError as error:  # the call timed out
        reasons.append((4, f"{process} does not stop: {type(error).__name__}"))
    rank, message = min(reasons)
    return (PipelineError if rank in (1, 2) else ProcessDied), message

  def _new_state(self, slot, microbatch):
    self._serial += 1
    return RemoteState(slot, microbatch, self._serial)

  def _check_latest(self, state: RemoteState) -> None:
    """Raises ValueError for a state that is not the latest."""
    if state.serial != self._serial:
      raise ValueError(
        f"state {state.serial} is no longer in the processes, which keep state"
        f" {self._serial}: use the state that the last call of start, run,"
        " next_pass or place returned, and fetch a state to keep it"
      )

  def start(self) -> RemoteState:
    """See `Executor.start`."""
    self._call_all("forget")  # before any process sends the first tickets
    self._call_all("start")
    return self._new_state(0, 0)

  def run(self, state: RemoteState, until: int | None = None) -> PipelineResult:
    """See `Executor.run`; losses are NumPy's. Raises ProcessDied if a process
    exited, and ValueError if `state` is not the latest state."""
    self._check_latest(state)
    until = executor.check_until(self.schedule, state.slot, until)
    losses, records, spans = zip(*self._call_all("run", until), strict=True)
    return PipelineResult(
      self._new_state(until, state.microbatch),
      functools.reduce(operator.or_, losses),
      _merge_stages(records),
      tuple(sorted(itertools.chain(*spans), key=lambda span: span.start)),
    )

  def next_pass(self, state: RemoteState) -> RemoteState:
    """See `Executor.next_pass`."""
    self._check_latest(state)
    self._call_all("next_pass")
    return self._new_state(0, state.microbatch + self.schedule.microbatches)

  def fetch(self, state: RemoteState) -> PipelineState:
    """Returns the complete state, in NumPy arrays."""
    self._check_latest(state)
    parts = [state_lib.with_keys(part) for part in self._call_all("fetch")]
    # Each process fetched only the entries of its lanes.
    entries = functools.reduce(operator.or_, (part.entries for part in parts))
    servers = _merge_stages(part.servers for part in parts)
    return PipelineState(state.slot, state.microbatch, servers, entries)

  def place(self, state: PipelineState) -> RemoteState:
    """Gives each process its part of a state."""
    self._call_all("forget")
    self._call_all("place", self._ray.put(state_lib.to_host(state)))
    return self._new_state(state.slot, state.microbatch)

  def params(self, state: RemoteState) -> list[Any]:
    """See `Executor.params`; in NumPy arrays."""
    self._check_latest(state)
    return list(_merge_stages(self._call_all("params")))

  def close(self) -> None:
    """Kills the processes, unless Ray has exited with them."""
    for actor in () if ray_waits.dead_processes() else self._actors:
      self._ray.kill(actor)


def _process_name(lanes):
  return f"the process of devices {', '.join(map(str, lanes))}"


def _merge_stages(parts: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
  """Returns each stage's value: from the process where it is not None."""
  return tuple(
    # A stage's server is in one process only; the others have None.
    next(value for value in candidates if value is not None)
    for candidates in zip(*parts, strict=True)
  )
