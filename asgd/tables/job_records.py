"""What is recorded of a job, and the message that outlives its worker.

A worker writes its message at the end of a clock down before any shard has it.
If it dies after some of the shards have it, and others not, the next holder of
its place sends it to the others: the clock's jobs are computed once, and all
shards have the same updates of them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asgd.tables import requests, wire
from asgd.tables.messages import RowValues
from asgd.tables.requests import PUSH, Request

BINS = 32  # of clock differentials in a record: -1, -2, ..., -32 or less


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


def dump_message(message: ClockMessage) -> bytes:
  """Returns a message as bytes.

  Example:
    >>> import numpy as np
    >>> from asgd.tables import job_records, messages
    >>> keys = messages.KeyCache().pack(np.arange(2))
    >>> sent = {"w": messages.RowValues(keys, np.ones((2, 1)))}
    >>> message = job_records.ClockMessage(1, 2, [sent], [])
    >>> data = job_records.dump_message(message)
    >>> again = job_records.load_message(data)
    >>> again.done, again.shards[0]["w"].keys.keys.tolist()
    (2, [0, 1])
  """
  clock, done, shards, records = message
  pushes = [
    requests.dump_request(Request(PUSH, 0, 0, 0, 0, clock, done, tables))
    for tables in shards
  ]
  arrays = [np.frombuffer(data, np.uint8) for data in pushes]
  return wire.dump([clock, done, arrays, records])


def load_message(data: bytes) -> ClockMessage:
  """Returns the message that bytes are of."""
  clock, done, arrays, records = wire.load(data)
  pushes = [requests.load_request(array.tobytes()) for array in arrays]
  return ClockMessage(
    *(clock, done, [push.tables for push in pushes]),
    [JobRecord(*fields) for fields in records],
  )
