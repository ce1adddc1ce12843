"""A worker as an object in a host: it measures jobs, and runs a WorkerLoop."""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from asgd.live import faults as faults_lib
from asgd.live import spans
from asgd.live.duty import Duty
from asgd.live.hosts import Inside
from asgd.live.hosts.site import Site, node_id
from asgd.live.links.notes import FarNotes
from asgd.live.links.remote import RayLink
from asgd.live.links.sockets import SocketLink, UnixNetwork
from asgd.live.profile import Profile
from asgd.live.slots import SharedMemory
from asgd.live.worker import Reach, WorkerLoop

REPLACED = "replaced"  # the result of `run` if the worker's host was ended

# (faults, folder of the run, Inside) -> the faults of the worker in a host
MakeScript = Callable[..., faults_lib.Script]


class HostedWorker:
  """One incarnation of a worker.

  The host calls `prepare` and `measure` only if the run has an allocation by
  speed, then `run`. Other threads call `drain` and `interrupt` meanwhile.
  """

  def __init__(self, inside: Inside, maker: "WorkerMaker"):
    """`inside` is the host's."""
    self._inside, self._maker, self._worker = inside, maker, maker.worker
    self._duty: Duty | None = None  # of `measure`
    self._loop: WorkerLoop | None = None
    self._drained = self._interrupted = False
    self._close: Callable[[], None] = lambda: None

  def prepare(self, make_duty: Callable[[], Duty]) -> None:
    """Compiles the jobs that `measure` will time."""
    self._duty = make_duty()
    self._duty.warm_up(self._worker)

  def measure(self, jobs: int) -> float:
    """Returns the seconds that a job takes; see `Duty.measure`."""
    assert self._duty is not None
    return self._duty.measure(self._worker, jobs, self._inside.wait)

  def run(self, make_duty: Callable[[], Duty]) -> str:
    """Works until the worker stops or is drained; see `WorkerLoop.run`.

    [1] Compile. [2] Connect to all shards. [3] Join, and do jobs. [4] Leave.
    """
    maker = self._maker
    # [1]
    duty = make_duty().kept_in(Path(maker.site.run), self._worker)
    if maker.warm_up:
      # Before it joins, or the lead would take it for hung: its deadline is
      # that of workers that have compiled.
      duty.warm_up(self._worker)
    # [2]
    reach = maker.reach(duty, self._inside)
    self._close = reach.close
    for shard in range(len(duty.parts())):
      while not self._interrupted and not reach.link.connect(shard):
        pass
    if self._interrupted:
      return REPLACED
    # [3]
    self._loop = WorkerLoop(
      *(self._worker, duty, reach),
      restarts=maker.restarts,
      patience=maker.site.patience,
    )
    # `drain` or `interrupt` may have been called before there was a loop.
    if self._drained:
      self._loop.drain()
    if self._interrupted:
      self._loop.revoke()
    with duty.on_device(self._worker):
      how = self._loop.run()
    # [4]
    self.close()
    return how

  def drain(self) -> None:
    """Ends the worker after its open jobs; a signal handler may call it."""
    self._drained = True
    if self._loop is not None:
      self._loop.drain()

  def interrupt(self) -> None:
    """Ends the worker where it waits. Once this returns, it writes to no slot
    any more."""
    self._interrupted = True
    if self._loop is not None:
      self._loop.revoke()
      self._loop.wake()

  def close(self) -> None:
    """Writes pending output, and leaves all shards."""
    close, self._close = self._close, lambda: None
    close()


class WorkerMaker(NamedTuple):
  """Makes a worker; it travels to the process of the worker."""

  site: Site
  network: UnixNetwork
  worker: int
  restarts: int  # how many incarnations of the worker were before
  faults: Sequence[faults_lib.Fault]
  make_script: MakeScript
  warm_up: bool  # in a separate process it compiles before it joins

  def __call__(self, inside: Inside) -> HostedWorker:
    """Prepares."""
    return HostedWorker(inside, self)

  def reach(self, duty: Duty, inside: Inside) -> Reach:
    """Returns the worker's connections to the run; no shard is connected
    yet."""
    site = self.site
    # Threads have no `site.machine`; `site.sockets` is off in tests of Ray.
    local = not site.machine or (site.sockets and node_id() == site.machine)
    reach = self._local(duty, inside) if local else self._remote(duty, inside)
    # One worker's profile is enough, and a successor would replace its files.
    first = self.worker == 0 == self.restarts
    profile = Profile(site.profile if first else None)
    write_span, close = reach.span, reach.close
    assert write_span is not None

    def span(span: spans.Span) -> None:
      if site.spans:
        write_span(span)
      if span.name == "push":
        profile.worked()

    def close_all() -> None:
      profile.close()
      close()

    return reach._replace(span=span, close=close_all)

  def _local(self, duty: Duty, inside: Inside) -> Reach:
    """On the driver's machine: by sockets, shared memory and files."""
    site, shares, run = self.site, duty.shares(), Path(self.site.run)
    paths = [site.socket(index) for index in range(len(shares))]
    link = SocketLink(paths, self.network)

    # Called after the connection to the shards: if a worker made the files, a
    # shard would take the new memory for its predecessor's.
    def memories() -> list[SharedMemory]:
      return [site.open_memory(i, *like, None) for i, like in enumerate(shares)]

    return Reach(
      link,
      memories,
      inside.clock,
      inside.wait,
      self.make_script(self.faults, run, inside),
      functools.partial(spans.SpanWriter(run), self.worker),
      link.close,  # shards notice at once that it has left
    )

  def _remote(self, duty: Duty, inside: Inside) -> Reach:
    """On another machine: by calls of Ray."""
    messages = [message for _, message, *_ in duty.shares()]
    link = RayLink(self.site, self.worker, self.restarts, messages)
    # The local clock: `FarNotes` converts its times to the lead's.
    clock = time.monotonic
    notes = FarNotes(self.worker, link.find_lead, clock=clock)
    script = faults_lib.Script(
      self.faults, kill=inside.kill, wait=inside.wait, record=notes.fault
    )
    return Reach(
      link,
      lambda: link.memories,
      clock,
      inside.wait,
      script,
      notes.span,
      notes.close,
    )
