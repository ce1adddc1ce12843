"""Runs of peers from a config: simulated, on a mesh, stopped and gone on."""

import csv

import kit
import numpy as np
import pytest
from table_kit import train

from asgd import experiment, orders
from asgd.experiment import cell_files, folder, report
from asgd.experiment.engines import traffic
from asgd.experiment.signals import Stopped
from asgd.gossip import topologies
from asgd.pipeline.engine import PIPELINE

ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
RUNS = {
  "ring": {"recipe": "d_psgd", "topology": "ring"},
  "mesh": {"recipe": "d_psgd", "engine": "mesh"},
  "pairs": {"recipe": "ad_psgd", "topology": {"name": "full"}},
  "arrivals": {
    "recipe": "async_threshold_sharing",
    "codec": {"name": "threshold", "tau": 0.01},
  },
  "late": {"recipe": "sgp", "overlap": 2},
  "matchings": {"recipe": "d_psgd", "topology": {"name": "matcha"}},
  "matchings-mesh": {
    "recipe": "d_psgd",
    "topology": {"name": "matcha"},
    "engine": "mesh",
  },
  "late-mesh": {"recipe": "sgp", "overlap": 2, "engine": "mesh"},
  "local": {"recipe": "local_d_psgd", "steps": 2},
  "local-mesh": {
    "recipe": "local_d_psgd",
    "steps": 2,
    "engine": "mesh",
    "axes": {"data": -1, "island": 2},
  },
}
SWAPS = [[[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]]


def build(*labels, **config):
  runs = {label: {**RUNS[label], "momentum": 0.5} for label in labels}
  return kit.tiny(**{"runs": runs, "workers": (4,), **config})


def test_the_mesh_comes_to_what_is_simulated():
  for names in (
    *(("ring", "mesh"), ("late", "late-mesh")),
    *(("matchings", "matchings-mesh"), ("local", "local-mesh")),
  ):
    exp = build(*names)
    (rows, params, said), other = (train(exp, index=i) for i in range(2))
    kit.close(params, other[1], rtol=1e-4, atol=1e-6)
    by_job = np.argsort(rows.job)
    np.testing.assert_allclose(rows.loss[by_job], other[0].loss, rtol=1e-4)
    for column in ("bytes_up", "bytes_down"):
      ours, theirs = (getattr(r, column) for r in (rows, other[0]))
      np.testing.assert_array_equal(ours[by_job], theirs)
    for mine, theirs in zip(said, other[2], strict=True):
      for key in ("consensus", "peer_loss_worst", "mix_norm", "test_loss"):
        assert mine[key] == pytest.approx(theirs[key], rel=1e-3)


@pytest.mark.parametrize("label", ["pairs", "arrivals", "late", "late-mesh"])
def test_a_cell_that_was_stopped_comes_to_the_same_bits(label, tmp_path):
  exp = build(label)
  whole, halves = tmp_path / "whole", tmp_path / "halves"
  for workdir in (whole, halves):
    folder.open_folder(str(workdir), "test", exp)
  train(exp, whole)
  with pytest.raises(Stopped):
    train(exp, halves, signals=kit.AfterLooks(1))
  assert not (halves / "cells" / exp.cells[0].name / "result.json").exists()
  train(exp, halves)
  one, two = (place / "cells" / exp.cells[0].name for place in (whole, halves))
  for name in ("params.msgpack", "links.csv"):
    read = cell_files.read_file
    assert read(one, name) == read(two, name)
  ours, theirs = map(cell_files.read_records, (one, two))
  for column in ours:
    np.testing.assert_array_equal(ours[column], theirs[column])


def test_a_result_says_how_far_apart_peers_are_and_what_each_link_bore(
  tmp_path,
):
  exp = build("ring", "pairs")
  folder.open_folder(str(tmp_path), "test", exp)
  for index in range(2):
    train(exp, tmp_path, index=index)
  results = [
    folder.finished_result(tmp_path / "cells" / cell.name)
    for cell in exp.cells
  ]
  ring, pairs = results
  size = 4 * sum(x.size for x in _leaves(exp))
  assert ring["bytes_per_link"] == 6 * size and ring["links"] == 8
  assert ring["taken_bytes"] == 6 * 8 * size
  assert pairs["taken_bytes"] == 24 * 2 * size
  assert ring["second_eigenvalue"] == pytest.approx(1 / 3)
  for result in results:
    assert 0 < result["consensus"] < 0.1
    worst, best = (
      result[f"peer_accuracy_{which}"] for which in ("worst", "best")
    )
    assert worst <= best <= 1
  assert ring["staleness_max"] == 0 < pairs["staleness_max"]
  place = tmp_path / "cells" / exp.cells[0].name
  lines = cell_files.read_file(place, "links.csv").decode().splitlines()
  rows = list(csv.DictReader(lines))
  assert len(rows) == 8
  assert {row["bytes"] for row in rows} == {str(6 * size)}
  _, text = report.tabulate(results, ENGINES)
  assert "consensus" in text and "MB/link" in text
  said = report.result_lines(ring, ENGINES["simulate"].describe)[0]
  assert "ring (|lambda_2| 0.333), consensus distance" in said


def test_a_codec_is_compared_with_the_messages_that_were_sent(tmp_path):
  exp = build("late", compress="int8")  # every second round has messages
  folder.open_folder(str(tmp_path), "test", exp)
  train(exp, tmp_path)
  result = folder.finished_result(tmp_path / "cells" / exp.cells[0].name)
  dense = traffic.dense_bytes(exp.plan(exp.cells[0])) * result["link_messages"]
  for direction in ("up", "down"):
    factor = result[f"compression_{direction}"]
    assert factor == dense / result["taken_bytes"] < 4.1


def _leaves(exp):
  import jax

  problem = exp.problem_of(next(iter(exp.runs.values())))
  return jax.tree.leaves(jax.eval_shape(problem.init, jax.random.key(0)))


def test_the_order_of_a_cell_is_a_function_of_its_seed():
  exp = build("pairs", seeds=(0, 1))
  plan = exp.plan(exp.cells[0])
  first, again, other = (plan.trace(seed) for seed in (0, 0, 1))
  kit.same(first, again)
  assert orders.check(first) == 4
  assert (first.worker != other.worker[: len(first.worker)]).any()


def test_everything_is_recorded_of_a_run_that_diverges():
  exp = build("pairs", learning_rate=1e30, on_nan="record")
  rows, _, said = train(exp)
  assert said[-1]["diverged"] and not np.isfinite(rows.loss).all()


MISTAKES = (
  ("ring", {"topology": "rign"}, "unknown topology 'rign'; did you mean"),
  ("ring", {"topology": {"name": "graph", "edges": [[0, 1], [2, 3]]}},
   "config.runs.ring: the topology 'graph' is not connected"),
  ("ring", {"topolgy": "ring"}, "did you mean 'topology'"),
  ("ring", {"topology": 3}, "config.runs.ring.topology must be"),
  ("ring", {"topology": {"name": "torus", "rows": True}},
   "config.runs.ring.topology.rows must be a positive whole number, not"),
  ("ring", {"recipe": "choco_sgd", "codec": "topk"},
   "config.runs.ring.codec: unknown codec 'topk'; did you mean 'top_k'"),
  ("ring", {"compress": "top_k"},
   "config.compress: peers send models, not changes as in choco_sgd, and"),
  ("ring", {"compress": {"name": "random_k", "density": 0.1}},
   "config.compress: peers send models, not changes as in choco_sgd, and"),
  ("ring", {"recipe": "choco_sgd", "compress": "qsgd"},
   "config.compress: the recipe has a codec of its messages already: set its"),
  ("ring", {"compress_down": "qsgd"}, "its peers have no server"),
  ("ring", {"order": {"name": "nosuch"}}, "config.order: unknown order"),
  ("ring", {"order": {"name": "fixed_delay"}, "engine": "threads"},
   "config.order.name 'fixed_delay' is not for the recipe 'd_psgd'"),
  ("ring", {"order": {"name": "asynchronous", "depth": 3}},
   "config.order.depth 3 is not for the recipe 'd_psgd' (config.runs.ring)"),
  ("ring", {"topology": {"name": "matrix", "weights": SWAPS}},
   "config.runs.ring: peers never agree by the weights of topology"),
  ("ring", {"recipe": "choco_sgd", "codec": {"name": "top_k", "density": 0}},
   "config.runs.ring.codec.density must be in (0, 1], not 0: it is the part"),
  ("ring", {"engine": "pipeline", "stages": 2},
   "the recipe 'd_psgd' has peers instead of a server's update"),
  ("pairs", {"engine": "mesh"},
   "the recipe 'ad_psgd' (config.runs.pairs) has no rounds"),
  ("arrivals", {"engine": "mesh"}, "has no rounds, but all peers of a mesh"),
  ("mesh", {"axes": {"data": 2}},
   "config.mesh.axes data 2 does not fit config.workers 4, as each index"),
  ("mesh", {"axes": {"data": 4, "tensor": 2}}, "config.mesh.axes data 4 x ten"),
  ("mesh", {"axes": {"data": 4, "island": -1}},
   "config.mesh.axes.island must be a number of devices, not -1"),
  ("mesh", {"devices": 3},
   "config.mesh.devices 3 is less than the 4 devices of config.workers 4"),
  ("mesh", {"axes": {"data": 4, "island": 3}},
   "config.mesh.axes.island 3 must divide config.batch_size"),
  ("mesh", {"axes": {"data": 4, "island": 4}},
   "config.workers 4 on engine mesh needs 16 devices, and this process has 8"),
  ("mesh", {"zero": 1}, "config.mesh.zero 1 is not for the recipe 'd_psgd'"),
  ("mesh", {"workers": (16,)}, "config.workers 16 on engine mesh needs 16"),
  ("ring", {"recipe": "choco_sgd", "codec": "coding:halves"},
   "coding:halves': what decode returns must have the structure"),
  ("ring", {"workers": (1,)},
   "config.runs.ring: gossip needs at least 2 peers"),
  ("ring", {"server": {"shards": 3}},
   "config.server.shards 3 is not for the recipe 'd_psgd'"),
)


def mistaken(entry):
  label, config = entry
  runs = {label: {**RUNS[label], **config}}
  experiment.build(
    {**kit.TINY_RUN, "workers": (4,), "runs": runs}, engines=ENGINES
  )


test_mistakes_are_told_in_one_line = kit.refuses(
  [((a, b), why) for a, b, why in MISTAKES], mistaken, plain=True, longest=600
)


def test_a_topology_given_as_plain_data_is_the_same():
  one = topologies.build("ring", 4)
  two = topologies.build(
    {"name": "matrix", "weights": one.matrices.tolist()}, 4
  )
  np.testing.assert_array_equal(one.matrices, two.matrices)
