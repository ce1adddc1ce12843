"""59 calls that a new user makes, and what the user gets: a result that is
checked, or an error of one line that says what to do."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from linear import DATA, X, criterion, live, mesh, simulate, squares

import asgd
from asgd import pipeline
from asgd.orders import durations
from asgd.orders.protocol import Rules

pytestmark = pytest.mark.usefixtures("blank_pictures")

PEERS = asgd.d_psgd(0.05, workers=4)
WEIGHTS = np.full((4, 4), 0.25)


def fit(result):
  """Returns whether a run has come nearer to the solution, which is 1."""
  return np.abs(np.asarray(result.params) - 1).mean() < 0.95


def workers_of(result):
  return np.asarray(result.records.worker).tolist()


# Results: 29 calls.


def test_1_messages_need_not_be_of_all_workers():
  result = simulate(messages=10)
  assert len(result.records.loss) == 10
  assert len(simulate(messages=3).records.loss) == 3


def test_2_epochs_are_passes_over_the_data():
  assert len(simulate(epochs=1.5).records.loss) == 9  # of 6 batches each


def test_3_epochs_in_rounds_are_of_whole_rounds():
  recipe = asgd.ssgd(0.05, workers=4)
  assert len(simulate(recipe, epochs=1.5).records.loss) == 8


def test_4_and_5_a_trace_repeats_a_run():
  first = simulate(messages=10)
  again = simulate(trace=first.trace)
  kit.same(again.records, first.records)
  kit.same(again.params, first.params)
  other = simulate(asgd.asgd(0.02, workers=4), trace=first.trace, messages=6)
  assert workers_of(other) == workers_of(first)[:6]


@pytest.mark.parametrize(
  "recipe",
  [
    asgd.ssgd(0.05, workers=4),
    asgd.ad_psgd(0.05, workers=4),
    asgd.downpour(0.02, workers=4, fetch_every=2),
  ],
  ids=["6 rounds", "7 peers", "8 kept tickets"],
)
def test_6_to_8_a_trace_of_any_recipe_repeats_a_run(recipe):
  first = simulate(recipe)
  kit.same(simulate(recipe, trace=first.trace).params, first.params)


ORDERS = {
  "9 workers": [0, 1, 0, 2, 3, 1, 0, 0, 0, 0, 0, 0],
  "10 a generator": itertools.cycle([3, 0]),
  "11 a function": lambda workers: itertools.cycle(range(workers)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_9_to_11_an_own_order_says_who_is_received(name):
  result = simulate(order=ORDERS[name])
  expected = {
    "9 workers": [0, 1, 0, 2, 3, 1, *[0] * 6],
    "10 a generator": [3, 0] * 6,
    "11 a function": [0, 1, 2, 3] * 3,
  }
  assert workers_of(result) == expected[name]
  assert fit(result)


def test_12_rows_are_an_order():
  rows = asgd.orders.trace.events(asgd.orders.fixed_delay(delay=3, messages=12))
  result = simulate(order=[row[:5] for row in rows])
  assert result.records.staleness.tolist() == [0, 1, 2] + [3] * 9


def test_13_rules_are_an_order():
  by_name = simulate(order={"name": "stale_synchronous", "bound": 1})
  kit.same(simulate(order=Rules(bound=1)).trace, by_name.trace)


def test_14_a_protocol_may_be_a_function_in_a_live_run():
  result = live(messages=10, order=lambda workers: Rules(bound=workers))
  assert len(result.records.loss) == 10 and fit(result)
  again = simulate(trace=result.trace)  # the order that real workers had
  kit.same(again.params, result.params)


def test_15_durations_are_the_seconds_of_each_worker():
  result = simulate(durations=[1, 1, 1, 3], messages=20)
  assert np.bincount(workers_of(result)).tolist() == [6, 6, 6, 2]


def test_16_durations_may_be_a_function():
  result = simulate(durations=lambda worker: itertools.repeat(worker + 1))
  clock = durations.of_each([1, 2, 3, 4])
  kit.same(simulate(durations=clock).trace, result.trace)


def test_17_durations_slow_live_workers_down():
  result = live(messages=8, durations=[1, 1, 1, 2])
  assert len(result.records.loss) == 8


def test_18_a_topology_is_a_matrix():
  built = simulate(asgd.d_psgd(0.05, workers=4, topology=WEIGHTS))
  kit.same(simulate(PEERS, topology=WEIGHTS).params, built.params)
  kit.same(simulate(PEERS, topology=WEIGHTS.tolist()).params, built.params)


def test_19_tables_are_a_recipe():
  assert fit(simulate(asgd.table(0.05, workers=2, consistency="ssp")))


def test_20_sandblaster_is_a_recipe():
  result = simulate(asgd.sandblaster_lbfgs(1.0, workers=2), epochs=9)
  np.testing.assert_allclose(result.params, np.ones(3), atol=1e-3)


def test_21_a_mesh_is_a_plain_loop():
  recipe = optax.sgd(0.1)
  result = mesh(recipe, axes={"data": 2}, messages=5)
  alone = mesh(recipe, axes={"data": 1}, messages=5)
  kit.close(result.params, alone.params, rtol=1e-5)
  assert len(result.records.loss) == 5 and result.trace is None and fit(result)


def test_22_a_rule_of_delays_on_a_mesh_says_that_there_is_none():
  recipe = asgd.dc_asgd_c(0.05, workers=4)
  with pytest.warns(UserWarning, match="reads staleness 0") as told:
    assert fit(mesh(recipe, epochs=1, axes={"data": 1}))
  assert len(told) == 1


def test_23_peers_are_devices_of_a_mesh():
  result = mesh(PEERS, messages=8)
  assert len(result.records.loss) == 8 and fit(result)


class Net(nn.Module):
  """A module with a list of blocks, and more than submodules in its call."""

  def setup(self):
    self.blocks = [nn.Dense(4) for _ in range(2)]
    self.head = nn.Dense(1)

  def __call__(self, x):
    for block in self.blocks:
      x = nn.tanh(block(x))
    return self.head(x)


def in_pipeline(model, **options):
  length = {} if "epochs" in options else {"messages": 16}
  options = {**length, "microbatches": 4, "batch_size": 8, **options}
  recipe = asgd.asgd(0.02, workers=1, momentum=0.9)
  parts = model, criterion, DATA, recipe
  return pipeline.train(*parts, progress=False, **options)


def test_24_a_module_is_cut_into_stages():
  net, seen = Net(), []
  variables = net.init(jax.random.key(0), X[:1])
  options = {"params": variables, "stages": 3, "schedule": "gpipe"}
  result = in_pipeline(net, evaluate=lambda v: seen.append(v), **options)
  kit.same(jax.device_get(seen[-1]), result.params)
  assert jax.tree.structure(result.params) == jax.tree.structure(variables)
  before, after = (
    criterion(net.apply(each, X), DATA) for each in (variables, result.params)
  )
  assert after < before


def test_25_a_sequential_is_its_layers():
  layers = nn.Dense(4), nn.tanh, nn.Dense(1)
  first, last = nn.Dense(4), nn.Dense(1)
  one = first.init(jax.random.key(0), X)["params"]
  two = last.init(jax.random.key(1), np.zeros((1, 4), np.float32))["params"]
  whole = {"params": {"layers_0": one, "layers_2": two}}
  result = in_pipeline(nn.Sequential(layers), params=whole, epochs=2)
  expected = in_pipeline(layers, params=(one, {}, two), messages=12)
  found = result.params["params"]
  kit.same(found["layers_0"], expected.params[0])
  kit.same(found["layers_2"], expected.params[2])


def test_26_a_model_of_nnx_and_its_criterion():
  class Line(nnx.Module):
    def __init__(self, rngs):
      self.line = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
      return self.line(x)

  model = (lambda rngs: Line(rngs), criterion)
  result = simulate(loss=model, params=None, epochs=4)
  assert result.records.loss[-4:].mean() < result.records.loss[:4].mean()


def test_27_a_flax_module_with_its_own_optimizer():
  recipe = asgd.dana_slim(0.01, workers=4, optimizer=optax.adamw)
  result = simulate(recipe, loss=(Net(), criterion), params=None)
  assert Net().apply(result.params, X).shape == (48, 1)


def test_28_a_folder_resumes_and_refuses_another_order(tmp_path):
  options = {"folder": tmp_path / "run", "order": [0, 1, 2] * 4}
  first = simulate(**options)
  kit.same(simulate(**options).params, first.params)
  with pytest.raises(ValueError, match="choose another folder"):
    simulate(**{**options, "order": [0, 1, 3] * 4})


def test_29_a_config_names_functions_of_a_module(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "door_of_mine.py").write_text(MODULE)
  of_module = "door_of_mine:{}".format
  result = simulate(
    order={"name": of_module("backwards"), "by": 2},
    durations=of_module("slow_last"),
  )
  assert workers_of(result) == [2, 1, 0] * 4
  peers = asgd.d_psgd(0.05, workers=4, topology=of_module("mixing"))
  kit.same(simulate(peers).params, simulate(PEERS, topology=WEIGHTS).params)
  rules = simulate(order=of_module("bounded"))
  kit.same(rules.trace, simulate(order=Rules(bound=1)).trace)


MODULE = """
import itertools
import numpy as np
from asgd.orders.protocol import Rules

