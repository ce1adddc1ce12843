"""A problem that is cut into stages is the problem: to the bit, or nearly."""

import functools

import jax
import kit
import numpy as np
import pytest
from flax import linen as nn

from asgd import algorithms, base, data, models, problems, simulator
from asgd import worker as worker_lib
from asgd.data import text
from asgd.pipeline import cut, executor, schedules
from asgd.problems.cuts import slice_of

MICROBATCHES, RATE = 4, 0.1
TOKENS = np.zeros((1, 5), np.int32)


pytestmark = pytest.mark.usefixtures("float64")


class Noisy(nn.Module):
  """A dense layer with BatchNorm and dropout: all that is not a function of
  the weights and the input alone."""

  features: int

  @nn.compact
  def __call__(self, x, *, train: bool):
    x = nn.Dense(self.features)(x)
    x = nn.BatchNorm(use_running_average=not train, momentum=0.0)(x)
    return nn.Dropout(0.3, deterministic=not train)(nn.relu(x))


@functools.cache
def image_problem():
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (60, 4, 4, 1), np.uint8)
  labels = rng.integers(0, 3, 60).astype(np.int32)
  held = data.Dataset(
    *("none", "drawn here", pixels[:48], labels[:48], pixels[48:]),
    *(labels[48:], 3, np.full(1, 128, np.float32), np.full(1, 74, np.float32)),
  )
  layers = (models.Flatten(), Noisy(7), Noisy(6), models.Classifier(3))
  return problems.classification(held, layers, batch_size=8, augment=True)


@functools.cache
def text_problem():
  held = text.Text(
    *("none", "drawn here"),
    *(np.arange(200, dtype=np.int32) * 7 % 11, np.arange(50) % 11),
    "abcdefghijk",
  )
  layers = models.build(
    *("gpt", 11), depth=1, width=8, heads=2, context=5, dropout=0.3
  )
  return problems.language(held, layers, batch_size=4, context=5)


# A problem, where it is cut, and options of the executor.
PROBLEMS = {
  "BatchNorm, dropout, augmented":
    (image_problem, [0, 2, 3, 4], {"recompute": True}),
  "GPT, dropout": (text_problem, [0, 1, 2, 3], {}),
}


def first_params(problem):
  example = np.zeros((1, 4, 4, 1)) if problem is image_problem() else TOKENS
  return kit.parameters(problem.pieces.layers, example)


def train_stages(problem, cuts, *, batches=2, **options):
  """Returns parameters and losses of a synchronous pipeline."""
  recipe = algorithms.build("asgd", RATE, 1)
  table = schedules.gpipe(len(cuts) - 1, MICROBATCHES)
  root, drawn = jax.random.key(5), problem.batches(0, 1)
  extra = cut.extras(lambda i: drawn(0, i), root, len(cuts) - 1)
  made = cut.cut(problem, first_params(problem), cuts, recipe)
  run = executor.Executor(table, made, extra, **options)
  state, losses = run.start(), {}
  for _ in range(batches):
    result = run.run(state)
    losses.update(result.losses)
    state = run.next_pass(result.state)
  whole = cut.joined(run.params(state))
  return whole, [float(losses[i]) for i in sorted(losses)]


def train_whole(problem, *, batches=2):
  """The same, of a server and one worker in the simulator's parts."""
  params, root = first_params(problem), jax.random.key(5)
  server = algorithms.build("asgd", RATE, 1)._replace(every=MICROBATCHES)
  server = server.server()
  worker = worker_lib.gradient_worker(problem.loss)
  host = simulator.make_host(server, worker)
  count = batches * MICROBATCHES
  events = []
  for first in range(0, count, MICROBATCHES):
    jobs = range(first, first + MICROBATCHES)
    events += [(j, base.SEND) for j in jobs] + [(j, base.RECEIVE) for j in jobs]
  job, action = np.array(events, np.int32).T
  trace = base.Trace(
    *(np.arange(len(job), dtype=float), np.zeros(len(job), np.int32)),
    *(job, job, action.astype(np.int8)),
  )
  simulation, records = host.run(
    *(host.init(params, 1), trace, len(job)),
    batch=problem.batches(0, 1),
    root=root,
  )
  return simulation.server.params, records.loss


