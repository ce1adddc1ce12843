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

XLA may change collectives, and `compare` allows these changes:

  - several collectives become one, of several arrays or of one flat array;
  - a reduce-scatter, or a gather, becomes an all-reduce (of small arrays);
  - a reduce-scatter pads its array by less than an eighth, and a permutation
    shifts the parts;
  - numbers are sent in fewer bytes, where only a product in bfloat16 reads
    them;
  - pieces that are added up are reduced once;
  - an array is scattered along one axis before it is added up along another.

Single numbers (norms, the loss) are not compared. Begin with `compile_program`,
then `traffic` and `compare`.
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
_PADDING = 1 / 8  # largest part by which a reduce-scatter may pad its array
_TYPES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}  # JAX -> HLO
_TABLES = 32, 512  # bytes to which TPUs round the table of a tuple's arrays


class ProgramPlan(NamedTuple):
  """The planner's numbers of a program, for one device; None: not planned."""

  transfers: Sequence[transfers.Transfer] | None
  flops: float | None = None  # operations of matrix products
  temporary: float | None = None  # temporary bytes
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
  static: tuple[Any, ...] = ()  # static arguments, which come first


class Compiled(NamedTuple):
  """A compiled program, with XLA's numbers of a device's memory, in bytes."""

  job: Compilation
  program: hlo.HloProgram
  arguments: int
  results: int
  temporary: int
  reused: int  # bytes of results that are written over arguments
  # Shapes of a device's arguments and results, by their shardings.
  shapes: tuple[list[Any], list[Any]]

  @property
  def peak(self) -> int:
    """Bytes of a device while the program runs."""
    return self.arguments + self.results - self.reused + self.temporary


def compile_program(job: Compilation, options: dict[str, Any]) -> Compiled:
  """Lowers and compiles a program, without running it; `options` are the
  compiler's. ValueError if the compiler refuses it, as a TPU's does one that
  needs more memory than there is."""
  # [1] Lower and compile, for the devices of the arguments' shardings.
  lowered = job.function.lower(*job.static, *job.arguments)
  try:
    compiled = lowered.compile(compiler_options=options or None)
  except jax.errors.JaxRuntimeError as error:
    line = " ".join(str(error).split())[:300]
    raise ValueError(f"{job.name} cannot be compiled: {line}") from error
  # [2] Shapes of the results and of the arguments, with the shardings that the
  # compiler chose.
  stats = compiled.memory_analysis()
  shapes = jax.tree.map(
    lambda info, sharding: jax.ShapeDtypeStruct(
      info.shape, info.dtype, sharding=sharding
    ),
    lowered.out_info,
    compiled.output_shardings,
  )
  leaves = jax.tree.leaves(tuple(job.arguments))
  tree: Any = jax.tree.structure(tuple(job.arguments))
  # None for an argument that no result needs, which JAX left out.
  shardings = tree.flatten_up_to(compiled.input_shardings[0])
  pairs = zip(leaves, shardings, strict=True)
  used = [leaf for leaf, sharding in pairs if sharding is not None]
  return Compiled(
    job,
    hlo.read(compiled.as_text()),
    *(stats.argument_size_in_bytes, stats.output_size_in_bytes),
    *(stats.temp_size_in_bytes, stats.alias_size_in_bytes),
    (used, jax.tree.leaves(shapes)),
  )


def _dtype(dtype: Any) -> str:
  """The name of a dtype in HLO."""
  name = str(dtype)
  if name == "bool":
    return "pred"
  kind = name.rstrip("0123456789")
  return _TYPES.get(kind, kind) + name[len(kind) :]


_ArrayCounts = collections.Counter[tuple[str, tuple[int, ...]]]


def _parts(leaves: Iterable[Any]) -> _ArrayCounts:
  """Counts (dtype, shape) of a device's part of each array, keys of
  `jax.random` left out."""
  return collections.Counter(
    (_dtype(leaf.dtype), tuple(leaf.sharding.shard_shape(leaf.shape)))
    for leaf in leaves
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  )


