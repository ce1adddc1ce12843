"""The planner: its numbers by hand, what it says, draws and refuses."""

import kit
import pytest

from asgd.experiment import schema
from launch import flags, plan

pytestmark = pytest.mark.usefixtures("wide_terminal")
BASE = dict(params="1.5e9", devices=64, bandwidth=25.0, memory=16.0)


def rows(said):
  """Cells of the table, by strategy."""
  lines = said.splitlines()
  start = next(i for i, line in enumerate(lines) if line.startswith("----"))
  table = {}
  for line in lines[start + 1 : lines.index("", start)]:
    name, *cells = line.rsplit(maxsplit=10)
    table[name.strip()] = cells
  return table


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
  assert "one device alone, " in said and "does not fit: it needs 36 GB" in said
  # A bar for each, marked where it does not fit.
  bars = said[said.index("memory, | is 16 GB") :].splitlines()[1:]
  name_width = max(map(len, table))
  for name, line in zip(table, bars, strict=False):
    assert line.startswith(name) and "#" in line
    assert line[name_width:].startswith(" x ") == (name not in fits)


@pytest.mark.parametrize(
  ("bandwidth", "line"),
  [
    (
      0.01,
      "one device alone, 1.47 s a step, is the fastest: do not distribute",
    ),
    (
      50.0,
      "one device alone, 1.47 s a step, is 6.75 times slower than data, halving"
      " doubling",
    ),
  ],
)
def test_it_says_whether_to_distribute_at_all(capsys, bandwidth, line):
  plan.main(params="1e8", devices=8, bandwidth=bandwidth, memory=80.0)
  assert line in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_config_is_counted(capsys):
  config = _config("pipeline_gpt")
  config.config["model"]["depth"] = 2
  plan.main(config=config, devices=4, bandwidth=1.0, flops=0.05)
  said = capsys.readouterr().out
  assert "gpt on pydoc: 116,992 parameters in 4 layers, counted" in said
  assert "batch 32" in said  # 8 microbatches of 4 windows
  table = rows(said)
  assert {"tensor 4", "pipeline 4, 2BW", "data, ring"} <= set(table)
  assert float(table["one device"][2]) == pytest.approx(
    116_992 * 16 / 1e9, rel=0.01
  )


def test_a_config_of_a_mesh_is_counted_without_its_devices(capsys):
  plan.main(config=_config("mesh_gpt", "tiny"), devices=512, bandwidth=1.0)
  said = capsys.readouterr().out
  assert "gpt on pydoc: 9,920 parameters in 4 layers, counted" in said
  assert "batch 16" in said


def test_a_recurrent_model_sends_more_for_what_it_computes(capsys):
  """The weights of convolutions are used at each pixel, those of an LSTM once
  for each token, and those of AlexNet's dense layers once for each image."""
  ratios = {}
  for name, model in (
    ("lstm", {}),
    ("digits", {"name": "cnn", "features": [32, 64], "hidden": 16}),
    ("digits", {"name": "alexnet", "features": [8] * 5, "hidden": 512}),
  ):
    resolved = _config(name)
    if model:
      resolved.config["model"] = model
    plan.main(config=resolved, devices=4, bandwidth=0.1, batch=64)
    compute, send, ratio = rows(capsys.readouterr().out)["data, ring"][5:8]
    assert float(ratio) == pytest.approx(
      float(send) / float(compute), rel=0.01
    )
    ratios[resolved.config["model"]["name"]] = float(ratio)
  assert ratios["alexnet"] > ratios["lstm"] > 0
  assert ratios["alexnet"] > ratios["cnn"]


def test_dense_layers_of_a_config_may_send_factors(capsys):
  resolved = _config("digits")
  resolved.config["model"]["hidden"] = [256, 256]
  plan.main(config=resolved, devices=4, bandwidth=0.1, batch=16)
  table = rows(capsys.readouterr().out)
  factors, ring = table["data, sufficient factors"], table["data, ring"]
  assert float(factors[6]) < float(ring[6]) / 2
  assert "tensor 4" not in table


