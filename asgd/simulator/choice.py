"""Which engine simulates a trace, and why."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, internals
from asgd.simulator.chunk import make_chunk
from asgd.simulator.rounds import make_rounds
from asgd.simulator.simulation import Simulator
from asgd.simulator.steps import pure_steps
from asgd.simulator.stepwise import make_host
from asgd.simulator.tickets import why_only_host

AUTO, HOST, CHUNK, ROUNDS = "auto", "host", "chunk", "rounds"
ENGINES = (AUTO, HOST, CHUNK, ROUNDS)

# A chunk's program takes half a second more to compile than the functions of
# the host engine, and saves 0.1 to 0.2 ms per message.
_MIN_MESSAGES = 3000
# Speed of the rounds engine, relative to the chunk engine, in bulk synchronous
# rounds of an MLP (two busy cores): 1.2 to 1.3 in rounds of 64 and of 512
# gradients with 4,810 parameters; in rounds of 64, 1.07 with 50,890 parameters
# and 0.86 with 269,322.
_LARGE_ROUND = 32  # messages
_SMALL_MODEL = 2**16  # bytes of parameters
# Operations that take 9 times as long in the loops of a CPU's programs.
_SLOW_IN_LOOPS = ("conv_general_dilated",)


class Choice(NamedTuple):
  """The engine of a simulation."""

  name: str  # HOST, CHUNK or ROUNDS
  why: str
  simulator: Simulator

  def __str__(self) -> str:
    return f"{self.name}: {self.why}"


class JobShapes(NamedTuple):
  """Shapes and number of jobs, by which an engine is chosen."""

  params: base.Params  # parameters, or their shapes
  batch: base.Batch  # the batch of any job
  messages: int  # messages that are simulated with one program
  even: bool = True  # whether the batches of all jobs have one shape


def choose(
  server: base.Server,
  worker: base.Worker,
  trace: base.Trace,
  jobs: JobShapes,
  *,
  asked: str = AUTO,
) -> Choice:
  """Chooses the engine of a simulation.

  Host and chunk compute the same parameters, to the bit in float32 on CPUs; the
  `message_norm` of their records may differ in the last bits. With rounds the
  last bits of the parameters may also differ (`make_rounds`).

  Args:
    server, worker, trace: the algorithm and the order of the simulation.
    jobs: shapes and number of the jobs.
    asked: an engine, or "auto", which chooses the faster engine.

  Raises:
    ValueError: for an unknown engine, and for an engine that cannot simulate
      these jobs.

  Example:
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> from asgd import orders, simulator
    >>> worker = asgd.gradient_worker(lambda w, batch: (w * batch).mean())
    >>> jobs = simulator.JobShapes(jnp.zeros(()), jnp.zeros(3), messages=10_000)
    >>> server = asgd.asgd(0.1, workers=2).server()
    >>> trace = orders.fixed_delay(delay=1, messages=100)
    >>> print(simulator.choose(server, worker, trace, jobs))
    chunk: many messages in one program
  """
  if asked not in ENGINES:
    raise ValueError(
      f"the simulator's engine must be one of {', '.join(ENGINES)}, not"
      f" {asked!r}"
    )
  if asked == HOST:
    return Choice(HOST, "as asked", make_host(server, worker))
  reason = _reason_for_host(server, worker, trace, jobs)
  if asked == AUTO:
    reason = reason or _reason_against_program(worker, jobs)
  # This check takes the time of a trace, so it comes last.
  if not reason and _changes_dtypes(server, worker, jobs):
    reason = "the first message changes dtypes of the optimizer's state"
  if reason and asked != AUTO:
    raise ValueError(
      f"the engine {asked!r} cannot simulate this: {reason}; use {AUTO!r} or"
      f" {HOST!r}"
    )
  if reason:
    return Choice(HOST, reason, make_host(server, worker))
  if asked == ROUNDS:
    return Choice(ROUNDS, "as asked", make_rounds(server, worker))
  if asked == CHUNK:
    return Choice(CHUNK, "as asked", make_chunk(server, worker))
  if reason := _reason_for_rounds(server, trace, jobs):
    return Choice(ROUNDS, reason, make_rounds(server, worker))
  reason = "many messages in one program"
  return Choice(CHUNK, reason, make_chunk(server, worker))


def _reason_for_host(
  server: base.Server, worker: base.Worker, trace: base.Trace, jobs: JobShapes
) -> str:
  """Returns why only the host engine can simulate these jobs; "" if the other
  engines can."""
  if not worker.traceable:
    return "the worker's job is several programs"
  if not jobs.even:
    return "batches of jobs differ in size"
  if not jax.tree.leaves(jobs.batch):
    return "a job has no arrays"
  server_state = jax.eval_shape(server.init, jobs.params)
  worker_state = jax.eval_shape(worker.init, jobs.params)
  return why_only_host(server_state.opt_state, worker_state, trace)


def _changes_dtypes(
  server: base.Server, worker: base.Worker, jobs: JobShapes
) -> bool:
  """Returns whether a message changes dtypes in the state of the server or of
  its worker. The state of a compiled loop has constant ones."""
  # Floats of the default dtype stay so, and tracing a job takes time.
  first_states = jax.eval_shape(
    lambda params: (server.init(params), worker.init(params)), jobs.params
  )
  dtypes_of_floats = {
    x.dtype
    for x in jax.tree.leaves(first_states)
    if jnp.issubdtype(x.dtype, jnp.inexact)
  }
  if dtypes_of_floats <= {jnp.zeros([]).dtype}:
    return False
  pure = pure_steps(server, worker)

  def job(params: base.Params, batch: base.Batch) -> tuple[Any, Any]:
    state = server.init(params)
    ticket = server.send(state, jnp.int32(0))
    root, first = jax.random.key(0), worker.init(ticket.params)
    last, message, metrics = pure.work(first, ticket, batch, root, jnp.int32(0))
    after, _ = pure.receive(state, ticket, message, metrics.loss)
    return (state, first), (after, last)

  before, after = jax.eval_shape(job, jobs.params, jobs.batch)
  dtypes = [[x.dtype for x in jax.tree.leaves(y)] for y in (before, after)]
  return dtypes[0] != dtypes[1]


def _reason_against_program(worker: base.Worker, jobs: JobShapes) -> str:
  """Returns why the host engine is as fast as the other engines; "" if it is
  slower."""
  if jobs.messages < _MIN_MESSAGES:
    return f"{jobs.messages:,} messages are fewer than {_MIN_MESSAGES:,}"
  shapes = jax.eval_shape(lambda *x: x, jobs.params, jobs.batch)
  leaves, structure = jax.tree.flatten(shapes)
  is_on_cpu = jax.default_backend() == "cpu"
  if is_on_cpu and _has_convolution(worker, structure, tuple(leaves)):
    return "convolutions are slow in the loops of a CPU's programs"
  return ""


def _reason_for_rounds(
  server: base.Server, trace: base.Trace, jobs: JobShapes
) -> str:
  """Returns why the rounds engine is faster than the chunk engine; "" if it is
  slower."""
  action = np.asarray(trace.action)
  receive_rows = np.flatnonzero(action == base.RECEIVE)
  if not server.sends_current or (action == base.KEEP).any():
    return ""
  send_rows = np.flatnonzero(action == base.SEND)
  n_received_before = np.searchsorted(receive_rows, send_rows)
  # Tickets sent between the same two messages are equal.
  is_used = n_received_before < len(receive_rows)
  n_tickets = len(np.unique(n_received_before[is_used]))
  # The mean number of messages in a round.
  round_size = len(receive_rows) // max(n_tickets, 1)
  shapes = jax.tree.leaves(jax.eval_shape(lambda x: x, jobs.params))
  nbytes = sum(x.size * x.dtype.itemsize for x in shapes)
  if round_size < _LARGE_ROUND or nbytes > _SMALL_MODEL:
    return ""
  return (
    f"{round_size:,} gradients at the same parameters are computed together"
  )


@functools.lru_cache(maxsize=32)  # cells with the same worker call it again
def _has_convolution(
  worker: base.Worker,
  structure: jax.tree_util.PyTreeDef,
  leaves: tuple[jax.ShapeDtypeStruct, ...],
) -> bool:
  """Returns whether a job has a convolution; `leaves` and `structure` are the
  shapes of (params, batch)."""
  params, batch = jax.tree.unflatten(structure, leaves)
  state = jax.eval_shape(worker.init, params)
  number = jax.ShapeDtypeStruct((), np.int32)
  is_fresh = jax.ShapeDtypeStruct((), np.bool_)
  ticket = base.Ticket(number, number, params, is_fresh)
  key = jax.eval_shape(lambda: jax.random.key(0))
  program = jax.make_jaxpr(worker.work)(state, ticket, batch, key)
  names = internals.operations(program.jaxpr)
  return any(name in _SLOW_IN_LOOPS for name in names)
