"""Data parallel training: many devices, one step, the numbers of one device.

Each of d devices computes gradients on its part of a batch; the mean of these
gradients is the gradient of the batch. `zero` sets which arrays each device
keeps between steps:

  0  all parameters, all gradients and the whole optimizer state
  1  a d-th of the optimizer state: gradients are added up by reduce-scatter,
     each device updates a d-th of the parameters, and all devices gather them
  2  as 1, and a d-th of the gradients, also while they are accumulated
  3  as 2, and a d-th of the parameters: devices gather them for the loss, and
     again for the backward (XLA's CPU backend keeps them)

Gradients are computed and reduced in shard_map. The optimizer runs outside of
shard_map, on global arrays placed by `asgd.parallel.zero`. XLA derives which
numbers have to be sent, so a transform need not be elementwise: Adam sends
nothing, LAMB its norms, Adafactor its means.

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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from asgd import base, checks, compression, names, server, transforms
from asgd import losses as losses_lib
from asgd.parallel import meshes, precision, step_checks
from asgd.parallel import zero as zero_lib

# Longest loop over pieces that is written out. XLA's CPU backend runs
# convolutions in loops many times slower (see `asgd.worker`).
_MAX_UNROLLED = 8
_AXIS = meshes.DATA
_REDUCER = 0x726564  # folded into a step's key for the draws of a reducer


class StepState(NamedTuple):
  """The state between two steps; `step` donates it."""

  count: jax.Array  # type: ignore[assignment] # int32[], also of skipped steps
  params: optax.Params  # global arrays; [d, ...] in the form "pmap"
  opt_state: optax.OptState
  scale: Any  # precision.LossScale, or () without one
  reducer: Any = ()  # [d, ...], the compression state of each device


class StepMetrics(NamedTuple):
  """The metrics of a step, the same on every device."""

  loss: jax.Array  # float[], mean over the batch, before the update
  norm: jax.Array  # float[], norm of the gradient before it is clipped
  finite: jax.Array  # bool[], False for a step skipped by the loss scale


class Step(NamedTuple):
  """A training step and the functions that go with it. Given shapes
  (jax.ShapeDtypeStruct), `init` and `place` return shapes with shardings, to
  lower `step` for devices of another machine; not in the form "pmap"."""

  init: Callable[[optax.Params], StepState]  # whole parameters, which it copies
  step: Callable[..., tuple[StepState, StepMetrics]]  # (state, batch, key)
  params: Callable[[StepState], optax.Params]  # all of them, on every device
  place: Callable[[base.Batch], base.Batch]  # -> global arrays


class StepOptions(NamedTuple):
  """The options of `make_step`."""

  accumulate: int = 1  # a, pieces that a device computes one after the other
  clip_norm: float | None = None  # largest norm of the batch's gradient
  zero: int = 0  # 0 to 3, see above
  # Dtypes, a Policy or a name of `precision.POLICIES`.
  policy: str | precision.Policy = "unchanged"
  # Scales the loss, and skips steps with a gradient that is not finite.
  loss_scale: precision.Dynamic | None = None
  form: str = "shard_map"  # or "pmap": one process, one axis, zero 0
  statistics_decay: float = 0.9  # weight of the old statistics in a step
  # Averages the gradients of the devices (`compression.named_reducer`); None
  # averages exactly. ZeRO, other axes and the form "pmap" exclude it. If one
  # gradient is not finite, zeros are reduced instead, and the mean is NaN.
  reducer: compression.Reducer | None = None
  # The transform searches along a line (`optimizers.lbfgs`): its update gets
  # `value`, the loss of the batch, and `value_fn`, weights -> that loss. Needs
  # the form "shard_map", zero 0, no other axis and no clip_norm.
  searches: bool = False


def make_step(
  loss: losses_lib.Loss,
  tx: optax.GradientTransformation | base.Algorithm,
  mesh: Mesh,
  *,
  specs: zero_lib.Specs = zero_lib.replicated,
  **options: Any,
) -> Step:
  """Makes a step on a batch that is divided among devices.

  The batch is cut into d a pieces of b examples, in order. Dropout and
  augmentation of piece i draw from fold_in(key, i), and BatchNorm normalises
  within a piece. So all meshes, forms and stages of ZeRO with the same d a give
  the same numbers but for round-off, and so does one device with accumulate =
  d a. A loss without draws and batch statistics gives the same numbers for
  every d a. Metrics and updates belong to the mean over all examples.

  With `base.Variables` (BatchNorm) a step averages the pieces' statistics, and
  updates the running statistics as a server does.

  Args:
    loss: (params, piece, key) -> (float[], Aux), the mean over the piece. The
      form "shard_map" calls it inside shard_map, with all axes of the mesh; it
      must return the same value on all devices along every axis but "data".
      With other axes JAX checks types (check_vma): the carry of a scan must
      vary over the same axes at its start and at its end (`meshes.vary`).
    tx: an optax transform or an Algorithm. With an Algorithm the gradient is
      taken at the parameters that it sends to worker 0, and the update gets a
      Delay of staleness 0.
    mesh: a mesh with the axis "data", which divides the examples.
    specs: how other axes of the mesh divide the parameters.
    **options: the fields of `StepOptions`.

  Raises:
    ValueError: for arguments that are out of range or exclude one another. The
      step raises it for a batch that d a does not divide.

  Example:
    >>> def loss(w, piece, key):  # mean over the examples of a piece
    ...   return jnp.mean((piece @ w) ** 2) / 2, losses_lib.Aux(())
    >>> sgd = make_step(loss, optax.sgd(0.5), meshes.make({"data": 1}))
    >>> state = sgd.init(jnp.ones(2))
    >>> batch = sgd.place(jnp.array([[1.0, 0.0], [0.0, 2.0]]))
    >>> state, metrics = sgd.step(state, batch, jax.random.key(0))
    >>> float(metrics.loss), sgd.params(state).tolist()
    (1.25, [0.75, 0.0])
  """
  meshes.size(mesh, _AXIS)
  chosen = StepOptions(**options)
  policy = precision.policy(chosen.policy)
  checks.integer("accumulate", chosen.accumulate)
  clip = optax.identity()
  if chosen.clip_norm is not None:
    checks.positive("clip_norm", chosen.clip_norm)
    clip = optax.clip_by_global_norm(chosen.clip_norm)
  if isinstance(chosen.zero, bool) or chosen.zero not in range(4):
    raise ValueError(f"zero must be 0, 1, 2 or 3, not {chosen.zero!r}")
  make_form = names.lookup("form", chosen.form, FORMS)
  if chosen.loss_scale is not None:
    precision.check_dynamic(chosen.loss_scale)
  # Check options that "pmap", a reducer or a search needs to have one value.
  count = jax.process_count()
  values = {**chosen._asdict(), "specs": specs, "processes": count}
  pmap_values = {"zero": 0, "specs": zero_lib.replicated, "processes": 1}
  has_reducer = chosen.reducer is not None
  for is_used, beginning, needed in (
    (chosen.form == "pmap", step_checks.PMAP, pmap_values),
    (has_reducer, step_checks.REDUCER, step_checks.REDUCER_VALUES),
    (chosen.searches, step_checks.SEARCH, step_checks.SEARCH_VALUES),
  ):
    if is_used:
      step_checks.check_alone(beginning, mesh, values, needed)
  algorithm = tx if isinstance(tx, base.Algorithm) else base.as_algorithm(tx)
  algorithm = transforms.own_statistics(algorithm, chosen.statistics_decay)
  return make_form(_Program(loss, algorithm, mesh, clip, specs, policy, chosen))


class _Program(NamedTuple):
  """The checked arguments of a step, and the functions of both forms."""

  loss: losses_lib.Loss
  algorithm: base.Algorithm
  mesh: Mesh
  clip: optax.GradientTransformation
  specs: zero_lib.Specs
  policy: precision.Policy
  options: StepOptions

  @property
  def pieces(self) -> int:
    """d a, the pieces of a batch."""
    return self.mesh.shape[_AXIS] * self.options.accumulate

  def first_state(self, params: optax.Params) -> StepState:
    """Returns the state before the first step."""
    params = precision.cast(params, self.policy.param)
    # A copy: the step donates the state, and the caller may keep `params`.
    params = jax.tree.map(jnp.copy, params)
    rule = self.options.loss_scale
    scale = () if rule is None else precision.start(rule)
    opt_state = self.algorithm.init(params)
    state = StepState(jnp.int32(0), params, opt_state, scale)
    if self.options.reducer is None:
      return state
    # A reducer's state has the dtypes of the gradients that it gets.
    grads = precision.cast(base.weights_of(params), self.policy.reduce)
    first = self.options.reducer.init(grads)
    return state._replace(reducer=meshes.repeat(first, self.mesh.shape[_AXIS]))

  def loss_scale(self, state: StepState) -> jax.Array:
    """Returns the loss scale, float32[]; 1 without one."""
    if self.options.loss_scale is None:
      return jnp.float32(1)
    return state.scale.scale

  def sent_params(self, state: StepState) -> optax.Params:
    """Returns the parameters at which the gradient is taken."""
    worker = jnp.int32(0)
    return self.algorithm.send(state.opt_state, state.params, worker=worker)

  def _objective(
    self, params: optax.Params, key: jax.Array, scale: jax.Array, dims: Any
  ) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns (weights, piece, number) -> (scaled loss, (loss, statistics))."""
    policy = self.policy

    def gather(leaf, dim):
      # Cast before the transfer: fewer bytes are sent.
      leaf = precision.cast(leaf, policy.compute)
      return zero_lib.gather(leaf, dim, policy.reduce)

    def objective(weights, piece, number):
      if self.options.zero == 3:
        weights = jax.tree.map(gather, weights, dims)
      value, aux = self.loss(
        precision.cast(base.with_weights(params, weights), policy.compute),
        precision.cast(piece, policy.compute),
        jax.random.fold_in(key, number),
      )
      # Sums over pieces and devices need float32 at least.
      value, stats = jax.tree.map(
        lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)),
        (value, aux.stats),
      )
      return value * scale.astype(value.dtype), (value, stats)

    # The backward gathers the weights again; all its other inputs are kept.
    if self.options.zero == 3:
      return jax.checkpoint(objective, policy=zero_lib.keep_all_but_gathered)
    return objective

  def gradient(self, params, batch, key, scale, reducer, dims):
    """Returns (mean loss, gradient, statistics, new compression state) on one
    device in shard_map.

    `reducer` is the compression state before the step. `dims` has the divided
    dimension of each weight, or WHOLE.
    """
    accumulate = self.options.accumulate
    # Varying: JAX adds up gradients of other weights over devices at once.
    weights = meshes.vary(base.weights_of(params), _AXIS)
    first = jax.lax.axis_index(_AXIS) * accumulate  # this device's first piece
    gradient = jax.grad(self._objective(params, key, scale, dims), has_aux=True)

    def scatter(grads):
      return jax.tree.map(zero_lib.scatter, grads, dims)

    def compute_piece(i):
      piece = jax.tree.map(
        lambda x: x.reshape(accumulate, -1, *x.shape[1:])[i], batch
      )
      grads, (value, stats) = gradient(weights, piece, first + i)
      grads = precision.cast(grads, self.policy.reduce)
      return value, scatter(grads) if self.options.zero == 2 else grads, stats

    # [1] The sums of loss, gradient and statistics over this device's pieces.
    total = compute_piece(0)
    if accumulate > 1:
      total, _ = jax.lax.scan(
        lambda total, i: (jax.tree.map(jnp.add, total, compute_piece(i)), None),
        total,
        jnp.arange(1, accumulate),
        unroll=accumulate <= _MAX_UNROLLED or 1,
      )
    value, grads, stats = total
    # ZeRO 1 scatters the sum over pieces; 2 and 3 have scattered each piece.
    if self.options.zero == 1:
      grads = scatter(grads)

    def sum_undivided(g, dim):
      return jax.lax.psum(g, _AXIS) if dim == zero_lib.WHOLE else g

    def divide(grads, n):  # in float32: float16 cannot hold a large scale
      return jax.tree.map(lambda g: (g / (n * scale)).astype(g.dtype), grads)

    # [2] The means over all pieces of all devices.
    pieces = self.pieces
    value, stats = jax.lax.psum((value, stats), _AXIS)
    value, stats = jax.tree.map(lambda x: x / pieces, (value, stats))
    if self.options.reducer is None:
      grads = divide(jax.tree.map(sum_undivided, grads, dims), pieces)
      return value, grads, stats, reducer
    # A reducer averages over devices, so it gets this device's mean.
    grads, reducer = self.reduce(divide(grads, accumulate), reducer, key)
    return value, grads, stats, reducer

  def reduce(self, grads, state, key):
    """Returns (mean of the gradients that devices send, new state). If a
    device's gradient is not finite, returns NaNs and the old state."""
    # All devices decide alike: residuals and NaNs must agree on all devices.
    finite = jax.lax.pmin(jnp.int32(server.all_finite(grads)), _AXIS) > 0
    old_row = jax.tree.map(lambda x: x[0], state)  # this device's row
    assert self.options.reducer is not None
    mean, new_row = self.options.reducer.reduce(
      old_row,
      optax.tree.where(finite, grads, optax.tree.zeros_like(grads)),
      jax.random.fold_in(key, _REDUCER),
      _AXIS,
    )
    mean = jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), mean)
    new_row = optax.tree.where(finite, new_row, old_row)
    return mean, jax.tree.map(lambda x: x[None], new_row)

  def update(self, state, sent, value, grads, stats, reducer, value_fn=None):
    """Applies the optimizer to a gradient taken at `sent`; `value_fn` is the
    loss as a function of the weights, for an optimizer that searches."""
    search = {"value": value, "value_fn": value_fn} if value_fn else {}
    delay = base.Delay(jnp.int32(0), jnp.int32(0), sent)
    norm = optax.tree.norm(grads)
    finite = server.all_finite(grads)
    # Clip in the dtype of the reduction, then cast to the parameters' dtype.
    grads, _ = self.clip.update(grads, optax.EmptyState())
    if isinstance(state.params, base.Variables):
      grads = base.Variables(grads, stats)
    grads = optax.tree.cast_like(grads, state.params)
    updates, opt_state = self.algorithm.update(
      *(grads, state.opt_state, state.params),
      **{**delay._asdict(), **search},
    )
    params = optax.apply_updates(state.params, updates)
    scale: Any = ()
    # A gradient that is not finite only lowers the loss scale.
    if self.options.loss_scale is not None:
      params, opt_state = optax.tree.where(
        finite, (params, opt_state), (state.params, state.opt_state)
      )
      scale = precision.adjust(self.options.loss_scale, state.scale, finite)
    metrics = StepMetrics(value, norm, finite)
    new_state = StepState(state.count + 1, params, opt_state, scale, reducer)
    return new_state, metrics

  def param_specs(self, params: optax.Params) -> tuple[Any, Any]:
    """Returns the specs of parameters between steps, and during an update."""
    weights = base.weights_of(params)
    specs = self.specs(weights)
    parts = jax.tree.map(self.zero_spec, weights, specs)
    between = parts if self.options.zero == 3 else specs
    if isinstance(params, base.Variables):
      stats = zero_lib.replicated(params.stats)
      return base.Variables(between, stats), base.Variables(parts, stats)
    return between, parts

  def zero_spec(self, leaf: Any, spec: P) -> P:
    """Returns the spec of an array; ZeRO divides the array if it can."""
    if not self.options.zero:
      return spec
    return zero_lib.add_data_axis(jnp.shape(leaf), spec, self.mesh.shape[_AXIS])

  def constrain(self, tree: Any, specs: Any) -> Any:
    """Returns a traced tree, which XLA has to lay out by `specs`."""
    shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
    return jax.lax.with_sharding_constraint(tree, shardings)

  def state_specs(self, state: StepState) -> StepState:
    """Returns the specs of a state between steps."""
    between, parts = self.param_specs(state.params)
    opt_specs = zero_lib.state_specs(
      state.opt_state,
      base.weights_of(state.params),
      base.weights_of(parts),
      lambda leaf: self.zero_spec(leaf, P()),
    )
    scale = zero_lib.replicated(state.scale)
    reducer = jax.tree.map(lambda _: P(_AXIS), state.reducer)
    specs: Any = (P(), between, opt_specs, scale, reducer)
    return StepState(*specs)

  def constrain_state(self, state: StepState) -> StepState:
    """Returns the state with the shardings that states have between steps."""
    result: StepState = self.constrain(state, self.state_specs(state))
    return result


