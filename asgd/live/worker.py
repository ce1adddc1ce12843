"""A live worker: receives tickets, computes jobs, sends messages.

The loop is the same in a thread and in a process; a `WorkerLink` carries its
frames. With more than one ticket (`Rules.depth`), the worker starts the next
job before it sends the message of the previous one. With `Duty.overlap` the
loop fetches, and two threads compute and write messages (`asgd.live.overlap`).
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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

# Seconds between two signs of life to the lead, while the worker waits for
# another shard.
_SIGN_OF_LIFE = 0.5


def is_finite(message: Any, loss: float) -> bool:
  """Returns whether a message of NumPy arrays and its loss have no NaN or
  infinity. A sum that overflows counts as infinite, too. The loss of a codec's
  message is NaN if the codec could not encode it."""
  # A sum finds NaN and infinity in one pass: neither disappears in a sum.
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
  """The connections, clock and callbacks that a worker loop uses."""

  link: WorkerLink  # to all shards
  # Returns each shard's slots; called once all shards are connected.
  memories: Callable[[], Sequence[Any]]
  clock: Callable[[], float]  # in seconds
  wait: Callable[[float], None]  # blocks for some seconds
  script: Script
  span: Callable[[Span], None] | None  # takes the spans of jobs
  close: Callable[[], None]  # writes pending output, and disconnects


class _OpenJob:
  """A job whose tickets have begun to arrive and that is not finished."""

  def __init__(self, frame: Frame, now: float):
    self.seq, self.job = frame.seq, frame.job
    self.kept = int(frame.flag == frames.KEPT)
    self.tickets: dict[int, Frame] = {}  # shard -> its TICKET
    self.began = self.started = now
    self.computed: float | None = None
    self.result = None

  def fetch_frame(self, worker: int) -> Frame:
    """Returns the FETCH that asks a shard for its part of the ticket."""
    return Frame(frames.FETCH, worker, self.seq, self.job, flag=self.kept)

  def slots(self, memories: Sequence[Any]) -> Iterator[tuple[Any, Frame]]:
    """Returns (memory, TICKET) of each shard."""
    tickets = (self.tickets[shard] for shard in range(len(memories)))
    return zip(memories, tickets, strict=True)


class _Tenure:
  """The state of one incarnation of a worker. An expelled loop starts the next
  incarnation with a new one."""

  def __init__(self, shards: int, held: Any, attempt: int = 0):
    self.attempt = attempt  # earlier incarnations of this loop
    # Each shard's parameters; None: each ticket carries the parameters.
    self.held: list[HeldParams] | None = held
    self.number = -1  # the incarnation; -1 until the lead assigns it
    self.state = None  # of the worker's transform
    self.jobs: dict[int, _OpenJob] = {}  # seq -> job that is not started
    self.started: set[int] = set()  # seqs
    self.running: collections.deque[_OpenJob] = collections.deque()
    # For each shard: seq -> PUSH that the shard has not acknowledged.
    self.unacked: list[dict[int, Frame]] = [{} for _ in range(shards)]
    # Seq -> PUSH for the lead, sent once all other shards acknowledged theirs.
    self.for_lead: dict[int, Frame] = {}

  @property
  def unsettled(self) -> bool:
    """Whether some shard has not acknowledged a message."""
    return bool(self.for_lead) or any(self.unacked)


class Lease:
  """The right of a worker loop to write to the slots of its worker index."""

  def __init__(self):
    self.revoked = False  # another loop has the worker index
    self._lock = threading.Lock()  # locked during a write

  def revoke(self) -> None:
    """Ends the lease: when this returns, no write is under way, and none
    follows."""
    with self._lock:
      self.revoked = True

  def use(self, write: Callable[[], None]) -> bool:
    """Calls `write` and returns True; after `revoke` only returns False."""
    with self._lock:
      if not self.revoked:
        write()
      return not self.revoked


class WorkerLoop:
  """One loop of a worker: an incarnation, and its successors after an EXPEL."""

  def __init__(
    self, worker: int, duty: Duty, reach: Reach, *, restarts: int = 0,
    patience: float = 5.0
  ):
    """Args:
      restarts: count of the earlier loops with this worker index.
      patience: seconds without an answer after which frames are sent again.
    """
    self._worker, self._duty, self._restarts = worker, duty, restarts
    self._reach, self._patience = reach, patience
    self._memories = list(reach.memories())
    self._shards = range(len(self._memories))
    self._lease = Lease()
    self._tenure = _Tenure(len(self._memories), duty.hold())
    self._stages: Stages | None = None  # with `Duty.overlap`
    self.draining = False
    self._drain_sent = False

  def drain(self) -> None:
    """Asks the loop to end after the jobs that it has started."""
    self.draining = True
    self.wake()

  def wake(self) -> None:
    """Ends a wait of the loop for a shard."""
    self._reach.link.wake()

  def revoke(self) -> None:
    """Takes the worker index from this loop: when this returns, the loop writes
    to no slot any more."""
    self._lease.revoke()

  def run(self) -> str:
    """Works until the end. Returns "stopped" if all jobs are received, "left"
    if it was drained, "replaced" if another loop has the worker index."""
    if not self._duty.overlap:
      return self._run()
    stages = Stages(self._compute, self._write_message, self.wake)
    with stages as self._stages:
      return self._run()

  def _run(self) -> str:
    self._say(0, self._hello())
    while not self._lease.revoked:
      # [1] Ask the lead for no further jobs, if the loop is to drain.
      if self.draining and not self._drain_sent:
        self._drain_sent = True
        self._say(0, Frame(frames.DRAIN, self._worker))
      # [2] Start jobs whose tickets are complete, or leave if none remain.
      self._start_ready_jobs()
      running = self._tenure.running
      if self._drain_sent and not running and not self._tenure.unsettled:
        for shard in self._shards:
          self._say(shard, Frame(frames.BYE, self._worker))
        return "left"
      # [3] Receive a frame; do not wait for it if a job can be finished.
      received = None
      try:
        ready = self._stages.ready if self._stages else bool(running)
        received = self._reach.link.receive(0.0 if ready else self._patience)
      except Disconnected as error:
        self._reconnect(error.shard)
      # [4] Handle the frame, or finish a job, or retry after a timeout.
      if received:
        shard, frame = received
        if frame.kind == frames.STOP and shard == 0:
          return "stopped"
        if frame.kind == frames.EXPEL and frame.flag:
          return "replaced"
        self._handle(shard, frame)
      elif ready:
        self._finish()
      elif not running and (not self.draining or self._drain_sent):
        self._repeat(self._shards)
    return "replaced"

  # Frames.

  def _say(self, shard: int, frame: Frame) -> None:
    if self._lease.revoked:
      return  # another loop sends the frames of this worker index
    try:
      self._reach.link.send(shard, frame)
    except Disconnected:
      self._reconnect(shard)

  def _reconnect(self, shard: int) -> None:
    """Waits for a shard that is being replaced, then repeats open frames."""
    link, clock = self._reach.link, self._reach.clock
    last_sign = clock()
    while not link.connect(shard) and not self._lease.revoked:
      if shard and clock() - last_sign > _SIGN_OF_LIFE:
        last_sign = clock()
        # A lead that is lost, too, gets its frames at its own reconnection.
        with contextlib.suppress(Disconnected):
          link.send(0, self._hello(flag=1))
    self._repeat((shard,))

  def _hello(self, flag: int = 0) -> Frame:
    number, attempt = self._tenure.number, self._tenure.attempt
    worker, restarts = self._worker, self._restarts
    return Frame(frames.HELLO, worker, restarts, number, attempt, flag)

  def _repeat(self, shards: Iterable[int]) -> None:
    """Sends shards the frames again that they have not answered. A shard
    ignores a frame that it has already applied."""
    tenure, link = self._tenure, self._reach.link
    for shard in () if self._lease.revoked else shards:
      if shard and tenure.number < 0:
        continue  # other shards accept a HELLO only with an incarnation
      try:
        link.send(shard, self._hello())
        if shard and not self._duty.consistent:
          for job in tenure.jobs.values():
            if shard not in job.tickets and 0 in job.tickets:
              link.send(shard, job.fetch_frame(self._worker))
        for frame in list(tenure.unacked[shard].values()):
          link.send(shard, frame)
      except Disconnected:
        return  # the next `receive` raises it again, and the loop reconnects


  def _handle(self, shard: int, frame: Frame) -> None:
    """Applies a frame of a shard, other than STOP."""
    tenure = self._tenure
    if frame.kind == frames.WELCOME and not shard:
      # A WELCOME that answers a HELLO before the latest EXPEL is meant for the
      # earlier incarnation.
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
        return  # meant for the earlier incarnation; our HELLO is on its way
      if shard:
        # The lead does not know that this shard lost the tickets.
        self._leave_lead(Frame(frames.BYE, self._worker))
      self._start_next_incarnation()

  def _leave_lead(self, bye: Frame) -> None:
    """Sends BYE to the lead, and again after a reconnection. Without BYE the
    lead would take later frames for those of the same incarnation."""
    while not self._lease.revoked:
      try:
        self._reach.link.send(0, bye)
        return
      except Disconnected:
        self._reconnect(0)

  def _start_next_incarnation(self) -> None:
    """Asks the lead for a new incarnation, which starts without the state and
    jobs of this one."""
    attempt = self._tenure.attempt + 1
    tenure = _Tenure(len(self._shards), self._duty.hold(), attempt)

    def change():
      self._tenure = tenure

    # Under the lease, so that no thread is writing to a slot meanwhile.
    self._lease.use(change)
    self._say(0, self._hello())

  def _ticket(self, shard: int, frame: Frame) -> None:
    tenure = self._tenure
    if tenure.number < 0 or frame.seq in tenure.started:
      return
    job = tenure.jobs.get(frame.seq)
    if job is None:
      job = tenure.jobs[frame.seq] = _OpenJob(frame, self._reach.clock())
      if shard == 0 and not self._duty.consistent:
        for other in self._shards[1:]:
          self._say(other, job.fetch_frame(self._worker))
    job.tickets[shard] = frame

  # Work.

  def _start_ready_jobs(self) -> None:
    """Starts jobs that have all tickets, in order, as the depth allows."""
    tenure = self._tenure
    for seq, job in sorted(tenure.jobs.items()):
      if 0 not in job.tickets:
        continue  # a shard sent a ticket that the lead has ended already
      complete = len(job.tickets) == len(self._shards)
      if not complete or len(tenure.running) >= self._duty.depth:
        return
      del tenure.jobs[seq]
      tenure.started.add(seq)
      self._begin(job)
      if self._tenure is not tenure:  # `_begin` started the next incarnation
        return

  def _begin(self, job: _OpenJob) -> None:
    """Reads a job's parameters, and computes it or passes it to the thread."""
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

  def _work(
    self, tenure: _Tenure, job: _OpenJob, ticket: base.Ticket, batch: Any
  ) -> None:
    """Computes a job; the result may be an array that JAX still computes."""
    duty = self._duty
    tenure.state, message, metrics = duty.work(
      tenure.state, ticket, batch, duty.root, np.int32(job.job)
    )
    job.result = message, metrics.loss

  def _parts(self, job: _OpenJob) -> list[Any] | None:
    """Returns each shard's part of a ticket, None if one cannot be read."""
    held, parts = self._tenure.held, []
    for shard, (memory, ticket) in enumerate(job.slots(self._memories)):
      try:
        if held is not None:
          parts.append(held[shard].take(memory, ticket))
        else:
          # To join parts copies them, which NumPy does without a dispatch.
          read = memory.read if self._duty.plan else memory.device_view
          parts.append(read(PARAMS, ticket.params, int(ticket.value)))
      except WrongSlot:  # the ticket was lost; its EXPEL is on its way
        return None
      except (BadCode, OutOfStep):
        # Only a new incarnation receives complete parameters.
        bye = Frame(frames.BYE, self._worker, version=shard, flag=1)
        self._leave_lead(bye)
        self._start_next_incarnation()
        return None
    return parts

  def _compute(self, task: tuple) -> None:
    """Computes a job: the second of the three stages, in a thread."""
    _, job, _, _ = task
    job.started = self._reach.clock()
    with self._duty.on_device(self._worker):
      self._work(*task)
    jax.block_until_ready(job.result)
    self._slow_down(job)

  def _slow_down(self, job: _OpenJob) -> None:
    """Waits until the job took as long as on a slow worker."""
    clock, wait = self._reach.clock, self._reach.wait
    factor = self._duty.factor(self._worker)
    pace.slow_down(factor, job.started, clock=clock, wait=wait)
    job.computed = clock()

  def _finish(self) -> None:
    """Submits the message of the next job."""
    tenure = self._tenure
    if self._stages:
      (started_by, job, *_), push = self._stages.take()
      if started_by is not tenure:
        return  # a job of an earlier incarnation
      tenure.running.remove(job)
    else:
      job = tenure.running.popleft()
      push = self._write_message((tenure, job))
    self._span("compute", job.started, job.computed, job)
    if push:
      self._submit(job, push)

  def _span(self, name: str, start: float, end: float, job: _OpenJob) -> None:
    if self._reach.span:
      self._reach.span(Span(name, start, end, job.seq, job.job))

  def _write_message(self, task: tuple) -> Frame | None:
    """Waits for a job's message and writes it to its slots: the third stage.
    Returns the PUSH, or None if the job's tickets are lost."""
    tenure, job, *_ = task
    message, loss = job.result
    message = self._reach.script.message(self._worker, job.seq, message)
    message, loss = simulator.fetch((message, loss))
    if job.computed is None:
      self._slow_down(job)
    # The work may have read the parameters in their slot until now. If the
    # slot has another content, the ticket was lost, and the result is wrong.
    if tenure.held is None and any(
      memory.stamp(PARAMS, ticket.params) != int(ticket.value)
      for memory, ticket in job.slots(self._memories)
    ):
      return None
    finite = is_finite(message, loss)
    push = Frame(frames.PUSH, self._worker, job.seq, job.job)
    push = push._replace(flag=int(finite), value=float(loss))
    return push if self._write(tenure, job, message) else None

  def _submit(self, job: _OpenJob, push: Frame) -> None:
    """Sends a PUSH to all shards, to the lead last: it must not count a job as
    received that another shard lacks. A consistent lead checks that (PREPARED);
    another gets the PUSH once all other shards have acknowledged theirs."""
    # All shards refuse a message with NaN or infinity, so it need not wait.
    waits = push.flag and not self._duty.consistent and len(self._shards) > 1
    for shard in reversed(self._shards):
      frame = push._replace(message=job.tickets[shard].message)
      if shard or not waits:
        self._push(shard, frame)
      else:
        self._tenure.for_lead[job.seq] = frame
    self._span("push", job.computed, self._reach.clock(), job)


  def _write(self, tenure: _Tenure, job: _OpenJob, message: Any) -> bool:
    """Writes a message to its slots; False if the lease was revoked."""
    plan, stamp = self._duty.plan, message_stamp(self._worker, job.seq)
    parts = compression.split(plan, message)

    def write():
      # After `_start_next_incarnation` another ticket may have the slots.
      for shard, memory in enumerate(self._memories):
        if tenure is self._tenure:
          slot = job.tickets[shard].message
          memory.write(MESSAGES, slot, parts[shard], stamp)

    return self._lease.use(write)

  def _push(self, shard: int, frame: Frame) -> None:
    """Sends a PUSH to a shard, and keeps it until the shard's ACK."""
    self._tenure.unacked[shard][frame.seq] = frame
    script = self._reach.script
    for push in [frame] if shard else script.frames(self._worker, frame):
      self._say(shard, push)
