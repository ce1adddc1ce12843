"""What a type checker sees of the public names; mypy reads it, nothing runs it.

Each `type: ignore` is a mistake that mypy must find: it warns of an ignore
that hides no error.
"""

from typing import Any, assert_type

import jax
import numpy as np
import optax
from flax import linen as nn

import asgd
from asgd import algorithms, base


def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
  return ((batch @ params) ** 2).mean()


DATA = np.zeros((64, 3), np.float32)
RECIPE = asgd.dana_zero(0.01, workers=4)


def cases() -> None:
  assert_type(RECIPE, algorithms.Recipe)
  assert_type(asgd.as_algorithm(optax.sgd(0.1)), base.Algorithm)
  assert_type(asgd.__version__, str)
  clock = asgd.orders.durations.constant(2)
  assert_type(clock, asgd.orders.durations.Durations)
  result = asgd.simulate(loss, np.zeros(3), DATA, RECIPE, messages=8, seed=1)
  assert_type(result, asgd.Result)
  assert_type(result.trace, base.Trace | None)
  assert_type(result.evaluations, list[dict[str, Any]])
  asgd.train_live(
    *(loss, np.zeros(3), DATA, optax.sgd(0.1)),
    messages=8,
    workers=2,
    runtime="ray",
    live={"slowdown": (1, 3)},
  )
  asgd.pipeline.train((jax.nn.relu,), loss, DATA, RECIPE, messages=8, stages=2)

  # Packages below asgd, by `import asgd` alone.
  assert_type(asgd.compression.top_k(0.01), asgd.compression.Codec)
  asgd.compression.top_k(densty=0.01)  # type: ignore[call-arg]
  ring = asgd.gossip.topologies.ring(4)
  assert_type(ring, asgd.gossip.topology.Topology)
  asgd.gossip.topologies.ring("4")  # type: ignore[arg-type]
  trace = asgd.orders.asynchronous(clock, workers=2, messages=8)
  assert_type(trace, base.Trace)
  asgd.orders.asynchronous(clock, workers=2)  # type: ignore[call-arg]
  layers = asgd.models.mlp(10, hidden=(8,))
  assert_type(layers, tuple[nn.Module, ...])
  asgd.models.cnn(10, norm=8)  # type: ignore[arg-type]
  table = asgd.pipeline.schedules.gpipe(2, 4)
  assert_type(table, asgd.pipeline.table.Schedule)
  asgd.pipeline.schedules.gpipes(2, 4)  # type: ignore[attr-defined]

  asgd.simulate(
    *(loss, np.zeros(3), DATA, asgd.table(0.1, workers=4)),
    epochs=1.5,
    trace=result.trace,
    durations=[1, 1, 1, 3],
  )
  rules = asgd.orders.protocol.Rules(bound=3)
  asgd.train_live(
    *(loss, np.zeros(3), DATA, asgd.sandblaster_lbfgs(1.0, workers=4)),
    messages=8,
    order=lambda workers: rules,
    durations=[1.0, 3.0],
  )
  matrix = np.full((4, 4), 0.25)
  asgd.simulate(
    *(loss, np.zeros(3), DATA, asgd.d_psgd(0.1, workers=4, topology=matrix)),
    messages=8,
    order=[0, 1, 0, 2],
    topology=matrix,
  )
  asgd.train_mesh(
    *(loss, np.zeros(3), DATA, optax.sgd(0.1)),
    epochs=1,
    axes={"data": 2},
    zero=1,
  )
  model = nn.Sequential([nn.Dense(1)])
  asgd.pipeline.train(model, loss, DATA, RECIPE, epochs=2)

  asgd.dana_zer(0.01, workers=4)  # type: ignore[attr-defined]
  asgd.dana_zero(0.01, wrokers=4)  # type: ignore[call-arg]
  asgd.dana_zero(0.01, workers="4")  # type: ignore[arg-type]
  asgd.simulate(
    *(loss, np.zeros(3), DATA, RECIPE),
    messages="ten",  # type: ignore[arg-type]
  )
  asgd.simulate(  # type: ignore[call-arg]
    *(loss, np.zeros(3), DATA, RECIPE),
    messages=8,
    wrokers=4,
  )
  asgd.simulate(
    *(loss, np.zeros(3), DATA, "dana_zero"),  # type: ignore[arg-type]
    messages=8,
  )
  asgd.pipeline.train(  # type: ignore[call-arg]
    *((jax.nn.relu,), loss, DATA, RECIPE),
    messages=8,
    stage=2,
  )
  asgd.simulate(
    *(loss, np.zeros(3), DATA, RECIPE),
    epochs="two",  # type: ignore[arg-type]
  )
  asgd.simulate(
    *(loss, np.zeros(3), DATA, RECIPE),
    messages=8,
    order=3,  # type: ignore[arg-type]
  )
  asgd.train_mesh(  # type: ignore[call-arg]
    *(loss, np.zeros(3), DATA, RECIPE),
    messages=8,
    axis={"data": 2},
  )
  asgd.train_live(  # type: ignore[call-arg]
    *(loss, np.zeros(3), DATA, RECIPE),
    messages=8,
    trace=result.trace,
  )
