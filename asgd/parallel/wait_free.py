"""Wait-free backpropagation: sends a gradient while the backward continues.

The gradient of a layer is complete after the backward of the layer, so its
all-reduce can overlap the backward of the layers before it. Here the backward
is computed layer by layer, and each all-reduce depends only on gradients that
are complete, so that XLA may overlap the two. (XLA combines small all-reduces,
up to a size that depends on the backend.)

Sufficient factors: the gradient of a dense layer's kernel is x^T dy, with x of
shape [K, M], dy of shape [K, N], and K rows in the batch. All devices can
gather x and dy and multiply them, instead of adding up products of M x N
numbers. By Poseidon's rule this moves fewer bytes if K is small beside M and N.
If other code also uses a kernel, as in a tied embedding, devices reduce its
gradient.

Everything here is for use inside `jax.shard_map` with check_vma=False.

Index letters:
  D  devices of the axis
  K  rows (examples, or positions of sequences) of one device's batch
  M  inputs of a dense layer
  N  outputs of it

References:
  Zhang et al., "Poseidon: an efficient communication architecture for
  distributed deep learning on GPU clusters", ATC 2017.
  Xie et al., "Lighter-communication distributed machine learning via
  sufficient factor broadcasting", UAI 2016.
"""

import collections
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import traverse_util

from asgd import base, checks, internals, models, problems
from asgd import losses as losses_lib
from asgd.parallel import collectives, costs, step_checks
from asgd.parallel.memory import bytes_of

FACTORS = ("rule", "always", "never")

Path = tuple[str, ...]  # flax's path of a module inside a layer


class DenseGradient(NamedTuple):
  """A dense layer, and the way in which devices send its kernel's gradient."""

  layer: int  # index of the layer in the model
  path: Path  # path of the dense layer inside the model's layer
  rows: int  # K
  inputs: int  # M
  outputs: int  # N
  factors: bool  # whether devices gather factors; else they reduce the gradient
  output: Any  # shape and dtype of the dense layer's output, float[..., N]


@contextlib.contextmanager
def _record_dense(
  calls: list[tuple[Any, ...]], taps: Mapping[Path, jax.Array]
) -> Iterator[None]:
  """Records calls of nn.Dense as (path, input float[..., M], output
  float[..., N]), and adds taps to the outputs. A tap is an array of zeros: the
  derivative of the loss by the tap is dy."""

  trace = internals.get_opaque_trace_state()

  def intercept(next_call, args, kwargs, context):
    output = next_call(*args, **kwargs)
    module = context.module
    # A subclass may compute something else than x times a kernel.
    if type(module) is not nn.Dense or context.method_name != "__call__":
      return output
    # Values inside a transform, such as nn.remat, cannot leave it.
    if internals.get_opaque_trace_state() != trace:
      return output
    if module.path in taps:
      output = output + taps[module.path]
    calls.append((module.path, args[0], output))
    return output

  with nn.intercept_methods(intercept):
    yield


def _kernel(path: Path) -> Path:
  return (*path, "kernel")


def _weights_of(params: Any) -> Any:
  """Returns the weights of a model of layers, indexed by layer."""
  return base.weights_of(params)


def apply_layer(
  layer: nn.Module, weights: Any, params: Any, number: int, x: Any, key: Any
) -> tuple[Any, Any]:
  """Applies layer `number` of a model in training; returns (y, statistics of
  the layer)."""
  layer_params: Any = (weights,)
  if isinstance(params, base.Variables):
    stats: Any = params.stats
    layer_params = base.Variables(layer_params, stats[number : number + 1])
  # Apply a model of one layer; `first` gives it the keys of layer `number`.
  return models.apply(
    (layer,), layer_params, x, train=True, key=key, first=number
  )


def _weights_read_once(
  layer: nn.Module, params: Any, number: int, x: Any, key: Any
) -> set[Path]:
  """Returns the weights of a layer that exactly one operation reads."""
  weights = _weights_of(params)[number]
  program = jax.make_jaxpr(
    lambda weights: apply_layer(layer, weights, params, number, x, key)
  )(weights).jaxpr
  # A weight that is an output of the program counts as read, too.
  reads = collections.Counter(id(v) for eqn in program.eqns for v in eqn.invars)
  reads.update(id(v) for v in program.outvars)
  leaves = jax.tree_util.tree_leaves_with_path(weights)
  return {
    tuple(entry.key for entry in path)
    for (path, _), v in zip(leaves, program.invars, strict=True)
    if reads[id(v)] == 1
  }


