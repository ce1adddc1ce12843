"""A cluster of processes: workers and server shards are Ray actors.

Ray starts the processes where there is room for them, tells when one dies, and
carries what is said seldom: what to do, how it goes, parameters to evaluate.
What is said for every message goes through sockets and shared memory of the
machine (`sockets`, `memory`): an actor call costs half a millisecond, a frame a
twentieth of that. Shards are on the driver's machine; workers on another one
say it by actor calls (`remote`).

Ray is imported when a cluster is made, so that the rest of the package does
without it.
"""

import collections
import contextlib
import ctypes
import functools
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, sharding, simulator
from asgd.runtimes import faults as faults_lib
from asgd.runtimes import files, protocol, remote
from asgd.runtimes.deadlines import DEAD
from asgd.runtimes.memory import MESSAGES, SharedMemory
from asgd.runtimes.shard import Setup, Shard, sizes
from asgd.runtimes.sockets import ShardServer, SocketLink
from asgd.runtimes.worker_loop import Disconnected, Duty, Span, WorkerLoop


class Site(NamedTuple):
  """Where a run is; the same for all of its processes."""

  setup: Setup
  run: str  # folder: journals and records, kept
  memory: str  # folder: sockets and shared memory, removed at the end
  began: float  # time.monotonic() of the machine
  compress: str | None = None  # of parameters and messages, as `wire.layout`
  spans: bool = False  # write what workers do when
  devices: int = 1  # of a worker's own, on the CPU
  token: str = ""  # by which its actors are found
  machine: str = ""  # the driver's node in Ray's cluster
  sockets: bool = True  # use them where both are on one machine


def _keep_memory():
  """Has malloc keep what is freed, where it can be told to.

  Each new version of the parameters is a new array. By default glibc gets each
  large one from the kernel, page by page and zeroed, and gives it back: that
  takes twice the time of an update itself.
  """
  trim_threshold, top_pad, mmap_max = -1, -2, -4  # malloc.h
  with contextlib.suppress(OSError, AttributeError):
    malloc_option = ctypes.CDLL(None).mallopt
    malloc_option(mmap_max, 0)
    malloc_option(trim_threshold, 2**31 - 1)
    malloc_option(top_pad, 2**26)


def _prepare_jax(site, worker):
  """Settings of a process that has not used JAX yet."""
  _keep_memory()
  if not worker or site.setup.rules.depth == 1:
    # Nothing is done while a result is waited for, and a second thread costs
    # two switches.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
  if worker and site.devices > 1:
    jax.config.update("jax_num_cpu_devices", site.devices)


def _clock(site):
  return lambda: time.monotonic() - site.began


def _socket(site, index):
  return Path(site.memory) / f"{index}.sock"


def _node():
  """This machine's node in Ray's cluster."""
  import ray

  return ray.get_runtime_context().get_node_id()


def _name(site, index, generation):
  """A shard's actor's name. A dead actor may keep its own for a while."""
  return f"{site.token}-shard-{index}-{generation}"


def _actor_id():
  """Returns the number of the actor that asks."""
  import ray

  return ray.get_runtime_context().get_actor_id()


def _find(site, index, generation):
  """Returns a shard's actor. Raises ValueError if there is none."""
  import ray

  return ray.get_actor(_name(site, index, generation))


def _memory(site, index, like):
  return SharedMemory(
    *(Path(site.memory) / f"shard-{index}", sizes(site.setup), like),
    compress=site.compress,
  )


