"""Says how a model can be trained on some devices, and what each way costs.

  python -m launch.plan --params=1.5e9 --devices=64 --bandwidth=25 --memory=16
  python -m launch.plan --params=175B --devices=1024 --bandwidth=25 \\
    --node=8 --node_bandwidth=300 --flops=140 --out=plan.png
  python -m launch.plan --config=configs/pipeline_gpt.py --devices=8 \\
    --bandwidth=1

prints a table of strategies: whether a device's memory holds its part, and
what a step takes in seconds: computing, sending, and waiting (for the slowest
worker, or in a pipeline's bubble). Of --params alone a GPT of that size is
assumed, 128 times as wide as deep, unless --depth, --width and others say more.
A config of launch.simulate, launch.train_pipeline or launch.train_sync is read,
its model built and counted: parameters, operations, and what is kept for the
backward.

What is assumed:

  - times are those of `asgd.parallel.costs`, each device having one link of
    --bandwidth to all others; inside of a node of --node devices, one of
    --node_bandwidth. Without --overlap nothing is sent while computing;
  - bytes are those of `asgd.parallel.memory`. Layers are alike: a pipeline's
    stages differ by the layers that cannot be divided evenly;
  - each strategy takes the microbatch that is fastest of those that fit (or
    --microbatch). The batch is of all devices together;
  - ZeRO-2 scatters gradients, and ZeRO-3 gathers weights twice, for each
    microbatch;
  - an asynchronous step is as many messages as there are workers. Parameters
    and what a recipe keeps against staleness are in float32, on shards at the
    workers;
  - batch times vary by --variation around their mean: a synchronous step takes
    the expected maximum.

Sizes are 10^9 bytes (GB); bandwidths 10^9 bytes a second, each way.
"""

import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from asgd import algorithms, names
from asgd.parallel import costs, memory
from launch import (
  cli,
  experiment,
  outputs,
  pipeline_experiment,
  strategies,
  sync_experiment,
)
from launch.strategies import Cluster, Job, Strategy, Workload

_GB = memory.GB
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_PICTURES = (".png", ".svg", ".pdf")
_MOST_DEVICES, _MOST_BATCH = 1 << 20, 1 << 30


# What is said.


def _seconds(value: float) -> str:
  return f"{value:.3g}" if value else "0"


def tabulate(found: Sequence[Strategy]) -> str:
  """Returns a table with a row for each strategy."""
  rows = [
    [
      one.name,
      "yes" if one.fits else "no",
      f"{one.bytes / _GB:.3g}",
      f"{one.state / _GB:.3g}",
      f"{one.activations / _GB:.3g}",
      f"{one.microbatch}",
      *map(_seconds, (one.compute, one.communication, one.waiting)),
      _seconds(one.seconds),
    ]
    for one in found
  ]
  head = ["strategy", "fits", "GB", "state", "activations", "microbatch"]
  head += ["compute", "send", "wait", "s/step"]
  return outputs.format_table(head, rows)


