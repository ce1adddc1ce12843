"""Prints how a model can be trained on given devices, and each way's cost.

  asgd plan --params=1.5e9 --devices=64 --bandwidth=25 --memory=16
  asgd plan --params=175B --devices=1024 --bandwidth=25 \\
    --node=8 --node_bandwidth=300 --flops=140 --out=plan.png
  asgd plan --config=configs/pipeline_gpt.py --devices=8 \\
    --bandwidth=1
  asgd plan --config=configs/mesh_gpt.py --compile=v5e:2x4

prints a table of strategies. It shows whether a device's memory holds its part,
and the seconds of a step: computing, sending, and waiting (for the slowest
worker, or in a pipeline's bubble). --params alone assumes a GPT of that size,
128 times as wide as deep, unless --depth, --width and others are given. With a
config the model is built and measured: parameters, operations, and the memory
that the backward needs. `asgd.parallel.strategies` lists the assumptions.

GB are 10^9 bytes; bandwidths are 10^9 bytes a second in each direction.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asgd import algorithms, names
from asgd.experiment import problem as problem_lib
from asgd.experiment import schema
from asgd.parallel import costs, memory, strategies, strategy_charts, workloads
from asgd.parallel.memory import GB

from . import compiled, flags
from .command_flags import PLAN

_PICTURES = (".png", ".svg", ".pdf")
# Beyond these limits a number is a misprint, and would overflow the costs.
_MAX_DEVICES, _MAX_BATCH, _MAX_SIZE = 1 << 20, 1 << 30, 10**15
_MIN_NUMBER, _MAX_NUMBER = 1e-9, 1e15  # range of positive flags


def _examples(resolved: schema.Resolved) -> int:
  """Returns the most examples of a step, over the runs of a config."""
  counts = []
  for run in resolved.runs.values():
    workers = max(flags.ENGINES[run.engine].workers(run))
    pieces = run.config.get("pipeline", {}).get("microbatches", 1)
    # A pipeline's batch size is that of a microbatch.
    counts.append(run.config["batch_size"] * workers * pieces)
  return int(max(counts))


def _positive(flag: str, value: Any, *, or_zero: bool = False) -> Any:
  """Returns the value of a flag with a unit; ValueError if it is out of its
  range."""
  return flags.in_range(flag, value, _MIN_NUMBER, _MAX_NUMBER, or_zero=or_zero)


def _hardware(flag_values: Mapping[str, Any]) -> strategies.Hardware:
  """Returns the hardware that the flags describe."""
  devices = flags.in_range("devices", flag_values["devices"], 1, _MAX_DEVICES)
  bandwidth = _positive("bandwidth", flag_values["bandwidth"])
  # From microseconds to seconds.
  latency = _positive("latency", flag_values["latency"], or_zero=True) * 1e-6
  node = flags.in_range("node", flag_values["node"], 1, _MAX_DEVICES)
  # Links inside a node may be faster than those between nodes.
  node_link = flag_values["node_bandwidth"]
  if node_link is not None:
    if node == 1:
      raise ValueError("--node_bandwidth needs --node, the devices of a node")
    node_bandwidth = _positive("node_bandwidth", node_link) * 1e9  # B/s
    node_link = costs.link(node_bandwidth, latency)
  # A node may be larger than the number of devices.
  if node < devices and devices % node:
    raise ValueError(
      f"--node={node} does not divide --devices={devices}: use full nodes"
    )
  return strategies.Hardware(
    devices,
    _positive("memory", flag_values["memory"]) * GB,  # bytes
    _positive("flops", flag_values["flops"]) * 1e12,  # operations a second
    costs.link(bandwidth * 1e9, latency),
    node,
    node_link,
  )


def _options(
  flag_values: Mapping[str, Any], batch: int
) -> workloads.TrainingOptions:
  """Returns the options of training; --batch replaces `batch` examples."""
  if flag_values["batch"] is not None:
    batch = flags.in_range("batch", flag_values["batch"], 1, _MAX_BATCH)
  # Errors name the nearest valid name.
  names.lookup("optimizer", flag_values["optimizer"], memory.OPTIMIZERS)
  names.lookup("precision", flag_values["precision"], memory.PRECISIONS)
  names.lookup(
    "kind of activations", flag_values["activations"], memory.ACTIVATIONS
  )
  for recipe in flag_values["recipes"]:
    names.lookup("recipe", recipe, algorithms.RECIPES)
  microbatch, shards = flag_values["microbatch"], flag_values["shards"]
  if microbatch is not None and batch % flags.in_range(
    "microbatch", microbatch, 1, _MAX_BATCH
  ):
    raise ValueError(
      f"--microbatch={microbatch} does not divide the batch of {batch} examples"
    )
  if shards is not None:
    flags.in_range("shards", shards, 1, flag_values["devices"])
  # A coefficient of variation above 3 is no batch time.
  flags.in_range("variation", flag_values["variation"], 0, 3)
  fields = {
    name: flag_values[name] for name in workloads.TrainingOptions._fields
  }
  fields |= {"batch": batch, "recipes": tuple(flag_values["recipes"])}
  return workloads.TrainingOptions(**fields)


def _workload(
  flag_values: Mapping[str, Any],
) -> tuple[workloads.Workload, workloads.TrainingOptions]:
  """Returns the work of a step, and the options, of a size or of a config."""
  resolved, params = flag_values["config"], flag_values["params"]
  # Flags of the GPT's shape fit --params only; a config has its own model.
  gpt_sizes = {name: flag_values[name] for name in memory.Gpt._fields}
  for name, value in gpt_sizes.items():
    if resolved is not None and value is not None:
      raise ValueError(f"--{name} is part of the config's model: drop the flag")
    if value is not None:
      flags.in_range(name, value, 1, _MAX_SIZE)

  # [1] A GPT of the given size.
  if resolved is None:
    parameters = workloads.count_of(params)
    gpt = workloads.guess_gpt(parameters, **gpt_sizes)
    # Without --batch, 8 examples for each device.
    training_options = _options(flag_values, 8 * flag_values["devices"])
    size = round(parameters)
    return workloads.of_gpt(gpt, size, training_options), training_options
  # [2] The model of a config, which is built and measured.
  training_options = _options(flag_values, _examples(resolved))
  config = resolved.config
  dataset, problem = problem_lib.load(config, data_dir=flag_values["data_dir"])
  name = dataset.name  # also of a problem without a separate model
  if problem.pieces is not None:
    name = f"{config['model']['name']} on {name}"
  return workloads.of_problem(problem, name, training_options), training_options


def _picture_path(out: str | None) -> Path | None:
  """Returns the path of the picture, checked; None for none."""
  if out is None:
    return None
  path = Path(out)
  if path.suffix not in _PICTURES:
    raise ValueError(
      f"--out={out} must end in {', '.join(_PICTURES)} to be a picture"
    )
  if not path.parent.is_dir():
    raise ValueError(f"--out={out}: the folder {path.parent} does not exist")
  return path


def main(*, config: schema.Resolved | None = None, **flag_values: Any) -> None:
  """Prints the plan for the flags, see `command_flags.PLAN`."""
  defaults = {name: default for name, (_, default, _) in PLAN.items()}
  flag_values = {**defaults, **flag_values, "config": config}
  if flag_values["compile"] is not None:
    if config is None:
      raise ValueError(
        "--compile needs the programs of a config: add --config=FILE.py, with"
        " engine mesh"
      )
    compiled.main(config, flag_values["compile"], flag_values["data_dir"])
    return
  if (config is None) == (flag_values["params"] is None):
    raise ValueError(
      "give one model: either --params=1.5e9 (a GPT of that size) or"
      " --config=FILE.py"
    )
  if config is None:
    # This error comes before those of the devices.
    workloads.count_of(flag_values["params"])
  # First: a wrong path must not cost the minutes of measuring a model.
  picture_path = _picture_path(flag_values["out"])
  for flag in ("devices", "bandwidth"):
    if flag_values[flag] is None:
      raise ValueError(f"give --{flag}, as in --devices=64 --bandwidth=25")
  hardware = _hardware(flag_values)
  work, options = _workload(flag_values)
  # All ways to divide the work over the devices, with their costs.
  candidates = strategies.find(work, hardware, options)
  if not candidates:
    raise ValueError(
      f"no strategy divides a batch of {options.batch} examples: give another"
      " --batch or --microbatch"
    )
  heading = (
    f"{work.name}\n{hardware.devices} devices of {hardware.memory / GB:g} GB"
    f" and {hardware.flops / 1e12:g} TFLOP/s, links of"
    f" {hardware.far.bandwidth / 1e9:g} GB/s; batch {options.batch},"
    f" {options.optimizer}, {options.precision}"
  )
  print(heading, end="\n\n")
  print(strategy_charts.tabulate(candidates))
  print(*strategy_charts.advice(candidates), sep="\n")
  # Strategies that only a part of the devices could follow.
  for line in strategies.left_out(work, hardware, options):
    print(f"not on all devices: {line}")
  columns = shutil.get_terminal_size((120, 24)).columns
  print("\n" + strategy_charts.bars(candidates, hardware.memory, columns))
  if picture_path is not None:
    try:
      strategy_charts.draw(candidates, hardware.memory, picture_path, heading)
    except ImportError as error:
      raise ValueError(
        f"--out needs matplotlib ({error}): pip install 'asgd[viz]'"
      ) from error
    print(f"picture  {picture_path}")


if __name__ == "__main__":
  _FLAGS = flags.define("plan")

  def _run() -> None:
    """Calls `main` with the values of the flags, and with the config."""
    flag_values = {name: holder.value for name, holder in _FLAGS.items()}
    if flags.has_config():
      flag_values["config"] = flags.load_config("configs/pipeline_gpt.py")
    main(**flag_values)

  flags.run(_run, "plan")
