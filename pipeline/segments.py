"""Cuts a whole flax module into layers, one for each submodule that it calls.

  Net.__call__:  x -> Dense_0 -> relu -> Dense_1 -> mean
  segments:      |- Dense_0 -|- relu, Dense_1, mean -|

A segment runs the module's own method. Submodules outside of the segment are
not called: instead of the previous submodule's output the method gets the
segment's input, and instead of others zeros, on which nothing may depend. So
the method may compute anything between two submodules, but a submodule may need
only the output of the submodule before it.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from asgd import base, checks, internals

_REMEDY = (
  "pass the layers as a tuple, each called on the output of the one before, or"
  " train the model as one piece with asgd.simulate or asgd.train_live"
)


class _CutError(ValueError):
  """A module is no chain of submodules."""


class SubmoduleCall(NamedTuple):
  """A call of a submodule."""

  name: str  # of the submodule, as in the variables
  shape: tuple[int, ...]  # of its output
  dtype: Any


_OUTSIDE = "outside"  # names zeros in a traced segment


class ModuleSegment(nn.Module):
  """The part of a module that ends with the `index`-th of its calls; the last
  segment ends with the module."""

  inner: nn.Module
  index: int
  calls: tuple[SubmoduleCall, ...]
  example: SubmoduleCall  # the module's input, without a name

  def setup(self) -> None:
    """Gives the weights the names that they have in the module."""
    nn.share_scope(self, self.inner)

  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """Returns the output of the segment."""
    outputs: list[jax.Array] = []

    def call(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
      """Runs the submodule of this segment, and replaces others."""
      del context
      number = len(outputs)
      if number == self.index:
        output = method(*args, **kwargs)
      # The output of the previous submodule is the input of the segment.
      elif number == self.index - 1:
        output = x
      else:
        output = _zeros(self.calls[number], x)
      outputs.append(output)
      return output

    module_input = _zeros(self.example, x) if self.index else x
    with nn.intercept_methods(_of_submodules(self.inner, call)):
      result: jax.Array = _run(self.inner, module_input, train)
    is_last = self.index == len(self.calls) - 1
    return result if is_last else outputs[self.index]


def _zeros(call: SubmoduleCall, x: jax.Array) -> jax.Array:
  """Returns the output of a call that is not made, for the examples of `x`."""
  zeros = jnp.zeros((x.shape[0], *call.shape[1:]), call.dtype)
  return checkpoint_name(zeros, _OUTSIDE)


def _of_submodules(
  module: nn.Module, call: Callable[..., Any]
) -> Callable[..., Any]:
  """Returns an interceptor that passes a module's calls of submodules to
  `call`. Calls within a submodule run unchanged.

  Args:
    module: the module that calls the submodules.
    call: (method, args, kwargs, context) -> output.
  """
  inside = False

  def intercept(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
    nonlocal inside
    is_direct = context.module.parent is module
    # Calls within a submodule are not intercepted: it is one unit.
    if inside or not is_direct or context.method_name == "setup":
      return method(*args, **kwargs)
    inside = True
    try:
      return call(method, args, kwargs, context)
    finally:
      inside = False

  return intercept


def _run(module: nn.Module, x: Any, train: bool) -> Any:
  parameters = inspect.signature(type(module).__call__).parameters
  return module(x, train=train) if "train" in parameters else module(x)


def cut(module: nn.Module, x: Any) -> tuple[ModuleSegment, ...]:
  """Returns the segments of a module, in their order.

  Args:
    module: called on one array, also as module(x, train=bool).
    x: a batch.

  Raises:
    ValueError: for a module that is no chain of at least two submodules with
      separate weights; the error says what to change.

  Example:
    >>> net = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
    >>> segments = cut(net, jnp.zeros((8, 3)))
    >>> [each.calls[each.index].name for each in segments]
    ['layers_0', 'layers_2']
  """
  module_name, x = type(module).__name__, jnp.asarray(x)

  def refusal(why: str) -> _CutError:
    return _CutError(
      f"pipeline.train cannot cut {module_name}: {why}: {_REMEDY}"
    )

  takes_train = "train" in inspect.signature(type(module).__call__).parameters
  with checks.user_code(
    f"{module_name} fails on a batch", f": {_REMEDY}", passes=(_CutError,)
  ):
    calls, variables = _trace_calls(module, x, refusal, train=False)
    if takes_train and calls != _trace_calls(module, x, refusal, train=True)[0]:
      raise refusal(
        "it calls other submodules in training than in evaluation (write"
        " nn.Dropout(rate, deterministic=not train))"
      )
  names = {each.name for each in calls}
  if "batch_stats" in variables and not takes_train:
    raise ValueError(
      f"pipeline.train cannot cut {module_name}: it has BatchNorm, but its"
      " __call__ takes no argument train, which selects the batch's or the"
      " running statistics: add it, as nn.BatchNorm(use_running_average="
      "not train, momentum=0.0)"
    )
  if outside_names := {*variables.get("params", {})} - names:
    raise refusal(
      f"{min(outside_names)} is a parameter outside of its submodules"
    )
  if len(calls) < 2:
    raise refusal(f"it calls {len(calls)} submodules, and a stage has one")
  example = SubmoduleCall("", x.shape, x.dtype)
  segments = tuple(
    ModuleSegment(module, index, tuple(calls), example)
    for index in range(len(calls))
  )
  modes = (False, True) if takes_train else (False,)
  for previous, segment in itertools.pairwise(segments):
    previous_call = previous.calls[previous.index]
    if any(_reads_outside(segment, previous_call, train=t) for t in modes):
      raise refusal(
        f"what follows {previous_call.name} needs more than its output, such"
        " as a skip connection over it"
      )
  return segments


def _trace_calls(
  module: nn.Module,
  x: jax.Array,
  refusal: Callable[[str], _CutError],
  *,
  train: bool,
) -> tuple[list[SubmoduleCall], Any]:
  """Returns (a module's calls of submodules, the shapes of its variables)."""
  calls: list[SubmoduleCall] = []

  def call(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Notes a call and its output."""
    name = context.module.name
    if context.method_name != "__call__":
      raise refusal(f"it calls {name}.{context.method_name}, not {name}(x)")
    if any(each.name == name for each in calls):
      raise refusal(f"it calls {name} twice, on two stages")
    output = method(*args, **kwargs)
    if np.shape(output)[:1] != x.shape[:1]:
      raise refusal(f"{name} returns no array of the batch")
    calls.append(SubmoduleCall(name, output.shape, output.dtype))
    return output

  def init(key: jax.Array, x: jax.Array) -> Any:
    intercepted = _Intercepted(module, call)
    return intercepted.init({"params": key, "dropout": key}, x, train=train)

  return calls, jax.eval_shape(init, jax.random.key(0), x)


class _Intercepted(nn.Module):
  """A module that passes its calls of submodules to `call`."""

  inner: nn.Module
  call: Callable[..., Any]

  def setup(self) -> None:
    nn.share_scope(self, self.inner)

  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    with nn.intercept_methods(_of_submodules(self.inner, self.call)):
      output: jax.Array = _run(self.inner, x, train)
    return output


def _reads_outside(
  segment: ModuleSegment, previous_call: SubmoduleCall, *, train: bool
) -> bool:
  """Whether a segment computes with zeros that replace other submodules.

  Args:
    segment: the segment to trace.
    previous_call: the call that returned the segment's input.
    train: whether to trace it in training.
  """
  x = jax.ShapeDtypeStruct(previous_call.shape, previous_call.dtype)
  # Shapes are enough: nothing is computed.
  variables = jax.eval_shape(
    lambda key, x: segment.init(key, x, train=False), jax.random.key(0), x
  )

  def apply(variables: Any, x: jax.Array) -> Any:
    # A module without an argument `train` may always use dropout.
    rngs = {"dropout": jax.random.key(0)}
    # In training a module returns statistics, which nothing reads here.
    mutable = ["batch_stats"] if train else False
    return segment.apply(variables, x, train=train, rngs=rngs, mutable=mutable)

  # Zeros have a name in the program; dead code elimination removes those that
  # no output needs.
  jaxpr = jax.make_jaxpr(apply)(variables, x).jaxpr
  used_jaxpr, _ = internals.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  return any(
    equation.primitive.name == "name" and equation.params["name"] == _OUTSIDE
    for equation in internals.equations(used_jaxpr)
  )


# Variables of the module, and those of its segments.


def inward(segments: Sequence[ModuleSegment], variables: Any) -> Any:
  """Returns a module's variables, or its weights, as parameters of segments."""
  is_whole = isinstance(variables, Mapping) and "params" in variables
  weights = variables["params"] if is_whole else variables
  stats = variables.get("batch_stats") if is_whole else None

  def divide(tree: Any) -> tuple[Any, ...]:
    names = [segment.calls[segment.index].name for segment in segments]
    return tuple({k: tree[k] for k in (name,) if k in tree} for name in names)

  if not isinstance(weights, Mapping):
    raise ValueError(
      "params must be the variables of the module, as module.init(key, x)"
      f" returns them, not {checks.shown(weights)}"
    )
  if stats:
    return base.Variables(divide(weights), divide(stats))
  return divide(weights)


def outward(params: Any) -> dict[str, Any]:
  """Returns parameters of segments as the variables of their module."""

  def join(parts: Sequence[Any]) -> dict[str, Any]:
    return {name: tree for part in parts for name, tree in part.items()}

  if isinstance(params, base.Variables):
    stats = {"batch_stats": join(params.stats)}
    return {"params": join(params.weights), **stats}
  return {"params": join(params)}
