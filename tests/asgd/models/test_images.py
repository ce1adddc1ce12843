"""Models: what a cut, a norm, a shortcut and a message's statistics must be."""

from functools import partial

import flax
import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from flax import linen as nn

from asgd import base, models, worker

KEY = jax.random.key(0)
EPSILON = 1e-5


def each_kind(norm):
  """A model with each kind of layer that has a norm."""
  how = {"norm": norm, "groups": 2}
  return (
    models.Stem(4, **how),
    models.ConvPool(4, **how),
    models.BasicBlock(8, stride=2, **how),
    models.WideBlock(8, **how),
    models.Head(10, **how),
  )


CASES = {
  "mlp": models.mlp(10),
  "linear": models.mlp(10, hidden=()),
  "cnn": models.cnn(10),
  "group": each_kind("group"),
  "batch": each_kind("batch"),
  "resnet8": models.resnet(10, depth=8),
  "wrn10_1": models.wide_resnet(10, depth=10, widen=1, norm="batch"),
}


def over(*chosen):
  """Runs a test on the chosen models, by default on all."""
  chosen = chosen or tuple(CASES)
  values = [CASES[name] for name in chosen]
  return pytest.mark.parametrize("layers", values, ids=chosen)


def images(batch=3, size=8, channels=3):
  shape = (batch, size, size, channels)
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def shapes_of(layers, size=32, channels=3):
  return kit.shapes_of_parameters(layers, (1, size, size, channels), np.float32)


def trained(layers, x):
  """Parameters as of a net in training: no scale is 1 and no bias is 0."""
  rng = np.random.default_rng(2)

  def draw(p):
    if len(p.shape) == 1:
      return rng.uniform(0.5, 1.5, p.shape).astype(p.dtype)
    fan_in = np.prod(p.shape[:-1])
    return (rng.normal(size=p.shape) / np.sqrt(fan_in)).astype(p.dtype)

  return jax.tree.map(draw, shapes_of(layers, x.shape[1], x.shape[-1]))


# Layers are hashable, so they can be a static argument.
@partial(jax.jit, static_argnums=0, static_argnames="train")
def run(layers, params, x, *, train=False):
  return models.apply(layers, params, x, train=train)


@partial(jax.jit, static_argnums=0)
def gradient(layers, params, x):
  def loss(params):
    logits = models.apply(layers, params, x, train=True)[0]
    return -jax.nn.log_softmax(logits)[:, 0].mean()

  return jax.grad(loss)(params)


def equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


def delta(channels, features):
  """A 3x3 kernel that passes each channel on, and zeros after the last."""
  kernel = np.zeros((3, 3, channels, features), np.float32)
  kernel[1, 1, range(channels), range(channels)] = 1
  return kernel


# Structure.


def test_a_layer_without_parameters_has_an_empty_dict():
  params = shapes_of(models.cnn(10, norm="batch"))
  assert params.weights[2] == {}
  assert params.stats[2:] == ({}, {}, {})


SMALL = (models.Stem(3, "batch"), models.Stem(3), models.Head(3))


def test_init_reads_only_the_shape_of_the_example():
  params = models.init(SMALL, KEY, images())
  equal(params, models.init(SMALL, KEY, np.full((7, 8, 8, 3), np.nan)))
  start = {"norm": {"mean": np.zeros(3), "var": np.ones(3)}}
  equal(params.stats, (start, {}, {}))


def test_init_draws_by_key_and_layer_index():
  params = models.init(SMALL, KEY, images()).weights
  other = models.init(SMALL, jax.random.key(9), images()).weights
  assert (params[0]["conv"]["kernel"] != other[0]["conv"]["kernel"]).all()
  assert (params[0]["conv"]["kernel"] != params[1]["conv"]["kernel"]).all()
  without_norm = models.init((models.Stem(3), *SMALL[1:]), KEY, images())
  equal(without_norm[1:], params[1:])


