"""The planner: its numbers by hand, what it says, draws and refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from asgd.parallel import costs, memory
from launch import plan, strategies

ROOT = Path(__file__).parent.parent
BASE = dict(params="1.5e9", devices=64, bandwidth=25.0, memory=16.0)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
  monkeypatch.setenv("COLUMNS", "150")


def command(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "launch.plan", *map(str, arguments)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


def rows(said):
  """Cells of the table, by strategy."""
  lines = said.splitlines()
  start = next(i for i, line in enumerate(lines) if line.startswith("----"))
  found = {}
  for line in lines[start + 1 : lines.index("", start)]:
    name, *cells = line.rsplit(maxsplit=9)
    found[name.strip()] = cells
  return found


def test_it_says_what_fits_and_draws_it(tmp_path, capsys):
  out = tmp_path / "plan.svg"
  plan.main(**BASE, out=str(out))
  said = capsys.readouterr().out
  picture = out.read_text()
  assert "<svg" in picture and picture.count("<path") > 40
  assert said.splitlines()[-1].split() == ["picture", str(out)]
  table = rows(said)
  fits = {name for name, cells in table.items() if cells[0] == "yes"}
  # 24 GB of state fit on no device, what is shared out on 64 does.
  assert table["one device"][2] == table["data, ring"][2] == "24"
  assert "data, ring" not in fits and "data, ZeRO-3" in fits
  assert {"asynchronous, asgd", "asynchronous, dana_zero"} <= set(table)
  (best,) = (x for x in said.splitlines() if x.startswith("best: "))
  chosen = best.removeprefix("best: ").rsplit(", ", 1)[0]
  assert chosen in fits
  fastest = min(
    (name for name in fits if "asynchronous" not in name),
    key=lambda name: float(table[name][-1]),
  )
  assert table[chosen][-1] == table[fastest][-1]
  assert "pipeline: 20 layers are fewer than 64 devices" in said
  # A bar for each, marked where it does not fit.
  bars = said[said.index("memory, | is 16 GB") :].splitlines()[1:]
  name_width = max(map(len, table))
  for name, line in zip(table, bars, strict=False):
    assert line.startswith(name) and "#" in line
    assert line[name_width:].startswith(" x ") == (name not in fits)


# A model whose numbers are easy.
WORK = strategies.Workload(
  *("tiny", 1000, 4, 250, 100.0, 30.0, lambda n, t: 10.0 * n / t, 5.0),
  gpt=memory.Gpt(4, 8, 4, 1, 1),
)
CLUSTER = strategies.Cluster(4, 10_000.0, 10.0, costs.link(1000.0, 0.01))
JOB = strategies.Job(16, 2, variation=0.0)


def found(work=WORK, cluster=CLUSTER, job=JOB):
  made = strategies.find(work, cluster, job)
  assert len({one.name for one in made}) == len(made)
  return {one.name: one for one in made}


def test_state_and_activations_by_hand():
  held = found()
  one = held["one device"]
  assert (one.state, one.activations, one.fits) == (16_000, 20, False)
  assert held["data, ring"].state == 16_000
  assert held["data, ZeRO-1"].state == 1000 * (4 + 12 / 4)
  assert held["data, ZeRO-2"].state == 1000 * (2 + 14 / 4)
  # The layer at work is whole, in 2 bytes.
  assert held["data, ZeRO-3"].state == 1000 * 16 / 4 + 250 * 2
  assert held["tensor 4"].state == 4000
  assert held["tensor 4"].activations == 20 / 4
  # A stage keeps what is in flight, four microbatches.
  assert held["pipeline 4, 1F1B"].activations == 4 * 20 / 4
  assert held["pipeline 4, PipeDream"].state == 1000 / 4 * (16 + 3 * 2)
  assert held["pipeline 4, 2BW"].state == 1000 / 4 * (16 + 2)
  # Parameters in float32 on four shards, with a copy of what each was sent.
  assert held["asynchronous, asgd"].state == 1000 * (2 + 2 + 4 / 4)
  assert held["asynchronous, dc_asgd_a"].state == (
    1000 * (2 + 2 + (4 + 4 + 4 * 4) / 4)
  )


def test_times_by_hand():
  held = found()
  one = held["one device"]
  assert (one.compute, one.communication, one.waiting) == (160, 0, 0)
  ring = held["data, ring"]
  assert ring.compute == 40
  assert ring.communication == pytest.approx(6 * 0.01 + 2 * 3 / 4 * 2000 / 1e3)
  # Half a ring each, of gradients and of weights.
  assert held["data, ZeRO-1"].communication == ring.communication
  # For each of two microbatches: gradients, and weights twice.
  each = 3 * 0.01 + 3 / 4 * 2
  assert held["data, ZeRO-2"].communication == pytest.approx(3 * each)
  assert held["data, ZeRO-3"].communication == pytest.approx(6 * each)
  # 4 all-reduces of 2 x 5 bytes (chunks of 3), of 4 blocks, 8 microbatches.
  assert held["tensor 4"].communication == pytest.approx(
    8 * 4 * 4 * 6 * (0.01 + 3 / 1000)
  )
  pipe = held["pipeline 4, 1F1B"]
  assert pipe.waiting == pytest.approx(40 * 3 / 8)  # (p - 1) / m
  assert pipe.communication == pytest.approx(2 * (8 + 2) * (0.01 + 10 / 1e3))
  assert held["pipeline 4, PipeDream"].waiting == 0
  # Each worker's push and fetch, of 3/4 of it, in 6 messages.
  late = held["asynchronous, asgd"]
  assert late.communication == pytest.approx(6 * (0.01 + 500 / 1e3))
  assert late.stale and not ring.stale


def test_all_wait_for_the_slowest():
  slow = found(job=JOB._replace(variation=0.1))
  factor = costs.expected_slowest(4, variation=0.1)
  assert slow["data, ring"].waiting == pytest.approx(40 * (factor - 1))
  assert slow["asynchronous, asgd"].waiting == 0


def test_reductions_hide_behind_the_backward():
  assert found(job=JOB._replace(overlap=True))["data, ring"].communication == 0
  slow = CLUSTER._replace(far=costs.link(100.0, 0.0))
  hidden = found(cluster=slow, job=JOB._replace(overlap=True))
  assert hidden["data, ring"].communication == pytest.approx(30 - 40 * 2 / 3)


def test_levels_of_links():
  cluster = CLUSTER._replace(node=2, near=costs.link(1e5, 0.0))
  held = found(cluster=cluster)
  assert held["data, hierarchical"].communication == pytest.approx(
    2 * 1 / 2 * 2000 / 1e5 + 2 * 0.01 + 1000 / 1e3
  )
  # Within a node tensors are cheap, and there are none across nodes.
  shapes = {name.split(",")[0] for name in held if " x " in name}
  assert shapes == {"data 2 x tensor 2", "data 2 x pipe 2", "tensor 2 x pipe 2"}
  both = [
    next(one for name, one in held.items() if name.startswith("data 2 x tens"))
    for held in (held, found())
  ]
  # 4 microbatches, 4 blocks, 4 all-reduces of 10 bytes on two devices.
  saved = 64 * (2 * 0.01 + 10 / 1e3 - 10 / 1e5)
  assert both[1].communication - both[0].communication == pytest.approx(saved)


def test_uneven_stages_take_as_long_as_the_largest():
  held = found(WORK._replace(layers=5))["pipeline 4, 1F1B"]
  assert held.compute == 40 * 8 / 5
  assert held.state == pytest.approx(4000 * 8 / 5)


def test_microbatches_are_the_best_that_fit():
  roomy = CLUSTER._replace(memory=16_100.0)
  free = JOB._replace(microbatch=None)
  assert found(cluster=roomy, job=free)["one device"].microbatch == 8
  assert found(job=free)["data, ZeRO-3"].microbatch == 4  # gathers once


def test_a_batch_that_cannot_be_divided():
  job = JOB._replace(batch=6, microbatch=2)
  held = found(job=job)
  assert "data, ring" not in held and "pipeline 4, 1F1B" in held
  said = strategies.left_out(WORK, CLUSTER, job)
  assert said == ["data: a batch of 6 is not divided by 4 devices"]


def test_a_gpt_of_that_size():
  for text, depth, width in (("1.5B", 20, 2560), ("175B", 96, 12288)):
    parameters = plan.size(text)
    gpt = strategies.guess_gpt(parameters)
    assert (gpt.depth, gpt.width, gpt.heads) == (depth, width, width // 128)
    found = memory.gpt_parameters(gpt)
    assert found == pytest.approx(parameters, rel=0.2)
  gpt = strategies.guess_gpt(plan.size("350M"), depth=24, heads=16)
  assert (gpt.depth, gpt.width) == (24, 1104) and gpt.heads == 16
  assert plan.size("2.5e3") == 2500


def test_a_config_is_counted(capsys):
  config = _config("pipeline_gpt")
  with config.unlocked():  # whose tables cost nothing to make
    config.runs = dict(gpipe=dict(schedule="gpipe"))
  plan.main(config=config, devices=4, bandwidth=1.0, flops=0.05)
  said = capsys.readouterr().out
  assert "gpt on pydoc: 316,928 parameters in 8 layers, counted" in said
  assert "batch 32" in said  # 8 microbatches of 4 windows
  table = rows(said)
  assert {"tensor 4", "pipeline 4, 2BW", "data, ring"} <= set(table)
  assert float(table["one device"][2]) == pytest.approx(
    316_928 * 16 / 1e9, rel=0.01
  )


def test_a_config_of_a_mesh_is_counted_without_its_devices(capsys):
  plan.main(config=_config("gpt_text"), devices=512, bandwidth=1.0)
  said = capsys.readouterr().out
  assert "gpt on pydoc: 216,960 parameters in 6 layers, counted" in said
  assert "batch 32" in said


def test_dense_layers_of_a_config_may_send_factors(capsys):
  config = _config("simulate_digits")
  with config.unlocked():
    config.model.hidden = (256, 256)
  plan.main(config=config, devices=4, bandwidth=0.1, batch=16)
  table = rows(capsys.readouterr().out)
  factors, ring = table["data, sufficient factors"], table["data, ring"]
  assert float(factors[6]) < float(ring[6]) / 2
  assert "tensor 4" not in table


def _config(name):
  import importlib

  return importlib.import_module(f"configs.{name}").get_config()


MISTAKES = {
  "neither": (dict(params=None), "which model"),
  "both": (dict(config={}), "not both"),
  "params": (dict(params="big"), "--params must be a positive number such as"),
  "negative": (dict(params="-3B"), "--params must be a positive number"),
  "devices": (dict(devices=None), "give --devices"),
  "none": (dict(devices=0), "--devices must be positive"),
  "bandwidth": (dict(bandwidth=-1.0), "--bandwidth must be positive"),
  "memory": (dict(memory=0.0), "--memory must be positive"),
  "nodes": (dict(node=7), "--node=7 does not divide --devices=64"),
  "near": (dict(node_bandwidth=9.0), "--node_bandwidth needs --node"),
  "micro": (dict(microbatch=5), "--microbatch=5 does not divide the batch"),
  "optimizer": (dict(optimizer="adan"), "did you mean 'adam'"),
  "recipe": (dict(recipes=["dana_zer"]), "did you mean 'dana_zero'"),
  "shards": (dict(shards=65), "--shards must be positive and at most 64"),
  "sizes": (dict(depth=2, width=64), "do not agree: their blocks have"),
  "width alone": (dict(width=10**9), "do not agree: their blocks have 1.2e"),
  "depth alone": (dict(depth=10**12), "do not agree: their blocks have 1.2e"),
  "less than one": (dict(params="0.5"), "--params must be a positive number"),
  "heads": (dict(depth=20, width=2560, heads=3), "heads must divide the width"),
  "width": (dict(width=0), "--width must be positive, not 0"),
  "folder": (dict(out="no/plan.png"), "there is no folder no"),
  "picture": (dict(out="plan.txt"), "must end in .png, .svg, .pdf"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name):
  changes, message = MISTAKES[name]
  with pytest.raises(ValueError, match=message):
    plan.main(**{**BASE, **changes})


def test_the_command_and_its_one_line_about_a_mistake():
  done = command(
    *("--config=configs/simulate_digits.py", "--devices=4", "--bandwidth=1"),
    *("--config.batch_size=10", "--recipes=asgd,dana_slim", "--nooverlap"),
    "--batch=none",
  )
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
  assert "--batch=none" in done.stderr


def test_nothing_fits(capsys):
  plan.main(**{**BASE, "memory": 0.01})
  said = capsys.readouterr().out
  assert "nothing fits: the least is" in said and "best" not in said
