"""Generators: the tables of the papers' pictures, the closed forms of their
texts, and for any size a table that can be run within its memory."""

import functools
import itertools
import math

import kit
import numpy as np
import pipeline_kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd.pipeline import analyze, schedules, validate
from asgd.pipeline import table as table_lib
from asgd.pipeline.schedules import search

quick = settings(deadline=None, derandomize=True, max_examples=25)


@pytest.fixture(scope="module", autouse=True)
def search_once():
  """Orders are searched once for the same places, costs and limits: schedules
  of one memory, tables of two batches and several tests ask for the same."""
  run, found = search._Search.run, {}

  def remember(self, costs, limits):
    times = *(column.tobytes() for column in costs[:6]), costs.overlap
    key = (*self._places, self._microbatches, times, limits)
    if key not in found:
      found[key] = run(self, costs, limits)
    score, orders = found[key]
    return score, [list(order) for order in orders]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(search._Search, "run", remember)
    yield


def text(table):
  return table_lib.to_text(table).splitlines()[1:]


def lines(block):
  return [line.strip() for line in block.strip().splitlines()]


def rows(table):
  """A device's tasks in a line: blocks joined by &."""
  return [
    " ".join(
      "&".join(f"{t.action}{t.microbatch}@{t.stage}" for t in block)
      for block in order
    )
    for order in pipeline_kit.orders(table)
  ]


def bubbles(table, costs=None):
  """Idle time of each device until the last has ended."""
  return analyze.analyze(table, costs).idle


def engaged(table, costs=None):
  """From a device's first task to its last, less its work; the most."""
  facts = analyze.analyze(table, costs)
  start, end = facts.timing
  spans = [
    end[table.device == d].max() - start[table.device == d].min()
    for d in range(table.devices)
  ]
  return max(spans - facts.busy)


def makespan(table, costs=None):
  return analyze.analyze(table, costs).makespan


def peaks(table):
  return analyze.analyze(table).peak_activations.astype(int).tolist()


# Pictures. Those of chimera, breadth first and the names of updates and flushes
# are in the docstrings of the makers, whose examples are run.

DRAWN = {
  lambda: schedules.gpipe(4, 4): """
    0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
    1 | .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
    2 | .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
    3 | .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .
  """,
  lambda: schedules.gpipe(2, 3, reverse=True): """
    0 | F0 F1 F2 .  .  B2 B1 B0
    1 | .  F0 F1 F2 B2 B1 B0 .
  """,
  lambda: schedules.one_f_one_b(4, 5): """
    0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 .  B2 .  B3 .  B4
    1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4 .
    2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .  .
    3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .  .
  """,
  lambda: schedules.one_f_one_b(2, 2, batches=2): """
    0 | F0 F1 .  B0 .  B1 F2 F3 .  B2 .  B3
    1 | .  F0 B0 F1 B1 .  .  F2 B2 F3 B3 .
  """,
  # With a short group.
  lambda: schedules.interleaved(2, 2, 3): """
    0 | F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 .    B1@2 F2@2 B0@0 B1@0 .    B2@2 .    B2@0
    1 | .    F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 B1@1 F2@3 B2@3 .    B2@1 .
  """,  # noqa: E501
  # Three devices, two of them for the first stage: NOAM = 2.
  lambda: schedules.pipedream(2, 6, replicas=(2, 1)): """
    0 | F0@0 F2@0 .    B0@0 F4@0 .    .    B2@0 .    .    .    B4@0 .    .
    1 | F1@0 F3@0 .    .    .    B1@0 F5@0 .    .    B3@0 .    .    .    B5@0
    2 | .    F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 F3@1 B3@1 F4@1 B4@1 F5@1 B5@1 .
  """,
  # Figure 2 of Qi et al. 2024, above.
  lambda: schedules.zb_h1(4, 8): """
    0 | F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
    1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
    2 | .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
    3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
  """,  # noqa: E501
  # B takes as long as F here, so that a slot is a unit of time.
  lambda: schedules.ftpipe(
    (0, 1, 0), 3, costs=analyze.costs(3, backward=1.0), stage_depth=(1, 1, 0)
  ): """
    0 | F0@0 F1@0 F0@2 B0@2 F1@2 B1@2 B0@0 F2@0 B1@0 F2@2 B2@2 .    B2@0
    1 | .    F0@1 F1@1 .    B0@1 .    B1@1 .    F2@1 .    .    B2@1 .
  """,
}


@pytest.mark.parametrize("make, picture", DRAWN.items(), ids=range(len(DRAWN)))
def test_a_table_is_as_drawn(make, picture):
  assert text(make()) == lines(picture)


def test_interleaved_as_in_megatron():
  # Figure 4 of Narayanan et al. 2021, below, from its rows of devices 1 and 4.
  first = (
    "F0@0 F1@0 F2@0 F3@0 F0@4 F1@4 F2@4 F3@4 F4@0 F5@0"
    " F6@0 B0@4 F7@0 B1@4 F4@4 B2@4 F5@4 B3@4 F6@4 B0@0 F7@4 B1@0"
    " B2@0 B3@0 B4@4 B5@4 B6@4 B7@4 B4@0 B5@0 B6@0 B7@0"
  )
  last = (
    "F0@3 F1@3 F2@3 F3@3"
    " F0@7 B0@7 F1@7 B1@7 F2@7 B2@7 F3@7 B3@7 F4@3 B0@3 F5@3 B1@3 F6@3 B2@3"
    " F7@3 B3@3 F4@7 B4@7 F5@7 B5@7 F6@7 B6@7 F7@7 B7@7 B4@3 B5@3 B6@3 B7@3"
  )
  found = rows(schedules.interleaved(4, 2, 8))
  assert found[0] == first
  assert found[3] == last


