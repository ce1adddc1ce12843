"""Reads compiled programs: XLA's optimised HLO, as text.

A program has computations, and a computation is a list of instructions. The
reader counts how often a step runs each computation: the body of a loop runs
once for each iteration. The reader returns the collectives with their devices,
elements and number of runs, and the arrays that enter and leave the program.

The TPU compiler divides an asynchronous collective over several fusions, which
name the same collective: the first fusion (AsyncCollectiveStart) counts, the
other fusions do not. XLA also combines collectives of the same devices: a
combined collective counts as one collective for each array.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

KINDS = (
  *("all-reduce", "reduce-scatter", "all-gather", "all-to-all"),
  *("collective-permute", "collective-broadcast", "ragged-all-to-all"),
)
SEND = "send"  # to another slice
# Groups of a collective over all devices.
ALL: tuple[tuple[int, ...], ...] = ()

_BYTES = {"pred": 1, "token": 0}  # dtypes without a number in their name
# f32[8,128]{1,0:T(8,128)}: dtype, shape, layout.
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\](\{[^{}]*\})?")
# %name = f32[8]{0} add(%a, %b), ...
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
# ENTRY %main (a: f32[8]) -> f32[8] {
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
# Computations that an instruction calls: one, or a list.
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')  # of a while
# A collective; XLA writes an asynchronous one as a pair, -start and -done.
_OPERATION = re.compile(rf" ({'|'.join(KINDS)}|{SEND})(-start)?\(")


class Array(NamedTuple):
  """An array of a program, on one device."""

  dtype: str  # f32, bf16, s32, ...
  shape: tuple[int, ...]
  layout: str = ""  # {minor to major: tiles}

  @property
  def elements(self) -> int:
    """The number of elements."""
    return math.prod(self.shape)

  @property
  def bytes(self) -> int:
    """Bytes without padding."""
    return self.elements * itemsize(self.dtype)


class Collective(NamedTuple):
  """One collective of one array, in one instruction."""

  kind: str  # one of KINDS
  groups: tuple[tuple[int, ...], ...]  # devices; for a permutation, pairs
  dtype: str
  elements: int  # elements of the whole array: before a scatter, after a gather
  times: int = 1  # number of calls in a step
  asynchronous: bool = False  # whether the program computes meanwhile

  @property
  def bytes(self) -> int:
    """Bytes of the whole array in one call."""
    return self.elements * itemsize(self.dtype)


class HloProgram(NamedTuple):
  """A compiled program, as read from its text."""

  arguments: list[Array]
  results: list[Array]
  collectives: list[Collective]
  flops: int  # multiplications and additions of matrix products in a step


def itemsize(dtype: str) -> int:
  """Returns the bytes of an element.

  Example:
    >>> itemsize("bf16"), itemsize("f8e4m3fn"), itemsize("pred")
    (2, 1, 1)
  """
  if dtype in _BYTES:
    return _BYTES[dtype]
  return max(int(re.findall(r"\d+", dtype)[0]) // 8, 1)


def arrays(text: str) -> list[Array]:
  """Returns the arrays of a type, one or a tuple.

  Example:
    >>> arrays("(f32[8,128]{1,0:T(8,128)}, s32[])")[0].bytes
    4096
  """
  # XLA numbers the elements of long tuples in comments: /*index=5*/.
  matches = _ARRAY.findall(re.sub(r"/\*.*?\*/", "", text))
  return [
    Array(dtype, tuple(_numbers(dims)), layout)
    for dtype, dims, layout in matches
  ]


def padded_bytes(array: Array) -> int:
  """Returns the bytes of an array in its layout. A tile T(a,b) pads the minor
  dimensions to multiples; a second tile (c,1) pads the rows of a tile.

  Example:
    >>> padded_bytes(arrays("f32[4,129]{1,0:T(4,128)}")[0])
    4096
  """
  order, _, tiling = array.layout.strip("{}").partition(":")
  dims = [array.shape[i] for i in _numbers(order)][::-1]  # major to minor
  # S(...) is the memory space.
  tiles = re.findall(r"\(([0-9,*]+)\)", tiling.split("S(")[0])
  if tiling.startswith("T") and tiles:
    tile = _numbers(tiles[0])
    # An array with fewer dimensions than the tile is padded in front.
    dims = [1] * (len(tile) - len(dims)) + dims
    for i, n in enumerate(reversed(tile), 1):
      dims[-i] = -(-dims[-i] // n) * n
  return math.prod(dims) * itemsize(array.dtype)


def _iota(shape: list[int], order: str | None) -> np.ndarray:
  """Returns the numbers from 0 in a grid, with its axes transposed by `order`.
  """
  grid = np.arange(math.prod(shape)).reshape(shape)
  return grid.transpose(_numbers(order)) if order else grid


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]


def _mesh_groups(
  sizes: str, ids: tuple[str, str | None] | None, axes: str
) -> np.ndarray:
  """Returns the groups along some axes of a mesh, int[groups, devices of a
  group]. XLA writes a part of an axis as (before)size."""
  shape = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", sizes)}
  grid = np.arange(math.prod(shape.values()))
  if ids is not None:
    grid = _iota(_numbers(ids[0]), ids[1]).ravel()
  parts = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
  # Cut each axis into parts, outermost first: `dims` are the lengths of all
  # parts, and `along` are the indices of the parts along which groups lie.
  dims, group_axes = [], []
  for name, length in shape.items():
    cuts = [(int(b or 1), int(n or length)) for a, b, n in parts if a == name]
    covered = 1
    for before, size in sorted(cuts):
      dims += [before // covered, size]
      group_axes.append(len(dims) - 1)
      covered = before * size
    dims.append(length // covered)
  grid = np.moveaxis(grid.reshape(dims), group_axes, range(-len(group_axes), 0))
  return grid.reshape(-1, math.prod(dims[i] for i in group_axes))


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
  """Returns the devices of a collective. XLA writes them in one of three forms:
  {{0,1},{2,3}}, [2,2]<=[4]T(1,0), or mesh['a'=2,'b'=2], device_ids=([4]) {'b'}.
  """
  match = re.search(r"(?:replica_groups|source_target_pairs)=", line)
  if match is None:
    return ALL
  text = line[match.end() :]
  if text.startswith("{"):  # a list of groups, or of pairs
    inner = re.match(r"\{((?:\{[0-9,]*\},?)*)\}", text)
    rows = re.findall(r"\{([0-9,]+)\}", inner[1] if inner else "")
    return tuple(tuple(_numbers(row)) for row in rows)
  iota = re.match(r"\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", text)
  ids = r"(?:, device_ids=\(\[([0-9,]+)\](?:T\(([0-9,]+)\))?\))?"
  mesh = re.match(rf"mesh\[([^\]]*)\]{ids} \{{([^}}]*)\}}", text)
  if iota is not None:
    grid = _iota(_numbers(iota[2]), iota[3]).reshape(_numbers(iota[1]))
  elif mesh is not None:
    device_ids = (mesh[2], mesh[3]) if mesh[2] else None
    grid = _mesh_groups(mesh[1], device_ids, mesh[4])
  else:
    raise ValueError(f"cannot read the devices of a collective: {text[:80]!r}")
  return tuple(map(tuple, grid.tolist()))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns the lines of each computation by its name, and the name of the
  entry computation."""
  bodies: dict[str, list[str]] = {}
  name, entry = "", ""
  for line in text.splitlines():
    header = _HEADER.match(line)
    if header is not None:
      name = header[2]
      entry = name if header[1] else entry
      bodies[name] = []
    elif name and line.startswith(" "):
      bodies[name].append(line)
  return bodies, entry


