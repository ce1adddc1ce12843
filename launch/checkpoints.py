"""Checkpoints of a run, with orbax.

A simulation's is made at an event boundary and holds everything: server,
worker states, tickets in flight, the position in the trace and the records so
far. Batches and keys need no place in it, as they are functions of (seed,
worker, job), and neither does the trace, which is a function of the config.

Orbax writes a step under a temporary name and renames it, so a killed save
leaves no step behind. What a disk or a copy cut short later is found by a
checksum over the arrays.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from asgd import base, simulator


class Saved(NamedTuple):
  """What a checkpoint gives back."""

  simulation: simulator.Simulation
  records: base.Records  # of all messages received so far
  notes: Any  # JSON: whatever else the caller wants back


def digest(tree: Any) -> str:
  """Returns a checksum of all bits of a pytree of arrays."""
  total = hashlib.sha256()
  for leaf in jax.tree.leaves(jax.device_get(tree)):
    leaf = np.ascontiguousarray(leaf)
    total.update(f"{leaf.dtype}{leaf.shape}".encode())
    total.update(leaf.tobytes())
  return total.hexdigest()


def _pack(simulation):
  """Returns (tree, holders): tickets that share parameters are stored once.
  A holder is [worker, job, version, index, fresh]; a kept ticket's job is
  None."""
  trees, index, holders = [], {}, []
  for worker, kept in enumerate(simulation.kept):
    held = {} if kept is None else {None: kept}
    for job, ticket in (held | simulation.tickets[worker]).items():
      identity = tuple(map(id, jax.tree.leaves(ticket.params)))
      if identity not in index:
        index[identity] = len(trees)
        trees.append(ticket.params)
      row = [worker, job, int(ticket.version), index[identity]]
      holders.append([*row, bool(ticket.fresh)])
  return (simulation.server, simulation.workers, trees), holders


def _unpack(tree, holders, event):
  server, workers, trees = tree
  tickets, kept = tuple({} for _ in workers), [None] * len(workers)
  for worker, job, version, index, fresh in holders:
    ticket = base.Ticket(
      *(jnp.int32(worker), jnp.int32(version), trees[index], np.bool_(fresh))
    )
    if job is None:
      kept[worker] = ticket
    else:
      tickets[worker][job] = ticket
  # A simulation to be rolled back is a replay, which starts from the beginning.
  return simulator.Simulation(event, server, workers, tickets, tuple(kept), {})


def _brief(error: Exception) -> str:
  """An exception's type and the beginning of its text, on one line."""
  text = " ".join(str(error).split())
  return f"{type(error).__name__}: {text[:200]}"


class _Folder:
  """The last few checkpoints of one run, in one folder: arrays and JSON."""

  def __init__(self, folder: Path, *, keep: int = 2):
    alone = {}
    if jax.process_count() > 1:  # this process writes, and asks no other
      here = jax.process_index()
      alone["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}
      )
      alone["create"] = False
      folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, enable_async_checkpointing=False, **alone
    )
    self._folder = folder
    self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

  def _write(self, step, tree, meta):
    """Writes a checkpoint; when this returns it is on disk, whole.

    Raises:
      ValueError: if it cannot be written; what was there is left as it was.
    """
    if step == self._manager.latest_step():
      return  # restored from, or saved at, this very step
    leaves = jax.device_get(jax.tree.leaves(tree))
    meta = {**meta, "digest": digest(leaves)}
    arrays = {f"{i:05d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    # Orbax takes no array without elements, such as a shard may have.
    empty = {name: x for name, x in arrays.items() if not x.size}
    arrays = {name: x for name, x in arrays.items() if x.size}
    meta["empty"] = {n: [x.dtype.str, x.shape] for n, x in empty.items()}
    try:
      self._manager.save(
        step,
        args=ocp.args.Composite(
          arrays=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta)
        ),
        force=True,
      )
    except Exception as error:  # a full disk makes orbax raise anything
      raise ValueError(
        f"cannot write a checkpoint to {self._folder} ({_brief(error)}); make"
        " room and go on with --resume"
      ) from error

  def _newest(self, unpack):
    """Returns unpack(leaves, meta) of the newest checkpoint that is whole, None
    if there is none. Says on stderr which ones it could not use."""
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        return unpack(*self._read(step))
      except Exception as error:  # whatever a damaged file makes orbax raise
        aside = self._folder.parent / f"damaged-{step}"
        while aside.exists():
          aside = aside.with_name(aside.name + "-again")
        (self._folder / str(step)).rename(aside)
        self._manager.reload()
        print(
          f"warning: checkpoint {self._folder / str(step)} is damaged and is"
          f" not used ({_brief(error)}); it is kept as"
          f" {aside}. Using the one before it, or starting again",
          file=sys.stderr,
        )
    return None

  def _read(self, step):
    saved = self._manager.restore(
      step,
      args=ocp.args.Composite(
        arrays=ocp.args.StandardRestore(), meta=ocp.args.JsonRestore()
      ),
    )
    meta, arrays = saved["meta"], saved["arrays"]
    for name, (dtype, shape) in meta.get("empty", {}).items():
      arrays[name] = np.empty(shape, dtype)
    leaves = [np.asarray(arrays[name]) for name in sorted(arrays)]
    if digest(leaves) != meta["digest"]:
      raise ValueError("the checksum does not match")
    return leaves, meta

  def close(self) -> None:
    """Releases the folder."""
    self._manager.close()


