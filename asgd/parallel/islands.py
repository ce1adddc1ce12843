"""Islands: replicas that take local steps, and average after each round.

    data 0  island 0 |  H steps of island 0  |
            island 1 |  H steps of island 0  | mean of the messages,
    data 1  island 0 |  H steps of island 1  | one update of the server
            island 1 |  H steps of island 1  |

The axis "data" numbers the islands. The axis "island", if the mesh has it,
numbers the devices of an island, which divide its examples. The program calls
the recipe's worker and server. shard_map is manual over "data" only, so a local
step has no collective across islands. Over "island" XLA adds up the gradients.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from asgd import base, server
from asgd.parallel import meshes
from asgd.parallel.data_parallel import Step, StepMetrics

_AXIS = meshes.DATA


class IslandState(NamedTuple):
  """The state between two rounds of n islands; `step` donates it."""

  server: base.ServerState  # the same on each device
  workers: Any  # [n, ...], the worker's state of each island


def make_step(
  server_of_means: base.Server, worker: base.Worker, mesh: Mesh, *, steps: int
) -> Step:
  """Makes the step of a round: a job of each island, and an update.

    d_i = job(params) on the examples of island i
    params <- server's update on (1 / n) sum_i d_i

  Island i draws from fold_in(key, i). The examples of each of the H batches are
  divided over the islands in order.

  Args:
    server_of_means: makes an update of each message, which is a mean.
    worker: the worker of an island; its jobs take H batches.
    mesh: with the axis "data" of n islands, and perhaps the axis "island".
    steps: H, batches in a job, which `asgd.stacking.job_batches` stacks.

  Returns:
    A Step. Its metric `norm` is the norm of the mean message. Its batch has the
    examples of all islands: [B, ...], or [H, B, ...] if H is more than 1.

  Source:
    none; for the algorithms see `asgd.algorithms.local_work`.

  Example:
    One island, which steps from 8 to 4 and to 2.

    >>> import asgd
    >>> recipe = asgd.model_averaging(0.5, workers=1, steps=2)
    >>> worker = recipe.make_worker(lambda w, batch: 0.5 * (w - batch[0]) ** 2)
    >>> mesh = meshes.make({"data": 1})
    >>> averaging = make_step(recipe.server(), worker, mesh, steps=2)
    >>> state = averaging.init(jnp.float32(8.0))
    >>> batches = averaging.place(jnp.zeros((2, 1)))
    >>> state, metrics = averaging.step(state, batches, jax.random.key(0))
    >>> print(averaging.params(state), metrics.norm)
    2.0 6.0
  """
  count = meshes.size(mesh, _AXIS)
  batches_axis = () if steps == 1 else (None,)  # the axis of the H batches
  specs = IslandState(P(), P(_AXIS))  # type: ignore[arg-type]

  def round_of_island(state, batch, key):
    island = jax.lax.axis_index(_AXIS)
    worker_state = jax.tree.map(lambda x: x[0], state.workers)  # [1, ...] here
    # [1] The local steps.
    ticket = server_of_means.send(state.server, jnp.int32(0))
    worker_state, message, metrics = worker.work(
      *(worker_state, ticket, batch, jax.random.fold_in(key, island))
    )
    # [2] The only collective across islands.
    loss, mean = jax.lax.pmean((metrics.loss, message), _AXIS)
    # [3] Each device makes the same update.
    server_state, _ = server_of_means.receive(state.server, ticket, mean)
    norm = optax.tree.norm(base.weights_of(mean))
    metrics_of_round = StepMetrics(loss, norm, server.all_finite(mean))
    return IslandState(
      server_state, jax.tree.map(lambda x: x[None], worker_state)
    ), metrics_of_round

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, batch, key):
    return jax.shard_map(
      round_of_island,
      mesh=mesh,
      in_specs=(specs, P(*batches_axis, _AXIS), P()),
      out_specs=(specs, P()),
      axis_names={_AXIS},
      check_vma=False,
    )(state, batch, key)

  def first_state(params):
    state = server_of_means.init(params)
    return IslandState(state, meshes.repeat(worker.init(state.params), count))

  def init(params):
    shapes = jax.eval_shape(first_state, params)
    server_specs = jax.tree.map(lambda _: P(), shapes.server)
    worker_specs = jax.tree.map(lambda _: P(_AXIS), shapes.workers)
    placed = meshes.place(shapes, mesh, IslandState(server_specs, worker_specs))
    if meshes.are_shapes(params):
      return placed
    # Compiled, so that no two arrays of the state share a buffer.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
    return jax.jit(first_state, out_shardings=shardings)(params)

  # All devices of an island divide its examples.
  examples = P(*batches_axis, tuple(mesh.axis_names))
  place = functools.partial(meshes.place, mesh=mesh, specs=examples)

  def params_of(state: Any) -> optax.Params:
    return state.server.params

  return Step(init, step, params_of, place)