def _count_iterations(bodies: dict[str, list[str]], line: str) -> int:
  """Returns the number of iterations of a loop; 1 if the instruction is no
  loop. If XLA does not write the number, it is the end in the loop's condition:
  loops of JAX count from 0 by 1."""
  condition = re.search(r" while\(.*condition=%?([\w.\-]+)", line)
  if condition is None:
    return 1
  trips = _TRIPS.search(line)
  if trips is not None:
    return int(trips[1])
  text = "\n".join(bodies[condition[1]])
  ends = re.findall(r"s32\[\]\S* constant\((\d+)\)", text)
  return max(map(int, ends), default=1)


def _count_runs(bodies: dict[str, list[str]], entry: str) -> dict[str, int]:
  """Returns how often a step runs each computation."""
  # Callees stand before their callers, and the entry last.
  counts = dict.fromkeys(bodies, 0) | {entry: 1}
  for name in reversed(bodies):
    for line in bodies[name]:
      called = _CALLED.findall(line)
      for listed in _BRANCHES.findall(line):
        called += [part.strip().lstrip("%") for part in listed.split(",")]
      times = counts[name] * _count_iterations(bodies, line)
      # The runs by several callers add up.
      for callee in called:
        if callee in counts:
          counts[callee] += times
  return counts


def _count_taps(window: str, size: int, n_outputs: int, i: int) -> int:
  """Returns the number of products along spatial dimension i, of an input of
  `size` numbers and `n_outputs` outputs. Padding and the holes of a dilated
  input make no products."""

  def field(name, default):
    # "size=3x3 stride=2x2 pad=1_1x1_1": dimension i is the i-th part.
    match = re.search(rf"\b{name}=(\S+)", window)
    return match[1].split("x")[i] if match else default

  low = int(field("pad", "0_0").split("_")[0])
  stride, spacing = int(field("stride", "1")), int(field("rhs_dilate", "1"))
  dilation = int(field("lhs_dilate", "1"))
  # Positions in the dilated input that each output reads, [out, kernel].
  taps = np.arange(int(field("size", "1"))) * spacing - low
  positions = np.arange(n_outputs)[:, None] * stride + taps
  inside = (positions >= 0) & (positions <= (size - 1) * dilation)
  return int((inside & (positions % dilation == 0)).sum())


