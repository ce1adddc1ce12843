"""What a results folder knows of a user's code: what changes its results is in
the checksum of the code, and nothing else is."""

import functools
import os

import jax
import numpy as np
import pytest

import asgd
from asgd.problems import descriptions, own, user_code

PARAMS = {"w": np.zeros(3, np.float32)}
DATA = np.ones((8, 3), np.float32), np.ones(8, np.float32)
IMPORTS = """
import argparse, dataclasses, functools, types
import equinox as eqx, jax, ml_collections, optax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
"""


@functools.cache
def dana():
  return asgd.dana_zero(0.02, workers=4)


def digest_of(module, params=PARAMS):
  return descriptions.digest_of_code(dana(), module.loss, params, DATA)


LAYERS = """
def centred(x):
  return x - 1
"""
MODEL = """
import layers_that_change
from flax import linen as nn

SCALE = 2.0


def halved(x):
  return x / 2


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.relu(nn.Dense(4)(x))


class Base(nn.Module):
  def head(self, x):
    return x + 3


class Net(Base):
  @nn.compact
  def __call__(self, x):
    x = SCALE * layers_that_change.centred(x)
    return self.head(halved(Block()(x)))


net = Net()


def of_a_global(params, batch):
  return net.apply(params, batch[0]).mean()


def of_a_class(params, batch):
  return Net().apply(params, batch[0]).mean()
"""


@pytest.mark.parametrize("name", ["of_a_global", "of_a_class"])
def test_other_code_of_a_model_is_another_training(name, write_module):
  """Code that a loss reaches through classes, their bases and modules."""

  def digest(layers, model):
    write_module("layers_that_change", layers)
    loss = getattr(write_module("model_that_changes", model), name)
    return descriptions.digest_of_code(dana(), loss, PARAMS, DATA)

  first = digest(LAYERS, MODEL)
  assert digest(LAYERS, MODEL.replace("/ 2", "/ 2  # a comment")) == first
  edits = ("2.0", "3.0"), ("x / 2", "x / 3"), ("relu", "tanh"), ("+ 3", "+ 4")
  others = [digest(LAYERS, MODEL.replace(*edit)) for edit in edits]
  others.append(digest(LAYERS.replace("1", "2"), MODEL))
  assert len({first, *others}) == 6


LOSS = """
def loss(params, batch):
  return ({}).mean()
"""
CALLED = LOSS.format("call(batch[0] @ params['w'])")
APPLIED = LOSS.format("Net().apply(params, batch[0])")
SUBJECTS = {
  # Functions that JAX makes of a user's.
  "mapped": "def row(x):\n  return 2 * x\ncall = jax.vmap(row)" + CALLED,
  "remat": "@jax.checkpoint\ndef call(x):\n  return 2 * x" + CALLED,
  "cached": "@functools.cache\ndef two():\n  return 2"
  + LOSS.format("two() * batch[1]"),
  "gradient": """
@jax.jit
@jax.custom_vjp
def call(x):
  return jnp.round(x)
def forward(x):
  return call(x), None
def backward(_, g):
  return (2 * g,)
call.__wrapped__.defvjp(forward, backward)"""
  + CALLED,
  "tangent": """
@jax.custom_jvp
def call(x):
  return jnp.round(x)
@call.defjvp
def rule(x, dx):
  return call(*x), 2 * dx[0]"""
  + CALLED,
  # Functions and objects that hold values.
  "partial": "call = functools.partial(jax.nn.elu, alpha=2)" + CALLED,
  "schedule": "rate = optax.linear_schedule(2, 0, 9)"
  + LOSS.format("rate(1) * batch[1]"),
  "mixed": "KEYS = {'type': jnp.float32, 'rate': 2}"
  + LOSS.format("KEYS['rate'] * batch[1]"),
  "set": "KEYS = {1, 2 }" + LOSS.format("len(KEYS) * batch[1]"),
  "cycle": "KEYS = {1: 2 }\nKEYS[0] = KEYS"
  + LOSS.format("KEYS[1] * batch[1]"),
  "library": "call = eqx.nn.MLP(1, 1, 2, 1, key=jax.random.key(2))" + CALLED,
  **{
    name: f"settings = {made}" + LOSS.format("settings.rate * batch[1]")
    for name, made in {
      "namespace": "argparse.Namespace(rate=2)",
      "config": "ml_collections.ConfigDict({'rate': 2})",
      "object": "type('Settings', (), {})(); settings.rate = 2",
    }.items()
  },
  "closure": """
def make(settings):
  def loss(params, batch):
    return settings.rate * batch[1].mean()
  return loss
loss = make(types.SimpleNamespace(rate=2))""",
  "of an object": """
class Job:
  def __init__(self, settings):
    self.settings = settings
    self.loss = jax.jit(self.loss_of)
  def loss_of(self, params, batch):
    return self.settings.rate * batch[1].mean()
loss = Job(types.SimpleNamespace(rate=2)).loss""",
  "helper": """
class Helper:
  def __init__(self):
    self.rate = 2
  def call(self, x):
    return self.rate * x
helper = Helper()"""
  + LOSS.format("helper.call(batch[1])"),
  "callable": """
class Helper:
  def __call__(self, x):
    return 2 * x
call = Helper()"""
  + CALLED,
  # Decorators, and what a class has from elsewhere.
  "decorator": """
def doubled(function):
  @functools.wraps(function)
  def inner(*args):
    return 2 * function(*args)
  return inner
@doubled"""
  + LOSS.format("batch[1]"),
  "decorated method": """
def doubled(function):
  @functools.wraps(function)
  def inner(*args):
    return 2 * function(*args)
  return inner
class Net(nn.Module):
  @doubled
  def __call__(self, x):
    return x"""
  + APPLIED,
  "field": "RATE = 2\nclass Net(nn.Module):\n  rate: int = RATE\n"
  "  def __call__(self, x):\n    return self.rate * x" + APPLIED,
  "default": "RATE = 2\nclass Net(nn.Module):\n"
  "  def __call__(self, x, rate=RATE):\n    return rate * x" + APPLIED,
  "function": "def act(x):\n  return 2 * x\nclass Net(nn.Module):\n"
  "  act: object = act\n"
  "  def __call__(self, x):\n    return self.act(x)" + APPLIED,
  "property": """
def two():
  return 2
class Net(nn.Module):
  @functools.cached_property
  def rate(self):
    return two()
  def __call__(self, x):
    return self.rate * x"""
  + APPLIED,
  # What is read just before another object is changed.
  "item": "RATES = {0: 2 }\ndef loss(params, batch):\n  out = {}\n"
  "  for key in RATES:\n    out[key] = RATES[key]\n"
  "  return out[0] * batch[1].mean()",
  "attribute": """
class Job:
  def __init__(self):
    self.rate = two()
def two():
  return 2
"""
  + LOSS.format("Job().rate * batch[1]"),
  "lifted": "class Block(nn.Module):\n  def __call__(self, x):\n"
  "    return 2 * x\nNet = nn.remat(Block)" + APPLIED,
}  # fmt: skip


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_a_loss_reads_is_in_its_checksum(subject, write_module):
  text = IMPORTS + SUBJECTS[subject]
  edited = text.replace("2 ", "3 ").replace("2)", "3)").replace("2\n", "3\n")
  edited = edited.replace("2}", "3}").replace("(2,", "(3,")
  first = digest_of(write_module("code_that_changes", text))
  assert first == digest_of(write_module("code_that_changes", text + "# same"))
  assert first != digest_of(write_module("code_that_changes", edited))


