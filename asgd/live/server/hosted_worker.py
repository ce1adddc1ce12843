"""A worker as an object in a host: it measures jobs, and runs a WorkerLoop.

The lead (shard 0) assigns jobs, and expels workers that hang.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from asgd.live import faults as faults_lib
from asgd.live import spans
from asgd.live.hosts import Inside
from asgd.live.hosts.site import Site, node_id
from asgd.live.links.notes import RemoteNotes
from asgd.live.links.remote import RayLink
from asgd.live.links.sockets import SocketLink, UnixNetwork
from asgd.live.profile import Profile
from asgd.live.slots import SharedMemory
from asgd.live.worker import LoopContext, WorkerLoop
from asgd.live.worker_spec import WorkerSpec

# The result of `run` if `interrupt` was called: another loop follows.
REPLACED = "replaced"

# (faults, folder of the run, Inside) -> the Script that injects the faults
MakeScript = Callable[..., faults_lib.Script]


class HostedWorker:
  """One start of a worker: a thread or process with a `WorkerLoop`.

  The driver calls `run`. If the run divides its jobs by the speed of workers,
  it calls `prepare` and `measure` before. Other threads call `drain` and
  `interrupt` meanwhile; the host calls `close` at its end.
  """

  def __init__(self, inside: Inside, maker: "WorkerMaker"):
    """`inside` has the functions of the host; `maker` made this object."""
    self._inside, self._maker, self._worker = inside, maker, maker.worker
    self._spec: WorkerSpec | None = None  # the spec that `measure` uses
    self._loop: WorkerLoop | None = None
    self._is_drained = self._is_interrupted = False
    self._disconnect: Callable[[], None] = lambda: None

  def prepare(self, make_spec: Callable[[], WorkerSpec]) -> None:
    """Compiles the jobs that `measure` will time."""
    self._spec = make_spec()
    self._spec.warm_up(self._worker)

  def measure(self, jobs: int) -> float:
    """Returns the seconds that a job takes; see `WorkerSpec.measure`."""
    assert self._spec is not None
    return self._spec.measure(self._worker, jobs, self._inside.wait)

  def run(self, make_spec: Callable[[], WorkerSpec]) -> str:
    """Works until the worker stops, is drained or is interrupted. Returns which
    of these ended the work, as `WorkerLoop.run` does.
    """
    maker = self._maker
    # [1] Compile.
    spec = make_spec().kept_in(Path(maker.site.run), self._worker)
    if maker.warm_up:
      # Compile before joining: the lead would count a worker that compiles as
      # hung.
      spec.warm_up(self._worker)
    # [2] Connect to all shards.
    context = maker.make_context(spec, self._inside)
    self._disconnect = context.close
    for shard in range(len(spec.parts())):
      while not self._is_interrupted and not context.link.connect(shard):
        pass
    if self._is_interrupted:
      return REPLACED
    # [3] Join, and do jobs.
    self._loop = WorkerLoop(
      *(self._worker, spec, context),
      restarts=maker.restarts,
      patience=maker.site.patience,
    )
    # `drain` or `interrupt` may have been called before there was a loop.
    if self._is_drained:
      self._loop.drain()
    if self._is_interrupted:
      self._loop.revoke()
    with spec.on_device(self._worker):
      outcome = self._loop.run()
    # [4] Leave.
    self.close()
    return outcome

  def drain(self) -> None:
    """Ends the worker after its open jobs; a signal handler may call it."""
    self._is_drained = True
    if self._loop is not None:
      self._loop.drain()

  def interrupt(self) -> None:
    """Ends the worker as soon as it waits. After the return of this method the
    worker writes to no slot."""
    self._is_interrupted = True
    if self._loop is not None:
      self._loop.revoke()
      self._loop.wake()

  def close(self) -> None:
    """Writes pending output, and leaves all shards."""
    disconnect, self._disconnect = self._disconnect, lambda: None
    disconnect()


class WorkerMaker(NamedTuple):
  """Makes a HostedWorker. It is pickled and sent to the worker's process."""

  site: Site
  network: UnixNetwork
  worker: int
  restarts: int  # number of earlier loops of the worker
  faults: Sequence[faults_lib.Fault]
  make_script: MakeScript
  warm_up: bool  # whether the worker compiles before it joins

  def __call__(self, inside: Inside) -> HostedWorker:
    """Makes the worker; it computes nothing yet."""
    return HostedWorker(inside, self)

  def make_context(self, spec: WorkerSpec, inside: Inside) -> LoopContext:
    """Returns the context of the worker's loop; no shard is connected yet."""
    site = self.site
    # Local: a thread (the run has no `site.machine`), or a process on the
    # driver's machine. Tests turn `site.sockets` off to use Ray's calls there.
    is_local = not site.machine or (
      site.sockets and node_id() == site.machine
    )
    make_context = self._make_local if is_local else self._make_remote
    context = make_context(spec, inside)
    # One worker's profile is enough, and a successor would replace its files.
    has_profile = self.worker == 0 == self.restarts
    profile = Profile(site.profile if has_profile else None)
    write_span, close = context.span, context.close
    assert write_span is not None

    def take_span(span: spans.Span) -> None:
      if site.spans:
        write_span(span)
      if span.name == "push":
        profile.after_job()

    def close_all() -> None:
      profile.close()
      close()

    return context._replace(span=take_span, close=close_all)

  def _make_local(self, spec: WorkerSpec, inside: Inside) -> LoopContext:
    """Returns the context on the driver's machine, with sockets, shared memory
    and files."""
    site, run = self.site, Path(self.site.run)
    slot_contents = spec.slot_contents()
    paths = [site.socket(index) for index in range(len(slot_contents))]
    link = SocketLink(paths, self.network)

    # Called only when the shard is connected: it creates the files.
    def open_memory(shard: int) -> SharedMemory:
      return site.open_memory(shard, *slot_contents[shard], None)

    return LoopContext(
      link=link,
      memory=open_memory,
      clock=inside.clock,
      wait=inside.wait,
      script=self.make_script(self.faults, run, inside),
      span=functools.partial(spans.SpanWriter(run), self.worker),
      close=link.close,  # shards notice at once that the worker has left
    )

  def _make_remote(self, spec: WorkerSpec, inside: Inside) -> LoopContext:
    """Returns the context on another machine, with calls of Ray."""
    messages = [message for _, message, *_ in spec.slot_contents()]
    link = RayLink(self.site, self.worker, self.restarts, messages)
    # The local clock: `RemoteNotes` converts its times to the lead's.
    clock = time.monotonic
    notes = RemoteNotes(self.worker, link.find_lead, clock=clock)
    script = faults_lib.Script(
      self.faults, kill=inside.kill, wait=inside.wait, record=notes.send_fault
    )
    return LoopContext(
      link=link,
      memory=link.memories.__getitem__,
      clock=clock,
      wait=inside.wait,
      script=script,
      span=notes.add_span,
      close=notes.close,
    )
