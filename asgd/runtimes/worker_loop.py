"""A live worker: gets tickets, does the work, hands in messages.

The loop is the same in a thread and in a process of its own; a `Link` carries
its frames. With more than one ticket (`Rules.depth`) the next job is started
before the message of the last is handed in, so that fetching, computing and
pushing overlap.
"""

import collections
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from asgd import base, sharding, simulator
from asgd.runtimes import protocol
from asgd.runtimes.memory import MESSAGES, PARAMS
from asgd.runtimes.protocol import Frame

_SIGN_OF_LIFE = 0.5  # seconds between two, while a shard is waited for


class Disconnected(Exception):
  """A shard cannot be reached; `shard` says which."""

  def __init__(self, shard: int):
    super().__init__(f"shard {shard} cannot be reached")
    self.shard = shard


class Link(Protocol):
  """The way to all shards."""

  def say(self, shard: int, frame: Frame) -> None:
    """Sends a frame. Raises Disconnected."""

  def hear(self, seconds: float | None) -> tuple[int, Frame] | None:
    """Returns the next (shard, frame), None if none comes in that time (None:
    forever), or if `wake` was called. Raises Disconnected."""

  def connect(self, shard: int) -> bool:
    """Opens the way to a shard anew. False if it is not there (yet); waits a
    moment in that case."""

  def wake(self) -> None:
    """Ends a `hear` that is waiting; may be called from a signal handler."""


class Duty(NamedTuple):
  """What a worker does, wherever it runs."""

  work: Callable  # of `simulator.compile_steps`
  init: Callable[[Any], Any]  # parameters (shapes) -> the worker's state
  batch: Callable[[int, int], base.Batch]
  root: jax.Array  # key
  params: Any  # shapes and dtypes of all parameters
  plan: sharding.Plan | None  # how they are split; None: one shard
  consistent: bool = False
  depth: int = 1
  slowdown: tuple[float, ...] = ()  # factors on the time of workers 0, 1, ...


class Injector(Protocol):
  """Faults, for tests and for chaos; see `asgd.runtimes.faults`."""

  def before_work(self, worker: int, seq: int) -> None:
    """May take its time, or not return."""

  def message(self, worker: int, seq: int, message: Any) -> Any:
    """Returns the message, or a spoilt one."""

  def frames(self, worker: int, frame: Frame) -> list[Frame]:
    """Returns what becomes of a PUSH on the wire."""


class Span(NamedTuple):
  """A stretch of a worker's time."""

  name: str  # fetch, compute or push
  start: float
  end: float
  seq: int
  job: int


def _finite(message: Any, loss: float) -> bool:
  """Whether there is no NaN or infinity in a message of NumPy arrays.

  One sum for each leaf tells: neither ever goes away in one. A sum that
  overflows is taken for infinite, too.
  """
  with np.errstate(all="ignore"):
    sums = [
      np.sum(x, dtype=np.promote_types(x.dtype, np.float32))
      for x in jax.tree.leaves(message)
    ]
  return bool(np.isfinite(sums).all() and np.isfinite(loss))


class _Job:
  """A job that is under way."""

  def __init__(self, frame: Frame, now: float):
    self.seq, self.job, self.kept = frame.seq, frame.job, frame.flag
    self.tickets: dict[int, Frame] = {}  # by shard
    self.began = now
    self.result = None
    self.started = 0.0


