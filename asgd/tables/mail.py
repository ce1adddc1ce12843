"""What a holder of a worker's place has asked shards, and what came of it.

Shards number the rows that they send to a worker. Those that came are kept here
until they are taken, in the order of their numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from asgd.tables import requests
from asgd.tables.messages import RowValues
from asgd.tables.requests import Reply, Request


class Mail:
  """One holder's requests, replies, and rows that are not taken.

  Example:
    >>> from asgd.tables import mail
    >>> mine = mail.Mail(worker=0, life=0, shards=2)
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
    data = requests.dump_request(Request(*head, tables or {}))
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
      "inbox": [
        [[n, np.frombuffer(data, np.uint8)] for n, data in rows.items()]
        for rows in self._inbox
      ],
      "bytes": [self._up, self._down],
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what one like it has packed."""
    self.life, self.taken = tree["life"], list(tree["taken"])
    self._numbers = list(tree["numbers"])
    self.replies = [Reply(*reply) for reply in tree["replies"]]
    self._inbox = [
      {n: data.tobytes() for n, data in rows} for rows in tree["inbox"]
    ]
    self._up, self._down = tree["bytes"]
