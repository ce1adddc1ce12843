"""One stage, compiled: forward, backward, and the backward in two halves.

A stage is a function fn(params, x, extra) -> (y, aux). `x` comes from the stage
before, `extra` (examples, labels, keys) from outside. Its backward is taken
apart on the level of the program (jaxpr), once, when it is compiled:

- What the backward reads of `params` is not kept with the activations: it is
  read from the parameters that the backward is given. So a forward copies no
  weights, and the caller decides whether a backward sees the weights of its
  forward (a stash) or those of now (PipeMare, FTPipe without recomputation).
- The gradient of the inputs (I) and that of the weights (W) share one set of
  residuals: what I has computed of W's work, W is given, and nothing is
  computed twice (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from asgd import base

StageFn = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(params, x, extra) -> (y, aux); the last stage's y is the loss, float[]."""

_CALLS = {"jit", "pjit", "closed_call", "core_call"}


class Part(NamedTuple):
  """One stage, for the executor."""

  fn: StageFn  # the last stage's y is the loss, float[]
  params: Any  # at first
  server: base.Server  # one update a message: the table says how many are one
  message: optax.GradientTransformation | None = None  # DANA-Slim's momentum


class Stage(NamedTuple):
  """Compiled functions. `kept` is what the backward needs of the forward beside
  the weights, `gy` and `gx` are gradients of the floating leaves of y and x."""

  forward: Callable[..., Any]  # params, x, extra -> y, aux, kept
  backward: Callable[..., Any]  # params, kept, gy -> gradient, gx
  input: Callable[..., Any]  # params, kept, gy -> gx, half
  weight: Callable[..., Any]  # params, kept, half -> gradient
  recompute: Callable[..., Any]  # params, x, extra, gy -> gradient, gx
  kept_bytes: int  # of one microbatch
  y: Any  # shapes


def floating(tree: Any) -> list[Any]:
  """Returns the leaves that have gradients."""
  return [x for x in jax.tree.leaves(tree) if _is_floating(x)]


def _is_floating(x):
  dtype = x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)
  return jnp.issubdtype(dtype, jnp.inexact)


def compile_stage(fn: StageFn, params: Any, x: Any, extra: Any) -> Stage:
  """Compiles a stage for arguments of these shapes, once.

  Args:
    fn: the stage.
    params: its parameters, or their shapes.
    x: its input, or its shape; () for the first stage.
    extra: the rest of its input, or its shape. Nothing is differentiated by it.

  Raises:
    ValueError: if there is nothing to differentiate.
  """
  leaves, tree = jax.tree.flatten((params, x, extra))
  return _compile(fn, tree, *map(_shape, leaves))


@functools.lru_cache(maxsize=256)
def _compile(fn, tree, *leaves):
  params, *given = jax.tree.unflatten(tree, leaves)
  x, extra = given
  if not floating(params):
    raise ValueError(
      "a stage needs parameters of a floating point dtype; give its layers to"
      " the stage before or after"
    )
  y, aux = jax.eval_shape(fn, params, x, extra)
  program = _Program(fn, params, x, extra)
  gy = floating(y)
  kept = program.kept_shapes

  def forward(params, x, extra):
    _check_same("x", x, given[0])
    _check_same("extra", extra, given[1])
    return program.forward(params, x, extra)

  def recompute(params, x, extra, gy):
    *_, kept = program.forward(params, x, extra)
    return program.backward(params, kept, gy)

  split = _Split(program.backward, params, kept, gy)
  return Stage(
    jax.jit(forward),
    jax.jit(program.backward),
    jax.jit(split.input),
    jax.jit(split.weight),
    jax.jit(recompute),
    sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(kept)),
    y,
  )


def _check_same(name, actual, wanted):
  """Refuses what a stage was not compiled for: its program is for those shapes,
  and would compute something else."""
  shapes, others = (jax.tree.map(np.shape, tree) for tree in (actual, wanted))
  if shapes != others:
    raise ValueError(
      f"{name} has shapes {shapes}, and the stage was compiled for those of"
      f" the first microbatch, {others}: make all microbatches alike"
    )


def _shape(x):
  return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x))


