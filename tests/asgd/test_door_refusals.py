"""Arguments that a call must not accept silently: each is refused before
anything runs, in one line with its value and the remedy."""

import itertools
from unittest import mock

import kit
import linear
import numpy as np
import optax
import pytest
from flax import linen as nn
from linear import X, live, simulate, squares

import asgd
from asgd import compression
from asgd.data import columns, partitions
from asgd.gossip import topologies

pytestmark = pytest.mark.usefixtures("blank_pictures")

NAN = float("nan")


def mesh(**options):
  return linear.mesh(optax.sgd(0.1), **options)


def of_model(model, data, criterion=lambda y, batch: (y**2).mean()):
  return simulate(loss=(model, criterion), params=None, data=data)


def peers(built=None, **options):
  given = {} if built is None else {"topology": built}
  return simulate(asgd.d_psgd(0.05, workers=4, **given), **options)


class Table:
  """A data set with columns, as those of `datasets`."""

  def __init__(self, **arrays):
    self.arrays, self.column_names = arrays, list(arrays)

  def __len__(self):
    return len(next(iter(self.arrays.values())))

  def __getitem__(self, index):
    return {name: array[index] for name, array in self.arrays.items()}

  def with_format(self, form, columns):
    return self


class Haiku:
  """A transformed function whose init returns a given value."""

  def __init__(self, made):
    self.init = lambda rng, x: made
    self.apply = lambda params, rng, x: x


TABLE = Table(image=np.zeros((4, 2)), label=np.arange(4))
WEIGHTS = np.full((4, 4), 0.25)
RINGS = {"name": "dirichlet", "concentration": 1e308}
CODEC = compression.named(name="top_k")
BOTH = {"image": X, "tokens": X}


