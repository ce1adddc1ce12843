"""Requests of workers to shards and the shards' replies: plain data, as bytes.

An incarnation of a worker numbers its requests to each shard. It sends a
request after it has received the reply to the previous one. So a shard that was
killed executes a repeated request at most once. A shard
numbers the rows that it sends to an incarnation, requested or not.
`ShardSessions` keeps received rows until the worker takes them in that order.

A worker saves its message of a clock (`ClockMessage`) before it sends the
message to any shard. If the worker is killed while only some shards have the
message, its next incarnation sends the message to the others. The jobs of the
clock are computed once, and all shards have the same updates of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd.tables import wire
from asgd.tables.division import Cuts
from asgd.tables.messages import KeyList, Push, RowValues

JOIN, PULL, PUSH = "join", "pull", "push"
MOVE = "move"  # sent by the driver: the shard gets other ranges of keys
DRIVER = -1  # worker index in the driver's requests
BINS = 32  # of clock differentials in a record: -1, -2, ..., -32 or less


class Request(NamedTuple):
  """A request of a worker, or of the driver, to a shard."""

  kind: str  # JOIN, PULL or PUSH, or MOVE
  worker: int
  incarnation: int  # of the worker, counted from 0
  number: int  # count of earlier requests to this shard; MOVE: new version
  taken: int  # rows of this shard that the worker has taken
  # PULL: clocks that the worker has finished; PUSH: including this message.
  clock: int = 0
  done: int = 0  # PUSH: jobs finished by the worker, including this message's
  # By table. PULL: Keys; PUSH: RowValues. MOVE: {"cuts", "parts"}, the parts
  # from other shards.
  tables: Mapping[str, Any] = {}

  @property
  def push(self) -> Push:
    """The message in a PUSH."""
    return Push(self.worker, self.clock, self.tables)


class Reply(NamedTuple):
  """A shard's reply to a request."""

  number: int  # of the request; -1: a later incarnation has joined
  # (number, dumped Rows); after a retry the shard may send a row twice.
  rows: list[tuple[int, bytes]]
  # A number of a row. PULL: the rows before it belong to the reply. PUSH: the
  # rows before it lack the message.
  upto: int = 0
  done: int = 0  # JOIN: jobs of the worker that the shard has received
  version: int = 0  # messages that the shard has applied
  squares: float = 0.0  # PUSH: sum over elements of the squared change
  size: int = 0  # PUSH: number of these elements
  limit: int | None = None  # jobs after which the worker halts; None: no limit
  # JOIN: (version of the division, its cuts if it is not the first).
  division: tuple[int, Cuts] | None = None


class JobRecord(NamedTuple):
  """The record of a job without its time; fields as in `base.Records`."""

  update: int  # messages applied by the first shard, as of its last reply
  worker: int
  job: int
  staleness: int  # clocks that the oldest row lacked
  gap: float  # NaN: no shard knows which values the worker read
  loss: float
  accepted: bool
  message_norm: float
  update_norm: float
  bytes_up: int
  bytes_down: int
  residual_norm: float
  reads: np.ndarray  # int[BINS], rows read at each clock differential


class ClockMessage(NamedTuple):
  """A worker's message to all shards at the end of a clock."""

  clock: int  # clocks that the worker has finished, including this one
  done: int  # jobs that the worker has finished, including these
  shards: Sequence[Mapping[str, RowValues]]  # with all keys, by shard
  records: Sequence[JobRecord]  # of the jobs, as known before any reply


def dump_request(request: Request) -> bytes:
  """Returns a request as bytes."""
  tables: dict[str, Any] = {}
  for name, content in request.tables.items():
    if request.kind != PUSH:
      tables[name] = content
      continue
    keys, values = content
    is_packet = isinstance(values, bytes)
    values = np.frombuffer(values, np.uint8) if is_packet else values
    tables[name] = [keys.digest.hex(), keys.keys, is_packet, values]
  return wire.dump([*request[:-1], tables])


def dump_move(version: int, cuts: Cuts, parts: Sequence[bytes]) -> bytes:
  """Returns, as bytes, the request that gives a shard its ranges of a division.

  Args:
    version: the version of the division.
    cuts: the cuts of all shards.
    parts: the rows that other shards give to this one (`TableShard.give`).
  """
  tables = {"cuts": dict(cuts), "parts": list(parts)}
  return dump_request(Request(MOVE, DRIVER, 0, version, 0, tables=tables))


def load_request(data: bytes) -> Request:
  """Returns the request that `dump_request` wrote."""
  *numbers, tables = wire.load(data)
  request = Request(*numbers)
  if request.kind != PUSH:
    return request._replace(tables=tables)
  row_values = {}
  for name, (digest, keys, is_packet, values) in tables.items():
    values = values.tobytes() if is_packet else values
    row_values[name] = RowValues(KeyList(bytes.fromhex(digest), keys), values)
  return request._replace(tables=row_values)


