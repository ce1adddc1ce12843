"""Frames: what workers and server shards send to each other.

Frames are small and of one size; parameters and messages lie in memory that
both sides see, and a frame names the slot. A worker has a connection to every
shard; the first, the lead, decides which worker starts which job.

  worker -> shard                      shard -> worker
  HELLO   I hold this place            WELCOME  you are holder number `job`
  FETCH   my part for (seq, job)       TICKET   for (seq, job): read the params
  PUSH    (seq) lies in its slot                slot, write to the message slot
  DRAIN   nothing new for me           ACK      (seq) is committed
  BYE     I am gone                    EXPEL    you are taken for dead
                                       STOP     all jobs are received

A message is named by (worker, seq): the seq counts the jobs of the worker
index, not of its holder, so it is applied exactly once, however often it is
sent. In a consistent run the other shards FOLLOW the lead: they receive its
trace ROW by row, and report messages with PREPARED. If an algorithm needs a
TOTAL over all shards, the lead ASKs each of them for its operand before it
writes the row; they answer with ASKED, and the lead adds up.
"""

import math
import struct
from typing import Any, NamedTuple

HELLO, FETCH, PUSH, DRAIN, BYE = range(5)
WELCOME, TICKET, ACK, EXPEL, STOP = range(5, 10)
FOLLOW, ROW, PREPARED, ASK, ASKED, TOTAL = OF_SHARDS = range(10, 16)
WHOLE, KEPT, UPDATES = range(3)  # what a TICKET's parameters are


class Frame(NamedTuple):
  """One frame; the meaning of a field depends on the kind."""

  kind: int
  worker: int = 0  # place; of a follower, its shard
  seq: int = 0  # HELLO: loops that were started at the place before
  job: int = 0  # HELLO, WELCOME: number of the holder; ASKED, PREPARED: shard
  # TICKET: of params; ROW: its number; ASK: totals known; HELLO, WELCOME: how
  # often the loop began anew
  version: int = 0
  # TICKET: WHOLE, KEPT or UPDATES; PUSH: finite; PREPARED: it is refused; ROW:
  # action; EXPEL: replaced; HELLO: I live, and wait for another shard; BYE:
  # updates of shard `version` cannot be read
  flag: int = 0
  params: int = -1  # slot
  message: int = -1  # slot
  # TICKET: stamp of the params, or the version that its updates are added to;
  # PUSH: loss; ROW: time; ASKED, TOTAL: the number
  value: float = 0.0
  loss: float = 0.0  # ROW


class BadFrame(ValueError):
  """A frame that no worker and no shard of this run sends."""


_MOST = 2**31 - 1  # a journal has numbers of 32 bits


def check(frame: Frame, shard: int, setup: Any) -> None:
  """Raises BadFrame unless a shard of a run with a `Setup` can use the frame,
  as far as its kind and its numbers tell."""
  kind, place, seq, job = frame[:4]
  workers, shards, jobs = setup.workers, setup.shards, setup.jobs
  fits = all(-1 <= number <= _MOST for number in frame[1:8])
  if kind in OF_SHARDS:
    of_follower = FOLLOW, PREPARED, ASKED
    fits &= setup.consistent and (kind in of_follower) == (shard == 0)
  else:
    of_one = DRAIN if shard == 0 else HELLO if setup.consistent else FETCH
    fits &= kind in (HELLO, PUSH, BYE, of_one)
  if kind == FOLLOW:
    fits &= 0 < place < shards and frame.version >= 0
  elif kind not in OF_SHARDS or shard == 0:  # what the lead says is believed
    fits &= 0 <= place < workers and seq >= 0
    if kind == HELLO:  # only the lead gives numbers
      fits &= job >= (0 if shard else -1)
    else:
      fits &= 0 < job < shards if kind in OF_SHARDS else 0 <= job < jobs
    if kind == PUSH:
      fits &= frame.flag == 0 or frame.flag == 1 and math.isfinite(frame.value)
  if not fits:
    raise BadFrame(
      f"shard {shard} of {shards} has no use for {frame}, of a run with"
      f" {workers} workers and {jobs} jobs"
    )


def speaker(frame: Frame, before: tuple | None = None) -> tuple[str, int]:
  """Returns the sender (a worker or a follower) that owns the connection of a
  frame. Raises BadFrame if it was another `before`."""
  who = "worker", frame.worker
  if frame.kind in OF_SHARDS:
    number = frame.worker if frame.kind == FOLLOW else frame.job
    who = "shard", number
  if before not in (None, who):
    raise BadFrame(f"one connection speaks for {before} and {who}")
  return who


_FORMAT = struct.Struct("<4sBxxxiqqqqiidd")
_MAGIC = b"asg1"
SIZE = _FORMAT.size  # bytes of a packed frame


def pack(frame: Frame) -> bytes:
  """Returns a frame as bytes[SIZE]."""
  return _FORMAT.pack(_MAGIC, *frame)


def unpack(data: bytes) -> Frame:
  """Returns the frame of bytes[SIZE]; raises BadFrame for anything else."""
  if len(data) != SIZE:
    raise BadFrame(f"a frame has {SIZE} bytes, not {len(data)}")
  magic, *fields = _FORMAT.unpack(data)
  if magic != _MAGIC or fields[0] > TOTAL:
    raise BadFrame(
      f"no frame of this version: it starts with {data[:5]!r}; are all"
      " processes of the same release?"
    )
  return Frame(*fields)
