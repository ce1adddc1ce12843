"""Partitions: nothing lost, nothing going back, and optima that are optima."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import models
from asgd.pipeline import analyze
from asgd.pipeline import table as table_lib
from asgd.pipeline.partition import coarsen, graph, mixed_pipe, placement
from asgd.pipeline.partition.coarsen import Blocks
from asgd.pipeline.partition.graph import Node, chain, make
from asgd.pipeline.partition.pipedream import pipedream

quick = settings(max_examples=60, deadline=None, derandomize=True)


def nodes(times, *, activation=0, parameters=0, stash=0, kind=""):
  """Nodes a, b, ... of which half the time is backward."""
  return [
    Node(chr(97 + i), t / 2, t / 2, activation, parameters, stash, kind)
    for i, t in enumerate(times)
  ]


@st.composite
def chains(draw, most=6):
  small = st.integers(0, 9)
  count = draw(st.integers(1, most))
  return chain(
    Node(
      *(f"n{i}", *(draw(small) for _ in range(5))),
      kind=draw(st.sampled_from("xy")),
    )
    for i in range(count)
  )


@st.composite
def dags(draw, most=9):
  """Graphs with skips, inputs for later nodes, ties, and uncuttable edges."""
  small = st.integers(0, 9)
  count = draw(st.integers(1, most))
  made = [
    Node(f"s{i % 3}/n{i}", *(draw(small) for _ in range(5)))
    for i in range(count)
  ]
  pairs = list(itertools.combinations(range(count), 2))
  edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
  tied = []
  if count > 1 and draw(st.booleans()):
    tied = [((0, count - 1), min(made[0].parameters, made[-1].parameters))]
  return make(
    made,
    [(*pair, None, draw(st.integers(0, 5)) > 0) for pair in edges],
    tied,
  )


def is_placed(found, g):
  """Placed exactly once and acyclic, without the help of `check`."""
  where = {}
  for s, stage in enumerate(found.stages):
    assert stage == tuple(sorted(stage)) and stage
    for i in stage:
      assert i not in where
      where[i] = s
  assert sorted(where) == list(range(len(g.nodes)))
  for edge in g.edges:
    assert where[edge.source] <= where[edge.target]
    assert edge.cut or where[edge.source] == where[edge.target]
  return where


# Graphs.


test_graphs_that_are_none_are_refused = kit.refuses(
  [
    (([],), "a node or more"),
    (([Node("a"), Node("a")],), "both called 'a'"),
    (([Node("a", forward=-1)],), "forward of node 'a'"),
    (([Node("a", stash=math.nan)],), "stash of node 'a'"),
    (([Node("a"), Node("b")], [("b", "a")]), "from 'b' to 'a' goes back"),
    (([Node("a"), Node("b")], [(0, 1), (0, 1)]), "given twice"),
    (([Node("a"), Node("b")], [(0, 2)]), "no node has number 2"),
    (([Node("a"), Node("b")], [("a", "c")]), "no node is called 'c'"),
    (([Node("a"), Node("b")], [(0, 1, -2)]), "bytes from 'a' to 'b'"),
    (([Node("a"), Node("b")], [], [((0, 0), 1)]), "two nodes or more"),
    (([Node("a"), Node("b")], [], [((0, 1), 1)]), "cannot share 1 bytes"),
  ],
  lambda args: make(*args),
)


def test_shared_parameters_count_once():
  g = make(nodes([1] * 3, parameters=10), [], [((0, 2), 8)])
  assert graph.parameters(g, [0, 1]) == 20
  assert graph.parameters(g, [0, 2]) == 12
  assert graph.parameters(g, [0, 1, 2]) == 22


def test_a_tensor_is_sent_once_to_a_stage():
  g = make(nodes([1] * 4, activation=8), [(0, 1), (0, 2), (0, 3, 3)])
  assert graph.sent(g, [0, 0, 1, 1]) == {(0, 1): 8}
  assert graph.sent(g, [0, 1, 1, 2]) == {(0, 1): 8, (0, 2): 3}


# Profiles.


def shapes_of(layers, size=8, batch=4):
  example = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
  params = jax.eval_shape(
    lambda key: models.init(layers, key, example), jax.random.key(0)
  )
  return params, example


def test_profile_of_an_mlp_counts_bytes():
  layers = models.mlp(10, hidden=(64,))
  g = graph.profile(layers, *shapes_of(layers))
  # Of 4 examples of 8 x 8 x 3 = 192 numbers of 4 bytes.
  assert [n.name for n in g.nodes] == ["Flatten_0", "Dense_1", "Classifier_2"]
  assert [n.activation for n in g.nodes] == [3072, 4 * 64 * 4, 4 * 10 * 4]
  assert [n.parameters for n in g.nodes] == [0, 4 * (193 * 64), 4 * (65 * 10)]
  # The classifier's backward reads its input, and its weights, which are not
  # counted; that of Flatten nothing.
  assert [g.nodes[i].stash for i in (0, 2)] == [0, 4 * 64 * 4]
  assert g.nodes[1].stash >= 3072
  assert [e[:3] for e in g.edges] == [(0, 1, 3072), (1, 2, 1024)]
  assert all(n.forward > 0 for n in g.nodes)
  assert g.nodes[0].backward == 0 < g.nodes[1].backward


def test_profile_of_a_resnet_counts_bytes():
  stem, *_, block, _, head = models.resnet(10, depth=14, norm="batch")
  layers = stem, block, block, head  # blocks with 64 channels, the first halves
  params, example = shapes_of(layers)
  g = graph.profile(layers, params, example)
  assert sum(n.parameters for n in g.nodes) == 4 * models.count(params)
  # A 3 x 3 convolution has no bias, a norm a scale and a bias.
  assert [n.parameters // 4 for n in g.nodes] == [
    9 * 3 * 16 + 2 * 16,
    9 * 16 * 64 + 9 * 64 * 64 + 4 * 64,
    2 * 9 * 64 * 64 + 4 * 64,
    65 * 10,
  ]
  assert [n.activation for n in g.nodes] == [
    4 * 4 * c for c in (8 * 8 * 16, 4 * 4 * 64, 2 * 2 * 64, 10)
  ]
  assert [n.kind for n in g.nodes][1:3] == ["BasicBlock"] * 2
  assert all(n.stash > 0 and n.backward > 0 for n in g.nodes)


def test_roofline_takes_the_slower_of_work_and_memory():
  layers = models.mlp(10, hidden=())
  args = (layers, *shapes_of(layers))
  slow = graph.profile(*args, flops=1.0, bandwidth=1e30)
  # 4 x 192 multiplications and additions for each of 10 logits, and the bias.
  assert slow.nodes[1].forward == pytest.approx(2 * 4 * 192 * 10, rel=0.02)
  quick_ = graph.profile(*args, flops=1e30, bandwidth=1.0)
  # Weights, bias, input and output are moved once.
  least = 4 * (1930 + 4 * 192 + 40)
  assert least <= quick_.nodes[1].forward <= 2 * least
  for options in ({"flops": 0}, {"bandwidth": -1.0}):
    with pytest.raises(ValueError, match="must be a positive finite number"):
      graph.profile(*args, **options)
  with pytest.raises(ValueError, match="2 layers need"):
    graph.profile(layers, args[1][:1], args[2])


def test_profile_measures_with_the_clock_it_is_given():
  layers = models.mlp(10, hidden=(8,))
  ticks = itertools.count()
  args = layers, *shapes_of(layers)
  measure = partial(graph.measure, clock=lambda: float(next(ticks)))
  g = graph.profile(*args, measure=measure)
  # From one look at the clock to the next is a second, forward or both.
  assert [(n.forward, n.backward) for n in g.nodes] == [(1.0, 0.0)] * 3
  params = jax.tree.map(lambda p: np.ones(p.shape, p.dtype), args[1])
  runs = []

  def count(run):
    runs.append(jax.block_until_ready(run()))
    return float(len(runs))

  example = np.zeros((4, 8, 8, 3))
  g = graph.profile(layers, params, example, measure=count)
  assert [n.forward for n in g.nodes] == [1, 3, 5]
  assert [n.backward for n in g.nodes] == [1, 1, 1]
  assert runs[0].shape == (4, 192) and runs[0].dtype == np.float32


def test_measure_takes_the_median_and_does_not_count_the_first():
  readings = iter([0, 5, 10, 11, 20, 23])
  calls = []
  seconds = graph.measure(
    lambda: calls.append(1), clock=lambda: next(readings), repeats=3
  )
  assert seconds == 3 and len(calls) == 4
  with pytest.raises(ValueError, match="repeats must be a positive whole"):
    graph.measure(lambda: 0, clock=lambda: 0.0, repeats=0)


# Partitions.


def test_check_names_the_node():
  g = make(nodes([1] * 3), [("a", "b"), ("b", "c", 0, False)])
  good = placement.make(g, [[0], [1, 2]])
  assert good.stages == ((0,), (1, 2)) and good.devices == ((0,), (1,))
  for stages, message in (
    ([[0], [1]], "'c' is in no stage"),
    ([[0], [0, 1, 2]], "'a' is in stage 0 and in stage 1"),
    ([[1, 2], [0]], "'b' in stage 0 needs 'a' of stage 1"),
    ([[0, 1], [2]], "from node 'b' .* must not be cut"),
    ([[0, 1, 2], []], "stage 1 has no nodes"),
    ([[0, 1, 2, 3]], "has node 3; the graph has 3"),
  ):
    with pytest.raises(ValueError, match=message):
      placement.make(g, stages)
  for devices in ([0], [0, ()], [0, (1, 1)], [0, -1]):
    with pytest.raises(ValueError):
      placement.make(g, [[0], [1, 2]], devices)
  with pytest.raises(ValueError, match="not one of 1 devices"):
    placement.make(g, [[0], [1, 2]], [0, 1], count=1)


def test_cuts_of_a_chain():
  g = make(nodes([1] * 4))
  assert placement.cuts(placement.make(g, [[0], [1, 2], [3]])) == (0, 1, 3, 4)
  for stages in ([[0, 2], [1], [3]], [[1], [0], [2, 3]]):
    with pytest.raises(ValueError, match="a stage of a chain has consecutive"):
      placement.cuts(placement.make(g, stages))


def test_two_stages_that_need_each_other_are_refused():
  g = make(nodes([1] * 3), [("a", "b"), ("b", "c")])
  for stages in ([[0, 2], [1]], [[1], [0, 2]]):
    with pytest.raises(ValueError, match="no two may need each other"):
      placement.make(g, stages)


def test_load_and_shared_parameters_are_reported():
  g = make(nodes([2, 4, 6], parameters=5), [(0, 1), (1, 2)], [((0, 2), 5)])
  found = placement.make(g, [[0, 1], [2]], [(0, 2), 1], count=4)
  assert found.load.tolist() == [3, 6, 3, 0]
  assert found.shared == ((0, 1),)
  again = placement.make(g, [[0, 1], [2]], recompute=[0])
  assert again.load.tolist() == [6 + 3, 6]
  assert placement.make(g, [[0, 1, 2]]).shared == ()


@quick
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_balance_is_the_best_of_all_cuts(costs, data):
  stages = data.draw(st.integers(1, len(costs)))
  found = placement.balance(costs, stages)
  assert sum(found, ()) == tuple(range(len(costs)))
  assert len(found) == stages and all(found)
  best = min(
    max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
  )
  assert max(sum(costs[i] for i in stage) for stage in found) == best


test_balance_refuses = kit.refuses(
  [
    (([1, 2], 3), "2 nodes make 1 to 2"),
    (([1, 2], 0), "not 0"),
    (([1, -2], 1), "not negative"),
    (([[1]], 1), "list of numbers"),
  ],
  lambda args: placement.balance(*args),
)


# PipeDream.


def compositions(total, parts):
  """Ways to write `total` as a sum of `parts` positive numbers, in order."""
  for cuts in itertools.combinations(range(1, total), parts - 1):
    yield [b - a for a, b in itertools.pairwise((0, *cuts, total))]


def brute(g, levels, formula, *, straight=False, memory=None, compression=None):
  """The least time over all splits and replications of a chain, by trying.

  `levels` are (machines, bandwidth), the innermost first. With `memory` there
  must be one level.
  """
  times = [n.forward + n.backward for n in g.nodes]
  out = [n.activation for n in g.nodes]

  def weights(a, b):
    return sum(n.parameters for n in g.nodes[a:b])

  def stage(level, a, b, m, first, later):
    if straight and m > 1:
      return math.inf
    machines, bandwidth = levels[level]
    work = sum(times[a:b]) if level == 0 else pipeline(level - 1, a, b)
    if memory is not None and formula == "paper":
      stash = sum(n.stash for n in g.nodes[a:b])
      if (1 + math.ceil(later / m)) * (stash + weights(a, b)) > memory:
        return math.inf
    if memory is not None and formula == "code":
      copies = math.ceil(later / m)
      if copies * (sum(out[a:b]) + weights(a, b)) > memory:
        return math.inf
    if formula == "paper":
      return max(work, 2 * (m - 1) * weights(a, b) / bandwidth) / m
    sync = 4 * (m - 1) * weights(a, b) / (bandwidth * m)
    if first and level:
      sync /= levels[level - 1][0]
    return (work + sync) / m

  def pipeline(level, a, b):
    machines, bandwidth = levels[level]
    best = math.inf
    for parts in range(1, min(b - a, machines) + 1):
      for sizes in compositions(b - a, parts):
        ends = list(itertools.accumulate(sizes, initial=a))
        for counts in compositions(machines, parts):
          slowest = 0.0
          for s, m in enumerate(counts):
            i, j = ends[s], ends[s + 1]
            later = sum(counts[s + 1 :])
            slowest = max(slowest, stage(level, i, j, m, s == 0, later))
            if s and formula == "paper":
              slowest = max(slowest, 2 * out[i - 1] / bandwidth)
            elif s and compression is not None:
              speed = bandwidth * m * compression
              slowest = max(slowest, 2 * out[i - 1] / speed)
              if j < len(out):
                slowest = max(slowest, 2 * out[j - 1] / speed)
          best = min(best, slowest)
    return best

  return pipeline(len(levels) - 1, 0, len(times))


def found_time(g, levels, formula, **options):
  """The time that the recursion finds; infinite where it refuses."""
  machines, bandwidths = zip(*levels, strict=True)
  try:
    plan = pipedream(g, machines, bandwidths, formula=formula, **options)
  except ValueError as error:
    assert "fits" in str(error) or "cannot all be used" in str(error)
    return math.inf
  is_placed(plan.partition, g)
  used = sorted(d for places in plan.partition.devices for d in places)
  assert used == list(range(math.prod(machines)))
  assert plan.replicas == tuple(map(len, plan.partition.devices))
  assert plan.noam == math.ceil(len(used) / plan.replicas[0])
  if options.get("memory") and formula == "paper":
    assert (plan.memory <= options["memory"]).all()
  return plan.time


@quick
@given(
  chains(),
  st.integers(1, 5),
  st.integers(1, 4),
  st.sampled_from(("paper", "code")),
  st.booleans(),
  st.sampled_from((None, 5, 15, 40)),
)
def test_pipedream_is_the_best_of_all_plans(
  g, machines, bandwidth, formula, straight, memory
):
  levels = [(machines, float(bandwidth))]
  options = {"straight": straight, "memory": memory}
  best = brute(g, levels, formula, **options)
  assert found_time(g, levels, formula, **options) == best


@quick
@given(
  chains(most=4),
  st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from((0.5, 1.0, 4.0))),
    min_size=2,
    max_size=3,
  ),
  st.sampled_from(("paper", "code")),
)
def test_pipedream_is_the_best_of_all_plans_on_levels(g, levels, formula):
  assert found_time(g, levels, formula) == brute(g, levels, formula)


@quick
@given(chains(), st.integers(1, 4), st.sampled_from((0.5, 2.0)))
def test_compressed_activations_count_in_the_code(g, machines, ratio):
  levels, options = [(machines, 1.0)], {"compression": ratio}
  best = brute(g, levels, "code", **options)
  assert found_time(g, levels, "code", **options) == best


@quick
@given(chains(), st.integers(1, 5))
def test_fewer_machines_are_the_best_number_of_them(g, machines):
  plan = pipedream(g, machines, 1.0, fewer=True)
  best = min(brute(g, [(m, 1.0)], "paper") for m in range(1, machines + 1))
  assert plan.time == best
  assert len(plan.partition.load) == machines


# Times 4 and 2, 2 bytes of parameters each, 1 byte between them.
TWO = chain(nodes([4, 2], activation=1, parameters=2))
LARGE = chain(nodes([4, 2], activation=100, parameters=2))
EQUAL = chain(nodes([4, 4], activation=1, parameters=4))
CODE = {"formula": "code"}
# Graph, machines, bandwidth, options; then the time and each stage's devices.
BY_HAND = [
  # One stage twice: max(6, 2 x 4 / 2) / 2 = 3. Two stages: max(4, 2 x 1 / 2,
  # 2) = 4.
  (TWO, 2, 2.0, {}, 3, ((0, 1),)),
  # One stage: max(6, 2 x 2 x 4 / 2) / 3 = 8 / 3. The first twice: max(max(4,
  # 2 x 2 / 2) / 2, 1, 2) = 2. The second twice: 4.
  (TWO, 3, 2.0, {}, 2, ((0, 1), (2,))),
  # One stage takes max(6, 2 x 4 x 8) / 2 = 32, two stages max(4, 2 x 1 x 8, 2)
  # = 16: the transfer sets the pace.
  (TWO, 2, 0.125, {}, 16, ((0,), (1,))),
  # The code. One stage twice: (6 + 4 x 4 / (2 x 2)) / 2 = 5. Two stages: 4.
  (TWO, 2, 2.0, CODE, 4, ((0,), (1,))),
  # Transfers are for nothing, whatever they carry, unless compressed: then
  # 2 x 100 / 2 / 2 = 50.
  (LARGE, 2, 2.0, CODE, 4, ((0,), (1,))),
  (LARGE, 2, 2.0, CODE | {"compression": 2.0}, 5, ((0, 1),)),
  # Memory: the first of two stages stashes ceil(1 / 1) x (1 + 2) = 3 bytes,
  # a stage on all machines nothing.
  (TWO, 2, 2.0, CODE | {"memory": 3}, 4, ((0,), (1,))),
  (TWO, 2, 2.0, CODE | {"memory": 2}, 5, ((0, 1),)),
  # In a server of 2, bandwidth 8: a layer takes max(4, 2 x 4 / 8) / 2 = 2, both
  # take 4. Between 2 servers, bandwidth 1: one stage max(4, 2 x 8) / 2 = 8, two
  # stages max(2, 2 x 1 / 1, 2) = 2.
  (EQUAL, (2, 2), (8.0, 1.0), {}, 2, ((0, 1), (2, 3))),
  # One layer, code: (4 + 4 x 4 / (8 x 2)) / 2 = 2.5 in a server, and
  # (2.5 + 4 x 4 / (1 x 2) / 2) / 2 = 3.25 between two, the 2 within dividing.
  (chain(EQUAL.nodes[:1]), (2, 2), (8.0, 1.0), CODE, 3.25, ((0, 1, 2, 3),)),
]


@pytest.mark.parametrize("case", BY_HAND, ids=range(len(BY_HAND)))
def test_pipedream_by_hand(case):
  g, machines, bandwidth, options, time, devices = case
  plan = pipedream(g, machines, bandwidth, **options)
  assert (plan.time, plan.partition.devices) == (time, devices)
  assert plan.replicas == tuple(map(len, devices))
  assert plan.noam == math.ceil(sum(plan.replicas) / plan.replicas[0])
  work = [sum(g.nodes[i].work() for i in s) for s in plan.partition.stages]
  for load, places in zip(work, devices, strict=True):
    assert plan.partition.load[list(places)].tolist() == (
      [load / len(places)] * len(places)
    )


def test_devices_of_replicated_servers_are_interleaved():
  # Between servers activations take 2 x 9 / 1, so each is a pipeline of its
  # own; one stage would hold 1 + 2 bytes of parameters, more than the 2 there
  # are. In flight at a are two microbatches, as its replica is followed by one
  # device: 2 x 1 byte.
  g = chain([Node("a", 2, 2, 9, 1), Node("b", 2, 2, 9, 2)])
  plan = pipedream(g, (2, 2), (1e3, 1.0), memory=2)
  assert plan.replicas == (2, 2)
  assert plan.partition.devices == ((0, 2), (1, 3))
  assert plan.memory.tolist() == [2, 2]
  # max(4, 2 x 3 / 1) / 2, for the two pipelines together.
  assert plan.time == 3


def all_plans(g, levels, a, b):
  """Yields the time, and (nodes, replicas) of the stages, of every plan."""
  if not levels:
    made = g.nodes[a:b]
    yield sum(n.forward + n.backward for n in made), (((a, b), 1),)
    return
  *inner, (machines, bandwidth) = levels
  for parts in range(1, min(b - a, machines) + 1):
    for sizes in compositions(b - a, parts):
      ends = list(itertools.accumulate(sizes, initial=a))
      border = max([0.0, *(g.nodes[e - 1].activation for e in ends[1:-1])])
      for counts in compositions(machines, parts):
        options = [
          list(all_plans(g, inner, i, j)) for i, j in itertools.pairwise(ends)
        ]
        for chosen in itertools.product(*options):
          time, stages = 2 * border / bandwidth, ()
          for (work, found), m in zip(chosen, counts, strict=True):
            (i, _), _ = found[0]
            (_, j), _ = found[-1]
            sync = 2 * (m - 1) * sum(n.parameters for n in g.nodes[i:j])
            time = max(time, max(work, sync / bandwidth) / m)
            stages += tuple((span, m * r) for span, r in found)
          yield time, stages


@quick
@given(
  chains(most=4),
  st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from((0.5, 1.0, 4.0))),
    min_size=2,
    max_size=2,
  ),
  st.sampled_from((10, 20, 40)),
)
def test_memory_on_levels_is_that_of_the_stages_laid_out_flat(
  g, levels, memory
):
  best = math.inf
  for time, stages in all_plans(g, levels, 0, len(g.nodes)):
    later, fits = sum(r for _, r in stages), True
    for (a, b), r in stages:
      later -= r
      held = sum(n.stash + n.parameters for n in g.nodes[a:b])
      fits &= (1 + math.ceil(later / r)) * held <= memory
    best = min(best, time) if fits else best
  assert found_time(g, levels, "paper", memory=memory) == best


def test_memory_forces_stages_and_is_refused_by_name():
  g = chain(nodes([1, 1, 1], parameters=4, stash=2))
  assert pipedream(g, 3, 1e9).replicas == (3,)
  # Three stages hold 3, 2 and 1 versions of 6 bytes; one stage 18 bytes.
  assert pipedream(g, 3, 1e9, memory=18).memory.max() <= 18
  with pytest.raises(ValueError, match="nothing fits in 11 bytes.*'c' with 4"):
    pipedream(g, 3, 1e9, memory=11)


def test_the_time_predicted_is_the_pace_of_one_forward_one_backward():
  rng = np.random.default_rng(5)
  g = chain(
    Node(f"n{i}", *map(float, rng.integers(1, 9, 2))) for i in range(12)
  )
  plan = pipedream(g, 4, 1.0, straight=True)
  assert plan.noam == 4
  stages = plan.partition.stages
  cost = analyze.costs(
    4,
    forward=[sum(g.nodes[i].forward for i in stage) for stage in stages],
    backward=[sum(g.nodes[i].backward for i in stage) for stage in stages],
  )

  def makespan(microbatches):
    orders = []
    for s in range(4):
      ahead = plan.noam - s
      order = [("F", s, m) for m in range(ahead)]
      for m in range(microbatches):
        order.append(("B", s, m))
        if m + ahead < microbatches:
          order.append(("F", s, m + ahead))
      orders.append(order)
    table = table_lib.lay_out("1F1B", orders, every=1, flush=False)
    return analyze.analyze(table, cost).makespan

  assert makespan(60) - makespan(40) == pytest.approx(20 * plan.time)


def test_antichains_cut_where_the_order_cannot():
  # a -> (b, c) -> d with times 1, 1, 4, 2. In the order: a b | c d is 6. Along
  # antichains: a c | b d is 5.
  g = make(nodes([1, 1, 4, 2]), [(0, 1), (0, 2), (1, 3), (2, 3)])
  assert pipedream(g, 2, 1.0, straight=True).time == 6
  plan = pipedream(g, 2, 1.0, straight=True, cuts="antichains")
  assert plan.time == 5 and plan.partition.stages == ((0, 2), (1, 3))
  assert pipedream(g, 2, 1.0, straight=True, formula="code").time == 5
  wide = make([Node(f"n{i}") for i in range(12)])  # 2 ** 12 sets
  with pytest.raises(ValueError, match="more than 2000 antichains"):
    pipedream(wide, 2, 1.0, cuts="antichains")


def test_the_released_code_takes_a_source_with_the_first_node_that_needs_it():
  # antichain_dag of msr-fiddle/pipedream starts at the first source only: from
  # a it goes to c, which brings b. So b is not cut off with a: 1 | 3 + 4.
  g = make(nodes([1, 3, 4]), [(0, 2), (1, 2)])
  options = {"straight": True, "formula": "code"}
  assert pipedream(g, 2, 1.0, **options).time == 7
  assert pipedream(g, 2, 1.0, cuts="antichains", **options).time == 4


def test_antichains_are_limited_by_those_that_are_enumerated():
  # As in GNMT, each layer reads what one more source made: 2 ** 12 and more
  # closed sets, of which the released code enumerates 13.
  made = [Node(f"n{i}", forward=1.0) for i in range(24)]
  edges = [(i, i + 12) for i in range(12)]
  edges += [(i, i + 1) for i in range(12, 23)]
  g = make(made, edges)
  with pytest.raises(ValueError, match="more than 2000 antichains.*'released'"):
    pipedream(g, 2, 1.0, formula="code", cuts="antichains")
  plan = pipedream(g, 2, 1.0, formula="code", straight=True)
  assert plan.time == 12
  is_placed(plan.partition, g)
  # Nodes that stay together are enumerated together: 4 sets, not 2 ** 13.
  wide = make([Node(f"n{i}") for i in range(13)], (), [(range(12), 0)])
  plan = pipedream(wide, 1, 1.0, cuts="antichains", tied="together")
  assert plan.replicas == (1,)


def test_skips_count_at_every_border():
  made = nodes([3, 3, 3], activation=1)
  # Straight over three machines, bandwidth 1: borders carry 1 and 1 + 4 bytes.
  g = make(made, [(0, 1), (1, 2), (0, 2, 4)])
  assert pipedream(g, 3, 1.0, straight=True).time == 2 * 5
  assert pipedream(chain(made), 3, 1.0, straight=True).time == 3


def test_ties_are_reported_or_kept_together():
  g = make(
    nodes([1, 1, 1, 1], parameters=9), [(0, 1), (1, 2), (2, 3)], [((0, 2), 9)]
  )
  plan = pipedream(g, 4, 1.0, straight=True)
  assert plan.partition.shared == ((0, 2),)
  plan = pipedream(g, 2, 1.0, straight=True, tied="together")
  assert plan.partition.stages == ((0, 1, 2), (3,))
  assert plan.partition.shared == ()
  with pytest.raises(ValueError, match="cannot all be used"):
    pipedream(g, 3, 1.0, straight=True, tied="together")
  found = mixed_pipe.mixed_pipe(g, 2, tied="together").partition
  assert found.stages == ((0, 1, 2), (3,)) and found.shared == ()


test_pipedream_refuses = kit.refuses(
  [
    (((0, 1.0), {}), "positive whole number"),
    ((((2, 2), 1.0), {}), "there are 2 and 1"),
    (((2, 0.0), {}), "bandwidth must be positive"),
    (((2, None), {}), "not None"),
    (((2, 1.0), {"formula": "book"}), "paper, code, not 'book'"),
    (((2, 1.0), {"cuts": "edges"}), "antichains, released, not 'edges'"),
    (((2, 1.0), {"tied": "no"}), "allow, together, not 'no'"),
    (((2, 1.0), {"memory": 0}), "memory must be positive"),
    (((2, 1.0), {"compression": 2.0}), "for formula 'code' only"),
    (((3, 1.0), {"straight": True}), "set fewer=True"),
  ],
  lambda case: pipedream(TWO, *case[0], **case[1]),
)


@quick
@given(
  dags(most=7),
  st.integers(1, 4),
  st.sampled_from(("order", "antichains", "released")),
  st.sampled_from(placement.TIED_MODES),
  st.sampled_from((None, 30, 100)),
)
def test_pipedream_of_dags_is_a_partition(g, machines, cuts, tied, memory):
  try:
    plan = pipedream(
      *(g, machines, 1.0), cuts=cuts, tied=tied, memory=memory, fewer=True
    )
  except ValueError as error:
    assert memory is not None and "nothing fits" in str(error)
    return
  is_placed(plan.partition, g)
  assert tied == "allow" or plan.partition.shared == ()
  if memory is not None:
    later = sum(plan.replicas)
    for stage, m in zip(plan.partition.stages, plan.replicas, strict=True):
      later -= m
      held = sum(g.nodes[i].stash for i in stage)
      held += graph.parameters(g, stage)
      assert (1 + math.ceil(later / m)) * held <= memory


# FTPipe.


def blocks_of(g):
  return Blocks(g, [n.forward + n.backward for n in g.nodes])


def groups(blocks):
  return sorted(blocks.members.values())


def test_merges_that_close_a_cycle_are_refused():
  g = make(nodes([1] * 3), [(0, 1), (1, 2), (0, 2)])
  blocks = blocks_of(g)
  assert blocks.try_merge(0, 2) is None
  assert blocks.try_merge(0, 1) == 0
  assert blocks.try_merge(0, 2) == 0
  assert groups(blocks) == [(0, 1, 2)] and blocks.order() == [0]


def test_scopes_become_blocks():
  made = [Node(name) for name in ("in", "x/a", "x/b", "xy", "x/c", "out")]
  g = chain(made)
  blocks = blocks_of(g)
  coarsen.merge_scopes(blocks, ["x"])
  # xy is not in scope x, and parts it.
  assert groups(blocks) == [(0,), (1, 2), (3,), (4,), (5,)]
  with pytest.raises(ValueError, match="no node is in scope 'z'"):
    coarsen.merge_scopes(blocks, ["z"])


def test_weightless_nodes_go_to_a_predecessor_or_else_a_successor():
  g = chain(nodes([0, 2, 0, 3]))
  blocks = blocks_of(g)
  coarsen.merge_weightless(blocks, 1)
  assert groups(blocks) == [(0, 1, 2), (3,)]
  blocks = blocks_of(g)
  coarsen.merge_weightless(blocks, 3)
  assert len(blocks) == 3


def test_uncuttable_edges_take_along_what_is_between():
  g = make(nodes([1] * 4), [(0, 1), (1, 2), (0, 2, 0, False), (2, 3)])
  blocks = blocks_of(g)
  blocks.merge_all(placement.must_stay(g, "allow"))
  assert groups(blocks) == [(0, 1, 2), (3,)]


def test_blocks_grow_until_they_work_longer_than_they_send():
  # c sends for 5 and works for 2: it absorbs b (then 4), and a (then 6).
  made = [
    *nodes([2, 2, 2], activation=1)[:2],
    Node("c", 1, 1, 5),
    *(Node("d", 9, 9), Node("e", 9, 9)),
  ]
  blocks = coarsen.merge_bounded(blocks_of(chain(made)), 1, 1.0)
  assert groups(blocks) == [(0, 1, 2), (3,), (4,)]
  # Sending 7 is more than all before it work: nothing is changed.
  made[2] = Node("c", 1, 1, 7)
  blocks = coarsen.merge_bounded(blocks_of(chain(made)), 1, 1.0)
  assert groups(blocks) == [(i,) for i in range(5)]
  blocks = coarsen.merge_bounded(blocks_of(chain(made)), 1, None)
  assert len(blocks) == 5


def test_centers_are_spread_over_blocks_of_each_kind():
  # 6 x and 3 y: of 3 centres two are x (0 and 3) and one y (6).
  g = chain(
    nodes([1] * 9, kind="x")[:6]
    + [n._replace(kind="y") for n in nodes([1] * 9)[6:]]
  )
  blocks = blocks_of(g)
  coarsen.merge_around_centers(blocks, 3, seed=0)
  assert groups(blocks) == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
  plain = blocks_of(chain(nodes([1] * 9)))
  coarsen.merge_around_centers(plain, 3, seed=0)
  assert len(plain) == 3


def test_smallest_blocks_are_merged_with_smallest_successors():
  g = make(nodes([1, 5, 2, 9]), [(0, 1), (0, 2), (1, 3), (2, 3)])
  blocks = blocks_of(g)
  coarsen.merge_smallest(blocks, 3)
  assert groups(blocks) == [(0, 2), (1,), (3,)]


def test_assignment_is_better_with_the_largest_first():
  # Largest first: 4 | 1 1 1 1. Smallest first: 1 1 | 1 1, then 4 on top of two.
  weights = [1, 1, 1, 1, 4]

  def loads(order):
    placed = mixed_pipe.assign(weights, 2, order=order)
    return sorted(np.bincount(placed, weights).tolist())

  assert loads("largest_first") == [4, 4]
  assert loads("smallest_first") == [2, 6]


def test_assignment_keeps_to_memory():
  # By weight, both large ones would be first on a device of their own, and the
  # third of 6 bytes finds no room; by size it does.
  sizes, weights = [4, 4, 6, 2], [9, 8, 1, 1]
  placed = mixed_pipe.assign(weights, 2, sizes=sizes, memory=8)
  assert np.bincount(placed, sizes).max() <= 8
  with pytest.raises(ValueError, match="item 2 of 6 bytes among 16"):
    mixed_pipe.assign(weights, 2, sizes=sizes, memory=7)
  with pytest.raises(ValueError, match="order must be one of"):
    mixed_pipe.assign(weights, 2, order="random")


def test_stages_are_neighbours_on_a_device():
  g = chain(nodes([1] * 5))
  blocks = blocks_of(g)
  stages = mixed_pipe.connect(blocks, dict(enumerate([0, 0, 1, 0, 0])))
  assert groups(stages) == [(0, 1), (2,), (3, 4)]
  # Both a -> c around b and a -> b -> c on one device: one stage.
  triangle = make(nodes([1] * 3), [(0, 1), (1, 2), (0, 2)])
  stages = mixed_pipe.connect(blocks_of(triangle), dict.fromkeys(range(3), 0))
  assert groups(stages) == [(0, 1, 2)]


def test_stages_never_need_each_other():
  # Devices: a and d on 0, b and c on 1. a -> c and b -> d, a -> d and b -> c:
  # {a, d} would need {b, c}, and {b, c} {a, d}. One of them is parted.
  g = make(nodes([1] * 4), [(0, 2), (1, 3), (0, 3), (1, 2)])
  device = {0: 0, 3: 0, 1: 1, 2: 1}
  stages = mixed_pipe.connect(blocks_of(g), device)
  order = stages.order()
  assert len(order) == 3
  placement.make(g, [stages.members[s] for s in order])


def objective(found, g, *, bandwidth=None, recompute=()):
  pairs = [(i, s) for s, stage in enumerate(found.stages) for i in stage]
  stage = [s for _, s in sorted(pairs)]
  work = zip(g.nodes, stage, strict=True)
  weights = [node.work(s in recompute) for node, s in work]
  devices = [device for (device,) in found.devices]
  return mixed_pipe.cost(g, stage, devices, weights, bandwidth)[0]


def test_objective_by_hand():
  made = [Node("a", 1, 2, 8), Node("b", 1, 1, 3), Node("c", 2, 2)]
  g = chain(made)
  found = placement.make(g, [[0], [1], [2]], [0, 1, 0])
  # Work: device 0 has 3 + 4 = 7, device 1 has 2. Bandwidth 1: stage 0 sends 8:
  # 7 + 1; stage 1 sends 3 and gets 8: 2 + 1 + 6 = 9; stage 2 gets 3: 7.
  assert objective(found, g, bandwidth=1.0) == 9
  assert objective(found, g) == 7
  assert objective(found, g, recompute=(0,)) == 8
  same = placement.make(g, [[0], [1, 2]], [0, 0])
  assert objective(same, g, bandwidth=1e-3) == 9


def test_devices_hold_stages_that_are_not_neighbours():
  # The best cut is 1 4 | 4 1 1 1, with 7; stages anywhere make 6 and 6.
  times = [1, 4, 4, 1, 1, 1]
  g = chain(nodes(times))
  contiguous = placement.balance(times, 2)
  assert max(sum(times[i] for i in s) for s in contiguous) == 7
  found = mixed_pipe.mixed_pipe(g, 2, lengths=[6])
  assert found.objective == 6
  assert len(found.partition.stages) > 2
  assert found.partition.load.tolist() == [6, 6]


def test_refinement_moves_borders():
  g = chain(nodes([1] * 6, activation=1))
  # Two blocks of 1 and 5, as a bad coarsening would leave them.
  units = blocks_of(g)
  sizes = dict.fromkeys(range(6), 1.0)
  state = mixed_pipe.Refinement(
    units, [(0,), (1, 2, 3, 4, 5)], [0, 1], 1.0, sizes, None
  )
  assert state.score == (5, 1)
  mixed_pipe.refine(state)
  assert state.score == (3, 1) and state.nodes() == [0, 0, 0, 1, 1, 1]
  # With memory for two units on the first device, it takes one more only.
  state = mixed_pipe.Refinement(
    units, [(0,), (1, 2, 3, 4, 5)], [0, 1], 1.0, sizes, 2.0
  )
  mixed_pipe.refine(state)
  assert state.nodes() == [0, 0, 1, 1, 1, 1]


def test_equal_objectives_are_told_apart_by_bytes():
  # b takes no time: with a it sends 1 byte over the border, with c it is 9.
  made = [Node("a", 1, 1, 9), Node("b", 0, 0, 1), Node("c", 1, 1)]
  state = mixed_pipe.Refinement(
    *(blocks_of(chain(made)), [(0,), (1, 2)], [0, 1]),
    *(None, dict.fromkeys(range(3), 0.0), None),
  )
  mixed_pipe.refine(state)
  assert state.nodes() == [0, 0, 1] and state.score == (2, 1)


def test_the_sweep_keeps_the_lowest_objective():
  rng = np.random.default_rng(3)
  g = chain(
    Node(f"n{i}", *rng.uniform(0.5, 2, 2), float(rng.integers(1, 9)), kind="x")
    for i in range(24)
  )
  found = mixed_pipe.mixed_pipe(g, 3, bandwidth=2.0)
  assert [length for length, _ in found.tried] == [3, 6, 9, 12, 15, 18, 21, 24]
  assert found.objective == min(value for _, value in found.tried)
  assert dict(found.tried)[found.length] == found.objective
  again = objective(found.partition, g, bandwidth=2.0)
  assert again == pytest.approx(found.objective, rel=1e-12)
  for length, value in found.tried:
    one = mixed_pipe.mixed_pipe(g, 3, bandwidth=2.0, lengths=[length])
    assert one.objective == value


def test_the_last_stage_does_not_recompute():
  # Each of 7 nodes takes 1 forward and 2 backward: 4 with recomputing, 3
  # without. Cut in two: 3 nodes x 4 = 4 nodes x 3 = 12.
  g = chain(Node(f"n{i}", 1, 2, 1) for i in range(7))
  found = mixed_pipe.mixed_pipe(g, 2, lengths=[2], recompute="but_last")
  assert found.settled and found.recompute == (0,)
  assert found.partition.stages == ((0, 1, 2), (3, 4, 5, 6))
  assert found.partition.load.tolist() == [12, 12] and found.objective == 12
  # All recompute: 3 x 4 | 4 x 4. None does: 3 x 3 | 4 x 3.
  for recompute, value in (("all", 16), ("none", 12)):
    made = mixed_pipe.mixed_pipe(g, 2, lengths=[2], recompute=recompute)
    assert made.objective == value and made.settled


def test_mixed_pipe_refuses():
  g = chain(nodes([1] * 4, parameters=4, stash=1))
  for args, options, message in (
    ((0,), {}, "devices must be a positive"),
    ((2,), {"bandwidth": 0}, "bandwidth must be positive"),
    ((2,), {"order": "any"}, "order must be one of"),
    ((2,), {"tied": "any"}, "tied must be one of"),
    ((2,), {"recompute": "some"}, "recompute must be one of"),
    ((2,), {"lengths": []}, "one L or more"),
    ((2,), {"lengths": [0]}, "each L must be"),
    ((2,), {"memory": -1}, "memory must be positive"),
    # Four nodes of 3 x 4 + 1 bytes, on two devices of 25.
    ((2,), {"memory": 25}, "no device of 2 has room for item .* node 'a'"),
  ):
    with pytest.raises(ValueError, match=message):
      mixed_pipe.mixed_pipe(g, *args, **options)
  found = mixed_pipe.mixed_pipe(g, 2, memory=26)
  assert found.partition.load.tolist() == [2, 2]


@quick
@given(
  dags(),
  st.integers(1, 4),
  st.sampled_from((None, 0.5, 4.0)),
  st.sampled_from(placement.TIED_MODES),
  st.sampled_from((None, 60, 150)),
  st.sampled_from(mixed_pipe.ORDERS),
  st.sampled_from(mixed_pipe.RECOMPUTE),
  st.booleans(),
)
def test_mixed_pipe_of_dags_is_a_partition(
  g, devices, bandwidth, tied, memory, order, recompute, scoped
):
  scopes = sorted({n.name.split("/")[0] for n in g.nodes}) if scoped else ()
  try:
    found = mixed_pipe.mixed_pipe(
      *(g, devices),
      bandwidth=bandwidth,
      tied=tied,
      memory=memory,
      order=order,
      scopes=scopes,
      recompute=recompute,
    )
  except ValueError as error:
    assert memory is not None and "has room for item" in str(error)
    return
  made = found.partition
  where = is_placed(made, g)
  assert len(made.load) == devices
  assert tied == "allow" or made.shared == ()
  assert made.load.sum() == pytest.approx(
    sum(
      (2 if where[i] in found.recompute else 1) * n.forward + n.backward
      for i, n in enumerate(g.nodes)
    )
  )
  if memory is not None:
    held = np.zeros(devices)
    for stage, (device,) in zip(made.stages, made.devices, strict=True):
      held[device] += 3 * graph.parameters(g, stage)
      held[device] += sum(g.nodes[i].stash for i in stage)
    assert held.max() <= memory
  if recompute == "but_last":
    last = len(made.stages) - 1
    assert found.recompute == tuple(range(last))


@quick
@given(chains(most=5), st.integers(1, 3))
def test_free_communication_leaves_loads_within_four_thirds(g, devices):
  """Graham's bound, for blocks that are single nodes."""
  found = mixed_pipe.mixed_pipe(g, devices, lengths=[len(g.nodes)])
  times = [n.forward + n.backward for n in g.nodes]
  best = min(
    np.bincount(places, times, devices).max()
    for places in itertools.product(range(devices), repeat=len(times))
  )
  assert best <= found.objective <= 4 / 3 * best + 1e-9
