"""The common part of all shards: they commit rows, and send them to workers and
other shards."""

from collections.abc import Callable

from asgd import base
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.journal import FileJournal
from asgd.live.shard import images
from asgd.live.shard.state import Key, ShardState
from asgd.orders.trace import STARTS, Event

# Holders of a place of which another shard may not have heard from the lead.
MOST_AHEAD = 100

Say = Callable[[Frame], None]  # to one peer; never raises, never blocks long


class Role:
  """A shard's state, journal, connections and time. The hooks, from `outdated`
  on, are here those of a shard that decides nothing."""

  decides = False  # writes rows of its own, not only what the lead wrote
  stopped = False  # every job is received, as far as this shard decides that
  refused = 0  # messages that were not finite: in a row, or of one job

  def __init__(
    self, index: int, state: ShardState, journal: FileJournal, now: float
  ):
    self.index, self.setup = index, state.setup
    self.state, self.journal = state, journal
    # Seconds since the run began; they never go back, though a clock may.
    events = journal.events()
    self.time = max(now, events[-1].time if events else 0.0)
    self.peers: dict[int, Say] = {}  # worker -> its connection
    self.holders: dict[int, int] = {}  # worker -> number of its holder
    self.died: dict[int, int] = {}  # worker -> number whose tickets died here
    self.lives: dict[int, int] = {}  # worker -> life of its latest loop
    self.followers: dict[int, Say] = {}  # of the lead: shard -> its connection
    # Called with the number of rows after each of them.
    self.committed: Callable[[int], None] = lambda rows: None

  def commit(self, event: Event) -> None:
    """Applies a new row; it is in the journal before any peer receives it."""
    state, key = self.state, event.key
    starts = event.action in STARTS
    if starts and state.log_is_full:
      images.snapshot(state)
    state.obey(event)
    if starts:
      ticket, _, params, message, _ = state.tickets[key]
      version = state.version_of(ticket)
      event = event._replace(version=version, params=params, message=message)
    self.journal.append(event)
    for say in self.followers.values():
      for frame in row_frames(state.rows - 1, event):
        say(frame)
    if starts:
      self.say(event.worker, state.ticket_frame(key))
    elif event.action in (base.RECEIVE, base.DROP):
      self.say(event.worker, Frame(frames.ACK, *key))
    self.committed(state.rows)

  def say(self, worker: int, frame: Frame) -> None:
    """Sends a frame to a worker, if it is connected."""
    if worker in self.peers:
      self.peers[worker](frame)

  def expel(self, worker: int) -> None:
    """Sends EXPEL to a worker, and forgets it."""
    self.holders.pop(worker, None)
    self.say(worker, Frame(frames.EXPEL, worker))
    self.peers.pop(worker, None)

  def outdated(self, worker: int, number: int) -> bool:
    """Whether a holder by that number was replaced by the present one."""
    return number < self.holders.get(worker, -1)

  def join(self, worker: int, number: int) -> None:
    """Takes a new holder, whose number the lead gave."""
    self.holders[worker] = number

  def leave(self, worker: int) -> None:
    """Forgets the holder of a worker index; a deciding shard ends its
    tickets."""
    self.holders.pop(worker, None)

  def push(self, frame: Frame) -> None:
    """The message of an open ticket lies in its slot."""

  def hear(self, frame: Frame, say: Say) -> None:
    """Takes a frame of another shard (`frames.OF_SHARDS`)."""

  def heard(self, worker: int) -> None:
    """Takes a sign of life of a worker."""

  def advance(self) -> None:
    """Decides what follows from the frames so far."""


def total_frames(key: Key, totals) -> list[Frame]:
  """Returns the frames of a message's totals."""
  return [
    Frame(frames.TOTAL, *key, version=i, value=value)
    for i, value in enumerate(totals)
  ]


def row_frames(number: int, event: Event) -> list[Frame]:
  """Returns the frames of a row of the lead's journal, for a follower."""
  row = Frame(frames.ROW, *event.key, event.job, number, event.action)
  row = row._replace(value=event.time, loss=event.loss)
  return [*total_frames(event.key, event.totals), row]
