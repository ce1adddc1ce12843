"""Plans a run of an experiment: its table, its cuts and its stages.

Every run trains on the same microbatches in the same order. A microbatch has
`batch_size` examples; their count is a multiple of `microbatches`. A
synchronous schedule averages `every` microbatches (default: `microbatches`) to
one update and flushes. An asynchronous schedule updates each stage on every
microbatch (`every=1`), or on the mean of `every`.

The configured learning rate is for one microbatch. An update of n microbatches
uses n times that rate, so that each example moves the parameters equally far.
"""

import contextlib
import functools
import itertools
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, compression, models, problems
from asgd.checks import shown
from asgd.compression.codec import check_complete
from asgd.experiment import build_cache, checks
from asgd.experiment.engines import learning_rates, traffic
from asgd.experiment.schema import RUN_KEYS, Run, Section, Setting
from asgd.pipeline import (
  analyze,
  cut,
  prediction,
  residence,
  schedules,
  stage_recipes,
)
from asgd.pipeline import table as table_lib
from asgd.pipeline.partition import graph, mixed_pipe, pipedream, placement
from asgd.pipeline.stage import Part
from asgd.pipeline.table import Schedule

_MAX_STAGES = 256
_MAX_MICROBATCHES = 10**6
_WARM_UP_START = 0.1  # first learning rate of a warm-up, as a share of the peak
_INTEGER_LIST = re.compile(r"\s*\d+\s*(,\s*\d+\s*)*")


def _list_or(*keywords: Any, kind: str) -> checks.Check:
  """Returns a check for known values or a list of integers, also as text."""

  integers = {"type": "array", "items": {"type": "integer"}}

  @checks.with_schema(anyOf=[{"enum": list(keywords)}, integers])
  def check(value, key):
    if isinstance(value, str) and _INTEGER_LIST.fullmatch(value):
      return [int(number) for number in value.split(",")]
    is_list = isinstance(value, list) and {*map(type, value)} <= {int}
    if not is_list and (type(value), value) not in [
      (type(k), k) for k in keywords
    ]:
      raise ValueError(f"config.{key} must be {kind}, not {shown(value)}")
    return value

  return check


@checks.with_schema(enum=[True, False, *prediction.NAMES])
def _check_predict(value: Any, key: str) -> Any:
  """Returns a value of the setting `predict`; raises ValueError for others."""
  if type(value) is not bool and value not in prediction.NAMES:
    allowed_names = ", ".join(map(repr, prediction.NAMES))
    raise ValueError(
      f"config.{key} must be True or False, {allowed_names}, not"
      f" {shown(value)}"
    )
  return value


_CUTS = _list_or(
  "parameters",
  "time",
  kind="'parameters', 'time', or a list of layers from 0 to their number",
)
_RECOMPUTE = _list_or(
  *(True, False, "but_last"),
  kind="True or False, 'but_last', or a list of stages from 0",
)


def options(section: Mapping[str, Any]) -> Sequence[str]:
  """Returns the options of the schedule that a section or a run names."""
  return schedules.describe(section.get("schedule", "pipedream")).options


