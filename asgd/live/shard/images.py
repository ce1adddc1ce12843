"""A shard's state as a snapshot or in a checkpoint, and the way back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from asgd import base
from asgd.live.shard.state import ShardState
from asgd.orders.trace import Event, Ledger


def snapshot(state: ShardState) -> None:
  """Saves the state in the shard's memory, in place of the log before it."""
  state.messages.flush()
  tickets = *state.tickets.values(), *state.kept.values()
  params, meta = [ticket.params for ticket in tickets], describe(state)
  memory, first = state.slots.memory, state.slots.counts.messages
  if state.updates.are_sent:
    meta["packets"] = state.updates.save(memory, first, state.rows)
  state.slots.save(state.server, meta, params)


def describe(state: ShardState) -> dict[str, Any]:
  """Returns the rest of the state beside the server's and the journal, as
  JSON."""
  slots, updates = state.slots, {}
  params, slot = slots.published or (None, -1)
  if state.updates.are_sent:
    bases = sorted((*key, t.base) for key, t in state.tickets.items())
    updates = {"bases": bases, **state.updates.describe()}
  return {
    "rows": state.rows,
    "received": state.messages.count,
    "records": state.messages.sink.count,
    "tickets": sorted((*key, t.job) for key, t in state.tickets.items()),
    # Of tickets of a memory that was lost; the lead will call them lost, too.
    "without_params": sorted(
      key for key, t in state.tickets.items() if t.ticket.params is None
    ),
    "dead": sorted(slots.dead.items()),
    "published": slot,
    "current": slot >= 0 and params is state.server.params,
    **updates,
  }


def _open_tickets(state, ledger, intact, without_params=()):
  """Takes over the open tickets of a journal, and its counts."""
  without_params = set(map(tuple, without_params))
  state.rows = ledger.rows
  state.messages.count = len(ledger.received) + ledger.undone
  state.seqs = dict(ledger.next_seq)
  state.joined = dict(ledger.holders)
  state.tickets = {
    event.key: state.read_ticket(
      event,
      event.action == base.SEND,
      intact and event.key not in without_params,
    )
    for tickets in ledger.open.values()
    for event in tickets.values()
  }
  kept = ledger.latest if state.keeps else {}
  state.kept = {w: state.read_ticket(e, False, intact) for w, e in kept.items()}


def restore(
  state: ShardState, image: tuple[Any, Any], ledger: Ledger[Event], intact: bool
) -> None:
  """Takes over a snapshot: (the server's state, the result of `describe`), with
  the ledger of the journal before it. It is intact if the parameters of tickets
  lie in their slots."""
  tree, meta = image
  slots = state.slots
  state.server = jax.tree.map(jnp.array, tree)
  _open_tickets(state, ledger, intact, meta["without_params"])
  if state.updates.are_sent:
    state.updates.load(meta, slots.memory, slots.counts.messages)
    for worker, seq, after in meta["bases"]:
      ticket = state.tickets[worker, seq]._replace(base=after)
      state.tickets[worker, seq] = ticket
  for worker, messages in meta["dead"]:
    for slot in messages:
      slots.bury(worker, slots.take_message(slot))
  for ticket in state.tickets.values():
    slots.take_message(ticket.message)
  for ticket in (*state.tickets.values(), *state.kept.values()):
    slots.use(ticket.params)
    slots.use(ticket.params)  # the snapshot's
    slots.pinned.append(ticket.params)
  if meta["published"] >= 0:
    current = state.server.params if meta["current"] else None
    slots.published = current, meta["published"]
    slots.use(meta["published"])


def reopen(
  state: ShardState, events: Sequence[Event], ledger: Ledger, intact: bool
) -> bool:
  """Takes over the open tickets at the end of a journal, after the rows since
  the image of `restore`, without the messages received since: returns whether
  there are any."""
  before, tickets = state.messages.count, state.tickets
  _open_tickets(state, ledger, intact)
  for key in tickets.keys() & state.tickets.keys():
    ticket = state.tickets[key]._replace(base=tickets[key].base)
    state.tickets[key] = ticket
  for event in events:
    key = event.key
    if event.action == base.JOIN:
      state.slots.dead.pop(event.worker, None)
      state.updates.join(event.worker)
    elif event.action == base.SEND and key in state.tickets:
      state.tickets[key] = state.with_updates(event, state.tickets[key])
    elif event.action in (base.LOST, base.REJECT):
      state.updates.lose(*key)
      if event.message >= 0:
        state.slots.bury(event.worker, event.message)
  state.slots.recount(
    [t.params for t in (*state.tickets.values(), *state.kept.values())],
    [t.message for t in state.tickets.values()],
  )
  return state.messages.count > before