def test_a_module_that_a_function_imports_is_in_its_checksum(write_module):
  text = "def loss(params, batch):\n  from helper_that_changes import call"
  text += "\n  return call(batch[1]).mean()"

  def digest(factor):
    helper = f"def call(x):\n  return {factor} * x"
    write_module("helper_that_changes", helper)
    return digest_of(write_module("code_that_changes", text))

  assert digest(1) == digest(1) != digest(2)


NAMED = """
import itertools
import numpy as np
def order(workers, messages):
  return [1 * i % workers for i in range(messages)]
def durations():
  return lambda worker: itertools.repeat(1 + worker)
def topology(peers):
  own = 1 / 8
  return own * np.eye(peers) + (1.0 - own) / peers
"""


@pytest.mark.parametrize("key", ["order", "durations", "topology"])
def test_a_function_that_a_call_names_is_of_its_folder(
  key, tmp_path, write_module
):
  def loss(params, batch):
    return ((batch[0] @ params["w"] - batch[1]) ** 2).mean()

  def train(text):
    write_module("code_that_changes", text)
    name = f"code_that_changes:{key}"
    options = {"messages": 8, "batch_size": 4, "progress": False}
    options |= {"folder": tmp_path / "run", key: {"name": name}}
    recipe = asgd.d_psgd(0.01, 4) if key == "topology" else dana()
    asgd.simulate(loss, PARAMS, DATA, recipe, **options)

  train(NAMED)
  train(NAMED + "# the same")
  with pytest.raises(ValueError, match=f"code_that_changes:{key} was"):
    train(NAMED.replace("1 ", "2 "))


def test_a_folder_beside_the_library_is_the_users():
  folder = os.path.dirname(asgd.__file__)
  assert not user_code.is_users_module("mine", f"{folder}/facade.py")
  assert user_code.is_users_module("mine", f"{folder}_mine/model.py")
  assert not user_code.is_users_module("mine", functools.__file__)


def test_a_codec_that_a_call_names_is_the_edited_one(write_module):
  def loss(params, batch):
    return ((batch[0] @ params["w"] - batch[1]) ** 2).mean()

  def train(text):
    write_module("code_that_changes", text)
    options = {"messages": 4, "batch_size": 4, "progress": False}
    options["compress"] = {"name": "code_that_changes:codec"}
    recipe = asgd.asgd(0.01, workers=2)
    data = np.diag([1.0, 2.0, 3.0, 4.0])[:, :3], np.arange(4.0)
    return asgd.simulate(loss, PARAMS, data, recipe, **options).params["w"]

  text = "from asgd import compression\n\n\ndef codec():\n"
  text += "  return compression.top_k(0.4)"
  assert (train(text) != train(text.replace("0.4", "0.9"))).any()