def test_init_is_what_each_layer_draws_with_a_later_key_too():
  for key in (KEY, jax.random.key(9)):
    params, x = models.init(SMALL, key, images()), images()
    for i, layer in enumerate(SMALL):
      drawing = jax.random.fold_in(key, i)
      x, drawn = layer.init_with_output(drawing, x, train=False)
      equal(params.weights[i], drawn.get("params", {}))
      equal(params.stats[i], drawn.get("batch_stats", {}))


def test_init_under_jit():
  draw = jax.jit(partial(models.init, SMALL))
  equal(draw(KEY, images()), models.init(SMALL, KEY, images()))


def test_init_is_float32_with_x64_too():
  layers = SMALL[:1]
  params = models.init(layers, KEY, images())
  with jax.enable_x64(True):
    again = models.init(layers, KEY, np.zeros((1, 8, 8, 3)))
    assert {p.dtype for p in jax.tree.leaves(again)} == {np.dtype("float32")}
  equal(again, params)


def test_initial_spread():
  dense = models.Dense(256), models.Classifier(99)
  layers = (models.Stem(64), models.Flatten(), *dense)
  draw = jax.jit(partial(models.init, layers))
  params = draw(KEY, images(size=2, channels=16))
  for layer, name, variance in (
    (0, "conv", 2 / (9 * 16)),
    (2, "dense", 2 / 256),
    (3, "dense", 1 / 256),
  ):
    kernel = params[layer][name]["kernel"]
    assert float(jnp.var(kernel)) == pytest.approx(variance, rel=0.1)


# Sizes.


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_count_of_resnet20(norm):
  convs = 9 * (3 * 16 + 6 * 16 * 16 + (16 + 5 * 32) * 32 + (32 + 5 * 64) * 64)
  norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
  assert convs == 432 + 13_824 + 50_688 + 202_752
  layers = models.build("resnet20", 10, norm=norm)
  assert len(layers) == 11
  assert models.count(shapes_of(layers)) == convs + norms + 650 == 269_722


def test_the_width_of_a_resnet_is_that_of_its_first_group():
  convs = 9 * (3 * 8 + 2 * 8 * 8 + (8 + 16) * 16 + (16 + 32) * 32)
  norms = 2 * (3 * 8 + 2 * 16 + 2 * 32)
  layers = models.resnet(10, depth=8, width=8)
  assert [b.features for b in layers[:-1]] == [8, 8, 16, 32]
  assert models.count(shapes_of(layers)) == convs + norms + 330


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_count_of_wrn16_4(norm):
  total, before = 9 * 3 * 16, 16
  for width in (64, 128, 256):
    convs = 9 * (before * width + 3 * width * width)
    norms = 2 * (before + 3 * width)
    shortcut = before * width
    total += convs + norms + shortcut
    before = width
  total += 2 * 256 + 256 * 10 + 10
  layers = models.build("wrn16_4", 10, norm=norm)
  assert len(layers) == 8
  assert models.count(shapes_of(layers)) == total == 2_748_890


def test_count_of_small_models():
  def count(layers):
    return models.count(shapes_of(layers, size=28, channels=1))

  mlp = 785 * 32 + 33 * 16 + 17 * 10
  assert count(models.mlp(10, hidden=[32, 16])) == mlp
  assert count(models.mlp(10, hidden=())) == 785 * 10
  cnn = 10 * 16 + (9 * 16 + 1) * 32 + (7 * 7 * 32 + 1) * 64 + 65 * 10
  assert count(models.cnn(10)) == cnn
  for norm in ("group", "batch"):  # a scale and a bias, instead of a bias
    assert count(models.cnn(10, norm=norm)) == cnn + 16 + 32