def _product_flops(line: str, types: dict[str, Array]) -> int:
  """Returns the multiplications and additions of a dot or a convolution; the
  TPU compiler writes a dot as a convolution."""
  operands = re.search(r" (dot|convolution)\(([^)]*)\)", line)
  if "__cublas$" in line:  # GPUs: a product by a library
    operands = re.search(r" (custom-call)\(([^)]*)\)", line)
  if operands is None:
    return 0
  # XLA prints an operand with or without its type; the name comes last.
  names = [part.split("%")[-1].strip() for part in operands[2].split(",")]
  (result,) = arrays(line[: operands.start()].split("=", 1)[1])[:1]
  left, right = (types[name] for name in names[:2])
  # A dot: each output sums over the contracted dimensions.
  if operands[1] != "convolution":
    summed = re.search(
      r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([0-9,\"]*)[}\]]", line
    )
    axes = _numbers(summed[1].replace('"', "")) if summed else []
    return 2 * result.elements * math.prod(left.shape[i] for i in axes)
  # A convolution, with labels such as b01f_01io->b01f: b and f are the batch
  # and features of the output, i the input features, digits spatial dimensions.
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
  window = re.search(r"window=\{([^}]*)\}", line)
  assert labels is not None
  count = 2 * math.prod(
    result.shape[labels[3].index(letter)] for letter in "bf"
  )
  count *= right.shape[labels[2].index("i")]
  for i in range(len(labels[1]) - 2):
    size = left.shape[labels[1].index(str(i))]
    n_outputs = result.shape[labels[3].index(str(i))]
    count *= _count_taps(window[1] if window else "", size, n_outputs, i)
  return count


def _flops(bodies: dict[str, list[str]], counts: dict[str, int]) -> int:
  """Returns the operations of all products in a step."""
  total = 0
  for name, lines in bodies.items():
    if not counts[name]:
      continue
    # The result of each instruction, for the operands of later ones.
    types: dict[str, Array] = {}
    for line in lines:
      match = _INSTRUCTION.match(line)
      results = arrays(match[2].split("(")[0]) if match else []
      if match and results:
        types[match[1]] = results[0]
    total += counts[name] * sum(_product_flops(line, types) for line in lines)
  return total


def _collectives(
  bodies: dict[str, list[str]], counts: dict[str, int]
) -> Iterator[Collective]:
  """Yields a Collective for each array of each collective that a step runs."""
  for name, lines in bodies.items():
    has_start = any("AsyncCollectiveStart" in line for line in lines)
    has_done = any("AsyncCollectiveDone" in line for line in lines)
    for line in lines:
      match = _INSTRUCTION.match(line)
      operation = match and _OPERATION.search(match[2])
      if not match or not operation or not counts[name]:
        continue
      fused = '"async_collective_fusion_config"' in line
      if has_done or (fused and not has_start):
        continue  # a later part of a collective that was counted
      kind, is_start = operation[1], bool(operation[2])
      # The type of the result, before the operation, lists its arrays.
      results = arrays(match[2][: operation.start()])
      if kind == SEND:  # (numbers, context, token)
        results = results[:1]
      if is_start and kind != "all-reduce":  # (operands, results, ...)
        results = [x for x in results if x.shape or x.dtype[0] != "u"]
        half = len(results) // 2
        results = results[half : 2 * half]
      groups = _groups(line)
      # A reduce-scatter's result is a part: `elements` counts the whole.
      scale = len(groups[0]) if kind == "reduce-scatter" and groups else 1
      for array in results:
        sizes = array.dtype, array.elements * scale
        is_asynchronous = is_start or has_start
        yield Collective(kind, groups, *sizes, counts[name], is_asynchronous)


def read(text: str) -> HloProgram:
  """Reads the text of a compiled program, `compiled.as_text()`.

  Raises ValueError for a text without an entry computation.
  """
  bodies, entry = _computations(text)
  head = re.search(r"entry_computation_layout=\{\((.*?)\)->(.*)", text)
  if not entry or head is None:
    raise ValueError("this text is no compiled program: it has no entry")
  arguments, result_text = arrays(head[1]), head[2]
  counts = _count_runs(bodies, entry)
  collectives = list(_collectives(bodies, counts))
  flops = _flops(bodies, counts)
  return HloProgram(arguments, _results(result_text), collectives, flops)


def _results(text: str) -> list[Array]:
  """Returns the arrays of the entry's result. The result's type ends at the
  first unmatched brace of the text."""
  depth = 0
  for end, letter in enumerate(text):
    depth += (letter in "{(") - (letter in "})")
    if depth < 0:
      return arrays(text[:end])
  return arrays(text)
