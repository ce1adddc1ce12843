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
  state.flush()
  tickets = *state.tickets.values(), *state.kept.values()
  params = [ticket.params for ticket in tickets]
  state.slots.save(state.server, describe(state), params)


def describe(state: ShardState) -> dict[str, Any]:
  """Returns what neither the server's state nor the journal tells, as JSON."""
  slots = state.slots
  params, slot = slots.published or (None, -1)
  return {
    "rows": state.rows,
    "received": state.received,
    "records": state.sink.count,
    "tickets": sorted((*key, t.job) for key, t in state.tickets.items()),
    # Of tickets of a memory that was lost; the lead will call them lost, too.
    "without_params": sorted(
      key for key, t in state.tickets.items() if t.ticket.params is None
    ),
    "dead": sorted(slots.dead.items()),
    "published": slot,
    "current": slot >= 0 and params is state.server.params,
  }


def _open_tickets(state, ledger, intact, without_params=()):
  """Takes over the tickets that a journal leaves open, and its counts."""
  without_params = set(map(tuple, without_params))
  state.rows = ledger.rows
  state.received = len(ledger.received) + ledger.undone
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
  """Takes over a snapshot: (the server's state, what `describe` wrote), with
  the ledger after the rows of the journal before it. It is intact if the
  parameters of tickets lie in their slots."""
  tree, meta = image
  slots = state.slots
  state.server = jax.tree.map(jnp.array, tree)
  _open_tickets(state, ledger, intact, meta["without_params"])
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
  """Takes over the tickets that are open where the journal ends, after the rows
  since the image that `restore` took, without the messages that were received
  since: returns whether there are any."""
  before = state.received
  _open_tickets(state, ledger, intact)
  for event in events:
    if event.action == base.JOIN:
      state.slots.dead.pop(event.worker, None)
    elif event.action in (base.LOST, base.REJECT) and event.message >= 0:
      state.slots.bury(event.worker, event.message)
  state.slots.recount(
    [t.params for t in (*state.tickets.values(), *state.kept.values())],
    [t.message for t in state.tickets.values()],
  )
  return state.received > before
