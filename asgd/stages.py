"""One stage, compiled: forward, backward, and the backward in two halves.

A stage is a function fn(params, x, extra) -> (y, aux). `x` comes from the
previous stage, `extra` (examples, labels, keys) from outside. Compilation
derives the backward from the stage's program (jaxpr):

- The backward reads parameters from its argument, not from values that are
  stored with the activations. So a forward copies no weights, and the caller
  decides whether a backward uses the weights of its forward (a stash) or the
  current ones (PipeMare, FTPipe without recomputation).
- The backward for inputs (I) and the backward for weights (W) share one set of
  residuals. I passes to W the values that both need, so nothing is computed
  twice (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import internals

_CALL_PRIMITIVES = {"jit", "pjit", "closed_call", "core_call"}


class Stage(NamedTuple):
  """Compiled functions of one stage.

  Residuals are the values of the forward that the backward needs besides the
  weights. `gy` and `gx` are gradients of the floating leaves of y and x, and
  `half` holds the values that both halves of a split backward need.
  """

  forward: Callable[..., Any]  # params, x, extra -> y, aux, residuals
  residuals: Callable[..., Any]  # params, x, extra -> residuals, without y
  backward: Callable[..., Any]  # params, residuals, gy -> gradient, gx
  recompute: Callable[..., Any]  # params, x, extra, gy -> gradient, gx
  input: Callable[..., Any]  # params, residuals, gy -> gx, half
  weight: Callable[..., Any]  # params, residuals, half -> gradient
  residual_bytes: int  # of one microbatch
  y: Any  # shapes and dtypes


def floating(tree: Any) -> list[Any]:
  """Returns the leaves of floating point dtypes, which have gradients."""
  return [x for x in jax.tree.leaves(tree) if _is_floating(x)]


def _is_floating(x):
  return jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact)


def compile_stage(fn: Callable, params: Any, x: Any, extra: Any) -> Stage:
  """Compiles a stage, once, for arguments of these shapes; `x` is () for the
  first stage. `extra` has no gradient. Raises ValueError if `params` has no
  floating leaf."""
  leaves, tree = jax.tree.flatten((params, x, extra))
  return _compile(fn, tree, *map(_shape, leaves))


@functools.lru_cache(maxsize=256)
def _compile(
  fn: Callable[..., Any],
  tree: jax.tree_util.PyTreeDef,
  *leaves: jax.ShapeDtypeStruct,
) -> Stage:
  """Compiles a stage; `tree` and `leaves` are the shapes of (params, x, extra).
  """
  shapes = params, *inputs = jax.tree.unflatten(tree, leaves)
  if not floating(params):
    raise ValueError(
      "a stage needs parameters of a floating point dtype; give its layers to"
      " the stage before or after"
    )
  y, _ = jax.eval_shape(fn, *shapes)
  compute, backward, residuals = _differentiate(fn, *shapes)

  def forward(params, x, extra):
    _check_shapes("x", x, inputs[0])
    _check_shapes("extra", extra, inputs[1])
    return compute(params, x, extra)

  def residuals_of(params, x, extra):
    return compute(params, x, extra)[2]

  def recompute(params, x, extra, gy):
    return backward(params, residuals_of(params, x, extra), gy)

  halves = _split_jaxpr(backward, params, residuals, floating(y))
  functions: tuple[Callable[..., Any], ...] = (
    *(forward, residuals_of, backward, recompute),
    *halves,
  )
  size = sum(s.size * s.dtype.itemsize for s in residuals)
  return Stage(*map(jax.jit, functions), size, y)


def _check_shapes(name: str, actual: Any, expected: Any) -> None:
  """Raises ValueError for other shapes than those the stage was compiled for.

  The program would silently compute a wrong result from other shapes.
  """
  shapes = jax.tree.map(np.shape, actual)
  expected_shapes = jax.tree.map(np.shape, expected)
  if shapes != expected_shapes:
    raise ValueError(
      f"{name} has shapes {shapes}, and the stage was compiled for those of"
      f" the first microbatch, {expected_shapes}: make all microbatches alike"
    )


def _shape(x):
  return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x))


def _differentiate(
  fn: Callable[..., Any], params: Any, x: Any, extra: Any
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
  """Returns (forward, which also returns residuals; backward, which takes the
  residuals; their shapes)."""

  def forward_and_vjp(params, x, extra):
    leaves, tree = jax.tree.flatten(x)
    floating_indices = [
      i for i, leaf in enumerate(leaves) if _is_floating(leaf)
    ]

    # Only floating leaves of x have gradients; the rest are constants.
    def floating_outputs(params, floats):
      all_leaves = list(leaves)
      for i, value in zip(floating_indices, floats, strict=True):
        all_leaves[i] = value
      y, aux = fn(params, jax.tree.unflatten(tree, all_leaves), extra)
      return floating(y), (y, aux)

    _, vjp, (y, aux) = jax.vjp(
      floating_outputs,
      params,
      [leaves[i] for i in floating_indices],
      has_aux=True,
    )
    return y, aux, vjp

  jaxpr, shapes = _inline(forward_and_vjp, params, x, extra)
  output_tree = jax.tree.structure(shapes[:2])
  vjp = jax.tree.structure(shapes[2])
  n_out, outs = output_tree.num_leaves, jaxpr.jaxpr.outvars
  param_vars = jaxpr.jaxpr.invars[: jax.tree.structure(params).num_leaves]
  # Residuals that depend on the parameters alone are not stored: the backward
  # recomputes them.
  params_only = {*param_vars, *jaxpr.jaxpr.constvars}
  for eqn in jaxpr.jaxpr.eqns:
    is_params_only = all(_is_literal(v) or v in params_only for v in eqn.invars)
    if is_params_only and not eqn.effects:
      params_only.update(eqn.outvars)
  residuals = outs[n_out:]
  stored = [v for v in _variables(residuals) if v not in params_only]
  compute = _make_function(jaxpr, jaxpr.jaxpr.invars, [*outs[:n_out], *stored])
  recomputed_atoms = [
    v for v in residuals if _is_literal(v) or v in params_only
  ]
  # The backward drops side effects, such as prints: the forward has them.
  eqns = _needed_equations(jaxpr.jaxpr.eqns, recomputed_atoms, effects=False)
  from_params = _make_function(jaxpr, param_vars, recomputed_atoms, eqns)

  def forward(params, x, extra):
    outputs = compute(*jax.tree.leaves((params, x, extra)))
    y, aux = jax.tree.unflatten(output_tree, outputs[:n_out])
    return y, aux, tuple(outputs[n_out:])

  def backward(params, outputs, gy):
    recomputed = iter(from_params(*jax.tree.leaves(params)))
    value_of = dict(zip(stored, outputs, strict=True))
    leaves = [
      value_of[v] if not _is_literal(v) and v in value_of else next(recomputed)
      for v in residuals
    ]
    return jax.tree.unflatten(vjp, leaves)(list(gy))

  return forward, backward, tuple(_shape(v.aval) for v in stored)


def _split_jaxpr(
  backward: Callable[..., Any],
  params: Any,
  residuals: tuple[Any, ...],
  gy: Sequence[Any],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Splits a backward into (input, weight): `input` computes the gradient of
  inputs and `half`, `weight` with `half` the gradient of weights."""
  jaxpr, shapes = _inline(backward, params, residuals, gy)
  gradient = jax.tree.structure(shapes[0])
  n_weights, n_inputs = gradient.num_leaves, len(shapes[1])
  eqns, invars = jaxpr.jaxpr.eqns, jaxpr.jaxpr.invars
  outs = jaxpr.jaxpr.outvars
  weights, inputs = outs[:n_weights], outs[n_weights:]
  input_eqns = _needed_equations(eqns, inputs)
  forward_vars = invars[: len(invars) - len(gy)]  # parameters, residuals
  # `half`: values that I computes and W needs.
  outvars = (v for eqn in input_eqns for v in eqn.outvars)
  input_computed = {*invars[len(forward_vars) :], *outvars}
  weight_eqns = [
    eqn
    for eqn in _needed_equations(eqns, weights)
    if not any(eqn is input_eqn for input_eqn in input_eqns)
  ]
  weight_atoms = [*(v for eqn in weight_eqns for v in eqn.invars), *weights]
  half = [v for v in _variables(weight_atoms) if v in input_computed]
  compute_inputs = _make_function(jaxpr, invars, [*inputs, *half])
  weight_invars = [*forward_vars, *half]
  compute_weights = _make_function(jaxpr, weight_invars, weights, weight_eqns)

  def input(params, residuals, gy):
    values = compute_inputs(*jax.tree.leaves((params, residuals, gy)))
    return list(values[:n_inputs]), tuple(values[n_inputs:])

  def weight(params, residuals, half):
    values = compute_weights(*jax.tree.leaves((params, residuals)), *half)
    return jax.tree.unflatten(gradient, values)

  return input, weight


