"""Hosts that are processes: actors of Ray.

Ray carries arguments and results between the driver and the hosts. Arrays
arrive as read-only views of its memory. Hosts of one machine call each other by
sockets.
"""

import collections
import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd import safe_files
from asgd.live import processes, ray_waits
from asgd.live.failures import process_failure
from asgd.live.hosts.base import LOCAL, Call, Host, HostExited, Hosts, Make
from asgd.live.hosts.site import Site, node_id, prepare_process
from asgd.live.hosts.sockets import HostServer, SocketHost
from asgd.live.hosts.threads import ThreadHost

_FETCH_SECONDS = 60.0  # to fetch a result that is ready
_LOCK_SECONDS = 30.0  # for the predecessor's process to end
_CLOSE_SECONDS = 5.0  # to close objects at the end
_MAX_DRIVER_CALLS = 16  # open calls of the driver at one object
# Ray's name for the threads of `serve`, `make` and `end`: calls at the object,
# which wait until it is made, must not take them.
_CONTROL = "control"
_QUERY_SECONDS = 1.0  # seconds between two queries of a cluster that grows


def _kill_process() -> None:
  os.kill(os.getpid(), signal.SIGKILL)


class HostActor:
  """A process with one host, which is a `ThreadHost`."""

  def __init__(
    self, kind: str, index: int, site: Site, began: float, path: Path
  ):
    """Prepares the process.

    Args:
      kind, index: kind and index of the host.
      site: the site of the run.
      began: `time.time()` when the run began, for hosts on other machines than
        the driver's.
      path: socket at which other processes of this machine call the host.
    """
    prepare_process(site, worker=kind not in LOCAL)
    self._path, self._memory = path, Path(site.memory)
    self._kind, self._index, self._clock = kind, index, site.clock
    if node_id() == site.machine:
      processes.write_pid(Path(site.memory), kind, index)
    else:
      self._clock = lambda: time.time() - began
    # `_started`: `_host` exists. `_ended`: `serve` may return.
    self._started, self._ended = threading.Event(), threading.Event()
    if kind not in LOCAL:
      with contextlib.suppress(ValueError):  # not the main thread
        self._former_handler = signal.signal(signal.SIGTERM, self._drain)

  def _drain(self, signal_number: int, stack: Any) -> None:
    """Handles SIGTERM: drains the object, or ends the process if the object has
    no `drain`."""
    if self._started.is_set() and self._host.drain():
      return
    if callable(self._former_handler):  # Ray's
      self._former_handler(signal_number, stack)
    signal.signal(signal_number, signal.SIG_DFL)
    os.kill(os.getpid(), signal_number)

  @contextlib.contextmanager
  def _reporting(self, failure: str) -> Iterator[None]:
    """Raises the errors of the block as `process_failure` returns them."""
    try:
      yield
    except Exception as error:
      text = f"{self._kind} {self._index} {failure}"
      raise process_failure(text, error) from error

  def make(self, make: Make) -> None:
    """Makes the object."""
    with self._reporting("cannot start"):
      if self._kind in LOCAL:  # the predecessor may still write its files
        path = self._memory / f"{self._kind}-{self._index}.lock"
        processes.lock(path, _LOCK_SECONDS)
      self._host = ThreadHost(
        self._kind, self._index, make, self._clock, _kill_process
      )
      # Without a socket, Ray carries all calls.
      with contextlib.suppress(OSError):
        self._server = HostServer(self._host, self._path)
      self._started.set()
      self._host.make_call.result()

  def call(self, method: str, args: Sequence[Any]) -> Any:
    """Calls a method of the object."""
    self._started.wait()
    with self._reporting("failed"):
      return self._host.call(method, *args).result()

  def serve(self) -> None:
    """Returns when the host has ended. The driver keeps this call open: the end
    of the call shows the driver that the host has ended."""
    self._ended.wait()

  def end(self) -> None:
    """Closes the object and ends the host."""
    if self._started.is_set():
      self._host.end()
      self._host.thread.join()
    self._ended.set()


