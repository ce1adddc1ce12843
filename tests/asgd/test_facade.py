"""The facade: what a call trains is what the parts it is made of train."""

import ast
import dataclasses
import errno
import functools
import inspect
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import kit
import linear
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import asgd
from asgd import base, call_options, orders, sandblaster, simulator, tables
from asgd.experiment import report
from asgd.experiment.engines import live_hosts
from asgd.experiment.engines.live import RAY
from asgd.experiment.engines.simulate import SIMULATE
from asgd.orders import durations
from asgd.problems import descriptions, own, own_params, user_code

pytestmark = pytest.mark.usefixtures("blank_pictures")

X = np.float32(kit.normal(48, 3))
DATA = X, X.sum(1) + np.float32(0.1 * kit.normal(48, seed=1))
PARAMS = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
EVERY = {"batch_size": 8, "progress": False}


def loss(params, batch):
  x, y = batch
  return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def batch(worker, job):
  rows = np.random.default_rng((0, worker, job)).integers(48, size=8)
  return DATA[0][rows], DATA[1][rows]


@functools.cache  # one recipe: its server is compiled once
def dana(workers=4, **options):
  return asgd.dana_zero(0.02, workers=workers, **options)


def simulate(loss=loss, params=PARAMS, data=DATA, recipe=None, **options):
  """Simulates 16 messages of four workers, unless it is given others."""
  options = {"messages": 16, **EVERY, **options}
  return asgd.simulate(loss, params, data, recipe or dana(), **options)


SLOW = {"network": {"up": 100.0, "latency": 0.1}}
ORDERS = (
  ({**SLOW, "compress": "top_k"}, asgd.asgd),
  ({**SLOW, "compress": "int8"}, asgd.sgp),
  ({"server": {"shards": 2, "delays": {"name": "gamma"}}}, asgd.asgd),
)


@pytest.mark.parametrize(("options", "make"), ORDERS)
def test_the_trace_is_the_order_of_the_records(options, make, tmp_path):
  again, recipe = {"folder": tmp_path / "a"}, make(0.02, workers=4)
  for kept in ({}, again, again):  # the last one reads the results
    result = simulate(recipe=recipe, **options, **kept)
    received = result.trace.action == base.RECEIVE
    for column in ("time", "worker", "job"):
      of_trace = getattr(result.trace, column)[received]
      np.testing.assert_array_equal(of_trace, getattr(result.records, column))


@functools.cache
def plain_params():
  """What such a simulation comes to."""
  return simulate().params


def error_of(function, *args, **kwargs):
  with pytest.raises(ValueError) as info:
    function(*args, **kwargs)
  line = str(info.value)
  assert "\n" not in line and len(line) < 600, line
  return line


# Names.


@pytest.mark.process
def test_importing_asgd_leaves_what_takes_long_to_others():
  code = "import asgd, sys; print({'asgd.experiment', 'flax'} & {*sys.modules})"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stdout == "set()\n"


def test_type_checkers_see_every_name_of_the_package():
  tree = ast.parse(inspect.getsource(asgd))
  (block,) = (
    node
    for node in tree.body
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
  )
  seen = {
    alias.name
    for node in block.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
  }
  assert seen == {*asgd.__all__} - {"__version__"}


@pytest.mark.parametrize(
  "options, kind",
  [
    (call_options.SimulateOptions, SIMULATE),
    (call_options.LiveOptions, RAY),
  ],
)
def test_typed_options_are_those_of_a_call(options, kind):
  named = {"messages", "epochs", "workers", "batch_size"}
  keys = {*call_options.RunOptions._fields, *call_options.CONFIG_KEYS}
  keys |= {*kind.sections, "topology"}
  keys |= {"trace"} if kind is SIMULATE else set()
  keys -= {"memory"}  # for a model in layers, which a call has not
  assert {*options.__annotations__} | named == keys


def test_every_name_of_the_package_is_there():
  assert dir(asgd) == sorted(asgd.__all__)
  for name in asgd.__all__:
    assert getattr(asgd, name) is not None
  for name in asgd.RECIPES:
    recipe = getattr(asgd, name)(0.1, workers=2)
    assert isinstance(recipe, asgd.Recipe) and recipe.workers == 2
  with pytest.raises(AttributeError, match="no attribute 'dana'"):
    _ = asgd.dana


