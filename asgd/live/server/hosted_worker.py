"""A worker as an object in a host: it measures jobs, and runs a WorkerLoop."""

from collections.abc import Callable

from asgd.live.duty import Duty
from asgd.live.hosts import Inside
from asgd.live.worker import Reach, WorkerLoop

_PATIENCE = 5.0  # seconds after which a worker repeats what is not answered
REPLACED = "replaced"  # how a worker ends whose host was ended


# Makes a Reach, not connected to any shard yet: (worker, incarnations of it
# before, duty, that of its host) -> Reach
MakeReach = Callable[[int, int, Duty, Inside], Reach]


class HostedWorker:
  """One incarnation of a worker."""

  def __init__(
    self,
    inside: Inside,
    worker: int,
    life: int,
    reach: MakeReach,
    *,
    warm_up: bool = False,
    patience: float = _PATIENCE,
  ):
    """Prepares.

    Args:
      inside: of its host.
      worker: index.
      life: how many incarnations of the worker were before.
      reach: makes what it has of the run.
      warm_up: whether it compiles before it joins, in a process of its own.
      patience: seconds after which it repeats what is not answered.
    """
    self._inside, self._worker, self._life = inside, worker, life
    self._make_reach, self._warms_up = reach, warm_up
    self._patience = patience
    self._duty: Duty | None = None  # that is measured
    self._loop: WorkerLoop | None = None
    self._drained = self._interrupted = False
    self._close: Callable[[], None] = lambda: None

  def prepare(self, make_duty: Callable[[], Duty]) -> None:
    """Compiles what is to be measured."""
    self._duty = make_duty()
    self._duty.warm_up(self._worker)

  def measure(self, jobs: int) -> float:
    """Returns the seconds that a job takes; see `Duty.measure`."""
    assert self._duty is not None
    return self._duty.measure(self._worker, jobs, self._inside.wait)

  def run(self, make_duty: Callable[[], Duty]) -> str:
    """Works until there is no more to do; see `WorkerLoop.run`."""
    duty = make_duty()
    if self._warms_up:
      # Before it joins, or the lead would take it for hung: its deadline is
      # that of workers that have compiled.
      duty.warm_up(self._worker)
    reach = self._make_reach(self._worker, self._life, duty, self._inside)
    self._close = reach.close
    for shard in range(len(duty.parts())):
      while not self._interrupted and not reach.link.connect(shard):
        pass
    if self._interrupted:
      return REPLACED
    self._loop = WorkerLoop(
      self._worker, duty, reach, life=self._life, patience=self._patience
    )
    if self._drained:  # before there was a loop
      self._loop.drain()
    if self._interrupted:
      self._loop.revoke()
    with duty.on_device(self._worker):
      how = self._loop.run()
    self.close()
    return how

  def drain(self) -> None:
    """Ends after what was begun; may be called by a signal handler."""
    self._drained = True
    if self._loop is not None:
      self._loop.drain()

  def interrupt(self) -> None:
    """Ends where it waits, and writes to no slot any more once this returns."""
    self._interrupted = True
    if self._loop is not None:
      self._loop.revoke()
      self._loop.wake()

  def close(self) -> None:
    """Writes what is left to be written, and leaves all shards."""
    close, self._close = self._close, lambda: None
    close()
