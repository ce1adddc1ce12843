"""A table: rows by key, divided over the shards of a server."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_STOP = np.iinfo(np.int64).max  # of a sparse table


class Table:
  """Rows by key, and the function that pushes apply to them.

  A dense table has the keys 0 to K - 1; one shard's part has K consecutive
  keys. A sparse table accepts any key from 0 on, and creates a row when its key
  is first pulled or pushed.

  A push changes all its rows or, if anything in it is invalid, none. `stop` is
  1 + the last key of a dense table, and None for a sparse one.

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
    """Makes a dense table from its rows [K, ...], which are copied.

    Args:
      values: rows, of NumPy or JAX; the table stays of that kind.
      function: the function that a push applies; None: `functions.add()`.
      shards: S, at most K.
      load: float[K], of each key; the shards get ranges of about equal load.
        None: the shards get equal numbers of keys.
      start: the first key, above 0 for a part of a table.
      name: for errors.

    Raises:
      ValueError: for values without rows, and for a load of another shape.
    """
    if np.ndim(values) < 1 or not len(values):
      raise ValueError(
        f"a dense table has rows [K, ...], not {checks.shown(values)}"
      )
    if not isinstance(values, jax.Array):
      values = np.array(values)  # a copy, which pushes mutate
    checks.integer("start", start, 0)
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
    self._set_attributes(values.shape[1:], values.dtype, function, name, parts)

  def _set_attributes(
    self,
    shape: Sequence[int],
    dtype: Any,
    function: functions.RowFunction | None,
    name: str,
    parts: Iterable[tuple[Any, Any]],
  ) -> None:
    """Sets the attributes of dense and sparse tables; parts are (keys,
    values)."""
    function = functions.add() if function is None else function
    if not isinstance(function, functions.RowFunction):
      raise ValueError(
        "function must be a RowFunction, as functions.by_row(optax.sgd(0.1))"
        f" is, not {checks.shown(function)}"
      )
    self.function, self.name = function, name
    self.shape, self.dtype = tuple(shape), dtype  # of a row, of its elements
    # Rows by shard. Other classes read them only.
    self.shard_rows = [
      KeyedRows(keys, self._new_columns(values)) for keys, values in parts
    ]

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
    """Returns a table without rows, for any keys from 0 on.

    Args:
      shape: the shape of a row.
      dtype: the dtype of its elements.
      function: the function that a push applies; None: `functions.add()`.
      init: int64[n] keys -> their initial values [n, ...]; None: zeros.
      ranges: the ranges of the shards; None: one shard.
      name: for errors.
    """
    self = cls.__new__(cls)
    self._init = init or (lambda keys: np.zeros((len(keys), *shape), dtype))
    self._start, self.stop = 0, None
    self.ranges = ranges or ranges_lib.Ranges((0, _STOP))
    parts = [((), np.zeros((0, *shape), dtype))] * self.ranges.shards
    self._set_attributes(shape, np.dtype(dtype), function, name, parts)
    return self

  def _new_columns(self, values: Any) -> dict[str, Any]:
    """Returns the columns of new rows: values, load, leaves of the state."""
    # Leaves of the state become columns, so that they move with their rows.
    leaves, self._structure = jax.tree.flatten(self.function.init(values))
    load = np.zeros(len(values))
    state_columns = {f"state{i}": leaf for i, leaf in enumerate(leaves)}
    return {_VALUES: values, _LOAD: load, **state_columns}

  def __len__(self) -> int:
    return sum(map(len, self.shard_rows))

  def read_keys(self, keys: Any) -> Keys:
    """Returns keys as int64[n], checked by `tables.keys.read`."""
    try:
      return keys_lib.read(keys, start=self._start, stop=self.stop)
    except ValueError as error:
      raise ValueError(f"{self.name}: {error}") from None

  def _split_by_shard(
    self, keys: Keys
  ) -> Iterator[tuple[KeyedRows, np.ndarray]]:
    """Yields (rows of a shard, positions of the shard's keys in `keys`) for
    each shard that owns some of the keys. A sparse table makes missing rows."""
    shards = self.ranges.shard_of(keys)
    for shard, rows in enumerate(self.shard_rows):
      (positions,) = (shards == shard).nonzero()
      if positions.size:
        if self.stop is None:
          rows.insert(keys[positions], self._initial_columns)
        yield rows, positions

  def _initial_columns(self, keys: Keys) -> dict[str, Any]:
    """Returns the columns of new rows of a sparse table."""
    return self._new_columns(np.asarray(self._init(keys), self.dtype))

  def pull(self, keys: Any) -> Any:
    """Returns rows [n, ...], in the order of the keys.

    Args:
      keys: distinct integers, or a slice or range of them.

    Raises:
      ValueError: for a key out of range, or a key that occurs twice.
    """
    keys = self.read_keys(keys)
    for rows, positions in self._split_by_shard(keys):
      rows.add(keys[positions], _LOAD, 1.0)
    return self.peek(keys)

  def peek(self, keys: Keys) -> Any:
    """Returns rows as `pull` does, without checking keys or counting load."""
    parts, all_positions = [], []
    for rows, positions in self._split_by_shard(keys):
      parts.append(rows.read(keys[positions], _VALUES))
      all_positions.append(positions)
    if len(parts) == 1:
      return parts[0]
    if not parts:
      return np.zeros((0, *self.shape), self.dtype)
    # The parts are in the order of shards: restore the order of the keys.
    order = np.argsort(np.concatenate(all_positions))
    xp = jnp if isinstance(parts[0], jax.Array) else np
    return xp.concatenate(parts)[order]

  def push(self, keys: Any, values: Any) -> None:
    """Applies the function to values [n, ...], one for each key's row.

    Raises:
      ValueError: for a key out of range or that occurs twice, for values of
        another shape, and for a row with a NaN or an infinity; nothing is
        changed then.
    """
    keys, values = self.read_keys(keys), self._read_values(values)
    self.check_values(keys, values)
    for rows, positions in self._split_by_shard(keys):
      shard_keys = keys[positions]
      rows.add(shard_keys, _LOAD, 1.0)
      if self.function.additive:  # without states, and without compiling
        rows.add(shard_keys, _VALUES, values[positions])
      else:
        self._apply(rows, shard_keys, values[positions])

  def _read_values(self, values: Any) -> Any:
    """Returns values as an array of the table's dtype."""
    array = values if hasattr(values, "dtype") else np.asarray(values)
    if array.dtype == self.dtype:
      return array
    converted = None  # complex numbers, times, objects and text are rejected
    if array.dtype.kind not in "cmMOSU":
      with np.errstate(over="ignore", invalid="ignore"):
        # An overflow becomes infinite, which `check_values` rejects.
        converted = array.astype(self.dtype)
    is_integer = np.dtype(self.dtype).kind in "iu"
    if converted is None or (
      is_integer and not np.array_equal(converted, array)
    ):
      raise ValueError(
        f"{self.name}: values of {array.dtype} do not fit into a table of"
        f" {self.dtype}"
      )
    return converted

  def check_values(self, keys: Keys, values: Any) -> None:
    """Raises ValueError for values of another shape or that are not finite."""
    if np.shape(values) != (len(keys), *self.shape):
      raise ValueError(
        f"{self.name}: values for {len(keys)} keys must have the shape"
        f" {(len(keys), *self.shape)}, not {np.shape(values)}"
      )
    is_finite = np.isfinite(np.asarray(values, np.float64))
    is_not_finite = ~is_finite.all(tuple(range(1, is_finite.ndim)))
    if is_not_finite.any():
      key = int(keys[np.argmax(is_not_finite)])
      raise ValueError(
        f"{self.name}: the value for key {key} is not finite"
        f" ({int(is_not_finite.sum())} of {len(keys)} rows); nothing of the"
        " message was applied"
      )

  def _apply(self, rows: KeyedRows, keys: Keys, values: Any) -> None:
    """Applies a function that is not additive to rows and their states."""
    positions = rows.positions(keys)
    names = [name for name in rows.columns if name not in (_VALUES, _LOAD)]
    state = jax.tree.unflatten(
      self._structure, [rows.columns[name][positions] for name in names]
    )
    current = rows.columns[_VALUES][positions]
    new_values, state = self.function.apply(current, state, values)
    rows.write(keys, _VALUES, new_values)
    for name, leaf in zip(names, jax.tree.leaves(state), strict=True):
      rows.write(keys, name, leaf)

  # Shards.

  def rebalance(self) -> list[ranges_lib.Move]:
    """Divides the keys by the load since the last division; rows move with
    their states. Returns the moves."""
    if self.stop is None:
      raise ValueError(f"{self.name}: a sparse table keeps its ranges")
    old_ranges = self.ranges
    new_ranges = ranges_lib.by_load(
      self.load, old_ranges.shards, start=self._start
    )
    moves = ranges_lib.moves(old_ranges, new_ranges)
    # Cut all ranges before joining any: a shard may both give and get rows.
    parts = [self.shard_rows[move.source].cut(*move[:2]) for move in moves]
    for move, part in zip(moves, parts, strict=True):
      self.shard_rows[move.target].join(part)
    for rows in self.shard_rows:
      rows.columns[_LOAD][:] = 0
    self.ranges = new_ranges
    return moves

  @property
  def load(self) -> np.ndarray:
    """float[K], how often each row was pulled or pushed since the last
    division."""
    return np.concatenate([rows.columns[_LOAD] for rows in self.shard_rows])

  def set_range(
    self, start: int, stop: int, parts: Sequence[KeyedRows]
  ) -> None:
    """Sets the keys to start <= key < stop, for one shard's part of a dense
    table.

    The table keeps its rows in that range, and adds the rows that other shards
    have given (`parts`). Loads are counted from 0 again.
    """
    (rows,) = self.shard_rows
    rows.keep((rows.keys >= start) & (rows.keys < stop))
    for part in parts:
      rows.join(part)
    rows.columns[_LOAD][:] = 0
    self._start, self.stop = start, stop
    self.ranges = ranges_lib.Ranges((start, stop))

  def whole(self) -> Any:
    """Returns all rows [K, ...] in the order of keys, without counting load."""
    parts = [rows.columns[_VALUES] for rows in self.shard_rows]
    xp = jnp if isinstance(parts[0], jax.Array) else np
    return xp.concatenate(parts)

  # Checkpoints of a dense table.

  def pack(self) -> dict[str, np.ndarray]:
    """Returns the columns of all shards, and the cuts, as NumPy arrays."""
    parts = [rows.pack() for rows in self.shard_rows]
    columns = {
      name: np.concatenate([part[name] for part in parts]) for name in parts[0]
    }
    del columns["keys"]
    return {**columns, "cuts": np.array(self.ranges.cuts)}

  def unpack(self, packed: dict[str, np.ndarray]) -> None:
    """Restores the packed state of a table with the same arguments."""
    packed = dict(packed)
    cuts = packed.pop("cuts").tolist()
    first = self._start = cuts[0]
    self.stop, self.ranges = cuts[-1], ranges_lib.Ranges(tuple(cuts))
    on_jax = isinstance(self.shard_rows[0].columns[_VALUES], jax.Array)

    def column(name, part):
      # Loads are NumPy arrays, also in a table of JAX arrays.
      if on_jax and name != _LOAD:
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
