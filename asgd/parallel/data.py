"""Data parallel training: many devices, one step, the numbers of one device.

Each of d devices computes gradients on its part of a batch; their mean is the
gradient of the batch, and every device takes the same step. What each device
keeps between steps is set by `zero`:

  0  parameters, gradients and the optimizer's state, all whole
  1  a d-th of the state: gradients are added up by reduce-scatter, each device
     updates a d-th of the parameters, and all gather them
  2  and a d-th of the gradients, also while they are accumulated
  3  and a d-th of the parameters, which are gathered where the loss needs them,
     and in the backward once more (XLA's CPU backend keeps them instead)

Gradients are computed and reduced in shard_map, by collectives that are written
here. The optimizer runs outside of it, on global arrays whose placement alone
is told: XLA derives what has to be sent. So a transform need not be elementwise
to be right: Adam sends nothing, LAMB its norms, Adafactor its means. A leaf is
divided along its longest axis that d divides (and nothing else divides), and
kept whole if there is none; it has the same shape either way, and a checkpoint
is the same at any `zero` and d.

Index letters:
  B  examples of the batch
  d  devices of the data axis
  a  pieces that a device accumulates
  b  = B / (d a), examples of a piece

References:
  Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
  parameter models", SC 2020, section 5.
  Goyal et al., "Accurate, large minibatch SGD", 2017, section 3.
"""

import functools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from asgd import base, names, transforms
from asgd import worker as worker_lib
from asgd.parallel import meshes, precision

FORMS = ("shard_map", "pmap")

Specs = Callable[[optax.Params], Any]  # params -> a tree of PartitionSpecs

# A loop over pieces is written out up to here: XLA's CPU backend runs
# convolutions in loops many times slower (see `asgd.worker`).
_UNROLLED = 8


class State(NamedTuple):
  """All that is kept from one step to the next; donated to `step`."""

  count: jax.Array  # int32[], steps taken, skipped ones included
  params: optax.Params  # global arrays; [d, ...] in the form "pmap"
  opt_state: optax.OptState
  scale: Any  # precision.LossScale, or () without one


class Metrics(NamedTuple):
  """What a step tells; the same on every device."""

  loss: jax.Array  # float[], mean over the batch, at the parameters before
  norm: jax.Array  # float[], the gradient's, before it is clipped
  finite: jax.Array  # bool[], False for a step skipped by the loss scale


class Step(NamedTuple):
  """A training step and what goes with it. `step` donates the state."""

  init: Callable[[optax.Params], State]  # whole parameters, which it copies
  step: Callable[[State, base.Batch, jax.Array], tuple[State, Metrics]]
  params: Callable[[State], optax.Params]  # whole again, on every device
  place: Callable[..., base.Batch]  # (batch, *, local=False) -> global arrays


def replicated(params: optax.Params) -> Any:
  """The specs of parameters that are whole on every device."""
  return jax.tree.map(lambda _: P(), params)


def divided(shape: tuple[int, ...], spec: P, parts: int, axis: str) -> P:
  """Adds a mesh axis to a spec, where it divides the array best.

  Args:
    shape: of the whole array.
    spec: what divides it already.
    parts: size of the mesh axis.
    axis: its name.

  Returns:
    The spec with `axis` at the longest free dimension that it divides (the
    first of several); the spec itself if there is none.

  Example:
    >>> tuple(divided((3, 3, 16, 32), P(), 8, "data"))
    (None, None, None, 'data')
    >>> tuple(divided((10,), P(), 8, "data"))
    ()
  """
  held = (*spec, *(None,) * (len(shape) - len(spec)))
  fits = [
    i
    for i, length in enumerate(shape)
    if held[i] is None and length and length % parts == 0
  ]
  if not fits:
    return spec
  best = max(fits, key=lambda i: shape[i])
  return P(*held[:best], axis, *held[best + 1 :])


_WHOLE = -1  # no dimension: what is not divided


def _dimension(spec: P, axis: str) -> int:
  return tuple(spec).index(axis) if axis in tuple(spec) else _WHOLE


def _state_specs(state, weights, specs, choose):
  """Places the optimizer's state: what looks like a weight lies like it.

  A wrong guess would cost time, and change no number.
  """
  leaves = jax.tree_util.tree_leaves_with_path(weights)
  flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
  known = {
    (path, leaf.shape): spec
    for (path, leaf), spec in zip(leaves, flat, strict=True)
  }

  def place(path, leaf):
    for start in range(len(path) + 1):
      spec = known.get((path[start:], leaf.shape))
      if spec is not None:
        return spec
    return choose(leaf)

  return jax.tree_util.tree_map_with_path(place, state)


