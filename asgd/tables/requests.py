"""What workers ask shards and what shards reply: plain data, as bytes.

A holder of a worker's place numbers its requests to a shard, and asks the next
once the last was answered: one that is sent again, as a shard has died, is done
once. A shard numbers the rows that it sends a holder, whether it was asked for
them or not: `Mail` keeps them until they are taken in that order.

A worker writes its message at the end of a clock down (`ClockMessage`) before
any shard has it. If it dies after some of the shards have it, and others not,
the next holder of its place sends it to the others: the clock's jobs are
computed once, and all shards have the same updates of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd.tables import wire
from asgd.tables.division import Cuts
from asgd.tables.messages import KeyList, Push, RowValues

JOIN, PULL, PUSH = "join", "pull", "push"
MOVE = "move"  # of the driver: to have other ranges of keys
DRIVER = -1  # in the place of a worker
BINS = 32  # of clock differentials in a record: -1, -2, ..., -32 or less


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
  """A shard's answer to a request."""

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


class JobRecord(NamedTuple):
  """What is recorded of a job, beside its time; as `base.Records`."""

  update: int  # messages that the first shard had applied, as it said last
  worker: int
  job: int
  staleness: int  # clocks that the oldest row lacked
  gap: float  # not known: no shard knows what a worker has
  loss: float
  accepted: bool
  message_norm: float
  update_norm: float
  bytes_up: int
  bytes_down: int
  residual_norm: float
  reads: np.ndarray  # int[BINS], rows read at each clock differential


class ClockMessage(NamedTuple):
  """What a worker sends to all shards at the end of a clock."""

  clock: int  # clocks that it has finished with it
  done: int  # jobs that it has finished with it
  shards: Sequence[Mapping[str, RowValues]]  # with their keys, by shard
  records: Sequence[JobRecord]  # of its jobs, as they are before any answer


def dump_request(request: Request) -> bytes:
  """Returns a request as it travels."""
  tables: dict[str, Any] = {}
  for name, each in request.tables.items():
    if request.kind != PUSH:
      tables[name] = each
      continue
    keys, values = each
    packed = isinstance(values, bytes)
    values = np.frombuffer(values, np.uint8) if packed else values
    tables[name] = [keys.digest.hex(), keys.keys, packed, values]
  return wire.dump([*request[:-1], tables])


def dump_move(version: int, cuts: Cuts, parts: Sequence[bytes]) -> bytes:
  """Returns the request that a shard has other ranges from now on.

  Args:
    version: of the division.
    cuts: of all shards.
    parts: of other shards, as `TableShard.give` gives them.
  """
  tables = {"cuts": dict(cuts), "parts": list(parts)}
  return dump_request(Request(MOVE, DRIVER, 0, version, 0, tables=tables))


def load_request(data: bytes) -> Request:
  """Returns the request that bytes are of."""
  *numbers, tables = wire.load(data)
  request = Request(*numbers)
  if request.kind != PUSH:
    return request._replace(tables=tables)
  out = {}
  for name, (digest, keys, packed, values) in tables.items():
    values = values.tobytes() if packed else values
    out[name] = RowValues(KeyList(bytes.fromhex(digest), keys), values)
  return request._replace(tables=out)


def dump_message(message: ClockMessage) -> bytes:
  """Returns a message as bytes.

  Example:
    >>> import numpy as np
    >>> from asgd.tables import messages, requests
    >>> keys = messages.KeyCache().pack(np.arange(2))
    >>> sent = {"w": messages.RowValues(keys, np.ones((2, 1)))}
    >>> message = requests.ClockMessage(1, 2, [sent], [])
    >>> data = requests.dump_message(message)
    >>> again = requests.load_message(data)
    >>> again.done, again.shards[0]["w"].keys.keys.tolist()
    (2, [0, 1])
  """
  clock, done, shards, records = message
  pushes = [
    dump_request(Request(PUSH, 0, 0, 0, 0, clock, done, tables))
    for tables in shards
  ]
  return wire.dump([clock, done, pushes, records])


def load_message(data: bytes) -> ClockMessage:
  """Returns the message that bytes are of."""
  clock, done, pushes, records = wire.load(data)
  shards = [load_request(push).tables for push in pushes]
  return ClockMessage(clock, done, shards, [JobRecord(*x) for x in records])


class Mail:
  """One holder's requests, the replies, and the rows that are not taken.

  Example:
    >>> from asgd.tables import requests
    >>> mine = requests.Mail(worker=0, life=0, shards=2)
    >>> mine.hear_rows(1, [(0, b"ab"), (2, b"c")])
    >>> mine.there(1), list(mine.open(1, 1)), mine.taken
    (1, [b'ab'], [0, 1])
    >>> mine.count()
    (0, 2)
  """

  def __init__(self, worker: int, life: int, shards: int):
    """Starts with nothing asked."""
    self.worker, self.life = worker, life
    self.taken = [0] * shards  # rows of each
    self.replies = [Reply(0, []) for _ in range(shards)]  # the last ones
    self._inbox: list[dict[int, bytes]] = [{} for _ in range(shards)]
    self._numbers = [0] * shards  # of the next request
    self._up = self._down = 0  # bytes since the last count

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
    head = kind, self.worker, self.life, number, taken, clock, done
    data = dump_request(Request(*head, tables or {}))
    self._up += len(data)
    return data

  def hear(self, shard: int, reply: Reply) -> None:
    """Takes the reply to the last request to a shard."""
    self.replies[shard] = reply
    self.hear_rows(shard, reply.rows)

  def hear_rows(self, shard: int, rows: Sequence[tuple[int, bytes]]) -> None:
    """Keeps rows until they are taken; those that it has had are dropped."""
    for number, data in rows:
      if number >= self.taken[shard]:
        self._inbox[shard][number] = data

  def lacks(self, shard: int) -> bool:
    """Whether rows are still to come that a reply of a shard speaks of."""
    return self.there(shard) < self.replies[shard].upto

  def there(self, shard: int) -> int:
    """Returns the number up to which rows of a shard could be taken."""
    end = self.taken[shard]
    while end in self._inbox[shard]:
      end += 1
    return end

  def open(self, shard: int, upto: int) -> Iterator[bytes]:
    """Yields the rows of a shard before a number, which are taken then; they
    must be there."""
    for number in range(self.taken[shard], upto):
      data = self._inbox[shard].pop(number)
      self._down += len(data)
      self.taken[shard] = number + 1
      yield data

  def count(self) -> tuple[int, int]:
    """Returns (bytes asked, bytes taken) since the last count."""
    both = self._up, self._down
    self._up = self._down = 0
    return both

  def change(self) -> float:
    """Returns the RMS of what its last message changed, as shards say."""
    squares = sum(reply.squares for reply in self.replies)
    size = sum(reply.size for reply in self.replies)
    return float(np.sqrt(squares / max(size, 1)))

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of arrays and JSON."""
    return {
      "life": self.life,
      "taken": self.taken,
      "numbers": self._numbers,
      "replies": [reply._replace(rows=[]) for reply in self.replies],
      "inbox": [list(rows.items()) for rows in self._inbox],
      "bytes": [self._up, self._down],
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what one like it has packed."""
    self.life, self.taken = tree["life"], tree["taken"]
    self._numbers = tree["numbers"]
    self.replies = [Reply(*reply) for reply in tree["replies"]]
    self._inbox = [dict(rows) for rows in tree["inbox"]]
    self._up, self._down = tree["bytes"]
