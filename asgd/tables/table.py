"""A table: rows by key, on the shards of a server, and what a push does."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import checks
from asgd.tables import functions
from asgd.tables import keys as keys_lib
from asgd.tables import ranges as ranges_lib
from asgd.tables.keys import Keys
from asgd.tables.rows import KeyedRows

_VALUES, _LOAD = "values", "load"
_LAST = np.iinfo(np.int64).max


class Table:
  """Rows by key.

  A dense table has the keys 0 to K - 1, or K others in a row if it is a part of
  one. A sparse one has any keys from 0 on, and makes a row when its key is
  first pulled or pushed.

  A push is done as a whole or, if anything is wrong with it, not at all.

  Example:
    >>> import numpy as np
    >>> from asgd import tables
    >>> table = tables.Table(np.zeros((5, 2)), shards=2)
    >>> table.push([3, 1], np.array([[1.0, 1.0], [2.0, 2.0]]))
    >>> table.pull(slice(1, 4)).tolist()
    [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    >>> words = tables.Table.sparse((2,), np.float32)
    >>> words.push([10**15], np.ones((1, 2), np.float32))
    >>> words.pull([7, 10**15]).tolist(), len(words)
    ([[0.0, 0.0], [1.0, 1.0]], 2)
  """

  def __init__(
    self,
    values: Any,
    function: functions.RowFunction | None = None,
    *,
    shards: int = 1,
    load: Any = None,
    start: int = 0,
    name: str = "table",
  ):
    """Takes the rows [K, ...] of a dense table, which are copied.

    Args:
      values: of NumPy or JAX, which the table stays.
      function: of a push; None adds.
      shards: S, at most K.
      load: float[K], by which keys are divided; None: as many to each shard.
      start: the first key; of a part of a table it is not 0.
      name: for errors.
    """
    if np.ndim(values) < 1 or not len(values):
      raise ValueError(
        f"a dense table has rows [K, ...], not {checks.shown(values)}"
      )
    if not isinstance(values, jax.Array):
      values = np.array(values)
    checks.whole("start", start, 0)
    self._set(functions.add() if function is None else function, name, None)
    self._dtype, self._shape = values.dtype, values.shape[1:]
    count, self._start = len(values), start
    self._stop = start + count
    load = np.ones(count) if load is None else np.asarray(load, np.float64)
    if np.shape(load) != (count,):
      raise ValueError(
        f"load must be a number for each of {count} keys, not of the shape"
        f" {np.shape(load)}"
      )
    self.ranges = ranges_lib.by_load(load, shards, start=start)
    cuts = self.ranges.cuts
    self._shards = [
      self._make(np.arange(low, high), values[low - start : high - start])
      for low, high in zip(cuts[:-1], cuts[1:], strict=True)
    ]

  def _set(self, function, name, init):
    if not isinstance(function, functions.RowFunction):
      raise ValueError(
        "function must be a RowFunction, as functions.by_row(optax.sgd(0.1))"
        f" is, not {checks.shown(function)}"
      )
    self.function: functions.RowFunction = function
    self.name: str = name
    self._init: Callable[[Keys], Any] | None = init

  @classmethod
  def sparse(
    cls,
    shape: tuple[int, ...],
    dtype: Any,
    function: functions.RowFunction | None = None,
    *,
    init: Callable[[Keys], Any] | None = None,
    ranges: ranges_lib.Ranges | None = None,
    name: str = "table",
  ) -> "Table":
    """Returns a table without rows, of any keys from 0 on.

    Args:
      shape: of a row.
      dtype: of its elements.
      function: of a push; None adds.
      init: int64[n] keys -> [n, ...] their first values; None: zeros.
      ranges: of the shards; None: there is one.
      name: for errors.
    """
    self = cls.__new__(cls)
    zeros = lambda keys: np.zeros((len(keys), *shape), dtype)  # noqa: E731
    self._set(function or functions.add(), name, init or zeros)
    self._dtype, self._shape, self._stop = np.dtype(dtype), tuple(shape), None
    self._start = 0
    self.ranges = ranges or ranges_lib.Ranges((0, _LAST))
    none = np.zeros(0, np.int64)
    self._shards = [
      self._make(none, zeros(none)) for _ in range(self.ranges.shards)
    ]
    return self

  def _make(self, keys, values):
    return KeyedRows(keys, self._columns(values))

  def _columns(self, values):
    """The columns of new rows."""
    self._structure, state = None, self.function.init(values)
    leaves, self._structure = jax.tree.flatten(state)
    load = np.zeros(len(values))
    named = {f"state{i}": leaf for i, leaf in enumerate(leaves)}
    return {_VALUES: values, _LOAD: load, **named}

  def __len__(self) -> int:
    return sum(map(len, self._shards))

  @property
  def stop(self) -> int | None:
    """The first key beyond those of a dense table; None of a sparse one."""
    return self._stop

  @property
  def shape(self) -> tuple[int, ...]:
    """Of a row."""
    return self._shape

  @property
  def dtype(self) -> Any:
    """Of its elements."""
    return self._dtype

  def read_keys(self, keys: Any) -> Keys:
    """Returns keys of the table, as `tables.keys.read`."""
    try:
      return keys_lib.read(keys, start=self._start, stop=self._stop)
    except ValueError as error:
      raise ValueError(f"{self.name}: {error}") from None

  def _routed(self, keys):
    """Yields (rows of a shard, where its keys are in the message)."""
    shards = self.ranges.shard_of(keys)
    for number, rows in enumerate(self._shards):
      mine = np.flatnonzero(shards == number)
      if mine.size:
        if self._stop is None:
          rows.insert(keys[mine], self._columns_of_keys)
        yield rows, mine

  def _columns_of_keys(self, keys):
    return self._columns(np.asarray(self._init(keys), self._dtype))

  def pull(self, keys: Any) -> Any:
    """Returns rows [n, ...], in the order of the keys.

    Args:
      keys: whole numbers that differ, or a slice or range of them.

    Raises:
      ValueError: for a key out of range, or one that comes twice.
    """
    keys = self.read_keys(keys)
    for rows, mine in self._routed(keys):
      rows.add(keys[mine], _LOAD, 1.0)
    return self.peek(keys)

  def peek(self, keys: Keys) -> Any:
    """Returns rows as `pull` does, of keys that are right; it is no load."""
    parts, places = [], []
    for rows, mine in self._routed(keys):
      parts.append(rows.read(keys[mine], _VALUES))
      places.append(mine)
    if len(parts) == 1:
      return parts[0]
    if not parts:
      return np.zeros((0, *self._shape), self._dtype)
    xp = jnp if isinstance(parts[0], jax.Array) else np
    return xp.concatenate(parts)[np.argsort(np.concatenate(places))]

  def push(self, keys: Any, values: Any) -> None:
    """Gives values [n, ...] to the function, one for each key's row.

    Raises:
      ValueError: for a key out of range or one that comes twice, for values of
        another shape, and for a row with a NaN or an infinity; nothing is
        changed then.
    """
    keys, values = self.read_keys(keys), self._read_values(values)
    self.check_values(keys, values)
    for rows, mine in self._routed(keys):
      part = keys[mine]
      rows.add(part, _LOAD, 1.0)
      if self.function.additive:
        rows.add(part, _VALUES, values[mine])
      else:
        self._apply(rows, part, values[mine])

  def _read_values(self, values):
    """Returns values as an array of the table's dtype."""
    array = values if hasattr(values, "dtype") else np.asarray(values)
    if array.dtype == self._dtype:
      return array
    cast = None
    if array.dtype.kind not in "cmMOSU":
      with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(self._dtype)  # what overflows is not finite
    whole = np.dtype(self._dtype).kind in "iu"
    if cast is None or (whole and not np.array_equal(cast, array)):
      raise ValueError(
        f"{self.name}: values of {array.dtype} do not fit into a table of"
        f" {self._dtype}"
      )
    return cast

  def check_values(self, keys: Keys, values: Any) -> None:
    """Raises ValueError for values that cannot be pushed."""
    if np.shape(values) != (len(keys), *self._shape):
      raise ValueError(
        f"{self.name}: values for {len(keys)} keys must have the shape"
        f" {(len(keys), *self._shape)}, not {np.shape(values)}"
      )
    finite = np.isfinite(np.asarray(values, np.float64))
    bad = ~finite.all(tuple(range(1, finite.ndim)))
    if bad.any():
      key = int(keys[np.argmax(bad)])
      raise ValueError(
        f"{self.name}: the value for key {key} is not finite"
        f" ({int(bad.sum())} of {len(keys)} rows); nothing of the message was"
        " applied"
      )

  def _apply(self, rows, keys, values):
    at = rows.positions(keys)
    names = [name for name in rows.columns if name not in (_VALUES, _LOAD)]
    state = jax.tree.unflatten(
      self._structure, [rows.columns[name][at] for name in names]
    )
    new, state = self.function.apply(rows.columns[_VALUES][at], state, values)
    rows.write(keys, _VALUES, new)
    for name, leaf in zip(names, jax.tree.leaves(state), strict=True):
      rows.write(keys, name, leaf)

  # Shards.

  def rebalance(self) -> list[ranges_lib.Move]:
    """Divides the keys anew by what was pulled and pushed of each since the
    last time; rows go with their states. Returns what has moved."""
    stop = self._stop
    if stop is None:
      raise ValueError(f"{self.name}: a sparse table keeps its ranges")
    before = self.ranges
    after = ranges_lib.by_load(self.load, before.shards, start=self._start)
    out = ranges_lib.moves(before, after)
    # Taken out before anything is put in: a range may go through a shard.
    parts = [self._shards[move.source].cut(*move[:2]) for move in out]
    for move, part in zip(out, parts, strict=True):
      self._shards[move.target].join(part)
    for rows in self._shards:
      rows.columns[_LOAD][:] = 0
    self.ranges = after
    return out

  @property
  def load(self) -> np.ndarray:
    """float[K], how often each row was pulled and pushed since the last
    time."""
    return np.concatenate([rows.columns[_LOAD] for rows in self._shards])

  def set_range(
    self, start: int, stop: int, parts: Sequence[KeyedRows]
  ) -> None:
    """Has the keys start <= key < stop from now on, as one shard's part of a
    dense table: of those it had it keeps these, and takes in the others, which
    are `parts` of the tables of other shards. Begins to count loads anew."""
    (rows,) = self._shards
    rows.keep((rows.keys >= start) & (rows.keys < stop))
    for part in parts:
      rows.join(part)
    rows.columns[_LOAD][:] = 0
    self._start, self._stop = start, stop
    self.ranges = ranges_lib.Ranges((start, stop))

  def loads(self) -> list[float]:
    """Returns rows pulled and pushed of each shard since the last time."""
    return [float(rows.columns[_LOAD].sum()) for rows in self._shards]

  @property
  def shard_rows(self) -> list[KeyedRows]:
    """The rows of each shard, which are not to be changed."""
    return self._shards

  def whole(self) -> Any:
    """Returns all rows [K, ...], by their keys; it is no load."""
    parts = [rows.columns[_VALUES] for rows in self._shards]
    xp = jnp if isinstance(parts[0], jax.Array) else np
    return xp.concatenate(parts)

  # Checkpoints of a dense table.

  def pack(self) -> dict[str, np.ndarray]:
    """Returns its columns, of all shards, and its cuts, as NumPy arrays."""
    names = self._shards[0].columns
    out = {
      name: np.concatenate([np.asarray(x.columns[name]) for x in self._shards])
      for name in names
    }
    return {**out, "cuts": np.array(self.ranges.cuts)}

  def unpack(self, packed: dict[str, np.ndarray]) -> None:
    """Takes over what a table like this one has packed."""
    packed = dict(packed)
    cuts = packed.pop("cuts").tolist()
    first, self._stop = cuts[0], cuts[-1]
    self._start = first
    self.ranges = ranges_lib.Ranges(tuple(cuts))
    jaxed = isinstance(self._shards[0].columns[_VALUES], jax.Array)

    def column(name, part):
      if jaxed and name != _LOAD:
        return jnp.asarray(part)
      return np.array(part)

    self._shards = [
      KeyedRows(
        np.arange(start, stop),
        {
          name: column(name, x[start - first : stop - first])
          for name, x in packed.items()
        },
      )
      for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
    ]