class _Program:
  """The forward with what it keeps, and the backward from that."""

  def __init__(self, fn, params, x, extra):
    def full(params, x, extra):
      leaves, tree = jax.tree.flatten(x)
      moving = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]

      def of(params, floats):
        given = list(leaves)
        for i, value in zip(moving, floats, strict=True):
          given[i] = value
        y, aux = fn(params, jax.tree.unflatten(tree, given), extra)
        return floating(y), (y, aux)

      _, vjp, (y, aux) = jax.vjp(
        of, params, [leaves[i] for i in moving], has_aux=True
      )
      return y, aux, vjp

    closed, shapes = jax.make_jaxpr(full, return_shape=True)(params, x, extra)
    self._out = jax.tree.structure(shapes[:2])
    self._vjp = jax.tree.structure(shapes[2])
    n_out = self._out.num_leaves
    jaxpr = _inline(closed)
    invars, outs = jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
    own = invars[: jax.tree.structure(params).num_leaves]
    # What follows from the parameters alone is computed again from them.
    free = {*own, *jaxpr.jaxpr.constvars}
    for eqn in jaxpr.jaxpr.eqns:
      if all(_literal(v) or v in free for v in eqn.invars) and not eqn.effects:
        free.update(eqn.outvars)
    self._residuals = residuals = outs[n_out:]
    self._kept = [v for v in _variables(residuals) if v not in free]
    self._forward = _function(jaxpr, invars, [*outs[:n_out], *self._kept])
    again = [v for v in residuals if _literal(v) or v in free]
    # Without effects, such as prints: those are of the forward.
    eqns = _needed(jaxpr.jaxpr.eqns, again, effects=False)
    self._again = _function(jaxpr, own, again, eqns)
    self.kept_shapes = tuple(_shape_of(v) for v in self._kept)

  def forward(self, params, x, extra):
    outs = self._forward(*jax.tree.leaves((params, x, extra)))
    count = self._out.num_leaves
    y, aux = jax.tree.unflatten(self._out, outs[:count])
    return y, aux, tuple(outs[count:])

  def backward(self, params, kept, gy):
    again = iter(self._again(*jax.tree.leaves(params)))
    held = dict(zip(self._kept, kept, strict=True))
    residuals = [
      held[v] if not _literal(v) and v in held else next(again)
      for v in self._residuals
    ]
    return jax.tree.unflatten(self._vjp, residuals)(list(gy))


class _Split:
  """A backward in two: what the inputs' gradient needs, and the rest."""

  def __init__(self, backward, params, kept, gy):
    closed, shapes = jax.make_jaxpr(backward, return_shape=True)(
      params, kept, gy
    )
    jaxpr = _inline(closed)
    self._gradient = jax.tree.structure(shapes[0])
    n = self._gradient.num_leaves
    eqns, invars = jaxpr.jaxpr.eqns, jaxpr.jaxpr.invars
    weights, inputs = jaxpr.jaxpr.outvars[:n], jaxpr.jaxpr.outvars[n:]
    first, own = _needed(eqns, inputs), invars[: len(invars) - len(gy)]
    done = {*invars[len(own) :], *(v for eqn in first for v in eqn.outvars)}
    second = [
      eqn for eqn in _needed(eqns, weights) if not any(eqn is e for e in first)
    ]
    used = [*(v for eqn in second for v in eqn.invars), *weights]
    self._half = [v for v in _variables(used) if v in done]
    self._n_inputs = len(inputs)
    self._input = _function(jaxpr, invars, [*inputs, *self._half])
    self._weight = _function(jaxpr, [*own, *self._half], weights, second)

  def input(self, params, kept, gy):
    outs = self._input(*jax.tree.leaves((params, kept, gy)))
    return list(outs[: self._n_inputs]), tuple(outs[self._n_inputs :])

  def weight(self, params, kept, half):
    outs = self._weight(*jax.tree.leaves((params, kept)), *half)
    return jax.tree.unflatten(self._gradient, outs)


def _literal(v):
  return isinstance(v, core.Literal)


def _variables(atoms):
  """Those that are no literals, each once."""
  return list(dict.fromkeys(v for v in atoms if not _literal(v)))


def _shape_of(v):
  return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _inline(closed):
  """Returns the program with calls replaced by what they call."""

  def run(*args):
    return _evaluate(closed.jaxpr, closed.consts, args)

  return jax.make_jaxpr(run)(*map(_shape_of, closed.jaxpr.invars))


def _evaluate(jaxpr, consts, args):
  values = dict(zip(jaxpr.constvars, consts, strict=True))
  values.update(zip(jaxpr.invars, args, strict=True))

  def read(v):
    return v.val if _literal(v) else values[v]

  for eqn in jaxpr.eqns:
    inner = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
    if inner is not None:
      outs = _evaluate(inner.jaxpr, inner.consts, map(read, eqn.invars))
    else:
      free = _variables(eqn.invars)
      outs = _run(free, [eqn], eqn.outvars, map(read, free))
    values.update(zip(eqn.outvars, outs, strict=True))
  return [read(v) for v in jaxpr.outvars]


_INFO = core.DebugInfo("stage", "pipeline.stage", None, None)


def _run(invars, eqns, outvars, args):
  effects = frozenset().union(*(eqn.effects for eqn in eqns))
  jaxpr = core.Jaxpr((), invars, outvars, eqns, effects, _INFO)
  return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*args)


def _needed(eqns, outs, *, effects=True):
  """The equations that `outs` depend on, in their order, and those that have
  effects of their own."""
  wanted = set(_variables(outs))
  found = []
  for eqn in reversed(eqns):
    own = effects and eqn.effects
    if own or any(v in wanted for v in eqn.outvars):
      found.append(eqn)
      wanted.update(_variables(eqn.invars))
  return found[::-1]


def _function(closed, invars, outs, eqns=None):
  """Returns the function of `invars` that computes `outs`, by `eqns`, or by all
  equations that are needed for it."""
  jaxpr = closed.jaxpr
  eqns = _needed(jaxpr.eqns, outs) if eqns is None else eqns

  def run(*args):
    return _run(
      [*jaxpr.constvars, *invars], eqns, outs, [*closed.consts, *args]
    )

  return run
