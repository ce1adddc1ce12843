"""Programs compiled ahead of time, and compared with the planner.

`compile_program` lowers and compiles a step for devices that need not be here,
from shapes alone, and reads the optimised program. `compare` says where it
differs from the plan:

  - arguments and results of a device: the arrays that the shardings divide, and
    their bytes with the padding of their layouts, exactly;
  - matrix products: within 2 % of the planner's operations. XLA's own number
    counts a loop's body once, and other operations too, so products are counted
    from the program, each loop as often as it turns;
  - temporary bytes: within 15 %, of a device's main memory, from 256 MiB on
    (a TPU has smaller arrays in its vector memory);
  - collectives: each of the program's is one of the plan's, and each of the
    plan's is in the program.

What XLA may change in a collective, and `compare` allows: several become one
of several arrays; a reduce-scatter, or a gather, becomes an all-reduce (of
small arrays); a reduce-scatter pads what it divides, by less than an eighth,
and shifts the rest by a permutation; numbers are sent in fewer bytes, where
only a product in bfloat16 reads them; pieces that are added up are reduced
once; what is scattered along one axis is added up along another afterwards.
Single numbers (norms, the loss) are not compared.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from asgd import text_table
from asgd.parallel import hlo, memory, meshes, transfers
from asgd.parallel.targets import Target

FLOPS, TEMPORARY = 0.02, 0.15  # how far the planner may be from the program
_LEAST = 2**28  # temporary bytes: smaller ones are in a TPU's vector memory
_PADDING = 1 / 8
_TYPES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}
_TABLES = 32, 512  # bytes to which TPUs round the table of a tuple's arrays


class ProgramPlan(NamedTuple):
  """What the planner says of a program, for one device."""

  transfers: Sequence[transfers.Transfer] | None  # None: it does not say
  flops: float | None = None  # of matrix products; None: it does not say
  temporary: float | None = None  # bytes; None: it does not say
  # Whether devices of different slices may send to each other.
  crosses: bool = True


class Compilation(NamedTuple):
  """A program to compile: a jitted function, shapes of its arguments with
  shardings, and its plan."""

  name: str
  function: Any
  arguments: Sequence[Any]
  mesh: Mesh
  plan: ProgramPlan
  static: tuple[Any, ...] = ()  # arguments before those, part of the program


class Compiled(NamedTuple):
  """A compiled program, with what XLA says of a device's memory, in bytes."""

  job: Compilation
  program: hlo.HloProgram
  arguments: int
  results: int
  temporary: int
  reused: int  # of the results, in the place of arguments
  shapes: tuple[list[Any], list[Any]]  # of arguments and results, by shardings

  @property
  def peak(self) -> int:
    """Bytes of a device while the program runs."""
    return self.arguments + self.results - self.reused + self.temporary


def compile_program(job: Compilation, options: dict[str, Any]) -> Compiled:
  """Lowers and compiles a program, without running it; `options` are the
  compiler's. ValueError if the compiler refuses it, as a TPU's does one that
  needs more memory than there is."""
  lowered = job.function.lower(*job.static, *job.arguments)
  try:
    compiled = lowered.compile(compiler_options=options or None)
  except jax.errors.JaxRuntimeError as error:
    line = " ".join(str(error).split())[:300]
    raise ValueError(f"{job.name} cannot be compiled: {line}") from error
  stats = compiled.memory_analysis()
  shapes = jax.tree.map(
    lambda info, sharding: jax.ShapeDtypeStruct(
      info.shape, info.dtype, sharding=sharding
    ),
    lowered.out_info,
    compiled.output_shardings,
  )
  leaves, tree = jax.tree.flatten(tuple(job.arguments))
  # None for an argument that no result needs, which JAX left out.
  shardings = tree.flatten_up_to(compiled.input_shardings[0])
  pairs = zip(leaves, shardings, strict=True)
  kept = [leaf for leaf, sharding in pairs if sharding is not None]
  return Compiled(
    job,
    hlo.read(compiled.as_text()),
    *(stats.argument_size_in_bytes, stats.output_size_in_bytes),
    *(stats.temp_size_in_bytes, stats.alias_size_in_bytes),
    (kept, jax.tree.leaves(shapes)),
  )


