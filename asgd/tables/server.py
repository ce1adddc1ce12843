"""The server of tables: applies messages, counts clocks, and selects rows to
send.

The server does not decide the order of messages. A runtime passes messages to
it one by one, asks whether a worker's pull may be answered, and sends the rows
that the server returns.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from asgd.tables import keys as keys_lib
from asgd.tables.client import TableSpec
from asgd.tables.consistency import ConsistencyRules
from asgd.tables.keys import Keys
from asgd.tables.messages import KeyCache, Push, Rows, ValueCodec
from asgd.tables.ranges import RangeClocks
from asgd.tables.rows import KeyedRows, RowCopies, largest_first, sum_of_squares
from asgd.tables.table import Table

_STOP = np.iinfo(np.int64).max  # of a sparse table
_Values = dict[str, tuple[Keys, np.ndarray]]


class TableServer:
  """Tables by name, with the workers' clocks and a record of their copies.

  Example:
    The server sends a worker the changed rows of which it has copies, when the
    slowest clock advances.

    >>> import numpy as np
    >>> from asgd import tables
    >>> rules = tables.rules("essp", bound=2)
    >>> table = tables.Table(np.zeros((4, 1)))
    >>> server = tables.TableServer({"w": table}, rules, workers=[0])
    >>> rows = server.pull(0, {"w": np.array([2])})
    >>> client = tables.Client(0, server.specs, rules)
    >>> client.take(rows)
    >>> client.write({"w": (np.array([2]), np.array([[1.0]]))})
    >>> server.receive(client.flush(clock=1)), server.slowest
    (1, 1)
  """

  def __init__(
    self,
    tables: Mapping[str, Table],
    rules: ConsistencyRules,
    workers: Sequence[int],
    *,
    codec: ValueCodec | None = None,
    total: int | None = None,
  ):
    """Takes ownership of the tables.

    Args:
      tables: the tables, by name.
      rules: the rules of reads.
      workers: the indices of the workers.
      codec: the codec of the clients.
      total: number of rows of all shards, over which a budget is shared; None:
        this server has all rows.
    """
    self.tables, self.rules, self._total = dict(tables), rules, total
    self.workers = list(workers)
    self._codec = codec
    self._aggregates = any(
      table.function.aggregates for table in tables.values()
    )
    self.clocks = {
      name: RangeClocks(workers, 0, _STOP if table.stop is None else table.stop)
      for name, table in tables.items()
    }
    self._key_caches = {worker: KeyCache() for worker in workers}
    # (clock, worker, values) of messages at clocks that some worker has not
    # finished.
    self._deferred: list[tuple[int, int, _Values]] = []
    shapes = {name: table.shape for name, table in self.tables.items()}
    self._copies = RowCopies(shapes, workers)
    # With value_bounded: worker -> its clock, for each worker that may not have
    # read its last reply yet.
    self._reading: dict[int, int] = {}
    self.version = 0  # messages applied

  @property
  def specs(self) -> dict[str, TableSpec]:
    """The specs of the tables, for clients."""
    return {
      name: TableSpec(table.shape, np.dtype(table.dtype), table.stop)
      for name, table in self.tables.items()
    }

  @property
  def slowest(self) -> int:
    """The least of all workers' clocks."""
    return min(clocks.slowest for clocks in self.clocks.values())

  # Reading.

  def pull(self, worker: int, keys: Mapping[str, Keys]) -> Rows:
    """Returns requested rows for a worker, and records the worker's copies if
    the rules require it."""
    rows = {}
    for name, table_keys in keys.items():
      rows[name] = table_keys, np.asarray(self.tables[name].pull(table_keys))
      if self.rules.registers:  # server push needs to know the copies
        self._copies.register(worker, name, table_keys)
    return Rows(self.slowest, rows)

  # Writing.

  def receive(self, push: Push) -> int:
    """Applies a message, at once or when all workers have finished the
    message's clock. Returns by how much the slowest clock has advanced.

    Raises:
      ValueError: for values that a table rejects; nothing is applied then.
    """
    # `_values` checks the complete message before anything is changed.
    before, values = self.slowest, self._values(push)
    self.record_read(push.worker)
    if self.rules.deferred or self._aggregates:
      self._deferred.append((push.clock, push.worker, values))
    else:
      self._apply(push.worker, values)
    for clocks in self.clocks.values():
      clocks.advance(push.worker, push.clock)
    # This message may complete a clock that has deferred messages.
    self._apply_deferred(self.slowest)
    return self.slowest - before

  def receive_measured(self, push: Push) -> tuple[int, tuple[float, int]]:
    """Receives a message. Returns by how much the slowest clock has advanced,
    and (sum of squares, number of elements) of the change of the message's
    rows."""
    keys = self.keys_of(push).items()

    def peek():
      return [np.array(self.tables[name].peek(k), float) for name, k in keys]

    before, clocks_advanced = peek(), self.receive(push)
    return clocks_advanced, sum_of_squares(map(np.subtract, peek(), before))

  def keys_of(self, push: Push) -> dict[str, Keys]:
    """Returns the keys of a message by table, without changing the cache."""
    lists, keys = self._key_caches[push.worker].lists, {}
    new_lists = _new_keys(push)
    for name, sent in push.tables.items():
      digest = sent.keys.digest
      keys[name] = new_lists[digest] if digest in new_lists else lists[digest]
    return keys

  def defers(self, push: Push, arrived: Collection[int] = ()) -> bool:
    """Whether a message must wait: another worker may not have read its last
    reply yet, and after the message its copy of some row would lack more than
    the rules allow.

    Args:
      push: the message; its worker reads nothing until it is received.
      arrived: workers with a waiting push; they have read their replies.
    """
    # A worker that has pushed since its last reply has read the reply.
    readers = self._reading.keys() - {push.worker, *arrived}
    for name, keys in self.keys_of(push).items() if readers else ():
      table, values = self.tables[name], push.tables[name].values
      change = _change(table, _decode(self._codec, table, keys, values))
      for worker in readers:
        copies = self._copies.copies_of(worker)[name]
        is_copied = copies.has(keys)
        missing = copies.read(keys[is_copied], "lacks") + change[is_copied]
        limit = self.rules.limit(self._reading[worker])
        if not (np.abs(missing) <= limit).all():  # True for NaN, too
          return True
    return False

  def record_read(self, worker: int) -> None:
    """Records that a worker has read its last reply; `receive` implies it."""
    self._reading.pop(worker, None)

  def skip(self, push: Push) -> None:
    """Caches the keys of a message that is not applied: later messages may have
    only the digests of these keys."""
    for sent in push.tables.values():
      self._key_caches[push.worker].unpack(sent.keys)

  def _apply_deferred(self, clock: int) -> None:
    """Applies the deferred messages of clocks that all workers have finished,
    in the order of (clock, worker): no bit depends on the order of arrival."""
    deferred = self._deferred
    due_messages = [message for message in deferred if message[0] <= clock]
    self._deferred = [message for message in deferred if message[0] > clock]
    due_messages.sort(key=lambda message: message[:2])
    if self._aggregates:  # first add up the messages of a clock
      by_clock = itertools.groupby(due_messages, lambda message: message[0])
      for _, group in by_clock:
        clock_messages = [(worker, values) for _, worker, values in group]
        # No function that aggregates is additive: `_apply` ignores the sender.
        sender = clock_messages[0][0]
        self._apply(sender, _add_up([values for _, values in clock_messages]))
      return
    for _, worker, values in due_messages:
      self._apply(worker, values)

  def _values(self, push: Push) -> _Values:
    """Returns the keys and values of a message, decoded and checked."""
    checked_values = {}
    try:
      for name, sent in push.tables.items():
        if name not in self.tables:
          names = ", ".join(self.tables)
          raise ValueError(f"there is no table {name!r}; the tables: {names}")
        table = self.tables[name]
        keys = self._key_caches[push.worker].unpack(sent.keys)
        values = _decode(self._codec, table, keys, sent.values)
        checked_values[name] = table.read_keys(keys), values
        table.check_values(keys, values)
    except ValueError as error:
      raise ValueError(
        f"message of worker {push.worker}, clock {push.clock}: {error}"
      ) from None
    return checked_values

  def _apply(self, worker: int, values: _Values) -> None:
    """Pushes values to the tables, and records the change that the workers'
    copies now lack."""
    self.version += 1
    for name, (keys, row_values) in values.items():
      table = self.tables[name]
      if not self.rules.registers:
        table.push(keys, row_values)
        continue
      old_rows = np.array(table.peek(keys))
      table.push(keys, row_values)
      change = np.asarray(table.peek(keys)) - old_rows
      # If the function adds, the sender has applied its increments to its own
      # copies. It cannot know the change that another function makes.
      sender = worker if table.function.additive else None
      self._copies.add_change(sender, name, keys, change)

  # Workers that join and leave.

  def join(self, worker: int) -> None:
    """Registers a new incarnation of a worker: it has no copies and no cached
    keys. The worker's clocks stay."""
    self._copies.join(worker)
    self._key_caches[worker] = KeyCache()
    self._reading.pop(worker, None)

  def leave(self, worker: int) -> int:
    """Removes one of several workers for good; no other worker waits for it.
    Returns by how much the slowest clock has advanced."""
    before = self.slowest
    self.workers.remove(worker)
    self._copies.leave(worker)
    del self._key_caches[worker]
    self._reading.pop(worker, None)
    for clocks in self.clocks.values():
      clocks.leave(worker)
    self._apply_deferred(self.slowest)
    return self.slowest - before

  # Sending.

  def at_clock(self) -> dict[int, Rows]:
    """Returns the rows to send to each worker after the slowest clock has
    advanced."""
    if not self.rules.by_clock:
      return {}
    return {worker: self._select_changed(worker) for worker in self.workers}

  def _select_changed(self, worker: int) -> Rows:
    """Returns the changed rows of which a worker has copies, within the
    budget."""
    tables, late = {}, {}
    for name, copies in self._copies.copies_of(worker).items():
      keys = copies.keys[copies.columns["changed"]]
      if self.rules.budgeted:
        keys, late_keys = self._split_by_budget(name, copies, keys)
        if late_keys.size:
          late[name] = late_keys
      if keys.size:
        tables[name] = self._prepare_rows(worker, name, keys)
    return Rows(self.slowest, tables, asked=False, late=late)

  def _split_by_budget(
    self, name: str, copies: KeyedRows, keys: Keys
  ) -> tuple[Keys, Keys]:
    """Splits keys into (keys to send, late keys). The keys to send have the
    largest relative changes, and are within the table's share of the budget;
    the share is in proportion to the number of rows."""
    total = self._total or sum(map(len, self.tables.values()))
    budget = round(self.rules.budget * len(self.tables[name]) / total)
    if len(keys) <= budget:
      return keys, keys[:0]
    missing_change = copies.read(keys, "lacks")
    order = largest_first(missing_change, self.tables[name].peek(keys))
    return np.sort(keys[order[:budget]]), np.sort(keys[order[budget:]])

  def _prepare_rows(
    self, worker: int, name: str, keys: Keys
  ) -> tuple[Keys, Any]:
    """Returns (keys, rows) to send, and records that the worker's copies have
    these rows."""
    self._copies.record_sent(worker, name, keys)
    return keys, np.asarray(self.tables[name].pull(keys))

  def by_value(self, worker: int, clock: int) -> Rows | None:
    """Returns the rows of which a worker's copies lack too much for a read at
    `clock`; None if there are none. Records that the worker is about to read.
    """
    limit, tables = self.rules.limit(clock), {}
    self._reading[worker] = clock
    for name, copies in self._copies.copies_of(worker).items():
      if not len(copies):
        continue
      missing_change = np.abs(copies.columns["lacks"]).reshape(len(copies), -1)
      keys = copies.keys[missing_change.max(1, initial=0) > limit]
      if keys.size:
        tables[name] = self._prepare_rows(worker, name, keys)
    return Rows(self.slowest, tables, asked=False) if tables else None

  # Moving ranges of keys between shards.

  def part(self, name: str, start: int, stop: int) -> dict[str, Any]:
    """Returns the rows start <= key < stop of a table as a tree of arrays, with
    the rows' states and the record of the workers' copies."""
    (rows,) = self.tables[name].shard_rows
    return {
      "rows": rows.between(start, stop).pack(),
      "copies": self._copies.range_part(name, start, stop),
    }

  def set_range(
    self, name: str, start: int, stop: int, parts: Sequence[Mapping[str, Any]]
  ) -> None:
    """Sets the rows of a table to start <= key < stop: the server's rows in
    that range, and the `parts` that other shards have given. The clocks of all
    rows must be equal, and no message may be deferred."""
    rows = [KeyedRows.unpack(part["rows"]) for part in parts]
    self.tables[name].set_range(start, stop, rows)
    copies = [part["copies"] for part in parts]
    self._copies.set_range(name, start, stop, copies)

  # Checkpoints.

  def pack(self) -> dict[str, Any]:
    """Returns the server as a tree of arrays and JSON."""
    return {
      "tables": {name: table.pack() for name, table in self.tables.items()},
      "copies": self._copies.pack(),
      "cached": [[*cache.lists.items()] for cache in self._key_caches.values()],
      "deferred": self._deferred,
      "clocks": {name: clocks.pack() for name, clocks in self.clocks.items()},
      "workers": self.workers,
      "reading": list(self._reading.items()),
      "version": self.version,
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores the packed state of a server with the same arguments."""
    for name, table in self.tables.items():
      table.unpack(tree["tables"][name])
    for worker in set(self.workers) - set(tree["workers"]):
      self.leave(worker)
    self._copies.unpack(tree["copies"])
    for worker, lists in zip(self.workers, tree["cached"], strict=True):
      self._key_caches[worker] = KeyCache(lists)
    self._deferred = [
      (clock, worker, {name: tuple(pair) for name, pair in values.items()})
      for clock, worker, values in tree["deferred"]
    ]
    clocks = tree["clocks"].items()
    self.clocks = {name: RangeClocks.unpack(packed) for name, packed in clocks}
    self._reading, self.version = dict(tree["reading"]), tree["version"]


def _change(table: Table, values: Any) -> np.ndarray:
  """Returns the change of rows by pushed values, [n, ...]; infinity if the
  function at the server does not simply add them."""
  if table.function.additive:
    return np.asarray(values, np.float64)
  return np.full(np.shape(values), np.inf)


def _new_keys(push: Push) -> dict[bytes, Keys]:
  """Returns the lists of keys in a message by digest. If several tables share a
  list, only the first of them has it."""
  key_lists = [row_values.keys for row_values in push.tables.values()]
  return {
    key_list.digest: key_list.keys
    for key_list in key_lists
    if key_list.keys is not None
  }


def _decode(codec: Any, table: Table, keys: Keys, values: Any) -> Any:
  """Returns values [n, ...], decoded if they are a packet."""
  if isinstance(values, bytes):
    return codec.unpack(values, len(keys), table.shape, table.dtype)
  return values


def _add_up(messages: list[_Values]) -> _Values:
  """Adds up the values of several messages by key."""
  names = sorted({name for values in messages for name in values})
  sums = {}
  for name in names:
    parts = [values[name] for values in messages if name in values]
    keys, values = map(np.concatenate, zip(*parts, strict=True))
    sums[name] = keys_lib.add_up(keys, values)
  return sums