SECTIONS: dict[str, Any] = {
  "pipeline": Section(
    {
      # A name of `schedules`, or a table: FILE.txt, .csv or .json.
      "schedule": Setting("pipedream", checks.text),
      "stages": Setting(2, checks.whole_number(1, _MAX_STAGES)),
      # Stages balance "parameters" or "time"; or a list of first layers.
      "cuts": Setting("parameters", _CUTS),
      # Microbatches of one update of a synchronous schedule.
      "microbatches": Setting(8, checks.whole_number(1, _MAX_MICROBATCHES)),
      # Microbatches of one update. None: `microbatches` if the schedule is
      # synchronous, 1 if it is asynchronous.
      "every": Setting(
        None, checks.optional(checks.whole_number(1, _MAX_MICROBATCHES))
      ),
      # The weights that a backward reads; None: the schedule's default.
      "weights": Setting(
        None, checks.optional(checks.choice(*analyze.WEIGHTS))
      ),
      # Forwards read predicted weights: rolled forward by the stage's staleness
      # (True), or by a name of `prediction`.
      "predict": Setting(False, _check_predict),
      # Stages that keep their inputs only; None: the schedule's default.
      "recompute": Setting(None, checks.optional(_RECOMPUTE)),
      # MB of weights, optimizer states and sums of gradients that a device
      # holds; the rest is in the host's memory. None: all.
      "device_megabytes": Setting(None, checks.optional(checks.positive)),
      # The partitioner, which cuts the model and assigns stages to devices.
      # With a partitioner, `stages` is the number of devices.
      "partition": Setting(
        None, checks.optional(checks.choice("pipedream", "mixed_pipe"))
      ),
      "bandwidth": Setting(1e10, checks.positive),  # bytes/s between devices
    },
    options,
  ),
  # A codec of the activations and gradients between stages.
  "compress": traffic.SECTIONS["compress"],
}


def dependents(entry: Mapping[str, Any], key: str, value: Any) -> list[str]:
  """Returns the keys that depend on an entry's `key`: if an entry gets another
  schedule, they lose the values that fitted the earlier one."""
  del value
  if key != "schedule":
    return []
  dependent_keys = ["weights", "every", "partition", "bandwidth"]
  dependent_keys += ["title", "devices"]
  return dependent_keys + [
    option
    for name in schedules.SCHEDULES
    for option in schedules.describe(name).options
  ]


class PipelinePlan(NamedTuple):
  """The parts of a run that all its cells share."""

  run: Run
  dataset: Any
  problem: problems.Problem
  table: Schedule  # of one update if synchronous, else of the whole run
  weights: str  # as in `analyze.versions`
  recompute: tuple[bool, ...]  # S, as of `schedules.recompute_of`
  learning_rate: float  # the peak, of an update
  schedule: Any  # float, or update -> learning rate
  messages: int  # microbatches in all
  parts: tuple[Part, ...]  # `params` are shapes; a cell puts in its arrays
  cuts: tuple[int, ...]
  together: bool  # whether updates use the norm over all stages
  measurements: dict[str, Any]  # of the experiment
  batches: int = 1  # in one message
  curvature_limit: float = math.nan

  @property
  def room(self) -> int | None:
    """Bytes of weights on a device at once; None: no limit."""
    megabytes = self.run.config["pipeline"]["device_megabytes"]
    return None if megabytes is None else int(1e6 * megabytes)

  @property
  def codec(self) -> compression.Codec | None:
    """The codec of messages between stages; None: they are sent as they are.
    Raises ValueError for one that leaves a part for later messages."""
    codec = traffic.run_codec(self.run, "compress", (1, None))
    if codec is not None:
      with checks.prefix_errors("compress"):
        check_complete(
          codec, "stages send activations of different examples, not sums"
        )
    return codec

  @property
  def updates(self) -> int:
    """Updates of each stage in the run."""
    return self.messages // self.table.every

  def predicted_times(self) -> dict[str, float]:
    """Returns the seconds of a microbatch in the table, which follow from the
    seconds of layers; {} if these were not measured. Messages take no time."""
    layers = self.measurements.get("layer_seconds")
    if layers is None:
      return {}
    forward, backward = np.add.reduceat(np.array(layers), self.cuts[:-1]).T
    # A stage that recomputes has a second forward in its backward.
    backward = backward + np.where(self.recompute, forward, 0.0)
    # How a backward divides was not measured: inputs and weights take halves.
    half = backward / 2
    costs = analyze.costs(len(half), forward=forward, input=half, weight=half)
    makespan = float(analyze.times(self.table, costs).end.max())
    return {"microbatch_seconds": makespan / self.table.microbatches}

  def describe_partition(self) -> str:
    """Returns a line with the layers and devices of each stage."""
    ranges = itertools.pairwise(self.cuts)
    stages = (
      f"{first} to {last - 1} on {', '.join(map(str, places))}"
      for (first, last), places in zip(ranges, self.table.places(), strict=True)
    )
    return f"{self.run.label}: layers (on devices) {'; '.join(stages)}"