def _dtype(dtype: Any) -> str:
  """The name of a dtype in HLO."""
  name = str(dtype)
  if name == "bool":
    return "pred"
  kind = name.rstrip("0123456789")
  return _TYPES.get(kind, kind) + name[len(kind) :]


def _parts(leaves: Iterable[Any]) -> collections.Counter:
  """A device's part of each array, keys of `jax.random` left out."""
  return collections.Counter(
    (_dtype(leaf.dtype), tuple(leaf.sharding.shard_shape(leaf.shape)))
    for leaf in leaves
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  )


def _compare_arrays(what, leaves, found, said, tables) -> list[str]:
  """Differences between arrays by shardings, those of the program, and bytes
  that XLA says."""
  planned = _parts(leaves)
  there = collections.Counter((a.dtype, a.shape) for a in found)
  keys = collections.Counter({("u32", (2,)): there[("u32", (2,))]})
  out = []
  for name, rest in (
    ("the program lacks", planned - there),
    ("the plan lacks", there - planned - keys),
  ):
    if rest:
      out.append(f"{what}: {name} {dict(itertools.islice(rest.items(), 3))}")
  padded = sum(map(hlo.padded_bytes, found))
  if said not in [padded + table for table in tables]:
    out.append(
      f"{what}: {padded:,} bytes by their layouts, and XLA has {said:,}"
    )
  return out


def _groups(mesh: Mesh) -> dict[frozenset, frozenset[str]]:
  """The axes of the mesh that make some groups of devices."""
  grid = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
  names = [name for name, size in mesh.shape.items() if size > 1]
  known = {}
  for count in range(1, len(names) + 1):
    for axes in itertools.combinations(names, count):
      at = [list(mesh.shape).index(name) for name in axes]
      rows = np.moveaxis(grid, at, range(-count, 0))
      rows = rows.reshape(-1, math.prod(mesh.shape[name] for name in axes))
      key = frozenset(frozenset(row) for row in rows.tolist())
      known[key] = frozenset(axes)
  return known


class Matches(NamedTuple):
  """The collectives of a program beside those of its plan."""

  rows: list[tuple[transfers.Transfer, int, int]]  # planned, times, bytes sent
  others: list[hlo.Collective]  # that are not in the plan
  missing: list[transfers.Transfer]  # that are not in the program


_SERVES = {  # kind in the program -> kinds of the plan, the likeliest first
  transfers.REDUCE: (transfers.REDUCE, transfers.SCATTER, transfers.GATHER),
  transfers.SCATTER: (transfers.SCATTER,),
  transfers.GATHER: (transfers.GATHER,),
  transfers.PERMUTE: (transfers.PERMUTE,),
}


class _Row:
  """Collectives of one sort: planned, and found so far."""

  def __init__(self, want: transfers.Transfer):
    """Starts with none found."""
    self.want, self.times, self.bytes = want, 0, 0

  @property
  def lacking(self) -> int:
    """How many more there must be."""
    return max((self.want.least or 0) - self.times, 0)

  def take(self, one: hlo.Collective, most: int | None) -> hlo.Collective:
    """Counts a collective, up to `most` in all; returns what is left of it."""
    taken = max(min(one.times, (most or 0) - self.times), 0)
    self.times += taken
    self.bytes += taken * one.bytes
    return one._replace(times=one.times - taken)