def _differentiable_value(
  value_and_grad: Callable[[Any], tuple[jax.Array, Any]],
) -> Callable[[Any], jax.Array]:
  """Returns weights -> float[]; its derivative is that of `value_and_grad`."""

  @jax.custom_vjp
  def value_fn(weights):
    return value_and_grad(weights)[0]

  def backward(grads, cotangent):
    return (jax.tree.map(lambda g: cotangent.astype(g.dtype) * g, grads),)

  value_fn.defvjp(value_and_grad, backward)
  return value_fn


def _shard_map_step(program: _Program) -> Step:
  """Makes the form "shard_map": global arrays, and a program of all devices."""
  mesh = program.mesh
  begin = jax.jit(
    lambda params: program.constrain_state(program.first_state(params))
  )

  def init(params):
    if meshes.are_shapes(params):
      state = jax.eval_shape(program.first_state, params)
      return meshes.place(state, mesh, program.state_specs(state))
    return begin(meshes.place(params, mesh, program.param_specs(params)[0]))

  def step(state, batch, key):
    step_checks.check_batch(batch, program.pieces)
    between, parts = program.param_specs(state.params)
    sent, grad_specs = program.sent_params(state), base.weights_of(parts)
    weights = base.weights_of(state.params)
    dims = jax.tree.map(
      lambda _, spec: zero_lib.dimension(spec), weights, grad_specs
    )
    gradient = jax.shard_map(
      functools.partial(program.gradient, dims=dims),
      mesh=mesh,
      in_specs=(between, P(_AXIS), P(), P(), P(_AXIS)),
      out_specs=(P(), grad_specs, P(), P(_AXIS)),
      # With the axis "data" alone, a loss needs no checks of its types.
      check_vma=len(mesh.axis_names) > 1,
    )
    # [1] Each device computes on its examples, and the gradients are reduced.
    inputs = batch, key, program.loss_scale(state), state.reducer
    value, grads, stats, reducer = gradient(sent, *inputs)
    value_fn = None
    if program.options.searches:
      value_fn = _differentiable_value(
        lambda weights: gradient(base.with_weights(sent, weights), *inputs)[:2]
      )
    # [2] Each device updates its part; `constrain_state` gathers the parts.
    state = state._replace(params=program.constrain(state.params, parts))
    sent = program.constrain(sent, parts)
    state, metrics = program.update(
      *(state, sent, value, grads, stats, reducer, value_fn)
    )
    return program.constrain_state(state), metrics

  return Step(
    init,
    jax.jit(step, donate_argnums=0),
    lambda state: meshes.replicated(state.params, mesh),
    functools.partial(meshes.place_batch, mesh=mesh),
  )


def _pmap_step(program: _Program) -> Step:
  """Makes the form "pmap": state and batch have a leading axis of devices."""
  mesh, size = program.mesh, program.mesh.size

  def device_step(state, batch, key):
    dims = jax.tree.map(lambda _: zero_lib.WHOLE, base.weights_of(state.params))
    scale, sent = program.loss_scale(state), program.sent_params(state)
    totals = program.gradient(sent, batch, key, scale, (), dims)
    return program.update(state, sent, *totals)

  pmapped_step = jax.pmap(
    device_step,
    axis_name=_AXIS,
    in_axes=(0, 0, None),
    out_axes=(0, None),
    devices=list(mesh.devices.flat),
    donate_argnums=0,
  )

  jitted_init = jax.jit(lambda p: meshes.repeat(program.first_state(p), size))

  def init(params):
    return jax.device_put(jitted_init(params), NamedSharding(mesh, P(_AXIS)))

  def place(batch):
    step_checks.check_batch(batch, program.pieces)
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), batch)

  def params(state):
    return jax.tree.map(lambda x: x[0], state.params)

  return Step(init, pmapped_step, params, place)


FORMS = {"shard_map": _shard_map_step, "pmap": _pmap_step}
