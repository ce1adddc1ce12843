"""Tables laid out and timed slot by slot are those made task by task."""

import numpy as np
import pytest

from asgd.pipeline import analyze, by_slot, schedules, table
from asgd.pipeline.table import ScheduleError

EVERY = 3


@pytest.fixture(autouse=True)
def of_any_width(monkeypatch):
  monkeypatch.setattr(by_slot, "WIDE", 1)


def drawn_orders(rng):
  """Orders of each device: of a schedule, and mostly broken somewhere."""
  name = rng.choice(["gpipe", "one_f_one_b", "interleaved", "pipedream"])
  name = rng.choice([name, "zb_h1", "dualpipe_v", "replicas", "own"])
  if name == "interleaved":
    made = schedules.interleaved(3, 2, EVERY, batches=2)
  elif name == "dualpipe_v":
    made = schedules.dualpipe_v(2, 4)
  elif name == "pipedream":
    made = schedules.pipedream(3, 4 * EVERY, every=EVERY)
  elif name == "replicas":
    made = schedules.pipedream(3, 2 * EVERY, replicas=(1, 2, 1), every=EVERY)
  elif name == "own":
    made = schedules.fill(schedules.gpipe(4, EVERY), {1: ["sync", "K"]})
  else:
    made = getattr(schedules, name)(4, EVERY, batches=int(rng.integers(1, 4)))
  orders = [{} for _ in range(made.devices)]
  for slot, device, stage, microbatch, action in made.tasks:
    orders[device].setdefault(slot, []).append((action, stage, microbatch))
  orders = [
    [tuple(block) if len(block) > 1 else block[0] for block in order.values()]
    for order in orders
  ]
  for _ in range(rng.integers(3)):  # 0: as it is
    order = orders[rng.integers(len(orders))]
    if len(order) < 2:
      continue
    a, b = rng.integers(len(order), size=2)
    match rng.integers(5):
      case 0:
        order[a], order[b] = order[b], order[a]
      case 1:
        del order[a]
      case 2:
        order.insert(a, order[b])  # twice
      case 3:
        order[a] = "B", int(rng.integers(-1, 6)), int(rng.integers(-1, 20))
      case 4:
        order[a] = "W", int(rng.choice([0, 10**9])), int(rng.integers(2))
  return orders, bool(rng.integers(2))


def result(make, *args, **options):
  try:
    return make(*args, **options)
  except (ScheduleError, IndexError) as error:
    return str(error)


def test_drawn_orders_lead_to_the_same_table_or_the_same_error():
  came_to = {"text": 0, "table": 0, "slot by slot": 0}
  for seed in range(300):
    orders, flush = drawn_orders(np.random.default_rng(seed))
    options = {"every": EVERY, "flush": flush}
    found = result(table.lay_out, "drawn", orders, **options)
    wanted = result(table.lay_out_by_task, "drawn", orders, **options)
    columns = by_slot.lay_out(orders, table.KNOWN, table.NAME, **options)
    came_to["slot by slot"] += columns is not None
    if isinstance(wanted, str):
      came_to["text"] += 1
      assert found == wanted
      continue
    came_to["table"] += 1
    assert found[:1] + found[6:] == wanted[:1] + wanted[6:]
    for mine, theirs in zip(found[1:6], wanted[1:6], strict=True):
      np.testing.assert_array_equal(mine, theirs)
      assert mine.dtype == theirs.dtype
  assert min(came_to.values()) > 30, came_to


MADE = {
  "batches": schedules.one_f_one_b(4, 3, batches=3),
  "zero bubble": schedules.zb_v(3, 6, batches=2),
  "blocks": schedules.dualpipe_v(3, 6, batches=2),
  "replicas": schedules.pipedream(3, 12, replicas=(2, 3, 1), every=3),
  "chunks": schedules.interleaved(3, 2, 6, batches=2),
  "own": schedules.fill(schedules.gpipe(3, 2, batches=2), {0: ["K", "K"]}),
}


@pytest.mark.parametrize("overlap", [None, 2.5])
@pytest.mark.parametrize("name", MADE)
def test_times_are_the_same_to_the_bit(name, overlap, monkeypatch):
  made, rng = MADE[name], np.random.default_rng(len(name))
  s = made.stages
  cost = analyze.costs(
    s,
    **{key: rng.random(s) for key in ("forward", "input", "weight")},
    transfer=rng.random(s - 1),
    transfer_back=rng.random(s - 1),
    overlap=overlap,
    own={"K": 0.3},
  )
  found = analyze.times(made, cost)
  monkeypatch.setattr(by_slot, "WIDE", 100)
  wanted = analyze.times(made, cost)
  assert found.end.max() > 0
  for mine, theirs in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(mine, theirs)


def test_narrow_tables_are_made_task_by_task(monkeypatch):
  monkeypatch.setattr(by_slot, "WIDE", 3)
  options = {"every": 1, "flush": True}
  for devices in (2, 3):
    orders = [[("F", d, 0), ("B", d, 0)] for d in range(devices)]
    made = by_slot.lay_out(orders, table.KNOWN, table.NAME, **options)
    assert (made is None) == (devices < 3)
