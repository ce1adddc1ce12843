"""Reads compiled programs: XLA's optimised HLO, as text.

A program has computations, each a list of instructions. The reader counts how
often a step runs each computation (the body of a loop as often as XLA knows
that it turns), and returns the collectives with their devices, elements and
number of runs, and the arrays that enter and leave the program.

The TPU compiler divides an asynchronous collective over several fusions, that
name the same collective: the first (AsyncCollectiveStart) counts, the others do
not. XLA also combines collectives of the same devices: a combined one counts as
one for each array.
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
ALL: tuple[tuple[int, ...], ...] = ()  # groups of a collective of all devices

_BYTES = {"pred": 1, "token": 0}
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\](\{[^{}]*\})?")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
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

  kind: str  # of KINDS
  groups: tuple[tuple[int, ...], ...]  # of devices; pairs of a permutation
  dtype: str
  elements: int  # of the whole: before a scatter, after a gather
  times: int = 1  # in a step
  asynchronous: bool = False  # the program computes while it is sent

  @property
  def bytes(self) -> int:
    """Bytes of the whole array, each time."""
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
  found = _ARRAY.findall(re.sub(r"/\*.*?\*/", "", text))
  return [
    Array(dtype, tuple(int(n) for n in dims.split(",") if n), layout)
    for dtype, dims, layout in found
  ]


def padded_bytes(array: Array) -> int:
  """Returns the bytes of an array as its layout stores it: a tile T(a,b) pads
  the minor dimensions to multiples, a second tile (c,1) the rows of a tile.

  Example:
    >>> padded_bytes(arrays("f32[4,129]{1,0:T(4,128)}")[0])
    4096
  """
  order, _, rest = array.layout.strip("{}").partition(":")
  dims = [array.shape[int(i)] for i in order.split(",") if i][::-1]
  tiles = re.findall(r"\(([0-9,*]+)\)", rest.split("S(")[0])
  if rest.startswith("T") and tiles:
    tile = [int(n) for n in tiles[0].split(",")]
    dims = [1] * (len(tile) - len(dims)) + dims
    for i, n in enumerate(reversed(tile), 1):
      dims[-i] = -(-dims[-i] // n) * n
  return math.prod(dims) * itemsize(array.dtype)


def _iota(shape: list[int], order: str | None) -> np.ndarray:
  """Numbers from 0 in a grid, its axes put in another order."""
  grid = np.arange(math.prod(shape)).reshape(shape)
  return grid.transpose(_numbers(order)) if order else grid


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]


def _of_mesh(sizes: str, ids: tuple | None, axes: str) -> np.ndarray:
  """Groups along some axes of a mesh, or along parts of axes, (before)size."""
  shape = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", sizes)}
  grid = np.arange(math.prod(shape.values()))
  if ids is not None:
    grid = _iota(_numbers(ids[0]), ids[1]).ravel()
  split, along, names = [], [], list(shape)
  parts = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
  for name in names:
    left = shape[name]
    mine = [(int(b or 1), int(n or left)) for a, b, n in parts if a == name]
    done = 1
    for before, size in sorted(mine):
      split += [before // done, size]
      along.append(len(split) - 1)
      done = before * size
    split.append(left // done)
  grid = np.moveaxis(grid.reshape(split), along, range(-len(along), 0))
  return grid.reshape(-1, math.prod(split[i] for i in along))


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
  """The devices of a collective, in one of three forms: {{0,1},{2,3}},
  [2,2]<=[4]T(1,0), or mesh['a'=2,'b'=2], device_ids=([4]) {'b'}."""
  match = re.search(r"(?:replica_groups|source_target_pairs)=", line)
  if match is None:
    return ALL
  rest = line[match.end() :]
  if rest.startswith("{"):
    inner = re.match(r"\{((?:\{[0-9,]*\},?)*)\}", rest)
    rows = re.findall(r"\{([0-9,]+)\}", inner[1] if inner else "")
    return tuple(tuple(_numbers(row)) for row in rows)
  iota = re.match(r"\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", rest)
  ids = r"(?:, device_ids=\(\[([0-9,]+)\](?:T\(([0-9,]+)\))?\))?"
  of_mesh = re.match(rf"mesh\[([^\]]*)\]{ids} \{{([^}}]*)\}}", rest)
  if iota is not None:
    grid = _iota(_numbers(iota[2]), iota[3]).reshape(_numbers(iota[1]))
  elif of_mesh is not None:
    order = (of_mesh[2], of_mesh[3]) if of_mesh[2] else None
    grid = _of_mesh(of_mesh[1], order, of_mesh[4])
  else:
    raise ValueError(f"cannot read the devices of a collective: {rest[:80]!r}")
  return tuple(map(tuple, grid.tolist()))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """The lines of each computation by its name, and the name of the entry."""
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


def _turns(bodies, line) -> int:
  """How often a loop turns: as XLA knows, or the number that its condition
  compares with, as loops of JAX count from 0 by 1; 1 if it is no loop."""
  condition = re.search(r" while\(.*condition=%?([\w.\-]+)", line)
  if condition is None:
    return 1
  known = _TRIPS.search(line)
  if known is not None:
    return int(known[1])
  text = "\n".join(bodies[condition[1]])
  ends = re.findall(r"s32\[\]\S* constant\((\d+)\)", text)
  return max(map(int, ends), default=1)


def _runs(bodies, entry) -> dict[str, int]:
  """How often a step runs each computation."""
  # Callees stand before their callers, and the entry last.
  counts = dict.fromkeys(bodies, 0) | {entry: 1}
  for name in reversed(bodies):
    for line in bodies[name]:
      called = _CALLED.findall(line)
      for listed in _BRANCHES.findall(line):
        called += [part.strip().lstrip("%") for part in listed.split(",")]
      times = counts[name] * _turns(bodies, line)
      for each in called:
        if each in counts:
          counts[each] += times
  return counts


def _taps(window: str, size: int, out: int, i: int) -> int:
  """How many numbers of an input are multiplied along a spatial dimension."""

  def field(name, default):
    match = re.search(rf"\b{name}=(\S+)", window)
    return match[1].split("x")[i] if match else default

  low = int(field("pad", "0_0").split("_")[0])
  step, apart = int(field("stride", "1")), int(field("rhs_dilate", "1"))
  dilate = int(field("lhs_dilate", "1"))
  taps = np.arange(int(field("size", "1"))) * apart - low
  at = np.arange(out)[:, None] * step + taps
  inside = (at >= 0) & (at <= (size - 1) * dilate) & (at % dilate == 0)
  return int(inside.sum())


def _product_flops(line: str, types: dict[str, Array]) -> int:
  """Multiplications and additions of a dot or convolution (the TPU compiler
  writes a dot as a convolution)."""
  operands = re.search(r" (dot|convolution)\(([^)]*)\)", line)
  if "__cublas$" in line:  # GPUs: a product by a library
    operands = re.search(r" (custom-call)\(([^)]*)\)", line)
  if operands is None:
    return 0
  names = [part.split("%")[-1].strip() for part in operands[2].split(",")]
  (result,) = arrays(line[: operands.start()].split("=", 1)[1])[:1]
  left, right = (types[name] for name in names[:2])
  if operands[1] != "convolution":
    summed = re.search(
      r"lhs_contracting_dim(?:ension)?s\"?[=:][{\[]([0-9,\"]*)[}\]]", line
    )
    axes = _numbers(summed[1].replace('"', "")) if summed else []
    return 2 * result.elements * math.prod(left.shape[i] for i in axes)
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
  window = re.search(r"window=\{([^}]*)\}", line)
  assert labels is not None
  count = 2 * math.prod(
    result.shape[labels[3].index(letter)] for letter in "bf"
  )
  count *= right.shape[labels[2].index("i")]
  for i in range(len(labels[1]) - 2):
    size = left.shape[labels[1].index(str(i))]
    out = result.shape[labels[3].index(str(i))]
    count *= _taps(window[1] if window else "", size, out, i)
  return count


def _flops(bodies, counts) -> int:
  total = 0
  for name, lines in bodies.items():
    if not counts[name]:
      continue
    types = {}
    for line in lines:
      match = _INSTRUCTION.match(line)
      if match:
        types[match[1]] = (arrays(match[2].split("(")[0]) or [None])[0]
    total += counts[name] * sum(_product_flops(line, types) for line in lines)
  return total


def _collectives(bodies, counts) -> Iterator[Collective]:
  for name, lines in bodies.items():
    starts = any("AsyncCollectiveStart" in line for line in lines)
    pieces = any("AsyncCollectiveDone" in line for line in lines)
    for line in lines:
      match = _INSTRUCTION.match(line)
      found = match and _OPERATION.search(match[2])
      if not match or not found or not counts[name]:
        continue
      fused = '"async_collective_fusion_config"' in line
      if pieces or (fused and not starts):
        continue  # a later part of one that was counted
      kind, begins = found[1], bool(found[2])
      whole = arrays(match[2][: found.start()])
      if kind == SEND:  # (numbers, context, token)
        whole = whole[:1]
      if begins and kind != "all-reduce":  # (operands, results, ...)
        whole = [one for one in whole if one.shape or one.dtype[0] != "u"]
        half = len(whole) // 2
        whole = whole[half : 2 * half]
      groups = _groups(line)
      scale = len(groups[0]) if kind == "reduce-scatter" and groups else 1
      for one in whole:
        sizes = one.dtype, one.elements * scale
        times, hidden = counts[name], begins or starts
        yield Collective(kind, groups, *sizes, times, hidden)


def read(text: str) -> HloProgram:
  """Reads the text of a compiled program, `compiled.as_text()`.

  ValueError for a text without an entry.
  """
  bodies, entry = _computations(text)
  head = re.search(r"entry_computation_layout=\{\((.*?)\)->(.*)", text)
  if not entry or head is None:
    raise ValueError("this text is no compiled program: it has no entry")
  arguments, rest = arrays(head[1]), head[2]
  counts = _runs(bodies, entry)
  collectives = list(_collectives(bodies, counts))
  flops = _flops(bodies, counts)
  return HloProgram(arguments, _results(rest), collectives, flops)


def _results(rest: str) -> list[Array]:
  """The arrays of the entry's result, up to the brace that ends its layout."""
  depth = 0
  for end, letter in enumerate(rest):
    depth += (letter in "{(") - (letter in "})")
    if depth < 0:
      return arrays(rest[:end])
  return arrays(rest)