class ShardProcess:
  """What a shard's actor does."""

  def __init__(
    self,
    index: int,
    site: Site,
    make_server: Callable[[], base.Server],
    params: Any,
    image: tuple[Any, Any] | None,
    resumed: bool,
  ):
    _prepare_jax(site, worker=False)
    self._site, self._index = site, index
    self._sessions: dict[str, remote.Session] = {}
    files.write_pid(site.memory, "shard", index)
    folder = Path(site.memory) / f"shard-{index}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    self._lock = files.lock(folder / "lock", seconds=30.0)
    setup, clock = site.setup, _clock(site)
    if setup.shards > 1:
      plan = sharding.plan(params, setup.shards)
      params = sharding.part(plan, params, index)
    server = make_server()
    steps = simulator.compile_steps(server, None, wire=site.compress)
    if not setup.totals:
      self._warm_up(server, steps, params)
    state = simulator.start(server, params)
    shard = Shard(
      *(index, setup, steps, state),
      _memory(site, index, (params, params, state)),
      files.FileJournal(files.journal_path(site.run, index)),
      files.FileSink(files.records_path(site.run, index)),
      now=clock(),
      image=image,
      resumed=resumed,
    )
    follows = index > 0 and setup.consistent
    self._server = ShardServer(
      shard,
      _socket(site, index),
      clock=clock,
      lead=_socket(site, 0) if follows else None,
    )

  def _warm_up(self, server, steps, params):
    """Compiles before the first message comes."""
    state = simulator.start(server, params)
    ticket = steps.send(state, jnp.int32(0))
    message = jax.tree.map(np.zeros_like, params)
    jax.block_until_ready(
      steps.receive(state, ticket, message, np.float32(0.0))
    )

  def serve(self) -> None:
    """Serves until `end`; dies with the process."""
    self._server.serve()

  def open(self, token: str) -> None:
    """Opens a session for a worker on another machine."""
    self._sessions[token] = self._server.ask(
      lambda shard: remote.Session(shard.memory)
    )

  def tell(self, token: str, data: bytes, message: Any) -> None:
    """Takes a frame of a session, and the message of a PUSH."""
    frame, session = protocol.unpack(data), self._sessions[token]
    session.worker = frame.worker

    def take(shard):
      if message is not None and shard.accepts(frame):
        shard.memory.write(MESSAGES, frame.message, message)
      shard.handle(frame, session.say, _clock(self._site)())

    self._server.ask(take)

  def listen(self, token: str) -> list[tuple[bytes, Any]]:
    """Returns what is said to a session, when something is."""
    return self._sessions[token].listen()

  def gone(self, owner: str) -> None:
    """The actor of a worker's sessions has ended; a socket would have told."""

    def drop(shard):
      for token in [t for t in self._sessions if t.startswith(owner)]:
        session = self._sessions.pop(token)
        # Another may have taken the place before this was heard.
        if shard.peer(session.worker) == session.say:
          shard.gone(session.worker, _clock(self._site)())

    self._server.ask(drop)

  def status(self) -> dict[str, Any]:
    """Returns how it goes; see `Shard.status`."""
    return self._server.ask(lambda shard: shard.status())

  def kept_params(self, received: int) -> Any:
    """Returns the parameters as they were after so many messages, and drops
    them; None if they died with the shard before this one."""
    return jax.device_get(
      self._server.ask(lambda shard: shard.kept_params.pop(received, None))
    )

  def params(self) -> Any:
    """Returns the parameters as they are."""
    return jax.device_get(self._server.ask(lambda shard: shard.params))

  def image(self) -> tuple[Any, Any]:
    """Returns what a checkpoint needs; see `Shard`."""
    return self._server.ask(lambda shard: shard.image())

  def stopped(self) -> bool:
    """Whether every job was received, as far as this shard decides that."""
    return self._server.ask(lambda shard: shard.stopped)

  def pause(self) -> None:
    """Starts nothing new, at the lead."""
    self._server.ask(lambda shard: shard.pause())

  def end(self) -> None:
    """Ends `serve`."""
    with contextlib.suppress(Exception):
      self._server.ask(lambda shard: shard.flush())
    self._server.end()


