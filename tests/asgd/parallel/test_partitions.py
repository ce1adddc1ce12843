"""What machines compute and send of a model: counted by hand, and as sent."""

import jax
import jax.numpy as jnp
import kit
import pytest
from jax.sharding import PartitionSpec as P

from asgd import models
from asgd.parallel import halo, meshes, partitions

LOCAL = halo.locally_connected(3, features=(2, 4))
SHAPE = 1, 8, 8, 1


def phases(layers, shape, machines, **options):
  example = jax.ShapeDtypeStruct(shape, "float32")
  return partitions.phases(layers, example, machines, **options)


def test_a_dense_model_by_hand():
  # 5 inputs, 3 hidden units (1 and 2 of them), 4 logits (2 each); 2 examples.
  hidden, logits, back, first = phases(
    models.build("mlp", 4, hidden=(3,)), (2, 5), 2
  )
  assert hidden.flops == [2 * 2 * 5 * 1, 2 * 2 * 5 * 2]
  assert hidden.sends == [{1: 2 * 1 * 4}, {0: 2 * 2 * 4}]
  assert logits.flops == [2 * 2 * 3 * 2] * 2
  assert logits.sends == [{1: 2 * 2 * 4}, {0: 2 * 2 * 4}]  # maximum and sum
  # Of weights and of inputs; each is sent the gradient of its own units.
  assert back.flops == [2 * 24] * 2
  assert back.sends == [{1: 2 * 2 * 4}, {0: 2 * 1 * 4}]
  assert first == (hidden.flops, [{}, {}])


def test_a_machine_without_a_unit_does_nothing():
  hidden, logits, back, _ = phases(
    models.build("mlp", 1, hidden=(2,)), (1, 5), 3
  )
  assert hidden.flops == [0, 10, 10]
  assert hidden.sends == [{}, {2: 4}, {}]  # the one logit is machine 2's
  assert logits == ([0, 0, 4], [{}, {}, {}])
  assert back == ([0, 0, 8], [{}, {}, {1: 4}])


def test_tiles_by_hand():
  # 4 x 4 pixels, then 2 x 2, which read a row above and a column to the left.
  first, second, mean, head, *back = phases(LOCAL, SHAPE, 4)
  assert first.flops == [2 * 9 * 1 * 2 * 16] * 4
  pixel = 2 * 4  # features and bytes
  assert first.sends == [
    {1: 4 * pixel, 2: 4 * pixel, 3: pixel},
    {3: 4 * pixel},
    {3: 4 * pixel},
    {},
  ]
  assert second.flops == [2 * 9 * 2 * 4 * 4] * 4
  # Each machine has the mean of a feature, of 3 logits three machines one.
  assert second.sends == [
    {to: 4 for to in range(4) if to != own} for own in range(4)
  ]
  assert mean.flops == [0] * 4
  assert mean.sends[0] == {1: 4, 2: 4, 3: 4}  # machine 0 has no logit
  assert mean.sends[1] == {2: 4, 3: 4}
  assert head.flops == [0] + [2 * 4] * 3
  assert [phase.flops[3] for phase in back] == [16, 0, 2 * 576, 576]
  assert back[2].sends == [
    {},
    {0: 4 * pixel},
    {0: 4 * pixel},
    {0: pixel, 1: 4 * pixel, 2: 4 * pixel},
  ]
  assert back[3].sends == [{}] * 4


@pytest.mark.parametrize("machines", [2, 4])
def test_a_halo_has_the_bytes_that_are_sent(machines):
  mesh = meshes.make({"rows": machines})
  images = P(None, "rows")
  layers, x = LOCAL[:2], jnp.ones((3, *SHAPE[1:]))
  params = kit.parameters(layers, x)

  def part(params, x):
    return halo.apply(layers, params, x)[0]

  specs = halo.partition(params)
  run = jax.shard_map(
    part, mesh=mesh, in_specs=(specs, images), out_specs=images
  )
  moved = [
    eqn.invars[0].aval
    for eqn in kit.equations(jax.make_jaxpr(run)(params, x).jaxpr)
    if eqn.primitive.name == "ppermute"
  ]
  # The first two are of the input, which each reads by itself.
  assert len(moved) == 3
  nbytes = 3 * 8 * 2 * 4  # a row of images
  assert moved[2].size * moved[2].dtype.itemsize == nbytes
  sent = phases(LOCAL, x.shape, machines)[0].sends
  if machines == 2:
    assert sent == [{1: nbytes}, {}]
  else:  # a row from above for each half, a column, and a corner
    assert sum(map(sum, (s.values() for s in sent))) == 2 * nbytes + 3 * 8


@pytest.mark.parametrize(
  ("layers", "shape"),
  [(models.build("mlp", 7, hidden=(9, 11)), (4, 5)), (LOCAL, SHAPE)],
)
def test_machines_share_the_operations_of_one(layers, shape):
  one = phases(layers, shape, 1)
  assert not any(phase.sends[0] for phase in one)
  for machines in (2, 3, 7, 100):
    many = phases(layers, shape, machines)
    for alone, phase in zip(one, many, strict=True):
      assert sum(phase.flops) == alone.flops[0]
    # Gradients go back as activations came.
    count = len(many) // 2
    for number in range(count - 1):
      there, back = many[number].sends, many[2 * count - 2 - number].sends
      assert back == [
        {own: m[to] for own, m in enumerate(there) if to in m}
        for to in range(machines)
      ]


def test_grids_are_as_square_as_can_be():
  grids = {1: (1, 1), 2: (2, 1), 7: (7, 1), 12: (4, 3), 144: (12, 12)}
  assert {n: partitions.grid(n) for n in grids} == grids


@pytest.mark.parametrize(
  ("layers", "shape", "machines", "match"),
  [
    (models.build("cnn", 3), SHAPE, 2, "layer ConvPool cannot be divided"),
    (models.Model(abs, abs, abs), SHAPE, 2, "a Model has no layers that could"),
    ((models.Head(3, norm="group"),), SHAPE, 2, "Head without a norm"),
    (list(LOCAL), SHAPE, 2, "a list has no layers"),
    (LOCAL[:2], SHAPE, 2, "must give logits"),
    (LOCAL, (1, 8, 8), 2, r"must be vectors .*\(1, 8, 8\)"),
    (LOCAL, SHAPE, 0, "machines must be a"),
  ],
)
def test_models_that_cannot_be_divided_are_refused(
  layers, shape, machines, match
):
  with pytest.raises(ValueError, match=match):
    phases(layers, shape, machines)