class WorkerLoop:
  """One holder of a place, and, if it is expelled, the next one as well."""

  def __init__(
    self,
    worker: int,
    duty: Duty,
    link: Link,
    memories: list[Any],
    *,
    clock: Callable[[], float],
    patience: float = 5.0,
    wait: Callable[[float], None] = lambda seconds: None,
    faults: Injector | None = None,
    span: Callable[[Span], None] | None = None,
  ):
    """Starts with nothing.

    Args:
      worker: the place.
      duty: what to do.
      link: the way to the shards.
      memories: of each shard.
      clock: seconds since the run began.
      patience: seconds without an answer after which everything that was not
        answered is said again.
      wait: lets seconds go by, for a worker that is to be slow.
      faults: to be injected.
      span: told of each stretch of time.
    """
    self.worker, self._duty, self._link = worker, duty, link
    self._memories, self._clock = memories, clock
    self._patience, self._wait = patience, wait
    factors = duty.slowdown[worker : worker + 1]
    self._slowdown = factors[0] if factors else 1.0
    self._faults, self._span = faults, span or (lambda span: None)
    self._shards = range(len(memories))
    self._number = np.int32(worker)
    self.draining = False
    self.revoked = False  # somebody else has its place: it may write no more
    self._drain_said = False
    self.messages = 0
    self._reset()

  def _reset(self):
    """What a new holder starts with."""
    self._holder = -1
    self._state = None
    self._jobs: dict[int, _Job] = {}  # by seq, not pushed yet
    self._done: set[int] = set()  # seqs handed in
    self._unacked: list[dict[int, Frame]] = [{} for _ in self._shards]
    self._running: collections.deque[_Job] = collections.deque()

  def drain(self) -> None:
    """Asks the loop to end after what it has begun."""
    self.draining = True
    self._link.wake()

  def run(self) -> str:
    """Works until there is no more to do.

    Returns:
      "stopped" when all jobs are received, "left" if it was drained, "replaced"
      if somebody else took its place.
    """
    self._say(0, Frame(protocol.HELLO, self.worker, job=-1))
    while not self.revoked:
      if self.draining and not self._drain_said:
        self._drain_said = True
        self._say(0, Frame(protocol.DRAIN, self.worker))
      self._start_what_is_ready()
      if self._drain_said and not self._running and not any(self._unacked):
        for shard in self._shards:
          self._say(shard, Frame(protocol.BYE, self.worker))
        return "left"
      heard = self._hear(0.0 if self._running else self._patience)
      if heard:
        shard, frame = heard
        if frame.kind == protocol.STOP and shard == 0:
          return "stopped"
        if frame.kind == protocol.EXPEL and frame.flag:
          return "replaced"
        self._handle(shard, frame)
      elif self._running:
        self._finish(self._running.popleft())
      elif not self.draining or self._drain_said:
        self._repeat()
    return "replaced"

  # Frames.

  def _say(self, shard, frame):
    try:
      self._link.say(shard, frame)
    except Disconnected:
      self._come_back(shard)

  def _hear(self, seconds):
    try:
      return self._link.hear(seconds)
    except Disconnected as error:
      self._come_back(error.shard)
      return None

  def _come_back(self, shard):
    """Waits for a shard that is being replaced, and says everything again."""
    said = self._clock()
    while not self._link.connect(shard):
      if shard and self._clock() - said > _SIGN_OF_LIFE:
        said = self._clock()
        with contextlib.suppress(Disconnected):  # there is time for that
          self._link.say(
            0, Frame(protocol.HELLO, self.worker, job=self._holder, flag=1)
          )
    self._repeat(shard)

  def _repeat(self, only=None):
    for shard in self._shards if only is None else (only,):
      if shard and self._holder < 0:
        continue
      try:
        self._link.say(
          shard, Frame(protocol.HELLO, self.worker, job=self._holder)
        )
        if shard and not self._duty.consistent:
          for job in self._jobs.values():
            if shard not in job.tickets and 0 in job.tickets:
              self._link.say(shard, self._fetch_frame(job))
        for frame in list(self._unacked[shard].values()):
          self._link.say(shard, frame)
      except Disconnected:
        return  # `hear` will notice

  def _fetch_frame(self, job):
    return Frame(
      protocol.FETCH, self.worker, job.seq, job.job, flag=job.kept
    )

  def _handle(self, shard, frame):
    if frame.kind == protocol.WELCOME:
      self._welcome(shard, frame)
    elif frame.kind == protocol.TICKET:
      self._ticket(shard, frame)
    elif frame.kind == protocol.ACK:
      self._unacked[shard].pop(frame.seq, None)
    elif frame.kind == protocol.EXPEL:
      if shard:  # it has lost what it knew of us: begin anew everywhere
        self._say(0, Frame(protocol.BYE, self.worker))
      self._reset()
      self._say(0, Frame(protocol.HELLO, self.worker, job=-1))

  def _welcome(self, shard, frame):
    if shard or frame.job == self._holder:
      return
    self._holder = frame.job
    self._state = self._duty.init(self._duty.params)
    for other in self._shards[1:]:
      self._say(
        other, Frame(protocol.HELLO, self.worker, job=self._holder)
      )

  def _ticket(self, shard, frame):
    if self._holder < 0 or frame.seq in self._done:
      return
    job = self._jobs.get(frame.seq)
    if job is None:
      job = self._jobs[frame.seq] = _Job(frame, self._clock())
      if shard == 0 and not self._duty.consistent:
        for other in self._shards[1:]:
          self._say(other, self._fetch_frame(job))
    job.tickets[shard] = frame

  # Work.

  def _start_what_is_ready(self):
    """Starts complete jobs, in their order, as far as the depth allows."""
    for seq in sorted(self._jobs):
      job = self._jobs[seq]
      if 0 not in job.tickets:
        continue  # of the holder before: another shard does not know yet
      if len(job.tickets) < len(self._shards):
        return
      if len(self._running) >= self._duty.depth:
        return
      del self._jobs[seq]
      self._done.add(seq)
      self._begin(job)

  def _begin(self, job):
    if self._faults:
      self._faults.before_work(self.worker, job.seq)
    job.started = self._clock()
    self._span(Span("fetch", job.began, job.started, job.seq, job.job))
    parts = [
      self._memories[shard].read(PARAMS, job.tickets[shard].params)
      for shard in self._shards
    ]
    plan = self._duty.plan
    params = parts[0] if plan is None else sharding.join(plan, parts)
    ticket = base.Ticket(
      self._number,
      np.int32(job.tickets[0].version),
      params,
      np.bool_(not job.kept),
    )
    self._state, message, metrics = self._duty.work(
      *(self._state, ticket, self._duty.batch(self.worker, job.job)),
      *(self._duty.root, np.int32(job.job)),
    )
    job.result = message, metrics.loss
    self._running.append(job)

  def _finish(self, job):
    """Waits for a job's message and hands it in, to the lead last: what the
    lead has, all have."""
    message, loss = job.result
    if self._faults:
      message = self._faults.message(self.worker, job.seq, message)
    message, loss = simulator.fetch((message, loss))
    if self.revoked:
      return
    if self._slowdown > 1:
      self._wait((self._slowdown - 1) * (self._clock() - job.started))
    computed = self._clock()
    self._span(Span("compute", job.started, computed, job.seq, job.job))
    plan = self._duty.plan
    finite = _finite(message, loss)
    parts = [message] if plan is None else sharding.split(plan, message)
    for shard in reversed(self._shards):
      slot = job.tickets[shard].message
      self._memories[shard].write(MESSAGES, slot, parts[shard])
      frame = Frame(
        *(protocol.PUSH, self.worker, job.seq, job.job),
        flag=int(finite),
        message=slot,
        value=float(loss),
      )
      self._unacked[shard][job.seq] = frame
      frames = [frame]
      if self._faults and shard == 0:
        frames = self._faults.frames(self.worker, frame)
      for sent in frames:
        self._say(shard, sent)
    self.messages += 1
    self._span(Span("push", computed, self._clock(), job.seq, job.job))