def test_a_recipe_that_is_called_checks_as_one_that_is_built():
  assert "workers" in error_of(asgd.dana_zero, 0.1, workers=0)
  assert "learning_rate" in error_of(asgd.ssgd, -1.0, workers=2)
  line = error_of(asgd.dana_zero, 0.1, workers=2, momentun=0.9)
  assert "did you mean 'momentum'" in line


# Equalities.


def test_one_worker_is_a_plain_optax_loop(float64):
  tx, params = optax.adam(0.1), jax.tree.map(np.float64, PARAMS)
  gradient, update = jax.jit(jax.grad(loss)), jax.jit(tx.update)
  result = asgd.simulate(
    *(loss, params, batch, asgd.asgd(0.1, 1, optimizer=optax.adam)),
    messages=20,
    progress=False,
  )
  state = tx.init(params)
  for job in range(20):
    grads = gradient(params, batch(0, job))
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  kit.close(jax.tree.map(np.asarray, result.params), params)


def test_a_simulation_is_that_of_the_simulator():
  result = simulate(data=batch, batch_size=None, messages=40, seed=3)
  recipe = asgd.build("dana_zero", 0.02, workers=4)
  host = simulator.make_host(recipe.server(), asgd.gradient_worker(loss))
  _, root = jax.random.split(jax.random.key(3))
  trace = orders.build(
    *(recipe.order, durations.homogeneous(seed=3)), workers=4, messages=40
  )
  end, records = simulator.run_whole(
    host, PARAMS, 4, trace, batch=batch, root=root
  )
  kit.same(result.params, jax.device_get(end.server.params))
  kit.same(result.records, records)
  kit.same(result.trace, trace)


@pytest.mark.parametrize(
  "form",
  [
    lambda params, batch: (loss(params, batch), {"any": "thing"}),
    lambda params, batch, key: loss(params, batch),
    lambda params, batch, key: (loss(params, batch), key),
    lambda params, batch, rng=None, scale=1.0: loss(params, batch),
    functools.partial(lambda scale, p, b: scale * loss(p, b), 1.0),
    jax.jit(loss),
  ],
)
def test_all_forms_of_a_loss_train_the_same(form):
  kit.same(simulate(form).params, plain_params())


class Indexed:
  """Anything with a length and an index, as grain's datasets are."""

  def __init__(self, elements):
    self._elements = elements

  def __len__(self):
    return len(self._elements)

  def __getitem__(self, index):
    return self._elements[index]


def test_all_forms_of_data_train_the_same():
  examples = Indexed(list(zip(*DATA, strict=True)))
  named = {"x": DATA[0], "y": DATA[1]}
  expected = plain_params()
  kit.same(simulate(data=examples).params, expected)
  by_name = simulate(lambda p, b: loss(p, (b["x"], b["y"])), data=named)
  kit.same(by_name.params, expected)
  batches = [batch(0, job) for job in range(3)]
  first, *others = (
    simulate(data=data, batch_size=None).params
    for data in (batches, Indexed(batches), lambda w, job: batches[job % 3])
  )
  for params in others:
    kit.same(params, first)


class Endless(Indexed):
  """As grain has it after repeat(): the last element is never seen."""

  def __len__(self):
    return 2**60

  def __getitem__(self, index):
    if index > 10**6:
      return batch(0, 0)[0][:3]
    return batch(0, index)


def test_data_may_have_no_end():
  endless, called = (
    simulate(data=data, batch_size=None).params
    for data in (Endless([]), lambda worker, job: batch(0, job))
  )
  kit.same(endless, called)
  assert "repeat()" in error_of(simulate, data=Endless([]))


def test_params_may_be_a_function_of_a_key():
  def init(key):
    return {**PARAMS, "w": jax.random.normal(key, (3,))}

  one, same, other = (
    simulate(params=init, seed=seed).params for seed in (0, 0, 1)
  )
  kit.same(one, same)
  assert (one["w"] != other["w"]).all()


