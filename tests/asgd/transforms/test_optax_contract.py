"""Every transform and every recipe keeps the contract of an optax transform.

It is what optax asks of its own contributions: unknown extra args are ignored,
a second call compiles nothing, a scan may carry the state, its leaves are
arrays, `optax.tree.map_params` finds the parts of it that are like parameters,
and `optax.inject_hyperparams` may make every number an argument.
"""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import kit
import optax
import pytest

from asgd import algorithms, base, gossip, optimizers, transforms
from asgd.algorithms import local_work

PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.array([0.5])}
GRADS = {"w": 1.5 - PARAMS["w"], "b": jnp.array([-2.0])}
SENT = jax.tree.map(lambda p: 0.75 * p, PARAMS)
# What a server tells, and a worker; and what nobody has heard of.
EXTRA = {
  "worker": jnp.int32(1),
  "staleness": jnp.int32(2),
  "version": jnp.int32(3),
  "sent_params": SENT,
  "unheard_of": jnp.zeros(2),
}


class Case(NamedTuple):
  """How a transform is made."""

  make: object  # (**arguments) -> transform
  numbers: dict  # arguments that `inject_hyperparams` may hold
  others: dict  # the rest


def case(make, *others, **arguments):
  """Arguments that are numbers are injected, but for those named."""
  numbers = {
    key: value
    for key, value in arguments.items()
    if isinstance(value, float) and key not in others
  }
  rest = {k: v for k, v in arguments.items() if k not in numbers}
  return Case(make, numbers, rest)


SGD, RATE = optax.sgd(0.1, 0.9), 0.1
ALGORITHM = algorithms.build("nag_asgd", RATE, 2).algorithm
TRANSFORMS = {
  "adaptive_delay_compensation": case(
    transforms.adaptive_delay_compensation, strength=2.0, decay=0.9, eps=0.1
  ),
  "add_proximal_pull": case(transforms.add_proximal_pull, strength=0.5),
  "correct_variance": case(gossip.correct_variance),
  "counting": case(optimizers.counting, tx=SGD),
  "at_version": case(
    optimizers.at_version, optimizer=optax.adam, learning_rate=RATE
  ),
  "dana_momentum": case(transforms.dana_momentum, workers=2, decay=0.9),
  "delay_compensation": case(transforms.delay_compensation, strength=0.5),
  "delayed_nesterov": case(
    transforms.delayed_nesterov, momentum=0.9, every=2, share=0.25
  ),
  "divide_by_gap": case(transforms.divide_by_gap, decay=0.9, eps=0.1),
  "gap_aware": case(
    transforms.gap_aware, optimizer=SGD, learning_rate=RATE, decay=0.9, eps=0.1
  ),
  "gap_aware, gradients": case(
    functools.partial(transforms.gap_aware, average="gradients"),
    optimizer=optax.sgd(RATE),
    learning_rate=RATE,
    weight_decay=0.01,
  ),
  "lookahead": case(
    transforms.lookahead, tx=SGD, workers=lambda worker: worker[None]
  ),
  "mix_models": case(
    lambda mixing, decay: transforms.mix_models(
      mixing, transforms.polynomial_discount(decay)
    ),
    mixing=0.5,
    decay=0.5,
  ),
  "mix_models, hinge": case(
    lambda mixing, decay, grace: transforms.mix_models(
      mixing, transforms.hinge_discount(decay, grace)
    ),
    mixing=0.5,
    decay=0.5,
    grace=1.0,
  ),
  "local_optimizer": case(
    lambda rate, momentum, decay, strength: local_work.local_optimizer(
      *(None, rate, momentum, decay), transforms.add_proximal_pull(strength)
    ),
    rate=RATE,
    momentum=0.0,
    decay=0.0,
    strength=0.5,
  ),
  "own_statistics": case(
    transforms.own_statistics, algorithm=ALGORITHM, decay=0.9
  ),
  "per_worker": case(transforms.per_worker, tx=SGD, workers=2),
  "precede": case(
    lambda: transforms.precede(ALGORITHM, transforms.delay_compensation())
  ),
  "scale_by_adadelay": case(
    transforms.scale_by_adadelay, learning_rate=RATE, strength=0.5
  ),
  "scale_by_discount": case(
    lambda decay: transforms.scale_by_discount(
      transforms.polynomial_discount(decay)
    ),
    decay=0.5,
  ),
  "scale_by_sent_rate": case(
    transforms.scale_by_sent_rate, learning_rate=RATE
  ),
  "scale_by_sent_rate, schedule": case(
    lambda: transforms.scale_by_sent_rate(lambda version: 0.5**version)
  ),
  "scale_by_staleness": case(transforms.scale_by_staleness, grace=1.5),
  "slim": case(transforms.slim, optimizer=SGD),
  "slim, schedule": case(
    lambda: transforms.slim(
      optimizers.at_version(optax.adam, lambda version: 0.5**version)
    )
  ),
  "velocity_lookahead": case(
    transforms.velocity_lookahead,
    momentum=optax.trace(0.9),
    learning_rate=RATE,
    velocity=lambda state, worker: state.trace,
  ),
}


