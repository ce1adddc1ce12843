"""A client: the worker's side of tables.

It has copies of rows, each with its clock, and the worker's own updates that
are not sent. A read gives copy + own updates (read my writes), also after the
copy was refreshed. A message takes what filters let through, as the codec has
it; the rest stays, but for what is more than the rules let a worker hold back.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd.tables import filters as filters_lib
from asgd.tables.consistency import ConsistencyRules
from asgd.tables.keys import Keys
from asgd.tables.messages import KeyCache, Push, Rows, RowValues, ValueCodec
from asgd.tables.rows import KeyedRows, rms

_NEVER = -1  # the clock of a row that was never read


class RowNotFinite(ValueError):
  """An update of a row is NaN or infinite."""


class TableSpec(NamedTuple):
  """What a client knows of a table."""

  shape: tuple[int, ...]  # of a row
  dtype: Any
  stop: int | None = None  # the first key beyond those of a dense one


class Held(NamedTuple):
  """Rows that filters have kept from messages."""

  back: int  # they are sent later
  dropped: int


class Client:
  """One worker's copies and updates.

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
  ):
    """Starts without rows.

    Args:
      worker: its number.
      specs: of the tables, by name.
      rules: of reads.
      filters: of messages, each of what those before let through.
      codec: of values.
      key: of what the codec draws.
      seed: of what filters draw.
    """
    self.worker, self.rules = worker, rules
    self._specs, self._filters = dict(specs), tuple(filters)
    self._codec, self._key, self._seed = codec, key, seed
    self._rows = {name: KeyedRows([], self._made(name, ())) for name in specs}
    self.factor = 1.0  # what a value that is written does to a read
    self.sender = KeyCache()
    self.held = Held(0, 0)
    self.flushes = 0
    # What its last message changed of its copies: table -> (keys, changes).
    self.flight: dict[str, tuple[Keys, np.ndarray]] = {}

  def _made(self, name, keys):
    """New rows, which no one has read or written."""
    spec = self._specs[name]
    shape = len(keys), *spec.shape
    return {
      "copy": np.zeros(shape, spec.dtype),
      "own": np.zeros(shape, spec.dtype),  # as it is to be pushed
      "written": np.zeros(len(keys), bool),
      "clock": np.full(len(keys), _NEVER),
    }

  def _insert(self, name, keys):
    """Returns the rows of a table, which have some keys."""
    self._rows[name].insert(keys, lambda new: self._made(name, new))
    return self._rows[name]

  # Reading.

  def clocks(self, name: str, keys: Keys) -> np.ndarray:
    """Returns int[n]: the clock of each copy, -1 of a row that it has not."""
    rows, out = self._rows[name], np.full(len(keys), _NEVER)
    has = rows.has(keys)
    out[has] = rows.read(keys[has], "clock")
    return out

  def stale(self, keys: Mapping[str, Keys], clock: int) -> dict[str, Keys]:
    """Returns the keys that must be read from the server before a read at a
    clock; tables without any are left out."""
    need, out = self.rules.need(clock), {}
    for name, wanted in keys.items():
      if not self.rules.anew:
        wanted = wanted[self.clocks(name, wanted) < need]
      if wanted.size:
        out[name] = wanted
    return out

  def take(self, message: Rows) -> None:
    """Takes rows of the server; its own updates stay."""
    for name, (keys, values) in message.tables.items():
      rows = self._insert(name, keys)
      rows.write(keys, "copy", values)
      rows.write(keys, "clock", message.clock)
    if message.late is None:
      return
    for name, rows in self._rows.items():
      old = message.late.get(name)
      clock = rows.columns["clock"]
      known = clock != _NEVER
      if old is not None:
        known[rows.positions(old)] = False
      clock[known] = message.clock

  def take_behind(self, message: Rows) -> None:
    """Takes rows that the server sent before it had this worker's last message,
    which they are then brought up to."""
    self.take(message)
    for name, (keys, _) in message.tables.items():
      sent, changes = self.flight.get(name, (keys[:0], None))
      mine = np.isin(sent, keys)
      if mine.any():
        self._rows[name].add(sent[mine], "copy", changes[mine])

  def read(self, keys: Mapping[str, Keys]) -> dict[str, np.ndarray]:
    """Returns rows, with its own updates; they must not be stale."""
    out = {}
    for name, wanted in keys.items():
      rows = self._rows[name]
      copy, own = (rows.read(wanted, each) for each in ("copy", "own"))
      out[name] = copy + copy.dtype.type(self.factor) * own
    return out

  # Writing.

  def write(self, values: Mapping[str, tuple[Keys, Any]]) -> None:
    """Adds the worker's updates of rows that it has read. RowNotFinite for a
    row that is not finite; nothing is written then."""
    for name, (keys, more) in values.items():
      bad = ~np.isfinite(np.asarray(more)).reshape(len(keys), -1).all(1)
      if bad.any():
        raise RowNotFinite(
          f"{name}: the update of key {keys[np.argmax(bad)]} is not finite"
          f" ({int(bad.sum())} of {len(keys)} rows)"
        )
    for name, (keys, more) in values.items():
      rows = self._insert(name, keys)
      rows.add(keys, "own", np.asarray(more))
      rows.write(keys, "written", True)

  def flush(self, clock: int, *, everything: bool = False) -> Push:
    """Returns its message with so many clocks finished; with `everything` it is
    not filtered."""
    rng = np.random.default_rng((self._seed, self.worker, self.flushes))
    out, self.flight = {}, {}
    for number, (name, rows) in enumerate(self._rows.items()):
      keys = rows.keys[rows.columns["written"]]
      if keys.size and not everything:
        keys = self._filter(rows, keys, rng)
      if keys.size:
        out[name] = self._send(name, keys, number)
      if self.rules.anew:  # copies are not read again
        rows.keep(rows.columns["written"])
    self.flushes += 1
    return Push(self.worker, clock, out)

  def _filter(self, rows, keys, rng):
    """Returns the keys that filters let through, or may not hold back."""
    late = self._beyond(rows.read(keys, "own"))
    urgent, keys = keys[late], keys[~late]
    for each in self._filters:
      if not keys.size:
        break
      copy, own = (rows.read(keys, name) for name in ("copy", "own"))
      verdict = each(copy, own, rng)
      dropped = 0
      if verdict.drop is not None and verdict.drop.any():
        gone, dropped = keys[verdict.drop], int(verdict.drop.sum())
        rows.write(gone, "own", 0)
        rows.write(gone, "written", False)
      back, lost = self.held
      back += int((~verdict.send).sum()) - dropped
      self.held = Held(back, lost + dropped)
      keys = keys[verdict.send]
    return np.sort(np.concatenate([keys, urgent]))

  def _beyond(self, own):
    """Which rows are more than may be held back, bool[n]."""
    change = np.abs(own.reshape(len(own), -1)).max(1, initial=0)
    return abs(self.factor) * change > self.rules.hold

  def _send(self, name, keys, number):
    """Returns the updates of some rows as they travel. What the codec leaves
    out stays its own."""
    rows = self._rows[name]
    own = values = rows.read(keys, "own")
    if self._codec is not None:
      key = jax.random.fold_in(self._key, self.flushes)
      packet = self._codec.pack(own, jax.random.fold_in(key, number))
      sent = self._codec.unpack(packet, len(keys), own.shape[1:], own.dtype)
      values = packet
      if self._beyond(own - sent).any():
        sent = values = own
    else:
      sent = own
    rows.write(keys, "own", own - sent)
    left = (own != sent).reshape(len(keys), -1).any(1)
    rows.write(keys, "written", left)
    change = sent.dtype.type(self.factor) * sent
    rows.add(keys, "copy", change)
    self.flight[name] = keys, change
    return RowValues(self.sender.pack(keys), values)

  def with_keys(self, push: Push) -> dict[str, RowValues]:
    """Returns the tables of its last message with all keys, for one who knows
    none."""
    return {
      name: RowValues(keys._replace(keys=self.flight[name][0]), values)
      for name, (keys, values) in push.tables.items()
    }

  def again(self, tables: Mapping[str, RowValues]) -> dict[str, RowValues]:
    """Returns the tables of a message of another client, which come with all
    keys, as this one sends them."""
    return {
      name: RowValues(self.sender.pack(sent.keys.keys), sent.values)
      for name, sent in tables.items()
    }

  def residual(self) -> float:
    """Returns the RMS of its updates that are not sent, over elements of rows
    that it has."""
    return rms(rows.columns["own"] for rows in self._rows.values())

  # Another division of tables, between two messages.

  def cut(self, name: str, start: int, stop: int) -> KeyedRows:
    """Removes and returns the rows start <= key < stop."""
    return self._rows[name].cut(start, stop)

  def join(self, name: str, part: KeyedRows) -> None:
    """Takes in what was taken out of the client of another shard."""
    self._rows[name].join(part)

  # Checkpoints.

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of arrays and JSON."""
    return {
      "rows": {name: rows.pack() for name, rows in self._rows.items()},
      "cached": list(self.sender.lists.items()),
      "held": self.held,
      "flushes": self.flushes,
      "factor": self.factor,
      "flight": self.flight,
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what a client like this one has packed."""
    self._rows = {k: KeyedRows.unpack(x) for k, x in tree["rows"].items()}
    self.sender, self.held = KeyCache(tree["cached"]), Held(*tree["held"])
    self.flushes, self.factor = tree["flushes"], tree["factor"]
    self.flight = {name: (k, x) for name, (k, x) in tree["flight"].items()}