def test_dualpipe_as_drawn():
  # The picture of its README, 8 devices and 20 microbatches, first device.
  first = (
    "F0@0 F1@0 F2@0 F3@0 F4@0 F5@0 F6@0 F10@7"
    " I10@7 W10@7 F11@7 I11@7 W11@7 F12@7 I12@7 W12@7 F13@7"
    " F7@0&B13@7 F14@7&B0@0 F8@0&B14@7 F15@7&B1@0 F9@0&B15@7 F16@7&B2@0"
    " B16@7 F17@7&B3@0 B17@7 F18@7&B4@0 B18@7 F19@7&B5@0"
    " B19@7 I6@0 W6@0 I7@0 W7@0 I8@0 W8@0 I9@0 W9@0"
  )
  middle = (
    "F0@3 F10@4 F1@3 F11@4 F2@3 F12@4 F3@3 F13@4"
    " F4@3 B10@4 F14@4&B0@3 F5@3&B11@4 F15@4&B1@3 F6@3&B12@4 F16@4&B2@3"
    " F7@3&B13@4 F17@4&B3@3 F8@3&B14@4 F18@4&B4@3 F9@3&B15@4 F19@4&B5@3"
    " B16@4 B6@3 B17@4 B7@3 I18@4 I8@3 I19@4 I9@3 W18@4 W8@3 W19@4 W9@3"
  )
  table = schedules.dualpipe(8, 20)
  assert rows(table)[0] == first
  assert rows(table)[3] == middle
  # The other end does the same with the directions exchanged.
  mirrored = table._replace(
    device=7 - table.device, microbatch=(table.microbatch + 10) % 20
  )
  mirrored = table_lib.from_columns(
    *(table.name, *mirrored[1:6]), every=20, flush=True
  )
  assert table_lib.to_text(mirrored) == table_lib.to_text(table)


def test_dualpipe_v_is_half_of_dualpipe():
  full = pipeline_kit.orders(schedules.dualpipe(8, 32))
  half = pipeline_kit.orders(schedules.dualpipe_v(4, 16))
  for device, order in enumerate(half):
    for block, other in zip(order, full[device], strict=True):
      for task, twin in zip(block, other, strict=True):
        assert (task.action, task.stage) == (twin.action, twin.stage)
        up = task.stage >= 4  # DualPipe's second half of the microbatches
        assert task.microbatch == twin.microbatch - 16 * up


# Closed forms, of a table in algorithms.md, section 10.

SIZES = [(1, 1), (2, 2), (3, 7), (4, 4), (4, 8), (8, 32)]
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 3.0, 1.0), (1.0, 2.0, 0.5)]


@pytest.mark.parametrize("p, m", SIZES)
@pytest.mark.parametrize("maker", [schedules.gpipe, schedules.one_f_one_b])
def test_bubble_and_memory_of_gpipe_and_1f1b(maker, p, m):
  held = [m if maker is schedules.gpipe else min(p - s, m) for s in range(p)]
  for forward, backward in ((1.0, 2.0), (1.5, 1.5), (3.0, 1.0)):
    costs = analyze.costs(p, forward=forward, backward=backward)
    facts = analyze.analyze(maker(p, m), costs)
    np.testing.assert_allclose(facts.idle, (p - 1) * (forward + backward))
    assert facts.bubble_of_total == pytest.approx((p - 1) / (m + p - 1))
    assert facts.bubble_of_ideal == pytest.approx((p - 1) / m)
    assert facts.weight_versions.tolist() == [1] * p
    assert not facts.staleness.forward.any()
    assert facts.peak_activations.tolist() == held