def _compare_arrays(
  what: str,
  leaves: Iterable[Any],
  program_arrays: Sequence[hlo.Array],
  xla_bytes: int,
  tables: Sequence[int],
) -> list[str]:
  """Returns differences between arrays by shardings, those of the program, and
  the bytes that XLA reports, with a tuple's table of one of some sizes."""
  planned = _parts(leaves)
  actual = _ArrayCounts((a.dtype, a.shape) for a in program_arrays)
  # A key of jax.random is uint32[2] in the program, and not in `planned`.
  keys = _ArrayCounts({("u32", (2,)): actual[("u32", (2,))]})
  lines = []
  for name, rest in (
    ("the program lacks", planned - actual),
    ("the plan lacks", actual - planned - keys),
  ):
    if rest:
      lines.append(f"{what}: {name} {dict(itertools.islice(rest.items(), 3))}")
  padded = sum(map(hlo.padded_bytes, program_arrays))
  if xla_bytes not in [padded + table for table in tables]:
    lines.append(
      f"{what}: {padded:,} bytes by their layouts, and XLA has {xla_bytes:,}"
    )
  return lines


_Groups = frozenset[frozenset[int]]  # groups of devices


def _axes_of_groups(mesh: Mesh) -> dict[_Groups, frozenset[str]]:
  """Returns groups of devices -> the axes of the mesh along which they lie."""
  grid = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
  names = [name for name, size in mesh.shape.items() if size > 1]
  axes_of = {}
  for count in range(1, len(names) + 1):
    for axes in itertools.combinations(names, count):
      # The axes last: each row is a group.
      indices = [list(mesh.shape).index(name) for name in axes]
      rows = np.moveaxis(grid, indices, range(-count, 0))
      rows = rows.reshape(-1, math.prod(mesh.shape[name] for name in axes))
      groups = frozenset(frozenset(row) for row in rows.tolist())
      axes_of[groups] = frozenset(axes)
  return axes_of


class Matches(NamedTuple):
  """The collectives of a program beside those of its plan."""

  rows: list[tuple[transfers.Transfer, int, int]]  # planned, times, bytes sent
  unplanned: list[hlo.Collective]  # collectives that are not in the plan
  missing: list[transfers.Transfer]  # planned ones that the program lacks


_SERVES = {  # kind in the program -> kinds of the plan, the likeliest first
  transfers.REDUCE: (transfers.REDUCE, transfers.SCATTER, transfers.GATHER),
  transfers.SCATTER: (transfers.SCATTER,),
  transfers.GATHER: (transfers.GATHER,),
  transfers.PERMUTE: (transfers.PERMUTE,),
}


class _Row:
  """Collectives of one sort: planned, and matched so far."""

  def __init__(self, planned: transfers.Transfer):
    """Starts with none matched."""
    self.planned, self.times, self.bytes = planned, 0, 0

  @property
  def lacking(self) -> int:
    """The number of required collectives that were not matched yet."""
    return max((self.planned.least or 0) - self.times, 0)

  def take(
    self, collective: hlo.Collective, most: int | None
  ) -> hlo.Collective:
    """Counts a collective, up to `most` in all; returns its other calls."""
    count = max(min(collective.times, (most or 0) - self.times), 0)
    self.times += count
    self.bytes += count * collective.bytes
    return collective._replace(times=collective.times - count)