def _is_literal(v):
  return isinstance(v, internals.Literal)


def _variables(atoms):
  """Returns the variables among variables and literals, each once."""
  return list(dict.fromkeys(v for v in atoms if not _is_literal(v)))


def _inline(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
  """Returns (a function's program with all calls inlined, the shapes of its
  outputs)."""
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  run = functools.partial(_evaluate, closed)
  return jax.make_jaxpr(run)(*map(_shape, closed.in_avals)), shapes


def _evaluate(closed: Any, *args: Any) -> list[Any]:
  """Runs a program, with all calls inlined; returns its outputs."""
  values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
  values.update(zip(closed.jaxpr.invars, args, strict=True))

  def read(v):
    return v.val if _is_literal(v) else values[v]

  for eqn in closed.jaxpr.eqns:
    is_call = eqn.primitive.name in _CALL_PRIMITIVES
    if is_call and (inner := eqn.params.get("jaxpr")) is not None:
      outs = _evaluate(inner, *map(read, eqn.invars))
    else:
      eqn_vars = _variables(eqn.invars)
      outs = _run_equations(eqn_vars, [eqn], eqn.outvars, *map(read, eqn_vars))
    values.update(zip(eqn.outvars, outs, strict=True))
  return [read(v) for v in closed.jaxpr.outvars]


_DEBUG_INFO = internals.DebugInfo("stage", "asgd.stages", None, None)


def _run_equations(invars, eqns, outvars, *args):
  effects = frozenset().union(*(eqn.effects for eqn in eqns))
  jaxpr = internals.Jaxpr((), invars, outvars, eqns, effects, _DEBUG_INFO)
  return internals.jaxpr_as_fun(internals.ClosedJaxpr(jaxpr, ()))(*args)


def _needed_equations(
  eqns: Sequence[Any], outs: Sequence[Any], *, effects: bool = True
) -> list[Any]:
  """Returns, in the order of the program, the equations that `outs` depend on
  and, if `effects`, those with side effects."""
  wanted_vars = set(_variables(outs))
  needed = []
  for eqn in reversed(eqns):
    has_effects = effects and eqn.effects
    if has_effects or any(v in wanted_vars for v in eqn.outvars):
      needed.append(eqn)
      wanted_vars.update(_variables(eqn.invars))
  return needed[::-1]


def _make_function(
  closed: Any,
  invars: Sequence[Any],
  outs: Sequence[Any],
  eqns: Sequence[Any] | None = None,
) -> Callable[..., Any]:
  """Returns a function from `invars` to `outs` that runs `eqns`; None: the
  needed equations of `closed`."""
  eqns = _needed_equations(closed.jaxpr.eqns, outs) if eqns is None else eqns
  invars = [*closed.jaxpr.constvars, *invars]
  return functools.partial(_run_equations, invars, eqns, outs, *closed.consts)
