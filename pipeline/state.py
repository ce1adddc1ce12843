"""A run of a pipeline before a slot: its entries, and the lane that has each.

A run can stop between slots: no task of slot t needs a result of slot t or
later. So the keys of a state before a slot follow from the table. A key is a
kind and numbers:

  (TICKET, stage, version, replica, worker)  weights that are still to be read
  ("x", stage, microbatch)      input of a forward, from the stage before
  ("g", stage, microbatch)      its gradient, from the stage after
  ("m", stage, microbatch)      message to the stage's server, with its ticket
  (RESIDUALS, stage, microbatch)  residuals of a forward, for its backward
  (HALF, stage, microbatch)     residuals between I and W
  (SUM, stage)                  sum of an update's messages, and oldest ticket
  (AT_WORKER, stage, worker)    state of `Part.at_worker`
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base
from asgd.pipeline import analyze
from asgd.pipeline.instructions import TICKET, Program
from asgd.pipeline.spans import TaskSpan

RESIDUALS, HALF, SUM, AT_WORKER = "kept", "half", "sum", "at_worker"


class PipelineState(NamedTuple):
  """A run before a slot. In the state of a process that has only some of the
  lanes, servers of other processes are None."""

  slot: int  # the next slot to execute
  microbatch: int  # index of the table's first microbatch, over all passes
  servers: tuple[base.ServerState, ...]  # S, one for each stage
  entries: dict[tuple, Any]


class PipelineResult(NamedTuple):
  """State, losses, records and spans after a run."""

  state: PipelineState
  losses: dict[int, Any]  # microbatch -> float[], from the last stage
  records: tuple[base.Records, ...]  # S; each has one row per update
  spans: tuple[TaskSpan, ...]


def keys(program: Program, slot: int) -> set[tuple]:
  """Returns the keys of the whole table's state before a slot; of tickets only
  those that will be read."""
  schedule, table_rows = program.schedule, program.table_rows
  every = schedule.every
  forward, backward, weight = (schedule.time[rows] for rows in table_rows)
  entry_keys: set[tuple] = set()

  def add(kind, made_at, read_at, first_stage=0):
    # An entry exists between the task that makes it and the task that reads it.
    exists = (made_at < slot) & (slot <= read_at)
    for stage, number in np.argwhere(exists).tolist():
      entry_keys.add((kind, first_stage + stage, number))

  add("x", forward[:-1], forward[1:], 1)
  add("g", backward[1:], backward[:-1])
  add(RESIDUALS, forward, weight)
  add(HALF, backward, weight)
  update_slots = analyze.updates_done(schedule)  # of versions 1, 2, ...
  if program.together:
    update_slots = np.broadcast_to(update_slots.max(0), update_slots.shape)
  for stage, places in enumerate(program.places):
    later_microbatches = np.flatnonzero(weight[stage] >= slot)
    rows = table_rows.weight[stage, later_microbatches]
    replica = np.searchsorted(places, schedule.device[rows])
    current = int(np.searchsorted(update_slots[stage], slot, "left"))
    # `n_waiting` messages belong to an update that is not made yet.
    n_waiting = len(weight[stage]) - len(later_microbatches) - current * every
    if every > 1 and n_waiting:
      entry_keys.add((SUM, stage))
    if n_waiting == every:  # the last message waits for the other stages
      number = (current + 1) * every - 1
      entry_keys.add(("m", stage, int(program.order[stage, number])))
    for version, worker in program.reads:
      columns = (
        version[stage, later_microbatches],
        replica,
        worker[stage, later_microbatches],
      )
      tickets = np.stack(columns, 1)[columns[0] <= current].tolist()
      entry_keys.update((TICKET, stage, *ticket) for ticket in tickets)
  return entry_keys


def lane_of(program: Program, key: tuple) -> int:
  """Returns the lane that has the entry of a key."""
  kind, stage, *numbers = key
  if kind in ("m", SUM, AT_WORKER):
    return program.places[stage][0]
  if kind == TICKET:
    return program.places[stage][numbers[1]]
  forward, backward, _ = program.table_rows
  row = (backward if kind == "g" else forward)[stage, numbers[0]]
  return int(program.schedule.device[row])


def check(state: PipelineState, program: Program, at_worker: set) -> None:
  """Raises ValueError for a state of another table, an incomplete one, or
  one that a run has consumed: its lanes would wait forever. `at_worker` are the
  keys of the states of every `Part.at_worker`."""
  table = program.schedule
  if len(state.servers) != table.stages:
    raise ValueError(
      f"the state has {len(state.servers)} stages, and {table.name} has"
      f" {table.stages}: it is of another table"
    )
  sums = [value for key, value in state.entries.items() if key[0] == SUM]
  for leaf in jax.tree.leaves((state.servers, sums)):
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
      raise ValueError(
        "this state was consumed by a run: use the one that the run returned"
      )
  expected = keys(program, state.slot) | at_worker
  for key in sorted(expected ^ state.entries.keys()):
    # A state may contain a ticket that no later task reads.
    if key in expected or key[0] != TICKET:
      raise ValueError(
        f"before slot {state.slot} of {table.name} a state has"
        f" {'' if key in expected else 'no '}{key}, unlike this one: it is of"
        " another table, or not whole"
      )


# Other forms: on the host, and as JSON and arrays, for a checkpoint.


class HostKey(NamedTuple):
  """A key of JAX, as numbers."""

  data: np.ndarray


def to_host(tree: Any) -> Any:
  """Returns a tree of NumPy arrays; a key of JAX becomes a HostKey."""

  def move(x):
    if not isinstance(x, jax.Array):
      return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return HostKey(np.asarray(jax.random.key_data(x)))
    return np.asarray(x)

  return jax.tree.map(move, tree)


def with_keys(tree: Any) -> Any:
  """Returns a tree of `to_host` with keys of JAX in place of HostKeys."""

  def is_key(x):
    return isinstance(x, HostKey)

  return jax.tree.map(
    lambda x: jax.random.wrap_key_data(x.data) if is_key(x) else x,
    tree,
    is_leaf=is_key,
  )


_NODES = {n.__name__: n for n in (base.Ticket, base.Variables, HostKey)}


def describe(tree: Any, leaves: list[np.ndarray]) -> Any:
  """Appends the arrays of a tree of the host to `leaves`; returns JSON with
  their positions."""
  if tree is None:
    return None
  if isinstance(tree, dict):
    return {"dict": [[k, describe(v, leaves)] for k, v in tree.items()]}
  if isinstance(tree, (tuple, list)):
    return {type(tree).__name__: [describe(value, leaves) for value in tree]}
  leaves.append(tree)
  return {"array": len(leaves) - 1}


def rebuild(description: Any, leaves: Sequence[np.ndarray]) -> Any:
  """Returns a tree that `describe` has described; its arrays are copies."""
  if description is None:
    return None
  ((kind, content),) = description.items()
  if kind == "array":
    return jnp.array(leaves[content])
  if kind == "dict":
    return {
      tuple(key) if isinstance(key, list) else key: rebuild(value, leaves)
      for key, value in content
    }
  values = [rebuild(value, leaves) for value in content]
  if kind in _NODES:
    return _NODES[kind](*values)
  return values if kind == "list" else tuple(values)
