"""L-BFGS by operations on shards equals optax's, even if processes are
killed."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd.sandblaster import (
  Await,
  Begin,
  Command,
  Coordinator,
  Settings,
  Shards,
  State,
  line_search,
  message_name,
)

PORTIONS = 3


def rosenbrock(tree):
  x = jnp.concatenate([tree["b"], tree["w"].ravel()])
  return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def quartic(tree):
  x = jnp.concatenate([tree["b"], tree["w"].ravel()])
  return jnp.sum(jnp.arange(1.0, 9.0) * x**2) + jnp.sum(x**4) + jnp.cos(x[0])


def start(dtype=np.float64):
  return {
    "b": kit.normal(2, seed=1).astype(dtype),
    "w": kit.normal(2, 3, seed=2).astype(dtype),
  }


@functools.cache
def gradient_of(function):
  return jax.jit(jax.value_and_grad(function))


class World:
  """A coordinator, shards and workers that answer at once."""

  def __init__(self, function, settings, shards=1, params=None):
    self.settings = settings._replace(portions=PORTIONS)
    self.coordinator = Coordinator(self.settings)
    params = start() if params is None else params
    self.shards = Shards(params, shards)
    self.shards.put("point", params)
    # Portion p is the function times 3 weights of mean 1.
    self.weights = 0.5, 1.0, 1.5
    self.gradient = gradient_of(function)
    self.iterates, self.losses = [], {}

  def evaluate(self, evaluation):
    trial = self.shards.read("trial")
    value, gradient = jax.device_get(self.gradient(trial))
    for job, weight in enumerate(self.weights):
      rows = jax.tree.map(lambda g, w=weight: g * g.dtype.type(w), gradient)
      self.shards.put(message_name(evaluation, job), rows)
      self.losses[evaluation, job] = weight * float(value)

  def step(self):
    coordinator, request = self.coordinator, self.coordinator.request
    before = coordinator.state.iteration
    if isinstance(request, Command):
      coordinator.answer(self.shards.execute(request))
    elif isinstance(request, Begin):
      if (request.evaluation, 0) not in self.losses:
        self.evaluate(request.evaluation)
      coordinator.answer(None)
    else:
      assert isinstance(request, Await)
      coordinator.answer(self.losses[request])
    if coordinator.state.iteration > max(before, 0):
      self.iterates.append(self.shards.read("point"))

  def run(self, iterations):
    coordinator = self.coordinator
    while coordinator.request and coordinator.state.iteration < iterations:
      self.step()
    return self.iterates


def of_optax(function, iterations, **options):
  """The iterates of optax.lbfgs."""
  tx = optax.lbfgs(**options)
  params = jax.tree.map(jnp.asarray, start())

  @jax.jit
  def step(params, state):
    value, grad = jax.value_and_grad(function)(params)
    updates, state = tx.update(
      grad, state, params, value=value, grad=grad, value_fn=function
    )
    return optax.apply_updates(params, updates), state

  state, iterates = tx.init(params), []
  for _ in range(iterations):
    params, state = step(params, state)
    iterates.append(params)
  return iterates


@functools.cache
def reference(history):
  return of_optax(rosenbrock, 15, memory_size=history)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("history", [10, 2])
def test_iterates_are_those_of_optax(history, shards):
  with jax.enable_x64(True):
    expected = reference(history)
    world = World(rosenbrock, Settings(history=history), shards)
    for ours, theirs in zip(world.run(15), expected, strict=True):
      kit.close(ours, theirs, atol=1e-10)
  assert world.coordinator.state.fallbacks == 0


def test_a_skipped_pair_replaces_none_of_the_history():
  """The history is the last m pairs of positive curvature, of all iterates."""

  def waves(tree):  # falls along each element; convex and concave in turns
    x = jnp.concatenate([tree["b"], tree["w"].ravel()])
    return jnp.sum(jnp.sin(x) - 1.1 * x)

  history, kept, skipped = 2, [], 0
  search = line_search.options_of({"max_linesearch_steps": 1})
  with jax.enable_x64(True):
    world = World(waves, Settings(history=history, search=search), shards=2)
    gradient, before = jax.grad(waves), start()
    for iteration in range(1, 13):
      point = world.run(iteration)[-1]
      s = jax.tree.map(np.subtract, point, before)
      y = jax.tree.map(np.subtract, gradient(point), gradient(before))
      if optax.tree.vdot(s, y) > 0:
        kept.append((s, y))
      else:
        skipped += len(kept) >= history
      found = [
        tuple(world.shards.read(f"{name}{pair.slot}") for name in "sy")
        for pair in world.coordinator.state.pairs
      ]
      kit.close(found, kept[-history:], atol=1e-12)
      before = point
  assert skipped  # while the history was full


def run(world, iterations=12):
  """Runs to the end of some iterations; returns the iterates and the state."""
  return world.run(iterations), world.coordinator.state


@functools.cache
def undisturbed():
  with jax.enable_x64(True):
    return run(World(rosenbrock, Settings(history=3), shards=2))


@pytest.mark.parametrize("every", [1, 7, 100])
def test_lost_shards_change_no_bit(every):
  with jax.enable_x64(True):
    world = World(rosenbrock, Settings(history=3), shards=2)
    step = world.step

    def losing():
      step()
      if world.shards.number % every == 0:
        world.shards.lose(world.shards.number // every % 2)

    world.step = losing
    kit.same(run(world), undisturbed())
  assert world.shards.recoveries > 2


@pytest.mark.parametrize("known", [True, False], ids=["journal", "asks again"])
def test_a_coordinator_that_is_killed_at_any_request_changes_no_bit(known):
  """A coordinator resumes from its state after the last iteration. It has the
  answers since then in a journal, or repeats the commands to the shards."""
  with jax.enable_x64(True):
    world = World(rosenbrock, Settings(history=3), shards=2)
    requests = 0
    while world.coordinator.state.iteration < 12:
      old = world.coordinator
      if requests % 5 == 0:
        answers = old.answers if known else ()
        state = State(**old.state._asdict())
        world.coordinator = Coordinator(world.settings, state, answers)
        if known:
          assert world.coordinator.request == old.request
        while world.coordinator.request != old.request:
          world.step()
      world.step()
      requests += 1
    kit.same(world.coordinator.state, undisturbed()[1])
    kit.same(world.iterates[-1], undisturbed()[0][-1])


def test_jax_arrays_on_the_shards_and_float32():
  expected = run(World(quartic, Settings(), params=start(np.float32)), 5)
  params = jax.tree.map(jnp.asarray, start(np.float32))
  iterates, state = run(World(quartic, Settings(), 2, params), 5)
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(iterates[-1]))
  assert iterates[-1]["w"].dtype == np.float32
  kit.close(jax.device_get(iterates), expected[0], rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(state.loss, expected[1].loss, rtol=1e-4)


def test_the_weight_decay_is_part_of_the_loss():
  def decayed(tree):
    return quartic(tree) + 0.25 * optax.tree.norm(tree, squared=True)

  with jax.enable_x64(True):
    ours, state = run(World(quartic, Settings(weight_decay=0.5)), 5)
    theirs, other = run(World(decayed, Settings()), 5)
    kit.close(ours, theirs)
    np.testing.assert_allclose(state.loss, other.loss, rtol=1e-12)


def wrong_pairs(world, pairs):
  """Gives the coordinator a history."""
  state = world.coordinator.state._replace(pairs=pairs)
  world.coordinator = Coordinator(world.settings, state)


def test_without_descent_it_falls_back_to_steepest_descent_once():
  with jax.enable_x64(True):
    world = World(quartic, Settings())
    world.run(3)
    # A curvature of the wrong sign, large enough to turn the direction.
    pairs = world.coordinator.state.pairs
    wrong = tuple(pair._replace(rho=-1e3) for pair in pairs)
    wrong_pairs(world, wrong)
    loss = world.coordinator.state.loss
    world.run(4)
    coordinator = world.coordinator
    assert coordinator.state.fallbacks == 1
    assert coordinator.state.loss < loss
    (news,) = coordinator.news
    assert "found no descent" in news
    assert not coordinator.state.reason
    assert len(coordinator.state.pairs) == 1  # the new one alone


def test_without_descent_along_steepest_descent_it_ends_and_says_why():
  def gradient_of_another(tree):
    flip = jax.custom_jvp(lambda x: x)
    flip.defjvps(lambda t, ans, x: -t)
    return quartic(jax.tree.map(flip, tree))

  # Without the approximate decrease, which allows for 1e-6 of the loss.
  search = line_search.options_of({"approx_dec_rtol": None})
  with jax.enable_x64(True):
    world = World(gradient_of_another, Settings(search=search))
    iterates, state = run(world, 5)
  assert not iterates
  assert world.coordinator.request is None
  assert state.reason.startswith("no descent: the line search of iteration 1")
  assert world.coordinator.news == [f"stopped: {state.reason}"]
  kit.same(world.shards.read("point"), start())


@pytest.mark.parametrize("at", ["start", "far"])
def test_losses_that_are_not_finite(at):
  """A loss that is not finite ends the run at the start. At a step that is too
  long, the search tries a shorter one."""

  def logarithm(tree):
    x = tree["b"]
    return jnp.sum(x - jnp.log(x)) if at == "far" else jnp.log(-jnp.sum(x**2))

  params = {"b": np.float32([0.05, 3.0])}
  world = World(logarithm, Settings(), params=params)
  iterates, state = run(world, 10)
  if at == "start":
    assert state.reason.startswith("not finite: the loss is nan")
    assert not iterates
  else:
    assert state.iteration > 3
    np.testing.assert_allclose(iterates[-1]["b"], 1, atol=1e-2)


def test_it_ends_where_the_gradient_is_small():
  with jax.enable_x64(True):
    world = World(quartic, Settings(tolerance=1e-3))
    _, state = run(world, 100)
  assert state.reason.startswith("converged: the gradient's norm is")
  assert state.norm <= 1e-3
  assert state.iteration < 50


def test_scipy_test_l_bfgs_b():
  """The maximum entropy problem of scipy.optimize's tests, and their count: 7
  calls of the function, of which the test itself makes 2, and 5 of the
  gradient. Features that no state has are between its columns, as each of 7
  shards needs a row."""
  columns = [0, 2, 5]
  features = np.zeros((5, 7))
  features[:, columns] = [
    *([1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 0, 0], [1, 0, 0]),
  ]
  means = np.zeros(7)
  means[columns] = 1.0, 0.3, 0.5

  def entropy(x):
    return jax.nn.logsumexp(features @ x) - means @ x

  solution = np.zeros(7)
  solution[columns] = 0.0, -0.524869316, 0.487525860
  with jax.enable_x64(True):
    settings, reached = Settings(tolerance=1e-5), []  # SciPy's pgtol
    for shards in 1, 4, 7:
      world = World(entropy, settings, shards, np.zeros(7))
      iterates, state = run(world, 100)
      assert state.reason.startswith("converged")
      assert state.evaluations <= 5  # of function and gradient in one
      kit.close(entropy(iterates[-1]), entropy(solution), atol=1e-6)
      kit.close(iterates[-1], solution, atol=1e-4)
      reached.append(iterates[-1])
    kit.close(reached[1:], reached[:1] * 2, atol=1e-14)
