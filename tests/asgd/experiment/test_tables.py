"""Runs of tables from a config: the reference, stopped and gone on, refused."""

import csv

import jax.numpy as jnp
import kit
import numpy as np
import pytest
from table_kit import train

import asgd
from asgd import base, orders
from asgd.experiment import cell_files, engines, folder
from asgd.experiment.engines import tables
from asgd.experiment.signals import Stopped

pytestmark = pytest.mark.usefixtures("blank_pictures")

FACTORISATION = {
  "name": "asgd.problems.factorisation:matrix_factorisation",
  "rank": 2,
  "generate": {"users": 40, "items": 30, "rank": 2, "ratings": 800},
}
CONFIG = {
  "problem": FACTORISATION,
  "workers": (3,),
  "batch_size": 48,
  "epochs": 12.0,
  "learning_rate": 2.0,
  "evaluations": 3,
  "curvature_checks": 0,
}


def build(config=None, **runs):
  runs = {label: {"recipe": "table", **run} for label, run in runs.items()}
  return kit.build(CONFIG, runs=runs, **(config or {}))


def test_one_worker_is_plain_sgd_on_whole_tables():
  exp = build(
    {"workers": (1,)},
    sgd={"recipe": "asgd"},
    table={"consistency": "ssp", "shards": 3},
  )
  plain, table = train(exp), train(exp, index=1)
  kit.close(table[1], plain[1], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(table[0].loss, plain[0].loss, rtol=1e-3)


def test_a_model_whose_batches_need_all_rows_is_trained_too():
  config = {k: v for k, v in kit.TINY_RUN.items() if k != "runs"}
  config |= {"problem": {"name": None}, "workers": (1,)}
  exp = build(
    config, sgd={"recipe": "asgd", "momentum": 0.0}, table={"shards": 2}
  )
  kit.close(train(exp)[1], train(exp, index=1)[1], rtol=1e-3, atol=1e-5)


def test_all_models_end_where_one_worker_ends():
  longer = {"epochs": 24.0, "evaluations": 1, "learning_rate": 4.0}
  exp = build(
    longer,
    sgd={"recipe": "asgd", "workers": (1,)},
    bsp={"consistency": "bulk_synchronous", "clock_every": 2},
    essp={"consistency": "essp", "compress": "int8"},
  )
  ends = [
    train(exp, index=i)[2][-1]["test_measure"] for i in range(len(exp.cells))
  ]
  assert min(ends) > 0.93
  assert max(ends) - min(ends) < 0.05


def test_a_stopped_cell_goes_on_to_the_same_and_leaves_its_profile(tmp_path):
  exp = build(run={"consistency": "essp", "bound": 2, "clock_every": 2})
  straight = train(exp)
  with pytest.raises(Stopped):
    train(exp, tmp_path, signals=kit.AfterLooks(1))
  on = train(exp, tmp_path)
  for a, b in zip(on[0], straight[0], strict=True):
    assert a.tobytes() == b.tobytes()
  place = tmp_path / "cells" / exp.cells[0].name
  result = folder.finished_result(place)
  assert (result["order"], result["bound"]) == ("essp", 2)
  assert result["bytes_down"] > 0
  texts = {
    name: cell_files.read_file(place, name).decode()
    for name in ("staleness.csv", "trace.csv")
  }
  rows = list(csv.DictReader(texts["staleness.csv"].splitlines()))
  total = sum(int(row["rows"]) for row in rows)
  fresh = sum(int(r["rows"]) for r in rows if r["differential"] == "-1")
  assert result["fresh_reads"] == pytest.approx(fresh / total)
  trace = orders.load(texts["trace.csv"].splitlines(keepends=True))
  assert orders.check(trace) == 3
  assert (trace.action == base.RECEIVE).sum() == result["messages"]


NETWORK = {"latency": 0.125, "port": 20_000.0, "service": 0.01}


def test_a_cell_over_a_network_goes_on_to_the_same(tmp_path):
  run = {"consistency": "essp", "bound": 2, "shards": 2}
  exp = build({"network": NETWORK, "epochs": 4.0}, run=run)
  straight = train(exp)
  with pytest.raises(Stopped):
    train(exp, tmp_path, signals=kit.AfterLooks(1))
  on = train(exp, tmp_path)
  for a, b in zip(on[0], straight[0], strict=True):
    assert a.tobytes() == b.tobytes()
  result = folder.finished_result(tmp_path / "cells" / exp.cells[0].name)
  assert result["throughput"] == pytest.approx(
    result["messages"] / result["simulated_time"]
  )
  assert 0 < result["link_utilisation"] < 1
  assert "the busiest port busy" in tables.describe(result)
  assert on[0].time[-1] > 1.2 * len(on[0].time) / 3  # jobs of 1 in the mean


@pytest.mark.parametrize("rate", [1e6, 1e30])
def test_what_is_not_finite_is_recorded(rate):
  exp = build({"learning_rate": rate, "on_nan": "record"}, run={})
  *_, rows = train(exp)
  assert rows[-1]["diverged"]
  assert np.isnan(rows[-1]["train_loss"])


def train_on_nan(on_nan, folder):
  """Trains a table whose first update is NaN: the derivative of 0 sqrt(0)."""

  def loss(params, batch):
    x, keys = batch
    return jnp.mean(x * 0.0 * jnp.sqrt(params["w"][keys]))

  data = np.ones((8, 1), np.float32), np.arange(8, dtype=np.int32) % 4
  return asgd.simulate(
    *(loss, {"w": jnp.zeros((4, 1))}, data, asgd.table(1.0, workers=2)),
    messages=8,
    batch_size=1,
    on_nan=on_nan,
    folder=folder,
  )


def test_a_first_update_that_is_not_finite_is_recorded_or_named(tmp_path):
  result = train_on_nan("record", tmp_path)
  assert [row["message"] for row in result.evaluations] == [0]
  assert (tmp_path / "report.html").exists()
  line = "the update of key 0 is not finite .* at message 1, .*lower learning_r"
  with pytest.raises(engines.NonFiniteResult, match=line):
    train_on_nan("stop", None)


def test_a_stretch_without_messages_is_summed_up():
  exp = build(run={})
  plan = exp.plan(exp.cells[0])
  engine = tables.TableEngine(
    engines.Context(
      *(exp, exp.cells[0], plan, None, None, lambda unpack: None, (), None)
    )
  )
  assert engine.summary(0, 0)["staleness_max"] == 0


MISTAKES = (
  ({"consistency": "sspp"}, "unknown consistency 'sspp'; did you mean 'ssp'"),
  ({"clock_every": 0}, "runs.run.clock_every must be a positive .*not 0"),
  ({"bound": -1}, "runs.run.bound must be .*, 0 or more, not -1"),
  ({"clip_norm": 1.0}, "clip_norm 1.0 is not for the recipe 'table'"),
  ({"filters": [{"name": "kkt"}]}, "filter 'kkt' needs the argument 'l1'"),
  ({"compress": "dgc"}, "keeps the part of values that it"),
  ({"compress": "sign", "codec": "int8"}, "codec 'int8' and config.compress"),
  ({"codec": {}}, "runs.run.codec must be a name or a dict .* {};"),
  ({"filters": "nosuch"}, "unknown filter 'nosuch'"),
  ({"shards": 10**6}, "runs.run.shards must be at most"),
  ({"gate": {"max_staleness": 2}}, "consistency decides which workers wait"),
  ({"order": {"name": "fixed_delay"}}, "config.order.name 'fixed_delay' is"),
  ({"codec": {"name": "qsgd", "levels": 0}}, "runs.run.codec.levels must be"),
  ({"engine": "ray", "network": NETWORK},
   "config.network.latency 0.125 is not for the recipe 'table'"),
)


test_what_does_not_fit_is_one_line = kit.refuses(
  MISTAKES, lambda run: build(run=run), longest=600
)
