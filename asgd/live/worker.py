"""A live worker: receives tickets, does the work, hands in messages.

The loop is the same in a thread and in a process; a `WorkerLink` carries its
frames. With more than one ticket (`Rules.depth`) the next job is started before
the message of the last is handed in. With `Duty.overlap` the loop fetches, and
two threads beside it compute and write messages (`asgd.live.overlap`).
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, compression, sharding, simulator
from asgd.compression.packing import BadCode
from asgd.live import frames, pace
from asgd.live.duty import Duty
from asgd.live.faults import Script
from asgd.live.frames import Frame
from asgd.live.held import HeldParams, OutOfStep
from asgd.live.links.base import Disconnected, WorkerLink
from asgd.live.overlap import Stages
from asgd.live.slots import MESSAGES, PARAMS, WrongSlot, message_stamp
from asgd.live.spans import Span

_SIGN_OF_LIFE = 0.5  # seconds between two, while a shard is waited for


def is_finite(message: Any, loss: float) -> bool:
  """Whether a message of NumPy arrays has no NaN or infinity: neither
  disappears in a sum. A sum that overflows counts as infinite. For codes the
  loss is NaN if the message was not encoded."""
  if isinstance(message, compression.Parts):
    return all(is_finite(part, loss) for part in message.parts)
  if isinstance(message, compression.Coded):
    return bool(np.isfinite(message.residual) and np.isfinite(loss))
  with np.errstate(all="ignore"):
    sums = [
      np.sum(x, dtype=np.promote_types(x.dtype, np.float32))
      for x in jax.tree.leaves(message)
    ]
  return bool(np.isfinite(sums).all() and np.isfinite(loss))


class Reach(NamedTuple):
  """What an incarnation of a worker has of the run around it."""

  link: WorkerLink  # to all shards
  # Returns each shard's slots; called when all shards are connected.
  memories: Callable[[], Sequence[Any]]
  clock: Callable[[], float]  # in seconds
  wait: Callable[[float], None]  # blocks for some seconds
  script: Script
  span: Callable[[Span], None] | None  # takes the spans of jobs
  close: Callable[[], None]  # writes what is left, and disconnects


class _OpenJob:
  """A job that is under way."""

  def __init__(self, frame: Frame, now: float):
    self.seq, self.job = frame.seq, frame.job
    self.kept = int(frame.flag == frames.KEPT)
    self.tickets: dict[int, Frame] = {}  # by shard
    self.began = self.started = now
    self.computed: float | None = None
    self.result = None


class _Tenure:
  """The state of one holder of a worker index; the next holder starts anew."""

  def __init__(self, shards: int, held: Any, attempt: int = 0):
    self.attempt = attempt  # counts the holders that this loop was
    # Of each shard; None: each ticket brings the parameters.
    self.held: list[HeldParams] | None = held
    self.number = -1  # of the holder; the lead gives it
    self.state = None  # the worker's
    self.jobs: dict[int, _OpenJob] = {}  # by seq, not started yet
    self.started: set[int] = set()  # seqs
    self.running: collections.deque[_OpenJob] = collections.deque()
    # Of each shard, by seq: PUSHes that it has not acknowledged.
    self.unacked: list[dict[int, Frame]] = [{} for _ in range(shards)]
    # By seq: PUSHes that the lead gets once all other shards have theirs.
    self.for_lead: dict[int, Frame] = {}

  @property
  def unsettled(self) -> bool:
    """Whether some shard has not acknowledged a message."""
    return bool(self.for_lead) or any(self.unacked)


class Lease:
  """The right of a holder to write to the slots of its worker index."""

  def __init__(self):
    self.revoked = False  # another worker has the place
    self._lock = threading.Lock()  # held while it writes

  def revoke(self) -> None:
    """Ends it: when this returns, nothing is written any more."""
    with self._lock:
      self.revoked = True

  def use(self, write: Callable[[], None]) -> bool:
    """Writes; after `revoke` it writes nothing and returns False."""
    with self._lock:
      if not self.revoked:
        write()
      return not self.revoked


class WorkerLoop:
  """One holder of a worker index, and, if it is expelled, the next one."""

  def __init__(
    self,
    worker: int,
    duty: Duty,
    reach: Reach,
    *,
    life: int = 0,
    patience: float = 5.0,
  ):
    """`life` counts the earlier loops of the worker; what was not answered for
    `patience` seconds is sent again."""
    self._worker, self._duty, self._life = worker, duty, life
    self._reach, self._patience = reach, patience
    self._memories = list(reach.memories())
    self._shards = range(len(self._memories))
    self._lease = Lease()
    self._tenure = _Tenure(len(self._memories), duty.hold())
    self._stages: Stages | None = None  # with `Duty.overlap`
    self.draining = False
    self._drain_said = False

  def drain(self) -> None:
    """Asks the loop to end after the jobs that it has begun."""
    self.draining = True
    self.wake()

  def wake(self) -> None:
    """Ends a wait of the loop for a shard."""
    self._reach.link.wake()

  def revoke(self) -> None:
    """Gives the worker index to another: when this returns, the loop writes to
    no slot any more."""
    self._lease.revoke()

  def run(self) -> str:
    """Works until there is no more to do. Returns "stopped" when all jobs are
    received, "left" if it was drained, "replaced" if another worker has its
    index."""
    if not self._duty.overlap:
      return self._run()
    stages = Stages(self._compute, self._write_message, self.wake)
    with stages as self._stages:
      return self._run()

  def _run(self):
    self._say(0, self._hello())
    while not self._lease.revoked:
      if self.draining and not self._drain_said:
        self._drain_said = True
        self._say(0, Frame(frames.DRAIN, self._worker))
      self._start_what_is_ready()
      running = self._tenure.running
      if self._drain_said and not running and not self._tenure.unsettled:
        for shard in self._shards:
          self._say(shard, Frame(frames.BYE, self._worker))
        return "left"
      heard = None
      try:
        ready = self._stages.ready if self._stages else bool(running)
        heard = self._reach.link.hear(0.0 if ready else self._patience)
      except Disconnected as error:
        self._reconnect(error.shard)
      if heard:
        shard, frame = heard
        if frame.kind == frames.STOP and shard == 0:
          return "stopped"
        if frame.kind == frames.EXPEL and frame.flag:
          return "replaced"
        self._handle(shard, frame)
      elif ready:
        self._finish()
      elif not running and (not self.draining or self._drain_said):
        self._repeat(self._shards)
    return "replaced"

  # Frames.

  def _say(self, shard, frame):
    if self._lease.revoked:
      return  # another worker speaks for the worker index
    try:
      self._reach.link.say(shard, frame)
    except Disconnected:
      self._reconnect(shard)

  def _reconnect(self, shard):
    """Waits for a shard that is being replaced, and repeats everything."""
    link, clock = self._reach.link, self._reach.clock
    said = clock()
    while not link.connect(shard) and not self._lease.revoked:
      if shard and clock() - said > _SIGN_OF_LIFE:
        said = clock()
        with contextlib.suppress(Disconnected):  # there is time for that
          link.say(0, self._hello(flag=1))
    self._repeat((shard,))

  def _hello(self, flag=0):
    number, attempt = self._tenure.number, self._tenure.attempt
    who = self._worker, self._life
    return Frame(frames.HELLO, *who, number, attempt, flag)

  def _repeat(self, shards):
    """Sends to shards again what they have not answered."""
    tenure, link = self._tenure, self._reach.link
    for shard in () if self._lease.revoked else shards:
      if shard and tenure.number < 0:
        continue
      try:
        link.say(shard, self._hello())
        if shard and not self._duty.consistent:
          for job in tenure.jobs.values():
            if shard not in job.tickets and 0 in job.tickets:
              link.say(shard, self._fetch_frame(job))
        for frame in list(tenure.unacked[shard].values()):
          link.say(shard, frame)
      except Disconnected:
        return  # `hear` will notice

  def _fetch_frame(self, job):
    return Frame(frames.FETCH, self._worker, job.seq, job.job, flag=job.kept)

  def _handle(self, shard, frame):
    tenure = self._tenure
    if frame.kind == frames.WELCOME and not shard:
      # One that answers a HELLO of before an EXPEL is another holder's.
      if frame.version == tenure.attempt and frame.job != tenure.number:
        tenure.number = frame.job
        tenure.state = self._duty.init(self._duty.params)
        for other in self._shards[1:]:
          self._say(other, self._hello())
    elif frame.kind == frames.TICKET:
      self._ticket(shard, frame)
    elif frame.kind == frames.ACK:
      tenure.unacked[shard].pop(frame.seq, None)
      if frame.seq in tenure.for_lead and not any(
        frame.seq in unacked for unacked in tenure.unacked
      ):
        self._push(0, tenure.for_lead.pop(frame.seq))
    elif frame.kind == frames.EXPEL:
      if tenure.number < 0:
        return  # it means the holder before; the HELLO of this one is coming
      if shard:  # it has lost what it knew of us: begin anew everywhere
        self._leave_lead(Frame(frames.BYE, self._worker))
      self._begin_anew()

  def _leave_lead(self, bye):
    """Sends BYE to the lead, again after a reconnection: the lead would take
    later frames for the same holder's."""
    while not self._lease.revoked:
      try:
        self._reach.link.say(0, bye)
        return
      except Disconnected:
        self._reconnect(0)

  def _begin_anew(self):
    """Asks for the worker index as another holder, without the state of this
    one."""
    attempt = self._tenure.attempt + 1
    tenure = _Tenure(len(self._shards), self._duty.hold(), attempt)

    def change():
      self._tenure = tenure

    self._lease.use(change)  # no thread of it writes to a slot any more
    self._say(0, self._hello())

  def _ticket(self, shard, frame):
    tenure = self._tenure
    if tenure.number < 0 or frame.seq in tenure.started:
      return
    job = tenure.jobs.get(frame.seq)
    if job is None:
      job = tenure.jobs[frame.seq] = _OpenJob(frame, self._reach.clock())
      if shard == 0 and not self._duty.consistent:
        for other in self._shards[1:]:
          self._say(other, self._fetch_frame(job))
    job.tickets[shard] = frame

  # Work.

  def _start_what_is_ready(self):
    """Starts complete jobs, in their order, as far as the depth allows."""
    tenure = self._tenure
    for seq, job in sorted(tenure.jobs.items()):
      if 0 not in job.tickets:
        continue  # of the holder before: another shard does not know yet
      complete = len(job.tickets) == len(self._shards)
      if not complete or len(tenure.running) >= self._duty.depth:
        return
      del tenure.jobs[seq]
      tenure.started.add(seq)
      self._begin(job)
      if self._tenure is not tenure:  # it has begun anew
        return

  def _begin(self, job):
    tenure, duty = self._tenure, self._duty
    self._reach.script.before_work(self._worker, job.seq)
    job.started = self._reach.clock()
    self._span("fetch", job.began, job.started, job)
    parts = self._parts(job)
    if parts is None:
      return
    params, *_ = parts
    if duty.plan is not None:
      params = sharding.join(duty.plan, parts)
    worker, version = np.int32(self._worker), np.int32(job.tickets[0].version)
    ticket = base.Ticket(worker, version, params, np.bool_(not job.kept))
    batch = duty.batch(self._worker, job.job)
    tenure.running.append(job)
    if self._stages:
      self._stages.begin((tenure, job, ticket, batch))
    else:
      self._work(tenure, job, ticket, batch)

  def _work(self, tenure, job, ticket, batch):
    duty = self._duty
    tenure.state, message, metrics = duty.work(
      tenure.state, ticket, batch, duty.root, np.int32(job.job)
    )
    job.result = message, metrics.loss

  def _parts(self, job):
    """Returns each shard's part of a ticket, None if it cannot be read."""
    held, parts = self._tenure.held, []
    for shard, (memory, ticket) in enumerate(self._slots_of(job)):
      try:
        if held is not None:
          parts.append(held[shard].take(memory, ticket))
        else:
          # Parts that are joined are copied, which NumPy does at once.
          read = memory.read if self._duty.plan else memory.device_view
          parts.append(read(PARAMS, ticket.params, int(ticket.value)))
      except WrongSlot:  # it has died: the frame that says so is coming
        return None
      except (BadCode, OutOfStep):
        bye = Frame(frames.BYE, self._worker, version=shard, flag=1)
        self._leave_lead(bye)
        self._begin_anew()
        return None
    return parts

  def _compute(self, task):
    """The second stage: does a job, in its thread."""
    _, job, _, _ = task
    job.started = self._reach.clock()
    with self._duty.on_device(self._worker):
      self._work(*task)
    jax.block_until_ready(job.result)
    self._slow_down(job)

  def _slow_down(self, job):
    """Makes a job take as long as a slow worker's."""
    clock, wait = self._reach.clock, self._reach.wait
    factor = self._duty.factor(self._worker)
    pace.slow_down(factor, job.started, clock=clock, wait=wait)
    job.computed = clock()

  def _finish(self):
    """Hands in the message of the next job."""
    tenure = self._tenure
    if self._stages:
      (begun, job, *_), said = self._stages.take()
      if begun is not tenure:
        return  # another holder's
      tenure.running.remove(job)
    else:
      job = tenure.running.popleft()
      said = self._write_message((tenure, job))
    self._span("compute", job.started, job.computed, job)
    if said:
      self._hand_in(job, said)

  def _span(self, name, start, end, job):
    if self._reach.span:
      self._reach.span(Span(name, start, end, job.seq, job.job))

  def _write_message(self, task) -> Frame | None:
    """The third stage: waits for a job's message and writes it to its slots;
    returns the PUSH, None if its tickets have died."""
    tenure, job, *_ = task
    message, loss = job.result
    message = self._reach.script.message(self._worker, job.seq, message)
    message, loss = simulator.fetch((message, loss))
    if job.computed is None:
      self._slow_down(job)
    if tenure.held is None and any(
      memory.stamp(PARAMS, ticket.params) != int(ticket.value)
      for memory, ticket in self._slots_of(job)
    ):
      return None  # and other parameters came into its slot
    finite = is_finite(message, loss)
    said = Frame(frames.PUSH, self._worker, job.seq, job.job)
    said = said._replace(flag=int(finite), value=float(loss))
    return said if self._write(tenure, job, message) else None

  def _hand_in(self, job, said):
    """Sends a PUSH, to the lead last: what the lead has, all have. In a
    consistent run the lead asks for that; else it gets the PUSH once all others
    have acknowledged theirs."""
    # What is not finite is refused by all shards: nothing is lost of it.
    last = said.flag and not self._duty.consistent and len(self._shards) > 1
    for shard in reversed(self._shards):
      frame = said._replace(message=job.tickets[shard].message)
      if shard or not last:
        self._push(shard, frame)
      else:
        self._tenure.for_lead[job.seq] = frame
    self._span("push", job.computed, self._reach.clock(), job)

  def _slots_of(self, job):
    return zip(
      self._memories, (job.tickets[s] for s in self._shards), strict=True
    )

  def _write(self, tenure, job, message) -> bool:
    """Writes a message to its slots; False if they are another holder's."""
    plan, stamp = self._duty.plan, message_stamp(self._worker, job.seq)
    parts = compression.split(plan, message)

    def write():
      # After `_begin_anew` the slots may be given to another.
      for shard, memory in enumerate(self._memories):
        if tenure is self._tenure:
          slot = job.tickets[shard].message
          memory.write(MESSAGES, slot, parts[shard], stamp)

    return self._lease.use(write)

  def _push(self, shard, frame):
    self._tenure.unacked[shard][frame.seq] = frame
    script = self._reach.script
    for push in [frame] if shard else script.frames(self._worker, frame):
      self._say(shard, push)
