"""A client: the worker's side of tables.

The client has copies of rows, each with its clock, and the worker's unsent
updates. A read returns copy + unsent updates (read my writes), also after a
new copy has arrived.

A message has the updates that the filters pass, encoded by the codec. The
client holds back all other updates for a later message. The rules limit the
size of updates that are held back. Larger updates bypass filters and codec.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd.compression.messages import codec_key
from asgd.tables import filters as filters_lib
from asgd.tables.consistency import ConsistencyRules
from asgd.tables.keys import Keys
from asgd.tables.messages import KeyCache, Push, Rows, RowValues, ValueCodec
from asgd.tables.rows import KeyedRows, rms

_NEVER = -1  # clock of a row that the client never received


class RowNotFinite(ValueError):
  """An update of a row is NaN or infinite."""


class TableSpec(NamedTuple):
  """The shape, type and range of keys of a table, as clients need them."""

  shape: tuple[int, ...]  # of a row
  dtype: Any
  stop: int | None = None  # 1 + the last key of a dense table; None: sparse


class FilterCounts(NamedTuple):
  """Counts of rows that filters removed from messages."""

  held_back: int  # sent later
  dropped: int  # never sent


class Client:
  """One worker's copies of rows and its unsent updates.

  Example:
    >>> import numpy as np
    >>> from asgd import tables
    >>> spec = {"w": tables.TableSpec((1,), np.float64)}
    >>> client = tables.Client(0, spec, tables.rules("ssp", bound=1))
    >>> keys = {"w": np.array([3])}
    >>> client.stale(keys, clock=0)
    {'w': array([3])}
    >>> client.take(tables.Rows(0, {"w": (keys["w"], np.array([[5.0]]))}))
    >>> client.write({"w": (keys["w"], np.array([[2.0]]))})
    >>> client.read(keys)["w"].tolist()
    [[7.0]]
    >>> push = client.flush(clock=1)
    >>> push.tables["w"].values.tolist(), client.read(keys)["w"].tolist()
    ([[2.0]], [[7.0]])
    >>> client.stale(keys, clock=1), client.stale(keys, clock=2)
    ({}, {'w': array([3])})
  """

  def __init__(
    self,
    worker: int,
    specs: Mapping[str, TableSpec],
    rules: ConsistencyRules,
    *,
    filters: Sequence[filters_lib.Filter] = (),
    codec: ValueCodec | None = None,
    key: jax.Array | None = None,
    seed: int = 0,
    key_caching: bool = True,
  ):
    """Starts without rows.

    Args:
      worker: its index.
      specs: the specs of the tables, by name.
      rules: how old the copies may be that are read, and how large the updates
        that are held back.
      filters: the filters of messages; each filter gets the rows that the
        previous filter passed.
      codec: the codec of values; None: values are sent as they are.
      key: JAX key of the codec's random numbers.
      seed: the seed of the filters' random numbers.
      key_caching: whether a list of keys that was sent before is sent as its
        digest.
    """
    self.worker, self.rules = worker, rules
    self._specs, self._filters = dict(specs), tuple(filters)
    self._codec, self._key, self._seed = codec, key, seed
    self._rows = {
      name: KeyedRows([], self._new_rows(name, ())) for name in specs
    }
    self.factor = 1.0  # a read returns copy + factor * unsent updates
    self._key_caching = key_caching
    self.key_cache = KeyCache(sends_digests=key_caching)
    self.held = FilterCounts(0, 0)
    self.flushes = 0  # messages so far
    # Changes that the last flush added to the copies: table -> (keys, changes).
    self.in_flight: dict[str, tuple[Keys, np.ndarray]] = {}

  def _new_rows(self, name: str, keys: Any) -> dict[str, np.ndarray]:
    """Returns the columns of new rows, neither received nor written."""
    spec = self._specs[name]
    shape = len(keys), *spec.shape
    return {
      "copy": np.zeros(shape, spec.dtype),
      "own": np.zeros(shape, spec.dtype),  # unsent updates
      "written": np.zeros(len(keys), bool),  # whether there are unsent updates
      "clock": np.full(len(keys), _NEVER),
    }

  def _insert(self, name: str, keys: Keys) -> KeyedRows:
    """Returns the rows of a table, after adding rows for keys that have
    none."""
    self._rows[name].insert(
      keys, lambda new_keys: self._new_rows(name, new_keys)
    )
    return self._rows[name]

  # Reading.

  def clocks(self, name: str, keys: Keys) -> np.ndarray:
    """Returns int[n], the clock of each copy; -1 where the client has no
    copy."""
    rows, clocks = self._rows[name], np.full(len(keys), _NEVER)
    is_copied = rows.has(keys)
    clocks[is_copied] = rows.read(keys[is_copied], "clock")
    return clocks

  def stale(self, keys: Mapping[str, Keys], clock: int) -> dict[str, Keys]:
    """Returns the keys that must be pulled before a read at `clock`, by table;
    a table without stale keys is left out."""
    oldest_allowed, stale_keys = self.rules.need(clock), {}
    for name, table_keys in keys.items():
      if not self.rules.pulls_all:
        table_keys = table_keys[self.clocks(name, table_keys) < oldest_allowed]
      if table_keys.size:
        stale_keys[name] = table_keys
    return stale_keys

  def take(self, message: Rows) -> None:
    """Stores rows of the server as copies; the unsent updates stay."""
    for name, (keys, values) in message.tables.items():
      rows = self._insert(name, keys)
      rows.write(keys, "copy", values)
      rows.write(keys, "clock", message.clock)
    if message.late is None:
      return
    # The server pushed all changed rows at this clock, except those in `late`.
    for name, rows in self._rows.items():
      late_keys = message.late.get(name)
      clock = rows.columns["clock"]
      is_current = clock != _NEVER
      if late_keys is not None:
        is_current[rows.positions(late_keys)] = False
      clock[is_current] = message.clock

  def take_behind(self, message: Rows) -> None:
    """Stores rows that the server sent before it had this worker's last
    message, and adds the changes of that message to the new copies."""
    self.take(message)
    for name, (keys, _) in message.tables.items():
      sent_keys, changes = self.in_flight.get(name, (keys[:0], None))
      is_sent = np.isin(sent_keys, keys)
      if is_sent.any():
        self._rows[name].add(sent_keys[is_sent], "copy", changes[is_sent])

  def read(self, keys: Mapping[str, Keys]) -> dict[str, np.ndarray]:
    """Returns rows with the client's unsent updates; no row may be stale."""
    values = {}
    for name, table_keys in keys.items():
      rows = self._rows[name]
      copy = rows.read(table_keys, "copy")
      updates = rows.read(table_keys, "own")
      values[name] = copy + copy.dtype.type(self.factor) * updates
    return values

  # Writing.

  def write(self, values: Mapping[str, tuple[Keys, Any]]) -> None:
    """Adds to the worker's unsent updates, also for rows without a copy.

    Raises:
      RowNotFinite: for a row that is not finite; nothing is written then.
    """
    for name, (keys, updates) in values.items():
      is_finite = np.isfinite(np.asarray(updates)).reshape(len(keys), -1)
      is_not_finite = ~is_finite.all(1)
      if is_not_finite.any():
        raise RowNotFinite(
          f"{name}: the update of key {keys[np.argmax(is_not_finite)]} is not"
          f" finite ({int(is_not_finite.sum())} of {len(keys)} rows)"
        )
    for name, (keys, updates) in values.items():
      rows = self._insert(name, keys)
      rows.add(keys, "own", np.asarray(updates))
      rows.write(keys, "written", True)

  def flush(self, clock: int, *, everything: bool = False) -> Push:
    """Returns the client's next message.

    Args:
      clock: the worker's clock after this message.
      everything: whether to bypass the filters, as at the end of a run.
    """
    # Each message draws from its own stream, so a replay draws the same.
    rng = np.random.default_rng((self._seed, self.worker, self.flushes))
    packed, self.in_flight = {}, {}
    for table_index, (name, rows) in enumerate(self._rows.items()):
      keys = rows.keys[rows.columns["written"]]
      if keys.size and not everything:
        keys = self._filter(rows, keys, rng)
      if keys.size:
        packed[name] = self._encode_updates(name, keys, table_index)
      if self.rules.pulls_all:  # each job pulls its rows: drop the copies
        rows.keep(rows.columns["written"])
    self.flushes += 1
    return Push(self.worker, clock, packed)

  def _filter(
    self, rows: KeyedRows, keys: Keys, rng: np.random.Generator
  ) -> Keys:
    """Returns the keys to send: the keys that the filters pass, and the keys
    with larger updates than the rules allow a worker to hold back."""
    is_urgent = self._exceeds_hold(rows.read(keys, "own"))
    urgent_keys, keys = keys[is_urgent], keys[~is_urgent]
    for row_filter in self._filters:
      if not keys.size:
        break
      copy, updates = (rows.read(keys, name) for name in ("copy", "own"))
      verdict = row_filter(copy, updates, rng)
      n_dropped = 0
      if verdict.drop is not None and verdict.drop.any():
        dropped_keys, n_dropped = keys[verdict.drop], int(verdict.drop.sum())
        rows.write(dropped_keys, "own", 0)
        rows.write(dropped_keys, "written", False)
      n_held_back = int((~verdict.send).sum()) - n_dropped
      held_back, dropped = self.held
      self.held = FilterCounts(held_back + n_held_back, dropped + n_dropped)
      keys = keys[verdict.send]
    return np.sort(np.concatenate([keys, urgent_keys]))

  def _exceeds_hold(self, updates: np.ndarray) -> np.ndarray:
    """Returns bool[n], whether the updates of a row exceed what the rules allow
    a worker to hold back."""
    change = np.abs(updates.reshape(len(updates), -1)).max(1, initial=0)
    return abs(self.factor) * change > self.rules.hold

  def _encode_updates(
    self, name: str, keys: Keys, table_index: int
  ) -> RowValues:
    """Returns the unsent updates of some rows, encoded, and applies them to the
    copies. The part that the codec leaves out stays unsent.

    Args:
      name: the name of the table.
      keys: the keys of the rows.
      table_index: the codec draws differently for each table.
    """
    rows = self._rows[name]
    updates = values = rows.read(keys, "own")
    if self._codec is not None:
      key = codec_key(jax.random.fold_in(self._key, self.flushes))
      packet = self._codec.pack(updates, jax.random.fold_in(key, table_index))
      shape, dtype = updates.shape[1:], updates.dtype
      decoded = self._codec.unpack(packet, len(keys), shape, dtype)
      values = packet
      if self._exceeds_hold(updates - decoded).any():
        decoded = values = updates  # the codec would hold back too much
    else:
      decoded = updates
    # The codec may approximate. The difference is sent later, and the copy gets
    # exactly the values that the server will apply.
    rows.write(keys, "own", updates - decoded)
    is_incomplete = (updates != decoded).reshape(len(keys), -1).any(1)
    rows.write(keys, "written", is_incomplete)
    change = decoded.dtype.type(self.factor) * decoded
    rows.add(keys, "copy", change)
    self.in_flight[name] = keys, change
    return RowValues(self.key_cache.pack(keys), values)

  def with_keys(self, push: Push) -> dict[str, RowValues]:
    """Returns the tables of the last message with all their keys, for a
    receiver that has cached no list of keys."""
    return {
      name: RowValues(keys._replace(keys=self.in_flight[name][0]), values)
      for name, (keys, values) in push.tables.items()
    }

  def resend(self, tables: Mapping[str, RowValues]) -> dict[str, RowValues]:
    """Repacks the tables of an earlier incarnation's message: a list of keys
    that this client has sent becomes its digest. `tables` must have all keys
    (`with_keys`)."""
    return {
      name: RowValues(self.key_cache.pack(key_list.keys), values)
      for name, (key_list, values) in tables.items()
    }

  def residual(self) -> float:
    """Returns the RMS of the unsent updates over all elements of all rows."""
    return rms(rows.columns["own"] for rows in self._rows.values())

  # Ranges of keys that move to another shard, between two messages.

  def cut(self, name: str, start: int, stop: int) -> KeyedRows:
    """Removes and returns the rows start <= key < stop."""
    return self._rows[name].cut(start, stop)

  def join(self, name: str, part: KeyedRows) -> None:
    """Adds rows that the client of another shard has cut."""
    self._rows[name].join(part)

  # Checkpoints.

  def pack(self) -> dict[str, Any]:
    """Returns the client as a tree of arrays and JSON."""
    return {
      "rows": {name: rows.pack() for name, rows in self._rows.items()},
      "cached": list(self.key_cache.lists.items()),
      "held": self.held,
      "flushes": self.flushes,
      "factor": self.factor,
      "flight": self.in_flight,
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores the packed state of a client with the same arguments."""
    self._rows = {
      name: KeyedRows.unpack(packed) for name, packed in tree["rows"].items()
    }
    self.key_cache = KeyCache(tree["cached"], sends_digests=self._key_caching)
    self.held = FilterCounts(*tree["held"])
    self.flushes, self.factor = tree["flushes"], tree["factor"]
    self.in_flight = {
      name: (keys, changes) for name, (keys, changes) in tree["flight"].items()
    }
