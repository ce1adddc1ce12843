"""A live worker: receives tickets, computes jobs, sends messages.

  TICKETs of all shards -> _begin: read the parameters, start the computation
  job computed          -> _write_message: write the message to its slots
                        -> _submit: send each shard a PUSH, store it until ACK

The loop (`WorkerLoop.run`) is the same in a thread and in a process; a
`WorkerLink` carries its frames. With more than one ticket (`Rules.depth`), the
worker starts the next job before it sends the message of the previous one. With
`WorkerSpec.overlap` the loop fetches, and two threads compute and write
messages (`asgd.live.overlap`).
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, compression, sharding, simulator
from asgd.compression.packing import BadCode
from asgd.live import frames, pace
from asgd.live.faults import Script
from asgd.live.frames import Frame
from asgd.live.incarnation import IncarnationState, Lease, OpenJob
from asgd.live.links.base import Disconnected, WorkerLink
from asgd.live.overlap import Stages
from asgd.live.rebuilt_params import OutOfStep
from asgd.live.slots import MESSAGES, PARAMS, WrongSlot, message_stamp
from asgd.live.spans import Span
from asgd.live.worker_spec import WorkerSpec

# Between two signs of life to the lead, during a wait for another shard.
_SIGN_SECONDS = 0.5


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


class LoopContext(NamedTuple):
  """The connections, clock and callbacks of a worker loop."""

  link: WorkerLink  # to all shards
  memory: Callable[[int], Any]  # opens the slots of a connected shard
  clock: Callable[[], float]  # in seconds
  wait: Callable[[float], None]  # blocks for some seconds
  script: Script
  span: Callable[[Span], None] | None  # called with each span of a job
  close: Callable[[], None]  # writes pending output, and disconnects

  def log_span(self, name: str, start: float, end: float, job: OpenJob) -> None:
    """Reports an interval of a job's time, if spans are recorded."""
    if self.span:
      self.span(Span(name, start, end, job.seq, job.job))


def _compute_job(
  spec: WorkerSpec,
  incarnation: IncarnationState,
  job: OpenJob,
  ticket: base.Ticket,
  batch: Any,
) -> None:
  """Computes a job; the result may be an array that JAX still computes."""
  incarnation.transform_state, message, metrics = spec.work(
    incarnation.transform_state, ticket, batch, spec.root, np.int32(job.job)
  )
  job.result = message, metrics.loss