def make_step(
  loss: worker_lib.Loss,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  axis: str = meshes.DATA,
  accumulate: int = 1,
  clip_norm: float | None = None,
  zero: int = 0,
  policy: str | precision.Policy = "unchanged",
  loss_scale: precision.Dynamic | None = None,
  statistics_decay: float = 0.9,
  form: str = "shard_map",
  specs: Specs = replicated,
) -> Step:
  """Makes a step on a batch that is divided among devices.

  The batch is cut into d a pieces of b examples, in order, and piece i is drawn
  with fold_in(key, i): dropout, augmentation and BatchNorm know of nothing but
  their piece. Hence the contract: meshes, forms and stages of ZeRO for which
  d a is the same give the same numbers, but for round-off; so does one device
  with accumulate = d a. For a loss that draws nothing, and normalises by no
  statistics of the batch, every d a gives the same. Metrics and updates
  are those of the mean over all examples, as pieces are of one size.

  `base.Variables` (BatchNorm) are trained too: the statistics of the pieces are
  averaged, and move the kept ones as the server does.

  Args:
    loss: (params, piece, key) -> (float[], Aux), the mean over the piece. In
      the form "shard_map" it is called inside of shard_map, with all axes of
      the mesh, and must return the same on all devices along every axis but
      `axis`. If there are other axes, types are checked (check_vma): a scan
      within it needs a carry that varies as what it becomes (`meshes.vary`).
    tx: any optax transform, elementwise or not.
    mesh: with `axis`.
    axis: over which examples are divided.
    accumulate: a, pieces that a device computes one after the other.
    clip_norm: largest norm of the (whole) gradient; None is any.
    zero: 0 to 3, see above.
    policy: dtypes, a Policy or a name of `precision.POLICIES`.
    loss_scale: scale the loss, and skip steps whose gradient is not finite;
      None does neither.
    statistics_decay: how much of the statistics a step keeps.
    form: "shard_map"; or "pmap" for those who have programs in that form: one
      process, one axis, zero 0.
    specs: how the parameters are divided over other axes of the mesh (tensor,
      rows, stages).

  Returns:
    A Step. It compiles at its first call for each shape of a batch.

  Raises:
    ValueError: for arguments out of range or that exclude one another; and when
      it is called, for a batch that d a does not divide.

  Example:
    >>> def loss(w, piece, key):  # mean over the examples of a piece
    ...   return jnp.mean((piece @ w) ** 2) / 2, worker_lib.Aux(())
    >>> made = make_step(loss, optax.sgd(0.5), meshes.make({"data": 1}))
    >>> state = made.init(jnp.ones(2))
    >>> batch = made.place(jnp.array([[1.0, 0.0], [0.0, 2.0]]))
    >>> state, metrics = made.step(state, batch, jax.random.key(0))
    >>> float(metrics.loss), made.params(state).tolist()
    (1.25, [0.75, 0.0])
  """
  devices = meshes.size(mesh, axis)
  policy = precision.policy(policy)
  _check(accumulate, clip_norm, zero, form)
  if loss_scale is not None:
    precision.check_dynamic(loss_scale)
  if form == "pmap":
    _check_pmap(mesh, axis, zero, specs)
  algorithm = transforms.own_statistics(base.as_algorithm(tx), statistics_decay)
  clip = None if clip_norm is None else optax.clip_by_global_norm(clip_norm)
  pieces = devices * accumulate

  def begin(params):
    params = precision.cast(params, policy.param)
    # A copy, as the state will be donated and these may be somebody's.
    params = jax.tree.map(jnp.copy, params)
    scale = () if loss_scale is None else precision.start(loss_scale)
    return State(jnp.int32(0), params, algorithm.init(params), scale)

  def gradient(params, batch, key, scale, dims):
    """What one device computes: mean loss, gradient and statistics.

    `dims` has for each weight its dimension that is divided, or _WHOLE.
    """
    weights = meshes.vary(base.weights_of(params), axis)
    first = jax.lax.axis_index(axis) * accumulate

    def objective(weights, piece, number):
      if zero == 3:
        weights = jax.tree.map(gather, weights, dims)
      value, aux = loss(
        precision.cast(base.with_weights(params, weights), policy.compute),
        precision.cast(piece, policy.compute),
        jax.random.fold_in(key, number),
      )
      value, stats = jax.tree.map(_wide, (value, aux.stats))
      return value * scale.astype(value.dtype), (value, stats)

    if zero == 3:  # keeps all that the backward needs, but for whole weights
      objective = jax.checkpoint(objective, policy=_keep)

    def gather(leaf, dim):
      leaf = precision.cast(leaf, policy.compute)
      if dim == _WHOLE:
        return leaf
      return _gather(axis, dim, policy.reduce, leaf)

    def scatter(leaf, dim):
      if dim == _WHOLE:
        return leaf
      return jax.lax.psum_scatter(leaf, axis, scatter_dimension=dim, tiled=True)

    def one(i):
      piece = jax.tree.map(
        lambda x: x.reshape(accumulate, -1, *x.shape[1:])[i], batch
      )
      grads, (value, stats) = jax.grad(objective, has_aux=True)(
        weights, piece, first + i
      )
      grads = precision.cast(grads, policy.reduce)
      if zero == 2:
        grads = jax.tree.map(scatter, grads, dims)
      return value, grads, stats

    total = one(0)
    if accumulate > 1:
      total, _ = jax.lax.scan(
        lambda total, i: (jax.tree.map(jnp.add, total, one(i)), None),
        total,
        jnp.arange(1, accumulate),
        unroll=accumulate <= _UNROLLED or 1,
      )
    value, grads, stats = total
    if zero == 1:
      grads = jax.tree.map(scatter, grads, dims)
    grads = jax.tree.map(
      lambda leaf, dim: jax.lax.psum(leaf, axis) if dim == _WHOLE else leaf,
      *(grads, dims),
    )
    value, stats = jax.lax.psum((value, stats), axis)
    value, stats = jax.tree.map(lambda x: x / pieces, (value, stats))
    grads = jax.tree.map(lambda g: g / (pieces * scale).astype(g.dtype), grads)
    return value, grads, stats

  def update(state, value, grads, stats):
    """The optimizer's part."""
    norm = optax.tree.norm(grads)
    finite = precision.all_finite(grads)
    if clip is not None:
      grads, _ = clip.update(grads, optax.EmptyState())
    if isinstance(state.params, base.Variables):
      grads = base.Variables(grads, stats)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    updates, opt_state = algorithm.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    kept, scale = (params, opt_state), ()
    if loss_scale is not None:
      kept = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        *(kept, (state.params, state.opt_state)),
      )
      scale = precision.adjust(loss_scale, state.scale, finite)
    return State(state.count + 1, *kept, scale), Metrics(value, norm, finite)

  def scale_of(state):
    return jnp.float32(1) if loss_scale is None else state.scale.scale

  if form == "pmap":
    return _pmap_step(begin, gradient, update, scale_of, mesh, axis, pieces)

  def layouts(params):
    """Returns the specs of parameters: between steps, and as updated."""

    def choose(leaf, spec):
      return divided(jnp.shape(leaf), spec, devices, axis) if zero else spec

    weights = base.weights_of(params)
    given = specs(weights)
    parts = jax.tree.map(choose, weights, given)
    kept = parts if zero == 3 else given
    if isinstance(params, base.Variables):
      stats = replicated(params.stats)
      return base.Variables(kept, stats), base.Variables(parts, stats)
    return kept, parts

  def constrain(tree, tree_specs):
    return jax.lax.with_sharding_constraint(
      tree, meshes.shardings(mesh, tree_specs)
    )

  def settle(state):
    """Places a state as all states are placed."""
    kept, parts = layouts(state.params)

    def choose(leaf):
      return divided(leaf.shape, P(), devices, axis) if zero else P()

    weights = base.weights_of(state.params)
    opt_specs = _state_specs(
      state.opt_state, weights, base.weights_of(parts), choose
    )
    tree_specs = State(P(), kept, opt_specs, replicated(state.scale))
    return constrain(state, tree_specs)

  def init(params):
    placed = meshes.place(params, mesh, layouts(params)[0])
    return jax.jit(lambda params: settle(begin(params)))(placed)

  def step(state, batch, key):
    _check_batch(batch, pieces)
    kept, parts = layouts(state.params)
    grad_specs = base.weights_of(parts)
    dims = jax.tree.map(
      lambda _, spec: _dimension(spec, axis),
      *(base.weights_of(state.params), grad_specs),
    )
    value, grads, stats = jax.shard_map(
      functools.partial(gradient, dims=dims),
      mesh=mesh,
      in_specs=(kept, P(axis), P(), P()),
      out_specs=(P(), grad_specs, P()),
      # Where nothing but the data is divided, any loss is right as it is.
      check_vma=len(mesh.axis_names) > 1,
    )(state.params, batch, key, scale_of(state))
    # Each device updates its part: the others' are gathered by `settle`.
    state = state._replace(params=constrain(state.params, parts))
    state, metrics = update(state, value, grads, stats)
    return settle(state), metrics

  return Step(
    init,
    jax.jit(step, donate_argnums=0),
    lambda state: meshes.whole(state.params, mesh),
    functools.partial(meshes.place_batch, mesh=mesh, axis=axis),
  )