def _inside(pairs, size) -> set[tuple[int, int]]:
  """The pairs inside of slices of some size, by numbers in the slice: all
  slices have one program, which sends to others in another way."""
  return {(i % size, j % size) for i, j in pairs if i // size == j // size}


def _fits(want, one, kind, known, slack) -> bool:
  """Whether a collective may be one of `kind` that is planned."""
  if want.kind != kind:
    return False
  if kind == transfers.PERMUTE:
    same = set(one.groups) == set(want.pairs)
  else:
    same = known.get(frozenset(map(frozenset, one.groups))) == want.axes
  most = want.elements * (1 + slack)
  size = want.elements <= one.elements <= most
  size |= one.elements * want.parts == want.elements
  return same and size and hlo.itemsize(one.dtype) <= want.itemsize


def traffic(compiled: Compiled, slices: int = 1) -> Matches:
  """Matches the collectives of a program with those of its plan; of several
  slices those of permutations, and what is sent between slices beside them."""
  program, mesh = compiled.program, compiled.job.mesh
  known, planned = _groups(mesh), compiled.job.plan.transfers or ()
  if slices > 1:
    size = mesh.size // slices
    planned = [
      one._replace(pairs=tuple(_inside(one.pairs, size))) for one in planned
    ]
  wanted = transfers.add_up(one for one in planned if one.elements > 1)
  rows = [_Row(want) for want in wanted]

  def take(one, kind, limit, slack=0.0):
    for row in rows:
      if one.times and _fits(row.want, one, kind, known, slack):
        one = row.take(one, getattr(row.want, limit))
    return one

  # First those whose kind is the plan's, and what the plan must have.
  sizes = {want.elements for want in wanted}
  waiting = [
    one
    for one in program.collectives
    if one.elements > 1 and not (one.kind == hlo.SEND and one.elements in sizes)
  ]
  for limit, rank in itertools.product(("least", "times"), range(3)):
    for number, one in enumerate(waiting):
      kinds = _SERVES.get(one.kind, ())
      if rank < len(kinds):
        waiting[number] = take(one, kinds[rank], limit)
  waiting = [one for one in waiting if one.times]
  others = [take(one, transfers.SCATTER, "times", _PADDING) for one in waiting]
  padded = [one.times for one in others] != [one.times for one in waiting]
  others = [
    one
    for one in others
    if one.times and not (padded and one.kind == transfers.PERMUTE)
  ]
  numbers = 2 * len(program.arguments)  # single ones: a norm, whether finite
  others = _take_flat(rows, others, known, numbers)
  return Matches(
    [(row.want, row.times, row.bytes) for row in rows],
    others,
    [row.want._replace(times=row.lacking) for row in rows if row.lacking],
  )


def _take_flat(rows, others, known, numbers) -> list[hlo.Collective]:
  """Takes arrays into which XLA for GPUs wrote several, and up to `numbers`
  single ones; returns the others."""
  for axes in known.values():
    flat = [
      one
      for one in others
      if one.kind == transfers.REDUCE
      and known.get(frozenset(map(frozenset, one.groups))) == axes
    ]
    lacking = [row for row in rows if row.want.axes == axes and row.lacking]
    total = sum(one.elements * one.times for one in flat)
    wanted = sum(row.lacking * row.want.elements for row in lacking)
    if not wanted <= total <= wanted + numbers:
      continue
    others = [one for one in others if one not in flat]
    for row in lacking:
      row.bytes += row.lacking * row.want.elements * row.want.itemsize
      row.times += row.lacking
  return others


def crossing(program: hlo.HloProgram) -> list[hlo.Collective]:
  """Returns what is sent between slices: collectives are inside of one, as all
  slices run the same program, and the compiler sends to others by host."""
  return [one for one in program.collectives if one.kind == hlo.SEND]


def _near(what, found, planned, share) -> list[str]:
  if planned is None or abs(found - planned) <= share * planned:
    return []
  return [
    f"{what}: {found:.4g} in the program, {planned:.4g} by the plan"
    f" ({found / max(planned, 1) - 1:+.1%}; {share:.0%} are allowed)"
  ]


def compare(compiled: Compiled, sent: Matches) -> list[str]:
  """Returns where a program, which sends what `traffic` has found, differs from
  its plan, a line each; none if it is as planned."""
  job, program = compiled.job, compiled.program
  arguments, results = compiled.shapes
  table = len(program.results)
  tables = [0, 8 * table, *(-(-4 * table // to) * to for to in _TABLES)]
  out = _compare_arrays(
    *("arguments", arguments, program.arguments, compiled.arguments, [0])
  )
  out += _compare_arrays(
    *("results", results, program.results, compiled.results, tables)
  )
  plan = job.plan
  out += _near("flops of products", program.flops, plan.flops, FLOPS)
  if (plan.temporary or 0) >= _LEAST:
    temporary = compiled.temporary
    out += _near("temporary bytes", temporary, plan.temporary, TEMPORARY)
  for one in sent.others if plan.transfers is not None else ():
    out.append(
      f"not in the plan: {one.kind} of {one.dtype}[{one.elements:,}]"
      f" {one.times} times, in {len(one.groups)} groups {one.groups[:2]}"
    )
  for want in sent.missing:
    out.append(
      f"not in the program: {want.kind} along {'+'.join(sorted(want.axes))} of"
      f" {want.elements:,} numbers {want.times} times ({want.what})"
    )
  if not plan.crosses:
    for one in crossing(program):
      out.append(f"{one.kind} of {one.elements:,} numbers between slices")
  return out


def hidden_bytes(program: hlo.HloProgram) -> tuple[int, int]:
  """Returns the bytes of all collectives of a step, and of those that are sent
  while the device computes (an asynchronous pair of start and end)."""
  sizes = [
    (one.bytes * one.times, one.asynchronous) for one in program.collectives
  ]
  return sum(size for size, _ in sizes), sum(size for size, on in sizes if on)


def describe(compiled: Compiled, target: Target, sent: Matches) -> str:
  """Returns a report of a program: its memory, operations and collectives (as
  of `traffic`), beside the plan's."""
  job, program, plan = compiled.job, compiled.program, compiled.job.plan
  mib, unknown = 2**20, "-"
  logical = sum(array.bytes for array in program.arguments)
  peak, has = compiled.peak / memory.GB, target.memory / memory.GB
  total, hidden = hidden_bytes(program)
  heading = (
    f"{job.name}: {meshes.text(job.mesh.shape)} on {target.name}\n"
    f"{'fits' if peak <= has else 'does not fit'}: {peak:.4g} of {has:.4g} GB"
    f" of a device; {total / mib:,.1f} MiB sent in a step, of which"
    f" {hidden / mib:,.1f} while computing"
  )

  def planned(value, unit):
    return unknown if value is None else f"{value / unit:,.2f}"

  shards = sum(
    math.prod(shape) * hlo.itemsize(dtype) * count
    for (dtype, shape), count in _parts(compiled.shapes[0]).items()
  )
  rows = [
    [name, f"{value / unit:,.2f}", planned(wanted, unit)]
    for name, value, wanted, unit in (
      ("arguments, MiB", logical, shards, mib),
      ("arguments in their layouts, MiB", compiled.arguments, None, mib),
      ("temporary, MiB", compiled.temporary, plan.temporary, mib),
      ("products, GFLOP", program.flops, plan.flops, 1e9),
    )
  ]
  for want, times, size in sent.rows:
    name = f"{want.kind} {'+'.join(sorted(want.axes))}, {want.elements:,}"
    name += f" {want.what}" if want.what else ""
    often = "" if want.least == want.times else f"{want.least} to "
    numbers = f"{size / mib:,.2f}", f"{want.bytes / mib:,.2f}", f"{times}"
    rows.append([f"{name}, MiB", *numbers, f"{often}{want.times}"])
  rows = [row + [""] * (5 - len(row)) for row in rows]
  head = ["of a device", "program", "plan", "times", "planned"]
  return f"{heading}\n{text_table.format_table(head, rows)}"
