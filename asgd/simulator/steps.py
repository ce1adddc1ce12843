"""The compiled functions that every runtime calls, simulated or live.

A step consists of three programs: the worker's work, the server's receive and
the server's send. One fused program would give other bits; with the same three
programs a recorded run replays to the same bits.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, compression, hoisting, sharding
from asgd import worker as worker_lib

_MANY_LEAVES = 3000


class Steps(NamedTuple):
  """The compiled functions that every runtime calls. The same calls give the
  same bits.

  `receive` donates opt_state and inbox, but not params and version, because
  open tickets refer to them. It also donates a message of JAX arrays, unless
  the functions were compiled with `keeps_messages`.
  """

  # (state, ticket, batch, root, job): as Worker.work
  work: Callable[..., Any] | None
  send: Callable[..., Any]  # (ServerState, worker) -> Ticket
  # (ServerState, ticket, message, loss) -> (ServerState, Observation)
  receive: Callable[..., Any]
  # (totals, *arguments of `receive`) -> sharding.Ask for a further total over
  # the shards, or sharding.Done with the result of `receive`
  stage: Callable[..., Any]
  wire: str | None = None  # dtype in which parameters travel
  codec: compression.Codec | None = None  # the messages' codec
  alone: bool = False  # whether each message is one update

  def keep(self, ticket: base.Ticket) -> base.Ticket:
    """Returns a kept ticket for the worker's next job. If each message is
    one update, the version counts the update of the worker's last job, so that
    this update does not count as staleness."""
    version = ticket.version + 1 if self.alone else ticket.version
    return ticket._replace(version=version, fresh=np.False_)


class Observation(NamedTuple):
  """The server's measurements of one message, on the device; see `records`."""

  integers: jax.Array  # int32[3], version after it, staleness, accepted
  reals: jax.Array  # float32[4], gap, loss, message_norm, update_norm


class WorkerDevices(NamedTuple):
  """Devices that share the work of one worker."""

  devices: int = 1
  parallel: str = "data"  # divides examples; "tensor" divides weights
  axis: int = 0  # axis of the examples in a batch


ALONE = WorkerDevices()


class PureSteps(NamedTuple):
  """The functions of `Steps` before compilation, as parts of a program."""

  # (state, ticket, batch, root, job) -> as Worker.work
  work: Callable[..., Any]
  send: Callable[[base.ServerState, jax.Array], base.Ticket]
  # (ServerState, ticket, message, loss) -> (ServerState, Observation)
  receive: Callable[..., tuple[base.ServerState, "Observation"]]
  wire: str | None = None  # dtype in which parameters travel
  codec: compression.Codec | None = None  # the messages' codec


@functools.lru_cache(maxsize=32)
def _pure_work(worker: base.Worker) -> Callable[..., Any]:
  """Returns a worker's work as a part of programs. JAX traces it once for all
  servers and numbers of workers. This saves half of the tracing time of a small
  program."""

  def work(state, ticket, batch, root, job):
    key = worker_lib.job_key(root, ticket.worker, job)
    return worker.work(state, ticket, batch, key)

  return jax.jit(work, inline=True)


def pure_steps(
  server: base.Server, worker: base.Worker | None, wire: str | None = None
) -> PureSteps:
  """Returns the functions that `compile_steps` compiles, with the same
  arguments."""
  codec = server.codec

  def receive(state, ticket, message, loss):
    if codec is None:
      message = _after_transfer(message, wire)
    else:
      message = compression.decode(codec, message)
    state, report = server.receive(state, ticket, message)
    # Two arrays for one message, as the fetch of one number costs as much as
    # the fetch of an array.
    integers = jnp.stack([state.version, report.staleness, report.accepted])
    reals = report.gap, loss, report.message_norm, report.update_norm
    reals = jnp.stack([x.astype(jnp.float32) for x in reals])
    return state, Observation(integers.astype(jnp.int32), reals)

  def send(state, worker):
    ticket = server.send(state, worker)
    return ticket._replace(params=_after_transfer(ticket.params, wire))

  work = _pure_work(worker) if worker else None
  return PureSteps(work, send, receive, wire, codec)