def dump_message(message: ClockMessage) -> bytes:
  """Returns a message as bytes.

  Example:
    >>> import numpy as np
    >>> from asgd.tables import messages, requests
    >>> keys = messages.KeyCache().pack(np.arange(2))
    >>> sent = {"w": messages.RowValues(keys, np.ones((2, 1)))}
    >>> message = requests.ClockMessage(1, 2, [sent], [])
    >>> data = requests.dump_message(message)
    >>> loaded = requests.load_message(data)
    >>> loaded.done, loaded.shards[0]["w"].keys.keys.tolist()
    (2, [0, 1])
  """
  clock, done, shards, records = message
  pushes = [
    dump_request(Request(PUSH, 0, 0, 0, 0, clock, done, tables))
    for tables in shards
  ]
  return wire.dump([clock, done, pushes, records])


def load_message(data: bytes) -> ClockMessage:
  """Returns the message that `dump_message` wrote."""
  clock, done, pushes, records = wire.load(data)
  shards = [load_request(push).tables for push in pushes]
  return ClockMessage(
    clock, done, shards, [JobRecord(*record) for record in records]
  )


class ShardSessions:
  """The sessions of one incarnation of a worker with all shards: for each shard
  the number of the next request, the last reply, and the received rows that the
  worker has not taken.

  Example:
    >>> from asgd.tables import requests
    >>> sessions = requests.ShardSessions(worker=0, incarnation=0, shards=2)
    >>> sessions.receive_rows(1, [(0, b"ab"), (2, b"c")])
    >>> sessions.available(1), list(sessions.take(1, 1)), sessions.taken
    (1, [b'ab'], [0, 1])
    >>> sessions.count()
    (0, 2)
  """

  def __init__(self, worker: int, incarnation: int, shards: int):
    """Starts without requests."""
    self.worker, self.incarnation = worker, incarnation
    self.taken = [0] * shards  # rows taken, by shard
    self.replies = [Reply(0, []) for _ in range(shards)]  # the last, by shard
    # By shard: received rows that were not taken, by number.
    self._inbox: list[dict[int, bytes]] = [{} for _ in range(shards)]
    self._numbers = [0] * shards  # of the next request
    self._up = self._down = 0  # bytes since the last `count`

  def ask(
    self,
    shard: int,
    kind: str,
    clock: int = 0,
    done: int = 0,
    tables: Mapping[str, RowValues] | None = None,
  ) -> bytes:
    """Returns the next request to a shard; the arguments are as in Request."""
    number = self._numbers[shard]
    self._numbers[shard] += 1
    taken = self.taken[shard]
    head = kind, self.worker, self.incarnation, number, taken, clock, done
    data = dump_request(Request(*head, tables or {}))
    self._up += len(data)
    return data

  def receive(self, shard: int, reply: Reply) -> None:
    """Stores a shard's reply to the last request, and its rows."""
    self.replies[shard] = reply
    self.receive_rows(shard, reply.rows)

  def receive_rows(
    self, shard: int, rows: Sequence[tuple[int, bytes]]
  ) -> None:
    """Stores rows of a shard; drops rows that the worker took before."""
    for number, data in rows:
      if number >= self.taken[shard]:
        self._inbox[shard][number] = data

  def lacks_rows(self, shard: int) -> bool:
    """Whether a row that a shard's last reply refers to has not arrived."""
    return self.available(shard) < self.replies[shard].upto

  def available(self, shard: int) -> int:
    """Returns the number before which all rows of a shard have arrived."""
    number = self.taken[shard]
    while number in self._inbox[shard]:
      number += 1
    return number

  def take(self, shard: int, upto: int) -> Iterator[bytes]:
    """Takes and yields the rows of a shard before the number `upto`; all of
    them must have arrived."""
    for number in range(self.taken[shard], upto):
      data = self._inbox[shard].pop(number)
      self._down += len(data)
      self.taken[shard] = number + 1
      yield data

  def count(self) -> tuple[int, int]:
    """Returns (bytes of requests, bytes of rows taken) since the last count."""
    counts = self._up, self._down
    self._up = self._down = 0
    return counts

  def change(self) -> float:
    """Returns the RMS of the change by the last push, from the replies."""
    squares = sum(reply.squares for reply in self.replies)
    size = sum(reply.size for reply in self.replies)
    return float(np.sqrt(squares / max(size, 1)))

  def pack(self) -> dict[str, Any]:
    """Returns the sessions as a tree of arrays and JSON."""
    return {
      "incarnation": self.incarnation,
      "taken": self.taken,
      "numbers": self._numbers,
      "replies": [reply._replace(rows=[]) for reply in self.replies],
      "inbox": [list(rows.items()) for rows in self._inbox],
      "bytes": [self._up, self._down],
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores what `pack` returned."""
    self.incarnation, self.taken = tree["incarnation"], tree["taken"]
    self._numbers = tree["numbers"]
    self.replies = [Reply(*reply) for reply in tree["replies"]]
    self._inbox = [dict(rows) for rows in tree["inbox"]]
    self._up, self._down = tree["bytes"]
