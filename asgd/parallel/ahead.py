"""Programs compiled ahead of time, and compared with the planner.

`compile_program` lowers and compiles a step from shapes alone, for devices that
this machine need not have, and reads the optimised program. `compare` lists the
differences between the program and the plan. There is none if:

  - arguments and results of a device are the arrays that the shardings give,
    and XLA's bytes are exactly those of these arrays with padded layouts;
  - matrix products: within 2 % of the planner's operations. `asgd.parallel.hlo`
    counts a loop's body once for each iteration. XLA's own count has a body
    only once, and includes other operations;
  - temporary bytes of a device's main memory: within 15 %, if they are 256 MiB
    or more (a TPU keeps smaller arrays in its vector memory);
  - collectives: each collective of the program is in the plan, and each
    collective of the plan is in the program.

XLA may change collectives, and `compare` allows these changes:

  - several collectives become one collective of several arrays, or of one flat
    array;
  - a reduce-scatter, or a gather, becomes an all-reduce (of small arrays);
  - a reduce-scatter pads its array by less than an eighth, and a permutation
    shifts the parts;
  - numbers are sent in fewer bytes, where only a product in bfloat16 reads
    them;
  - arrays that are added up later are added first, and reduced once;
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

FLOPS, TEMPORARY = 0.02, 0.15  # allowed errors of the plan, as parts of it
# Smaller temporary arrays are in a TPU's vector memory, and not compared.
_MIN_TEMPORARY = 2**28  # bytes
_MAX_PADDING = 1 / 8  # part of its array that a reduce-scatter may add to it
_TYPES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}  # JAX -> HLO
# TPUs round the bytes of the table of a tuple's arrays up to one of these.
_TABLE_UNITS = 32, 512


class ProgramPlan(NamedTuple):
  """The planner's numbers of a program, for one device. None stands for a
  number that the planner does not give."""

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
  # (global shapes of the arguments, those of the results), with shardings.
  shapes: tuple[list[Any], list[Any]]

  @property
  def peak(self) -> int:
    """Bytes of a device while the program runs."""
    return self.arguments + self.results - self.reused + self.temporary


def compile_program(job: Compilation, options: dict[str, Any]) -> Compiled:
  """Lowers and compiles a program, and does not run it; `options` are options
  of the compiler. Raises ValueError if the compiler refuses the program: the
  compiler for TPUs does so if the program needs more memory than a TPU has."""
  # [1] Lower and compile, for the devices of the arguments' shardings.
  lowered = job.function.lower(*job.static, *job.arguments)
  try:
    compiled = lowered.compile(compiler_options=options or None)
  except jax.errors.JaxRuntimeError as error:
    message = " ".join(str(error).split())[:300]
    raise ValueError(f"{job.name} cannot be compiled: {message}") from error
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
  # The sharding is None for an argument that no result needs: JAX left it out.
  shardings = tree.flatten_up_to(compiled.input_shardings[0])
  pairs = zip(leaves, shardings, strict=True)
  used_leaves = [leaf for leaf, sharding in pairs if sharding is not None]
  return Compiled(
    job,
    hlo.read(compiled.as_text()),
    *(stats.argument_size_in_bytes, stats.output_size_in_bytes),
    *(stats.temp_size_in_bytes, stats.alias_size_in_bytes),
    (used_leaves, jax.tree.leaves(shapes)),
  )


def _dtype(dtype: Any) -> str:
  """Returns the name of a dtype in HLO."""
  name = str(dtype)
  if name == "bool":
    return "pred"
  kind = name.rstrip("0123456789")
  return _TYPES.get(kind, kind) + name[len(kind) :]


_ArrayCounts = collections.Counter[tuple[str, tuple[int, ...]]]


def _count_shards(leaves: Iterable[Any]) -> _ArrayCounts:
  """Counts (dtype, shape) of a device's part of each array. Keys of
  `jax.random` are left out."""
  return collections.Counter(
    (_dtype(leaf.dtype), tuple(leaf.sharding.shard_shape(leaf.shape)))
    for leaf in leaves
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  )


def _compare_arrays(
  label: str,
  leaves: Iterable[Any],
  program_arrays: Sequence[hlo.Array],
  xla_bytes: int,
  tables: Sequence[int],
) -> list[str]:
  """Returns the differences between the arrays that shardings divide, the
  arrays of the program, and the bytes that XLA reports. XLA's bytes include a
  tuple's table, of one of the sizes `tables`."""
  planned = _count_shards(leaves)
  actual = _ArrayCounts((a.dtype, a.shape) for a in program_arrays)
  # A key of jax.random is uint32[2] in the program, and not in `planned`.
  keys = _ArrayCounts({("u32", (2,)): actual[("u32", (2,))]})
  lines = []
  for phrase, missing in (
    ("the program lacks", planned - actual),
    ("the plan lacks", actual - planned - keys),
  ):
    if missing:
      examples = dict(itertools.islice(missing.items(), 3))
      lines.append(f"{label}: {phrase} {examples}")
  padded = sum(map(hlo.padded_bytes, program_arrays))
  if xla_bytes not in [padded + table for table in tables]:
    lines.append(
      f"{label}: {padded:,} bytes by their layouts, and XLA has {xla_bytes:,}"
    )
  return lines


