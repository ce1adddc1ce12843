"""The host engine: obeys a trace, one compiled step at a time.

Three functions are compiled once each - a worker's work, the server's receive
and, for algorithms that look ahead, its send - and a Python loop calls them in
the order of the trace. They are the functions that a live runtime compiles, not
one fused step, so that a recorded run replays to the same bits. JAX arrays are
immutable, so a ticket is a reference to parameters, not a copy: memory is
(distinct versions in flight) x parameters, and sending costs nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, sharding
from asgd import worker as worker_lib


class Simulation(NamedTuple):
  """Everything there is at an event boundary; a checkpoint is this."""

  event: int  # the next row of the trace
  server: base.ServerState
  workers: tuple[Any, ...]  # N worker states
  tickets: tuple[dict[int, base.Ticket], ...]  # N, the open ones by job
  kept: tuple[base.Ticket | None, ...]  # N, the last sent, if the trace keeps
  marks: dict[int, base.ServerState]  # by row, for rollbacks to come


class Host(NamedTuple):
  """The engine."""

  init: Callable[[Any, int], Simulation]  # (params, workers)
  run: Callable[..., tuple[Simulation, base.Records]]


class Steps(NamedTuple):
  """The compiled functions that every runtime calls; same calls, same bits.

  `receive` consumes opt_state and inbox, whose buffers it donates; params and
  version it does not, as open tickets refer to them. It consumes the message as
  well if that is of jax arrays; NumPy arrays, which cannot be donated, it reads
  where they lie.
  """

  work: Callable | None  # (state, ticket, batch, root, job): as Worker.work
  send: Callable  # (ServerState, worker) -> Ticket
  receive: Callable  # (ServerState, ticket, message, loss) -> (state, Row)
  stage: Callable  # (totals, *as receive) -> sharding.Ask, or Done of the same


class Row(NamedTuple):
  """What was seen of one message, on the device; `records` fetches many."""

  whole: jax.Array  # int32[3], version after it, staleness, accepted
  real: jax.Array  # float32[4], gap, loss, message_norm, update_norm


class Group(NamedTuple):
  """Devices that do the work of one worker together."""

  devices: int = 1
  parallel: str = "data"  # examples are split; or "tensor", the weights are
  axis: int = 0  # of the examples in a batch


@functools.lru_cache(maxsize=32)
def compile_work(worker: base.Worker, group: Group = Group()) -> Callable:  # noqa: B008
  """Compiles a worker once, however many servers it serves.

  Args:
    worker: what it does.
    group: its devices, the first of those that are here. XLA divides the work
      among them: of a "data" group each takes part of the examples, of a
      "tensor" group part of the last axis of each weight. What they do not
      divide they all do. Another group adds up in another order, so it gives
      other bits.

  Returns:
    (state, ticket, batch, root, job) -> as Worker.work; what it returns lies
    whole on each device.

  Raises:
    ValueError: if there are fewer devices.
  """

  def work(state, ticket, batch, root, job):
    key = worker_lib.job_key(root, ticket.worker, job)
    return worker.work(state, ticket, batch, key)

  if group.devices == 1:
    return jax.jit(work)
  devices = jax.local_devices()
  if len(devices) < group.devices:
    raise ValueError(
      f"a worker is to have {group.devices} devices, and there are"
      f" {len(devices)}; for CPU devices set"
      " jax.config.update('jax_num_cpu_devices', N) before JAX is used"
    )
  mesh = jax.sharding.Mesh(devices[: group.devices], ("group",))

  def split(x, axis):
    names = [None] * x.ndim
    if x.ndim > axis >= -x.ndim and x.shape[axis] % group.devices == 0:
      names[axis] = "group"
    spec = jax.sharding.PartitionSpec(*names)
    return jax.lax.with_sharding_constraint(
      x, jax.sharding.NamedSharding(mesh, spec)
    )

  def divided(state, ticket, batch, root, job):
    if group.parallel == "data":
      batch = jax.tree.map(lambda x: split(x, group.axis), batch)
    else:
      params = jax.tree.map(lambda x: split(x, -1), ticket.params)
      ticket = ticket._replace(params=params)
    return work(state, ticket, batch, root, job)

  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.jit(divided, in_shardings=whole, out_shardings=whole)


def _rounded(tree: Any, dtype: str | None) -> Any:
  """What is left of a tree's real numbers after a journey in `dtype`."""
  if dtype is None:
    return tree

  def there_and_back(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    # Or XLA drops a conversion that is undone at once.
    return jax.lax.reduce_precision(
      x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant
    )

  return jax.tree.map(there_and_back, tree)


def compile_steps(
  server: base.Server,
  worker: base.Worker | None,
  *,
  wire: str | None = None,
  group: Group = Group(),  # noqa: B008
) -> Steps:
  """Compiles what runtimes call: not one fused step, but its three parts, so
  that a recorded run replays to the same bits.

  Args:
    server: from `make_server`.
    worker: what every worker does; None where no work is done.
    wire: the dtype in which parameters and messages travel, such as "bfloat16";
      None is their own. Tickets hold what arrives.
    group: the devices of each worker.
  """

  def receive_parts(opt_state, inbox, message, params, version, ticket, loss):
    state = base.ServerState(params, opt_state, version, inbox)
    message = _rounded(message, wire)
    state, report = server.receive(state, ticket, message)
    return state, _pack(state.version, report, loss)

  donating = jax.jit(receive_parts, donate_argnums=(0, 1, 2))
  reading = jax.jit(receive_parts, donate_argnums=(0, 1))

  def receive(state, ticket, message, loss):
    here = all(isinstance(x, jax.Array) for x in jax.tree.leaves(message))
    return (donating if here else reading)(
      *(state.opt_state, state.inbox, message),
      *(state.params, state.version, ticket, loss),
    )

  @jax.jit
  @sharding.staged
  def stage(state, ticket, message, loss):
    return receive_parts(
      *(state.opt_state, state.inbox, message),
      *(state.params, state.version, ticket, loss),
    )

  def send_rounded(state, worker):
    ticket = server.send(state, worker)
    return ticket._replace(params=_rounded(ticket.params, wire))

  if server.sends_current and wire is None:

    def send(state, worker):
      return base.Ticket(worker, state.version, state.params)

  else:
    send = jax.jit(send_rounded)
  work = compile_work(worker, group) if worker else None
  return Steps(work, send, receive, stage)


def as_totals(values: Sequence[float]) -> tuple[np.ndarray, ...]:
  """Returns totals that were written down, as `Steps.stage` takes them."""
  dtype = np.float64 if jax.config.jax_enable_x64 else np.float32
  return tuple(dtype(value) for value in values)


def start(server: base.Server, params: Any) -> base.ServerState:
  """Returns a server's first state, sharing no buffer with `params`."""
  # Copied, because a state that holds the parameters would donate them.
  return jax.tree.map(jnp.copy, server.init(jax.tree.map(jnp.asarray, params)))


def make_host(
  server: base.Server,
  worker: base.Worker,
  *,
  wire: str | None = None,
  group: Group = Group(),  # noqa: B008
) -> Host:
  """Builds the engine for a server and its workers.

  Args:
    server: from `make_server`; its functions are compiled here.
    worker: what every worker does; compiled once per Worker.
    wire: the dtype in which parameters and messages travel, as in
      `compile_steps`.
    group: the devices of each worker.

  Returns:
    A Host. `init(params, workers)` starts a simulation.
    `run(simulation, trace, end, *, batch, root)` obeys the rows up to, not
    including, row `end`, and returns the new simulation and the Records of the
    messages received. `batch` is (worker, job) -> NumPy arrays, `root` the key
    from which `worker.job_key` derives those of the work. It consumes the
    simulation it is given: buffers that nothing else may refer to are donated.
    It raises ValueError if the trace asks for a worker that is not there, or
    closes a ticket that its worker does not hold.
  """
  steps = compile_steps(server, worker, wire=wire, group=group)

  def init(params, workers):
    if server.workers is not None and workers > server.workers:
      raise ValueError(
        f"the algorithm was built for {server.workers} workers, the simulation"
        f" has {workers}; build both with the same number"
      )
    state = start(server, params)
    states = tuple(worker.init(state.params) for _ in range(workers))
    tickets = tuple({} for _ in range(workers))
    return Simulation(0, state, states, tickets, (None,) * workers, {})

  def run(simulation, trace, end, *, batch, root):
    event, state, workers, tickets, kept, marks = simulation
    workers, kept, marks = list(workers), list(kept), dict(marks)
    tickets = [dict(held) for held in tickets]
    numbers = [jnp.int32(w) for w in range(len(workers))]
    rows = slice(event, end)
    columns = [column[rows].tolist() for column in trace]
    if columns[1] and max(columns[1]) >= len(workers):
      raise ValueError(
        f"the trace has a worker {max(columns[1])}, the simulation only"
        f" {len(workers)} workers, counted from 0"
      )
    keeps = bool((trace.action == base.KEEP).any())
    returns = set(trace.job[trace.action == base.ROLLBACK].tolist())

    def close(w, job):
      try:
        return tickets[w].pop(job)
      except KeyError:
        raise ValueError(
          f"the trace closes job {job} of worker {w}, which holds no ticket for"
          " it; orders.check finds the row"
        ) from None

    known, seen = [], []
    for row, (time, w, job, action) in enumerate(
      zip(*columns, strict=True), event
    ):
      if row in returns:
        marks[row] = jax.tree.map(jnp.copy, state)
      if action == base.SEND:
        tickets[w][job] = ticket = steps.send(state, numbers[w])
        if keeps:
          kept[w] = ticket._replace(fresh=np.False_)
      elif action == base.RECEIVE:
        ticket = close(w, job)
        workers[w], message, metrics = steps.work(
          workers[w], ticket, batch(w, job), root, np.int32(job)
        )
        loss = metrics.loss
        if group.devices > 1:
          message, loss = fetch((message, loss))
        state, report = steps.receive(state, ticket, message, loss)
        known.append((time, w, job))
        seen.append(report)
      elif action == base.KEEP:
        if kept[w] is None:
          raise ValueError(
            f"the trace lets worker {w} keep a ticket for job {job}, and it was"
            " sent none; orders.check finds the row"
          )
        tickets[w][job] = kept[w]
      elif action in (base.LOST, base.REJECT):
        close(w, job)
      elif action == base.JOIN:
        workers[w], kept[w] = worker.init(state.params), None
      elif action == base.ROLLBACK:
        state = jax.tree.map(jnp.copy, marks[job])
    event += len(columns[0])
    simulation = Simulation(
      event, state, tuple(workers), tuple(tickets), tuple(kept), marks
    )
    return simulation, records(known, seen)

  return Host(init, run)


def fetch(tree: Any) -> Any:
  """Returns a tree as NumPy arrays, like `jax.device_get`, which takes its time
  over each array that is here already."""
  leaves = jax.tree.leaves(tree)
  first = leaves[0] if leaves else None
  if isinstance(first, jax.Array) and not first.is_fully_replicated:
    return jax.device_get(tree)
  if isinstance(first, jax.Array) and any(
    device.platform != "cpu" for device in first.devices()
  ):
    return jax.device_get(tree)
  return jax.tree.map(np.asarray, tree)


def _pack(version, report, loss) -> Row:
  """One event's row as two arrays: a fetch costs as much for one number."""
  whole = jnp.stack([version, report.staleness, report.accepted])
  real = (report.gap, loss, report.message_norm, report.update_norm)
  return Row(
    whole.astype(jnp.int32), jnp.stack([x.astype(jnp.float32) for x in real])
  )


def records(
  known: list[tuple[float, int, int]], seen: list[Row]
) -> base.Records:
  """Fetches what was seen, once for all, into columns.

  Args:
    known: (time, worker, job) of each message.
    seen: what `Steps.receive` returned of each.
  """
  time, worker, job = zip(*known, strict=True) if known else ((),) * 3
  seen = fetch(seen)
  whole = np.array([row.whole for row in seen], np.int32).reshape(-1, 3).T
  real = np.array([row.real for row in seen], np.float32).reshape(-1, 4).T
  version, staleness, accepted = whole
  gap, loss, message_norm, update_norm = real
  return base.Records(
    update=version,
    time=np.array(time, np.float64),
    worker=np.array(worker, np.int32),
    job=np.array(job, np.int32),
    staleness=staleness,
    gap=gap,
    loss=loss,
    accepted=accepted.astype(bool),
    message_norm=message_norm,
    update_norm=update_norm,
  )


def concatenate(parts: list[base.Records]) -> base.Records:
  """Joins records of consecutive stretches of a run."""
  if not parts:
    return records([], [])
  return base.Records(*map(np.concatenate, zip(*parts, strict=True)))


def end_of_message(trace: base.Trace) -> np.ndarray:
  """Returns int[U]: the row after each RECEIVE, where a run can be cut.

  Args:
    trace: an order; see `asgd.orders`.
  """
  return np.flatnonzero(np.asarray(trace.action) == base.RECEIVE) + 1
