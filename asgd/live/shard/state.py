"""The state of a shard as a function of its journal."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, simulator
from asgd.compression.packing import BadCode
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.records import FileSink
from asgd.live.setup import Setup
from asgd.live.shard.slots import SlotTable
from asgd.live.shard.updates import WHOLE, Updates
from asgd.live.slots import MESSAGES, PARAMS, message_stamp
from asgd.orders.trace import STARTS, Event

Key = tuple[int, int]  # (worker, seq): the name of a message


class OpenTicket(NamedTuple):
  """A ticket that was sent, until its message is received or lost."""

  ticket: base.Ticket
  job: int
  params: int  # slot
  message: int  # slot, and that of the updates
  base: int = WHOLE  # the version that its updates are added to


class ReceivedMessages:
  """Messages that a shard has received: their count, their records, the
  parameters after some of them, and what codecs kept of the last ones."""

  def __init__(self, setup: Setup, sink: FileSink):
    self._setup, self.sink, self.count = setup, sink, 0
    self.recorded = 0  # messages to come whose records the sink has already
    self.kept_params: dict[int, Any] = {}  # by count
    self._unwritten: tuple[list, list] = [], []  # messages, observations
    # Worker -> RMS of what its codec kept; and of workers that have left before
    # the last job.
    self._residuals: dict[int, float] = {}
    self.lost: list[tuple[int, float]] = []

  def add(self, message: simulator.ReceivedMessage, row: Any, params: Any):
    """Counts a message; `row` is its Observation, `params` are those after."""
    if self.recorded:
      self.recorded -= 1
    else:
      messages, observations = self._unwritten
      messages.append(message)
      observations.append(row)
    self.count += 1
    self._residuals[message.worker] = message.residual_norm
    if self.count in self._setup.keep_params_at:
      self.kept_params[self.count] = params

  def leave(self, worker: int) -> None:
    """Counts as lost what the codec of a worker had kept to send later."""
    lost = self._residuals.pop(worker, 0.0)
    if lost and self.count < self._setup.jobs:
      self.lost.append((worker, lost))

  def flush(self) -> None:
    """Writes the records so far to the sink."""
    if self._unwritten[0]:
      self.sink.append(simulator.records(*self._unwritten))
      self._unwritten = [], []


class ShardState:
  """The server's state, its open tickets and their slots.

  Only `obey` changes them, in a run and in a recovery, so a shard that replays
  its journal has the state that it had.
  """

  def __init__(
    self,
    setup: Setup,
    steps: simulator.Steps,
    server: base.ServerState,
    slots: SlotTable,
    sink: FileSink,
  ):
    """Starts before the first row; `server` is donated."""
    self.setup, self.steps, self.server = setup, steps, server
    self.slots, self.updates = slots, Updates(steps, server)
    self.messages = ReceivedMessages(setup, sink)
    self._numbers = [jnp.int32(w) for w in range(setup.workers)]
    self._version: tuple[Any, int] = None, 0  # see `version_of`
    self.rows = 0  # of the journal, applied so far
    self.tickets: dict[Key, OpenTicket] = {}
    self.kept: dict[int, OpenTicket] = {}  # by worker: the ticket for a KEEP
    self.seqs: dict[int, int] = {}  # worker -> jobs it started, ever
    self.joined: dict[int, int] = {}  # worker -> number of its latest holder
    self.pushed: dict[Key, Frame] = {}  # messages in their slots, not received
    self._codes: dict[Key, Any] = {}  # those of them that are unpacked

  def obey(self, event: Event) -> None:
    """Applies a row of the journal."""
    action, worker = event.action, event.worker
    self.rows += 1
    if action in STARTS:
      self._start(event)
    elif action == base.RECEIVE:
      self._receive(event)
    elif action in (base.LOST, base.REJECT, base.DROP):
      self._lose(event)
    elif action in (base.JOIN, base.LEAVE):
      if action == base.JOIN:
        self.slots.exhume(worker)
        self.joined[worker] = event.job
        self.updates.join(worker)
      self._drop_kept(worker)
      self.messages.leave(worker)
    elif action == base.ROLLBACK:  # the snapshot was read before it
      self.updates.roll_back(self.server)
      slots = {key: ticket.message for key, ticket in self.tickets.items()}
      self.updates.recount(self.slots.memory, slots)
      for key, ticket in self.tickets.items():  # of updates that are undone
        self.tickets[key] = ticket._replace(base=WHOLE)

  def _start(self, event):
    worker, slots = event.worker, self.slots
    if event.action == base.KEEP:
      kept = self.kept[worker]
      ticket, slot = self.steps.keep(kept.ticket), kept.params
      slots.use(slot)
    else:
      ticket = self.steps.send(self.server, self._numbers[worker])
      slot = slots.publish(ticket.params, self.rows, event.params)
    message = slots.take_message(event.message)
    open_ticket = OpenTicket(ticket, event.job, slot, message)
    if event.action == base.SEND:
      open_ticket = self.with_updates(event, open_ticket)
    self.tickets[event.key] = open_ticket
    self.seqs[worker] = event.seq + 1
    if self.keeps:
      if event.action == base.SEND:
        self._drop_kept(worker)
        slots.use(slot)
      ticket = ticket._replace(fresh=np.False_)
      self.kept[worker] = open_ticket._replace(ticket=ticket)

  def with_updates(self, event: Event, ticket: OpenTicket) -> OpenTicket:
    """Returns the ticket of a SEND, with its updates; for an event of the
    journal they lie in their slot."""
    memory, params = self.slots.memory, ticket.ticket.params
    after = self.updates.write(
      memory, ticket.message, event.key, params, new=event.message < 0
    )
    return ticket._replace(base=after)

  def _receive(self, event):
    key, slots = event.key, self.slots
    received, version = self._received(event), 0
    if self.steps.alone:  # each message makes an update
      version = self.version_of(self.server)
    if self.setup.totals:
      self.server, row = self.stage(key, event.loss, event.totals).result
    else:
      self.server, row = self.steps.receive(*self._arguments(key, event.loss))
    self.updates.update(self.server)
    if self.steps.alone:
      self._version = self.server.version, version + 1
    open_ticket = self.tickets.pop(key)
    slots.release(open_ticket.params)
    if self.setup.log:
      slots.logged.append(open_ticket.message)
    else:
      jax.block_until_ready(row)  # the update reads the slot
      slots.free_messages.append(open_ticket.message)
    self._forget(key)
    self.messages.add(received, row, self.server.params)

  def version_of(self, counted: Any) -> int:
    """Returns the version of a ticket or of the server's state as an int: that
    of an array that was asked for last, or is counted here, is not fetched."""
    if counted.version is not self._version[0]:
      self._version = counted.version, int(counted.version)
    return self._version[1]

  def _received(self, event):
    """The columns of a record that are not computed."""
    open_ticket, memory = self.tickets[event.key], self.slots.memory
    up, norm = memory.length(MESSAGES, open_ticket.message), 0.0
    if self.steps.codec is not None:
      norm = float(self.unpack(event.key).residual)
    down = self.updates.end(*event.key, open_ticket.ticket)
    name = event.time, event.worker, event.job
    return simulator.ReceivedMessage(*name, up, down, norm)

  def _forget(self, key):
    self.pushed.pop(key, None)
    self._codes.pop(key, None)

  def _lose(self, event):
    open_ticket = self.tickets.pop(event.key)
    self.updates.lose(*event.key)
    self.slots.release(open_ticket.params)
    if event.message < 0:  # it had come: the worker writes there no more
      self.slots.free_messages.append(open_ticket.message)
    else:
      self.slots.bury(event.worker, open_ticket.message)
    self._forget(event.key)

  def _drop_kept(self, worker):
    if kept := self.kept.pop(worker, None):
      self.slots.release(kept.params)

  def stage(self, key: Key, loss: float, totals: Sequence[float]) -> Any:
    """Processes a message as far as totals allow, and changes nothing."""
    totals = simulator.as_totals(totals)
    return self.steps.stage(totals, *self._arguments(key, loss))

  def _arguments(self, key, loss):
    ticket, message = self.tickets[key].ticket, self.unpack(key)
    return self.server, ticket, message, np.float32(loss)

  def unpack(self, key: Key) -> Any:
    """Returns the message of an open ticket. Raises BadCode for a packed one
    that does not unpack."""
    if key in self._codes:
      return self._codes[key]
    slot, stamp = self.tickets[key].message, message_stamp(*key)
    message = self.slots.memory.device_view(MESSAGES, slot, stamp)
    if self.steps.codec is not None:
      self._codes[key] = message  # its arrays are no views of the slot
    return message

  def complaint(self, key: Key) -> str:
    """Returns the fault of a message of codes, "" without one."""
    if self.steps.codec is None:
      return ""
    try:
      self.unpack(key)
    except BadCode as error:
      return f"message {key[1]} of worker {key[0]} is refused: {error}"
    return ""

  def read_ticket(self, event: Event, fresh: bool, intact: bool) -> OpenTicket:
    """Returns the open ticket of a SEND or KEEP, in a recovery. Unless it is
    intact, its parameters were lost with the memory, and so was the connection
    to its worker."""
    params = None
    if intact:
      params = self.slots.memory.read_copy(PARAMS, event.params)
    worker, version = self._numbers[event.worker], jnp.int32(event.version)
    ticket = base.Ticket(worker, version, params, np.bool_(fresh))
    return OpenTicket(ticket, event.job, event.params, event.message)

  def ticket_frame(self, key: Key) -> Frame:
    """Returns the TICKET frame of an open ticket."""
    ticket, job, params, message, after = self.tickets[key]
    how, number = frames.WHOLE, self.slots.memory.stamp(PARAMS, params)
    if not ticket.fresh:
      how = frames.KEPT
    elif after != WHOLE:
      how, number = frames.UPDATES, after
    frame = Frame(frames.TICKET, *key, job, self.version_of(ticket), how)
    return frame._replace(params=params, message=message, value=float(number))

  def accepts(self, frame: Frame) -> bool:
    """Whether the message of a PUSH may be written: its ticket is open."""
    key = frame.worker, frame.seq
    ticket = None if key in self.pushed else self.tickets.get(key)
    return ticket is not None and ticket.message == frame.message

  def check_written(self, key: Key) -> None:
    """Raises BadFrame if the message of an open ticket does not lie in its
    slot, ValueError if other memory has taken its place."""
    slot, memory = self.tickets[key].message, self.slots.memory
    if memory.stamp(MESSAGES, slot) != message_stamp(*key):
      memory.adopt()
      raise frames.BadFrame(
        f"worker {key[0]} hands in message {key[1]}, which does not lie in slot"
        f" {slot} of {memory.name}"
      )


  @property
  def keeps(self) -> bool:
    """Whether a ticket may be used for several jobs."""
    return self.setup.rules.cache or self.setup.rules.fetch_every > 1

  @property
  def log_is_full(self) -> bool:
    """Whether no ticket can be sent before a snapshot."""
    slots = self.slots
    return not slots.free_messages or (
      len(slots.logged) >= max(self.setup.log, 1)
    )

  def dead_slot(self, key: Key) -> int:
    """Returns a lost ticket's slot if its worker may still write, or -1."""
    return -1 if key in self.pushed else self.tickets[key].message
