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
from asgd.live.shard.updates import WHOLE, SentUpdates
from asgd.live.slots import MESSAGES, PARAMS, message_stamp
from asgd.orders.trace import STARTS, Event

Key = tuple[int, int]  # (worker, seq): identifies a message


class OpenTicket(NamedTuple):
  """A ticket that was sent, until its message is received or lost."""

  ticket: base.Ticket
  job: int
  params_slot: int
  message_slot: int  # of the message, and of the ticket's packed updates
  base: int = WHOLE  # the version that the packed updates are added to


class ReceivedMessages:
  """The messages that a shard has received: their count, their records, the
  parameters after some of them, and each worker's latest residual norm."""

  def __init__(self, setup: Setup, sink: FileSink):
    self._setup, self.sink, self.count = setup, sink, 0
    # Number of the next messages that have a record in the sink already.
    self.n_recorded = 0
    self.kept_params: dict[int, Any] = {}  # number of messages -> parameters
    # (messages, observations) of records that are not in the sink yet.
    self._unwritten: tuple[list[simulator.ReceivedMessage], list[Any]] = [], []
    # Worker -> RMS of its codec's residual (the part to send later).
    self._residuals: dict[int, float] = {}
    # (worker, RMS) of residuals lost with workers before the last job.
    self.lost_residuals: list[tuple[int, float]] = []

  def add(
    self, message: simulator.ReceivedMessage, observation: Any, params: Any
  ) -> None:
    """Adds a message. `observation` is the result of `steps.receive` for it;
    `params` are the parameters after its update."""
    if self.n_recorded:  # a recovery: the sink has this record already
      self.n_recorded -= 1
    else:
      messages, observations = self._unwritten
      messages.append(message)
      observations.append(observation)
    self.count += 1
    self._residuals[message.worker] = message.residual_norm
    if self.count in self._setup.keep_params_at:
      self.kept_params[self.count] = params

  def leave(self, worker: int) -> None:
    """Counts the residual of a worker as lost."""
    norm = self._residuals.pop(worker, 0.0)
    # After the last job every worker leaves, and no residual is needed.
    if norm and self.count < self._setup.jobs:
      self.lost_residuals.append((worker, norm))

  def flush(self) -> None:
    """Writes the pending records to the sink."""
    if self._unwritten[0]:
      self.sink.append(simulator.records(*self._unwritten))
      self._unwritten = [], []


