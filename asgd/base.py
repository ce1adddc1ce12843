"""The contract: the types that all algorithms and all runtimes share.

Delay is one concept:

1. The server sends a worker a `Ticket`: parameters and their version.
2. The worker computes a message (usually a gradient) on these parameters.
3. When the server receives the message, it compares the ticket with its current
   state. The result is a `Delay`.
4. The Delay is passed to an ordinary optax transform as keyword extra args.

So an algorithm against staleness is an optax transform that reads `worker`,
`staleness` or `sent_params`.

Index letters of shape comments, here and in modules that define none:
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

  The server owns the statistics. A message holds those of its batch, and the
  server averages them into its own (`asgd.transforms.statistics`). Models
  without statistics use a bare pytree of weights.
  """

  weights: Params  # the part that is trained
  stats: Params  # running means and variances, never differentiated


class StatsWithState(NamedTuple):
  """`stats` of `Variables` that also carry the state of a local optimizer.

  The server sends the state with the weights, and replaces it by the mean of
  the states in the messages of an update (`worker.local_worker`).
  """

  stats: Any  # the model's statistics; () if it has none
  state: Any  # the optimizer's state, any pytree of arrays


def carry(params: Params, state: Any) -> Variables:
  """Returns parameters that carry a state of an optimizer."""
  stats = params.stats if isinstance(params, Variables) else ()
  return Variables(weights_of(params), StatsWithState(stats, state))


def state_of(params: Params) -> Any:
  """Returns the state that parameters carry; ValueError if they carry none."""
  if isinstance(params, Variables) and isinstance(params.stats, StatsWithState):
    return params.stats.state
  raise ValueError(
    "the optimizer's state is averaged, but the parameters carry none: make"
    " them with asgd.base.carry(params, state)"
  )


def without_state(params: Params) -> Params:
  """Returns the parameters of the model, without a carried state."""
  if not isinstance(params, Variables):
    return params
  if not isinstance(params.stats, StatsWithState):
    return params
  stats = params.stats.stats
  return params.weights if stats == () else Variables(params.weights, stats)


def weights_of(params: Params) -> Params:
  """Returns the trained part of `params`, used for gap and norms."""
  return params.weights if isinstance(params, Variables) else params


def with_weights(tree: Params, weights: Params) -> Params:
  """Returns `tree` with its trained part replaced."""
  if isinstance(tree, Variables):
    return tree._replace(weights=weights)
  return weights


class Ticket(NamedTuple):
  """The parameters that a message is computed on, and their version.

  A pipeline stage also keeps its stashed weights as Tickets.
  """

  worker: jax.Array  # int32[]; in a pipeline the gradient stream, not the stage
  version: jax.Array  # int32[], parameter changes before the server sent it
  params: Params  # the parameters sent (predicted ones, for DANA)
  # bool[], False if the worker already did a job on this ticket. Then, with
  # `Server.alone`, `version` also counts the updates by its earlier jobs.
  fresh: Any = np.True_


class Delay(NamedTuple):
  """How late a message is; passed to `update` as keyword extra args."""

  worker: jax.Array  # int32[], the worker that sent the message
  # int32[], parameter changes since the ticket was sent; 0 = synchronous. If
  # the worker kept its ticket, the changes by its own messages do not count.
  staleness: jax.Array
  sent_params: Params  # the parameters that the message was computed on


# (opt_state, params, *, worker) -> the parameters to send to the worker
SendFn = Callable[..., Params]


def send_current(
  opt_state: optax.OptState, params: Params, *, worker: jax.Array
) -> Params:
  """The send rule of algorithms without look-ahead: returns `params`."""
  del opt_state, worker
  return params


class Algorithm(NamedTuple):
  """An optax transform that may read a Delay, and a rule for what to send.

  `optax.chain` on top of an Algorithm would drop `send`: compose the
  transform first and wrap it last (`asgd.transforms.lookahead`).
  """

  init: optax.TransformInitFn
  update: Callable[..., tuple[Any, Any]]  # see optax.TransformUpdateExtraArgsFn
  send: SendFn = send_current


def as_algorithm(
  tx: optax.GradientTransformation, send: SendFn = send_current
) -> Algorithm:
  """Wraps a transform, with or without extra args, as an Algorithm."""
  tx = optax.with_extra_args_support(tx)
  return Algorithm(tx.init, tx.update, send)


class ServerState(NamedTuple):
  """The complete state of a server.

  `version` counts parameter changes, not messages. So staleness stays correct
  if the server averages several messages or drops some.
  """

  params: Params
  opt_state: optax.OptState
  version: jax.Array  # int32[]
  inbox: Any  # messages waiting for an update (`server.PendingUpdate`)


class Report(NamedTuple):
  """Measurements that the server made on one message."""

  staleness: jax.Array  # int32[]
  # float32[], RMS over parameters of current minus sent. If the worker kept
  # its ticket, its own writes count, too.
  gap: jax.Array
  accepted: jax.Array  # bool[], False when the gate dropped the message
  message_norm: jax.Array  # float32[], RMS of the message
  update_norm: jax.Array  # float32[], RMS of the parameter change it caused