def choose(
  pieces: problems.Pieces,
  params: optax.Params,
  batch: base.Batch,
  devices: int,
  *,
  factors: str = "rule",
) -> tuple[DenseGradient, ...]:
  """Chooses for every dense layer how devices send its gradient, in forward
  order.

  Layers that are called twice, layers with a kernel that other code reads, and
  those inside a transform such as nn.remat are left out: their gradient is not
  one product of arrays that can be sent. `batch` is that of one
  device; `params` and `batch` may be shapes. `factors` is "rule" for Poseidon's
  rule (`costs.prefers_factors`), "always" or "never". Raises ValueError for
  another value.
  """
  checks.one_of("factors", factors, FACTORS)
  choices: list[DenseGradient] = []

  def decide(number, path, x, y):
    shape = math.prod(x.shape[:-1]), x.shape[-1], y.shape[-1]  # K, M, N
    sends_factors = factors == "always" or (
      factors == "rule" and costs.prefers_factors(*shape, devices)
    )
    sends_factors = sends_factors and devices > 1
    return DenseGradient(number, path, *shape, sends_factors, jax.typeof(y))

  def forward(params, batch, key):
    weights = _weights_of(params)
    x = pieces.prepare(batch, key, problems.dtype_of(weights))
    for number, layer in enumerate(step_checks.layers_of(pieces)):
      calls: list[tuple[Any, ...]] = []
      read_once = _weights_read_once(layer, params, number, x, key)
      with _record_dense(calls, {}):
        x, _ = apply_layer(layer, weights[number], params, number, x, key)
      times = collections.Counter(path for path, *_ in calls)
      choices.extend(
        decide(number, path, *arrays)
        for path, *arrays in calls
        if times[path] == 1 and _kernel(path) in read_once
      )
    return x

  # Trace the forward for its shapes; it is not run.
  jax.eval_shape(forward, params, batch, jax.random.key(0))
  return tuple(choices)


def _forward(
  layer: nn.Module,
  params: Any,
  number: int,
  x: Any,
  key: jax.Array,
  by_factors: list[DenseGradient],
  needs_no_dx: bool,
) -> tuple[Any, Callable[..., Any], Any]:
  """Runs a layer; `by_factors` are its dense layers that send factors.

  Returns (y, backward, stats). backward(dy) returns three values: gradients by
  path, without the kernels of `by_factors`; (x, dy) of these kernels by path;
  and dx, which is None if `needs_no_dx`: no layer before this one has weights.
  """
  other_weights = traverse_util.flatten_dict(_weights_of(params)[number])
  # The kernels of `by_factors` are constants: this device does not compute
  # their gradients x^T dy.
  kernel_paths = [_kernel(d.path) for d in by_factors]
  kernels = {path: other_weights.pop(path) for path in kernel_paths}
  taps = {d.path: jnp.zeros(d.output.shape, d.output.dtype) for d in by_factors}

  def run(other_weights, taps, x=x):
    weights = traverse_util.unflatten_dict(other_weights | kernels)
    calls: list[tuple[Any, ...]] = []
    with _record_dense(calls, taps):
      y, stats = apply_layer(layer, weights, params, number, x, key)
    factors = {path: x for path, x, _ in calls if path in taps}
    return y, (stats, factors)

  inputs = (other_weights, taps) if needs_no_dx else (other_weights, taps, x)
  y, pullback, (stats, factors) = jax.vjp(run, *inputs, has_aux=True)

  def backward(dy):
    d_weights, d_taps, *dx = pullback(dy)
    # (x, dy) of each kernel of `by_factors`.
    pairs = {path: (factors[path], d_taps[path]) for path in factors}
    return d_weights, pairs, dx[0] if dx else None

  return y, backward, stats


