"""What workers and server shards say to each other.

Frames are small and of one size; parameters and messages lie in memory that
both sides see, and a frame names the slot. A worker talks to every shard; the
first, the lead, decides who starts what.

  worker -> shard                      shard -> worker
  HELLO   I hold this place            WELCOME  you are holder number `job`
  FETCH   my part for (seq, job)       TICKET   for (seq, job): read the params
  PUSH    (seq) lies in its slot                slot, write to the message slot
  DRAIN   nothing new for me           ACK      (seq) is committed
  BYE     I am gone                    EXPEL    you are taken for dead
                                       STOP     all jobs are received

A message is named by (worker, seq): the seq counts the jobs of the place, not
of its holder, so it is applied exactly once, however often it is sent. In a
consistent run the other shards FOLLOW the lead: they get its trace ROW by row,
and tell what they have with PREPARED. An algorithm that needs a TOTAL over all
shards is ASKed at each of them before the row is written; they say what is
theirs with ASKED, and the lead adds up.
"""

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

from asgd import base

(
  HELLO,
  FETCH,
  PUSH,
  DRAIN,
  BYE,
  WELCOME,
  TICKET,
  ACK,
  EXPEL,
  STOP,
  FOLLOW,
  ROW,
  PREPARED,
  ASK,
  ASKED,
  TOTAL,
) = range(16)
KINDS = (
  *("hello", "fetch", "push", "drain", "bye", "welcome", "ticket", "ack"),
  *("expel", "stop", "follow", "row", "prepared", "ask", "asked", "total"),
)


class Frame(NamedTuple):
  """One thing said; what a field means depends on the kind."""

  kind: int
  worker: int = 0  # place; of a follower, its shard
  seq: int = 0
  job: int = 0  # HELLO, WELCOME: number of the holder; ASKED, PREPARED: shard
  version: int = 0  # TICKET: of params; ROW: its number; ASK: totals known
  # TICKET: kept; PUSH: finite; ROW: action; EXPEL: replaced; HELLO: I live, and
  # wait for another shard
  flag: int = 0
  params: int = -1  # slot
  message: int = -1  # slot
  value: float = 0.0  # PUSH: loss; ROW: time; ASKED, TOTAL: the number
  loss: float = 0.0  # ROW


_FORMAT = struct.Struct("<4sBxxxiqqqqiidd")
_MAGIC = b"asg1"
SIZE = _FORMAT.size  # bytes of a packed frame


def pack(frame: Frame) -> bytes:
  """Returns a frame as bytes[SIZE]."""
  return _FORMAT.pack(_MAGIC, *frame)


def unpack(data: bytes) -> Frame:
  """Returns what `pack` packed.

  Raises:
    ValueError: for anything else.
  """
  if len(data) != SIZE:
    raise ValueError(f"a frame has {SIZE} bytes, not {len(data)}")
  magic, *fields = _FORMAT.unpack(data)
  if magic != _MAGIC or fields[0] >= len(KINDS):
    raise ValueError(
      f"no frame of this version: it starts with {data[:5]!r}; are all"
      " processes of the same release?"
    )
  return Frame(*fields)


class Entry(NamedTuple):
  """One row of a shard's journal: a row of its trace, and what a recovery
  needs to know beside it."""

  time: float
  worker: int
  job: int
  action: int  # one of base.ACTIONS
  seq: int = -1
  version: int = -1  # SEND: of the ticket
  params: int = -1  # SEND: slot
  message: int = -1  # slot, where the message comes to lie
  loss: float = 0.0  # RECEIVE
  totals: tuple[float, ...] = ()  # RECEIVE: over all shards, if it needs some

  @property
  def event(self):
    """The row of the trace."""
    return self[:4]


HEADER = "time,worker,job,action,seq,version,params,message,loss,totals"


def format_entry(entry: Entry) -> str:
  """Returns an entry as a line, its newline included."""
  time, worker, job, action, seq, version, params, message, loss, totals = entry
  return (
    f"{time!r},{worker},{job},{base.ACTIONS[action]},{seq},{version},{params},"
    f"{message},{loss!r},{';'.join(map(repr, totals))}\n"
  )


def parse_entry(line: str) -> Entry:
  """Returns what `format_entry` formatted.

  Raises:
    ValueError: if it is something else.
  """
  fields = line.rstrip("\n").split(",")
  if not line.endswith("\n") or len(fields) != 10 or (
    fields[3] not in base.ACTIONS
  ):
    raise ValueError(f"no row of a journal: {line!r}")
  time, worker, job, action, *rest, loss, totals = fields
  entry = Entry(
    *(float(time), int(worker), int(job), base.ACTIONS.index(action)),
    *map(int, rest),
    float(loss),
    tuple(map(float, totals.split(";"))) if totals else (),
  )
  if not 0 <= entry.time < math.inf:
    raise ValueError(f"the time {time} is no number of seconds from 0")
  for name, value in zip(("worker", "job"), entry[1:3], strict=True):
    if not 0 <= value < 2**31:
      raise ValueError(f"the {name} {value} is not from 0 to 2147483647")
  return entry


def rolled_back(entries: Iterable[Entry]) -> tuple[int, int]:
  """Returns how many ROLLBACK rows there are, and how many updates they undid.

  Args:
    entries: of a journal.
  """
  alive, count, undone = [], 0, 0  # rows of messages that are in the state
  for row, entry in enumerate(entries):
    if entry.action == base.RECEIVE:
      alive.append(row)
    elif entry.action == base.ROLLBACK:
      kept = [r for r in alive if r < entry.job]
      undone += len(alive) - len(kept)
      alive, count = kept, count + 1
  return count, undone