class Checkpoints(_Folder):
  """Checkpoints of a simulation."""

  def save(
    self, simulation: simulator.Simulation, records: base.Records, notes: Any
  ) -> None:
    """Writes a checkpoint; when this returns it is on disk, whole.

    Args:
      simulation: at an event boundary, with at least one message received.
      records: of all messages so far.
      notes: any JSON.

    Raises:
      ValueError: if it cannot be written; what was there is left as it was.
    """
    tree, holders = _pack(simulation)
    meta = {"event": simulation.event, "tickets": holders, "notes": notes}
    self._write(simulation.event, (tree, records), meta)

  def restore(self, template: simulator.Simulation) -> Saved | None:
    """Returns the newest checkpoint that is whole, None if there is none.

    Says on stderr which ones it could not use.

    Args:
      template: a simulation of the same structure, such as a new one.
    """
    return self._newest(
      lambda leaves, meta: self._unpack(leaves, meta, template)
    )

  def _unpack(self, leaves, meta, template):
    count = len({index for _, _, _, index, _ in meta["tickets"]})
    tree = (template.server, template.workers, [template.server.params] * count)
    records = simulator.concatenate([])
    structure = jax.tree.structure((tree, records))
    tree, records = jax.tree.unflatten(structure, leaves)
    # Copied: the simulation donates buffers, and these are NumPy's.
    tree = jax.tree.map(jnp.array, tree)
    return Saved(
      _unpack(tree, meta["tickets"], meta["event"]), records, meta["notes"]
    )


Image = tuple[base.ServerState, Any]  # of a live shard: NumPy arrays, and JSON


class LiveCheckpoints(_Folder):
  """Checkpoints of a live server: an image of each of its shards. They are for
  when the memory of the machine is lost; see `asgd.runtimes.shard`."""

  def save(self, images: Sequence[Image]) -> None:
    """Writes a checkpoint; when this returns it is on disk, whole.

    Raises:
      ValueError: if it cannot be written; what was there is left as it was.
    """
    states, metas = zip(*images, strict=True)
    step = sum(meta["rows"] for meta in metas)
    self._write(step, states, {"shards": metas})

  def restore(
    self,
    template: Sequence[base.ServerState],
    rows: Sequence[int] | None = None,
  ) -> list[Image] | None:
    """Returns the newest checkpoint that is whole, None if there is none.

    Says on stderr which ones it could not use.

    Args:
      template: states of the same structure.
      rows: how many each shard's trace has; it must not be made of more.
    """

    def unpack(leaves, meta):
      for index, held in enumerate(meta["shards"] if rows else ()):
        if held["rows"] > rows[index]:
          raise ValueError(
            f"trace-{index}.csv has {rows[index]} rows, the checkpoint is of"
            f" row {held['rows']}"
          )
      states = jax.tree.unflatten(jax.tree.structure(tuple(template)), leaves)
      return list(zip(states, meta["shards"], strict=True))

    return self._newest(unpack)