def gradient(
  pieces: problems.Pieces,
  axis: collectives.Axis,
  *,
  reduce: str | collectives.Reduce = "psum",
  bucket_bytes: int = 0,
  factors: str = "never",
) -> Callable[..., tuple[tuple[jax.Array, losses_lib.Aux], optax.Params]]:
  """Makes the wait-free gradient of a problem's loss, averaged over devices.

  Args:
    pieces: the pieces of a Problem.
    axis: an axis of the mesh with D devices, which each have a part of the
      batch.
    reduce: a name in `collectives.COLLECTIVES`, or a function (x, axis) -> sum.
    bucket_bytes: a device sends gradients once they have this many bytes; with
      0 it sends the gradients of each layer separately.
    factors: as in `choose`.

  Returns:
    (params, batch, key) -> ((loss, aux), gradients), for use inside shard_map,
    as `jax.value_and_grad(problem.loss, has_aux=True)`. Loss, statistics and
    gradients are means over devices. Each device passes its batch and its key.

  Example:
    problem = problems.classification(...)
    step = jax.shard_map(
      wait_free.gradient(problem.pieces, "data"),
      mesh=mesh,  # with an axis "data"
      in_specs=(P(), P("data"), P()),
      out_specs=P(),
      check_vma=False,
    )
    (loss, aux), grads = jax.jit(step)(params, batch, key)
  """
  checks.one_of("factors", factors, FACTORS)
  all_reduce = collectives.lookup(reduce)
  checks.integer("bucket_bytes", bucket_bytes, 0)

  def call(params, batch, key):
    devices = jax.lax.axis_size(axis)
    # [1] Choose how each dense layer sends. All devices choose alike, as they
    # decide by shapes.
    dense: tuple[DenseGradient, ...] = ()
    if factors != "never":
      dense = choose(pieces, params, batch, devices, factors=factors)
    # [2] The forward, layer by layer.
    loss, dy, backwards, stats = _forward_all(pieces, params, batch, key, dense)

    def mean(tree):
      return jax.tree.map(lambda x: x / devices, tree)

    def all_reduce_mean(layers):
      """All-reduces gradients of some layers, as one array for each dtype."""
      size = bytes_of(layers) or 1
      sums = collectives.all_reduce_tree(
        layers, axis, bucket_bytes=size, reduce=all_reduce
      )
      return mean(sums)

    def gathered_product(x, dy, dtype):
      """Returns the mean over devices of x^T dy, from the rows of all devices.
      """
      flat = (part.reshape(-1, part.shape[-1]) for part in (x, dy))
      x, dy = (
        jax.lax.all_gather(part.astype(dtype), axis, tiled=True)
        for part in flat
      )
      return mean(x.T @ dy)

    # [3] The backward sends gradients when they are complete.
    grads = _backward_all(
      *(base.weights_of(params), backwards, dy),
      *(all_reduce_mean, gathered_product, bucket_bytes),
    )
    loss, stats = mean(jax.lax.psum((loss, tuple(stats)), axis))
    if isinstance(params, base.Variables):
      # In training the loss does not depend on the given statistics, so their
      # gradient is zero, as in the result of jax.grad.
      grads = base.Variables(grads, optax.tree.zeros_like(params.stats))
    return (loss, losses_lib.Aux(stats)), grads

  return call


def _forward_all(
  pieces: problems.Pieces,
  params: Any,
  batch: base.Batch,
  key: jax.Array,
  dense: tuple[DenseGradient, ...],
) -> tuple[jax.Array, Any, list[Callable[..., Any]], list[Any]]:
  """Returns (loss, derivative of the loss at the last layer's output, each
  layer's backward as in `_forward`, statistics)."""
  weights = _weights_of(params)
  # The keys of problems.whole_loss, so that both losses draw the same numbers.
  prepare_key, model_key = jax.random.split(key)
  x = pieces.prepare(batch, prepare_key, problems.dtype_of(weights))
  backwards: list[Callable[..., Any]] = []
  stats: list[Any] = []
  needs_no_dx = True  # whether no layer so far has weights
  for number, layer in enumerate(step_checks.layers_of(pieces)):
    by_factors = [d for d in dense if d.factors and d.layer == number]
    x, backward, layer_stats = _forward(
      layer, params, number, x, model_key, by_factors, needs_no_dx
    )
    needs_no_dx = needs_no_dx and not jax.tree.leaves(weights[number])
    backwards.append(backward)
    stats.extend(layer_stats)
  loss, pullback = jax.vjp(lambda y: pieces.criterion(y, batch), x)
  (dy,) = pullback(jnp.ones_like(loss))
  return loss, dy, backwards, stats


def _backward_all(
  weights: Any,
  backwards: list[Callable[..., Any]],
  dy: Any,
  all_reduce_mean: Callable[[dict[int, Any]], dict[int, Any]],
  gathered_product: Callable[..., jax.Array],
  bucket_bytes: int,
) -> tuple[Any, ...]:
  """Runs the backward from the last layer to the first, and sends gradients
  meanwhile; returns the gradients of all layers.

  `dy` is the derivative at the last layer's output. `all_reduce_mean` averages
  {layer: gradient} over devices. `gathered_product` turns (x, dy, dtype) into a
  kernel's gradient, averaged over devices.
  """
  # The lowest layer with weights.
  lowest = next(i for i, w in enumerate(weights) if jax.tree.leaves(w))
  # Layer -> gradients of kernels that send factors.
  products: dict[int, dict[Path, jax.Array]] = {}
  sent: dict[int, Any] = {}  # layer -> gradients of its other weights
  waiting: dict[int, Any] = {}  # gradients that are not sent yet
  for number in reversed(range(lowest, len(backwards))):
    waiting[number], pairs, dy = backwards[number](dy)
    flat = traverse_util.flatten_dict(weights[number])
    products[number] = {
      _kernel(path): gathered_product(*pair, flat[_kernel(path)].dtype)
      for path, pair in pairs.items()
    }
    if bytes_of(waiting) >= max(bucket_bytes, 1):
      sent |= all_reduce_mean(waiting)
      waiting = {}
  sent |= all_reduce_mean(waiting)
  # The gradients of each layer, in the structure of its weights.
  return tuple(
    traverse_util.unflatten_dict(sent.get(i, {}) | products.get(i, {}))
    for i in range(len(weights))
  )