@pytest.mark.parametrize(
  ("layers", "widths", "per_group"),
  [
    (models.build("resnet20", 10), (16, 32, 64), 3),
    (models.build("wrn16_4", 10), (64, 128, 256), 2),
  ],
  ids=["resnet20", "wrn16_4"],
)
def test_blocks_halve_the_image_at_the_second_and_third_group(
  layers, widths, per_group
):
  params = shapes_of(layers)
  x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
  got = []
  for layer, p in zip(layers, params, strict=True):
    x = jax.eval_shape(partial(models.apply, (layer,)), (p,), x)[0]
    got.append(x.shape[1:])
  blocks = [
    (size, size, width)
    for size, width in zip((32, 16, 8), widths, strict=True)
    for _ in range(per_group)
  ]
  assert got == [(32, 32, 16), *blocks, (10,)]


@pytest.mark.parametrize("size", [9, 1])
@over("resnet8", "wrn10_1")
def test_residual_networks_take_any_size(layers, size):
  apply = partial(models.apply, layers)
  params = shapes_of(layers, size)
  assert jax.eval_shape(apply, params, images(2, size))[0].shape == (2, 10)


# Cutting.


def one_by_one(layers, params, x, train):
  stats = ()
  for i in range(len(layers)):
    part = slice(i, i + 1)
    cut = base.weights_of(params)[part]
    if isinstance(params, base.Variables):
      cut = base.Variables(cut, params.stats[part])
    x, new = models.apply(layers[part], cut, x, train=train)
    stats += new
  return x, stats


@over()
def test_layers_one_by_one_are_the_program_of_the_whole(layers):
  params = shapes_of(layers, size=8)
  weights = base.weights_of(params)
  assert [type(of_layer) for of_layer in (weights, *weights)] == [
    tuple, *[dict] * len(layers)
  ]
  batch_norm = any(getattr(f, "norm", None) == "batch" for f in layers)
  assert isinstance(params, base.Variables) == batch_norm
  for train in (False, True):
    (whole, shapes), (parts, _) = (
      jax.make_jaxpr(partial(apply, layers, train=train), return_shape=True)(
        params, images()
      )
      for apply in (models.apply, one_by_one)
    )
    assert str(whole) == str(parts)
    logits, stats = shapes
    assert (logits.shape, logits.dtype) == ((3, 10), jnp.float32)
    wanted = params.stats if batch_norm else ()
    assert jax.tree.map(jnp.shape, stats) == jax.tree.map(jnp.shape, wanted)


@over("mlp", "batch")
def test_layers_one_by_one_are_the_whole(layers):
  x = images()
  params = trained(layers, x)
  parts = jax.jit(one_by_one, static_argnums=(0, 3))
  for train in (False, True):
    whole = run(layers, params, x, train=train)
    equal(parts(layers, params, x, train), whole)


class Dropout(nn.Module):
  @nn.compact
  def __call__(self, x, *, train):
    return nn.Dropout(0.5, deterministic=not train)(x)


def test_a_stage_drops_what_the_whole_would():
  layers = (models.Flatten(), Dropout(), Dropout())
  x = jnp.ones((4, 8, 8, 3))
  params = models.init(layers, KEY, x)
  drop = partial(models.apply, train=True, key=KEY)
  y = drop(layers, params, x)[0]
  # Equal masks would leave half of the entries.
  assert 0.2 < float((y > 0).mean()) < 0.3
  h = drop(layers[:2], params[:2], x)[0]
  equal(drop(layers[2:], params[2:], h, first=2)[0], y)
  assert (drop(layers[2:], params[2:], h)[0] != y).any()
  equal(models.apply(layers, params, x)[0], x.reshape(4, -1))
  with pytest.raises(flax.errors.InvalidRngError):
    models.apply(layers, params, x, train=True)


# Statistics.


def batch_norm_case():
  """One norm, whose input is the image itself."""
  layers = (models.Stem(2, "batch"),)
  x = 3 * images(batch=4, size=3, channels=2) + np.float32([5, -1])
  norm = {"scale": np.float32([0.5, 2]), "bias": np.float32([0.1, 0.2])}
  weights = ({"conv": {"kernel": delta(2, 2)}, "norm": norm},)
  given = {"mean": np.float32([1, -2]), "var": np.float32([4, 0.25])}
  return layers, base.Variables(weights, ({"norm": given},)), x