class WorkerLoop:
  """One loop of a worker: an incarnation, and its successors after an EXPEL."""

  def __init__(
    self,
    worker: int,
    spec: WorkerSpec,
    context: LoopContext,
    *,
    restarts: int = 0,
    patience: float = 5.0,
  ):
    """Opens the slots of all shards, which are connected. `restarts` counts the
    earlier loops with this worker index. The loop sends frames again after
    `patience` seconds without an answer."""
    self._worker, self._spec, self._restarts = worker, spec, restarts
    self._context, self._patience = context, patience
    self._shards = range(len(spec.parts()))
    self._memories = list(map(context.memory, self._shards))
    self._lease = Lease()
    self._incarnation = self._new_incarnation(attempt=0)
    self._stages: Stages | None = None  # with `WorkerSpec.overlap`
    self.draining = False  # the loop ends after its open jobs
    self._drain_sent = False  # the loop has asked the lead to send no more jobs

  def _new_incarnation(self, attempt: int) -> IncarnationState:
    """Returns the empty state of an incarnation; this loop had `attempt`
    earlier incarnations."""
    rebuilt_params = self._spec.make_rebuilt_params()
    return IncarnationState(len(self._memories), rebuilt_params, attempt)

  def drain(self) -> None:
    """Asks the loop to end after the jobs that it has started."""
    self.draining = True
    self.wake()

  def wake(self) -> None:
    """Ends the loop's wait for a frame, if it is waiting."""
    self._context.link.wake()

  def revoke(self) -> None:
    """Ends the loop's right to its worker index: when this returns, the loop
    writes to no slot any more."""
    self._lease.revoke()

  def run(self) -> str:
    """Works until the end. Returns "stopped" if all jobs are received, "left"
    if it was drained, "replaced" if another loop has the worker index."""
    if not self._spec.overlap:
      return self._run()
    stages = Stages(self._compute, self._write_message, self.wake)
    with stages as self._stages:
      return self._run()

  def _run(self) -> str:
    """Handles frames and jobs until the end; see `run`."""
    self._send(0, self._hello())
    while not self._lease.revoked:
      # [1] Ask the lead to send no more jobs, if the loop is to drain.
      if self.draining and not self._drain_sent:
        self._drain_sent = True
        self._send(0, Frame(frames.DRAIN, self._worker))
      # [2] Start jobs with complete tickets, or leave if none remain.
      self._start_ready_jobs()
      running = self._incarnation.running
      unacknowledged = self._incarnation.has_unacknowledged
      if self._drain_sent and not running and not unacknowledged:
        for shard in self._shards:
          self._send(shard, Frame(frames.BYE, self._worker))
        return "left"
      # [3] Receive a frame; do not wait for it if a job can be finished.
      arrival = None
      try:
        can_submit = self._stages.is_ready if self._stages else bool(running)
        timeout = 0.0 if can_submit else self._patience
        arrival = self._context.link.receive(timeout)
      except Disconnected as error:
        self._reconnect(error.shard)
      # [4] Handle the frame, or finish a job, or retry after a timeout.
      if arrival:
        shard, frame = arrival
        if frame.kind == frames.STOP and shard == 0:
          return "stopped"
        if frame.kind == frames.EXPEL and frame.flag:
          return "replaced"
        self._handle(shard, frame)
      elif can_submit:
        self._submit_next()
      # `receive` ended after `patience`, or by a `wake`. After the wake of
      # `drain` step [1] follows, and no frame is repeated.
      elif not running and (not self.draining or self._drain_sent):
        self._resend(self._shards)
    return "replaced"

  # Frames.

  def _send(self, shard: int, frame: Frame) -> None:
    """Sends a frame to a shard; reconnects if the connection is broken."""
    if self._lease.revoked:
      return  # another loop sends the frames of this worker index
    try:
      self._context.link.send(shard, frame)
    except Disconnected:
      self._reconnect(shard)

  def _reconnect(self, shard: int) -> None:
    """Connects to a shard again, and resends the frames it has not answered."""
    link, clock = self._context.link, self._context.clock
    last_sign = clock()
    while not link.connect(shard) and not self._lease.revoked:
      if shard and clock() - last_sign > _SIGN_SECONDS:
        last_sign = clock()
        # A lead that is lost, too, gets its frames at its own reconnection.
        with contextlib.suppress(Disconnected):
          link.send(0, self._hello(is_sign=True))
    # A shard that was lost together with its memory has other files now.
    if not self._lease.revoked:
      self._memories[shard] = self._context.memory(shard)
    self._resend((shard,))

  def _hello(self, is_sign: bool = False) -> Frame:
    """Returns the HELLO of the present incarnation; see `frames.Frame`."""
    incarnation = self._incarnation
    numbers = self._restarts, incarnation.number, incarnation.attempt
    flag = int(is_sign or incarnation.waits_for_other_shards)
    return Frame(frames.HELLO, self._worker, *numbers, flag)

  def _resend(self, shards: Iterable[int]) -> None:
    """Resends to each shard the frames that it has not answered, in order. A
    shard ignores a frame that it has already applied."""
    incarnation, link = self._incarnation, self._context.link
    for shard in () if self._lease.revoked else shards:
      if shard and incarnation.number < 0:
        continue  # other shards accept a HELLO only with an incarnation
      try:
        link.send(shard, self._hello())
        if shard and not self._spec.consistent:
          for job in incarnation.waiting_jobs.values():
            if shard not in job.ticket_frames and 0 in job.ticket_frames:
              link.send(shard, job.fetch_frame(self._worker))
        for frame in list(incarnation.unacked[shard].values()):
          link.send(shard, frame)
      except Disconnected:
        return  # the next `receive` raises it again, and the loop reconnects

  def _handle(self, shard: int, frame: Frame) -> None:
    """Applies a frame of a shard, other than STOP."""
    incarnation = self._incarnation
    if frame.kind == frames.WELCOME and not shard:
      # A WELCOME with an earlier attempt answers a HELLO that was sent before
      # the last EXPEL. A repeated WELCOME has the present number.
      is_current = frame.version == incarnation.attempt
      if is_current and frame.job != incarnation.number:
        incarnation.number = frame.job
        incarnation.transform_state = self._spec.init(self._spec.params)
        for other_shard in self._shards[1:]:
          self._send(other_shard, self._hello())
    elif frame.kind == frames.TICKET:
      self._store_ticket(shard, frame)
    elif frame.kind == frames.ACK:
      if push := incarnation.acknowledge(shard, frame.seq):
        self._push(0, push)
    elif frame.kind == frames.EXPEL:
      if incarnation.number < 0:
        return  # meant for the earlier incarnation; the HELLO is on its way
      if shard:
        # The lead does not know that this shard lost the tickets.
        self._leave_lead(Frame(frames.BYE, self._worker))
      self._start_next_incarnation()

  def _leave_lead(self, bye: Frame) -> None:
    """Sends BYE to the lead, and again after a reconnection. Without BYE the
    lead would attribute later frames to the same incarnation."""
    while not self._lease.revoked:
      try:
        self._context.link.send(0, bye)
        return
      except Disconnected:
        self._reconnect(0)

  def _start_next_incarnation(self) -> None:
    """Asks the lead for a new incarnation, which starts without the state and
    jobs of this one."""
    incarnation = self._new_incarnation(self._incarnation.attempt + 1)

    def replace() -> None:
      self._incarnation = incarnation

    # Under the lease, so that no thread is writing to a slot meanwhile.
    self._lease.use(replace)
    self._send(0, self._hello())

  def _store_ticket(self, shard: int, frame: Frame) -> None:
    """Stores a shard's part of a ticket. After the lead's part, the worker
    fetches the parts of independent shards."""
    incarnation = self._incarnation
    # A ticket of the earlier incarnation, or one that a shard sent again.
    if incarnation.number < 0 or frame.seq in incarnation.started_seqs:
      return
    job = incarnation.waiting_jobs.get(frame.seq)
    if job is None:
      job = OpenJob(frame, self._context.clock())
      incarnation.waiting_jobs[frame.seq] = job
      if shard == 0 and not self._spec.consistent:
        for other_shard in self._shards[1:]:
          self._send(other_shard, job.fetch_frame(self._worker))
    job.ticket_frames[shard] = frame

  # Work.

  def _start_ready_jobs(self) -> None:
    """Starts jobs that have all tickets, in order, as the depth allows."""
    incarnation = self._incarnation
    while job := incarnation.take_ready_job(self._spec.depth):
      self._begin(job)
      if self._incarnation is not incarnation:  # `_begin` started the next
        return

  def _begin(self, job: OpenJob) -> None:
    """Reads a job's parameters, and computes it or passes it to the thread."""
    incarnation, spec = self._incarnation, self._spec
    self._context.script.apply_to_job(self._worker, job.seq)
    start, job.compute_start = job.first_ticket_time, self._context.clock()
    self._context.log_span("fetch", start, job.compute_start, job)
    parts = self._read_params(job)
    if parts is None:
      return
    params, *_ = parts
    if spec.plan is not None:
      params = sharding.join(spec.plan, parts)
    ticket = job.ticket(self._worker, params)
    batch = spec.batch(self._worker, job.job)
    incarnation.running.append(job)
    if self._stages:
      self._stages.begin((incarnation, job, ticket, batch))
    else:
      _compute_job(spec, incarnation, job, ticket, batch)

  def _read_params(self, job: OpenJob) -> list[Any] | None:
    """Returns each shard's part of a ticket, None if one cannot be read."""
    rebuilt_params, parts = self._incarnation.rebuilt_params, []
    tickets = enumerate(job.memories_and_frames(self._memories))
    for shard, (memory, ticket) in tickets:
      try:
        if rebuilt_params is not None:
          parts.append(rebuilt_params[shard].take(memory, ticket))
        else:
          # With several shards `sharding.join` copies the parts. It needs no
          # jax arrays: NumPy copies without a dispatch.
          read_slot = memory.read if self._spec.plan else memory.device_view
          parts.append(read_slot(PARAMS, ticket.params, int(ticket.value)))
      except WrongSlot:  # the ticket was lost; its EXPEL is on its way
        return None
      except (BadCode, OutOfStep):
        # Only a new incarnation receives complete parameters.
        self._leave_lead(Frame(frames.BYE, self._worker, version=shard, flag=1))
        self._start_next_incarnation()
        return None
    return parts

  def _compute(self, task: tuple[Any, ...]) -> None:
    """Computes a job (incarnation, job, ticket, batch), in its own thread."""
    _, job, _, _ = task
    job.compute_start = self._context.clock()
    with self._spec.on_device(self._worker):
      _compute_job(self._spec, *task)
    jax.block_until_ready(job.result)
    self._slow_down(job)

  def _slow_down(self, job: OpenJob) -> None:
    """Waits until the job has taken as long as the worker's `factor` demands,
    and stores the time of its end."""
    clock, wait = self._context.clock, self._context.wait
    factor = self._spec.factor(self._worker)
    pace.slow_down(factor, job.compute_start, clock=clock, wait=wait)
    job.compute_end = clock()

  def _submit_next(self) -> None:
    """Submits the message of the oldest running job."""
    incarnation = self._incarnation
    if self._stages:
      (job_incarnation, job, *_), push = self._stages.take()
      if job_incarnation is not incarnation:
        return  # its tickets are lost
      incarnation.running.remove(job)
    else:
      job = incarnation.running.popleft()
      push = self._write_message((incarnation, job))
    self._context.log_span("compute", job.compute_start, job.compute_end, job)
    if push:
      self._submit(job, push)

  def _write_message(self, task: tuple[Any, ...]) -> Frame | None:
    """Waits for the message of `task`, (incarnation, job, ...), and writes it
    to its slots. With overlap the push thread calls this. Returns the PUSH, or
    None if the ticket was lost."""
    incarnation, job, *_ = task
    message, loss = job.result
    script = self._context.script
    message = script.apply_to_message(self._worker, job.seq, message)
    message, loss = simulator.fetch((message, loss))
    if job.compute_end == math.inf:  # `_compute` did not wait
      self._slow_down(job)
    # A worker that rebuilds the parameters does not read them from a slot.
    reads_slots = incarnation.rebuilt_params is None
    if reads_slots and not job.has_unchanged_params(self._memories):
      return None
    push = job.push_frame(self._worker, is_finite(message, loss), float(loss))
    return push if self._write_to_slots(incarnation, job, message) else None

  def _submit(self, job: OpenJob, push: Frame) -> None:
    """Sends a PUSH to all shards, and to the lead last: the lead must not count
    a job as received that another shard lacks. In a consistent run the lead
    itself makes sure of that (PREPARED). Otherwise the lead gets its PUSH once
    all other shards have acknowledged theirs."""
    is_independent = not self._spec.consistent and len(self._shards) > 1
    # All shards refuse a NaN or infinite message: the lead gets it at once.
    lead_waits = push.flag and is_independent
    for shard in reversed(self._shards):
      frame = push._replace(message=job.ticket_frames[shard].message)
      if shard or not lead_waits:
        self._push(shard, frame)
      else:
        self._incarnation.pushes_for_lead[job.seq] = frame
    self._context.log_span("push", job.compute_end, self._context.clock(), job)

  def _write_to_slots(
    self, incarnation: IncarnationState, job: OpenJob, message: Any
  ) -> bool:
    """Writes a message to its slots; False if the lease was revoked."""
    plan, stamp = self._spec.plan, message_stamp(self._worker, job.seq)
    parts = compression.split(plan, message)

    def write() -> None:
      # After `_start_next_incarnation` another ticket may have the slots.
      for shard, memory in enumerate(self._memories):
        if incarnation is self._incarnation:
          slot = job.ticket_frames[shard].message
          memory.write(MESSAGES, slot, parts[shard], stamp)

    return self._lease.use(write)

  def _push(self, shard: int, frame: Frame) -> None:
    """Sends a PUSH to a shard, and stores it until the shard's ACK."""
    self._incarnation.unacked[shard][frame.seq] = frame
    script = self._context.script
    # Scripted faults apply to the PUSH to the lead, which is sent last.
    pushes = [frame] if shard else script.apply_to_frame(self._worker, frame)
    for push in pushes:
      self._send(shard, push)