def check(run: Run) -> None:
  """Checks the settings that need no data set."""
  section, key_path = run.config["pipeline"], f"config.runs.{run.label}"
  name, partitioner = section["schedule"], section["partition"]
  with checks.prefix_errors(f"runs.{run.label}"):
    traits = schedules.describe(name)
  if partitioner is None:
    if section["bandwidth"] != SECTIONS["pipeline"].keys["bandwidth"].default:
      raise ValueError(
        f"{key_path}.bandwidth is for a partitioner: set {key_path}.partition,"
        " or leave bandwidth at its default"
      )
    return
  if traits.partitioner != partitioner:
    raise ValueError(
      f"{key_path}.partition={partitioner} is not for the schedule {name}: use"
      f" {'pipedream' if partitioner == 'pipedream' else 'ftpipe'}"
    )
  for key in ("devices", "replicas", "cuts"):
    if section.get(key, "time") not in ("parameters", "time"):
      raise ValueError(
        f"{key_path}.{key} follows from {key_path}.partition: drop one of them"
      )


def plan(experiment: Any, run: Run, workers: int) -> PipelinePlan:
  """Builds the table and the stages of a run.

  Raises:
    ValueError: if schedule, options and cuts do not fit the model.
  """
  del workers
  problem, path = experiment.problem_of(run), f"runs.{run.label}"
  if problem.pieces is None:
    key = "model" if run.config["problem"]["name"] is None else "problem"
    raise ValueError(
      f"config.{path}: config.{key}.name {run.config[key]['name']!r} makes a"
      " model that is not a tuple of layers, which cannot be cut into stages:"
      " use engine simulate, threads, ray or mesh, or return layers"
    )
  shapes = jax.eval_shape(problem.init, jax.random.key(0))
  total = _count_microbatches(run, problem)
  section = dict(run.config["pipeline"])
  if section["partition"] is not None:
    section |= _partition_keys(experiment, run, problem, shapes)
  # A table in a file has its own stages, so the section's default is ignored.
  stages = section["stages"]
  if table_lib.is_file(section["schedule"]):
    stages = experiment.config["runs"][run.label].get("stages")
  table = _table(run, section, stages, total)
  with checks.prefix_errors(path, tuple(section)):
    weights = schedules.weights_of(table, section["weights"])
    recompute = schedules.recompute_of(table, section["recompute"])
  peak = float(run.config["learning_rate"]) * table.every
  rate = learning_rates.schedule(
    run, problem, peak=peak, batches=table.every, start=_WARM_UP_START * peak
  )
  with checks.prefix_errors("pipeline.cuts"):
    cuts = _cuts(experiment, section, table.stages, problem, shapes)
  planned = PipelinePlan(
    run=run,
    dataset=experiment.dataset,
    problem=problem,
    table=table,
    weights=weights,
    recompute=recompute,
    learning_rate=peak,
    schedule=rate,
    messages=total,
    parts=(),
    cuts=tuple(cuts),
    together=table.flush and run.config["clip_norm"] is not None,
    measurements=experiment.measurements,
  )
  planned.codec  # noqa: B018  raises now if it is unfit
  parts = _parts(planned, section, shapes)
  if planned.room is not None:
    if planned.together:
      raise ValueError(
        f"config.{path}.device_megabytes: config.clip_norm needs the gradients"
        " of all stages at once: drop one of them"
      )
    with checks.prefix_errors(f"{path}.device_megabytes"):
      residence.check(table, parts, planned.room)
  return planned._replace(parts=tuple(parts))