def at_server(name, **arguments):
  return algorithms.build(name, workers=3, **arguments).one_message()


def at_worker(name, **arguments):
  return algorithms.build(name, workers=3, **arguments).at_worker


# Of options that are None by default.
GIVEN = {"decay": 0.5, "local_rate": 0.05}
# What is no part of the transform: it is read when the recipe is built.
BUILT = ("gamma",)


def of_recipe(where, name):
  options = {
    key: GIVEN.get(key) if value is None else value
    for key, value in algorithms.options(name).items()
  }
  make = functools.partial(where, name)
  return case(make, *BUILT, learning_rate=RATE, **options)


RECIPES = {name: of_recipe(at_server, name) for name in algorithms.ALL}
AT_WORKER = {
  f"{name}, at the worker": of_recipe(at_worker, name)
  for name in algorithms.RECIPES
  if algorithms.build(name, RATE, 2).at_worker is not None
}
CASES = {**TRANSFORMS, **RECIPES, **AT_WORKER}


def test_the_table_names_every_transform():
  named = {name.split(",")[0] for name in TRANSFORMS}
  for name, function in vars(transforms).items():
    if not inspect.isfunction(function):
      continue
    kind = inspect.signature(function).return_annotation
    if kind in (
      base.Algorithm,
      optax.GradientTransformation,
      optax.GradientTransformationExtraArgs,
    ):
      assert name in named


def build(made):
  """Returns the transform of a case; an Algorithm is one with a send rule."""
  tx = made.make(**made.numbers, **made.others)
  return optax.GradientTransformationExtraArgs(tx.init, tx.update)


def injected(made):
  """Returns it with its numbers in the state, as `inject_hyperparams` does."""

  def factory(**numbers):
    return build(made._replace(numbers=numbers))

  factory.__signature__ = inspect.Signature(
    inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY)
    for key in made.numbers
  )
  return optax.inject_hyperparams(factory)(**made.numbers)


def two_updates(tx):
  """Compiles a scan over two updates."""

  @jax.jit
  def run(state, params, extra):
    def step(carry, _):
      params, state = carry
      updates, state = tx.update(GRADS, state, params, **extra)
      return (optax.apply_updates(params, updates), state), updates

    return jax.lax.scan(step, (params, state), length=2)

  return run


@pytest.mark.parametrize("name", CASES)
def test_it_is_an_optax_transform(name):
  made = CASES[name]
  tx = build(made)
  state = tx.init(PARAMS)
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
  kit.same(optax.tree.map_params(tx, lambda leaf: leaf, state), state)
  run = two_updates(tx)
  (params, after), updates = run(state, PARAMS, EXTRA)
  (_, _), _ = run(after, params, EXTRA)
  assert run._cache_size() == 1
  assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)
  if not made.numbers:
    return
  tx = injected(made)
  (others, inside), _ = two_updates(tx)(tx.init(PARAMS), PARAMS, EXTRA)
  kit.close(others, params, rtol=1e-6, atol=1e-7)
  assert sorted(inside.hyperparams) == sorted(made.numbers)


def test_a_schedule_of_lambda_is_injected():
  inject = optax.inject_hyperparams(transforms.delay_compensation)
  tx = inject(strength=lambda count: 0.5 * count)
  g, sent, now = jnp.array([2.0, 8.0, 6.0])
  state = tx.init(now)
  for expected in (2.0, -2.0):  # 2 + 0 2^2 (6 - 8), 2 + 0.5 2^2 (6 - 8)
    update, state = tx.update(g, state, now, sent_params=sent)
    assert update == expected


def test_a_number_out_of_range_is_refused_where_it_is_injected():
  inject = optax.inject_hyperparams(transforms.delay_compensation)
  with pytest.raises(ValueError, match="must be 0 or more, not Array"):
    inject(strength=-1.0).init(PARAMS)


def test_workers_are_no_number_to_inject():
  inject = optax.inject_hyperparams(transforms.dana_momentum)
  with pytest.raises(ValueError, match="workers .*: name it in static_args"):
    inject(workers=2, decay=0.9).init(PARAMS)


def narrow(tree, is_mixed):
  """Returns a tree in bfloat16, or its last leaf alone."""
  leaves, structure = jax.tree.flatten(tree)
  n_kept = len(leaves) - 1 if is_mixed else 0
  narrowed = optax.tree.cast(leaves[n_kept:], jnp.bfloat16)
  return jax.tree.unflatten(structure, [*leaves[:n_kept], *narrowed])


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_keeps_the_dtypes_of_parameters_and_state(name, is_mixed):
  tx = build(CASES[name])
  extra = {**EXTRA, "sent_params": narrow(SENT, is_mixed)}
  params, grads = narrow(PARAMS, is_mixed), narrow(GRADS, is_mixed)
  state = jax.eval_shape(tx.init, params)
  updates, after = jax.eval_shape(
    lambda state: tx.update(grads, state, params, **extra), state
  )
  kinds = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
  assert kinds(updates) == kinds(params)
  assert kinds(after) == kinds(state)
