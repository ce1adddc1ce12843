"""The state of one incarnation of a worker: its open jobs, the messages that
shards have not acknowledged, and the right to write to slots.

`asgd.live.worker` has the loop that uses them.
"""

import collections
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from asgd import base
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.rebuilt_params import RebuiltParams
from asgd.live.slots import PARAMS


class OpenJob:
  """An unfinished job; at least a part of its ticket has arrived."""

  def __init__(self, frame: Frame, now: float):
    self.seq, self.job = frame.seq, frame.job
    # 1 if the lead sent KEPT: the job uses the parameters of the last ticket.
    self.reuses_params = int(frame.flag == frames.KEPT)
    self.ticket_frames: dict[int, Frame] = {}  # shard -> its TICKET
    self.first_ticket_time = self.compute_start = now
    self.compute_end = math.inf  # infinite until the job is computed
    self.result: Any = None  # (message, loss)

  def fetch_frame(self, worker: int) -> Frame:
    """Returns the FETCH that asks a shard for its part of the ticket."""
    flag = self.reuses_params
    return Frame(frames.FETCH, worker, self.seq, self.job, flag=flag)

  def push_frame(self, worker: int, finite: bool, loss: float) -> Frame:
    """Returns the PUSH of the message; the caller adds each shard's slot."""
    push = Frame(frames.PUSH, worker, self.seq, self.job, flag=int(finite))
    return push._replace(value=loss)

  def ticket(self, worker: int, params: Any) -> base.Ticket:
    """Returns the ticket of the job, with the parameters of all shards."""
    # NumPy scalars, because each jax array would need a dispatch.
    index: Any = np.int32(worker)
    version: Any = np.int32(self.ticket_frames[0].version)
    return base.Ticket(index, version, params, np.bool_(not self.reuses_params))

  def memories_and_frames(
    self, memories: Sequence[Any]
  ) -> Iterator[tuple[Any, Frame]]:
    """Returns (memory, TICKET) of each shard."""
    ticket_frames = (self.ticket_frames[i] for i in range(len(memories)))
    return zip(memories, ticket_frames, strict=True)

  def has_unchanged_params(self, memories: Sequence[Any]) -> bool:
    """Whether no shard has overwritten the slots of the job's parameters. The
    computation reads these slots until it ends. A shard overwrites a slot only
    after it has closed the ticket; the caller then discards the result."""
    return all(
      memory.stamp(PARAMS, frame.params) == int(frame.value)
      for memory, frame in self.memories_and_frames(memories)
    )


class IncarnationState:
  """The state of one incarnation of a worker. If a shard expels the worker, its
  loop joins again as the next incarnation, with a new state."""

  def __init__(
    self,
    shards: int,
    rebuilt_params: list[RebuiltParams] | None,
    attempt: int = 0,
  ):
    self.attempt = attempt  # count of the loop's earlier incarnations
    # The parameters that the worker computes from updates (`compress_down`), by
    # shard; None: each ticket carries the parameters.
    self.rebuilt_params = rebuilt_params
    self.number = -1  # the incarnation; -1 until the lead assigns it
    self.transform_state: Any = None  # of the worker's transform
    self.waiting_jobs: dict[int, OpenJob] = {}  # seq -> job not started
    self.started_seqs: set[int] = set()
    # Jobs in computation, in their order; at most `WorkerSpec.depth`.
    self.running: collections.deque[OpenJob] = collections.deque()
    # For each shard: seq -> PUSH that the shard has not acknowledged.
    self.unacked: list[dict[int, Frame]] = [{} for _ in range(shards)]
    # Seq -> PUSH for the lead, sent once all other shards have acknowledged
    # their PUSH of the seq.
    self.pushes_for_lead: dict[int, Frame] = {}

  def take_ready_job(self, depth: int) -> OpenJob | None:
    """Returns the next job and counts it as started. Returns None if that job
    lacks a ticket, or if `depth` jobs are running."""
    for seq, job in sorted(self.waiting_jobs.items()):
      if 0 not in job.ticket_frames:
        continue  # a shard sent a ticket that the lead has ended already
      has_all_tickets = len(job.ticket_frames) == len(self.unacked)
      if not has_all_tickets or len(self.running) >= depth:
        return None
      self.started_seqs.add(seq)
      return self.waiting_jobs.pop(seq)
    return None

  def acknowledge(self, shard: int, seq: int) -> Frame | None:
    """Registers the ACK of a shard. Returns the PUSH for the lead if this was
    the last ACK that it waited for, otherwise None."""
    self.unacked[shard].pop(seq, None)
    if any(seq in unacked for unacked in self.unacked):
      return None
    return self.pushes_for_lead.pop(seq, None)

  @property
  def waits_for_other_shards(self) -> bool:
    """Whether the worker waits for another shard than the lead: for its part of
    a ticket, or for its ACK, before the lead gets the PUSH."""
    jobs = self.waiting_jobs.values()
    return bool(self.pushes_for_lead) or any(0 in x.ticket_frames for x in jobs)

  @property
  def has_unacknowledged(self) -> bool:
    """Whether a message exists that some shard has not acknowledged."""
    return bool(self.pushes_for_lead) or any(self.unacked)


class Lease:
  """The right of a worker loop to write to the slots of its worker index.

  A thread that hangs cannot be killed: it may wake up after its successor took
  over the slots.
  """

  def __init__(self) -> None:
    self.revoked = False  # another loop has the worker index
    self._lock = threading.Lock()  # locked during a write

  def revoke(self) -> None:
    """Ends the lease: when this returns, no write is under way, and none
    follows."""
    with self._lock:
      self.revoked = True

  def use(self, write: Callable[[], None]) -> bool:
    """Calls `write` and returns True. After `revoke` it returns False, and does
    not call `write`."""
    with self._lock:
      if not self.revoked:
        write()
      return not self.revoked