@functools.lru_cache(maxsize=32)
def compile_work(
  worker: base.Worker, group: WorkerDevices = ALONE
) -> Callable[..., Any]:
  """Compiles a worker once, however many servers it serves.

  Returns:
    (state, ticket, batch, root, job) -> as Worker.work, divided among the
    devices of a group as by `compile_divided`. A worker that is not traceable
    is called as it is, on one device.
  """
  if not worker.traceable:
    key_of = jax.jit(worker_lib.job_key)
    return lambda state, ticket, batch, root, job: worker.work(
      state, ticket, batch, key_of(root, ticket.worker, job)
    )
  work = _pure_work(worker)
  if group.devices == 1:
    return jax.jit(work)

  def on_params(params, batch, state, ticket, root, job):
    return work(state, ticket._replace(params=params), batch, root, job)

  run_divided = compile_divided(on_params, group)

  def divided_work(state, ticket, batch, root, job):
    # `compile_divided` divides its first argument in a "tensor" group, so the
    # parameters leave the ticket and become that argument.
    params, ticket = ticket.params, ticket._replace(params=None)
    return run_divided(params, batch, state, ticket, root, job)

  return divided_work


def compile_divided(
  function: Callable[..., Any], group: WorkerDevices
) -> Callable[..., Any]:
  """Compiles a function (params, batch, *others) for a group of devices, the
  first devices of this process.

  XLA divides the work among them: in a "data" group each device takes some of
  the examples, in a "tensor" group a part of the last axis of each weight. If
  the number of devices does not divide the axis, each device computes the whole
  axis. Two groups that divide the work differently add up in another order, and
  give other bits.

  Returns:
    The function; each device has the complete result.

  Raises:
    ValueError: for more devices than this process has.
  """
  if group.devices == 1:
    return jax.jit(function)
  devices = jax.local_devices()
  if len(devices) < group.devices:
    raise ValueError(
      f"a worker is to have {group.devices} devices, and there are"
      f" {len(devices)}; for CPU devices set"
      " jax.config.update('jax_num_cpu_devices', N) before JAX is used"
    )
  mesh = jax.sharding.Mesh(devices[: group.devices], ("group",))

  def group_sharding(*names: str | None) -> jax.sharding.NamedSharding:
    spec = jax.sharding.PartitionSpec(*names)
    return jax.sharding.NamedSharding(mesh, spec)

  def divide(x, axis):
    names = [None] * x.ndim
    if x.ndim > axis >= -x.ndim and x.shape[axis] % group.devices == 0:
      names[axis] = "group"
    return jax.lax.with_sharding_constraint(x, group_sharding(*names))

  def run_divided(params, batch, *others):
    if group.parallel == "data":
      batch = jax.tree.map(lambda x: divide(x, group.axis), batch)
    else:
      params = jax.tree.map(lambda x: divide(x, -1), params)
    return function(params, batch, *others)

  replicated = group_sharding()
  return jax.jit(run_divided, in_shardings=replicated, out_shardings=replicated)