class WorkerProcess:
  """What a worker's actor does."""

  def __init__(self, worker: int, site: Site):
    _prepare_jax(site, worker=True)
    self._worker, self._site = worker, site
    here = _node() == site.machine
    self._near = here and site.sockets
    if here:
      files.write_pid(site.memory, "worker", worker)

  def run(
    self,
    make_duty: Callable[[], Duty],
    faults: Sequence[faults_lib.Fault] = (),
  ) -> str:
    """Works until there is no more to do; see `WorkerLoop.run`."""
    site, duty = self._site, make_duty()
    shards = range(site.setup.shards)
    parts = (
      [duty.params]
      if duty.plan is None
      else sharding.split(duty.plan, duty.params)
    )
    self._warm_up(duty)
    clock = _clock(site)
    if self._near:
      link = SocketLink([_socket(site, index) for index in shards])
      memories = [
        _memory(site, i, (parts[i], parts[i], None)) for i in shards
      ]
    else:
      link = remote.RayLink(
        functools.partial(_find, site), len(shards), _actor_id()
      )
      memories = link.memories
    for shard in shards:
      while not link.connect(shard):
        pass
    script = faults_lib.Script(
      faults,
      kill=lambda: os.kill(os.getpid(), signal.SIGKILL),
      wait=time.sleep,
      tell=functools.partial(files.append_fault, site.run),
    )
    loop = WorkerLoop(
      *(self._worker, duty, link, memories),
      clock=clock,
      wait=time.sleep,
      faults=script,
      span=self._span_writer() if site.spans else None,
    )
    with contextlib.suppress(ValueError):  # not the main thread
      signal.signal(signal.SIGTERM, lambda *_: loop.drain())
    how = loop.run()
    if self._near:
      link.close()  # shards notice at once that it has left
    return how

  def _warm_up(self, duty):
    """Compiles before it takes the place: others, who have done so, are not to
    take it for hung."""
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), duty.params)
    ticket = base.Ticket(
      np.int32(self._worker), np.int32(0), params, np.bool_(True)
    )
    batch = duty.batch(self._worker, 0)
    state = duty.init(params)
    jax.block_until_ready(
      duty.work(state, ticket, batch, duty.root, np.int32(0))
    )

  def _span_writer(self):
    path = Path(self._site.run) / f"spans-{self._worker}.csv"
    file = path.open("a", buffering=1 << 16)

    def write(span: Span):
      name, start, end, seq, job = span
      file.write(f"{name},{start:.6f},{end:.6f},{seq},{job}\n")
      if name == "push":
        file.flush()

    return write


def _failure(what: str, error: Exception) -> Exception:
  """What to raise where a process has failed: one line if it is the user's to
  mend, all that is known if it is ours."""
  last = str(error).strip().splitlines()[-1]
  kind, _, text = last.partition(": ")
  if kind in ("ValueError", "OSError", "FileNotFoundError"):
    return ValueError(f"{what}: {text}")
  return RuntimeError(f"{what}: {error}")


class Resources(NamedTuple):
  """What Ray is asked for."""

  worker: Mapping[str, Any] = {"num_cpus": 0}
  shard: Mapping[str, Any] = {"num_cpus": 0}