_Groups = frozenset[frozenset[int]]  # groups of devices


def _axes_of_groups(mesh: Mesh) -> dict[_Groups, frozenset[str]]:
  """Returns a dict from the groups of devices along some axes of the mesh to
  these axes."""
  grid = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
  names = [name for name, size in mesh.shape.items() if size > 1]
  axes_of = {}
  for count in range(1, len(names) + 1):
    for axes in itertools.combinations(names, count):
      # With these axes last, each row is a group.
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
  missing: list[transfers.Transfer]  # transfers that the program lacks


# Kind in the program -> kinds of the plan that it may be, the likeliest first.
_PLANNED_KINDS = {
  transfers.REDUCE: (transfers.REDUCE, transfers.SCATTER, transfers.GATHER),
  transfers.SCATTER: (transfers.SCATTER,),
  transfers.GATHER: (transfers.GATHER,),
  transfers.PERMUTE: (transfers.PERMUTE,),
}


class _Row:
  """A planned transfer, with the times and the bytes of the collectives that
  were matched with it so far."""

  def __init__(self, planned: transfers.Transfer):
    """Starts without a matched collective."""
    self.planned, self.times, self.bytes = planned, 0, 0

  @property
  def n_missing(self) -> int:
    """The number of required calls that were not matched yet."""
    return max((self.planned.least or 0) - self.times, 0)

  def match(
    self, collective: hlo.Collective, limit: int | None
  ) -> hlo.Collective:
    """Counts calls of a collective, up to `limit` calls in this row; returns
    the collective with the other calls."""
    count = max(min(collective.times, (limit or 0) - self.times), 0)
    self.times += count
    self.bytes += count * collective.bytes
    return collective._replace(times=collective.times - count)


