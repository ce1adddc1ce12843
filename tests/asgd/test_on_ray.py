"""What travels to the processes of Ray: functions, models of other packages,
iterators and rooms of devices. The runs share one session."""

import os
from pathlib import Path

import equinox as eqx
import grain
import haiku as hk
import jax
import jax.numpy as jnp
import kit
import optax
import pytest
from linear import DATA, PARAMS, criterion, squares

import asgd

pytestmark = [
  pytest.mark.process,
  pytest.mark.usefixtures("ray_session", "blank_pictures"),
]


def replayed(folder, *parts, **options):
  """Trains on Ray, and asserts that the result is its replay; returns it."""
  options = {"messages": 16, "batch_size": 8, "progress": False, **options}
  result = asgd.train_live(*parts, runtime="ray", folder=folder, **options)
  again = asgd.replay(folder, *parts)
  assert again.same
  kit.same(again.params, result.params)
  return result


def test_functions_travel_and_what_they_did_is_replayed(tmp_path):
  scale = jnp.float32(1.0)  # travels in the closure
  recipe = asgd.dana_zero(0.02, workers=2, optimizer=optax.adamw)
  replayed(
    *(tmp_path, lambda params, batch: scale * squares(params, batch)),
    *(PARAMS, DATA, recipe),
    messages=40,
  )


def of_equinox():
  """A network, and its loss."""
  key = jax.random.key(0)
  net = eqx.nn.MLP(3, 1, 8, 1, activation=jnp.tanh, key=key)
  loss = lambda model, batch: criterion(jax.vmap(model)(batch[0]), batch)  # noqa: E731
  return loss, net


def of_haiku():
  """A network with rng and state; asgd draws its parameters."""

  def net(x, is_training):
    x = hk.Linear(8)(x)
    x = hk.BatchNorm(True, True, 0.9)(x, is_training)
    return hk.Linear(1)(jnp.tanh(x))

  return (hk.transform_with_state(net), criterion), None


@pytest.mark.parametrize("model", [of_equinox, of_haiku])
def test_models_of_others_travel(model, tmp_path):
  recipe = asgd.dana_zero(0.05, workers=2)
  result = replayed(tmp_path, *model(), DATA, recipe)
  assert len(result.records.loss) == 16


def test_iterators_are_made_where_their_worker_is(tmp_path):
  titles = tmp_path / "titles"
  titles.mkdir()

  def data(worker):
    """Notes the title that `ps` shows of the process."""
    title = Path("/proc/self/cmdline").read_text()
    (titles / f"{worker}-{os.getpid()}").write_text(title)
    examples = grain.MapDataset.source([*zip(*DATA, strict=True)])
    batches = examples.seed(worker).shuffle().repeat().batch(8)
    return batches.to_iter_dataset(
      grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    )

  result = asgd.train_live(
    *(squares, PARAMS, data, asgd.dana_zero(0.02, workers=2)),
    messages=40,
    runtime="ray",
    folder=tmp_path / "run",
    progress=False,
  )
  seen = " ".join(path.read_text() for path in titles.iterdir())
  for worker in range(2):
    assert f"ray::HostActor-worker-{worker}" in seen
  assert result.records.loss[-8:].mean() < result.records.loss[:8].mean()
  assert len([*tmp_path.rglob("iterator-*.json")]) == 2


def test_a_room_of_a_device_is_kept_by_each_process(tmp_path):
  least = 8896  # bytes of the largest layer; see test_device_rooms
  place, result, _ = kit.train_live(
    tmp_path / "out",
    engine="ray",
    examples=576,
    model={"name": "mlp", "hidden": (8,)},
    memory={"device_megabytes": least / 1e6},
  )
  assert result["worker_peak_bytes"] <= least
  again = asgd.replay(place)
  assert again.same
  assert len(again.records.loss) == result["messages"]