def _inside(
  pairs: Iterable[tuple[int, int]], size: int
) -> set[tuple[int, int]]:
  """Returns the pairs inside slices of `size` devices, numbered within a slice.
  All slices run one program, which sends to other slices in another way."""
  return {(i % size, j % size) for i, j in pairs if i // size == j // size}


def _fits(
  planned: transfers.Transfer,
  collective: hlo.Collective,
  kind: str,
  axes_of: dict[_Groups, frozenset[str]],
  slack: float,
) -> bool:
  """Whether a collective may be one of `kind` that is planned. `slack` is the
  part of its elements by which it may be padded."""
  if planned.kind != kind:
    return False
  if kind == transfers.PERMUTE:
    same_devices = set(collective.groups) == set(planned.pairs)
  else:
    groups = frozenset(map(frozenset, collective.groups))
    same_devices = axes_of.get(groups) == planned.axes
  most = planned.elements * (1 + slack)
  same_size = planned.elements <= collective.elements <= most
  # An array that was scattered along another axis before it was added up.
  same_size |= collective.elements * planned.parts == planned.elements
  narrow = hlo.itemsize(collective.dtype) <= planned.itemsize
  return same_devices and same_size and narrow


def traffic(compiled: Compiled, slices: int = 1) -> Matches:
  """Matches the collectives of a program with those of its plan. With several
  slices, planned permutations have only the pairs inside a slice, and sends to
  other slices, of a planned size, are left out."""
  program, mesh = compiled.program, compiled.job.mesh
  axes_of = _axes_of_groups(mesh)
  # [1] A row for each sort of collective that the plan has.
  planned: Sequence[transfers.Transfer] = compiled.job.plan.transfers or ()
  if slices > 1:
    size = mesh.size // slices
    planned = [
      transfer._replace(pairs=tuple(_inside(transfer.pairs, size)))
      for transfer in planned
    ]
  rows = [
    _Row(transfer)
    for transfer in transfers.add_up(x for x in planned if x.elements > 1)
  ]

  def take(collective, kind, limit, slack=0.0):
    """Counts a collective in rows of a kind, up to their least or times."""
    for row in rows:
      if collective.times and _fits(
        row.planned, collective, kind, axes_of, slack
      ):
        collective = row.take(collective, getattr(row.planned, limit))
    return collective

  # [2] Match. The plan's least comes first, and collectives of the plan's own
  # kind; then its times, and kinds that may serve for another.
  sizes = {row.planned.elements for row in rows}
  unmatched = [
    x
    for x in program.collectives
    if x.elements > 1 and not (x.kind == hlo.SEND and x.elements in sizes)
  ]
  for limit, rank in itertools.product(("least", "times"), range(3)):
    for number, collective in enumerate(unmatched):
      kinds = _SERVES.get(collective.kind, ())
      if rank < len(kinds):
        unmatched[number] = take(collective, kinds[rank], limit)
  unmatched = [x for x in unmatched if x.times]
  # [3] Padded reduce-scatters; if there are any, permutations are their shifts.
  unplanned = [
    take(x, transfers.SCATTER, "times", _PADDING) for x in unmatched
  ]
  padded = [x.times for x in unplanned] != [x.times for x in unmatched]
  unplanned = [
    x
    for x in unplanned
    if x.times and not (padded and x.kind == transfers.PERMUTE)
  ]
  # [4] Arrays that hold several others.
  numbers = 2 * len(program.arguments)  # single ones: a norm, whether finite
  unplanned = _take_flat(rows, unplanned, axes_of, numbers)
  return Matches(
    [(row.planned, row.times, row.bytes) for row in rows],
    unplanned,
    [row.planned._replace(times=row.lacking) for row in rows if row.lacking],
  )


def _take_flat(
  rows: list[_Row],
  unplanned: list[hlo.Collective],
  axes_of: dict[_Groups, frozenset[str]],
  numbers: int,
) -> list[hlo.Collective]:
  """Takes arrays into which XLA for GPUs wrote several, and up to `numbers`
  single ones; returns the collectives that are left."""
  for axes in axes_of.values():
    flat = [
      x
      for x in unplanned
      if x.kind == transfers.REDUCE
      and axes_of.get(frozenset(map(frozenset, x.groups))) == axes
    ]
    lacking = [row for row in rows if row.planned.axes == axes and row.lacking]
    # Nothing distinguishes the arrays, so only their total size is compared.
    total = sum(x.elements * x.times for x in flat)
    expected = sum(row.lacking * row.planned.elements for row in lacking)
    if not expected <= total <= expected + numbers:
      continue
    unplanned = [x for x in unplanned if x not in flat]
    for row in lacking:
      row.bytes += row.lacking * row.planned.elements * row.planned.itemsize
      row.times += row.lacking
  return unplanned


def crossing(program: hlo.HloProgram) -> list[hlo.Collective]:
  """Returns the transfers between slices: collectives are inside of one, as all
  slices run the same program, and the compiler sends to others by host."""
  return [one for one in program.collectives if one.kind == hlo.SEND]


def _compare_numbers(
  what: str, actual: float, planned: float | None, tolerance: float
) -> list[str]:
  """Returns a line if a number differs from the plan's by more than a part."""
  if planned is None or abs(actual - planned) <= tolerance * planned:
    return []
  return [
    f"{what}: {actual:.4g} in the program, {planned:.4g} by the plan"
    f" ({actual / max(planned, 1) - 1:+.1%}; {tolerance:.0%} are allowed)"
  ]


def compare(compiled: Compiled, sent: Matches) -> list[str]:
  """Returns where a program, which sends what `traffic` has found, differs from
  its plan, a line each; none if it is as planned."""
  job, program = compiled.job, compiled.program
  arguments, results = compiled.shapes
  # Results are a tuple, with a table of pointers: of 8 bytes each, or on TPUs
  # of 4 bytes, rounded up; none for a single result.
  count = len(program.results)
  tables = [0, 8 * count, *(-(-4 * count // unit) * unit for unit in _TABLES)]
  lines = _compare_arrays(
    *("arguments", arguments, program.arguments, compiled.arguments, [0])
  )
  lines += _compare_arrays(
    *("results", results, program.results, compiled.results, tables)
  )
  plan = job.plan
  products = "flops of products"
  lines += _compare_numbers(products, program.flops, plan.flops, FLOPS)
  if (plan.temporary or 0) >= _LEAST:
    lines += _compare_numbers(
      *("temporary bytes", compiled.temporary, plan.temporary, TEMPORARY)
    )
  for x in sent.unplanned if plan.transfers is not None else ():
    lines.append(
      f"not in the plan: {x.kind} of {x.dtype}[{x.elements:,}]"
      f" {x.times} times, in {len(x.groups)} groups {x.groups[:2]}"
    )
  for transfer in sent.missing:
    lines.append(
      f"not in the program: {transfer.kind} along"
      f" {'+'.join(sorted(transfer.axes))} of {transfer.elements:,} numbers"
      f" {transfer.times} times ({transfer.label})"
    )
  if not plan.crosses:
    for x in crossing(program):
      lines.append(f"{x.kind} of {x.elements:,} numbers between slices")
  return lines


def hidden_bytes(program: hlo.HloProgram) -> tuple[int, int]:
  """Returns the bytes of all collectives of a step, and of those that are sent
  while the device computes (an asynchronous pair of start and end)."""
  sizes = [(x.bytes * x.times, x.asynchronous) for x in program.collectives]
  hidden = sum(size for size, asynchronous in sizes if asynchronous)
  return sum(size for size, _ in sizes), hidden


def describe(compiled: Compiled, target: Target, sent: Matches) -> str:
  """Returns a report of a program: its memory, operations and collectives (as
  of `traffic`), beside the plan's."""
  job, program, plan = compiled.job, compiled.program, compiled.job.plan
  mib, unknown = 2**20, "-"
  logical = sum(array.bytes for array in program.arguments)
  peak, limit = compiled.peak / memory.GB, target.memory / memory.GB
  total, hidden = hidden_bytes(program)
  heading = (
    f"{job.name}: {meshes.text(job.mesh.shape)} on {target.name}\n"
    f"{'fits' if peak <= limit else 'does not fit'}: {peak:.4g} of"
    f" {limit:.4g} GB of a device; {total / mib:,.1f} MiB sent in a step, of"
    f" which {hidden / mib:,.1f} while computing"
  )

  def cell(value, unit):
    return unknown if value is None else f"{value / unit:,.2f}"

  # The plan's arguments: what the shardings divide, without padding.
  shards = sum(
    math.prod(shape) * hlo.itemsize(dtype) * count
    for (dtype, shape), count in _parts(compiled.shapes[0]).items()
  )
  rows = [
    [name, cell(actual, unit), cell(planned, unit)]
    for name, actual, planned, unit in (
      ("arguments, MiB", logical, shards, mib),
      ("arguments in their layouts, MiB", compiled.arguments, None, mib),
      ("temporary, MiB", compiled.temporary, plan.temporary, mib),
      ("products, GFLOP", program.flops, plan.flops, 1e9),
    )
  ]
  for x, times, size in sent.rows:
    name = f"{x.kind} {'+'.join(sorted(x.axes))}, {x.elements:,}"
    name += f" {x.label}" if x.label else ""
    least = "" if x.least == x.times else f"{x.least} to "
    cells = cell(size, mib), cell(x.bytes, mib), f"{times}"
    rows.append([f"{name}, MiB", *cells, f"{least}{x.times}"])
  # Rows without collectives have no numbers of calls.
  rows = [row + [""] * (5 - len(row)) for row in rows]
  head = ["of a device", "program", "plan", "times", "planned"]
  return f"{heading}\n{text_table.format_table(head, rows)}"