def _wide(x):
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _keep(primitive, *_, **__):
  """What jax.checkpoint keeps for the backward: all but what is gathered.

  `_gather` shows here as a function with a derivative of its own, and nothing
  tells it from others; those of the loss are computed again, too.
  """
  return primitive.name != "custom_vjp_call"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(axis, dim, reduce, leaf):
  """all_gather, whose derivative is added up in the dtype `reduce`."""
  del reduce
  return jax.lax.all_gather(leaf, axis, axis=dim, tiled=True)


def _gather_fwd(axis, dim, reduce, leaf):
  return _gather(axis, dim, reduce, leaf), None


def _gather_bwd(axis, dim, reduce, _, cotangent):
  dtype = cotangent.dtype
  cotangent = precision.cast(cotangent, reduce)
  part = jax.lax.psum_scatter(
    cotangent, axis, scatter_dimension=dim, tiled=True
  )
  return (part.astype(dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def _pmap_step(begin, gradient, update, scale_of, mesh, axis, pieces):
  """The form "pmap": state and batch have a leading axis of devices."""
  devices = meshes.size(mesh, axis)

  def device_step(state, batch, key):
    dims = jax.tree.map(lambda _: _WHOLE, base.weights_of(state.params))
    totals = gradient(state.params, batch, key, scale_of(state), dims)
    return update(state, *totals)

  run = jax.pmap(
    device_step,
    axis_name=axis,
    in_axes=(0, 0, None),
    out_axes=(0, None),
    devices=list(mesh.devices.flat),
    donate_argnums=0,
  )

  def repeat(x):
    return jnp.broadcast_to(x, (devices, *x.shape))

  def init(params):
    spread = jax.NamedSharding(mesh, P(axis))
    make = jax.jit(lambda params: jax.tree.map(repeat, begin(params)))
    return jax.device_put(make(params), spread)

  def place(batch, *, local=False):
    del local  # there is one process
    _check_batch(batch, pieces)
    return jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), batch)

  def step(state, batch, key):
    return run(state, batch, key)

  def params(state):
    return jax.tree.map(lambda x: x[0], state.params)

  return Step(init, step, params, place)