def _pairs_inside(
  pairs: Iterable[tuple[int, int]], size: int
) -> set[tuple[int, int]]:
  """Returns the pairs inside slices of `size` devices, numbered within a slice.
  All slices run one program, which sends to other slices through the hosts."""
  return {(i % size, j % size) for i, j in pairs if i // size == j // size}


def _is_match(
  planned: transfers.Transfer,
  collective: hlo.Collective,
  kind: str,
  axes_of: dict[_Groups, frozenset[str]],
  slack: float,
) -> bool:
  """Returns whether the planned transfer has the kind `kind`, and a collective
  may be this transfer. `slack` is the part of the planned elements that the
  collective may add as padding."""
  if planned.kind != kind:
    return False
  if kind == transfers.PERMUTE:
    has_devices = set(collective.groups) == set(planned.pairs)
  else:
    groups = frozenset(map(frozenset, collective.groups))
    has_devices = axes_of.get(groups) == planned.axes
  max_elements = planned.elements * (1 + slack)
  has_size = planned.elements <= collective.elements <= max_elements
  # XLA may scatter the array along another axis before it is added up.
  has_size |= collective.elements * planned.parts == planned.elements
  is_narrow = hlo.itemsize(collective.dtype) <= planned.itemsize
  return has_devices and has_size and is_narrow


def traffic(compiled: Compiled, slices: int = 1) -> Matches:
  """Matches the collectives of a program with the transfers of its plan. With
  several slices, planned permutations have only the pairs inside a slice, and
  sends of a planned size to other slices are left out."""
  program, mesh = compiled.program, compiled.job.mesh
  axes_of = _axes_of_groups(mesh)
  # [1] A row for each sort of collective that the plan has.
  planned: Sequence[transfers.Transfer] = compiled.job.plan.transfers or ()
  if slices > 1:
    size = mesh.size // slices
    planned = [
      transfer._replace(pairs=tuple(_pairs_inside(transfer.pairs, size)))
      for transfer in planned
    ]
  rows = [
    _Row(transfer)
    for transfer in transfers.add_up(x for x in planned if x.elements > 1)
  ]

  def match(collective, kind, field, slack=0.0):
    """Matches calls of a collective with rows of a kind, up to the number in a
    field of each transfer; returns the collective with the other calls."""
    for row in rows:
      if collective.times and _is_match(
        row.planned, collective, kind, axes_of, slack
      ):
        collective = row.match(collective, getattr(row.planned, field))
    return collective

  # [2] Match: first up to the least number of calls, then up to the largest,
  # and each time first with transfers of the likeliest kind.
  sizes = {row.planned.elements for row in rows}
  unmatched = [
    x
    for x in program.collectives
    if x.elements > 1 and not (x.kind == hlo.SEND and x.elements in sizes)
  ]
  for field, rank in itertools.product(("least", "times"), range(3)):
    for number, collective in enumerate(unmatched):
      kinds = _PLANNED_KINDS.get(collective.kind, ())
      if rank < len(kinds):
        unmatched[number] = match(collective, kinds[rank], field)
  unmatched = [x for x in unmatched if x.times]
  # [3] Padded reduce-scatters. If there are any, permutations shift the parts.
  unplanned = [
    match(x, transfers.SCATTER, "times", _MAX_PADDING) for x in unmatched
  ]
  has_padded = [x.times for x in unplanned] != [x.times for x in unmatched]
  unplanned = [
    x
    for x in unplanned
    if x.times and not (has_padded and x.kind == transfers.PERMUTE)
  ]
  # [4] Flat arrays that hold several planned arrays, and single numbers such as
  # a norm or whether an array is finite.
  max_numbers = 2 * len(program.arguments)
  unplanned = _match_flat(rows, unplanned, axes_of, max_numbers)
  return Matches(
    [(row.planned, row.times, row.bytes) for row in rows],
    unplanned,
    [
      row.planned._replace(times=row.n_missing) for row in rows if row.n_missing
    ],
  )


def _match_flat(
  rows: list[_Row],
  unplanned: list[hlo.Collective],
  axes_of: dict[_Groups, frozenset[str]],
  max_numbers: int,
) -> list[hlo.Collective]:
  """Matches flat arrays, into which XLA for GPUs writes several arrays and up
  to `max_numbers` single numbers; returns the collectives that are left."""
  for axes in axes_of.values():
    flat = [
      x
      for x in unplanned
      if x.kind == transfers.REDUCE
      and axes_of.get(frozenset(map(frozenset, x.groups))) == axes
    ]
    open_rows = [
      row for row in rows if row.planned.axes == axes and row.n_missing
    ]
    # The parts of a flat array have no marks: compare only the total size.
    total = sum(x.elements * x.times for x in flat)
    expected = sum(row.n_missing * row.planned.elements for row in open_rows)
    if not expected <= total <= expected + max_numbers:
      continue
    unplanned = [x for x in unplanned if x not in flat]
    for row in open_rows:
      row.bytes += row.n_missing * row.planned.elements * row.planned.itemsize
      row.times += row.n_missing
  return unplanned


def crossing(program: hlo.HloProgram) -> list[hlo.Collective]:
  """Returns the transfers between slices. All slices run the same program: its
  collectives stay inside a slice, and it sends to other slices through the
  hosts."""
  return [x for x in program.collectives if x.kind == hlo.SEND]


def _compare_numbers(
  label: str, actual: float, planned: float | None, tolerance: float
) -> list[str]:
  """Returns a line if a number differs from the planned number by more than the
  part `tolerance`; no line if nothing is planned."""
  if planned is None or abs(actual - planned) <= tolerance * planned:
    return []
  return [
    f"{label}: {actual:.4g} in the program, {planned:.4g} by the plan"
    f" ({actual / max(planned, 1) - 1:+.1%}; {tolerance:.0%} are allowed)"
  ]


def compare(compiled: Compiled, matches: Matches) -> list[str]:
  """Returns a line for each difference between a program and its plan.
  `matches` is the result of `traffic`."""
  job, program = compiled.job, compiled.program
  arguments, results = compiled.shapes
  # Several results are a tuple, with a table of pointers of 8 bytes. On TPUs a
  # pointer has 4 bytes, and the table is rounded up.
  n_results = len(program.results)
  tables = [0, 8 * n_results]
  tables += (-(-4 * n_results // unit) * unit for unit in _TABLE_UNITS)
  lines = _compare_arrays(
    *("arguments", arguments, program.arguments, compiled.arguments, [0])
  )
  lines += _compare_arrays(
    *("results", results, program.results, compiled.results, tables)
  )
  plan = job.plan
  products = "flops of products"
  lines += _compare_numbers(products, program.flops, plan.flops, FLOPS)
  if (plan.temporary or 0) >= _MIN_TEMPORARY:
    lines += _compare_numbers(
      *("temporary bytes", compiled.temporary, plan.temporary, TEMPORARY)
    )
  for x in matches.unplanned if plan.transfers is not None else ():
    lines.append(
      f"not in the plan: {x.kind} of {x.dtype}[{x.elements:,}]"
      f" {x.times} times, in {len(x.groups)} groups {x.groups[:2]}"
    )
  for transfer in matches.missing:
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
  """Returns the bytes of all collectives of a step, and the bytes that are sent
  while the device computes (by an asynchronous pair of start and end)."""
  sizes = [(x.bytes * x.times, x.asynchronous) for x in program.collectives]
  hidden = sum(nbytes for nbytes, is_asynchronous in sizes if is_asynchronous)
  return sum(nbytes for nbytes, _ in sizes), hidden


def describe(compiled: Compiled, target: Target, matches: Matches) -> str:
  """Returns a report of a program beside its plan: memory, operations, and the
  collectives `matches`, the result of `traffic`."""
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

  # The plan's arguments: the arrays that the shardings divide, without padding.
  planned_bytes = sum(
    math.prod(shape) * hlo.itemsize(dtype) * count
    for (dtype, shape), count in _count_shards(compiled.shapes[0]).items()
  )
  rows = [
    [name, cell(actual, unit), cell(planned, unit)]
    for name, actual, planned, unit in (
      ("arguments, MiB", logical, planned_bytes, mib),
      ("arguments in their layouts, MiB", compiled.arguments, None, mib),
      ("temporary, MiB", compiled.temporary, plan.temporary, mib),
      ("products, GFLOP", program.flops, plan.flops, 1e9),
    )
  ]
  for x, times, size in matches.rows:
    name = f"{x.kind} {'+'.join(sorted(x.axes))}, {x.elements:,}"
    name += f" {x.label}" if x.label else ""
    least = "" if x.least == x.times else f"{x.least} to "
    cells = cell(size, mib), cell(x.bytes, mib), f"{times}"
    rows.append([f"{name}, MiB", *cells, f"{least}{x.times}"])
  # Rows without collectives have no numbers of calls.
  rows = [row + [""] * (5 - len(row)) for row in rows]
  head = ["of a device", "program", "plan", "times", "planned"]
  return f"{heading}\n{text_table.format_table(head, rows)}"