def normalised(x, mean, var):
  y = (x - mean) / np.sqrt(var + EPSILON)
  return np.maximum(y * [0.5, 2.0] + [0.1, 0.2], 0)


def test_training_normalises_by_and_returns_the_batch_statistics():
  layers, params, x = batch_norm_case()
  y, stats = run(layers, params, x, train=True)
  mean, var = np.mean(x, (0, 1, 2)), np.var(x, (0, 1, 2))
  np.testing.assert_allclose(stats[0]["norm"]["mean"], mean, rtol=1e-5)
  np.testing.assert_allclose(stats[0]["norm"]["var"], var, rtol=1e-5)
  np.testing.assert_allclose(y, normalised(x, mean, var), atol=1e-5)


def test_evaluation_normalises_by_the_given_statistics():
  layers, params, x = batch_norm_case()
  y, stats = run(layers, params, x)
  want = normalised(x, **params.stats[0]["norm"])
  np.testing.assert_allclose(y, want, atol=1e-5)
  equal(stats, params.stats)


def test_statistics_have_no_gradient_in_training():
  layers, params, x = batch_norm_case()

  @jax.jit
  @jax.grad
  def slope(params):
    return models.apply(layers, params, x, train=True)[0].mean()

  equal(slope(params).stats, jax.tree.map(np.zeros_like, params.stats))


def test_message_of_a_worker_carries_the_statistics():
  layers = (models.Stem(2, "batch"), models.Head(3))
  x = images()
  params = trained(layers, x)

  def loss(params, batch, key):
    logits, stats = models.apply(layers, params, batch, train=True, key=key)
    return jnp.mean(logits**2), worker.Aux(stats)

  one = worker.gradient_worker(loss)
  ticket = base.Ticket(np.int32(0), np.int32(0), params)
  message = jax.jit(one.work)(one.init(params), ticket, x, KEY)[1]
  assert jax.tree.structure(message) == jax.tree.structure(params)
  kit.close(message.stats, run(layers, params, x, train=True)[1], rtol=1e-5)


@over("group")
def test_group_norm_does_not_look_at_other_examples(layers):
  x = images()
  params = trained(layers, x)
  others = np.concatenate([x[:1], 10 * x[1:]])
  y = run(layers, params, x, train=True)[0]
  z = run(layers, params, others, train=True)[0]
  np.testing.assert_allclose(y[0], z[0], rtol=1e-6, atol=1e-6)
  assert (y[1:] != z[1:]).any()


@over("batch")
def test_batch_norm_does_only_in_training(layers):
  x = images()
  params = trained(layers, x)
  others = np.concatenate([x[:1], 10 * x[1:]])
  for train in (False, True):
    y = run(layers, params, x, train=train)[0]
    z = run(layers, params, others, train=train)[0]
    assert np.allclose(y[0], z[0], rtol=1e-5) == (not train)


# Blocks, against the formulas.


def conv(x, kernel, stride, pad):
  pads, numbers = ((pad, pad), (pad, pad)), ("NHWC", "HWIO", "NHWC")
  return jax.lax.conv_general_dilated(
    x, kernel, (stride, stride), pads, dimension_numbers=numbers
  )