class ActorCall(Call):
  """A call of an actor."""

  def __init__(self, ref: Any, kind: str, index: int):
    self.ref, self._party = ref, (kind, index)

  def done(self) -> bool:
    """See the base."""
    return bool(ray_waits.wait([self.ref], timeout=0)[0])

  def result(self) -> Any:
    """See the base. Raises ValueError, in one line, for a ValueError of the
    object, and RayDied if Ray has failed."""
    import ray

    while not ray_waits.wait([self.ref])[0]:
      pass
    try:
      return ray.get(self.ref, timeout=_FETCH_SECONDS)
    except ray.exceptions.RayTaskError as error:
      raise error.cause from error
    except ray.exceptions.RayError as error:
      if getattr(error, "actor_init_failed", False):
        raise _init_failure(error, *self._party) from error
      raise HostExited(*self._party) from error


def _init_failure(error: Exception, kind: str, index: int) -> Exception:
  """Returns the error for an actor that could not be created. Ray passes only
  the text of the traceback on; a ValueError is that of `prepare_process`."""
  last_line = str(error).strip().splitlines()[-1]
  message, failure = last_line.removeprefix("ValueError: "), "cannot start"
  if message != last_line:
    return ValueError(f"{kind} {index} {failure}: {message}")
  return RuntimeError(f"{kind} {index} {failure}: {error}")


def host_of(kind: str, index: int, actor: Any, path: Path) -> Host:
  """Returns the fastest handle for this process: a socket if the host is on
  this machine, else an actor."""
  if path.exists():
    return SocketHost(kind, index, path)
  return ActorHost(kind, index, actor, path)


class ActorHost(Host):
  """A handle of an actor, for any process. A process that receives it by Ray
  unpickles it as the handle of `host_of`."""

  def __init__(self, kind: str, index: int, actor: Any, path: Path):
    self.kind, self.index, self.actor, self._path = kind, index, actor, path

  def __reduce__(self):
    return host_of, (self.kind, self.index, self.actor, self._path)

  def fastest_handle(self) -> Host:
    """Returns the fastest handle for this process; see `host_of`."""
    return host_of(self.kind, self.index, self.actor, self._path)

  def call(self, method: str, *args: Any) -> ActorCall:
    """See the base."""
    ref = self.actor.call.remote(method, args)
    return ActorCall(ref, self.kind, self.index)


def _in_control(method: Any) -> Any:
  """Returns an actor's method that runs in the threads of `_CONTROL`."""
  return method.options(concurrency_group=_CONTROL)


