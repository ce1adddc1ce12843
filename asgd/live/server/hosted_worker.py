"""A worker as an object in a host: it measures jobs, and runs a WorkerLoop.

The lead is shard 0, which gives out jobs and replaces workers that hang.
"""

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

# The result of `run` if `interrupt` was called: another incarnation follows.
REPLACED = "replaced"

# (faults, folder of the run, Inside) -> the Script that injects the faults
MakeScript = Callable[..., faults_lib.Script]


class HostedWorker:
  """One incarnation of a worker.

  The driver calls `run`. If the run divides its jobs by the speed of workers,
  it calls `prepare` and `measure` before. Other threads call `drain` and
  `interrupt` meanwhile; the host calls `close` at its end.
  """

  def __init__(self, inside: Inside, maker: "WorkerMaker"):
    """`inside` has the functions of the host; `maker` made this object."""
    self._inside, self._maker, self._worker = inside, maker, maker.worker
    self._duty: Duty | None = None  # of `measure`
    self._loop: WorkerLoop | None = None
    self._drained = self._interrupted = False
    self._disconnect: Callable[[], None] = lambda: None

  def prepare(self, make_duty: Callable[[], Duty]) -> None:
    """Compiles the jobs that `measure` will time."""
    self._duty = make_duty()
    self._duty.warm_up(self._worker)

  def measure(self, jobs: int) -> float:
    """Returns the seconds that a job takes; see `Duty.measure`."""
    assert self._duty is not None
    return self._duty.measure(self._worker, jobs, self._inside.wait)

  def run(self, make_duty: Callable[[], Duty]) -> str:
    """Works until the worker stops, is drained or interrupted; returns which,
    as `WorkerLoop.run`.

    [1] Compile. [2] Connect to all shards. [3] Join, and do jobs. [4] Leave.
    """
    maker = self._maker
    # [1]
    duty = make_duty().kept_in(Path(maker.site.run), self._worker)
    if maker.warm_up:
      # Compile before joining: the lead expects the first message as soon as
      # from a worker that has compiled, and would take this one for hung.
      duty.warm_up(self._worker)
    # [2]
    reach = maker.reach(duty, self._inside)
    self._disconnect = reach.close
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
      outcome = self._loop.run()
    # [4]
    self.close()
    return outcome

  def drain(self) -> None:
    """Ends the worker after its open jobs; a signal handler may call it."""
    self._drained = True
    if self._loop is not None:
      self._loop.drain()

  def interrupt(self) -> None:
    """Ends the worker as soon as it waits. After the return of this method the
    worker writes to no slot."""
    self._interrupted = True
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
  restarts: int  # how many incarnations of the worker were before
  faults: Sequence[faults_lib.Fault]
  make_script: MakeScript
  warm_up: bool  # whether the worker compiles before it joins

  def __call__(self, inside: Inside) -> HostedWorker:
    """Makes the worker; it computes nothing yet."""
    return HostedWorker(inside, self)

  def reach(self, duty: Duty, inside: Inside) -> Reach:
    """Returns the worker's connections to the run; no shard is connected
    yet."""
    site = self.site
    # Local: a thread (the run has no `site.machine`), or a process on the
    # driver's machine. Tests turn `site.sockets` off to use Ray's calls there.
    local = not site.machine or (site.sockets and node_id() == site.machine)
    reach = self._local(duty, inside) if local else self._remote(duty, inside)
    # One worker's profile is enough, and a successor would replace its files.
    has_profile = self.worker == 0 == self.restarts
    profile = Profile(site.profile if has_profile else None)
    write_span, close = reach.span, reach.close
    assert write_span is not None

    def write(span: spans.Span) -> None:
      if site.spans:
        write_span(span)
      if span.name == "push":
        profile.worked()

    def close_all() -> None:
      profile.close()
      close()

    return reach._replace(span=write, close=close_all)

  def _local(self, duty: Duty, inside: Inside) -> Reach:
    """Returns connections on the driver's machine: sockets, shared memory and
    files."""
    site, shares, run = self.site, duty.shares(), Path(self.site.run)
    paths = [site.socket(index) for index in range(len(shares))]
    link = SocketLink(paths, self.network)

    # Called only when the shards are connected: they make the files.
    def memories() -> list[SharedMemory]:
      return [
        site.open_memory(shard, *contents, None)
        for shard, contents in enumerate(shares)
      ]

    return Reach(
      link=link,
      memories=memories,
      clock=inside.clock,
      wait=inside.wait,
      script=self.make_script(self.faults, run, inside),
      span=functools.partial(spans.SpanWriter(run), self.worker),
      close=link.close,  # shards notice at once that the worker has left
    )

  def _remote(self, duty: Duty, inside: Inside) -> Reach:
    """Returns connections from another machine: calls of Ray."""
    messages = [message for _, message, *_ in duty.shares()]
    link = RayLink(self.site, self.worker, self.restarts, messages)
    # The local clock: `FarNotes` converts its times to the lead's.
    clock = time.monotonic
    notes = FarNotes(self.worker, link.find_lead, clock=clock)
    script = faults_lib.Script(
      self.faults, kill=inside.kill, wait=inside.wait, record=notes.fault
    )
    return Reach(
      link=link,
      memories=lambda: link.memories,
      clock=clock,
      wait=inside.wait,
      script=script,
      span=notes.span,
      close=notes.close,
    )