REFUSED = {
  # Accepted before, and ignored or misread.
  "a trace of fewer": (
    lambda: simulate(trace=simulate(asgd.asgd(0.02, workers=2)).trace),
    r"trace is of 2 workers, and the run has 4: use workers=2",
  ),
  "a trace and durations": (
    lambda: simulate(trace=simulate().trace, durations=[1, 1, 1, 3]),
    r"durations=\[1, 1, 1, 3\] change nothing, because the trace .*drop one",
  ),
  "an order and durations": (
    lambda: simulate(order=[0, 1, 2, 3] * 3, durations=[1, 1, 1, 3]),
    r"because the order gives the time of each message: drop one",
  ),
  "flags": (
    lambda: simulate(durations=[True] * 4),
    r"durations\[0\] must be seconds, a number .*, not True",
  ),
  "texts": (
    lambda: simulate(durations=["1"] * 4),
    r"durations\[0\] must be seconds, a number .*, not '1'",
  ),
  "no column": (
    lambda: columns.arrays(TABLE, []),
    r"such as \['image', 'label'\], or None for all of them, not \[\]",
  ),
  "a name": (
    lambda: columns.arrays(TABLE, "image"),
    r"such as \['image'\], or None for all of them, not 'image'",
  ),
  "an empty column": (
    lambda: columns.arrays(Table(image=np.zeros((0, 2)))),
    r"column 'image' has the shape \(0, 2\), .*give a data set with examples",
  ),
  "two topologies": (
    lambda: peers("full", topology=WEIGHTS),
    r"topology=array\(.*built with topology='full': drop one of them",
  ),
  "a rate": (
    lambda: asgd.sandblaster_lbfgs(NAN, workers=2),
    "learning_rate must be a positive finite number, not nan",
  ),
  "two inputs": (
    lambda: of_model(nn.Dense(1), BOTH),
    "image and tokens may be the model's input: call it 'x', or give a loss",
  ),
  "no input": (
    lambda: of_model(nn.Dense(1), {"features": X}),
    "a dict of features, none of which is known .*: call it 'x', or give",
  ),
  # Tracebacks and wrong remedies before.
  "an init of None": (
    lambda: of_model(Haiku(None), (X, X)),
    "nothing to train: init returned None, which holds no array; return a tree",
  ),
  "a number of columns": (
    lambda: columns.arrays(TABLE, 3),
    "names must be a list of columns, .*, or None for all of them, not 3",
  ),
  "alike": (
    lambda: partitions.shards(RINGS, np.arange(48) % 4, 4, 0),
    r"concentration must be at most 1e\+09, not 1e\+308: .*'sharded'",
  ),
  "no name": (
    lambda: simulate(order={"delay": 3}),
    r"the order \{'delay': 3\} has no name: add one, as \{'name': 'fixed_de",
  ),
  "a topology without a name": (
    lambda: peers(topology={"degree": 3}),
    r"topology \{'degree': 3\} lacks a name, as \{'name': 'ring'\}",
  ),
  "a topology of no argument": (
    lambda: peers(topology="os:getcwd"),
    "'os:getcwd' is called with 4, and takes no argument: give a function",
  ),
  "a topology that fails": (
    lambda: peers(topology="os.path:join"),
    "'os.path:join' fails with 4 .TypeError: expected str",
  ),
  "a list of functions": (
    lambda: simulate(durations=[itertools.count] * 4),
    r"durations\[0\] .*, not <class 'itertools.count'>; .* without a list",
  ),
  "a function of nothing": (
    lambda: simulate(durations=lambda: 1.0),
    r"which takes \(\); write a function \(worker\) -> seconds of its jobs",
  ),
  "a function of a number": (
    lambda: simulate(durations=lambda worker: 2.0),
    r"durations\(0\) returned 2.0, which is one value .*itertools.repeat",
  ),
  "a float of messages": (
    lambda: simulate(messages=12.0),
    "messages must be a positive whole number, not 12.0, .*: write 12",
  ),
  "topology of a mesh": (
    lambda: mesh(topology="ring"),
    r"unknown argument 'topology'; give it to the recipe, as asgd.d_psgd\(",
  ),
  "order of a mesh": (
    lambda: mesh(order="asynchronous"),
    "unknown argument 'order'; asgd.simulate takes it",
  ),
  "model that is not named": (
    lambda: mesh(axes={"tensor": 2}),
    "axes data 1 x tensor 2 and the model: this problem has no layers",
  ),
  "argument of tables": (
    lambda: asgd.table(0.1, workers=2, bounds=3),
    "recipe 'table' takes no argument 'bounds'; did you mean 'bound'",
  ),
  "argument of sandblaster": (
    lambda: asgd.sandblaster_lbfgs(0.1, workers=2, portion=3),
    "recipe 'sandblaster_lbfgs' takes no argument 'portion'; did you mean",
  ),
  "optimizer of tables": (
    lambda: asgd.table(0.1, workers=2, optimizer="adm"),
    "unknown optimizer 'adm'; did you mean 'adam'",
  ),
  "a codec of tables": (
    lambda: simulate(asgd.table(0.1, workers=4), compress=CODEC),
    "compress: this recipe on engine 'simulate' takes a codec by its name, as",
  ),
  "a codec of a mesh": (
    lambda: mesh(axes={"data": 1}, compress=CODEC),
    "compress: this recipe on engine 'mesh' takes a codec by its name, as",
  ),
  "a machine": (
    lambda: simulate(machine="here"),
    "machine must be an asgd.experiment.machine.Machine, not 'here'",
  ),
  "durations and a text": (
    lambda: live(live="x", durations=[1, 1, 1, 3]),
    "live must be a dict, not 'x'",
  ),
  "a large float": (
    lambda: simulate(messages=1e18),
    r"not 1e\+18, which is a float: write 1000000000000000000",
  ),
  "many messages": (
    lambda: simulate(messages=10**18),
    "messages must be at most 100000000, not 1000000000000000000",
  ),
  "many epochs": (
    lambda: simulate(epochs=1e18),
    r"epochs=1e\+18 of 6 batches are 6e\+18 messages; .*: use fewer epochs",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line_with_the_remedy(name):
  function, words = REFUSED[name]
  with pytest.raises(ValueError, match=words) as info:
    function()
  line = str(info.value)
  assert "\n" not in line and len(line) < 500, line


FIRST, OTHER = (
  lambda w: itertools.repeat(1.0), lambda w: itertools.repeat(w + 1.0)
)


def by_hand(rate, **options):
  return asgd.Recipe(asgd.as_algorithm(optax.sgd(rate, **options)), workers=2)


def changed(row):
  x = X.copy()
  x[row] += 1
  return x, X.sum(1)


def top_k(density):
  return asgd.compression.named("top_k", density=density)


def clipped(limit):
  clip = optax.clip(limit)
  return asgd.asgd(
    0.02, workers=2, optimizer=lambda rate: optax.chain(clip, optax.sgd(rate))
  )


def of_peers(topology, **options):
  return {"recipe": asgd.d_psgd(0.02, 2, topology=topology, **options)}


class Momentum:
  """A user's optimizer, as an object or its method."""

  def __init__(self, decay):
    self.decay = decay

  def __call__(self, rate):
    return optax.sgd(rate, self.decay)

  make = __call__


def asgd_with(optimizer):
  return {"recipe": asgd.asgd(0.02, workers=2, optimizer=optimizer)}


def dropping(update):
  rate = asgd.rates.warmup_steps(0.02, boundaries=(update,))
  return {"recipe": asgd.asgd(rate, workers=2)}


def changed_recipe(limit):
  recipe = asgd.asgd(0.02, workers=2)
  return {"recipe": recipe._replace(at_server=optax.clip(limit))}


def of_tables(rate=0.01, **options):
  return {"recipe": asgd.table(rate, workers=2, **options)}


def skip(probability):
  return {"name": "random_skip", "probability": probability}


SCALES, SHIFT = np.ones(3, np.float32), {"shift": 0.0}
TRACED = []  # no constant: it holds values of traces


def scaled(x):
  TRACED.append(x)
  return x * SCALES


def scaled_loss(w, batch):
  return squares(w, (scaled(batch[0]), batch[1])) + SHIFT["shift"]


def scaled_by(**variables):
  return {"loss": scaled_loss, "variables": variables}


def call(folder, *, recipe=None, variables=(), **options):
  recipe = recipe or asgd.asgd(0.02, workers=2)
  with mock.patch.dict(globals(), variables):
    return simulate(recipe, folder=folder, **options)


@pytest.mark.parametrize(
  ("first", "other"),
  [
    ({"recipe": by_hand(0.01)}, {"recipe": by_hand(0.02)}),
    ({"recipe": by_hand(0.01)}, {"recipe": by_hand(0.01, momentum=0.5)}),
    ({}, {"data": changed(-1)}),
    ({"compress": top_k(0.5)}, {"compress": top_k(0.9)}),
    ({"durations": FIRST}, {"durations": OTHER}),
    ({"recipe": clipped(0.1)}, {"recipe": clipped(0.2)}),
    (of_tables(optimizer="sgd"), of_tables(optimizer=optax.adam)),
    (of_tables(ftrl={"l1": 0.1}), of_tables(ftrl={"l1": 0.2})),
    (of_tables(optax.constant_schedule(0.1)),
     of_tables(optax.constant_schedule(0.2))),
    (of_tables(filters=skip(0.1)), of_tables(filters=skip(0.2))),
    (of_peers(np.full((2, 2), 0.5)), of_peers([[0.75, 0.25], [0.25, 0.75]])),
    (of_peers(topologies.ring(2)),
     of_peers(topologies.lazy(topologies.ring(2)))),
    ({"recipe": asgd.choco_sgd(0.02, 2, codec=top_k(0.4), gamma=0.1)},
     {"recipe": asgd.choco_sgd(0.02, 2, codec=top_k(0.8), gamma=0.1)}),
    (asgd_with(Momentum(0.1)), asgd_with(Momentum(0.2))),
    (asgd_with(Momentum(0.1).make), asgd_with(Momentum(0.2).make)),
    (dropping(2), dropping(9)),
    (changed_recipe(0.1), changed_recipe(0.2)),
    ({}, {"recipe": asgd.asgd(0.02, workers=2).in_rounds(2)}),
    (scaled_by(), scaled_by(SHIFT={"shift": 1.0})),
    (scaled_by(), scaled_by(SCALES=np.full(3, 2, np.float32))),
    (scaled_by(), scaled_by(scaled=lambda x: 2 * x)),
  ],
  ids=[
    *("rate", "momentum", "last row", "codec", "lambdas of one line"),
    *("optimizer", "optimizer of tables", "ftrl", "schedule", "filter"),
    *("matrix", "topology", "codec of peers", "callable object", "method"),
    *("drop of a rate", "changed by hand", "rounds by hand"),
    *("global number", "global of a function", "global function"),
  ],
)
def test_a_folder_of_other_objects_is_refused(first, other, tmp_path):
  result = call(tmp_path, **first)
  with pytest.raises(ValueError, match="holds another experiment"):
    call(tmp_path, **other)
  kit.same(call(tmp_path, **first).params, result.params)


def test_a_complex_evaluation_is_refused():
  with pytest.raises(ValueError, match="evaluate must return a number"):
    simulate(evaluate=lambda params: 1j)


def test_what_is_near_to_a_refusal_is_accepted():
  assert len(simulate(trace=simulate().trace).records.loss) == 12
  assert len(simulate(order=[0, 1] * 6).records.loss) == 12
  assert [x.shape for x in columns.arrays(TABLE, ["label"] * 2)] == [(4,)] * 2
  assert of_model(nn.Dense(1), {"x": X, "image": X}).params
  of_function = peers(topology={"name": "asgd.gossip.topologies:ring"})
  kit.same(of_function.params, peers(topology="ring").params)
