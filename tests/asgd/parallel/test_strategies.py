"""Strategies: their bytes and seconds by hand."""

import pytest

from asgd.parallel import costs, memory, strategies, waiting, workloads

# A model whose numbers are easy.
WORK = workloads.Workload(
  *("tiny", 1000, 4, 250, 100.0, 30.0, lambda n, t: 10.0 * n / t, 5.0),
  gpt=memory.Gpt(4, 8, 4, 1, 1),
)
HARDWARE = strategies.Hardware(4, 10_000.0, 10.0, costs.link(1000.0, 0.01))
OPTIONS = workloads.TrainingOptions(16, 2, variation=0.0)


def find(work=WORK, hardware=HARDWARE, options=OPTIONS):
  """The strategies by their names."""
  candidates = strategies.find(work, hardware, options)
  assert len({one.name for one in candidates}) == len(candidates)
  return {one.name: one for one in candidates}


def test_state_and_activations_by_hand():
  by_name = find()
  one = by_name["one device"]
  assert (one.state, one.activations, one.fits) == (16_000, 20, False)
  assert by_name["data, ring"].state == 16_000
  assert by_name["data, ZeRO-1"].state == 1000 * (4 + 12 / 4)
  assert by_name["data, ZeRO-2"].state == 1000 * (2 + 14 / 4)
  # The layer at work is whole, in 2 bytes.
  assert by_name["data, ZeRO-3"].state == 1000 * 16 / 4 + 250 * 2
  assert by_name["tensor 4"].state == 4000
  assert by_name["tensor 4"].activations == 20 / 4
  # A stage keeps what is in flight, four microbatches.
  assert by_name["pipeline 4, 1F1B"].activations == 4 * 20 / 4
  assert by_name["pipeline 4, PipeDream"].state == 1000 / 4 * (16 + 3 * 2)
  assert by_name["pipeline 4, 2BW"].state == 1000 / 4 * (16 + 2)
  # Parameters in float32 on four shards, with a copy of what each was sent.
  assert by_name["asynchronous, asgd"].state == 1000 * (2 + 2 + 4 / 4)
  assert by_name["asynchronous, dc_asgd_a"].state == (
    1000 * (2 + 2 + (4 + 4 + 4 * 4) / 4)
  )


def test_times_by_hand():
  by_name = find()
  one = by_name["one device"]
  assert (one.compute, one.communication, one.waiting) == (160, 0, 0)
  ring = by_name["data, ring"]
  assert ring.compute == 40
  assert ring.communication == pytest.approx(6 * 0.01 + 2 * 3 / 4 * 2000 / 1e3)
  # A device has one link, and it needs two.
  assert "data, bidirectional ring" not in by_name
  # Half a ring each, of gradients and of weights.
  assert by_name["data, ZeRO-1"].communication == ring.communication
  # For each of two microbatches: gradients, and weights twice.
  each = 3 * 0.01 + 3 / 4 * 2
  assert by_name["data, ZeRO-2"].communication == pytest.approx(3 * each)
  assert by_name["data, ZeRO-3"].communication == pytest.approx(6 * each)
  # 4 all-reduces of 2 x 5 bytes (chunks of 3), of 4 blocks, 8 microbatches.
  assert by_name["tensor 4"].communication == pytest.approx(
    8 * 4 * 4 * 6 * (0.01 + 3 / 1000)
  )
  pipe = by_name["pipeline 4, 1F1B"]
  assert pipe.waiting == pytest.approx(40 * 3 / 8)  # (p - 1) / m
  assert pipe.communication == pytest.approx(2 * (8 + 2) * (0.01 + 10 / 1e3))
  assert by_name["pipeline 4, PipeDream"].waiting == 0
  # Each worker's push and fetch, of 3/4 of it, in 6 messages.
  late = by_name["asynchronous, asgd"]
  assert late.communication == pytest.approx(6 * (0.01 + 500 / 1e3))
  assert late.stale and not ring.stale