def _count_microbatches(run: Run, problem: problems.Problem) -> int:
  """Returns the microbatches of a cell: a multiple of an update's."""
  per_update = run.config["pipeline"]["microbatches"]
  count = learning_rates.budget_batches(run, problem)
  total = max(int(round(count)) // per_update, 1) * per_update
  if total > _MAX_MICROBATCHES:
    raise ValueError(
      f"config.epochs {run.config['epochs']:g} is {total:,} microbatches of"
      f" {run.config['batch_size']}; use at most {_MAX_MICROBATCHES:,}"
    )
  return total


def _table(
  run: Run, section: Mapping[str, Any], stages: int | None, total: int
) -> Schedule:
  """Returns the table of a run; errors name the key of the config."""
  name = section["schedule"]
  option_names = schedules.describe(name).options
  try:
    return schedules.make(
      name,
      stages=stages,
      total=total,
      batch=section["microbatches"],
      every=section["every"],
      **{key: section[key] for key in option_names if key in section},
    )
  except schedules.OptionError as error:
    raise ValueError(f"config.runs.{run.label}.{error}") from error
  except (TypeError, ValueError):
    with checks.prefix_errors(f"runs.{run.label}", option_names):
      raise


def _parts(
  planned: PipelinePlan, section: dict[str, Any], shapes: Any
) -> list[Part]:
  """Returns the stages. Runs of the same algorithm share compiled programs."""
  run, table, rate = planned.run, planned.table, planned.schedule
  variants = stage_recipes.variants(
    *(run, rate, table, planned.weights),
    section=section,
    updates=planned.updates,
    shapes=shapes,
  )
  with checks.prefix_errors(f"runs.{run.label}", tuple(run.options)):
    recipes = [stage_recipes.recipe(run, rate, each) for each in variants]
    parts = cut.cut(planned.problem, shapes, planned.cuts, recipes)
  cache_key = [run.recipe, run.options, table.every]
  cache_key += [run.config[key] for key in RUN_KEYS]
  for stage, variant in enumerate(variants):
    built = parts[stage].server, parts[stage].at_worker
    server, at_worker = _servers.get(
      lambda built=built: built, [*cache_key, *variant], rate, run.given_recipe
    )
    parts[stage] = parts[stage]._replace(
      server=server,
      at_worker=at_worker,
      correct=stage_recipes.correction(rate, variant),
    )
  return parts


_servers = build_cache.BuildCache(256)  # of stages


# Where layers are cut.


def _cuts(
  experiment: Any,
  section: Mapping[str, Any],
  stages: int,
  problem: Any,
  shapes: Any,
) -> list[int]:
  """Returns the layers at which stages begin, and the number of layers."""
  setting, layers = section["cuts"], problem.pieces.layers
  if isinstance(setting, list):
    if len(setting) != stages + 1:
      raise ValueError(
        f"{stages} stages are cut at {stages + 1} layers, from 0 to"
        f" {len(layers)}, not {setting}"
      )
    return setting
  layer_ends = _layer_ends(problem, shapes)
  if stages > len(layer_ends):
    raise ValueError(
      f"the model has {len(layer_ends)} layers with weights, too few for"
      f" {stages} stages: set config.pipeline.stages={len(layer_ends)}, or a"
      " deeper config.model"
    )
  if setting == "time":
    costs = [sum(seconds) for seconds in _layer_seconds(experiment, problem)]
  else:
    costs = [models.count(weights) for weights in base.weights_of(shapes)]
  groups = [sum(costs[s:e]) for s, e in itertools.pairwise([0, *layer_ends])]
  nodes = placement.balance(groups, stages)
  return [0, *(layer_ends[stage[-1]] for stage in nodes)]


def _layer_ends(problem: Any, shapes: Any) -> list[int]:
  """Returns the ends of layers at which the model may be cut. Each piece must
  have weights, so a layer without weights stays with the next layer."""
  layers = enumerate(base.weights_of(shapes), 1)
  layer_ends = [end for end, weights in layers if models.count(weights)]
  return [*layer_ends[:-1], len(problem.pieces.layers)]


def _partition_keys(
  experiment: Any, run: Run, problem: Any, shapes: Any
) -> dict[str, Any]:
  """Runs the partitioner of a run. Returns the keys of the section that it
  sets: stages, cuts, and the stages' devices or replicas.
  """
  section = run.config["pipeline"]
  # With a partitioner, the section's `stages` is the number of devices.
  count, bandwidth = section["stages"], float(section["bandwidth"])
  layer_ends = _layer_ends(problem, shapes)
  seconds = _layer_seconds(experiment, problem)
  with checks.prefix_errors(f"runs.{run.label}"):
    layers, nodes = _profile(problem, shapes, seconds=seconds).nodes, []
    for start, stop in itertools.pairwise([0, *layer_ends]):
      group = layers[start:stop]
      sum_fields = ("forward", "backward", "parameters", "stash")
      sums = {k: sum(getattr(node, k) for node in group) for k in sum_fields}
      nodes.append(group[-1]._replace(**sums))
    chain = graph.chain(nodes)
    if section["partition"] == "pipedream":
      result = pipedream.pipedream(chain, count, bandwidth)
      keys = {"replicas": list(result.replicas)}
    else:
      mode = _recompute_mode(run, section)
      result = mixed_pipe.mixed_pipe(
        chain, count, bandwidth=bandwidth, recompute=mode
      )
      # A device may have no stage, and tables number those that have one.
      devices = np.unique(result.partition.devices, return_inverse=True)[1]
      keys = {"devices": devices.ravel().tolist()}
    inner_cuts = placement.cuts(result.partition)[1:]
  cuts = [0, *(layer_ends[node - 1] for node in inner_cuts)]
  return {**keys, "stages": len(inner_cuts), "cuts": cuts}


def _recompute_mode(run: Run, section: Mapping[str, Any]) -> str:
  """Returns the stages that recompute forwards, in `mixed_pipe`'s terms."""
  recompute = section["recompute"]
  if recompute is None:
    recompute = schedules.describe(section["schedule"]).recompute
  if isinstance(recompute, list):
    raise ValueError(
      f"config.runs.{run.label}.recompute {recompute} lists stages before"
      " mixed_pipe has made them: use True, False or 'but_last'"
    )
  return {True: "all", False: "none"}.get(recompute, recompute)


def _profile(problem: Any, params: Any, **times: Any) -> graph.Graph:
  """Returns the graph of the model's layers; `times`: see `graph.profile`."""
  key = jax.random.key(0)
  dtype = problems.dtype_of(base.weights_of(params))
  x = jax.eval_shape(
    lambda batch, key: problem.pieces.prepare(batch, key, dtype),
    problem.batches(0, 1)(0, 0),
    key,
  )
  return graph.profile(problem.pieces.layers, params, x, key=key, **times)


def _layer_seconds(experiment: Any, problem: Any) -> list[list[float]]:
  """Returns the seconds of each layer, forward and backward.

  They are measured once, when the experiment begins. A resumed experiment
  reads the stored values, as other values could move the cuts.
  """
  count = len(problem.pieces.layers)
  seconds = experiment.measurements.get("layer_seconds")
  if seconds is None:
    measure = functools.partial(graph.measure, clock=time.perf_counter)
    params = problem.init(jax.random.key(0))
    profile = _profile(problem, params, measure=measure)
    seconds = [[node.forward, node.backward] for node in profile.nodes]
    experiment.measurements["layer_seconds"] = seconds
  with contextlib.suppress(TypeError, ValueError):
    array = np.array(seconds, float)
    if array.shape == (count, 2) and (array >= 0).all():
      return array.tolist()
  raise ValueError(
    f"measurements.json does not have the {count} layers' seconds, forward and"
    " backward, by which this experiment's stages were cut: restore the file,"
    " or choose another folder with --workdir"
  )
