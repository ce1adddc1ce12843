"""What workers ask shards, and what they hear: plain data, as bytes.

A holder of a worker's place numbers its requests to a shard, and asks the next
once the last was answered: one that is sent again, as a shard has died, is done
once. A shard numbers the rows that it sends a holder, whether it was asked for
them or not: they are taken in that order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd.tables import wire
from asgd.tables.division import Cuts
from asgd.tables.messages import KeyList, Push, Rows, RowValues

JOIN, PULL, PUSH = "join", "pull", "push"
MOVE = "move"  # of the driver: to have other ranges of keys
DRIVER = -1  # in the place of a worker


class Request(NamedTuple):
  """What a worker asks of a shard."""

  kind: str  # JOIN, PULL or PUSH, or MOVE
  worker: int
  life: int  # holders of the place before this one
  number: int  # of the holder's requests to this shard; MOVE: of the division
  taken: int  # rows that it was sent, and has
  # PULL: clocks that the worker has finished; PUSH: with this message.
  clock: int = 0
  done: int = 0  # PUSH: jobs that it has finished with this message
  # PULL: Keys; PUSH: RowValues; MOVE: cuts, and parts of other shards.
  tables: Mapping[str, Any] = {}

  @property
  def push(self) -> Push:
    """The message of a PUSH."""
    return Push(self.worker, self.clock, self.tables)


class Reply(NamedTuple):
  """What a worker hears of a request."""

  number: int  # of the request; -1: another holder has the place
  rows: list[tuple[int, bytes]]  # (number, Rows), perhaps some of them again
  # PULL: rows before this number answer it; PUSH: they lack the message.
  upto: int = 0
  done: int = 0  # JOIN: jobs of the place that the shard has
  version: int = 0  # messages that the shard has applied
  squares: float = 0.0  # PUSH: sum over elements of the squared change
  size: int = 0  # PUSH: so many elements
  limit: int | None = None  # jobs that the worker may do before it asks again
  # JOIN: the division of tables, and its cuts if it is not the first.
  division: tuple[int, Cuts] | None = None


def dump_request(request: Request) -> bytes:
  """Returns a request as it travels."""
  tables: dict[str, Any] = {}
  for name, each in request.tables.items():
    if request.kind != PUSH:
      tables[name] = each
      continue
    values = each.values
    packed = isinstance(values, bytes)
    if packed:
      values = np.frombuffer(values, np.uint8)
    keys = each.keys
    tables[name] = [keys.digest.hex(), keys.keys, packed, values]
  return wire.dump([*request[:-1], tables])


def dump_move(version: int, cuts: Cuts, parts: Sequence[bytes]) -> bytes:
  """Returns the request that a shard has other ranges from now on.

  Args:
    version: of the division.
    cuts: of all shards.
    parts: of other shards, as `TableShard.give` gives them.
  """
  arrays = [np.frombuffer(part, np.uint8) for part in parts]
  tables = {"cuts": dict(cuts), "parts": arrays}
  return dump_request(Request(MOVE, DRIVER, 0, version, 0, tables=tables))


def load_request(data: bytes) -> Request:
  """Returns the request that bytes are of."""
  *numbers, tables = wire.load(data)
  request = Request(*numbers)
  if request.kind != PUSH:
    return request._replace(tables=tables)
  out = {}
  for name, (digest, keys, packed, values) in tables.items():
    if keys is not None:
      keys = keys.copy()  # which are remembered; the values are not
    values = values.tobytes() if packed else values
    out[name] = RowValues(KeyList(bytes.fromhex(digest), keys), values)
  return request._replace(tables=out)


def dump_rows(rows: Rows) -> bytes:
  """Returns rows as they travel; the keys go with them, so that rows that were
  asked for and others are taken in the same way."""
  tables = {name: list(each) for name, each in rows.tables.items()}
  late = None if rows.late is None else dict(rows.late)
  return wire.dump([rows.clock, tables, rows.asked, late])


def load_rows(data: bytes) -> Rows:
  """Returns the rows that bytes are of."""
  clock, tables, asked, late = wire.load(data)
  pairs = {name: (keys, rows) for name, (keys, rows) in tables.items()}
  return Rows(clock, pairs, asked, late)
