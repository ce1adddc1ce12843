"""The server of tables: applies messages, counts clocks, sends rows.

It decides no order: a runtime gives it messages one by one, asks whether a
worker may be answered, and takes the rows that it sends.
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
from asgd.tables.rows import KeyedRows, RowCopies, squares
from asgd.tables.table import Table

_LAST = np.iinfo(np.int64).max
_Values = dict[str, tuple[Keys, np.ndarray]]


class TableServer:
  """Tables by name, and what workers have of them.

  Example:
    A row that a worker has is sent to it when the slowest clock advances.

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
    """Takes the tables over; `codec` is that of the clients, `total` the rows
    of all shards, over which a budget is spread; None: it has them all."""
    self.tables, self.rules, self._total = dict(tables), rules, total
    self.workers = list(workers)
    self._codec = codec
    self._aggregates = any(t.function.aggregates for t in tables.values())
    self.clocks = {
      name: RangeClocks(workers, 0, _LAST if t.stop is None else t.stop)
      for name, t in tables.items()
    }
    self._receivers = {worker: KeyCache() for worker in workers}
    self._deferred: list[tuple[int, int, _Values]] = []
    shapes = {name: table.shape for name, table in self.tables.items()}
    self._copies = RowCopies(shapes, workers)
    # Of value_bounded: workers that were answered and may not have read yet,
    # and their clocks.
    self._reading: dict[int, int] = {}
    self.version = 0  # messages applied

  @property
  def specs(self) -> dict[str, TableSpec]:
    """What clients know of the tables."""
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
    """Returns rows for a worker that asks for them; it is registered for them
    if the rules say so."""
    out = {}
    for name, wanted in keys.items():
      out[name] = wanted, np.asarray(self.tables[name].pull(wanted))
      if self.rules.registers:
        self._copies.register(worker, name, wanted)
    return Rows(self.slowest, out)

  # Writing.

  def receive(self, push: Push) -> int:
    """Applies a message, at once or when all of its clock have come; returns by
    how much the slowest clock has advanced.

    Raises:
      ValueError: for what a table refuses, with the worker; nothing of the
        message is applied then.
    """
    before, values = self.slowest, self._values(push)
    self.has_read(push.worker)
    if self.rules.deferred or self._aggregates:
      self._deferred.append((push.clock, push.worker, values))
    else:
      self._apply(push.worker, values)
    for clocks in self.clocks.values():
      clocks.tell(push.worker, push.clock)
    after = self.slowest
    self._apply_deferred(after)
    return after - before

  def measure(self, push: Push) -> tuple[int, tuple[float, int]]:
    """Receives a message; returns by how much the slowest clock has advanced,
    and of the change the sum of squares and the number of elements."""
    keys = self.keys_of(push).items()

    def peek():
      return [np.array(self.tables[k].peek(x), float) for k, x in keys]

    before, advanced = peek(), self.receive(push)
    return advanced, squares(map(np.subtract, peek(), before))

  def keys_of(self, push: Push) -> dict[str, Keys]:
    """Returns the keys of a message, by table, before it is received."""
    lists, out = self._receivers[push.worker].lists, {}
    told = {  # a list may be of several tables, and told with the first
      sent.keys.digest: sent.keys.keys for sent in push.tables.values()
      if sent.keys.keys is not None
    }
    for name, sent in push.tables.items():
      digest = sent.keys.digest
      out[name] = told[digest] if digest in told else lists[digest]
    return out

  def defers(self, push: Push, arrived: Collection[int] = ()) -> bool:
    """Whether a message must wait: with it, a worker that was answered, and may
    not have read yet, would lack more of a row than it may.

    Args:
      push: of a worker, which reads nothing until it is received.
      arrived: workers whose next messages are here, and wait.
    """
    others = self._reading.keys() - {push.worker, *arrived}
    for name, keys in self.keys_of(push).items() if others else ():
      change = self._change(name, keys, push.tables[name].values)
      for worker in others:
        copies = self._copies.of(worker)[name]
        has, limit = copies.has(keys), self.rules.limit(self._reading[worker])
        lacks = copies.read(keys[has], "lacks") + change[has]
        if not (np.abs(lacks) <= limit).all():
          return True
    return False

  def has_read(self, worker: int) -> None:
    """Notes that a worker has read the rows it was answered; its next message
    says so at the latest."""
    self._reading.pop(worker, None)

  def _decoded(self, table, keys, values):
    if isinstance(values, bytes):
      return self._codec.unpack(values, len(keys), table.shape, table.dtype)
    return values

  def _change(self, name, keys, values):
    """By how much values change the rows of a table; infinite if that is not
    known before it has them."""
    table = self.tables[name]
    values = self._decoded(table, keys, values)
    if table.function.additive:
      return np.asarray(values, np.float64)
    return np.full(np.shape(values), np.inf)

  def skip(self, push: Push) -> None:
    """Takes note of the keys of a message that is not to be applied: those to
    come may have only their digests."""
    for sent in push.tables.values():
      self._receivers[push.worker].unpack(sent.keys)

  def _apply_deferred(self, clock):
    """Applies what is of a clock that all have finished, in the order of the
    workers: no bit depends on the order of arrival. What is for functions that
    aggregate is summed up before."""
    due = [each for each in self._deferred if each[0] <= clock]
    self._deferred = [each for each in self._deferred if each[0] > clock]
    due.sort(key=lambda each: each[:2])
    if self._aggregates:
      for _, group in itertools.groupby(due, key=lambda each: each[0]):
        sent = [(worker, values) for _, worker, values in group]
        # Nobody's copy has what came of it: the sender stands for no worker.
        self._apply(sent[0][0], _summed([values for _, values in sent]))
      return
    for _, worker, values in due:
      self._apply(worker, values)

  def _values(self, push) -> _Values:
    """What a message says, checked."""
    out = {}
    try:
      for name, sent in push.tables.items():
        if name not in self.tables:
          known = ", ".join(self.tables)
          raise ValueError(f"there is no table {name!r}; there are {known}")
        table = self.tables[name]
        keys = self._receivers[push.worker].unpack(sent.keys)
        values = self._decoded(table, keys, sent.values)
        out[name] = table.read_keys(keys), values
        table.check_values(keys, values)
    except ValueError as error:
      raise ValueError(
        f"message of worker {push.worker}, clock {push.clock}: {error}"
      ) from None
    return out

  def _apply(self, worker, values: _Values):
    self.version += 1
    for name, (keys, more) in values.items():
      table = self.tables[name]
      if not self.rules.registers:
        table.push(keys, more)
        continue
      old = np.array(table.peek(keys))
      table.push(keys, more)
      change = np.asarray(table.peek(keys)) - old
      # Of others than increments, the sender does not know the change.
      sender = worker if table.function.additive else None
      self._copies.change(sender, name, keys, change)

  # Workers that come and go.

  def join(self, worker: int) -> None:
    """Another takes a worker's place: it has no rows, and knows no keys. The
    clocks of the place stay."""
    self._copies.join(worker)
    self._receivers[worker] = KeyCache()
    self._reading.pop(worker, None)

  def leave(self, worker: int) -> int:
    """Removes a worker, of several, for good: no other waits for it. Returns
    by how much the slowest clock has advanced."""
    before = self.slowest
    self.workers.remove(worker)
    self._copies.leave(worker)
    del self._receivers[worker]
    self._reading.pop(worker, None)
    for clocks in self.clocks.values():
      clocks.leave(worker)
    after = self.slowest
    self._apply_deferred(after)
    return after - before

  # Sending.

  def at_clock(self) -> dict[int, Rows]:
    """Returns what is sent to each worker as the slowest clock has advanced."""
    if not self.rules.by_clock:
      return {}
    return {worker: self._changed(worker) for worker in self.workers}

  def _changed(self, worker):
    tables, late = {}, {}
    for name, copies in self._copies.of(worker).items():
      keys = copies.keys[copies.columns["changed"]]
      if self.rules.budgeted:
        keys, rest = self._largest(name, copies, keys)
        if rest.size:
          late[name] = rest
      if keys.size:
        tables[name] = self._sent(worker, name, keys)
    return Rows(self.slowest, tables, asked=False, late=late)

  def _largest(self, name, copies, keys):
    """Returns the keys that the budget is spent on, and the others; a table has
    its part of it by its number of rows."""
    total = self._total or sum(map(len, self.tables.values()))
    budget = round(self.rules.budget * len(self.tables[name]) / total)
    if len(keys) <= budget:
      return keys, keys[:0]
    sizes = [
      np.abs(np.asarray(x)).reshape(len(keys), -1).max(1)
      for x in (copies.read(keys, "lacks"), self.tables[name].peek(keys))
    ]
    change = sizes[0] / (sizes[1] + np.finfo(np.float64).tiny)
    order = np.argsort(-change, kind="stable")
    return np.sort(keys[order[:budget]]), np.sort(keys[order[budget:]])

  def _sent(self, worker, name, keys):
    self._copies.sent(worker, name, keys)
    return keys, np.asarray(self.tables[name].pull(keys))

  def by_value(self, worker: int, clock: int) -> Rows | None:
    """Returns the rows of a worker at a clock that lack more than they may, if
    there are any. It is about to read (`has_read`)."""
    limit, tables = self.rules.limit(clock), {}
    self._reading[worker] = clock
    for name, copies in self._copies.of(worker).items():
      if not len(copies):
        continue
      lacks = np.abs(copies.columns["lacks"]).reshape(len(copies), -1)
      keys = copies.keys[lacks.max(1, initial=0) > limit]
      if keys.size:
        tables[name] = self._sent(worker, name, keys)
    return Rows(self.slowest, tables, asked=False) if tables else None

  # Another range of keys.

  def part(self, name: str, start: int, stop: int) -> dict[str, Any]:
    """Returns the rows start <= key < stop of a table as a tree of arrays, with
    their states and what copies of them lack."""
    (rows,) = self.tables[name].shard_rows
    return {
      "rows": rows.between(start, stop).pack(),
      "copies": self._copies.part(name, start, stop),
    }

  def set_range(
    self, name: str, start: int, stop: int, parts: Sequence[Mapping[str, Any]]
  ) -> None:
    """Has the rows start <= key < stop of a table from now on: those that it
    had before, and `parts` of other shards. All have the same clocks then, and
    no message is deferred."""
    rows = [KeyedRows.unpack(part["rows"]) for part in parts]
    self.tables[name].set_range(start, stop, rows)
    self._copies.set_range(name, start, stop, [x["copies"] for x in parts])

  # Checkpoints.

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of arrays and JSON."""
    return {
      "tables": {name: table.pack() for name, table in self.tables.items()},
      "copies": self._copies.pack(),
      "cached": [[*x.lists.items()] for x in self._receivers.values()],
      "deferred": self._deferred,
      "clocks": {name: each.pack() for name, each in self.clocks.items()},
      "workers": self.workers,
      "reading": list(self._reading.items()),
      "version": self.version,
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what a server like this one has packed."""
    for name, table in self.tables.items():
      table.unpack(tree["tables"][name])
    for worker in set(self.workers) - set(tree["workers"]):
      self.leave(worker)
    self._copies.unpack(tree["copies"])
    for worker, lists in zip(self.workers, tree["cached"], strict=True):
      self._receivers[worker] = KeyCache(lists)
    self._deferred = [
      (clock, worker, {name: (k, x) for name, (k, x) in values.items()})
      for clock, worker, values in tree["deferred"]
    ]
    self.clocks = {
      name: RangeClocks.unpack(each) for name, each in tree["clocks"].items()
    }
    self._reading, self.version = dict(tree["reading"]), tree["version"]


def _summed(messages: list[_Values]) -> _Values:
  """Adds up the values of several messages by key."""
  names = sorted({name for values in messages for name in values})
  out = {}
  for name in names:
    parts = [values[name] for values in messages if name in values]
    keys, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    out[name] = keys_lib.add_up(keys, values)
  return out
