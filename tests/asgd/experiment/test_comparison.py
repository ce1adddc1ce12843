"""A live cell beside its simulations: quantities, tables and pictures."""

import json
import shutil
from pathlib import Path

import kit
import numpy as np
import pytest

from asgd.experiment import comparison, comparison_figure

LIVE = Path(__file__).parents[2] / "golden" / "live"

def pair(name="a-n2-s0", factor=2.0):
  """A live run, and simulations that take `factor` times its time."""
  time = np.arange(1.0, 11)
  loss = [9.0, 9, 8, 7, 6, 5, 4, 3, 2, 1]
  live = kit.outcome(time, loss, [0, 1] * 5, [0, 1] + [1] * 7 + [3])
  records = live.records._replace(time=factor * time)
  other = live._replace(records=records, accuracy=1.0)
  runs = {"live": live, "in order": other, "drawn": other}
  return comparison.LiveComparison(name, runs, 2, None)


RECIPES = {
  "server": {"recipe": "dana_zero"},
  "shards": {"recipe": "asgd", "server": {"shards": 2}},
  "peers": {"recipe": "d_psgd"},
  "tables": {"recipe": "table", "shards": 2},
  "sandblaster": {"recipe": "sandblaster", "portions": 6, "shards": 2},
}


@pytest.mark.parametrize("protocol", RECIPES)
def test_a_live_cell_is_compared_whatever_its_protocol(protocol, tmp_path):
  run, sized = RECIPES[protocol], {"evaluations": 1, "epochs": 1.0}
  place, result, _ = kit.train_live(tmp_path, runs={"a": run}, **sized)
  both = comparison.compare(place)
  rows = {row["quantity"]: row for row in comparison.quantities(both)}
  assert rows["messages"]["live"] == result["messages"]
  assert {row["worker"] for row in both.jobs} == {0, 1, 2}
  if protocol in ("server", "shards"):
    assert list(both.runs) == ["live", "in order", "drawn"]
    # The simulations have one shard: padding differs, not the parameters.
    assert rows["MB up"]["in order, ratio"] == pytest.approx(1, rel=0.01)
    return
  assert list(both.runs) == ["live", "replayed"]
  assert {row["replayed, ratio"] for row in rows.values()} <= {1, np.nan}
  assert both.replay.endswith("; the same records")
  live = both.runs["live"].records
  loss = np.where(np.arange(len(live.loss)) == 5, -1.0, live.loss)
  said = comparison.first_difference(live, live._replace(loss=loss))
  where = f"loss of worker {live.worker[5]}, job {live.job[5]} is"
  assert said == f"{where} {live.loss[5]}, replayed -1.0"
  message = "no server decides the order of jobs. Drop the flag, or name two"
  with pytest.raises(ValueError, match=message):
    comparison.compare(place, durations_of=place)


def test_durations_of_a_users_recipe_of_peers_are_refused(
  tmp_path, monkeypatch
):
  dense, peers = (
    shutil.copytree(LIVE / name, tmp_path / name)
    for name in ("dense", "peers_rounds")
  )
  content = json.loads((peers / "cell.json").read_text())
  for run in content["config"]["runs"].values():
    run["recipe"] = "own_module:make"
  (peers / "cell.json").write_text(json.dumps(content))
  # The stored cells have no parameters, and other names.
  monkeypatch.setattr(
    comparison.folders, "finished_result", lambda *_, **options: None
  )
  with pytest.raises(ValueError, match="no server decides the order of jobs"):
    comparison.compare(dense, durations_of=peers)


def test_the_table_has_ratios():
  rows = {row["quantity"]: row for row in comparison.quantities(pair())}
  rate = rows["messages/s"]
  assert (rate["live"], rate["in order"]) == (1.0, 0.5)
  assert rate["in order, ratio"] == rate["drawn, ratio"] == 0.5
  assert rows["staleness, mean"]["live"] == 10 / 8
  assert rows["staleness, max"]["drawn"] == 3
  # From 8 to 1, after the second message: 4.5 is the half of the way.
  assert rows["s to loss 4.5 (50 % of the way)"]["live"] == 5
  assert rows["s to loss 4.5 (50 % of the way)"]["drawn"] == 10
  assert rows["s to loss 1.7 (90 % of the way)"]["in order, ratio"] == 2
  assert rows["accuracy %"]["drawn, ratio"] == 2
  text = comparison.table(list(rows.values()))
  assert text.splitlines()[0].split() == [
    *("live", "in", "order", "ratio", "drawn", "ratio")
  ]
  assert text.splitlines()[2].split() == [
    *("messages/s", "1", "0.5", "0.50", "0.5", "0.50")
  ]


def test_what_is_said_of_it():
  both = pair()
  rows = comparison.quantities(both)
  said = comparison.describe(both, rows, "x/cells/b")
  assert said.startswith("\na-n2-s0: live, and simulated with its durations")
  assert ", with the durations of x/cells/b\n" in said
  assert comparison.table(rows) in said
  assert "note: 2 of 10 messages arrived before each worker" in said
  from_start = both._replace(first_messages=0)
  assert "note" not in comparison.describe(from_start, rows)


def test_what_is_not_known_is_a_dash():
  both = pair()
  live = both.runs["live"]._replace(accuracy=float("nan"))
  both = both._replace(runs={**both.runs, "live": live})
  text = comparison.table(comparison.quantities(both))
  assert text.splitlines()[-1].split() == [
    *("accuracy", "%", "-", "100", "-", "100", "-")
  ]


def test_the_numbers_of_the_picture():
  points = comparison_figure.points(pair())

  def chosen(panel, kind):
    return [
      (point["x"], point["value"])
      for point in points
      if (point["panel"], point["series"]) == (panel, kind)
    ]

  assert chosen("staleness", "live") == [(0, 0), (1, 7 / 8), (2, 0), (3, 1 / 8)]
  # Bins of 0.4 s, up to the end of the slower run; eight messages in 16 s.
  slow, fast = (chosen("throughput", kind) for kind in ("drawn", "live"))
  assert slow[-1][0] == pytest.approx(15.6)
  assert sum(rate for _, rate in slow) * 0.4 == pytest.approx(8)
  assert fast[-1][0] == pytest.approx(7.6)
  assert chosen("loss", "live")[0] == (1, 8)
  assert chosen("loss", "drawn")[0] == (2, 8)


def test_a_race_is_to_a_loss_that_all_reach():
  slow, fast = pair("slow", 3.0), pair("fast", 0.5)
  loss = comparison.common_loss([slow, fast])
  assert loss == pytest.approx(9 - 0.9 * 8)
  rows = comparison.race([slow, fast], 2.0)
  times = [[row[f"{kind}, seconds"] for kind in slow.runs] for row in rows]
  assert times == [[9, 27, 27], [9, 4.5, 4.5]]
  assert [row["drawn, faster"] for row in rows] == [1, 6]
  lines = comparison.race_table(rows, 2.0).splitlines()
  assert lines[3].split() == [
    *("fast", "1", "2", "2", "9", "4.5", "4.5", "1.00", "6.00", "6.00")
  ]


def test_pictures_are_drawn(tmp_path):
  pytest.importorskip("matplotlib")
  both = pair("a$b")
  comparison_figure.draw(both, tmp_path / "one")
  comparison_figure.draw_losses([both, pair()], 2.0, tmp_path / "two")
  assert {path.name for path in tmp_path.iterdir()} == {
    *("one.png", "one.svg", "one.pdf", "two.png", "two.svg", "two.pdf")
  }
