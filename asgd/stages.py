"""One stage, compiled: forward, backward, and the backward in two halves.

A stage is a function fn(params, x, extra) -> (y, aux). `x` comes from the stage
before, `extra` (examples, labels, keys) from outside. Its backward is taken
apart on the level of the program (jaxpr), once, when it is compiled:

- The backward reads parameters from its argument, not from values that are kept
  with the activations. So a forward copies no weights, and the caller decides
  whether a backward sees the weights of its forward (a stash) or those of now
  (PipeMare, FTPipe without recomputation).
- The gradient of the inputs (I) and that of the weights (W) share one set of
  residuals. I passes to W the values that both need, so nothing is computed
  twice (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import internals

_CALLS = {"jit", "pjit", "closed_call", "core_call"}


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
  y: Any  # shapes


def floating(tree: Any) -> list[Any]:
  """Returns the leaves that have gradients."""
  return [x for x in jax.tree.leaves(tree) if _is_floating(x)]


def _is_floating(x):
  return jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact)


def compile_stage(fn: Callable, params: Any, x: Any, extra: Any) -> Stage:
  """Compiles a stage, once, for arguments of these shapes; `x` is () for the
  first stage. Nothing is differentiated by `extra`. Raises ValueError if there
  is nothing to differentiate."""
  leaves, tree = jax.tree.flatten((params, x, extra))
  return _compile(fn, tree, *map(_shape, leaves))


@functools.lru_cache(maxsize=256)
def _compile(fn, tree, *leaves):
  shapes = params, *inputs = jax.tree.unflatten(tree, leaves)
  if not floating(params):
    raise ValueError(
      "a stage needs parameters of a floating point dtype; give its layers to"
      " the stage before or after"
    )
  y, _ = jax.eval_shape(fn, *shapes)
  compute, backward, residuals = _differentiate(fn, *shapes)

  def forward(params, x, extra):
    _check_same("x", x, inputs[0])
    _check_same("extra", extra, inputs[1])
    return compute(params, x, extra)

  def residuals_of(params, x, extra):
    return compute(params, x, extra)[2]

  def recompute(params, x, extra, gy):
    return backward(params, residuals_of(params, x, extra), gy)

  halves = _split_jaxpr(backward, params, residuals, floating(y))
  functions = forward, residuals_of, backward, recompute, *halves
  size = sum(s.size * s.dtype.itemsize for s in residuals)
  return Stage(*map(jax.jit, functions), size, y)


def _check_same(name, actual, expected):
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


def _differentiate(fn, params, x, extra):
  """Returns the forward with its residuals, the backward that takes them, and
  their shapes."""

  def full(params, x, extra):
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

  jaxpr, shapes = _inline(full, params, x, extra)
  output_tree = jax.tree.structure(shapes[:2])
  vjp = jax.tree.structure(shapes[2])
  n_out, outs = output_tree.num_leaves, jaxpr.jaxpr.outvars
  param_vars = jaxpr.jaxpr.invars[: jax.tree.structure(params).num_leaves]
  # Residuals that depend on the parameters alone are not kept: the backward
  # recomputes them.
  params_only = {*param_vars, *jaxpr.jaxpr.constvars}
  for eqn in jaxpr.jaxpr.eqns:
    is_params_only = all(_is_literal(v) or v in params_only for v in eqn.invars)
    if is_params_only and not eqn.effects:
      params_only.update(eqn.outvars)
  residuals = outs[n_out:]
  stored = [v for v in _variables(residuals) if v not in params_only]
  compute = _function(jaxpr, jaxpr.jaxpr.invars, [*outs[:n_out], *stored])
  recomputed_atoms = [
    v for v in residuals if _is_literal(v) or v in params_only
  ]
  # The backward drops effects, such as prints: the forward has had them.
  eqns = _needed_equations(jaxpr.jaxpr.eqns, recomputed_atoms, effects=False)
  compute_again = _function(jaxpr, param_vars, recomputed_atoms, eqns)

  def forward(params, x, extra):
    outputs = compute(*jax.tree.leaves((params, x, extra)))
    y, aux = jax.tree.unflatten(output_tree, outputs[:n_out])
    return y, aux, tuple(outputs[n_out:])

  def backward(params, outputs, gy):
    from_params = iter(compute_again(*jax.tree.leaves(params)))
    value_of = dict(zip(stored, outputs, strict=True))
    leaves = [
      value_of[v] if not _is_literal(v) and v in value_of else next(from_params)
      for v in residuals
    ]
    return jax.tree.unflatten(vjp, leaves)(list(gy))

  return forward, backward, tuple(_shape(v.aval) for v in stored)


def _split_jaxpr(backward, params, residuals, gy):
  """Returns a backward in two functions: the inputs' gradient, with shared
  intermediate values, and the weights' gradient from those."""
  jaxpr, shapes = _inline(backward, params, residuals, gy)
  gradient = jax.tree.structure(shapes[0])
  n, n_inputs = gradient.num_leaves, len(shapes[1])
  eqns, invars = jaxpr.jaxpr.eqns, jaxpr.jaxpr.invars
  weights, inputs = jaxpr.jaxpr.outvars[:n], jaxpr.jaxpr.outvars[n:]
  input_eqns = _needed_equations(eqns, inputs)
  forward_vars = invars[: len(invars) - len(gy)]  # parameters, residuals
  # `half` is what both halves read: I returns it, and W takes it.
  outvars = (v for eqn in input_eqns for v in eqn.outvars)
  input_computed = {*invars[len(forward_vars) :], *outvars}
  weight_eqns = [
    eqn
    for eqn in _needed_equations(eqns, weights)
    if not any(eqn is input_eqn for input_eqn in input_eqns)
  ]
  weight_atoms = [*(v for eqn in weight_eqns for v in eqn.invars), *weights]
  half = [v for v in _variables(weight_atoms) if v in input_computed]
  compute_inputs = _function(jaxpr, invars, [*inputs, *half])
  weight_invars = [*forward_vars, *half]
  compute_weights = _function(jaxpr, weight_invars, weights, weight_eqns)

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
  """Returns the variables among `atoms`, which are variables and literals, each
  once."""
  return list(dict.fromkeys(v for v in atoms if not _is_literal(v)))


