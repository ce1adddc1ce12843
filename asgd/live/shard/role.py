"""The base class of all shards, which commits rows of the journal and sends
them to workers and other shards.

`Role.commit` is the only way in which a shard changes its state in a run.
"""

from collections.abc import Callable, Collection, Iterable

from asgd import base
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.journal import FileJournal
from asgd.live.shard import images
from asgd.live.shard.state import Key, ShardState
from asgd.orders.trace import STARTS, Event

# Most incarnations of one worker that join at the lead and never connect to
# another shard. A frame that implies more is refused.
MOST_AHEAD = 100

# Sends a frame to one peer. It never raises, and never blocks for long. The
# function also identifies the connection: each connection has a different one.
SendFrame = Callable[[Frame], None]


class Role:
  """A shard's state, journal, connections and time.

  Subclasses override the hooks, from `n_refused` on. The hooks of this class
  suit a shard that decides nothing. If a subclass does not override a hook for
  a kind of frame, `frames.check` refuses frames of that kind.
  """

  decides = False  # whether this shard writes rows that the lead did not write
  stopped = False  # whether every job is received; only the lead sets it

  def __init__(
    self, index: int, state: ShardState, journal: FileJournal, now: float
  ):
    self.index, self.setup = index, state.setup
    self.state, self.journal = state, journal
    # Seconds since the run began. It never decreases, because rows must be in
    # order of time. A clock may be behind after a restart on another machine.
    events = journal.events()
    self.time = max(now, events[-1].time if events else 0.0)
    self.connections: dict[int, SendFrame] = {}  # worker -> its connection
    self.incarnations: dict[int, int] = {}  # worker -> its present incarnation
    # Worker -> its latest incarnation with tickets that this shard has ended.
    self.ended_incarnations: dict[int, int] = {}
    # Worker -> index of its latest loop, counted by the cluster from 0.
    self.latest_loops: dict[int, int] = {}
    # At the lead: shard -> its connection.
    self.followers: dict[int, SendFrame] = {}
    # Called after each row, with the number of rows so far.
    self.on_commit: Callable[[int], None] = lambda rows: None

  def commit(self, event: Event) -> None:
    """Commits a new row: to the state, to the journal, then to followers and
    the worker of the row."""
    state, key = self.state, event.key
    starts_job = event.action in STARTS
    # A snapshot frees the message slots of the log, one of which is needed.
    if starts_job and state.log_is_full:
      images.save_snapshot(state)
    # [1] The state applies the row. It chooses the slots of a ticket, which the
    # row then names.
    state.apply(event)
    if starts_job:
      ticket, _, params, message, _ = state.tickets[key]
      version = state.version_of(ticket)
      event = event._replace(version=version, params=params, message=message)
    # [2] The journal gets the row before any frame reports it: a reported row
    # must survive a kill.
    self.journal.append(event)
    # [3] Followers and the worker receive frames of the row.
    for send in self.followers.values():
      for frame in row_frames(state.rows - 1, event):
        send(frame)
    if starts_job:
      self.send(event.worker, state.ticket_frame(key))
    elif event.action in (base.RECEIVE, base.DROP):
      self.send(event.worker, Frame(frames.ACK, *key))
    self.on_commit(state.rows)

  def send(self, worker: int, frame: Frame) -> None:
    """Sends a frame to a worker, if it is connected."""
    if worker in self.connections:
      self.connections[worker](frame)

  def expel(self, worker: int) -> None:
    """Sends EXPEL to a worker, and drops its incarnation and connection."""
    self.incarnations.pop(worker, None)
    self.send(worker, Frame(frames.EXPEL, worker))
    self.connections.pop(worker, None)

  @property
  def n_refused(self) -> int:
    """Number of messages with NaN or infinity: consecutive ones, or all of one
    job."""
    return 0

  @property
  def late_workers(self) -> Collection[int]:
    """The workers that count as late, but not yet as dead."""
    return ()

  @property
  def finished(self) -> bool:
    """Whether the journal has the end of the last job."""
    return False

  def is_outdated(self, worker: int, incarnation: int) -> bool:
    """Whether a later incarnation of the worker has replaced this one."""
    return incarnation < self.incarnations.get(worker, -1)

  def join(self, worker: int, incarnation: int) -> None:
    """Registers a new incarnation of a worker; the lead assigned its number."""
    self.incarnations[worker] = incarnation

  def leave(self, worker: int) -> None:
    """Drops the incarnation of a worker. A deciding shard also ends the
    worker's tickets."""
    self.incarnations.pop(worker, None)

  def push(self, frame: Frame) -> None:
    """Handles a PUSH: the message of an open ticket lies in its slot."""

  def fetch(self, frame: Frame) -> None:
    """Handles a FETCH: a worker asks for this shard's slice of a ticket."""

  def pause(self, worker: int) -> None:
    """Makes a worker start no further job."""

  def pause_all(self) -> None:
    """Makes all workers start no further job."""

  def follow(self, send: SendFrame) -> None:
    """Replaces the connection to the lead; `send` sends frames to the lead."""

  def handle_shard_frame(self, frame: Frame, send: SendFrame) -> None:
    """Handles a frame of another shard (`frames.SHARD_KINDS`)."""

  def mark_alive(self, worker: int) -> None:
    """Stores the present time as the worker's last sign of life."""

  def find_dead(self, now: float) -> list[int]:
    """Returns the workers that count as dead."""
    return []

  def advance(self) -> None:
    """Commits the rows that the frames so far allow."""

  def replay(self, events: list[Event]) -> None:
    """Restores the decisions of the journal's rows, in a recovery."""

  def learn_durations(self, events: Iterable[Event]) -> None:
    """Adds the durations of a journal's jobs to the deadlines."""


def total_frames(key: Key, totals: Iterable[float]) -> list[Frame]:
  """Returns the frames of a message's totals."""
  return [
    Frame(frames.TOTAL, *key, version=i, value=value)
    for i, value in enumerate(totals)
  ]


def row_frames(row: int, event: Event) -> list[Frame]:
  """Returns the frames of a row of the lead's journal, for a follower. `row` is
  the index of the row."""
  frame = Frame(frames.ROW, *event.key, event.job, row, event.action)
  frame = frame._replace(value=event.time, loss=event.loss)
  return [*total_frames(event.key, event.totals), frame]