def bars(found: Sequence[Strategy], limit: float, columns: int = 100) -> str:
  """Returns the table's numbers as bars, of the same scale for all.

  Memory is a bar up to twice the limit, `|`; time is `#` computing, `=` sending
  and `.` waiting.
  """
  name = max(len(one.name) for one in found)
  width = max((columns - name - 6) // 2, 10)
  longest = max((one.seconds for one in found if one.fits), default=0.0)
  longest = longest or max(one.seconds for one in found)
  lines = [
    " ".join(
      [
        "".ljust(name),
        f"memory, | is {limit / _GB:g} GB".ljust(width),
        " " + f"# compute = send . wait, to {longest:.3g} s",
      ]
    ).rstrip()
  ]
  for one in found:
    filled = min(round(one.bytes / (2 * limit) * width), width)
    space = ["#" if i < filled else " " for i in range(width)]
    space[width // 2] = "|"
    if one.bytes > 2 * limit:
      space[-1] = ">"
    ends = itertools.accumulate((one.compute, one.communication, one.waiting))
    ends = [round(end / longest * width) if longest else 0 for end in ends]
    time = ""
    for mark, end in zip("#=.", ends, strict=True):
      time += mark * (min(end, width) - len(time))
    if ends[-1] > width:
      time = time[:-1] + ">"
    mark = "  " if one.fits else " x"
    lines.append(
      f"{one.name.ljust(name)}{mark} {''.join(space)} {time}".rstrip()
    )
  return "\n".join(lines) + "\n"


def draw(
  found: Sequence[Strategy], limit: float, path: Path, heading: str
) -> None:
  """Draws memory and time of each strategy.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  names_ = [one.name for one in found]
  figure, (left, right) = plt.subplots(
    *(1, 2),
    figsize=(13, 1.5 + 0.3 * len(found)),
    layout="constrained",
    sharey=True,
  )
  panels = (
    (left, _GB, ("state", "activations"), "GB a device"),
    (right, 1.0, ("compute", "communication", "waiting"), "seconds a step"),
  )
  for axis, unit, parts, label in panels:
    start = [0.0] * len(found)
    for i, part in enumerate(parts):
      values = [getattr(one, part) / unit for one in found]
      colors = [
        (*plt.get_cmap("tab10")(i)[:3], 1.0 if one.fits else 0.35)
        for one in found
      ]
      axis.barh(names_, values, left=start, color=colors)
      axis.barh([names_[0]], [0], color=plt.get_cmap("tab10")(i), label=part)
      start = [a + b for a, b in zip(start, values, strict=True)]
    axis.set_xlabel(label)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right")
  left.axvline(limit / _GB, color="black", ls="--", lw=1)
  left.set_xlim(0, 2 * limit / _GB)
  times = [one.seconds for one in found if one.fits]
  if times:
    right.set_xlim(0, 1.05 * max(times))
  left.invert_yaxis()
  figure.suptitle(f"{heading}\npale: does not fit", fontsize=10)
  figure.savefig(path, dpi=110)
  plt.close(figure)


# What is asked for.


def size(text: str, flag: str = "params") -> float:
  """Returns a number: 1.5e9, 350M, 1.5B.

  Raises:
    ValueError: for what is none, or less than 1.
  """
  text = text.strip()
  unit = _UNITS.get(text[-1:].upper())
  try:
    value = float(text[:-1]) * unit if unit else float(text)
  except ValueError:
    value = math.nan
  if not 1 <= value <= 1e18:
    raise ValueError(
      f"--{flag} must be a positive number such as 1.5e9, 350M or 1.5B, not"
      f" {text!r}"
    )
  return value


def _read(config, data_dir):
  """Builds a config's problem: (problem, its name, examples of a step)."""
  overrides = cli.overrides()
  plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
  if "runs" in plain:
    plain = pipeline_experiment.override(config, overrides)
    built = pipeline_experiment.build(plain, data_dir=data_dir)
    batch = built.config["microbatch_size"] * built.config["microbatches"]
  elif "algorithms" not in plain:
    plain = sync_experiment.override(config, overrides)
    sync_experiment.check(plain)
    dataset, problem = pipeline_experiment.load_problem(
      *(plain, data_dir, None, "batch_size")
    )
    name = f"{plain['model']['name']} on {dataset.name}"
    return problem, name, plain["batch_size"]
  else:
    built = experiment.build(
      experiment.override(config, overrides), data_dir=data_dir
    )
    batch = built.config["batch_size"] * max(
      cell.workers for cell in built.cells
    )
  name = f"{built.config['model']['name']} on {built.dataset.name}"
  return built.problem, name, batch


def _positive(flag, value, most=math.inf, *, or_zero=False):
  known = 0 < value <= most or (or_zero and value == 0)
  if not known or math.isinf(value):
    least = "0 or more" if or_zero else "positive"
    limit = "" if math.isinf(most) else f" and at most {most:g}"
    raise ValueError(f"--{flag} must be {least}{limit}, not {value!r}")
  return value


def _cluster(given) -> Cluster:
  devices = _positive("devices", given["devices"], _MOST_DEVICES)
  bandwidth = _positive("bandwidth", given["bandwidth"])
  latency = _positive("latency", given["latency"], or_zero=True) * 1e-6
  node, near = given["node"], given["node_bandwidth"]
  _positive("node", node, _MOST_DEVICES)
  if near is not None and node == 1:
    raise ValueError("--node_bandwidth needs --node, the devices of a node")
  if near is not None:
    near = costs.link(_positive("node_bandwidth", near) * 1e9, latency)
  if node < devices and devices % node:
    raise ValueError(
      f"--node={node} does not divide --devices={devices}: use whole nodes"
    )
  return Cluster(
    devices,
    _positive("memory", given["memory"]) * _GB,
    _positive("flops", given["flops"]) * 1e12,
    costs.link(bandwidth * 1e9, latency),
    node,
    near,
  )


def _job(given, batch: int) -> Job:
  names.lookup("optimizer", given["optimizer"], memory.OPTIMIZERS)
  names.lookup("precision", given["precision"], memory.PRECISIONS)
  names.lookup("kind of activations", given["activations"], memory.ACTIVATIONS)
  for recipe in given["recipes"]:
    names.lookup("recipe", recipe, algorithms.RECIPES)
  micro = given["microbatch"]
  if micro is not None:
    _positive("microbatch", micro, _MOST_BATCH)
    if batch % micro:
      raise ValueError(
        f"--microbatch={micro} does not divide the batch of {batch} examples"
      )
  shards = given["shards"]
  if shards is not None:
    _positive("shards", shards, given["devices"])
  variation = _positive("variation", given["variation"], 3, or_zero=True)
  return Job(
    *(batch, micro, given["optimizer"], given["precision"]),
    *(given["activations"], variation, given["overlap"], shards),
    tuple(given["recipes"]),
  )


_SIZES = memory.Gpt._fields


def _workload(given) -> tuple[Workload, Job]:
  config, params = given["config"], given["params"]
  if (config is None) == (params is None):
    raise ValueError(
      "which model? give --params=1.5e9 (a GPT of that size) or"
      " --config=FILE.py, and not both"
    )
  sizes = {name: given[name] for name in _SIZES}
  if config is not None:
    for name, value in sizes.items():
      if value is not None:
        raise ValueError(f"the config says what --{name} does; drop it")
    problem, name, batch = _read(config, given["data_dir"])
  else:
    for name, value in sizes.items():
      if value is not None:
        _positive(name, value)
    parameters = size(params)
    gpt = strategies.guess_gpt(parameters, **sizes)
    batch = 8 * given["devices"]
  if given["batch"] is not None:
    batch = _positive("batch", given["batch"], _MOST_BATCH)
  job = _job(given, batch)
  if config is not None:
    return strategies.of_problem(problem, name, job), job
  return strategies.of_gpt(gpt, round(parameters), job), job


def main(**given: Any) -> None:
  """Prints the plan that the flags ask for; `_define` says what each is."""
  given = {**DEFAULTS, **given}
  out = None if given["out"] is None else Path(given["out"])
  if out is not None and out.suffix not in _PICTURES:
    raise ValueError(
      f"--out={out} must end in {', '.join(_PICTURES)}, as it is a picture"
    )
  if out is not None and not out.parent.is_dir():
    raise ValueError(f"--out={out}: there is no folder {out.parent}")
  for flag in ("devices", "bandwidth"):
    if given[flag] is None:
      raise ValueError(f"give --{flag}, as in --devices=64 --bandwidth=25")
  cluster = _cluster(given)
  work, job = _workload(given)
  found = strategies.find(work, cluster, job)
  if not found:
    raise ValueError(
      f"no strategy divides a batch of {job.batch} examples: give another"
      " --batch or --microbatch"
    )
  heading = (
    f"{work.name}\n{cluster.devices} devices of {cluster.memory / _GB:g} GB and"
    f" {cluster.flops / 1e12:g} TFLOP/s, links of"
    f" {cluster.far.bandwidth / 1e9:g} GB/s; batch {job.batch},"
    f" {job.optimizer}, {job.precision}"
  )
  print(heading, end="\n\n")
  print(tabulate(found))
  if not any(one.fits for one in found):
    least = min(found, key=lambda one: one.bytes)
    print(
      f"nothing fits: the least is {least.bytes / _GB:.3g} GB a device, by"
      f" {least.name}; use more devices, a smaller --microbatch or"
      " --activations=full"
    )
  for stale, title in (
    (False, "best"),
    (True, "best of those that do not wait"),
  ):
    chosen = strategies.best(found, stale=stale)
    if chosen is not None:
      print(
        f"{title}: {chosen.name}, {chosen.bytes / _GB:.3g} GB a device and"
        f" {chosen.seconds:.3g} s a step"
      )
  for line in strategies.left_out(work, cluster, job):
    print(f"not on all devices: {line}")
  columns = shutil.get_terminal_size((120, 24)).columns
  print("\n" + bars(found, cluster.memory, columns))
  if out is not None:
    try:
      draw(found, cluster.memory, out, heading)
    except ImportError as error:
      raise ValueError(
        f"--out needs matplotlib ({error}): pip install 'asgd[viz]'"
      ) from error
    print(f"picture  {out}")


DEFAULTS: dict[str, Any] = {
  **dict(params=None, config=None, data_dir=None, devices=None),
  **dict(bandwidth=None, latency=5.0, node=1, node_bandwidth=None),
  **dict(memory=80.0, flops=100.0, batch=None, microbatch=None),
  **dict(optimizer="adam", precision="mixed", activations="plain"),
  **dict(
    variation=0.1,
    overlap=False,
    shards=None,
    recipes=list(strategies.RECIPES),
    out=None,
  ),
  **dict.fromkeys(_SIZES),
}
_HELP = {
  "params": "Parameters: 1.5e9, 350M, 1.5B.",
  "data_dir": "Where the config's data is.",
  "devices": "How many.",
  "bandwidth": "GB/s of a device's link, each way.",
  "latency": "Microseconds of a message.",
  "node": "Devices of a node, which have links of --node_bandwidth.",
  "node_bandwidth": "GB/s inside of a node.",
  "memory": "GB of a device.",
  "flops": "TFLOP/s that a device reaches (not its peak).",
  "batch": "Examples of a step, of all devices. Default: the config's, or 8 a"
  " device.",
  "microbatch": "Examples that a device takes at once. Default: the best.",
  "optimizer": f"One of {', '.join(memory.OPTIMIZERS)}.",
  "precision": f"One of {', '.join(memory.PRECISIONS)}.",
  "activations": f"One of {', '.join(memory.ACTIVATIONS)} (recomputing).",
  "variation": "Coefficient of variation of batch times.",
  "overlap": "Reduce gradients behind the backward (wait-free).",
  "shards": "Of the parameter server. Default: all devices.",
  "recipes": "Against staleness, of asynchronous training.",
  "out": "Picture to write: FILE.png, .svg or .pdf.",
  "depth": "Blocks of the GPT.",
  "width": "Features of its stream.",
  "heads": "Of its attention.",
  "context": "Positions of a sequence (2048).",
  "vocabulary": "Tokens (51200).",
}
_INTEGERS = ("devices", "node", "batch", "microbatch", "shards", *_SIZES)


def _define():
  """Defines the flags; returns a function that calls `main` with them."""
  holders = {"config": cli.define_config()}
  for name, text in _HELP.items():
    define = flags.DEFINE_string
    if name in _INTEGERS:
      define = flags.DEFINE_integer
    elif isinstance(DEFAULTS[name], bool):
      define = flags.DEFINE_bool
    elif isinstance(DEFAULTS[name], float) or name.endswith("bandwidth"):
      define = flags.DEFINE_float
    elif name == "recipes":
      define = flags.DEFINE_list
    holders[name] = define(name, DEFAULTS[name], text)
  return lambda: main(**{name: f.value for name, f in holders.items()})


if __name__ == "__main__":
  cli.run(_define())
