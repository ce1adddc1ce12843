"""What a shard knows as a function of its journal: it obeys rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, sharding, simulator
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.records import Sink
from asgd.live.setup import Setup
from asgd.live.shard.slots import SlotTable
from asgd.live.slots import PARAMS
from asgd.orders.trace import Event

Key = tuple[int, int]  # (worker, seq): the name of a message


class OpenTicket(NamedTuple):
  """A ticket that was sent, until its message is received or lost."""

  ticket: base.Ticket
  job: int
  params: int  # slot
  message: int  # slot


class ShardState:
  """The server's state, its open tickets and their slots.

  `obey` is the only way in which they change, in a run as in a recovery, so a
  shard that obeys its journal again is as it was.
  """

  def __init__(
    self,
    setup: Setup,
    steps: simulator.Steps,
    server: base.ServerState,
    slots: SlotTable,
    sink: Sink,
  ):
    """Starts before the first row.

    Args:
      setup: of the run.
      steps: compiled functions; `work` is not used.
      server: the server's state; it is donated.
      slots: none of them in use.
      sink: for the records of messages.
    """
    self.setup, self.steps, self.server = setup, steps, server
    self.slots, self.sink = slots, sink
    self._numbers = [jnp.int32(w) for w in range(setup.workers)]
    self.tickets: dict[Key, OpenTicket] = {}
    self.kept: dict[int, OpenTicket] = {}  # by worker: what a KEEP reuses
    self.seqs: dict[int, int] = {}  # worker -> jobs it started, ever
    self.pushed: dict[Key, Frame] = {}  # messages in their slots, not received
    self.rows = 0  # obeyed
    self.received = 0  # messages
    self.kept_params: dict[int, Any] = {}  # received count -> parameters
    # Of records that the sink does not have: (time, worker, job), and the rest.
    self._unwritten: tuple[list, list] = [], []

  def obey(self, event: Event) -> None:
    """Changes the state as a row of the journal says."""
    action, worker = event.action, event.worker
    self.rows += 1
    if action == base.SEND:
      self._send(event)
    elif action == base.KEEP:
      kept = self.kept[worker]
      slot = self.slots.take_message(event.message)
      self.slots.use(kept.params)
      self._open(event, kept._replace(job=event.job, message=slot))
    elif action == base.RECEIVE:
      self._receive(event)
    elif action in (base.LOST, base.REJECT):
      self._lose(event)
    elif action in (base.JOIN, base.LEAVE):
      if action == base.JOIN:
        self.slots.exhume(worker)
      self._drop_kept(worker)
    # The effect of a ROLLBACK is the snapshot that was read before it.

  def _send(self, event):
    worker = event.worker
    ticket = self.steps.send(self.server, self._numbers[worker])
    slot = self.slots.publish(ticket.params, event.params)
    message = self.slots.take_message(event.message)
    open_ticket = OpenTicket(ticket, event.job, slot, message)
    self._open(event, open_ticket)
    if self.keeps:
      self._drop_kept(worker)
      self.slots.use(slot)
      self.kept[worker] = open_ticket._replace(
        ticket=ticket._replace(fresh=np.False_)
      )

  def _open(self, event, open_ticket):
    self.tickets[event.key] = open_ticket
    self.seqs[event.worker] = event.seq + 1

  def _receive(self, event):
    key, slots = event.key, self.slots
    open_ticket = self.tickets.pop(key)
    message = slots.read_message(open_ticket.message)
    args = self.server, open_ticket.ticket, message, np.float32(event.loss)
    if self.setup.totals:
      totals = simulator.as_totals(event.totals)
      self.server, row = self.steps.stage(totals, *args).result
    else:
      self.server, row = self.steps.receive(*args)
    slots.release(open_ticket.params)
    if self.setup.log:
      slots.logged.append(open_ticket.message)
    else:
      jax.block_until_ready(row)  # the update reads the slot
      slots.free_messages.append(open_ticket.message)
    self.pushed.pop(key, None)
    messages, observations = self._unwritten
    messages.append((event.time, event.worker, event.job))
    observations.append(row)
    self.received += 1
    if self.received in self.setup.keep_params_at:
      self.kept_params[self.received] = self.server.params

  def _lose(self, event):
    open_ticket = self.tickets.pop(event.key)
    self.slots.release(open_ticket.params)
    if event.message < 0:  # it had come: the worker writes there no more
      self.slots.free_messages.append(open_ticket.message)
    else:
      self.slots.bury(event.worker, open_ticket.message)
    self.pushed.pop(event.key, None)

  def _drop_kept(self, worker):
    kept = self.kept.pop(worker, None)
    if kept:
      self.slots.release(kept.params)

  def stage(self, key: Key, totals: Sequence[float]) -> sharding.Ask | Any:
    """Goes as far with a message as the totals over all shards allow, and
    changes nothing."""
    open_ticket, loss = self.tickets[key], np.float32(self.pushed[key].value)
    message = self.slots.read_message(open_ticket.message)
    args = self.server, open_ticket.ticket, message, loss
    return self.steps.stage(simulator.as_totals(totals), *args)

  def read_ticket(self, event: Event, fresh: bool, intact: bool) -> OpenTicket:
    """Returns an open ticket as a row says, in a recovery.

    Args:
      event: the SEND or KEEP of the ticket.
      fresh: it was sent, not kept.
      intact: its parameters lie in their slot; or they were lost with the
        memory, and with it the connection to their worker.
    """
    memory, params = self.slots.memory, None
    if intact:
      params = memory.read_copy(PARAMS, event.params)
    ticket = base.Ticket(
      self._numbers[event.worker],
      jnp.int32(event.version),
      params,
      np.bool_(fresh),
    )
    return OpenTicket(ticket, event.job, event.params, event.message)

  def ticket_frame(self, key: Key) -> Frame:
    """Returns what tells a worker of an open ticket."""
    open_ticket = self.tickets[key]
    return Frame(
      *(frames.TICKET, *key, open_ticket.job, int(open_ticket.ticket.version)),
      flag=int(not open_ticket.ticket.fresh),
      params=open_ticket.params,
      message=open_ticket.message,
    )

  def accepts(self, frame: Frame) -> bool:
    """Whether a PUSH is for a ticket that is open, and in its slot: a message
    that comes with it may be written there."""
    key = frame.worker, frame.seq
    ticket = self.tickets.get(key)
    return (
      ticket is not None
      and ticket.message == frame.message
      and key not in self.pushed
    )

  def flush(self) -> None:
    """Hands the records so far to the sink."""
    if self._unwritten[0]:
      self.sink.append(simulator.records(*self._unwritten))
      self._unwritten = [], []

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
    """Returns the message slot of a ticket that dies, if its worker may still
    write there; otherwise -1."""
    return -1 if key in self.pushed else self.tickets[key].message
