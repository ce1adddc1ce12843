"""Islands: local steps as a server has them, and nothing sent in between."""

import jax
import jax.numpy as jnp
import kit
import pytest

import asgd
from asgd.parallel import hlo, islands, meshes

STEPS, ISLANDS = 3, 2
WEIGHTS = {"w": jnp.ones(5), "b": jnp.zeros(())}


def loss(params, batch):
  return jnp.mean((batch @ params["w"] - params["b"]) ** 2)


RECIPES = {
  "averaging": asgd.model_averaging(
    0.1, workers=ISLANDS, steps=STEPS, momentum=0.9
  ),
  "diloco": asgd.diloco(0.1, workers=ISLANDS, steps=STEPS),
  "slowmo": asgd.slowmo(0.1, workers=ISLANDS, steps=STEPS),
}


def make(recipe, shape):
  server, worker = recipe._replace(every=1).server(), recipe.make_worker(loss)
  return islands.make_step(server, worker, meshes.make(shape), steps=STEPS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_round_is_that_of_a_server_with_as_many_workers(name):
  recipe, rounds = RECIPES[name], kit.normal(2, STEPS, 8, 5)
  # [1] A server, and the workers by themselves.
  server, worker = recipe.server(), recipe.make_worker(loss)
  work, receive = jax.jit(worker.work), jax.jit(server.receive)
  state, workers = server.init(WEIGHTS), [worker.init(WEIGHTS)] * ISLANDS
  for batches in rounds:
    ticket = server.send(state, jnp.int32(0))
    for i, share in enumerate(jnp.split(batches, ISLANDS, axis=1)):
      workers[i], message, _ = work(
        workers[i], ticket, share, jax.random.key(0)
      )
      state, _ = receive(state, ticket, message)
  # [2] Islands of one device, and of two.
  for shape in ({"data": ISLANDS}, {"data": ISLANDS, "island": 2}):
    step = make(recipe, shape)
    on_mesh = step.init(WEIGHTS)
    for batches in rounds:
      on_mesh, metrics = step.step(
        on_mesh, step.place(batches), jax.random.key(0)
      )
    assert metrics.finite
    kit.close(step.params(on_mesh), state.params, rtol=1e-5, atol=1e-6)


def test_local_steps_send_nothing_across_islands():
  step = make(RECIPES["diloco"], {"data": ISLANDS, "island": 2})
  batches = step.place(kit.normal(STEPS, 8, 5))
  key = jax.random.key(0)
  lowered = step.step.lower(step.init(WEIGHTS), batches, key)
  sent = hlo.read(lowered.compile().as_text()).collectives
  # Devices 0 and 1 are island 0. Each local step adds up a gradient there.
  inside = [each for each in sent if each.groups == ((0, 1), (2, 3))]
  across = [each for each in sent if each.groups == ((0, 2), (1, 3))]
  assert len(inside) + len(across) == len(sent)
  leaves = 2
  assert sum(each.times for each in inside) >= STEPS * leaves
  # The mean message, and the loss: once in a round.
  assert sum(each.times for each in across) == leaves + 1