def _check(accumulate, clip_norm, zero, form):
  worker_lib.check_steps(accumulate, "accumulate")
  if clip_norm is not None:
    number = isinstance(clip_norm, numbers.Real)
    if not number or clip_norm is True or not 0 < clip_norm < float("inf"):
      raise ValueError(
        f"clip_norm must be a positive number, or None, not {clip_norm!r}"
      )
  if isinstance(zero, bool) or zero not in range(4):
    raise ValueError(f"zero must be 0, 1, 2 or 3, not {zero!r}")
  if form not in FORMS:
    raise ValueError(f"unknown form {form!r}; {names.nearest(form, FORMS)}")


def _check_pmap(mesh, axis, zero, specs):
  if tuple(mesh.axis_names) != (axis,):
    raise ValueError(
      f"the form 'pmap' is for a mesh of the axis {axis!r} alone, not of"
      f" {tuple(mesh.axis_names)}; use 'shard_map'"
    )
  if zero or specs is not replicated:
    raise ValueError(
      "the form 'pmap' keeps everything whole on each device; use 'shard_map'"
      f" for zero={zero!r} or parameters that are divided"
    )
  if jax.process_count() > 1:
    raise ValueError(
      f"the form 'pmap' is for one process, not {jax.process_count()}; use"
      " 'shard_map'"
    )


def _check_batch(batch, pieces):
  lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch)}
  if len(lengths) != 1 or () in lengths:
    raise ValueError(
      "all arrays of a batch must have one leading axis, of examples; not"
      f" {sorted(jnp.shape(x) for x in jax.tree.leaves(batch))}"
    )
  ((length,),) = lengths
  if length % pieces or not length:
    raise ValueError(
      f"a batch of {length} examples cannot be divided into {pieces} pieces"
      " (devices of the data axis times accumulate): use a multiple"
    )