close = functools.partial(kit.close, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_stages_are_the_monolith(name):
  make, cuts, options = PROBLEMS[name]
  wanted, losses = train_whole(make())
  found, others = train_stages(make(), cuts, **options)
  close(found, wanted)
  np.testing.assert_allclose(others, losses, rtol=1e-6)


def test_statistics_are_the_servers():
  found, _ = train_stages(
    image_problem(), [0, 2, 3, 4], batches=1, recompute=True
  )
  assert isinstance(found, base.Variables)
  assert len(found.stats) == 4
  moved = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()),
    found.stats,
    first_params(image_problem()).stats,
  )
  assert min(jax.tree.leaves(moved)) > 0


def test_whole_is_the_inverse_of_slice_of():
  for problem, end in ((image_problem(), 4), (text_problem(), 3)):
    params = first_params(problem)
    both = (0, 2), (2, end)
    pieces = [slice_of(params, first, last) for first, last in both]
    close(cut.joined(pieces), jax.device_get(params), atol=0)


def test_each_stage_may_have_a_recipe_of_its_own():
  params = first_params(text_problem())
  recipes = [algorithms.build(n, RATE, 1) for n in ("asgd", "dana_slim")]
  first, second = cut.cut(text_problem(), params, [0, 2, 3], recipes)
  assert first.at_worker is None and second.at_worker is not None


def test_a_stage_is_made_once():
  """So that runs which differ in the algorithm share what is compiled."""
  params = first_params(text_problem())
  recipe = algorithms.build("asgd", RATE, 1)
  one, other = (
    cut.cut(text_problem(), params, [0, 2, 3], recipe) for _ in range(2)
  )
  assert [p.fn for p in one] == [p.fn for p in other]


def test_extras_are_the_batch_at_the_ends_and_a_key_everywhere():
  calls = []
  extra = cut.extras(
    lambda i: calls.append(i) or np.full(2, i), jax.random.key(0), 3
  )
  (first, key), (middle, same), (last, _) = (extra(s, 7) for s in range(3))
  assert first.tolist() == last.tolist() == [7, 7]
  assert middle == () and calls == [7, 7]
  assert key == same != extra(0, 8)[1]
  assert key == worker_lib.job_key(jax.random.key(0), 0, 7)


REFUSED = {
  "not to the end": ([0, 2, 3], "cuts must rise from 0 to the 4 layers"),
  "not from 0": ([1, 2, 4], "cuts must rise from 0"),
  "falling": ([0, 3, 2, 4], "cuts must rise from 0"),
  "empty stage": ([0, 2, 2, 4], "cuts must rise from 0"),
  "no stage": ([0], "cuts must rise from 0"),
  "none": ([], "cuts must rise from 0"),
  "no weights": ([0, 1, 4], "stage 0 .layers 0 to 0. has no weights; give"),
}


def cut_images(cuts):
  recipe = algorithms.build("asgd", RATE, 1)
  cut.cut(image_problem(), first_params(image_problem()), cuts, recipe)


test_cuts_that_are_none_are_refused = kit.refuses(REFUSED, cut_images)


def test_what_has_no_layers_cannot_be_cut():
  problem = problems.quadratic([1.0, 2.0])
  recipe = algorithms.build("asgd", RATE, 1)
  with pytest.raises(ValueError, match="not made of layers"):
    cut.cut(problem, problem.init(None), [0, 1], recipe)


@pytest.mark.parametrize("name", ["easgd", "ssgd", "downpour"])
def test_workers_of_their_own_do_not_fit(name):
  recipe = algorithms.build(name, RATE, 2)
  with pytest.raises(ValueError, match="do not fit; use asgd"):
    cut.cut(text_problem(), first_params(text_problem()), [0, 2, 3], recipe)


def test_as_many_recipes_as_stages():
  recipes = [algorithms.build("asgd", RATE, 1)] * 3
  with pytest.raises(ValueError, match="2 stages need a recipe each.* not 3"):
    cut.cut(text_problem(), first_params(text_problem()), [0, 2, 3], recipes)