@pytest.mark.parametrize(
  "p, v, m", [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 16)]
)
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_interleaved_closed_forms(p, v, m, backward):
  # A stage is the v-th part of what a device would have in 1F1B.
  costs = analyze.costs(p * v, forward=1 / v, backward=backward / v)
  table = schedules.interleaved(p, v, m)
  np.testing.assert_allclose(
    bubbles(table, costs), (p - 1) * (1 + backward) / v
  )
  found = peaks(table)
  assert found == [(v - 1) * p + 2 * (p - 1 - d) + 1 for d in range(p)]
  assert found[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@pytest.mark.parametrize("p, v, m", [(2, 2, 4), (4, 2, 8), (4, 3, 5)])
def test_breadth_first_closed_forms(p, v, m):
  costs = analyze.costs(p * v, forward=1 / v, backward=2 / v)
  table = schedules.breadth_first(p, v, m)
  np.testing.assert_allclose(bubbles(table, costs), 3 * (p - 1) / v)
  assert peaks(table) == [m * v] * p


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_chimera_closed_forms(p):
  equal = analyze.costs(p, backward=1.0)
  usual = analyze.costs(p, backward=2.0)
  one = schedules.chimera(p, p)
  np.testing.assert_allclose(bubbles(one, equal), (p / 2 - 1) * 2)
  # The paper's ratio for B = 2 F; (D/2 - 1)(F + B) holds for B = F only.
  facts = analyze.analyze(one, usual)
  assert facts.bubble_of_total == pytest.approx((p - 2) / (1.5 * p + p - 2))
  for units in (1, 2, 5):
    table = schedules.chimera(p, units * p)
    facts = analyze.analyze(table, equal)
    ratio = (p - 2) / (2 * units * p + p - 2)
    assert facts.bubble_of_total == pytest.approx(ratio)
    down = [p // 2 + 1 + d for d in range(p // 2)]
    assert peaks(table) == down + down[::-1]
    assert table.places() == [sorted({s, p - 1 - s}) for s in range(p)]


@pytest.mark.parametrize("p, m", [(2, 3), (4, 8), (6, 18), (8, 24)])
@pytest.mark.parametrize("times", TIMES)
def test_zb_h1_and_zb_h2_closed_forms(p, m, times):
  f, i, w = times
  costs = analyze.costs(p, forward=f, input=i, weight=w)
  table = schedules.zb_h1(p, m, costs=costs)
  np.testing.assert_allclose(bubbles(table, costs), (p - 1) * (f + i - w))
  assert peaks(table) == [p] * p
  if f == i == w:
    facts = analyze.analyze(table, costs)
    assert facts.bubble_of_ideal == pytest.approx((p - 1) / (3 * m))
  # ZB-H2's devices start and end one after the other: what a batch costs is
  # how much later the next one ends.
  table = schedules.zb_h2(p, m, costs=costs)
  bubble = (p - 1) * (f + i - 2 * w)
  np.testing.assert_allclose(engaged(table, costs), bubble, atol=1e-9)
  both = schedules.zb_h2(p, m, costs=costs, batches=2)
  more = makespan(both, costs) - makespan(table, costs)
  assert more == pytest.approx(m * (f + i + w) + bubble)
  assert max(peaks(table)) <= 2 * p - 1
  assert peaks(table)[0] == 2 * p - 1


@pytest.mark.parametrize("times", [(1, 1, 2), (1, 3, 2), (3, 1, 2), (1, 2, 3)])
def test_zb_h1_with_long_backwards_of_weights(times):
  f, i, w = times
  costs = analyze.costs(4, forward=f, input=i, weight=w)
  table = schedules.zb_h1(4, 8, costs=costs)
  assert bubbles(table, costs).tolist() == [3.0 * max(f + i - w, f, i)] * 4


@pytest.mark.parametrize("p, m", [(1, 1), (2, 3), (4, 8), (5, 9), (8, 24)])
def test_zb_v_closed_forms(p, m):
  table = schedules.zb_v(p, m)
  assert engaged(table) == 0
  more = makespan(schedules.zb_v(p, m, batches=2)) - makespan(table)
  assert more == 6 * m
  assert max(peaks(table)) == 2 * p  # of half stages: p of whole ones
  assert table.places() == [[min(s, 2 * p - 1 - s)] for s in range(2 * p)]


@pytest.mark.parametrize("p", [5, 6, 7, 9, 12, 16])
def test_memory_and_bubble_of_v_half_and_v_min(p):
  m = 3 * p
  whole = analyze.costs(p, forward=2.0, backward=4.0)
  one = bubbles(schedules.one_f_one_b(p, m), whole).max()
  half, least = schedules.v_half(p, m), schedules.v_min(p, m)
  # Of half stages, of which 1F1B holds 2 p. The authors name (p + 2) // 2 and
  # (p + 4) // 3 of whole stages.
  assert max(peaks(half)) == 2 * ((p + 2) // 2)
  assert max(peaks(least)) == 2 * ((p + 4) // 3)
  assert 0.35 * one <= bubbles(half).max() <= 0.5 * one
  assert 0.45 * one <= bubbles(least).max() <= 0.7 * one


@pytest.mark.parametrize("p", range(3, 13))
def test_v_half_and_v_min_are_no_longer_than_the_released_code(p):
  # What sail-sg/zero-bubble-pipeline-parallelism takes more than the work, with
  # the same memory at F = I = W = 1 and 2 p microbatches.
  half = [5, 5, 11, 11, 17, 17, 23, 23, 29, 29][p - 3]
  least = [5, 11, 15, 17, 23, 27, 29, 35, 39, 41][p - 3]
  for maker, released in ((schedules.v_half, half), (schedules.v_min, least)):
    found = engaged(maker(p, 2 * p))
    # Of V-Min with p mod 3 = 2 the released code takes 4 slots more.
    shorter = 4 * (maker is schedules.v_min and p % 3 == 2)
    assert found == released - shorter


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 14), (8, 16), (8, 24)])
@pytest.mark.parametrize(
  "f, w, both", [(1, 1, 3), (1, 1, 2.5), (1, 0.5, 2), (2, 1, 4.5)]
)
def test_dualpipe_closed_forms(p, m, f, w, both):
  # With I = F >= W; B = I + W is the whole backward, as in DeepSeek's table.
  for table, stages in (
    (schedules.dualpipe(p, m), p),
    (schedules.dualpipe_v(p // 2, m), p),
  ):
    costs = analyze.costs(stages, forward=f, input=f, weight=w, overlap=both)
    # Where overlap saves time, devices in the middle have fewer blocks, and so
    # the whole bubble.
    found = bubbles(table, costs).max()
    assert found == pytest.approx((p / 2 - 1) * (both + (f + w) - 3 * w))
    assert peaks(table) == [p + 1] * table.devices
  places = schedules.dualpipe(p, m).places()
  assert places == [sorted({s, p - 1 - s}) for s in range(p)]


@pytest.mark.parametrize("p, m", [(1, 3), (2, 6), (4, 12), (8, 24)])
def test_pipedream_closed_forms(p, m):
  table = schedules.pipedream(p, m)
  facts = analyze.analyze(table)
  steady = facts.staleness.forward[:, p:]
  np.testing.assert_array_equal(
    steady, np.broadcast_to(p - 1 - np.arange(p)[:, None], steady.shape)
  )
  np.testing.assert_array_equal(
    facts.staleness.forward, facts.staleness.backward
  )
  assert facts.weight_versions.tolist() == [p - s for s in range(p)]
  assert facts.peak_activations.tolist() == [p - s for s in range(p)]
  vertical = analyze.staleness(table, "vertical").forward[:, p:]
  assert (vertical == p - 1).all()
  # No bubble between the first backward and the last forward.
  longer = schedules.pipedream(p, m + 5)
  assert makespan(longer) - makespan(table) == 5 * 3


def test_pipedream_with_replicas_keeps_as_many_in_flight_as_it_needs():
  for replicas in ((2, 1), (1, 2), (3, 1, 2), (1, 4, 1), (2, 2)):
    table = schedules.pipedream(len(replicas), 24, replicas=replicas)
    depth = [math.ceil(sum(replicas[s:]) / n) for s, n in enumerate(replicas)]
    assert peaks(table) == list(
      itertools.chain.from_iterable(
        [d] * n for d, n in zip(depth, replicas, strict=True)
      )
    )
    first = np.cumsum([0, *replicas])
    for task in table.tasks:
      replica = task.microbatch % replicas[task.stage]
      assert task.device == first[task.stage] + replica


@pytest.mark.parametrize("p, every", [(1, 1), (2, 2), (4, 4), (4, 6), (3, 5)])
def test_2bw_closed_forms(p, every):
  table = schedules.pipedream_2bw(p, 4 * every, every=every)
  facts = analyze.analyze(table, weights="2bw")
  assert (facts.staleness.forward[:, every:] == 1).all()
  assert not facts.staleness.forward[:, :every].any()
  assert facts.weight_versions.tolist() == [2] * p
  assert max(facts.peak_activations) <= p
  longer = schedules.pipedream_2bw(p, 6 * every, every=every)
  assert makespan(longer) - makespan(table) == 2 * every * 3


@pytest.mark.parametrize("p", [1, 3, 4])
def test_stale_has_the_delay_of_kosson(p):
  table = schedules.stale(p, 6 * p)
  found = analyze.staleness(table, "stash").forward[:, 2 * p :]
  delay = 2 * (p - 1 - np.arange(p)[:, None])
  np.testing.assert_array_equal(found, np.broadcast_to(delay, found.shape))
  # With the newest weights in the backward, only the forward is stale.
  latest = analyze.staleness(table, "latest")
  np.testing.assert_array_equal(latest.forward[:, 2 * p :], found)
  assert not latest.backward.any()


@pytest.mark.parametrize("every", [1, 2, 5])
def test_pipemare_has_its_delay_on_average(every):
  p = 4
  table = schedules.pipemare(p, 20 * every, every=every)
  # (2 (P - i) + 1) / N for i from 1, and none on the way back.
  found = analyze.staleness(table, "latest")
  exact = (2 * (p - np.arange(1, p + 1)) + 1) / every
  np.testing.assert_allclose(found.forward[:, 10 * every :].mean(1), exact)
  assert not found.backward.any()


def test_ftpipe_holds_what_its_depth_allows():
  devices = (0, 1, 2, 3, 0, 2, 1)
  for depth in (None, (3, 3, 2, 2, 2, 1, 0)):
    for supremum in (None, 1, 3):
      table = schedules.ftpipe(
        devices, 12, stage_depth=depth, supremum=supremum
      )
      allowed = depth or range(7)[::-1]
      first = max(allowed) + 1
      less = first - min(first, (supremum or 99) - 1)
      for stage in range(7):
        mine = table.stage == stage
        change = np.where(table.action[mine] == "F", 1, -1)
        most = max(allowed[stage] - less, 0) + 1
        assert min(most, 2) <= np.cumsum(change).max() <= most
      assert table.places() == [[d] for d in devices]


@pytest.mark.parametrize(
  "supremum, depths",
  [
    (4, [2, 1, 0, 0, 0, 0, 0, 0]),
    (8, [6, 5, 4, 3, 2, 1, 0, 0]),
    (9, [7, 6, 5, 4, 3, 2, 1, 0]),
    (100, [7, 6, 5, 4, 3, 2, 1, 0]),
    (1, [0, 0, 0, 0, 0, 0, 0, 0]),
  ],
)
def test_ftpipe_supremum_lowers_the_depth_of_the_first_stage(supremum, depths):
  """Of the released code's virtual_stages_1f1b: min(P, sup - 1) - 1 at the
  first stage, one less for each next, not below 0."""
  table = schedules.ftpipe(range(8), 24, supremum=supremum)
  stale = analyze.staleness(table, "stash").forward
  assert stale[:, 8:16].max(1).tolist() == depths
  assert analyze.in_flight(table).tolist() == [d + 1 for d in depths]


# Schedules that must agree.


def same_rows(table, other):
  return rows(table) == rows(other)


def test_what_coincides():
  make = schedules
  assert same_rows(make.ftpipe(range(4), 9), make.pipedream(4, 9))
  assert same_rows(make.pipedream_2bw(3, 9), make.pipedream(3, 9))
  assert same_rows(make.pipedream(3, 9), make.one_f_one_b(3, 9))
  assert same_rows(make.interleaved(3, 1, 7), make.one_f_one_b(3, 7))
  assert same_rows(make.interleaved(3, 1, 7, group=2), make.one_f_one_b(3, 7))
  assert same_rows(make.breadth_first(3, 1, 7), make.gpipe(3, 7))
  assert same_rows(
    make.pipedream(3, 7, replicas=(1, 1, 1)), make.pipedream(3, 7)
  )
  whole = make.interleaved(3, 2, 7, group=7)
  assert peaks(whole) > peaks(make.interleaved(3, 2, 7))


def test_zero_bubble_is_as_good_as_the_named_ones():
  straight = list(range(4))
  vee = [*straight, *straight[::-1]]
  for f, i, w in TIMES:
    times = {"forward": f, "input": i, "weight": w, "transfer": 0.25}
    for named, devices, memory in (
      *((schedules.zb_h1, straight, 4), (schedules.zb_h2, straight, 7)),
      (schedules.v_min, vee, 6),
    ):
      costs = analyze.costs(len(devices), **times)
      table = schedules.zero_bubble(
        devices, 10, max_activations=memory, costs=costs
      )
      best = engaged(named(4, 10, costs=costs), costs)
      if devices is straight:
        assert engaged(table, costs) <= best + 1e-9
      assert max(peaks(table)) <= memory


def test_unequal_costs_never_make_a_table_longer_than_its_equal_times_order():
  # 515 were returned for ZB-V, whose order for F = I = W takes 472.
  costs = analyze.costs(8, forward=10, input=11, weight=7)
  assert engaged(schedules.zb_v(4, 8), costs) == 472 - 448
  assert engaged(schedules.zb_v(4, 8, costs=costs), costs) <= 472 - 448
  for times in ((15, 13, 11), (5, 14, 5), (9, 12, 15), (12, 11, 7)):
    f, i, w = times
    costs = analyze.costs(8, forward=f, input=i, weight=w, transfer=0.5)
    for maker in (schedules.zb_v, schedules.v_half, schedules.v_min):
      found = engaged(maker(4, 7, costs=costs), costs)
      assert found <= engaged(maker(4, 7), costs)


def test_more_memory_is_less_bubble():
  devices = list(range(6))
  found = [
    engaged(schedules.zero_bubble(devices, 18, max_activations=memory))
    for memory in (1, 2, 4, 6, 11)
  ]
  assert found == sorted(found, reverse=True)
  assert found[0] > found[-1] == 0


def test_zero_bubble_heeds_each_device_and_measured_times():
  devices = [0, 0, 1, 2, 1]
  costs = analyze.costs(
    5,
    forward=(1, 2, 0.5, 1, 1),
    input=(1.5, 2, 0.7, 1, 2),
    weight=(0.5, 1, 0.5, 1, 1),
    transfer=(0, 0.3, 0.1, 0.2),
  )
  table = schedules.zero_bubble(
    devices, 9, max_activations=(4, 2, 3), costs=costs
  )
  facts = analyze.analyze(table, costs)
  assert (facts.peak_activations <= (4, 2, 3)).all()
  slow = analyze.costs(5)  # the times that it was not made for
  other = schedules.zero_bubble(
    devices, 9, max_activations=(4, 2, 3), costs=slow
  )
  assert engaged(table, costs) <= engaged(other, costs)


def test_large_tables_take_the_first_way():
  # More than 20,000 tasks: no trials, and the closed form all the same.
  table = schedules.zb_h1(16, 430)
  assert len(table.time) > 20_000
  np.testing.assert_allclose(bubbles(table), 15)


# Any size.

SMALL = st.integers(1, 5)
MANY = st.integers(1, 12)
TIME = st.sampled_from([0.5, 0.75, 1.0, 1.5, 2.0, 3.1])


@st.composite
def some_costs(draw, stages):
  def column(count):
    return draw(st.lists(TIME, min_size=count, max_size=count))

  return analyze.costs(
    stages,
    **{name: column(stages) for name in ("forward", "input", "weight")},
    transfer=draw(st.sampled_from([0.0, 0.25, 1.0])),
  )


@st.composite
def some_devices(draw):
  """Devices of stages, in which all numbers occur."""
  count = draw(SMALL)
  more = draw(st.lists(st.integers(0, count - 1), max_size=4))
  return draw(st.permutations([*range(count), *more]))


def check_rules(table, *, memory=None):
  """Complete, without deadlock, within its memory, the same when read again."""
  validate.validate(table)
  held = validate.in_flight(table)
  if memory is not None:
    for device in range(table.devices):
      assert held[table.device == device].max() <= memory[device]
  assert table_lib.to_text(table)
  for write, read in (
    (table_lib.to_text, table_lib.from_text),
    (table_lib.to_csv, table_lib.from_csv),
    (table_lib.to_json, table_lib.from_json),
  ):
    again = read(write(table))
    for column, other in zip(again, table, strict=True):
      np.testing.assert_array_equal(column, other)


BATCHES = st.integers(1, 2)


EVEN = st.sampled_from([2, 4, 6])
BACKWARDS_REVERSED = functools.partial(schedules.gpipe, reverse=True)
# Makers, their sizes, and what devices hold at the most.
ANY = {
  schedules.gpipe: (st.tuples(SMALL, MANY), lambda p, m: [m] * p),
  BACKWARDS_REVERSED: (st.tuples(SMALL, MANY), lambda p, m: [m] * p),
  schedules.one_f_one_b: (st.tuples(SMALL, MANY), lambda p, m: range(p, 0, -1)),
  schedules.breadth_first: (st.tuples(SMALL, st.integers(1, 3), MANY),
    lambda p, v, m: [m * v] * p),
  schedules.chimera: (st.tuples(EVEN, st.integers(1, 20)),
    lambda p, m: [p] * p),
  schedules.dualpipe: (
    st.tuples(EVEN, st.integers(0, 4)).map(lambda x: (x[0], 2 * sum(x))),
    lambda p, m: [p + 1] * p),
  schedules.dualpipe_v: (
    st.tuples(SMALL, st.integers(0, 5)).map(lambda x: (x[0], x[0] + sum(x))),
    lambda p, m: [2 * p + 1] * p),
}


@pytest.mark.parametrize("maker", ANY, ids=range(len(ANY)))
@given(st.data(), BATCHES)
@quick
def test_any_size_can_be_run(maker, data, batches):
  sizes, memory = ANY[maker]
  size = data.draw(sizes)
  check_rules(maker(*size, batches=batches), memory=memory(*size))


@given(SMALL, st.integers(1, 4), MANY, st.integers(1, 9), BATCHES)
@quick
def test_any_interleaved(p, v, m, group, batches):
  table = schedules.interleaved(p, v, m, group=group, batches=batches)
  width = max(group, p)
  ahead = [2 * (p - 1 - d) + 1 for d in range(p)]
  check_rules(table, memory=[(v - 1) * width + more for more in ahead])
  assert table.places() == [[s % p] for s in range(p * v)]


def test_interleaved_of_all_small_sizes():
  # Short last groups deadlock in Megatron's order, so try them all.
  for p, v, m, group in itertools.product(
    (2, 3, 5), (2, 3), (1, 2, 3, 5, 8, 9), (1, 2, 3, 4, 5)
  ):
    table = schedules.interleaved(p, v, m, group=group)
    assert len(table.time) == 2 * p * v * m


@given(st.data(), SMALL, MANY, BATCHES)
@quick
def test_any_zero_bubble_of_a_straight_pipeline(data, p, m, batches):
  costs = data.draw(some_costs(p))
  for maker, most in ((schedules.zb_h1, p), (schedules.zb_h2, 2 * p - 1)):
    check_rules(maker(p, m, costs=costs, batches=batches), memory=[most] * p)


@given(st.data(), SMALL, MANY, BATCHES)
@quick
def test_any_zero_bubble_of_a_v(data, p, m, batches):
  costs = data.draw(some_costs(2 * p))
  for maker, most in (
    *((schedules.zb_v, 2 * p), (schedules.v_half, 2 * ((p + 2) // 2))),
    (schedules.v_min, 2 * ((p + 4) // 3)),
  ):
    check_rules(maker(p, m, costs=costs, batches=batches), memory=[most] * p)


@given(st.data(), st.integers(1, 4), st.integers(1, 7), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=12)
def test_no_schedule_with_no_more_memory_is_shorter(data, p, m, vee):
  stages = 2 * p if vee else p
  costs = data.draw(some_costs(stages))
  if data.draw(st.booleans()):  # the same for all stages
    same = [np.full(stages, column[0]) for column in costs[:4]]
    costs = analyze.Costs(*same, *costs[4:])
  devices = [*range(p), *range(p)[::-1]] if vee else list(range(p))
  names = ("zb_v", "v_half", "v_min") if vee else ("zb_h1", "zb_h2")
  limits = (2 * p, 2 * ((p + 2) // 2), 2 * ((p + 4) // 3)) if vee else (
    *(p, 2 * p - 1),
  )
  found = [
    (schedules.SCHEDULES[name](p, m, costs=costs), limit)
    for name, limit in zip(names, limits, strict=True)
  ]
  for most in data.draw(st.sets(st.integers(1 + vee, 2 * p), max_size=2)):
    table = schedules.zero_bubble(
      devices, m, max_activations=most, costs=costs
    )
    found.append((table, most))
  others = [table for table, _ in found]
  others += [schedules.SCHEDULES[name](p, m) for name in names]
  if not vee:
    others += [schedules.gpipe(p, m), schedules.one_f_one_b(p, m)]
  elif m >= 2 * p > 2:
    others.append(schedules.dualpipe_v(p, m))
  for (table, limit), other in itertools.product(found, others):
    if max(peaks(other)) <= limit:
      assert engaged(table, costs) <= engaged(other, costs) + 1e-9


def test_v_patterns_fit_their_memory_for_all_sizes():
  for p, maker in itertools.product(
    range(1, 12), (schedules.v_half, schedules.v_min, schedules.zb_v)
  ):
    assert maker(p, 2 * p + 1).devices == p


@given(st.data(), some_devices(), MANY, st.integers(0, 4))
@quick
def test_any_zero_bubble(data, devices, m, more):
  costs = data.draw(some_costs(len(devices)))
  # As little as it can do with, and a little more.
  limits = [devices.count(d) + more for d in range(max(devices) + 1)]
  table = schedules.zero_bubble(devices, m, max_activations=limits, costs=costs)
  check_rules(table, memory=limits)
  assert table.places() == [[d] for d in devices]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 9))
@quick
def test_any_pipedream(replicas, more):
  m = max(replicas) + more
  table = schedules.pipedream(len(replicas), m, replicas=replicas)
  memory = [
    math.ceil(sum(replicas[s:]) / n)
    for s, n in enumerate(replicas)
    for _ in range(n)
  ]
  check_rules(table, memory=memory)


@given(SMALL, st.integers(1, 4), st.integers(0, 3))
@quick
def test_any_asynchronous(p, updates, more):
  every = p + more
  for maker in (schedules.pipedream_2bw, schedules.stale, schedules.pipemare):
    table = maker(p, updates * every, every=every)
    # PipeMare's next forward begins in the slot of a backward.
    first = 2 if maker is schedules.pipemare else 1
    check_rules(table, memory=[2 * (p - 1 - s) + first for s in range(p)])


@given(st.data(), some_devices(), MANY)
@quick
def test_any_ftpipe(data, devices, m):
  count = len(devices)
  depth = data.draw(
    st.none() | st.lists(st.integers(0, 4), min_size=count, max_size=count)
  )
  costs = data.draw(st.none() | some_costs(count))
  table = schedules.ftpipe(devices, m, stage_depth=depth, costs=costs)
  memory = [0] * table.devices
  for stage, device in enumerate(devices):
    most = count - 1 - stage if depth is None else depth[stage]
    memory[device] += most + 1
  check_rules(table, memory=memory)


# Rules of one's own.


def alternate(devices):
  """1F1B as a rule: of a straight pipeline."""

  def rule(device, state):
    if state.backward[device]:
      return state.first("B")
    if state.in_flight[device] < devices - device:
      return state.first("F")
    return None

  return rule


def test_1f1b_as_a_rule():
  costs = analyze.costs(4, backward=1.0)
  for batches in (1, 3):
    table = schedules.custom(
      alternate(4),
      devices=range(4),
      microbatches=6 * batches,
      every=6,
      costs=costs,
    )
    other = schedules.one_f_one_b(4, 6, batches=batches)
    assert text(table) == text(other)
    facts = analyze.analyze(table, costs)
    # The time that a rule sees is the time of the table.
    np.testing.assert_allclose(facts.timing.start, table.time)


def test_a_rule_sees_time_and_what_is_coming():
  seen = []

  def rule(device, state):
    if device == 1:
      seen.append((state.time, state.soon, state.first("F")))
    return state.first("B") or state.first("F")

  costs = analyze.costs(2, forward=2.0, backward=3.0, transfer=0.5)
  schedules.custom(rule, devices=(0, 1), microbatches=2, costs=costs)
  # The forwards come half a unit after their ends at 2 and 4.
  assert seen[0] == (0.0, 2.5, None)
  assert seen[1] == (2.5, 4.5, ("F", 1, 0))
  assert seen[-1] == (12.5, math.inf, None)


def greedy(device, state):
  del device
  pair = state.first("F"), state.first("B")
  if all(pair):
    return pair
  return pair[1] or pair[0]


@pytest.mark.parametrize(
  "devices, every, flush",
  [
    ((0, 1, 2), 6, True),
    ((0, 1, 2), 2, True),
    (((0, 1), 2), 2, True),
    (((0, 1), 2, (3, 4)), 3, True),
    ((0, (2, 1), 0), 1, False),
  ],
)
def test_time_for_a_rule_is_the_time_of_the_table(devices, every, flush):
  stages = len(devices)
  costs = analyze.costs(
    stages,
    forward=(0.1, 0.2, 0.7)[:stages],
    backward=(0.3, 0.1, 0.6)[:stages],
    transfer=(0.2, 0.1)[: stages - 1],
    overlap=0.4,
  )
  began, asked = {}, set()

  def rule(device, state):
    answer = greedy(device, state)
    asked.add(state.time)
    steps = [answer] if answer and isinstance(answer[0], str) else answer
    for step in steps or ():
      began[step] = state.time
    return answer

  table = schedules.custom(
    rule,
    devices=devices,
    microbatches=6,
    every=every,
    flush=flush,
    costs=costs,
  )
  start = analyze.times(table, costs).start.tolist()
  for task, when in zip(table.tasks, start, strict=True):
    step = task.action, task.stage, task.microbatch
    assert began[step] == pytest.approx(when, abs=1e-12)
  # 0.1 + 0.2 is no other time than 0.3.
  assert np.diff(sorted(asked)).min() > 1e-9


def with_own_work():
  work = {0: 2, 1: 1}

  def rule(device, state):
    step = state.first("B") or alternate(2)(device, state)
    if step is None and work[device]:
      work[device] -= 1
      return "K", -1, -1
    return step

  return rule


def last_that_came(device, state):
  if state.backward[device]:
    return "B", device, state.backward[device][-1]
  if state.forward[device]:
    return "F", device, state.forward[device][-1]
  return None


# A rule of two stages, the costs, and its table of three microbatches.
RULES = {
  "own actions": (with_own_work(), None, """
    0 | F0 F1 K  K  B0 F2 B1 .  B2
    1 | K  F0 B0 F1 B1 .  F2 B2 .
  """),
  "last that came": (last_that_came, analyze.costs(2, backward=1.0), """
    0 | F2 F1 F0 B2 .  B0 .  B1
    1 | .  F2 B2 F0 B0 F1 B1 .
  """),
}


@pytest.mark.parametrize("name", RULES)
def test_a_table_is_as_its_rule_says(name):
  rule, costs, picture = RULES[name]
  table = schedules.custom(rule, devices=(0, 1), microbatches=3, costs=costs)
  assert text(table) == lines(picture)
  check_rules(table)


def test_a_rule_may_split_backwards_and_overlap():
  def rule(device, state):
    del device
    forward, weight = state.first("F"), state.first("W")
    backward = state.first("I")
    if forward and backward:
      return forward, backward
    return backward or forward or weight

  costs = analyze.costs(2, overlap=1.5)
  table = schedules.custom(rule, devices=(0, 1), microbatches=4, costs=costs)
  assert "&" in table_lib.to_text(table)
  assert set(table.action) == {"F", "I", "W"}
  check_rules(table)


def test_a_rule_on_replicas():
  def rule(device, state):
    del device
    return state.first("B") or state.first("F")

  table = schedules.custom(
    rule, devices=((0, 1), 2), microbatches=6, every=2, flush=True
  )
  assert table.places() == [[0, 1], [2]]
  first = table.stage == 0
  np.testing.assert_array_equal(
    table.device[first], table.microbatch[first] % 2
  )
  check_rules(table)


@pytest.mark.parametrize(
  "rule, words",
  [
    (lambda device, state: None, "no rule names a step, and 8 tasks are left"),
    (lambda device, state: ("B", device, 0),
     r"device 0 does \('B', 0, 0\) at 0, which is not ready"),
    (lambda device, state: state.first("F") or ("F", 5, 0),
     r"device 1 does \('F', 5, 0\) at 0"),
    (lambda device, state: ("K", -1, -1), "own actions never end"),
    (lambda device, state: state.first("F"), r"0 \| F0 F1 \.\n1 \| \.  F0 F1"),
  ],
)
def test_rules_that_cannot_be_obeyed(rule, words):
  with pytest.raises(table_lib.ScheduleError, match=words):
    schedules.custom(rule, devices=(0, 1), microbatches=2)


def test_own_actions_take_time():
  costs = analyze.costs(1)
  words = r"no time for the action 'K': .* own=.'K': 1."
  with pytest.raises(ValueError, match=words):
    schedules.custom(
      lambda device, state: ("K", -1, -1),
      devices=[0],
      microbatches=1,
      costs=costs,
    )


def test_fill_puts_own_actions_into_idle_slots():
  table = schedules.one_f_one_b(2, 2)
  filled = schedules.fill(table, {0: ["K", "L"], 1: ["K"]})
  picture = """
    0 | F0 F1 K  B0 L  B1
    1 | K  F0 B0 F1 B1 .
  """
  assert text(filled) == lines(picture)
  check_rules(filled)
  kept = np.isin(filled.action, table_lib.KNOWN)
  for column, other in zip(filled[1:6], table[1:6], strict=True):
    np.testing.assert_array_equal(column[kept], other)
  assert text(schedules.fill(table, {})) == text(table)


# Refusals.


# Arguments that a schedule takes, and of which it refuses one.
TAKEN = {
  "gpipe": dict(stages=2, microbatches=3),
  "one_f_one_b": dict(stages=2, microbatches=2),
  "interleaved": dict(devices=2, chunks=2, microbatches=4),
  "breadth_first": dict(devices=2, chunks=2, microbatches=4),
  "chimera": dict(stages=4, microbatches=4),
  "dualpipe": dict(stages=4, microbatches=20),
  "dualpipe_v": dict(devices=4, microbatches=8),
  "zb_h1": dict(stages=3, microbatches=3),
  "zb_v": dict(devices=2, microbatches=2),
  "zero_bubble": dict(devices=[0, 1], microbatches=3, max_activations=2),
  "pipedream": dict(stages=2, microbatches=3),
  "pipedream_2bw": dict(stages=4, microbatches=8),
  "stale": dict(stages=2, microbatches=2),
  "ftpipe": dict(devices=[0, 1], microbatches=2),
  "custom": dict(rule=alternate(1), devices=[0], microbatches=3),
}
REFUSED = [
  ("gpipe", dict(stages=0), "stages must be a positive"),
  ("gpipe", dict(microbatches=1.5), "microbatches must be .*1.5"),
  ("gpipe", dict(reverse="false"), "reverse must be True or False, not"),
  ("gpipe", dict(stages=10**20), "would have 300,000.* forwards .* lower one"),
  ("one_f_one_b", dict(stages=True), "stages .*True"),
  ("one_f_one_b", dict(batches=0), "batches must be"),
  ("interleaved", dict(group=0), "group must be"),
  ("breadth_first", dict(chunks=0), "chunks must be"),
  ("chimera", dict(stages=3), "even.*not 3; use 4"),
  ("dualpipe", dict(stages=5), "even.*not 5; use 6"),
  ("dualpipe", dict(microbatches=9), "even.*not 9; use 10"),
  ("dualpipe", dict(microbatches=6), "needs 8 .* not 6; use"),
  ("dualpipe_v", dict(microbatches=7), "needs 8 .* not 7; use"),
  ("zb_h1", dict(stages=0), "stages must be"),
  ("zb_h1", dict(costs=analyze.costs(2)), "of 2 stages, and there are 3"),
  ("zb_h1", dict(cost=None), "takes no argument 'cost'; did you mean 'costs'"),
  ("zb_v", dict(microbatches=0), "microbatches must be"),
  ("zero_bubble",
   dict(devices=[0, 1, 0], max_activations=1),
   "device 0 has 2 stages .*max_activations=1; it needs 2"),
  ("zero_bubble", dict(max_activations=(1, 2, 3)), "one number, or 2"),
  ("zero_bubble", dict(max_activations=2.5), "one number, or 2, .* not 2.5"),
  ("zero_bubble", dict(devices=[0, (1, 2)]), "no replicas"),
  ("zero_bubble", dict(microbatches=1.5), "a positive whole number, not 1.5"),
  ("zero_bubble", dict(microbatches=10**7), "would have 20,000,000 forwards"),
  ("pipedream", dict(replicas=(1,)), "replicas must be 2 numbers"),
  ("pipedream", dict(replicas=(1, 0)), "replicas must be a positive"),
  ("pipedream", dict(replicas=2), "2 numbers, one for each stage, not 2"),
  ("pipedream",
   dict(replicas=(1, 4)),
   "3 microbatches leave some of 4 replicas without work; use 4 at least"),
  ("pipedream",
   dict(microbatches=5, every=2),
   "5 microbatches are not a whole number of updates of 2; use 4 or 6"),
  ("pipedream_2bw", dict(microbatches=9, every=3), "at least 4 .* not every=3"),
  ("pipedream_2bw", dict(microbatches=2), "use 4$"),
  ("stale", dict(every=0), "every must be"),
  ("ftpipe", dict(devices="01"), "devices must be .* '01'"),
  ("ftpipe", dict(devices=[0, 2]), r"all from 0, .*\[0, 2"),
  ("ftpipe", dict(devices=[]), "name all from 0"),
  ("ftpipe", dict(devices=3), "devices must be"),
  ("ftpipe", dict(devices=[(0, 1)]), "no replicas"),
  ("ftpipe", dict(stage_depth=1), "must be 2 whole numbers .* not 1"),
  ("ftpipe", dict(stage_depth=(1, -1)), "stage_depth must be 2 whole numbers"),
  ("ftpipe", dict(supremum=0), "supremum must be"),
  ("custom", dict(flush="no"), "flush must be True or False, not 'no'"),
  ("custom", dict(every=2), "use 2 or 4"),
  ("gpip", {}, "unknown schedule 'gpip'; did you mean 'gpipe'"),
]


def build_refused(case):
  name, options = case
  schedules.build(name, **{**TAKEN.get(name, {}), **options})


test_refusals_show_the_value_and_the_remedy = kit.refuses(
  [((name, options), words) for name, options, words in REFUSED], build_refused
)


def test_an_argument_may_be_missing():
  with pytest.raises(ValueError, match="needs the argument 'microbatches'"):
    schedules.build("gpipe", stages=2)


test_fill_refuses = kit.refuses(
  [
    ({2: ["K"]}, "no device 2; they are 0 to 1"),
    ({0: ["K"] * 3}, "2 idle slots for 3 actions; leave out 1"),
    ({0: ["F"]}, "'F' is not an own action"),
  ],
  lambda actions: schedules.fill(schedules.one_f_one_b(2, 2), actions),
)
