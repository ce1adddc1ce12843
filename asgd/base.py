"""The contract: the few types that every algorithm and every runtime share.

Delay is one concept. A worker computes a message (usually a gradient) against a
`Ticket`: the parameters it was sent and their version. When the message comes
back, the server compares the ticket with its current state; the result is a
`Delay`. It is passed to an ordinary optax transform as keyword extra args. So
an algorithm against staleness is an optax transform that reads `worker`,
`staleness` or `sent_params`; no other part of the library depends on it.

Data flows one way: order -> ticket -> message -> delay -> update -> record.

Index letters used in shape comments, here and elsewhere:
  N  workers
  E  rows (events) of a trace
  S  shards of a server
  U  received messages
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
import optax

Params = optax.Params  # a pytree of arrays, or of their shapes
Batch = Any  # a pytree of arrays with a leading axis of examples
Transform = optax.GradientTransformationExtraArgs  # may read a Delay


class Variables(NamedTuple):
  """Parameters of a model that also carries statistics (BatchNorm).

  The server owns the statistics, and averages in those that a message holds of
  its batch (`asgd.transforms.statistics`). Models without statistics use a bare
  pytree of weights.
  """

  weights: Params  # what is trained
  stats: Params  # running means and variances, never differentiated


def weights_of(params: Params) -> Params:
  """Returns the trained part of `params`: what gap and norms are taken over."""
  return params.weights if isinstance(params, Variables) else params


def with_weights(tree: Params, weights: Params) -> Params:
  """Returns `tree` with its trained part replaced."""
  if isinstance(tree, Variables):
    return tree._replace(weights=weights)
  return weights


class Ticket(NamedTuple):
  """What a message is computed against. A stashed weight is a ticket."""

  worker: jax.Array  # int32[], the gradient stream, never a stage
  version: jax.Array  # int32[], parameter changes made when it was sent
  params: Params  # the parameters sent (predicted ones, for DANA)
  # bool[], False if an earlier job of the worker was done on the same ticket:
  # the worker has its own writes since, which `version` counts.
  fresh: Any = np.True_


class Delay(NamedTuple):
  """How late a message is; passed to `update` as keyword extra args."""

  worker: jax.Array  # int32[], the worker that sent the message
  # int32[], parameter changes since, on a kept ticket those of other workers;
  # 0 = synchronous
  staleness: jax.Array
  sent_params: Params  # what the message was computed against


# (opt_state, params, *, worker) -> what the worker is to compute on
SendFn = Callable[..., Params]


def send_current(
  opt_state: optax.OptState, params: Params, *, worker: jax.Array
) -> Params:
  """The send rule of algorithms that do not look ahead: the parameters."""
  del opt_state, worker
  return params


class Algorithm(NamedTuple):
  """An optax transform that may read a Delay, and a rule for what to send.

  `optax.chain` on top of an Algorithm would drop `send`: compose the
  transform first and wrap it last (`asgd.transforms.lookahead`).
  """

  init: optax.TransformInitFn
  update: optax.TransformUpdateExtraArgsFn
  send: SendFn = send_current


def as_algorithm(
  tx: optax.GradientTransformation, send: SendFn = send_current
) -> Algorithm:
  """Wraps a transform, with or without extra args, as an Algorithm."""
  tx = optax.with_extra_args_support(tx)
  return Algorithm(tx.init, tx.update, send)


class ServerState(NamedTuple):
  """The whole state of a server.

  `version` counts parameter changes, not messages, so that staleness is right
  also where messages are accumulated or dropped.
  """

  params: Params
  opt_state: optax.OptState
  version: jax.Array  # int32[]
  inbox: Any  # messages waiting for an update (`server.PendingUpdate`)


class Report(NamedTuple):
  """Measurements that the server made on one message."""

  staleness: jax.Array  # int32[]
  # float32[], RMS over parameters of current minus sent; of a kept ticket,
  # without the worker's own writes
  gap: jax.Array
  accepted: jax.Array  # bool[], False when the gate dropped the message
  message_norm: jax.Array  # float32[], RMS of the message
  update_norm: jax.Array  # float32[], RMS of the parameter change it caused


class Server(NamedTuple):
  """The single place where staleness is measured; three pure functions.

  `sends_current` says that a ticket's parameters are the server's own, so a
  runtime may hand out a reference instead of calling a compiled `send`.
  """

  init: Callable[[Params], ServerState]
  send: Callable[[ServerState, jax.Array], Ticket]
  receive: Callable[
    [ServerState, Ticket, optax.Updates], tuple[ServerState, Report]
  ]
  sends_current: bool
  workers: int | None = None  # most workers it can serve; None is any
  # How its messages are coded (`asgd.compression.Codec`): runtimes decode them
  # before `receive`. None: they come as they are.
  codec: Any = None
  # Whether each message is an update: then a worker that keeps a ticket knows
  # what its own messages did.
  alone: bool = False
  # (params) -> whether an update depends on `Delay.sent_params`. None: unknown.
  reads_sent: Callable[[Params], bool] | None = None


class Metrics(NamedTuple):
  """What a worker reports beside a message."""

  loss: jax.Array  # float[], mean over the batches of the message


# What a worker computes on if it keeps a ticket for another job.
SENT = "sent"  # the ticket's parameters, unless `asgd.own_writes` changes that
OWN = "own"  # a copy of its own, with its own writes
NEVER = "never"  # nothing: each of its jobs needs a ticket that was sent for it


class Worker(NamedTuple):
  """Everything done between receiving a ticket and sending a message.

  `init` reads shapes and dtypes only. So a worker that joins late, or replaces
  one that died, starts like any other; values come with its first ticket.
  """

  init: Callable[[Params], Any]
  work: Callable[
    [Any, Ticket, Batch, jax.Array], tuple[Any, optax.Updates, Metrics]
  ]
  kept: str = SENT  # SENT, OWN or NEVER


class Trace(NamedTuple):
  """An order of sends and receives, as data. Row e happens before row e + 1.

  The order is the position in the table; `time` explains it and may repeat.
  It is float64 (float32 would stop resolving one batch after 10^7 of them).
  """

  time: npt.NDArray[np.float64]  # [E], seconds or the unit of the durations
  worker: npt.NDArray[np.int32]  # [E]
  seq: npt.NDArray[np.int32]  # [E], counts the jobs of the worker's place:
  # (worker, seq) names a message; -1 in rows that are about none
  job: npt.NDArray[np.int32]  # [E], which data: batch = f(seed, worker, job)
  action: npt.NDArray[np.int8]  # [E], one of ACTIONS


SEND = 0  # the worker is sent a ticket and starts the job on it
RECEIVE = 1  # the job's message is given to the server
KEEP = 2  # the worker starts the job on the ticket of its last job, with its
# own writes since
LOST = 3  # the job ends without a message: its worker died, hung or left
REJECT = 4  # the job's message was refused: not finite, or incomplete
JOIN = 5  # a new worker takes the place `worker`; job counts those before it
LEAVE = 6  # the worker in that place goes
ROLLBACK = 7  # the server goes back to what it was before row `job`
# Of peers, which have no server (`asgd.gossip.peer`). Their `seq` counts what a
# place put and lent.
PUT = 8  # the peer puts message `seq` for its neighbours, in round `job`
TAKE = 9  # the peer takes message `seq` of peer `job`, for its next mix
MIX = 10  # the peer mixes what it has taken, in round `job`
LEND = 11  # the peer lends peer `job` its parameters, as message `seq`
ADOPT = 12  # the peer adopts message `seq`, which peer `job` lent it
# Of a job that two workers did (`asgd.orders.backups`).
DROP = 13  # the job's message is not used: another worker's came first
# Of shards of tables (`asgd.tables.shard`).
MOVE = 14  # ranges of keys move to other shards, for the `job`-th time
ACTIONS = (
  *("send", "receive", "keep", "lost", "reject", "join", "leave"),
  *("rollback", "put", "take", "mix", "lend", "adopt", "drop", "move"),
)


_RECORD = (  # dtypes of Records
  *(np.int32, np.float64, np.int32, np.int32, np.int32, np.float32),
  *(np.float32, np.bool_, np.float32, np.float32, np.int64, np.int64),
  np.float32,
)


class Records(NamedTuple):
  """One row per received message; the same columns from every runtime."""

  update: npt.NDArray[np.int32]  # [U], the server's version after the message
  time: npt.NDArray[np.float64]  # [U], the trace's time
  worker: npt.NDArray[np.int32]  # [U]
  job: npt.NDArray[np.int32]  # [U]
  staleness: npt.NDArray[np.int32]  # [U]
  gap: npt.NDArray[np.float32]  # [U]
  loss: npt.NDArray[np.float32]  # [U], mean over the batches of the message
  accepted: npt.NDArray[np.bool_]  # [U]
  message_norm: npt.NDArray[np.float32]  # [U]
  update_norm: npt.NDArray[np.float32]  # [U]
  bytes_up: npt.NDArray[np.int64]  # [U], of the message as it was sent
  bytes_down: npt.NDArray[np.int64]  # [U], of the parameters that were sent for
  # it; 0 on a ticket that was kept
  residual_norm: npt.NDArray[np.float32]  # [U], RMS of what the worker's codec
  # kept of this message and those before; 0 without a codec

  @classmethod
  def of(cls, rows: Sequence[tuple[Any, ...]]) -> "Records":
    """Returns the columns of rows, whose values are in the order of fields."""
    columns = list(zip(*rows, strict=True)) or [()] * len(_RECORD)
    return cls(*map(np.array, columns, _RECORD))

  def rows(self) -> list[tuple[Any, ...]]:
    """Returns the rows, of Python's numbers."""
    return list(zip(*(column.tolist() for column in self), strict=True))
