"""Shortening of orders: a case by hand, and what it must keep."""

import pipeline_kit
import pytest

from asgd.pipeline import analyze, schedules, validate
from asgd.pipeline import table as table_lib
from asgd.pipeline.schedules import layout, search

LINE = [(0,), (1,)]
# One unit for each task:
# 0 | F0 F1 .  .  I0 .  I1 W0 W1
# 1 | .  F0 F1 I0 W0 I1 W1
LONG = [
  [(a, 0, int(i)) for a, i in ("F0", "F1", "I0", "I1", "W0", "W1")],
  [(a, 1, int(i)) for a, i in ("F0", "F1", "I0", "W0", "I1", "W1")],
]


def test_a_task_moves_into_the_idle_time_before_it():
  found = search.Gaps(LINE, 2, analyze.costs(2))
  assert found.score(LONG) == (9, 9)
  # Forward in time, W0 of stage 0 goes before I1. Backward in time, W0 of
  # stage 1 goes behind I1, F1 behind I0, and the rest follows.
  score, orders = found.shorten(LONG, (2, 2), 1)
  assert score == (7, 7) == found.score(orders)
  table = layout.valid("short", orders, 2, flush=True)
  assert table_lib.to_text(table).splitlines()[1:] == [
    "0 | F0 F1 .  I0 W0 I1 W1",
    "1 | .  F0 I0 F1 I1 W0 W1",
  ]


def test_shortening_keeps_the_memory():
  # With one activation at a time, nothing can move.
  orders = [
    [(a, stage, i) for i in range(3) for a in "FIW"] for stage in range(2)
  ]
  found = search.Gaps(LINE, 3, analyze.costs(2))
  score, kept = found.shorten(orders, (1, 1), 4)
  assert kept == orders and score == found.score(orders)
  score, moved = found.shorten(orders, (2, 1), 4)
  assert score < found.score(orders)
  table = layout.valid("short", moved, 3, flush=True)
  held = validate.in_flight(table)
  assert held[table.device == 0].max() == 2
  assert held[table.device == 1].max() == 1


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_the_unit_of_time_does_not_matter(scale):
  columns = {"forward": 1.0, "input": 1.1, "weight": 0.7, "transfer": 0.1}
  costs = analyze.costs(6, **columns)
  scaled = analyze.costs(6, **{k: v * scale for k, v in columns.items()})
  table = schedules.v_half(3, 5, costs=costs)
  same = schedules.v_half(3, 5, costs=scaled)
  assert gaps_of(same, scaled) == pytest.approx(
    [scale * time for time in gaps_of(table, costs)]
  )


def gaps_of(table, costs):
  return analyze.analyze(table, costs).idle.tolist()


def test_tasks_that_take_no_time_can_be_run():
  for zero in ("forward", "input", "weight"):
    costs = analyze.costs(6, **{zero: 0.0})
    for maker in (schedules.zb_v, schedules.v_half, schedules.v_min):
      validate.validate(maker(3, 6, costs=costs))


def test_the_search_is_bounded_by_the_size_of_a_table(monkeypatch):
  played = []

  def counted(rule, places, microbatches, *args, **options):
    played.append(3 * len(places) * microbatches)
    return play(rule, places, microbatches, *args, **options)

  play = search.play
  monkeypatch.setattr(search, "play", counted)
  for m in (4, 40, 260):
    costs = analyze.costs(4, forward=3.0)
    schedules.zb_v(2, m, costs=costs)
    # For each limit of memory, 4 orders of equal times and 6 of these costs.
    limits = max(2_000 // (12 * m), 1)
    assert len(played) <= 10 * limits and set(played) == {12 * m}
    played.clear()


def test_a_large_table_tries_its_equal_times_order_too(monkeypatch):
  costs = analyze.costs(8, forward=10, input=11, weight=7)
  places = [(d,) for d in (*range(4), *range(4)[::-1])]
  monkeypatch.setattr(search, "_LARGE", 100)
  table = schedules.zb_v(4, 8, costs=costs)
  orders = [
    [step for block in order for step in block]
    for order in pipeline_kit.orders(table)
  ]
  orders = [[(s.action, s.stage, s.microbatch) for s in o] for o in orders]
  # 448 of work and 24 of waiting, as of the order for F = I = W.
  assert search.Gaps(places, 8, costs).score(orders)[0] == 472