class ShardState:
  """The server's state, its open tickets and their slots.

  Only `apply` changes this state, in a run and in a recovery. So a shard that
  replays its journal recomputes its state to the bit.
  """

  def __init__(
    self,
    setup: Setup,
    steps: simulator.Steps,
    server: base.ServerState,
    slots: SlotTable,
    sink: FileSink,
  ):
    """Creates the state before the first row; `server` is donated."""
    self.setup, self.steps, self.server = setup, steps, server
    self.slots, self.updates = slots, SentUpdates(steps, server)
    self.messages = ReceivedMessages(setup, sink)
    # Worker -> its index as int32[], for tickets.
    self._indices = simulator.worker_indices(setup.workers)
    self._version: tuple[Any, int] = None, 0  # see `version_of`
    self.rows = 0  # count of the journal's rows applied so far
    self.tickets: dict[Key, OpenTicket] = {}
    self.reusable_tickets: dict[int, OpenTicket] = {}  # by worker
    # worker -> number of jobs that all its incarnations started
    self.started_jobs: dict[int, int] = {}
    self.latest_incarnations: dict[int, int] = {}  # by worker
    self.pushes: dict[Key, Frame] = {}  # PUSHes of messages not yet received
    # Packed messages not yet received -> their content.
    self._unpacked_messages: dict[Key, Any] = {}

  def apply(self, event: Event) -> None:
    """Applies a row of the journal."""
    action, worker = event.action, event.worker
    self.rows += 1
    if action in STARTS:
      self._start(event)
    elif action == base.RECEIVE:
      self._receive(event)
    elif action in (base.LOST, base.REJECT, base.DROP):
      self._close_ticket(event)
    elif action in (base.JOIN, base.LEAVE):
      if action == base.JOIN:
        # The earlier incarnation has ended and writes to no slot any more.
        self.slots.free_lost(worker)
        self.latest_incarnations[worker] = event.job
        self.updates.forget_worker(worker)
      # A new incarnation has neither the cached ticket nor the residual.
      self._drop_reusable(worker)
      self.messages.leave(worker)
    elif action == base.ROLLBACK:
      # Recovery has restored the image already. Workers hold parameters of
      # updates that are undone, so the next tickets carry complete parameters.
      self.updates.roll_back(self.server)
      slots = {
        key: open_ticket.message_slot
        for key, open_ticket in self.tickets.items()
      }
      self.updates.recount(self.slots.memory, slots)
      for key, open_ticket in self.tickets.items():
        self.tickets[key] = open_ticket._replace(base=WHOLE)

  def _start(self, event: Event) -> None:
    """Opens a ticket: SEND, or KEEP of the worker's latest ticket."""
    worker, slots = event.worker, self.slots
    if event.action == base.KEEP:
      reused_ticket = self.reusable_tickets[worker]
      ticket = self.steps.keep(reused_ticket.ticket)
      slot = reused_ticket.params_slot
      slots.use(slot)
    else:
      ticket = self.steps.send(self.server, self._indices[worker])
      slot = slots.publish(ticket.params, self.rows, event.params)
    message_slot = slots.take_message(event.message)
    open_ticket = OpenTicket(ticket, event.job, slot, message_slot)
    if event.action == base.SEND:
      open_ticket = self.with_updates(event, open_ticket)
    self.tickets[event.key] = open_ticket
    self.started_jobs[worker] = event.seq + 1
    if self.can_keep:
      if event.action == base.SEND:
        self._drop_reusable(worker)
        slots.use(slot)  # the reusable ticket outlives the open one
      ticket = ticket._replace(fresh=np.False_)
      self.reusable_tickets[worker] = open_ticket._replace(ticket=ticket)

  def with_updates(self, event: Event, open_ticket: OpenTicket) -> OpenTicket:
    """Returns the ticket of a SEND with its packed updates. If the event comes
    from the journal, the slot has the updates already."""
    memory, params = self.slots.memory, open_ticket.ticket.params
    # An event that is not in the journal yet names no slot (-1).
    base_version = self.updates.write(
      *(memory, open_ticket.message_slot, event.key, params),
      writes=event.message < 0,
    )
    return open_ticket._replace(base=base_version)

  def _receive(self, event: Event) -> None:
    """Applies a message to the server's state and closes its ticket."""
    key, slots = event.key, self.slots
    # [1] Compute the record's columns while the ticket is open.
    received, version = self._received_message(event), 0
    # If each message is one update, compute the next version here: reading it
    # from the device would wait for the update.
    if self.steps.alone:
      version = self.version_of(self.server)
    # [2] Apply the message.
    if self.setup.totals:
      self.server, observation = self.stage(
        key, event.loss, event.totals
      ).result
    else:
      self.server, observation = self.steps.receive(
        *self._arguments(key, event.loss)
      )
    self.updates.count_update(self.server)
    if self.steps.alone:
      self._version = self.server.version, version + 1
    # [3] Free the slots of the ticket, and count the message.
    open_ticket = self.tickets.pop(key)
    slots.release(open_ticket.params_slot)
    if self.setup.log:  # a recovery needs the message until the next snapshot
      slots.log_slots.append(open_ticket.message_slot)
    else:
      jax.block_until_ready(observation)  # the update reads the slot
      slots.free_messages.append(open_ticket.message_slot)
    self._drop_message(key)
    self.messages.add(received, observation, self.server.params)

  def version_of(self, ticket_or_server: Any) -> int:
    """Returns the version of a ticket or of the server's state as an int.

    Fetches it from the device, unless it is the version of the last call or
    the shard has counted it itself.
    """
    if ticket_or_server.version is not self._version[0]:
      self._version = ticket_or_server.version, int(ticket_or_server.version)
    return self._version[1]

  def _received_message(self, event: Event) -> simulator.ReceivedMessage:
    """Returns the columns of a record that do not depend on the update."""
    open_ticket, memory = self.tickets[event.key], self.slots.memory
    # Bytes that were sent up and down for the job.
    up, norm = memory.content_nbytes(MESSAGES, open_ticket.message_slot), 0.0
    if self.steps.codec is not None:
      norm = float(self.unpack(event.key).residual)
    down = self.updates.close_ticket(*event.key, open_ticket.ticket)
    columns = event.time, event.worker, event.job
    return simulator.ReceivedMessage(*columns, up, down, norm)

  def _drop_message(self, key: Key) -> None:
    self.pushes.pop(key, None)
    self._unpacked_messages.pop(key, None)

  def _close_ticket(self, event: Event) -> None:
    """Closes a ticket without an update (LOST, REJECT or DROP)."""
    open_ticket = self.tickets.pop(event.key)
    self.updates.drop_ticket(*event.key)
    self.slots.release(open_ticket.params_slot)
    if event.message < 0:  # PUSH arrived: the worker no longer writes there
      self.slots.free_messages.append(open_ticket.message_slot)
    else:
      self.slots.keep_lost(event.worker, open_ticket.message_slot)
    self._drop_message(event.key)

  def _drop_reusable(self, worker: int) -> None:
    if open_ticket := self.reusable_tickets.pop(worker, None):
      self.slots.release(open_ticket.params_slot)

  def stage(self, key: Key, loss: float, totals: Sequence[float]) -> Any:
    """Processes a message as far as the totals allow. Returns a
    `sharding.Ask` for the next total, or a result; changes no state."""
    arrays = simulator.as_totals(totals)
    return self.steps.stage(arrays, *self._arguments(key, loss))

  def _arguments(self, key: Key, loss: float) -> tuple[Any, ...]:
    ticket, message = self.tickets[key].ticket, self.unpack(key)
    return self.server, ticket, message, np.float32(loss)

  def unpack(self, key: Key) -> Any:
    """Returns the message of an open ticket. Raises BadCode if it is packed and
    cannot be unpacked."""
    if key in self._unpacked_messages:
      return self._unpacked_messages[key]
    slot, stamp = self.tickets[key].message_slot, message_stamp(*key)
    message = self.slots.memory.device_view(MESSAGES, slot, stamp)
    if self.steps.codec is not None:  # then `message` has no views of the slot
      self._unpacked_messages[key] = message
    return message

  def unpack_error(self, key: Key) -> str:
    """Returns the error of a packed message that cannot be unpacked, or ""."""
    if self.steps.codec is None:
      return ""
    try:
      self.unpack(key)
    except BadCode as error:
      return f"message {key[1]} of worker {key[0]} is refused: {error}"
    return ""

  def read_ticket(
    self, event: Event, fresh: bool, memory_intact: bool
  ) -> OpenTicket:
    """Returns the open ticket of a SEND or KEEP row, in a recovery.

    If the memory is not intact, the ticket has no parameters. It needs none,
    because then the ticket's worker is not connected.
    """
    params: Any = None
    if memory_intact:
      # A copy: the slot is written again once the ticket ends.
      params = self.slots.memory.read_copy(PARAMS, event.params)
    worker, version = self._indices[event.worker], jnp.int32(event.version)
    ticket = base.Ticket(worker, version, params, np.bool_(fresh))
    return OpenTicket(ticket, event.job, event.params, event.message)

  def ticket_frame(self, key: Key) -> Frame:
    """Returns the TICKET frame of an open ticket."""
    ticket, job, params_slot, message_slot, base_version = self.tickets[key]
    flag, value = frames.WHOLE, self.slots.memory.stamp(PARAMS, params_slot)
    if not ticket.fresh:
      flag = frames.KEPT
    elif base_version != WHOLE:
      flag, value = frames.UPDATES, base_version
    frame = Frame(frames.TICKET, *key, job, self.version_of(ticket), flag)
    frame = frame._replace(params=params_slot, message=message_slot)
    return frame._replace(value=float(value))

  def can_write(self, frame: Frame) -> bool:
    """Whether the message of a PUSH may be written to its slot: the ticket is
    open and has no message yet."""
    key = frame.worker, frame.seq
    open_ticket = None if key in self.pushes else self.tickets.get(key)
    return (
      open_ticket is not None and open_ticket.message_slot == frame.message
    )

  def check_written(self, key: Key) -> None:
    """Raises BadFrame if the message of an open ticket does not lie in its
    slot, ValueError if another process replaced the memory."""
    slot, memory = self.tickets[key].message_slot, self.slots.memory
    if memory.stamp(MESSAGES, slot) != message_stamp(*key):
      memory.adopt()  # raises ValueError if the memory was replaced
      raise frames.BadFrame(
        f"worker {key[0]} submits message {key[1]}, which does not lie in slot"
        f" {slot} of {memory.name}"
      )

  @property
  def all_tickets(self) -> list[OpenTicket]:
    """The open tickets and the reusable ones; both use slots of parameters."""
    return [*self.tickets.values(), *self.reusable_tickets.values()]

  @property
  def can_keep(self) -> bool:
    """Whether a ticket may be used for several jobs."""
    return self.setup.rules.cache or self.setup.rules.fetch_every > 1

  @property
  def log_is_full(self) -> bool:
    """Whether no ticket can be sent before a snapshot."""
    slots = self.slots
    return not slots.free_messages or (
      len(slots.log_slots) >= max(self.setup.log, 1)
    )

  def lost_slot(self, key: Key) -> int:
    """Returns the message slot of a lost ticket, if its worker may still write
    to the slot, otherwise -1."""
    return -1 if key in self.pushes else self.tickets[key].message_slot