class Cluster:
  """Shards and workers as Ray actors, watched over and replaced."""

  def __init__(
    self,
    site: Site,
    make_server: Callable[[], base.Server],
    params: Any,
    make_duty: Callable[[], Duty],
    *,
    faults: Sequence[faults_lib.Fault] = (),
    refill: bool = True,
    resources: Resources | None = None,
    images: Sequence[tuple[Any, Any]] | None = None,
    resumed: bool = False,
  ):
    """Prepares; `start` begins. `ray.init` has been called.

    Args:
      site: of the run.
      make_server: called in each shard's process.
      params: NumPy arrays, before the first message.
      make_duty: called in each worker's process.
      faults: to be injected.
      refill: put a new worker in the place of one that died.
      resources: for each worker and each shard, as Ray's `options`.
      images: checkpoints of each shard, for when the memory is lost.
      resumed: the journals hold a run that stopped.
    """
    import ray

    self._ray, self._resources = ray, resources or Resources()
    self.site = site._replace(token=uuid.uuid4().hex, machine=_node())
    self._make_server, self._make_duty = make_server, make_duty
    self._params = ray.put(jax.tree.map(np.asarray, params))
    self._faults, self._refill = list(faults), refill
    self._images = list(images or [None] * site.setup.shards)
    self._resumed = resumed
    self._shard_actor = ray.remote(ShardProcess)
    self._worker_actor = ray.remote(WorkerProcess).options(
      **self._resources.worker
    )
    self._shards: list[Any] = [None] * site.setup.shards
    self._generations = [0] * site.setup.shards
    self._workers: dict[int, Any] = {}
    self._running: dict[Any, tuple[str, int]] = {}  # ref -> (kind, index)
    self._asked: tuple[float, list[Any]] | None = None  # when, for status
    self._absent: dict[int, float] = {}  # workers that have not joined, since
    self.replaced = {"worker": 0, "shard": 0}
    self.draining = False

  def _here(self):
    """Shards are where their files and their memory are."""
    from ray.util import scheduling_strategies

    return scheduling_strategies.NodeAffinitySchedulingStrategy(
      self.site.machine, soft=False
    )

  def start(self) -> None:
    """Starts all processes.

    Raises:
      ValueError: if Ray has not what they need.
    """
    self._check_resources()
    folder = Path(self.site.memory)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.end_all(folder)
    for index in range(self.site.setup.shards):
      self._start_shard(index, self._resumed)
    for worker in range(self.site.setup.workers):
      self.add_worker(worker, self._faults)

  def _check_resources(self):
    """Refuses what Ray would wait for without a word."""
    setup, there = self.site.setup, self._ray.cluster_resources()
    needed = collections.Counter()
    for count, options in (
      (setup.shards, self._resources.shard),
      (setup.workers, self._resources.worker),
    ):
      asked = {
        "CPU": options.get("num_cpus") or 0,
        "GPU": options.get("num_gpus") or 0,
        **options.get("resources", {}),
      }
      for name, amount in asked.items():
        needed[name] += count * amount
    for name, amount in needed.items():
      if amount > there.get(name, 0):
        raise ValueError(
          f"{setup.workers} workers and {setup.shards} shards ask Ray for"
          f" {amount:g} {name}, and it has {there.get(name, 0):g}: ask for less"
          " for each, or use fewer"
        )

  def _start_shard(self, index, resumed=False):
    generation = self._generations[index]
    self._generations[index] += 1
    actor = self._shard_actor.options(
      name=_name(self.site, index, generation),
      max_concurrency=8 + self.site.setup.workers,  # one listens for each
      scheduling_strategy=self._here(),
      **self._resources.shard,
    ).remote(
      *(index, self.site, self._make_server, self._params),
      *(self._images[index], resumed),
    )
    self._shards[index] = actor
    self._running[actor.serve.remote()] = "shard", index

  def add_worker(
    self, worker: int, faults: Sequence[faults_lib.Fault] = ()
  ) -> None:
    """Has a new process take a worker's place."""
    actor = self._worker_actor.remote(worker, self.site)
    self._workers[worker] = actor
    mine = [fault for fault in faults if fault.worker == worker]
    self._running[actor.run.remote(self._make_duty, mine)] = "worker", worker

  def check(self) -> list[str]:
    """Replaces who is gone; returns what there is to tell.

    Raises:
      ValueError, RuntimeError: if a process failed in a way that a new one
        would, too.
    """
    news = []
    done, _ = self._ray.wait(
      list(self._running), num_returns=len(self._running), timeout=0
    )
    for ref in done:
      kind, index = self._running.pop(ref)
      try:
        how = self._ray.get(ref)
      except self._ray.exceptions.RayActorError as error:
        if getattr(error, "actor_init_failed", False):
          raise _failure(f"{kind} {index} cannot start", error) from error
        how = "died"
      except self._ray.exceptions.RayTaskError as error:
        raise _failure(f"{kind} {index} failed", error) from error
      if kind == "shard" and how == "died":
        news.append(f"shard {index} died; another takes over")
        self.replaced["shard"] += 1
        self._start_shard(index)
      elif kind == "worker":
        news += self._worker_ended(index, how)
    return news

  def _worker_ended(self, worker, how):
    actor = self._workers.pop(worker, None)
    if actor is not None:
      for shard in self._shards:
        shard.gone.remote(actor._actor_id.hex())
    if how == "stopped" or self.draining:
      return []
    if not self._refill:
      return [f"worker {worker} {how}"]
    self.replaced["worker"] += 1
    self.add_worker(worker)
    return [f"worker {worker} {how}; another takes its place"]

  def status(self) -> list[dict[str, Any]] | None:
    """Returns how each shard is doing (`Shard.status`); None while one is being
    replaced. Workers that were taken for dead are killed, and so is a shard
    that does not answer."""
    now = time.monotonic()
    if self._asked is None:
      self._asked = now, [shard.status.remote() for shard in self._shards]
    since, calls = self._asked
    ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=1.0)
    if len(ready) < len(calls):
      if now - since > DEAD * self.site.setup.ladder.start:
        self._asked = None
        for call, shard in zip(calls, self._shards, strict=True):
          if call not in ready:
            self._ray.kill(shard)
      return None
    self._asked = None
    found = []
    for call in calls:
      try:
        found.append(self._ray.get(call))
      except self._ray.exceptions.RayActorError:
        found.append(None)
      except self._ray.exceptions.RayTaskError as error:
        raise _failure(f"shard {len(found)} failed", error) from error
    if found[0]:
      self._end_lost_workers(found[0], now)
    return found if all(found) else None

  def _end_lost_workers(self, status, now):
    """Kills workers that were taken for dead, or that never come."""
    lost = set(status["expelled"])
    for worker in self._workers:
      if worker in status["workers"]:
        self._absent.pop(worker, None)
        continue
      since = self._absent.setdefault(worker, now)
      if now - since > DEAD * self.site.setup.ladder.start:
        del self._absent[worker]
        lost.add(worker)
    for worker in lost & set(self._workers):
      self._ray.kill(self._workers[worker])

  def pids(self) -> dict[str, dict[int, int]]:
    """Returns the processes that are alive, for those who want to kill them:
    kind -> index -> number."""
    return files.pids(self.site.memory)

  def _ask_all(self, method, *args):
    """Calls a method of all shards.

    Raises:
      Disconnected: if one of them is gone.
    """
    calls = [getattr(shard, method).remote(*args) for shard in self._shards]
    answers = []
    for index, call in enumerate(calls):
      try:
        answers.append(self._ray.get(call))
      except self._ray.exceptions.RayActorError as error:
        raise Disconnected(index) from error
      except self._ray.exceptions.RayTaskError as error:
        raise _failure(f"shard {index} failed", error) from error
    return answers

  def params(self, received: int | None = None) -> Any:
    """Returns the whole parameters: now, or as kept after so many messages.

    Raises:
      Disconnected: if a shard is gone.
    """
    if received is None:
      parts = self._ask_all("params")
    else:
      parts = self._ask_all("kept_params", received)
      for index, part in enumerate(parts):
        if part is None:
          raise Disconnected(index)
    if len(parts) == 1:
      return parts[0]
    whole = self._ray.get(self._params)
    return sharding.join(sharding.plan(whole, len(parts)), parts)

  def images(self) -> list[tuple[Any, Any]]:
    """Returns what a checkpoint needs, of each shard.

    Raises:
      Disconnected: if a shard is gone.
    """
    return self._ask_all("image")

  def pause(self) -> None:
    """Has workers finish what they do, and start nothing new.

    Raises:
      Disconnected: if a shard is gone.
    """
    self._ask_all("pause")

  def close(self) -> None:
    """Ends all processes; what they wrote stays."""
    self._let_workers_leave()
    for shard in filter(None, self._shards):
      with contextlib.suppress(self._ray.exceptions.RayError):
        self._ray.get(shard.end.remote(), timeout=5.0)
    for actor in (*self._workers.values(), *filter(None, self._shards)):
      self._ray.kill(actor)

  def _let_workers_leave(self):
    """When all is done, workers end by themselves, and traces say so."""
    with contextlib.suppress(self._ray.exceptions.RayError):
      lead = self._shards[0]
      if lead is None or not self._ray.get(lead.stopped.remote(), timeout=1.0):
        return
      working = [r for r, who in self._running.items() if who[0] == "worker"]
      if working:
        self._ray.wait(working, num_returns=len(working), timeout=2.0)

  def remove_memory(self) -> None:
    """Removes the shared memory: after this, nothing can be resumed from it."""
    shutil.rmtree(self.site.memory, ignore_errors=True)