def backwards(workers, messages, by):
  for _ in range(messages):
    yield from range(by, -1, -1)

def slow_last():
  return [1, 1, 1, 3]

def mixing(workers):
  return np.full((workers, workers), 1 / workers)

def bounded(workers):
  return Rules(bound=1)
"""


# Mistakes: 30 calls. Each is (function, changes, the words of the remedy).


def nan(params, batch):
  return squares(params, batch) * jnp.nan


SKIP = {"schedule": "gpipe"}


class Skip(nn.Module):
  """A module that is no chain."""

  @nn.compact
  def __call__(self, x):
    first = nn.Dense(3)(x)
    return nn.Dense(1)(nn.Dense(3)(first) + first)


MISTAKES = (
  (simulate, {"recipe": "dana_zero"}, "asgd.dana_zero(0.01, workers=8)"),
  (simulate, {"recipe": "dana"}, "did you mean 'dana_"),
  (simulate, {"recipe": asgd.dana_zero}, "is not called"),
  (simulate, {"recipe": optax.sgd}, "which was not called"),
  (simulate, {"recipe": asgd.sandblaster}, "asgd.sandblaster_lbfgs("),
  (simulate, {"recipe": asgd.tables, "workers": 2}, "table(0.01, workers=2)"),
  (simulate, {"messages": "ten"}, "must be a positive whole number"),
  (simulate, {"messages": None}, "add messages=400, or epochs=2"),
  (simulate, {"messages": 8, "epochs": 1}, "drop one"),
  (simulate, {"epochs": -1}, "epochs must be a positive"),
  (simulate, {"wrokers": 4}, "did you mean 'workers'"),
  (simulate, {"order": 3}, "order must be a name"),
  (simulate, {"order": [0, 9]}, "at most 3, not 9"),
  (simulate, {"order": [0, 1]}, "ends after 2 messages, and 12"),
  (simulate, {"order": Rules(round=3)}, "need 3 workers"),
  (simulate, {"trace": None}, "tables and meshes have no trace"),
  (simulate, {"durations": [1, 1]}, "2 values, and the run has 4 workers"),
  (simulate, {"durations": [1, 1, 1, -1]}, "positive and finite"),
  (simulate, {"durations": lambda worker: [1.0]}, "end after 1 jobs"),
  (simulate, {"topology": WEIGHTS}, "is for a recipe of peers"),
  (simulate, {"recipe": PEERS, "topology": WEIGHTS * 2}, "divide by the sum"),
  (simulate, {"recipe": PEERS, "topology": np.eye(4)}, "add links between"),
  (simulate, {"loss": nan}, "lower learning_rate"),
  (simulate, {"data": (X[:5], X[:5])}, "use at most 5"),
  (simulate, {"loss": lambda p, b: b[0]}, "return its mean"),
  (live, {"order": [0, 1]}, "use asgd.simulate for such an order"),
  (live, {"durations": "gamma"}, "workers are slowed down"),
  (mesh, {"workers": 4}, "use axes={'data': 4}"),
  (mesh, {"axis": {"data": 2}}, "did you mean 'axes'"),
  (in_pipeline, {"model": Skip(), **SKIP}, "pass the layers as a tuple"),
)


@pytest.mark.parametrize(("function", "options", "words"), MISTAKES)
def test_30_to_59_a_mistake_is_one_line_with_the_remedy(
  function, options, words
):
  with warnings.catch_warnings(), pytest.raises(ValueError) as info:
    function(**options)
  line = str(info.value)
  assert words in line and "\n" not in line and len(line) < 700, line


def test_there_are_59_calls():
  numbers = [name for name in globals() if name.startswith("test_")]
  last = max(int(each) for name in numbers for each in name.split("_")
             if each.isdigit() and int(each) < 60)
  assert last == 29 + len(MISTAKES) == 59


def test_a_topology_does_not_undo_changes_of_a_recipe():
  with pytest.raises(ValueError, match="was made or changed by hand"):
    simulate(PEERS._replace(every=2), topology=WEIGHTS)


def test_a_module_that_is_called_names_its_recipe():
  with pytest.raises(TypeError, match="call asgd.sandblaster_lbfgs"):
    asgd.sandblaster(1.0, workers=2)