def group_norm(x, p, groups):
  b, h, w, c = x.shape
  g = x.reshape(b, h * w, groups, c // groups)
  mean = g.mean((1, 3), keepdims=True)
  var = ((g - mean) ** 2).mean((1, 3), keepdims=True)
  y = ((g - mean) / jnp.sqrt(var + EPSILON)).reshape(x.shape)
  return y * p["scale"] + p["bias"]


def basic_block(p, x, features, stride):
  y = conv(x, p["conv1"]["kernel"], stride, 1)
  y = jnp.maximum(group_norm(y, p["norm1"], 2), 0)
  y = group_norm(conv(y, p["conv2"]["kernel"], 1, 1), p["norm2"], 2)
  zeros = jnp.zeros((*y.shape[:3], features - x.shape[-1]))
  shortcut = jnp.concatenate([x[:, ::stride, ::stride], zeros], axis=3)
  return jnp.maximum(shortcut + y, 0)


def wide_block(p, x, features, stride):
  a = jnp.maximum(group_norm(x, p["norm1"], 2), 0)
  y = conv(a, p["conv1"]["kernel"], stride, 1)
  y = jnp.maximum(group_norm(y, p["norm2"], 2), 0)
  y = conv(y, p["conv2"]["kernel"], 1, 1)
  if (x.shape[-1], 1) == (features, stride):
    assert "shortcut" not in p
    return x + y
  return conv(a, p["shortcut"]["kernel"], stride, 0) + y


@pytest.mark.parametrize(
  ("size", "channels", "stride"), [(4, 8, 1), (4, 4, 1), (4, 4, 2), (5, 8, 2)]
)
@pytest.mark.parametrize(
  ("block", "formula"),
  [(models.BasicBlock, basic_block), (models.WideBlock, wide_block)],
)
def test_residual_block_is_its_formula(block, formula, size, channels, stride):
  layers = (block(8, stride, groups=2),)
  x = images(2, size, channels)
  params = kit.double(trained(layers, x))
  with jax.enable_x64(True):
    got = run(layers, params, kit.double(x))[0]
    want = jax.jit(formula, static_argnums=(2, 3))(
      params[0], kit.double(x), 8, stride
    )
    assert got.dtype == want.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_pad_shortcut():
  x = jnp.arange(2 * 5 * 4 * 3.0).reshape(2, 5, 4, 3)
  equal(models.pad_shortcut(x, 3, 1), x)
  y = models.pad_shortcut(x, 7, 2)
  assert y.shape == (2, 3, 2, 7)
  equal(y[..., :3], np.asarray(x)[:, [0, 2, 4]][:, :, [0, 2]])
  equal(y[..., 3:], jnp.zeros((2, 3, 2, 4)))


@pytest.mark.parametrize("size", [4, 5])
def test_strided_convolutions_are_centred_where_the_shortcut_looks(size):
  layers = (models.BasicBlock(4, stride=2, norm="none"),)
  x = images(size=size, channels=2)
  params = {
    "conv1": {"kernel": delta(2, 4)},
    "conv2": {"kernel": delta(4, 4)},
  }
  want = 2 * jax.nn.relu(models.pad_shortcut(x, 4, 2))
  np.testing.assert_allclose(run(layers, (params,), x)[0], want, rtol=1e-6)


@pytest.mark.parametrize("size", [4, 5])
def test_conv_pool_takes_maxima(size):
  x = images(size=size, channels=2)
  bias = np.float32([0.5, -0.5])
  params = ({"conv": {"kernel": delta(2, 2), "bias": bias}},)
  got = run((models.ConvPool(2),), params, x)[0]
  patches = [x[:, i:4:2, j:4:2] for i in (0, 1) for j in (0, 1)]
  want = np.maximum(np.max(patches, axis=0) + bias, 0)
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_head_averages_over_the_image():
  x = images(channels=4)
  params = trained((models.Head(3),), x)
  dense = params[0]["dense"]
  want = x.mean((1, 2)) @ dense["kernel"] + dense["bias"]
  got = run((models.Head(3),), params, x)[0]
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# Gradients and dtypes.


@over("mlp", "cnn", "group", "batch")
def test_gradients_are_finite_and_reach_every_weight(layers):
  x = images()
  grads = gradient(layers, trained(layers, x), x)
  for g in jax.tree.leaves(base.weights_of(grads)):
    assert np.isfinite(g).all()
    assert np.abs(g).max() > 0


@over("group", "batch")
def test_images_without_variance_have_finite_gradients(layers):
  x = np.zeros_like(images())
  for g in jax.tree.leaves(gradient(layers, trained(layers, x), x)):
    assert np.isfinite(g).all()


@over("mlp", "batch")
def test_computes_in_the_dtype_of_the_weights(layers):
  def dtypes(weights, inputs):
    params = jax.tree.map(
      lambda p: jax.ShapeDtypeStruct(p.shape, weights), shapes_of(layers, 8)
    )
    x = jax.ShapeDtypeStruct((3, 8, 8, 3), inputs)
    apply = partial(models.apply, layers, train=True)
    logits, stats = jax.eval_shape(apply, params, x)
    return logits.dtype, {s.dtype for s in jax.tree.leaves(stats)}

  with jax.enable_x64(True):
    for inputs in (jnp.float32, jnp.float64):
      logits, stats = dtypes(jnp.float64, inputs)
      assert logits == jnp.float64
      assert stats <= {np.dtype("float64")}
    assert dtypes(jnp.float32, jnp.float64)[0] == jnp.float32
  assert dtypes(jnp.bfloat16, jnp.float32)[0] == jnp.bfloat16
  assert dtypes(jnp.float32, jnp.uint8)[0] == jnp.float32


@over("batch")
def test_double_precision_agrees_with_single(layers):
  x = images()
  params = trained(layers, x)
  single = run(layers, params, x, train=True)
  with jax.enable_x64(True):
    exact = run(layers, kit.double(params), kit.double(x), train=True)
  assert exact[0].dtype == np.float64
  kit.close(single, exact, rtol=1e-3, atol=1e-4)


def test_vmap_over_models_agrees_with_one_by_one():
  layers, x = SMALL, images()
  one = trained(layers, x)
  two = jax.tree.map(lambda p: 1.1 * p, one)
  stack = jax.tree.map(lambda *p: np.stack(p), one, two)
  train = partial(models.apply, layers, train=True)
  both = jax.jit(jax.vmap(train, (0, None)))(stack, x)
  for i, params in enumerate((one, two)):
    row = jax.tree.map(lambda leaf, i=i: leaf[i], both)
    wanted = run(layers, params, x, train=True)
    kit.close(row, wanted, rtol=1e-3, atol=1e-4)


# AlexNet.


def test_a_tower_reads_its_own_channels_until_the_third_convolution():
  layers = models.alexnet(10, features=(4, 8, 8, 8, 4), hidden=16)
  x = np.asarray(kit.normal(2, 16, 16, 4), np.float32)
  other = x + np.float32([0, 0, 1, 1])  # the second tower's channels
  convolutions = layers[1:5]
  for layer, mixes in zip(convolutions, (False, True, False, False),
      strict=True):
    params = models.init((layer,), jax.random.key(0), x)
    before, after = (
      np.asarray(run((layer,), params, each)[0]) for each in (x, other)
    )
    half = before.shape[-1] // 2
    assert (before[..., half:] != after[..., half:]).any()
    assert (before[..., :half] != after[..., :half]).any() == mixes
    x, other = before, before + np.float32(1) * (
      np.arange(2 * half) >= half
    ).astype(np.float32)


def test_towers_halve_the_weights_of_their_convolutions():
  example = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
  options = {"features": (8, 16, 16, 16, 8), "hidden": 32}

  def counts(towers):
    layers = models.build("alexnet", 10, towers=towers, **options)
    make = partial(models.init, layers, example=example)
    shapes = jax.eval_shape(lambda key: make(key), jax.random.key(0))
    return [models.count(layer) for layer in shapes]

  two, one = counts(2), counts(1)
  biases = (8, 16, 16, 16, 8)
  for i, (few, many, bias) in enumerate(zip(two, one, biases, strict=False)):
    parts = 2 if i in (1, 3, 4) else 1
    assert (many - bias) == parts * (few - bias)
  assert two[5:] == one[5:]
  assert two[6] == 4 * 4 * 8 * 32 + 32  # three poolings of 32


# Errors.


test_a_bad_value_is_refused_with_a_remedy = kit.refuses(
  [
    (lambda: models.build("resnet", 10), "mean 'resnet20'.*: alexnet, bert"),
    (lambda: models.build("mlp", 10, hiden=(3,)), "'hiden'.*mean 'hidden'"),
    (lambda: models.build("wrn16_4", 10, widen=2), "no argument 'widen'"),
    (lambda: models.build("mlp", 0), "classes .* not 0"),
    (lambda: models.build("cnn", 10.0), "classes .* not 10.0"),
    (lambda: models.alexnet(10, features=(8,) * 4), "length of features must"),
    (lambda: models.alexnet(10, features=(8,) * 6), "length of features must"),
    (lambda: models.alexnet(10, towers=5), "features are not a whole number"),
    (lambda: models.mlp(True), "classes .* not True"),
    (lambda: models.mlp(10, hidden=64), r"as \(64,\), not 64"),
    (lambda: models.mlp(10, hidden=(64, 0)), "hidden must be .* not 0"),
    (lambda: models.cnn(10, features=()), "length of features must be a pos"),
    (lambda: models.cnn(10, hidden=-1), "hidden .* not -1"),
    (lambda: models.cnn(10, norm="layer"), "unknown norm 'layer'.*group"),
    (lambda: models.cnn(10, norm="bach"), "mean 'batch'"),
    (
      lambda: models.cnn(10, features=(6, 12), norm="group"),
      r"8 groups do not divide 6 channels; set groups to 2.*\(6, 12\)",
    ),
    (lambda: models.resnet20(10, groups=0), "groups .* not 0"),
    (lambda: models.resnet20(10, groups=5), "divide 16 channels"),
    (lambda: models.resnet20(10, norm="none"), "'group' or 'batch'"),
    (lambda: models.wrn16_4(10, norm="none"), "'group' or 'batch'"),
    (lambda: models.wrn16_4(10, groups=32), "32 groups .* set groups to 16"),
    (lambda: models.resnet(10, width=0), "width .* not 0"),
    (lambda: models.resnet(10, width=12), "8 groups do not divide 12 chan"),
    (lambda: models.resnet(10, depth=18), r"6 n \+ 2 .* not 18"),
    (lambda: models.wide_resnet(10, depth=20), r"6 n \+ 4 .* not 20"),
    (lambda: models.wide_resnet(10, widen=0), "widen .* not 0"),
    (lambda: models.mlp(10, hidden=[8] * 201), "hidden must be at most 200"),
    (lambda: models.mlp(10, hidden=[10**9]), "hidden must be at most 1000000"),
    (lambda: models.cnn(10, features=[10**9]), "features must be at most 1"),
    (lambda: models.cnn(10, hidden=10**9), "hidden must be at most 1000000"),
    (lambda: models.cnn(10, groups=10**9), "groups must be at most 1000000"),
    (lambda: models.resnet(10, depth=6 * 10**9 + 2), "at most 200, not 6000"),
    (lambda: models.wide_resnet(10, depth=10**9), "depth must be at most 200"),
    (lambda: models.wide_resnet(10, widen=10**9), "widen must be at most 1000"),
  ],
)


def test_groups_do_not_matter_to_other_norms():
  models.cnn(10, features=(3,), norm="batch")
  models.cnn(10, features=(3,), norm="none")


def test_shapes_that_do_not_fit_are_named():
  with pytest.raises(ValueError, match=r"images.*\(3, 192\).*reshape"):
    models.init(models.cnn(10), KEY, np.zeros((3, 192)))
  with pytest.raises(ValueError, match=r"2x2.*\(1, 1, 16\)"):
    shapes_of(models.cnn(10), size=2)
  layers = models.mlp(10)
  params = trained(layers, images())
  with pytest.raises(ValueError, match="2 layers .* not 3; cut both"):
    models.apply(layers[:2], params, images())
