"""Saves a shard's state as a snapshot or a checkpoint, and restores it.

An *image* is a pair: the server's state, as a tree of arrays, and the result of
`describe`, as data for JSON. A snapshot is an image in shared memory; a
checkpoint is an image on disk.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from asgd import base
from asgd.live.shard.state import ShardState
from asgd.orders.trace import Event, Ledger

Image = tuple[Any, Any]  # (the server's state, the result of `describe`)


def save_snapshot(state: ShardState) -> None:
  """Saves the state in the shard's memory, and frees the slots of the messages
  received so far."""
  # `describe` counts the records, so write them first.
  state.messages.flush()
  params_slots = [ticket.params_slot for ticket in state.all_tickets]
  meta = describe(state)
  memory, first_slot = state.slots.memory, state.slots.counts.messages
  if state.updates.are_enabled:
    meta["packets"] = state.updates.save(memory, first_slot, state.rows)
  state.slots.save(state.server, meta, params_slots)


def describe(state: ShardState) -> dict[str, Any]:
  """Returns, as data for JSON, the part of the state that neither the server's
  state nor the journal has."""
  slots, updates = state.slots, {}
  params, slot = slots.published or (None, -1)
  if state.updates.are_enabled:
    bases = sorted((*key, t.base) for key, t in state.tickets.items())
    updates = {"bases": bases, **state.updates.describe()}
  return {
    "rows": state.rows,
    "received": state.messages.count,
    "records": state.messages.sink.count,
    "tickets": sorted((*key, t.job) for key, t in state.tickets.items()),
    # Open tickets that lost their parameters with an earlier memory. The lead
    # ends them, and then commits their LOST rows.
    "without_params": sorted(
      key for key, t in state.tickets.items() if t.ticket.params is None
    ),
    "lost": sorted(slots.lost_slots.items()),
    # The slot of the parameters that were sent last, and whether the server
    # still has these parameters. If so, the next SEND shares the slot.
    "published": slot,
    "current": slot >= 0 and params is state.server.params,
    **updates,
  }


def _set_open_tickets(
  state: ShardState,
  ledger: Ledger[Event],
  memory_intact: bool,
  without_params: Iterable[Sequence[int]] = (),
) -> None:
  """Sets the open tickets and counts of a state to those of a ledger.

  Args:
    state: the state of the shard; it is changed.
    ledger: the ledger of the journal's rows.
    memory_intact: whether the slots have the parameters of the tickets.
    without_params: (worker, seq) of tickets that lost their parameters even if
      the slots are `memory_intact`.
  """
  lost_params = set(map(tuple, without_params))
  state.rows = ledger.rows
  # Messages count as received even if a rollback undid their updates.
  state.messages.count = len(ledger.received) + ledger.undone
  state.started_jobs = dict(ledger.next_seq)
  state.latest_incarnations = dict(ledger.incarnations)
  state.tickets = {
    event.key: state.read_ticket(
      event,
      event.action == base.SEND,
      memory_intact and event.key not in lost_params,
    )
    for tickets in ledger.open.values()
    for event in tickets.values()
  }
  latest = ledger.latest if state.can_keep else {}
  state.reusable_tickets = {
    worker: state.read_ticket(event, False, memory_intact)
    for worker, event in latest.items()
  }


def restore(
  state: ShardState, image: Image, ledger: Ledger[Event], memory_intact: bool
) -> None:
  """Restores a state from an image.

  Args:
    state: a state before the first row; it is changed.
    image: (the server's state, the result of `describe`).
    ledger: the ledger of the journal's rows before the image.
    memory_intact: whether the parameters of open tickets lie in their slots.
  """
  tree, meta = image
  slots = state.slots
  # [1] The server's state, the open tickets and the counts of messages.
  state.server = jax.tree.map(jnp.array, tree)
  _set_open_tickets(state, ledger, memory_intact, meta["without_params"])
  # [2] The updates that open tickets carry.
  if state.updates.are_enabled:
    state.updates.load(meta, slots.memory, slots.counts.messages)
    for worker, seq, base_version in meta["bases"]:
      ticket = state.tickets[worker, seq]._replace(base=base_version)
      state.tickets[worker, seq] = ticket
  # [3] The uses of slots at the time of the image.
  for worker, message_slots in meta["lost"]:
    for slot in message_slots:
      slots.keep_lost(worker, slots.take_message(slot))
  for ticket in state.tickets.values():
    slots.take_message(ticket.message_slot)
  for ticket in state.all_tickets:
    slots.use(ticket.params_slot)
    slots.use(ticket.params_slot)  # a second use, of the snapshot
    slots.snapshot_slots.append(ticket.params_slot)
  if meta["published"] >= 0:
    # `publish` compares objects; None differs from the server's parameters.
    params = state.server.params if meta["current"] else None
    slots.published = params, meta["published"]
    slots.use(meta["published"])


def reopen(
  state: ShardState,
  events: Sequence[Event],
  ledger: Ledger[Event],
  memory_intact: bool,
) -> bool:
  """Restores the tickets that are open at the end of a journal. The messages
  received since the image are not applied: their updates are lost.

  Args:
    state: the state as `restore` left it; it is changed.
    events: the rows since the image.
    ledger: the ledger of all rows.
    memory_intact: as in `restore`.

  Returns:
    Whether any message was received since the image.
  """
  received_before, image_tickets = state.messages.count, state.tickets
  _set_open_tickets(state, ledger, memory_intact)
  for key in image_tickets.keys() & state.tickets.keys():
    base_version = image_tickets[key].base
    state.tickets[key] = state.tickets[key]._replace(base=base_version)
  for event in events:
    key = event.key
    if event.action == base.JOIN:
      # `free_lost` is not called: `recount` below finds the free slots.
      state.slots.lost_slots.pop(event.worker, None)
      state.updates.forget_worker(event.worker)
    elif event.action == base.SEND and key in state.tickets:
      state.tickets[key] = state.with_updates(event, state.tickets[key])
    elif event.action in (base.LOST, base.REJECT):
      state.updates.drop_ticket(*key)
      if event.message >= 0:
        state.slots.keep_lost(event.worker, event.message)
  state.slots.recount(
    [ticket.params_slot for ticket in state.all_tickets],
    [ticket.message_slot for ticket in state.tickets.values()],
  )
  return state.messages.count > received_before