def test_each_label_of_a_list_of_examples_is_of_its_folder():
  def digest(labels):
    examples = list(zip(DATA[0], labels, strict=True))
    recipe = asgd.asgd(0.1, workers=2)
    loss = lambda params, batch: (params["w"] * batch[0]).mean()  # noqa: E731
    given = own.Objects(loss, PARAMS, examples, recipe, batch_size=1)
    return given.identity["sha256"]

  first = digest([1.0] * 8)
  others = [digest([1.0] * n + [2.0] + [1.0] * (7 - n)) for n in range(8)]
  assert first not in others


# Values that calls change, or that the loss does not read.
UNREAD = {
  "counter": "count = [0] * 2 " + LOSS.format("count.append(1) or batch[1]"),
  "total": "import types\nlog = types.SimpleNamespace(calls=2 )\n"
  "def loss(params, batch):\n  log.calls += 1\n  return batch[1].mean()",
  "memo": "memo = dict.fromkeys(range(2 ))\n"
  "def loss(params, batch):\n  memo[9] = 1\n  return batch[1].mean()",
  "setting": "import argparse\nargs = argparse.Namespace(rate=1, out=2 )"
  + LOSS.format("args.rate * batch[1]"),
  "state": """
import jax.numpy as jnp, optax
from flax.training.train_state import TrainState
def apply(params, x):
  return x @ params['w']
state = TrainState.create(
  apply_fn=apply, params={'w': jnp.full(3, 2 )}, tx=optax.sgd(0.1))"""
  + LOSS.format("state.apply_fn(params, batch[0])"),
}  # fmt: skip


@pytest.mark.parametrize("subject", UNREAD)
def test_what_a_loss_does_not_read_is_in_no_checksum(subject, write_module):
  text = UNREAD[subject]
  first = digest_of(write_module("code_that_changes", text))
  edited = text.replace("2 )", "3)").replace("2 ", "3 ")
  assert edited != text
  assert first == digest_of(write_module("code_that_changes", edited))


EQUINOX = IMPORTS + """
class Block(eqx.Module):
  layer: eqx.nn.Linear
  def __call__(self, x):
    return 2 * self.layer(x)
class Net(eqx.Module):
  block: Block
  def __call__(self, x):
    return self.block(x)[0]
def make(key):
  return Net(Block(eqx.nn.Linear(3, 1, key=key)))
"""
NNX = IMPORTS + """
class Block(nnx.Module):
  def __init__(self, rngs):
    self.layer = nnx.Linear(3, 1, rngs=rngs)
  def __call__(self, x):
    return 2 * self.layer(x)
class Net(nnx.Module):
  def __init__(self, rngs):
    self.block = Block(rngs)
  def __call__(self, x):
    return self.block(x)[..., 0]
def make(key):
  return Net(nnx.Rngs(key))
"""


@pytest.mark.parametrize("text", [EQUINOX, NNX])
@pytest.mark.parametrize("is_made", [False, True])
def test_the_layers_of_a_model_are_in_its_checksum(text, is_made, write_module):
  """The loss does not name the class of the model, which is the parameters."""
  text += LOSS.format("jax.vmap(params)(batch[0])")

  def digest(text):
    module = write_module("code_that_changes", text)
    params = module.make(jax.random.key(0)) if is_made else module.make
    return digest_of(module, params)

  edited = text.replace("2 *", "3 *")
  assert digest(text) == digest(text) != digest(edited)


@pytest.mark.parametrize(
  ("text", "edit"),
  [
    (LOSS.format("batch[1]"), ("[1]", "[0]")),
    ("class Net:\n  def call(self, x):\n    return x"
     + LOSS.format("Net().call(batch[1])"), ("return x", "return -x")),
  ],
)  # fmt: skip
def test_code_without_a_source_is_in_the_checksum(text, edit):
  """As of python -c, and classes in a notebook."""

  def digest(text):
    variables = {"__name__": "__main__"}
    exec(text, variables)
    return descriptions.describe_object(variables["loss"])

  assert digest(text) == digest(text) != digest(text.replace(*edit))


class Caching:
  """Data that count their calls, and keep batches."""

  def __init__(self, scale):
    self.scale, self.calls, self.kept, self.log = scale, 0, {}, []

  def __call__(self, worker, job):
    self.calls += 1
    self.log.append(worker)
    self.kept[job] = self.scale * job
    return self.kept[job]


def test_what_the_calls_of_an_object_change_is_in_no_checksum():
  """A second call with the same data resumes the run of the first one."""
  data = Caching(2)
  first = descriptions.describe_object(data)
  data(0, 3)
  assert data.kept and descriptions.describe_object(data) == first
  assert descriptions.describe_object(Caching(3)) != first