def test_a_partial_that_holds_arrays_is_a_function_of_a_key():
  init = jax.tree_util.Partial(lambda scale, key: {"w": scale}, jnp.ones(3))
  kit.same(own_params.read(init).init(jax.random.key(0)), {"w": jnp.ones(3)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Affine:
  """A model as Equinox has them: its own parameters, and called on a batch."""

  w: jax.Array
  b: jax.Array
  rest: tuple = ()  # leaves that are no arrays

  def __call__(self, x):
    return x @ self.w + self.b


def loss_of_model(model, batch):
  x, y = batch
  return ((model(x) - y) ** 2).mean()


@pytest.mark.parametrize("made", [False, True], ids=["model", "of a key"])
def test_a_model_that_is_a_tree_of_arrays_is_trained(made, tmp_path):
  model = Affine(**PARAMS)
  given = (lambda key: model) if made else model
  expected = plain_params()
  for _ in range(2):  # computed, and read
    result = simulate(loss_of_model, given, folder=tmp_path)
    assert isinstance(result.params, Affine)
    kit.same(dataclasses.asdict(result.params), {**expected, "rest": ()})


def test_a_module_of_nnx_is_trained():
  module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
  params = {"kernel": module.kernel[...], "bias": module.bias[...]}
  x, y = DATA

  def plain(params, batch):
    out = batch[0] @ params["kernel"] + params["bias"]
    return ((out - batch[1]) ** 2).mean()

  data = x, y[:, None]
  found = simulate(loss_of_model, module, data).params
  expected = simulate(plain, params, data).params
  kit.close(found.kernel[...], expected["kernel"], rtol=1e-6)
  kit.close(found.bias[...], expected["bias"], rtol=1e-6)


@pytest.mark.slow
def test_a_model_that_is_a_tree_of_arrays_is_trained_live(tmp_path):
  given = loss_of_model, Affine(**PARAMS), DATA, dana()
  live = asgd.train_live(*given, messages=16, folder=tmp_path, **EVERY)
  assert live.params.w.any()
  again = asgd.replay(tmp_path, *given)
  assert again.same
  kit.same(again.params, live.params)


DROPPING = {
  "ringmaster_asgd": {"threshold": 1},
  "delay_adaptive": {"threshold": 1, "late": "drop"},
  "adadelay": {},
  "fedbuff": {"steps": 2, "every": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPPING)
def test_recipes_that_scale_or_drop_late_messages_train_live(name, tmp_path):
  recipe = getattr(asgd, name)(0.02, workers=3, **DROPPING[name])
  given = loss, PARAMS, DATA, recipe
  live = asgd.train_live(*given, messages=24, folder=tmp_path, **EVERY)
  assert len(live.records.loss) == 24
  fresh = live.records.staleness == 0
  if recipe.max_staleness is not None:
    late = live.records.staleness > recipe.max_staleness
    np.testing.assert_array_equal(live.records.accepted, ~late)
  assert fresh.any() and live.params["w"].any()
  again = asgd.replay(tmp_path, *given)
  assert again.same
  kit.same(again.params, live.params)


def test_a_live_run_refuses_stops():
  recipe = asgd.mindflayer_sgd(0.02, workers=3, budget=2.0)
  line = error_of(
    asgd.train_live, loss, PARAMS, DATA, recipe, messages=24, **EVERY
  )
  assert "with_stops' is for simulations" in line and "budget" in line


def test_stops_are_simulated_by_a_call():
  recipe = asgd.ringmaster_asgd(0.02, workers=3, threshold=1, stops=True)
  result = simulate(recipe=recipe, durations={"name": "heterogeneous"})
  assert result.records.accepted.all() and not result.records.staleness.any()
  actions = result.trace.action.tolist()
  assert actions.count(base.STOP) > 5 and len(result.records.loss) == 16


def test_an_optax_transform_is_a_recipe():
  tx = optax.chain(asgd.delay_compensation(0.04), optax.sgd(0.02))
  named = simulate(recipe=asgd.dc_asgd_c(0.02, workers=4, strength=0.04))
  result = simulate(recipe=tx, workers=4)
  kit.close(result.params, named.params, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(asgd.RECIPES))
def test_every_recipe_takes_a_schedule_and_a_loss(name):
  options = {"steps": 2} if "diloco" in name else {}
  rate = optax.linear_schedule(0.02, 0.01, 50)
  recipe = getattr(asgd, name)(rate, workers=2, **options)
  given = own.Objects(loss, PARAMS, DATA, recipe, batch_size=8)  # traces a job
  assert given.recipe is recipe and given.per_epoch == 6


class Net(nn.Module):
  """A network with everything that training and testing do differently."""

  momentum: float = 0.9

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(4)(x)
    x = nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(x)
    x = nn.Dropout(0.0, deterministic=not train)(nn.relu(x))
    return nn.Dense(1)(x)[:, 0]


def criterion(output, batch):
  return ((output - batch[1]) ** 2).mean()


def test_a_flax_module_trains_as_in_a_flax_loop():
  net = Net(momentum=0.99)
  variables = net.init(jax.random.key(0), X[:1], train=False)
  result = asgd.simulate(
    *((net, criterion), variables, batch, asgd.asgd(0.05, workers=1)),
    messages=10,
    progress=False,
    evaluate=lambda v: criterion(net.apply(v, X, train=False), DATA),
  )

  def value(params, stats, batch):
    given = {"params": params, "batch_stats": stats}
    out, new = net.apply(given, batch[0], train=True, mutable=["batch_stats"])
    return criterion(out, batch), new["batch_stats"]

  gradient = jax.jit(jax.grad(value, has_aux=True))
  params, stats = variables["params"], variables["batch_stats"]
  for job in range(10):
    grads, stats = gradient(params, stats, batch(0, job))
    params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
  expected = {"params": params, "batch_stats": stats}
  kit.close(dict(result.params), expected, rtol=1e-4, atol=1e-5)
  assert result.evaluations[-1]["value"] > 0


def test_a_model_may_be_two_functions_or_of_nnx():
  def apply(params, x):
    return x @ params["w"] + params["b"]

  given = (lambda key: PARAMS, apply), criterion
  for params in (None, PARAMS):
    found = simulate(given, params).params
    kit.close(found, plain_params(), rtol=1e-6)

  class Line(nnx.Module):
    def __init__(self, rngs):
      self.line = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
      return self.line(x)[:, 0]

  for make in (Line, Counting):
    given = (lambda rngs, make=make: make(rngs)), criterion
    losses = simulate(given, None, messages=80).records.loss
    assert losses[-8:].mean() < losses[:8].mean() / 2


# Evaluations, folders, live runs.


def test_evaluations_come_when_they_are_due():
  seen = []

  def evaluate(params):
    seen.append(params)
    return {"loss": loss(params, DATA), "norm": np.float64(len(seen))}

  result = simulate(messages=40, evaluate=evaluate, every=20)
  first, last = result.evaluations
  assert (first["message"], last["message"]) == (20, 40)
  assert (first["norm"], last["norm"]) == (1, 2)
  assert last["loss"] < first["loss"] == float(loss(seen[0], DATA))
  kit.same(jax.device_get(seen[1]), result.params)


def test_a_simulation_that_goes_on_is_one_that_was_not_stopped(tmp_path):
  sizes = {"messages": 60, "every": 20, "checkpoint_seconds": 0}
  train = functools.partial(simulate, **sizes)
  whole = train(evaluate=lambda params: float(loss(params, DATA)))
  result = linear.interrupted(train, tmp_path / "run", loss, DATA)
  kit.same(result.params, whole.params)
  kit.same(result.records, whole.records)
  assert result.evaluations == whole.evaluations
  again = train(folder=tmp_path / "run")  # it is finished
  kit.same(again.params, whole.params)
  kit.same(again.records, whole.records)
  assert again.evaluations == whole.evaluations
  page = (tmp_path / "run" / "report.html").read_text()
  assert "1 of 1 cells finished" in page
  assert "train_loss_by_epoch" in (tmp_path / "run/figure.csv").read_text()


def test_a_folder_without_room_for_a_report_has_the_result(
  tmp_path, monkeypatch
):
  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(report, "write", full)
  with pytest.warns(UserWarning, match="has no report: .*No space left"):
    result = simulate(messages=4, folder=tmp_path / "run")
  assert len(result.records.loss) == 4


def scaled(factor):
  def inner(params, batch):
    return factor * loss(params, batch)

  return inner


def test_a_loss_of_another_source_is_another_training(tmp_path, write_module):
  def written(line):
    text = f"def loss(params, batch):\n  {line}\n"
    return write_module("module_that_changes", text).loss

  def train(loss, folder):
    given = {"data": batch, "batch_size": None, "recipe": dana(2)}
    simulate(loss, **given, messages=2, folder=tmp_path / folder)

  one = "return (batch[0] @ params['w']).mean()"
  train(written(one), "module")
  train(written(f"{one}  # the same"), "module")
  line = error_of(train, written(f"{one} + 1.5  # another"), "module")
  assert "code" in line and "choose another folder" in line
  of_no_module = {}
  exec(f"def loss(params, batch):\n  {one}", {"__name__": None}, of_no_module)
  train(of_no_module["loss"], "exec")
  train(scaled(1.0), "closure")
  train(scaled(1.0), "closure")
  assert "code" in error_of(train, scaled(3.0), "closure")


def weighted(weight):
  def inner(params, batch):
    return (weight * (batch[0] @ params["w"] - batch[1]) ** 2).mean()

  return inner


def calling(function):
  return lambda params, batch: function(params, batch)


def with_default(factor):
  def inner(params, batch, *, factor=factor):
    return factor * loss(params, batch)

  return inner


class Scaled:
  def __init__(self, factor):
    self.factor = factor

  def __call__(self, params, batch):
    return self.factor * loss(params, batch)


class Owner:
  def __init__(self, factor):
    self.factor = factor

  def loss(self, params, batch):
    return self.factor * loss(params, batch)


class Scaling(nn.Module):
  factor: float

  @nn.compact
  def __call__(self, x):
    return self.factor * nn.Dense(1)(x)[..., 0]


def at_rate(schedule):
  return asgd.asgd(schedule, workers=4)


def with_factors(factors):
  def optimizer(rate, factors):
    return optax.sgd(rate * factors.mean())

  given = functools.partial(optimizer, factors=factors)
  return asgd.asgd(0.1, workers=4, optimizer=given)


@pytest.mark.parametrize(
  ("make", "one", "other"),
  [
    (weighted, np.float32(1.0), np.float32(2.0)),
    (weighted, np.ones(8), np.arange(8)),
    (calling, scaled(1.0), scaled(2.0)),
    (calling, lambda p, b: loss(p, b), lambda p, b: 2 * loss(p, b)),
    (jax.jit, scaled(1.0), scaled(2.0)),
    (jax.jit, loss, lambda params, batch: 2 * loss(params, batch)),
    (with_default, 1.0, 2.0),
    (lambda bias: calling(Affine(1.0, bias)), 1.0, 2.0),
    (Scaled, 1.0, 2.0),
    (lambda factor: Scaled(factor).__call__, 1.0, 2.0),
    (lambda factor: Owner(factor).loss, 1.0, 2.0),
    (lambda weight: functools.partial(loss, weight=weight),
     np.ones(8), np.arange(8)),
    (lambda factor: (Scaling(factor), criterion), 1.0, 2.0),
    (at_rate, optax.piecewise_constant_schedule(0.1, {50: 0.1}),
     optax.piecewise_constant_schedule(0.1, {60: 0.1})),
    (with_factors, np.ones(2), np.arange(2)),
  ],
)  # fmt: skip
def test_other_values_in_a_function_are_another_training(make, one, other):
  def digest(value):
    made = make(value)
    is_recipe = isinstance(made, asgd.Recipe)
    recipe = made if is_recipe else dana()
    given = loss if is_recipe else made
    return descriptions.digest_of_code(recipe, given, PARAMS, DATA)

  assert digest(one) == digest(one) != digest(other)


def test_other_constants_of_a_model_are_another_training():
  def digest(factor):
    model = Affine(**PARAMS, rest=(lambda x: factor * x,))
    return own_params.read(model).model.digest()

  assert digest(1.0) == digest(1.0) != digest(2.0)


def test_a_live_run_is_its_replay(tmp_path):
  args = loss, PARAMS, DATA, dana(2)
  train = functools.partial(
    asgd.train_live, *args, messages=60, every=20, **EVERY
  )
  result = linear.interrupted(train, tmp_path, loss, DATA)
  replayed = asgd.replay(tmp_path, *args)
  assert replayed.same and replayed.recorded
  kit.same(replayed.params, result.params)
  kit.same(replayed.trace, result.trace)
  assert "cannot be imported (params, data)" in error_of(asgd.replay, tmp_path)
  others = loss, PARAMS, DATA, asgd.asgd(0.02, workers=2)
  line = error_of(asgd.replay, tmp_path, *others)
  assert "recipe was 'dana_zero(0.02, workers=2)'" in line
  line = error_of(
    *(asgd.train_live, *others), messages=60, folder=tmp_path, **EVERY
  )
  assert "choose another folder" in line and "--" not in line


def test_a_live_run_needs_no_folder():
  result = asgd.train_live(
    *((Net(), criterion), None, DATA, dana(2)), messages=20, **EVERY
  )
  assert result.folder is None
  assert set(result.params) == {"params", "batch_stats"}
  assert (result.trace.action == 1).sum() == len(result.records.loss) == 20


MODULE = '''
import numpy as np
def init(key):
  return np.zeros(3, np.float32)
def loss(w, batch):
  return ((batch @ w - 1) ** 2).mean()
def batch(worker, job):
  rng = np.random.default_rng((worker, job))
  return rng.normal(size=(4, 3)).astype("float32")
'''


def test_functions_of_modules_are_imported_for_a_replay(tmp_path, monkeypatch):
  (tmp_path / "facade_users_module.py").write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  import facade_users_module as users

  asgd.train_live(
    *(users.loss, users.init, users.batch, dana(2, momentum=0.5)),
    messages=10,
    folder=tmp_path / "run",
    progress=False,
  )
  assert asgd.replay(tmp_path / "run").same


def test_what_cannot_travel_is_refused():
  lock = threading.Lock()

  def locked(params, batch):
    with lock:
      return loss(params, batch)

  line = error_of(
    *(asgd.train_live, locked, PARAMS, DATA, dana()),
    messages=8,
    runtime="ray",
    **EVERY,
  )
  assert "the loss cannot be sent" in line and "'_thread.lock'" in line


def test_what_cannot_be_read_on_arrival_is_one_line(monkeypatch):
  ray = pytest.importorskip("ray")

  def get(ref):
    text = "System error: ...\nModuleNotFoundError: No module named 'mine'"
    raise ray.exceptions.RaySystemError(text)

  monkeypatch.setattr(ray, "get", get)
  ref = ray.ObjectRef.from_random()
  line = error_of(live_hosts.make_plan, None, {}, ref, None)
  assert "No module named 'mine'" in line and "PYTHONPATH" in line


# Mistakes.


def noisy(worker, job):
  return np.random.default_rng().normal(size=3)


def drifting(worker, job):
  x, y = batch(worker, job)
  return (x, y) if job < 3 else {"x": x, "y": y}


def late(worker, job):
  return batch(worker, job) if job < 3 else {}["more"]


class Tied(nnx.Module):
  def __init__(self, rngs):
    self.first = self.second = nnx.Linear(3, 3, rngs=rngs)

  def __call__(self, x):
    return self.second(self.first(x)).mean(-1)


class Counting(nnx.Module):
  """Has a constant, which is no parameter, and perhaps counts its calls."""

  def __init__(self, rngs, counts=False):
    self.line, self.counts = nnx.Linear(3, 1, rngs=rngs), counts
    self.scale = nnx.Variable(jnp.ones(()))

  def __call__(self, x):
    if self.counts:
      self.scale[...] = self.scale[...] + 1
    return self.line(x)[:, 0] * self.scale[...]


TEXTS = [np.array(["a", "b"])] * 2
RAGGED = [X[:8], X[:8], X[:5]]
MISTAKES = (
  ({"loss": lambda p, b: b[1] * p["b"]}, "scalar, not an array"),
  ({"loss": lambda p, b: None}, "must return a scalar"),
  ({"loss": lambda p, b: jnp.int32(1)}, "must be a float"),
  ({"loss": lambda p, b: (p["b"], 1, 2)}, "(scalar, aux)"),
  ({"loss": lambda p: 0.0}, "it takes (p)"),
  ({"loss": lambda p, b, k, more: 0.0}, "functools.partial"),
  ({"loss": lambda p, b, *, mode: 0.0}, "functools.partial"),
  ({"loss": 3}, "must be a function (params, batch)"),
  ({"params": {"w": np.zeros(4), "b": 0.0}}, "float32[8, 3]"),
  ({"params": {"w": np.zeros(3, int), "b": 0.0}}, "['w']"),
  ({"params": {"w": "zeros", "b": 0.0}}, "params['w'] is 'zeros'"),
  ({"params": None}, "params holds no array"),
  ({"params": lambda key: Affine(abs, key)}, "made from the key: give the"),
  ({"params": Affine(abs, np.arange(3))}, "without an array of floats"),
  ({"params": {"w": abs}}, "eqx.combine(params, rest)"),
  ({"params": nnx.BatchNorm(3, rngs=nnx.Rngs(0))}, "params.mean"),
  ({"params": Tied(nnx.Rngs(0))}, "holds an array twice (tied weights)"),
  ({"params": Net()}, "holds no parameters: give its variables"),
  ({"loss": (Affine(**PARAMS), loss)}, "holds its arrays as params"),
  ({
     "loss": (lambda rngs: Counting(rngs, counts=True), criterion),
     "params": None,
   },
   "neither nnx.Param nor nnx.BatchStat"),
  ({"params": lambda: PARAMS}, "a function of a key"),
  ({"data": iter([X])}, "each worker needs its own"),
  ({"data": (x for x in X)}, "is an iterator"),
  ({"data": {1, 2}}, "data=lambda worker: iter(...)"),
  ({"data": "train.csv"}, "data cannot be 'train.csv'"),
  ({"data": 7}, "of no known form"),
  ({"data": [], "batch_size": None}, "len(data) is 0"),
  ({"data": Indexed({"a": 1}), "batch_size": None}, "KeyError"),
  ({"batch_size": None}, "batch_size=32"),
  ({"batch_size": 100}, "use at most 48"),
  ({"batch_size": 2.5}, "batch_size"),
  ({"data": (X, X[:5])}, "of equal length, not"),
  ({"data": lambda: X, "batch_size": None}, "it takes ()"),
  ({"data": batch}, "decides the size itself"),
  ({"data": noisy, "batch_size": None}, "two different batches"),
  ({"data": RAGGED, "batch_size": None}, "drop_remainder"),
  ({"data": TEXTS, "batch_size": None}, "dtype <U1"),
  ({"recipe": "dana_zero"}, "asgd.dana_zero(0.01, workers=8)"),
  ({"recipe": asgd.ssgd(0.1, workers=4), "messages": 18}, "use 16 or 20"),
  ({"recipe": optax.sgd(0.1)}, "add workers="),
  ({"workers": 3}, "the recipe was built for 4"),
  ({"every": 7}, "multiple of every=7"),
  ({"evry": 8}, "unknown argument 'evry'"),
  ({"order": {"name": "fifo"}}, "unknown order 'fifo'"),
  ({"evaluate": 3}, "evaluate must be a function"),
  ({"evaluate": lambda p: "good"}, "not 'good'"),
  ({"data": drifting, "batch_size": None}, "must have one structure"),
  ({"data": late, "batch_size": None}, "job 3 cannot be made (KeyErr"),
  ({"loss": Net()}, "(module, criterion)"),
  ({"loss": (Net(), "mse")}, "(output, batch)"),
)


@pytest.mark.parametrize(("changes", "words"), MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(changes, words):
  line = error_of(simulate, **changes)
  assert words in line, line


@pytest.mark.parametrize(
  "optimizer, words",
  [
    (7, "a function learning rate -> optax transform, not 7"),
    (lambda rate: 5, "no attribute '"),
    (lambda: optax.sgd(0.1), "positional argument"),
    (lambda rate: rate / 0, "division by zero"),
    (
      lambda rate: optax.GradientTransformation(
        lambda p: "text", lambda g, s, p: (g, s)
      ),
      "an update cannot be made",
    ),
  ],
)
def test_an_optimizer_that_is_none_is_one_line(optimizer, words):
  assert words in error_of(dana, optimizer=optimizer)


def test_a_runtime_that_is_none_is_refused():
  arguments = loss, PARAMS, DATA, dana()
  line = error_of(asgd.train_live, *arguments, messages=8, runtime="mpi")
  assert "threads, ray" in line


def test_a_recipe_that_needs_more_than_gradients_is_refused_before_it_runs():
  tx = optax.GradientTransformation(lambda p: (), lambda g, s, p: (g["no"], s))
  line = error_of(simulate, recipe=tx, workers=2)
  assert "cannot train these parameters" in line


def _named(updates, state, params=None, *, staleness):
  return updates, state


def _unknown(updates, state, params=None, *, age, **extra_args):
  return updates, state


@pytest.mark.parametrize("update", [_named, _unknown])
def test_extra_args_of_a_transform_are_listed(update):
  tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
  line = error_of(simulate, recipe=tx, workers=2)
  assert "update gets worker, staleness and sent_params by keyword" in line
  assert "add **extra_args" in line


def test_lists_of_numbers_are_to_be_arrays():
  data = [1.0, 2.0], [3.0, 4.0]
  line = error_of(asgd.simulate, loss, PARAMS, data, dana(), messages=8)
  assert "give numpy.asarray(...) in place of each list" in line


def test_descriptions_hold_no_address():
  recipe = dana(optimizer=functools.partial(optax.adamw, b2=0.95))
  assert descriptions.describe_recipe(recipe) == (
    "dana_zero(0.02, workers=4, optimizer=optax._src.alias:adamw(b2=0.95))"
  )
  assert "0x" not in user_code.name_of((Net(), lambda y, b: 0.0))


def test_a_train_state_passes_what_is_no_field():
  tx = optax.chain(asgd.scale_by_staleness(), optax.sgd(1.0))
  state = asgd.TrainState.create(apply_fn=None, params=jnp.ones(2), tx=tx)
  after = state.apply_gradients(grads=jnp.ones(2), staleness=4, apply_fn=abs)
  np.testing.assert_allclose(after.params, 0.75)
  assert (after.step, after.apply_fn) == (1, abs)


SETTINGS = {
  "tables": tables.table(0.05, 2, consistency="ssp", bound=1),
  "sandblaster": sandblaster.sandblaster_lbfgs(1.0, 2, portions=8),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_other_protocols_train_and_are_replayed(name, tmp_path):
  x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
  parts = plane, jnp.zeros(3), (x, x.sum(1)), SETTINGS[name]
  sizes = {"workers": 2, "messages": 80, "batch_size": 8, "progress": False}
  simulated = asgd.simulate(*parts, **sizes)
  np.testing.assert_allclose(simulated.params, np.ones(3), atol=0.05)
  live = asgd.train_live(*parts, **sizes, folder=tmp_path)
  np.testing.assert_allclose(live.params, np.ones(3), atol=0.05)
  assert asgd.replay(tmp_path, *parts).same
  # It is finished: the same call trains nothing.
  again = asgd.train_live(*parts, **sizes, folder=tmp_path)
  np.testing.assert_array_equal(again.params, live.params)


def plane(w, batch):
  inputs, wanted = batch
  return ((inputs @ w - wanted) ** 2).mean()


def test_settings_are_described_without_names_of_classes_and_modules():
  killed = sandblaster.sandblaster_lbfgs(1.0, 2, failures=[(1.0, "worker", 1)])
  filters = [{"name": "random_skip", "probability": 0.5}]
  filtered = tables.table(0.05, 2, bound=1, filters=filters)
  said = [*map(descriptions.describe_recipe, (killed, filtered))]
  assert said[0].startswith("sandblaster(history=10, portions=")
  assert said[0].endswith(
    "failures=((time=1.0, kind='worker', index=1)), workers=2)"
  )
  assert said[1].startswith("tables(rules=(consistency=(name='ssp', need=")
  assert "filters=(random_skip(probability=0.5))" in said[1]
  assert "Settings" not in str(said)
  assert "asgd" not in str(said)


def test_settings_give_the_number_of_workers():
  with pytest.raises(ValueError, match="workers=3, but the recipe was built"):
    asgd.simulate(
      *(plane, jnp.zeros(3), None, SETTINGS["tables"]),
      messages=8,
      workers=3,
      batch_size=8,
    )