class ActorHosts(Hosts):
  """Hosts that are actors. Those of local kinds run on the driver's machine,
  where their files are."""

  def __init__(
    self,
    site: Site,
    *,
    resources: Mapping[str, Any] | None = None,
  ):
    """Waits until Ray has the resources of the run. The caller has called
    `ray.init`.

    Args:
      site: the site of the run, without token and machine.
      resources: options of Ray for each worker or peer; None reserves no CPU.

    Raises:
      ValueError: if Ray lacks a resource, and does not get it in time.
    """
    import ray

    self._ray, self._n_started = ray, 0
    # Most open calls at one object before Ray queues further calls; a call
    # with a Future as result counts until the Future is done.
    self._max_calls = _MAX_DRIVER_CALLS + 4 * site.setup.workers
    self.site = site._replace(token=uuid.uuid4().hex, machine=node_id())
    self._resources = resources or {"num_cpus": 0}
    self._check_resources()
    self._generations = collections.Counter[tuple[str, int]]()
    self._hosts: dict[tuple[str, int], ActorHost] = {}
    self._make_calls: dict[tuple[str, int], ActorCall] = {}
    self._serve_calls: dict[tuple[str, int], Any] = {}
    memory = Path(site.memory)
    safe_files.make_private(memory)
    processes.kill_run(memory)

  def _check_resources(self) -> None:
    """Raises ValueError for resources that Ray lacks: Ray itself would wait for
    them silently. A cluster may grow for `cluster_seconds` before the error."""
    workers, options = self.site.setup.workers, self._resources
    # Resource -> amount for each worker, by the names that Ray's nodes use.
    amounts = dict(options.get("resources") or {})
    for name in ("CPU", "GPU"):
      amounts[name] = options.get(f"num_{name.lower()}s")
    if options.get("accelerator_type"):
      # A node has 1 of its type, for any number of workers.
      amounts[f"accelerator_type:{options['accelerator_type']}"] = 0.001
    amounts = {name: amount for name, amount in amounts.items() if amount}
    deadline = time.monotonic() + self.site.cluster_seconds
    while missing := self._find_missing_resource(amounts):
      if time.monotonic() > deadline:
        name, available = missing
        raise ValueError(
          f"{workers} workers ask Ray for {workers * amounts[name]:g} {name},"
          f" and it has {available:g}: ask for less for each, use fewer, or"
          " wait for a cluster that grows with config.live.cluster_seconds"
        )
      from ray.autoscaler import sdk

      sdk.request_resources(bundles=[amounts] * workers)
      time.sleep(_QUERY_SECONDS)

  def _find_missing_resource(
    self, amounts: Mapping[str, float]
  ) -> tuple[str, float] | None:
    """Returns (resource, amount that Ray has) of a resource that Ray lacks for
    all workers together, or None."""
    available = self._ray.cluster_resources()
    for name, amount in amounts.items():
      if self.site.setup.workers * amount > available.get(name, 0):
        return name, available.get(name, 0)
    return None

  def clock(self) -> float:
    """See the base."""
    return self.site.clock()

  def sleep(self, seconds: float) -> None:
    """See the base."""
    time.sleep(seconds)

  def start(self, kind: str, index: int, make: Make) -> ActorHost:
    """See the base."""
    if (kind, index) in self._hosts:
      # Ray may only have lost the connection: the process could still hold the
      # lock of its files.
      self._ray.kill(self._hosts[kind, index].actor)
    # Ray writes the class into the title of the process, which `ps` shows.
    title = f"{HostActor.__name__}-{kind}-{index}"
    groups: dict[str, Any] = {"concurrency_groups": {_CONTROL: 3}}
    make_class = self._ray.remote(**groups)
    actor_class: Any = make_class(type(title, (HostActor,), {}))
    options = {
      "max_concurrency": self._max_calls,
      **self._placement_options(kind),
    }
    if kind in LOCAL:  # other actors may look it up by name
      generation = self._generations[kind, index]
      options["name"] = self.site.actor_name(kind, index, generation)
      self._generations[kind, index] += 1
    began = time.time() - self.site.clock()
    self._n_started += 1  # for a new path, so old handles call no successor
    path = Path(self.site.memory) / f"{kind}-{self._n_started}.sock"
    actor = actor_class.options(**options).remote(
      kind, index, self.site, began, path
    )
    # Ray starts the process in the background; these calls wait for it.
    self._serve_calls[kind, index] = _in_control(actor.serve).remote()
    make_ref = _in_control(actor.make).remote(make)
    self._make_calls[kind, index] = ActorCall(make_ref, kind, index)
    self._hosts[kind, index] = host = ActorHost(kind, index, actor, path)
    return host

  def _placement_options(self, kind: str) -> Mapping[str, Any]:
    """Returns the options of Ray that choose the machine of a host."""
    if kind not in LOCAL:
      return self._resources
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on_driver = NodeAffinitySchedulingStrategy(self.site.machine, soft=False)
    return {"scheduling_strategy": on_driver, "num_cpus": 0}

  def make_call(self, kind: str, index: int) -> ActorCall:
    """See the base."""
    return self._make_calls[kind, index]

  def wait(self, calls: Sequence[Call], seconds: float) -> list[Call]:
    """See the base. Raises RayDied if Ray has failed."""
    actor_calls = [call for call in calls if isinstance(call, ActorCall)]
    refs = [call.ref for call in actor_calls]
    ended_refs, _ = ray_waits.wait(refs, count=1, timeout=seconds)
    # By now, other calls may have ended, too.
    later_refs, _ = ray_waits.wait(refs, timeout=0) if ended_refs else ([], [])
    return [
      call for call in actor_calls if call.ref in (*ended_refs, *later_refs)
    ]

  def exited(self) -> list[tuple[str, int]]:
    """See the base."""
    key_of_ref = {ref: key for key, ref in self._serve_calls.items()}
    ended_refs, _ = ray_waits.wait(list(key_of_ref), timeout=0)
    return [key_of_ref[ref] for ref in ended_refs]

  def kill(self, kind: str, index: int) -> None:
    """See the base."""
    self._ray.kill(self._hosts[kind, index].actor)

  def close(self) -> None:
    """Ends all processes."""
    hosts, self._hosts = self._hosts, {}
    try:
      ray_waits.check()
    except ray_waits.RayDied:
      processes.kill_run(Path(self.site.memory))
      return
    refs = [_in_control(host.actor.end).remote() for host in hosts.values()]
    with contextlib.suppress(ray_waits.RayDied):
      ray_waits.wait(refs, timeout=_CLOSE_SECONDS)
    for host in hosts.values():
      self._ray.kill(host.actor)