class Server(NamedTuple):
  """The pure functions of a server; only they measure staleness.

  `sends_current` says that a ticket's parameters are the server's own, so a
  runtime may hand out a reference instead of calling a compiled `send`.
  """

  init: Callable[[Params], ServerState]
  send: Callable[[ServerState, jax.Array], Ticket]
  receive: Callable[
    [ServerState, Ticket, optax.Updates], tuple[ServerState, Report]
  ]
  sends_current: bool
  workers: int | None = None  # most workers it can serve; None: no limit
  # The codec of its messages (`asgd.compression.Codec`): runtimes decode them
  # before `receive`. None: messages are not coded.
  codec: Any = None
  # Whether each message is an update by itself: never averaged, never dropped.
  # Only then can a worker that keeps a ticket compute its own writes.
  alone: bool = False
  # (params) -> whether an update depends on `Delay.sent_params`. None: unknown.
  reads_sent: Callable[[Params], bool] | None = None


class Metrics(NamedTuple):
  """Measurements that a worker sends beside a message."""

  loss: jax.Array  # float[], mean over the batches of the message


# The parameters that a worker uses if it keeps a ticket for another job.
SENT = "sent"  # the ticket's parameters; `asgd.own_writes` can change that
OWN = "own"  # the worker's copy, to which it has applied its own writes
NEVER = "never"  # none: each job needs a ticket that was sent for it


class Worker(NamedTuple):
  """Everything done between receiving a ticket and sending a message.

  `init` reads shapes and dtypes only; values arrive with the first ticket. So a
  worker that joins late, or replaces one that failed, starts like any other.
  """

  init: Callable[[Params], Any]
  work: Callable[
    [Any, Ticket, Batch, jax.Array], tuple[Any, optax.Updates, Metrics]
  ]
  kept: str = SENT  # SENT, OWN or NEVER
  # Whether `work` may be a part of a compiled program. If not, it calls
  # compiled functions, and moves arrays between them (`asgd.layer_worker`).
  traceable: bool = True


class Trace(NamedTuple):
  """An order of sends and receives, as data. Row e happens before row e + 1.

  Several rows may have the same time. Times are float64 (float32 would stop
  resolving one batch after 10^7 of them).
  """

  time: npt.NDArray[np.float64]  # [E], seconds or the unit of the durations
  worker: npt.NDArray[np.int32]  # [E]
  # [E], index of the message among those of this worker index: (worker, seq)
  # names a message. -1 in rows without a message.
  seq: npt.NDArray[np.int32]
  # [E], the job: its batch is f(seed, worker, job). Some actions below have
  # another number here.
  job: npt.NDArray[np.int32]
  action: npt.NDArray[np.int8]  # [E], one of ACTIONS


SEND = 0  # the server sends the worker a ticket; the worker starts the job
RECEIVE = 1  # the server receives the job's message
# The worker starts the job on the ticket of its last job, with its own writes.
KEEP = 2
LOST = 3  # the job ends without a message: its worker failed, hung or left
REJECT = 4  # the server refused the job's message: not finite, or incomplete
# A new worker joins with this worker index; `job` counts the workers that had
# the index before.
JOIN = 5
LEAVE = 6  # the worker with this index leaves
ROLLBACK = 7  # the server rolls back to its state before row `job`
# Actions of peers, which have no server (`asgd.gossip.peer`). Here `seq` counts
# the messages that this worker index has put or lent.
PUT = 8  # the peer puts message `seq` for its neighbours, in round `job`
TAKE = 9  # the peer takes message `seq` of peer `job`, for its next mix
MIX = 10  # the peer mixes the messages that it has taken, in round `job`
LEND = 11  # the peer lends peer `job` its parameters, as message `seq`
ADOPT = 12  # the peer adopts message `seq`, which peer `job` lent it
# A job that two workers did (`asgd.orders.backups`).
DROP = 13  # the server drops the message: it has another worker's for this job
# Shards of tables (`asgd.tables.shard`).
MOVE = 14  # ranges of keys move to other shards, for the `job`-th time
# The job ends without a message, and no worker repeats it
# (`asgd.orders.stops`).
STOP = 15
ACTIONS = (
  *("send", "receive", "keep", "lost", "reject", "join", "leave"),
  *("rollback", "put", "take", "mix", "lend", "adopt", "drop", "move"),
  "stop",
)


_RECORD_DTYPES = (  # of the fields of Records
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
  # [U], of the parameters sent for the message; 0 if the worker kept a ticket
  bytes_down: npt.NDArray[np.int64]
  # [U], RMS of the worker's residual, which its messages left out so far; 0
  # without a codec
  residual_norm: npt.NDArray[np.float32]

  @classmethod
  def of(cls, rows: Sequence[tuple[Any, ...]]) -> "Records":
    """Builds Records from rows, each with its values in the fields' order."""
    columns = list(zip(*rows, strict=True)) or [()] * len(_RECORD_DTYPES)
    return cls(*map(np.array, columns, _RECORD_DTYPES))

  def rows(self) -> list[tuple[Any, ...]]:
    """Returns the rows, as tuples of Python numbers."""
    return list(zip(*(column.tolist() for column in self), strict=True))
