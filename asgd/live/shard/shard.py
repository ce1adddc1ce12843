"""A live server shard: the pure Server on its slice, fed with frames.

A shard writes each decision to its journal as a row before any worker or other
shard receives it, and only rows change the state. So a shard that was killed
replays the rows since its last snapshot (`recovery`). The messages of these
rows still lie in their slots, the log (`Setup.log`). The log costs no copies,
only slots, and a snapshot whenever all slots of the log are used.

A loop is one start of a worker (`WorkerLoop`), and an incarnation is one
registration of the worker here. After an EXPEL a loop that is not replaced
continues as the next incarnation.

A shard never waits and never reads a clock: the caller passes `now`. All calls
come from one thread.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, simulator
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.journal import FileJournal, journal_path
from asgd.live.records import FileSink, records_path
from asgd.live.setup import Setup, slot_counts
from asgd.live.shard import images, recovery
from asgd.live.shard.follower import Follower, Independent
from asgd.live.shard.images import Image
from asgd.live.shard.lead import Lead
from asgd.live.shard.role import MOST_AHEAD, Role, SendFrame
from asgd.live.shard.slots import SlotTable
from asgd.live.shard.state import ShardState
from asgd.live.slots import SharedMemory


class ShardStorage(NamedTuple):
  """The memory and files that outlive the process of a shard."""

  memory: SharedMemory
  journal: FileJournal
  sink: FileSink
  # (state, meta) of a checkpoint, used if the memory is lost.
  image: Image | None = None

  @classmethod
  def open(
    cls,
    run: Path,
    index: int,
    memory: SharedMemory,
    image: Image | None = None,
    **options: Any,
  ) -> "ShardStorage":
    """Opens a shard's files in the folder of a run; `options` are those of an
    `AppendOnlyFile`."""
    journal = FileJournal(journal_path(run, index), **options)
    sink = FileSink(records_path(run, index), **options)
    return cls(memory, journal, sink, image)


class Shard:
  """One shard. The lead (index 0) also decides which jobs workers start."""

  def __init__(
    self,
    index: int,
    setup: Setup,
    steps: simulator.Steps,
    server: base.ServerState,
    store: ShardStorage,
    *,
    now: float,
    resumed: bool = False,
  ):
    """Starts the shard, or recovers it if its journal has rows.

    Args:
      index: the index of the shard.
      setup: settings of the run.
      steps: compiled steps of the server.
      server: the state before the first row; it is donated.
      store: files and memory; the memory must have the slots that
        `slot_counts` gives.
      now: seconds since the run began.
      resumed: whether the whole run starts again, so that no worker and no
        other shard is alive.

    Raises:
      ValueError: if the files and the memory contradict each other.
    """
    self.index, self.setup = index, setup
    slots = SlotTable(store.memory, slot_counts(setup))
    self.state = ShardState(setup, steps, server, slots, store.sink)
    role_class: type[Role] = Lead
    if index:
      role_class = Follower if setup.consistent else Independent
    self.role = role_class(index, self.state, store.journal, now)
    # Time of the start, or of the last snapshot by `tick`; unused with a log.
    self._last_snapshot_time = now
    self._is_paused = False
    self._expelled: list[int] = []  # workers that the cluster is to replace
    self._news: list[str] = []  # lines that the driver is to print
    self.rollback = recovery.recover(self.role, store.image, resumed=resumed)
    self.state.messages.lost_residuals.clear()  # reported before the restart
    # Adopt the memory only after the recovery. If this process is killed
    # before, its successor treats the memory as new.
    store.memory.adopt()
    self.role.on_commit = self._after_commit
    # Image for a checkpoint: (row, None until the row is applied, then image).
    self._requested_image: tuple[int, Image | None] | None = None
    # A lead that recovers after the last job has stopped already. No frame
    # would make it stop later, as workers that received STOP send none.
    self.role.stopped = self.role.finished

  def handle(self, frame: Frame, send: SendFrame, now: float) -> None:
    """Handles one frame of a peer; `send` sends a frame back to that peer.
    Raises BadFrame, and changes nothing, for a frame that no worker or shard
    sends."""
    role, kind, worker = self.role, frame.kind, frame.worker
    frames.check(frame, self.index, self.setup)
    role.time = max(now, role.time)
    if kind in frames.SHARD_KINDS:
      role.handle_shard_frame(frame, send)
    elif kind == frames.HELLO:
      self._handle_hello(frame, send)
    elif role.connections.get(worker) != send:  # not the present incarnation
      send(Frame(frames.EXPEL, worker, flag=int(worker in role.connections)))
    elif kind == frames.PUSH:
      self._handle_push(frame)
    elif kind == frames.FETCH:
      role.fetch(frame)
    elif kind == frames.DRAIN:
      role.pause(worker)
    elif kind == frames.BYE:
      if frame.flag:
        self._news.append(
          f"worker {worker} cannot read the updates that shard {frame.version}"
          " sent it: it restarts with the complete parameters"
        )
      self._leave(worker)
    # Any frame may allow a decision that was not possible before.
    role.advance()

  def _handle_hello(self, frame: Frame, send: SendFrame) -> None:
    """Connects a worker. A HELLO names the incarnation; -1 asks for a new one.

    Sends WELCOME and the open tickets, or EXPEL to a loop or an incarnation
    that was replaced.
    """
    role, worker, incarnation = self.role, frame.worker, frame.job
    # [1] Refuse a loop that was replaced. The lead alone checks this: a worker
    # connects to the lead before it connects to other shards.
    if not self.index and self._is_replaced_loop(frame):
      send(Frame(frames.EXPEL, worker, flag=1))
      return
    is_same_connection = role.connections.get(worker) == send
    if is_same_connection and frame.flag:
      role.mark_alive(worker)
    # A new worker repeats its HELLO if the answer takes long.
    present_incarnation = role.incarnations.get(worker, -1)
    is_present = (
      is_same_connection
      if incarnation < 0
      else incarnation == present_incarnation
    )
    # [2] Refuse an incarnation if its tickets were ended. Otherwise end the
    # tickets of an earlier incarnation that is still registered here.
    if not is_present:
      latest = self.state.latest_incarnations.get(worker, -1)
      if self.index and incarnation > latest + MOST_AHEAD:
        raise frames.BadFrame(
          f"incarnation {incarnation} of worker {worker} sends {frame} to shard"
          f" {self.index}, which knows the incarnations up to {latest}"
        )
      if incarnation >= 0 and role.is_outdated(worker, incarnation):
        send(Frame(frames.EXPEL, worker, flag=int(worker in role.connections)))
        return
      role.send(worker, Frame(frames.EXPEL, worker, flag=1))
      self._leave(worker)
    # [3] Register the incarnation, and send WELCOME and the open tickets.
    role.connections[worker] = send
    if not is_present:
      role.join(worker, incarnation)
      if self._is_paused:
        role.pause(worker)
    incarnation, attempt = role.incarnations[worker], frame.version
    send(Frame(frames.WELCOME, worker, job=incarnation, version=attempt))
    # An incarnation that connects again may have missed its TICKETs.
    for job_key in self.state.tickets:
      if job_key[0] == worker and job_key not in self.state.pushes:
        send(self.state.ticket_frame(job_key))
    if role.stopped:
      send(Frame(frames.STOP, worker))

  def _is_replaced_loop(self, frame: Frame) -> bool:
    """Whether the HELLO comes from a loop that was replaced. If the shard
    accepted that loop, the later loop would lose its slots."""
    role, worker = self.role, frame.worker
    latest_loop = role.latest_loops.get(worker, 0)
    incarnation = self.state.latest_incarnations.get(worker, 0)
    # Each loop that connected has an incarnation in the journal. The index of a
    # loop is larger at most by the number of loops that never connected, which
    # MOST_AHEAD bounds.
    if frame.seq > max(latest_loop, incarnation) + MOST_AHEAD:
      raise frames.BadFrame(
        f"{frame} is too far ahead of loop {latest_loop}, the latest of its"
        " worker"
      )
    role.latest_loops[worker] = max(frame.seq, latest_loop)
    return frame.seq < latest_loop

  def _handle_push(self, frame: Frame) -> None:
    """Passes a PUSH to the role; acknowledges a committed message again."""
    job_key, state = (frame.worker, frame.seq), self.state
    self.role.mark_alive(frame.worker)
    if job_key in state.pushes:  # a retry; the message is not received yet
      return
    if job_key in state.tickets:
      if frame.flag:
        state.check_written(job_key)
        if error := state.unpack_error(job_key):
          self._news.append(error)
          # From here on the message is refused like one with NaN.
          frame = frame._replace(flag=0)
      self.role.push(frame)
    else:  # a retry of a committed message: its ACK may be lost
      self.role.send(frame.worker, Frame(frames.ACK, *job_key))

  def _leave(self, worker: int) -> None:
    self.role.connections.pop(worker, None)
    self.role.leave(worker)

  def disconnect(
    self, worker: int, now: float, send: SendFrame | None = None
  ) -> None:
    """Ends the tickets of a worker after its connection broke.

    `send` is the broken connection, if the caller knows it. Then nothing
    changes for a worker that has another connection by now.
    """
    role = self.role
    if send is None or role.connections.get(worker) == send:
      role.time = max(now, role.time)
      self._leave(worker)
      role.advance()

  def expel(self, worker: int, now: float) -> None:
    """Ends the tickets of a worker that took too long, and sends EXPEL to the
    worker."""
    send = self.role.connections.get(worker)
    self.disconnect(worker, now)
    self._expelled.append(worker)
    if send:
      send(Frame(frames.EXPEL, worker))

  def end_open_tickets(self) -> None:
    """Ends the open tickets of an independent shard, after the lead has
    received all jobs: their workers may have exited without a message."""
    if self.index and self.role.decides:
      for worker in sorted({worker for worker, _ in self.state.tickets}):
        self._leave(worker)

  def pause(self) -> None:
    """Stops starting jobs, also at workers that join later."""
    self._is_paused = True
    self.role.pause_all()

  def tick(self, now: float) -> None:
    """Writes records, saves a snapshot if one is due, and expels workers that
    count as dead. The host calls this periodically."""
    self.state.messages.flush()
    since_snapshot = now - self._last_snapshot_time
    # With a log, `Role.commit` saves a snapshot whenever the log is full.
    if not self.setup.log and since_snapshot > self.setup.snapshot_seconds:
      images.save_snapshot(self.state)
      self._last_snapshot_time = now
    for worker in self.role.find_dead(now):
      self.expel(worker, now)

  def image(self) -> Image:
    """Returns (state, meta) for a checkpoint, as plain data. First syncs the
    journal and the records to the disk, so that a loss of power keeps them."""
    self.state.messages.flush()
    self.role.journal.sync()
    self.state.messages.sink.sync()
    # Copies: the next update reuses the memory of the server's state.
    state = jax.tree.map(np.array, self.state.server)
    return state, images.describe(self.state)

  def request_image(self, rows: int) -> None:
    """Asks the shard to store an image once it has `rows` rows."""
    self._requested_image = rows, None

  def _after_commit(self, rows: int) -> None:
    """Stores the requested image if the journal has its number of rows now."""
    if self._requested_image and self._requested_image[0] == rows:
      self._requested_image = rows, self.image()

  def requested_image(self, rows: int) -> tuple[int, Image | None]:
    """Returns (current count of rows, image after `rows` rows or None)."""
    image = None
    if self._requested_image and self._requested_image[0] == rows:
      image = self._requested_image[1]
    return self.state.rows, image

  def status(self) -> dict[str, Any]:
    """Returns the shard's progress, as plain data. Each expelled worker and
    each line of news is returned once."""
    messages = self.state.messages
    messages.flush()
    expelled, self._expelled = self._expelled, []
    news, self._news = [*self._news, *self._lost_residuals()], []
    return {
      "received": messages.count,
      "rows": self.state.rows,
      "stopped": self.stopped,
      "busy": bool(self.state.tickets),
      "workers": list(self.workers),
      "late": sorted(self.role.late_workers),
      "expelled": expelled,
      "news": news,
      "refused": self.role.n_refused,
      "rollback": self.rollback,
      "kept_params": sorted(messages.kept_params),
    }

  def _lost_residuals(self) -> Iterator[str]:
    """Yields a line for each residual that was lost with a worker; other shards
    than the lead yield none."""
    messages = self.state.messages
    lost_residuals, messages.lost_residuals = messages.lost_residuals, []
    # A worker has a residual at each shard; the lead's line is enough.
    for worker, norm in () if self.index else lost_residuals:
      yield (
        f"worker {worker} has left, and the residual that its codec had kept to"
        f" send later is lost (RMS {norm:.3g})"
      )

  def close(self) -> None:
    """Closes the shard's files."""
    self.role.journal.close()
    self.state.messages.sink.close()

  @property
  def stopped(self) -> bool:
    """Whether every job is received. Only the lead knows that: at another shard
    it is False."""
    return self.role.stopped

  @property
  def workers(self) -> Sequence[int]:
    """The worker indices with an incarnation registered at this shard."""
    return sorted(self.role.incarnations)
