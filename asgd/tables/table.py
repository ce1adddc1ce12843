"""A table: rows by key, on the shards of a server, and what a push does."""

import itertools
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

  A push is done as a whole or, if anything is wrong with it, not at all. `stop`
  is the first key beyond those of a dense table, None of a sparse one.

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
    count = len(values)
    load = np.ones(count) if load is None else np.asarray(load, np.float64)
    if np.shape(load) != (count,):
      raise ValueError(
        f"load must be a number for each of {count} keys, not of the shape"
        f" {np.shape(load)}"
      )
    self._start, self.stop = start, start + count
    self.ranges = ranges_lib.by_load(load, shards, start=start)
    parts = [
      (np.arange(low, high), values[low - start : high - start])
      for low, high in itertools.pairwise(self.ranges.cuts)
    ]
    self._set(values.shape[1:], values.dtype, function, name, parts)

  def _set(self, shape, dtype, function, name, parts):
    """Sets what dense and sparse tables have; parts are (keys, values)."""
    function = functions.add() if function is None else function
    if not isinstance(function, functions.RowFunction):
      raise ValueError(
        "function must be a RowFunction, as functions.by_row(optax.sgd(0.1))"
        f" is, not {checks.shown(function)}"
      )
    self.function, self.name = function, name
    self.shape, self.dtype = tuple(shape), dtype  # of a row, of its elements
    # The rows of each shard, which are not to be changed by others.
    self.shard_rows = [KeyedRows(k, self._columns(x)) for k, x in parts]

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
    self._init = init or (lambda keys: np.zeros((len(keys), *shape), dtype))
    self._start, self.stop = 0, None
    self.ranges = ranges or ranges_lib.Ranges((0, _LAST))
    parts = [((), np.zeros((0, *shape), dtype))] * self.ranges.shards
    self._set(shape, np.dtype(dtype), function, name, parts)
    return self

  def _columns(self, values):
    """The columns of new rows."""
    leaves, self._structure = jax.tree.flatten(self.function.init(values))
    load = np.zeros(len(values))
    named = {f"state{i}": leaf for i, leaf in enumerate(leaves)}
    return {_VALUES: values, _LOAD: load, **named}

  def __len__(self) -> int:
    return sum(map(len, self.shard_rows))

  def read_keys(self, keys: Any) -> Keys:
    """Returns keys of the table, as `tables.keys.read`."""
    try:
      return keys_lib.read(keys, start=self._start, stop=self.stop)
    except ValueError as error:
      raise ValueError(f"{self.name}: {error}") from None

  def _routed(self, keys):
    """Yields (rows of a shard, where its keys are in the message)."""
    shards = self.ranges.shard_of(keys)
    for number, rows in enumerate(self.shard_rows):
      (mine,) = (shards == number).nonzero()
      if mine.size:
        if self.stop is None:
          rows.insert(
            keys[mine],
            lambda new: self._columns(np.asarray(self._init(new), self.dtype)),
          )
        yield rows, mine

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
      return np.zeros((0, *self.shape), self.dtype)
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
    if array.dtype == self.dtype:
      return array
    cast = None
    if array.dtype.kind not in "cmMOSU":
      with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(self.dtype)  # what overflows is not finite
    whole = np.dtype(self.dtype).kind in "iu"
    if cast is None or (whole and not np.array_equal(cast, array)):
      raise ValueError(
        f"{self.name}: values of {array.dtype} do not fit into a table of"
        f" {self.dtype}"
      )
    return cast

  def check_values(self, keys: Keys, values: Any) -> None:
    """Raises ValueError for values that cannot be pushed."""
    if np.shape(values) != (len(keys), *self.shape):
      raise ValueError(
        f"{self.name}: values for {len(keys)} keys must have the shape"
        f" {(len(keys), *self.shape)}, not {np.shape(values)}"
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
    if self.stop is None:
      raise ValueError(f"{self.name}: a sparse table keeps its ranges")
    before = self.ranges
    after = ranges_lib.by_load(self.load, before.shards, start=self._start)
    out = ranges_lib.moves(before, after)
    # Taken out before anything is put in: a range may go through a shard.
    parts = [self.shard_rows[move.source].cut(*move[:2]) for move in out]
    for move, part in zip(out, parts, strict=True):
      self.shard_rows[move.target].join(part)
    for rows in self.shard_rows:
      rows.columns[_LOAD][:] = 0
    self.ranges = after
    return out

  @property
  def load(self) -> np.ndarray:
    """float[K], how often each row was pulled and pushed since the last
    time."""
    return np.concatenate([rows.columns[_LOAD] for rows in self.shard_rows])

  def set_range(
    self, start: int, stop: int, parts: Sequence[KeyedRows]
  ) -> None:
    """Has the keys start <= key < stop from now on, as one shard's part of a
    dense table: of those it had it keeps these, and takes in the others, which
    are `parts` of the tables of other shards. Begins to count loads anew."""
    (rows,) = self.shard_rows
    rows.keep((rows.keys >= start) & (rows.keys < stop))
    for part in parts:
      rows.join(part)
    rows.columns[_LOAD][:] = 0
    self._start, self.stop = start, stop
    self.ranges = ranges_lib.Ranges((start, stop))

  def whole(self) -> Any:
    """Returns all rows [K, ...], by their keys; it is no load."""
    parts = [rows.columns[_VALUES] for rows in self.shard_rows]
    xp = jnp if isinstance(parts[0], jax.Array) else np
    return xp.concatenate(parts)

  # Checkpoints of a dense table.

  def pack(self) -> dict[str, np.ndarray]:
    """Returns its columns, of all shards, and its cuts, as NumPy arrays."""
    parts = [rows.pack() for rows in self.shard_rows]
    out = {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}
    del out["keys"]
    return {**out, "cuts": np.array(self.ranges.cuts)}

  def unpack(self, packed: dict[str, np.ndarray]) -> None:
    """Takes over what a table like this one has packed."""
    packed = dict(packed)
    cuts = packed.pop("cuts").tolist()
    first = self._start = cuts[0]
    self.stop, self.ranges = cuts[-1], ranges_lib.Ranges(tuple(cuts))
    jaxed = isinstance(self.shard_rows[0].columns[_VALUES], jax.Array)

    def column(name, part):
      if jaxed and name != _LOAD:
        return jnp.asarray(part)
      return np.array(part)

    self.shard_rows = [
      KeyedRows(
        np.arange(start, stop),
        {
          name: column(name, x[start - first : stop - first])
          for name, x in packed.items()
        },
      )
      for start, stop in itertools.pairwise(cuts)
    ]