def _after_transfer(tree: Any, dtype: str | None) -> Any:
  """Returns the tree with its real numbers rounded as a transfer in `dtype`
  rounds them."""
  if dtype is None:
    return tree
  bits = jnp.finfo(dtype)

  def round_leaf(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    # Two casts would not round: XLA removes a cast and the cast back.
    return jax.lax.reduce_precision(x, bits.nexp, bits.nmant)

  return jax.tree.map(round_leaf, tree)


class _ServerSteps(NamedTuple):
  """The compiled functions of a server."""

  send: Callable[..., Any]  # as in `Steps`
  stage: Callable[..., Any]
  # (opt_state, inbox, message, params, version, ticket, loss) -> as `receive`;
  # the first donates the message, the second does not.
  donating_receive: Callable[..., Any]
  reading_receive: Callable[..., Any]


@functools.lru_cache(maxsize=32)
def _compile_server(server: base.Server, wire: str | None) -> _ServerSteps:
  """Compiles a server once: for all runs of a process, and their replays."""
  pure = pure_steps(server, None, wire)

  def receive_parts(opt_state, inbox, message, params, version, ticket, loss):
    state = base.ServerState(params, opt_state, version, inbox)
    return pure.receive(state, ticket, message, loss)

  send = server.send
  if not server.sends_current or wire is not None:
    send = hoisting.jit(pure.send)
  # Do not donate params and version: open tickets refer to them.
  return _ServerSteps(
    send,
    jax.jit(sharding.staged(pure.receive)),
    hoisting.jit(receive_parts, donate_argnums=(0, 1, 2)),
    hoisting.jit(receive_parts, donate_argnums=(0, 1)),
  )


def compile_steps(
  server: base.Server,
  worker: base.Worker | None,
  *,
  wire: Any = None,
  group: WorkerDevices = ALONE,
  keeps_messages: bool = False,
) -> Steps:
  """Compiles the functions of runtimes: each server and each worker once.

  Messages of a server with a codec travel as codes, and `receive` decodes them.
  Tickets have the parameters as they arrive at the worker.

  Args:
    server: the server of the run.
    worker: the worker of the run; with None, `Steps.work` is None.
    wire: dtype in which parameters and messages travel, such as "bfloat16";
      with None they travel in their own dtypes.
    group: the devices of each worker.
    keeps_messages: whether `receive` may not overwrite messages. The messages
      of a live run are in shared memory. Programs with and without the option
      may differ in the last bit, so compile a replay with the option of its
      run.
  """
  compiled = _compile_server(server, wire)

  def receive(state, ticket, message, loss):
    keeps_message = keeps_messages or not all(
      isinstance(x, jax.Array) for x in jax.tree.leaves(message)
    )
    receive_parts = (
      compiled.reading_receive if keeps_message else compiled.donating_receive
    )
    return receive_parts(
      *(state.opt_state, state.inbox, message, state.params, state.version),
      *(ticket, loss),
    )

  work = compile_work(worker, group) if worker else None
  return Steps(
    *(work, compiled.send, receive, compiled.stage),
    *(wire, server.codec, server.alone),
  )


def as_totals(values: Sequence[float]) -> tuple[np.ndarray, ...]:
  """Returns the totals of a journal as `Steps.stage` takes them."""
  dtype = np.float64 if jax.config.jax_enable_x64 else np.float32
  return tuple(dtype(value) for value in values)


def worker_indices(workers: int) -> list[jax.Array]:
  """Returns the index of each worker on the device, int32[], for `send`."""
  return jax.device_put([np.int32(worker) for worker in range(workers)])


def start(server: base.Server, params: Any) -> base.ServerState:
  """Returns a server's first state, sharing no buffer with `params`.

  Warns of more than 3,000 leaves. XLA compiles a step of SGD's server in 1 s of
  a core for 100 leaves, in 8 s for 1,000 leaves and in 30 s for 3,000 leaves,
  and each call of the step passes all leaves.
  """
  n_leaves = len(jax.tree.leaves(params))
  if n_leaves > _MANY_LEAVES:
    warnings.warn(
      f"the parameters have {n_leaves:,} leaves, and a server's step takes"
      f" minutes to compile for more than {_MANY_LEAVES:,}: stack those of one"
      " shape (jax.tree.map over jnp.stack), or make all of them one vector"
      " (jax.flatten_util.ravel_pytree)",
      stacklevel=2,
    )
  # `receive` donates a part of the state. A state may hold an array twice, one
  # of the parameters, or one that `init` returns at each call.
  return jax.tree.map(jnp.copy, server.init(jax.tree.map(jnp.asarray, params)))
