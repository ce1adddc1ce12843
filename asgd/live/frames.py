"""Frames that workers and server shards send to each other.

All frames are small and have the same size. Parameters and messages lie in
memory that both sides see, and a frame names the slot. A worker has a
connection to every shard. The lead (shard 0) decides which worker starts which
job.

  worker -> shard                      shard -> worker
  HELLO  asks to be registered         WELCOME  names the incarnation (`job`)
  FETCH  asks for a part of a ticket   TICKET   (seq, job): slots of parameters
  PUSH   message (seq) is in its slot           and of the message
  DRAIN  asks for no further job       ACK      message (seq) is committed
  BYE    leaves                        EXPEL    its tickets have ended
                                       STOP     all jobs are received

A message is identified by (worker, seq). The seq counts the jobs of the worker
index over all its incarnations, so a message is applied exactly once, however
often it is sent.

In a consistent run the other shards FOLLOW the lead: they receive its trace ROW
by row, and report messages with PREPARED. If an algorithm needs a TOTAL over
all shards, the lead ASKs each follower for its operand before it writes the
row. The followers answer with ASKED, and the lead adds up.
"""

import math
import struct
from typing import Any, NamedTuple

HELLO, FETCH, PUSH, DRAIN, BYE = range(5)
WELCOME, TICKET, ACK, EXPEL, STOP = range(5, 10)
FOLLOW, ROW, PREPARED, ASK, ASKED, TOTAL = SHARD_KINDS = range(10, 16)
# Parameters of a TICKET: complete in a slot, cached by the worker from its
# latest ticket, or packed updates of the parameters that the worker has.
WHOLE, KEPT, UPDATES = range(3)


class Frame(NamedTuple):
  """One frame; the meaning of a field depends on the kind."""

  kind: int  # one of the constants above
  worker: int = 0  # worker index; FOLLOW: index of the follower
  # HELLO: number of earlier loops with this worker index
  seq: int = 0
  job: int = 0  # HELLO, WELCOME: incarnation; ASKED, PREPARED: follower's index
  # TICKET: version; ROW: index of the row; ASK: number of the totals so far;
  # HELLO, WELCOME: how often the worker loop restarted as a new incarnation;
  # BYE with flag 1: index of the shard that sent unreadable updates
  version: int = 0
  # TICKET: WHOLE, KEPT or UPDATES; ROW: action; PUSH: 1 if finite; PREPARED: 1
  # if refused; EXPEL: 1 if another process has the worker index; HELLO: 1 as a
  # sign of life while the worker waits for another shard; BYE: see `version`
  flag: int = 0
  params: int = -1  # slot
  message: int = -1  # slot
  # TICKET: stamp of the params, or the version that its updates are added to;
  # PUSH: loss; ROW: time; ASKED: operand; TOTAL: the total
  value: float = 0.0
  loss: float = 0.0  # ROW


class BadFrame(ValueError):
  """A frame that no worker and no shard of this run sends."""


_MAX_INTEGER = 2**31 - 1  # a journal has integers of 32 bits


def check(frame: Frame, shard: int, setup: Any) -> None:
  """Raises BadFrame if the kind or the integers of a frame are impossible at
  this shard of a run with this `Setup`."""
  kind, sender, seq, job = frame[:4]
  workers, shards, jobs = setup.workers, setup.shards, setup.jobs
  valid = all(-1 <= number <= _MAX_INTEGER for number in frame[1:8])
  # [1] Is the kind of frame for the lead, a follower or an independent shard?
  if kind in SHARD_KINDS:
    from_follower = kind in (FOLLOW, PREPARED, ASKED)
    valid &= setup.consistent and from_follower == (shard == 0)
  else:
    # All shards receive HELLO, PUSH and BYE, and one more kind: the lead DRAIN,
    # an independent shard FETCH.
    extra_kind = DRAIN if shard == 0 else HELLO if setup.consistent else FETCH
    valid &= kind in (HELLO, PUSH, BYE, extra_kind)
  # [2] Are the integers those of a worker, shard or job of the run?
  if kind == FOLLOW:
    valid &= 0 < sender < shards and frame.version >= 0
  # Followers trust the frames of the lead.
  elif kind not in SHARD_KINDS or shard == 0:
    valid &= 0 <= sender < workers and seq >= 0
    # Job -1 asks for an incarnation, which only the lead assigns.
    if kind == HELLO:
      valid &= job >= (0 if shard else -1)
    else:
      valid &= 0 < job < shards if kind in SHARD_KINDS else 0 <= job < jobs
    if kind == PUSH:
      valid &= frame.flag == 0 or frame.flag == 1 and math.isfinite(frame.value)
  if not valid:
    raise BadFrame(
      f"shard {shard} of {shards} cannot receive {frame} in a run with"
      f" {workers} workers and {jobs} jobs"
    )


def sender_of(
  frame: Frame, known_sender: tuple[str, int] | None = None
) -> tuple[str, int]:
  """Returns the sender of a frame: ("worker" or "shard", index). Raises
  BadFrame if the connection belongs to another `known_sender`."""
  sender = "worker", frame.worker
  if frame.kind in SHARD_KINDS:
    index = frame.worker if frame.kind == FOLLOW else frame.job
    sender = "shard", index
  if known_sender not in (None, sender):
    raise BadFrame(
      f"one connection sends frames of {known_sender} and of {sender}"
    )
  return sender


# Magic, kind, three bytes of padding, then the other fields of a Frame.
_FORMAT = struct.Struct("<4sBxxxiqqqqiidd")
_MAGIC = b"asg1"  # the version of the format
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