def test_all_wait_for_the_slowest():
  slow = find(options=OPTIONS._replace(variation=0.1))
  factor = waiting.expected_slowest(4, variation=0.1)
  assert slow["data, ring"].waiting == pytest.approx(40 * (factor - 1))
  assert slow["asynchronous, asgd"].waiting == 0


def test_reductions_hide_behind_the_backward():
  overlap = OPTIONS._replace(overlap=True)
  assert find(options=overlap)["data, ring"].communication == 0
  slow = HARDWARE._replace(far=costs.link(100.0, 0.0))
  hidden = find(hardware=slow, options=overlap)
  assert hidden["data, ring"].communication == pytest.approx(30 - 40 * 2 / 3)


def test_levels_of_links():
  hardware = HARDWARE._replace(node=2, near=costs.link(1e5, 0.0))
  by_name = find(hardware=hardware)
  assert by_name["data, hierarchical"].communication == pytest.approx(
    2 * 1 / 2 * 2000 / 1e5 + 2 * 0.01 + 1000 / 1e3
  )
  # Within a node tensors are cheap, and there are none across nodes.
  shapes = {name.split(",")[0] for name in by_name if " x " in name}
  pairs = ("data", "tensor"), ("data", "pipe"), ("tensor", "pipe")
  assert shapes == {f"{a} 2 x {b} 2" for a, b in pairs}
  both = [
    next(one for name, one in each.items() if name.startswith("data 2 x tens"))
    for each in (by_name, find())
  ]
  # 4 microbatches, 4 blocks, 4 all-reduces of 10 bytes on two devices.
  saved = 64 * (2 * 0.01 + 10 / 1e3 - 10 / 1e5)
  assert both[1].communication - both[0].communication == pytest.approx(saved)


def test_uneven_stages_take_as_long_as_the_largest():
  pipe = find(WORK._replace(layers=5))["pipeline 4, 1F1B"]
  assert pipe.compute == 40 * 8 / 5
  assert pipe.state == pytest.approx(4000 * 8 / 5)


def test_microbatches_are_the_best_that_fit():
  roomy = HARDWARE._replace(memory=16_100.0)
  free = OPTIONS._replace(microbatch=None)
  assert find(hardware=roomy, options=free)["one device"].microbatch == 8
  assert find(options=free)["data, ZeRO-3"].microbatch == 4  # gathers once
  # One of 16 examples, but 2BW needs one for each of 4 stages.
  dear = roomy._replace(far=costs.link(1000.0, 10.0))
  by_name = find(hardware=dear, options=free)
  assert by_name["pipeline 4, PipeDream"].microbatch == 16
  assert by_name["pipeline 4, 2BW"].microbatch == 4


def test_a_batch_that_cannot_be_divided():
  options = OPTIONS._replace(batch=6, microbatch=2)
  by_name = find(options=options)
  assert "data, ring" not in by_name and "pipeline 4, 1F1B" in by_name
  said = strategies.left_out(WORK, HARDWARE, options)
  assert "pipeline 4, 2BW" not in by_name
  assert said == [
    "data: a batch of 6 is not divided by 4 devices",
    "2BW: 3 microbatches of a step are fewer than 4 stages",
  ]


@pytest.mark.parametrize(
  ("parameters", "depth", "width"), [(1.5e9, 20, 2560), (175e9, 96, 12288)]
)
def test_a_gpt_of_that_size(parameters, depth, width):
  gpt = workloads.guess_gpt(parameters)
  assert (gpt.depth, gpt.width, gpt.heads) == (depth, width, width // 128)
  # 12 L C^2 of the blocks, and embeddings.
  count = 12 * depth * width**2 + (gpt.vocabulary + gpt.context) * width
  assert count == pytest.approx(parameters, rel=0.2)


def test_a_gpt_of_given_sizes():
  gpt = workloads.guess_gpt(350e6, depth=24, heads=16)
  assert (gpt.depth, gpt.width) == (24, 1104) and gpt.heads == 16