def _config(name, variant=None):
  import importlib

  config = importlib.import_module(f"configs.{name}").get_config(variant)
  return schema.resolve(config, flags.ENGINES)


MISTAKES = {
  "neither": (dict(params=None), "give one model: either"),
  "both": (dict(config={}), "give one model: either"),
  "before devices": (dict(params=None, devices=None), "give one model"),
  "first": (dict(params="abc", devices=None), "such as .*, not 'abc'"),
  "params": (dict(params="big"), "parameters must be from 1 to 1e18, such"),
  "negative": (dict(params="-3B"), "parameters must be from 1 to 1e18"),
  "devices": (dict(devices=None), "give --devices"),
  "none": (dict(devices=0), "--devices must be from 1 to 1,048,576"),
  "bandwidth": (dict(bandwidth=-1.0), "--bandwidth must be from 1e-09 to"),
  "memory": (dict(memory=0.0), "--memory must be from 1e-09 to 1e.15"),
  "subnormal": (dict(bandwidth=1e-320), "be from 1e-09 to 1e.15, not 1e-3"),
  "no memory": (dict(memory=1e-320), "--memory must be from 1e-09 to 1e.15"),
  "endless": (dict(flops=1e300), "--flops must be from 1e-09 to 1e.15, not"),
  "nodes": (dict(node=7), "--node=7 does not divide --devices=64"),
  "near": (dict(node_bandwidth=9.0), "--node_bandwidth needs --node"),
  "micro": (dict(microbatch=5), "--microbatch=5 does not divide the batch"),
  "optimizer": (dict(optimizer="adan"), "did you mean 'adam'"),
  "recipe": (dict(recipes=["dana_zer"]), "did you mean 'dana_zero'"),
  "shards": (dict(shards=65), "--shards must be from 1 to 64, not 65"),
  "sizes": (dict(depth=2, width=64), "do not agree: their blocks have"),
  "width alone": (dict(width=10**9), "do not agree: their blocks have 1.2e"),
  "depth alone": (dict(depth=10**12), "do not agree: their blocks have 1.2e"),
  "more than any": (dict(params="1e30"), "must be from 1 to 1e18, .* '1e30'"),
  "less than one": (dict(params="0.5"), "parameters must be from 1 to 1e18"),
  "heads": (dict(depth=20, width=2560, heads=3), "heads must divide the width"),
  "width": (dict(width=0), "--width must be from 1 to 1,000,000,000"),
  "folder": (dict(out="no/plan.png"), "plan.png: the folder no does not exist"),
  "picture": (dict(out="plan.txt"), "must end in .png, .svg, .pdf"),
}


test_a_mistake_is_told = kit.refuses(
  MISTAKES, lambda changes: plan.main(**{**BASE, **changes})
)


def test_the_command_and_its_one_line_about_a_mistake():
  done = kit.call(
    "plan",
    *("--config=configs/digits.py", "--devices=4", "--bandwidth=1"),
    *("--config.batch_size=10", "--recipes=asgd,dana_slim", "--nooverlap"),
    "--batch=none",
  )
  kit.assert_one_line(done, "--batch=none must be a whole number, as in")
  assert done.stdout == ""


def test_nothing_fits(capsys):
  plan.main(**{**BASE, "memory": 0.01})
  said = capsys.readouterr().out
  assert "nothing fits: the least is" in said and "best" not in said


def test_what_cannot_be_compiled_is_refused():
  with pytest.raises(ValueError, match="add --config=FILE.py, with engine"):
    plan.main(params="1e9", compile="v5e:2x2")
  with pytest.raises(ValueError, match="cannot read the topology '4x4'"):
    plan.main(config=_config("mesh_gpt"), compile="4x4")