def _inline(function, *args):
  """Returns a function's program, with the functions that it calls inlined, and
  the shapes of its outputs."""
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  run = functools.partial(_evaluate, closed)
  return jax.make_jaxpr(run)(*map(_shape, closed.in_avals)), shapes


def _evaluate(closed, *args):
  values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
  values.update(zip(closed.jaxpr.invars, args, strict=True))

  def read(v):
    return v.val if _is_literal(v) else values[v]

  for eqn in closed.jaxpr.eqns:
    inner = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
    if inner is not None:
      outs = _evaluate(inner, *map(read, eqn.invars))
    else:
      eqn_vars = _variables(eqn.invars)
      outs = _run(eqn_vars, [eqn], eqn.outvars, *map(read, eqn_vars))
    values.update(zip(eqn.outvars, outs, strict=True))
  return [read(v) for v in closed.jaxpr.outvars]


_INFO = internals.DebugInfo("stage", "asgd.stages", None, None)


def _run(invars, eqns, outvars, *args):
  effects = frozenset().union(*(eqn.effects for eqn in eqns))
  jaxpr = internals.Jaxpr((), invars, outvars, eqns, effects, _INFO)
  return internals.jaxpr_as_fun(internals.ClosedJaxpr(jaxpr, ()))(*args)


def _needed_equations(eqns, outs, *, effects=True):
  """Returns the equations that `outs` depend on, and those with effects, in
  their order."""
  wanted_vars = set(_variables(outs))
  needed = []
  for eqn in reversed(eqns):
    has_effects = effects and eqn.effects
    if has_effects or any(v in wanted_vars for v in eqn.outvars):
      needed.append(eqn)
      wanted_vars.update(_variables(eqn.invars))
  return needed[::-1]


def _function(closed, invars, outs, eqns=None):
  """Returns the function of `invars` that computes `outs`, from `eqns`, or from
  the needed equations of `closed`."""
  eqns = _needed_equations(closed.jaxpr.eqns, outs) if eqns is None else eqns
  invars = [*closed.jaxpr.constvars, *invars]
  return functools.partial(_run, invars, eqns, outs, *closed.consts)
