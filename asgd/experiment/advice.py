"""Advises whether and how to distribute a config, with a number per reason.

`asgd.experiment.ways` measures a step, and simulates the ways of training.
`advise` adds recipe, learning rate and memory. Recipes follow the questions of
docs/howto/choosing.md: the first one that a config answers with yes decides.
The stability limit is from `asgd.diagnosis.curvature_limit`, the memory from
`asgd.parallel.memory.recipe_bytes`.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from asgd import algorithms, diagnosis, orders
from asgd.experiment import ways as ways_lib
from asgd.experiment.ways import (
  CODED,
  LOCAL,
  MESH,
  ONE_MACHINE,
  WORTHWHILE_SPEEDUP,
  Machines,
  StepCosts,
  StepRule,
  Way,
)
from asgd.pages.panels import bytes_text
from asgd.parallel import memory

_FEW_WORKERS = 8  # workers up to which plain `asgd` loses little
_SLOW_FACTOR = 4  # a machine this many times as slow sends very old messages
_RUN = "advised"  # label of the proposed run
_MESH_WARM_UP_FACTOR = 10  # the warm-up of a mesh starts at peak rate / this


class Recommendation(NamedTuple):
  """The chosen way with its settings, and the reasons."""

  way: Way  # the chosen one
  ways: tuple[Way, ...]  # all, the simplest first
  recipe: str
  learning_rate: float
  flags: tuple[str, ...]  # of asgd train, beside the config's file
  reasons: dict[str, str]  # topic -> sentences with their numbers


def show_seconds(seconds: float) -> str:
  """Returns a time in a fitting unit.

  Example:
    >>> [show_seconds(s) for s in (2.5e-5, 0.0051, 9.64, 4000.0, 1e5)]
    ['25 us', '5.1 ms', '9.6 s', '67 min', '28 h']
  """
  for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
    if seconds >= (2 if size > 1 else 1) * size:
      return f"{float(f'{seconds / size:.2g}'):g} {unit}"
  return f"{float(f'{seconds * 1e6:.2g}'):g} us"


# Rules. Those for recipe and rate also return the sentences of their reason.


def recipe_for(
  way: Way, rule: StepRule, cluster: Machines, nbytes: float
) -> tuple[str, str]:
  """Returns the recipe of a way of training.

  Args:
    way: the chosen one.
    rule: how the config takes its steps.
    cluster: the machines.
    nbytes: the bytes of the parameters.
  """
  workers, momentum = way.workers, rule.momentum
  if way.name in (ONE_MACHINE, MESH):
    recipe_name = "asgd" if way.name == ONE_MACHINE else "ssgd"
    return recipe_name, "Nothing is stale: no rule against staleness is needed."
  if way.name == LOCAL:
    return ways_lib.local_recipe(rule, cluster), (
      f"Workers send a message after {way.steps} steps, so there are"
      f" {way.steps} times fewer messages."
    )
  if way.name == CODED:
    codec = ways_lib.message_codec(rule)["name"]
    return "asgd", (
      f"The codec {codec} makes messages small"
      + (", and keeps the momentum at the workers." if momentum else ".")
    )
  if rule.optimizer is not None:
    recipe_name = rule.optimizer["name"]
    return (
      "asgd",
      f"{recipe_name} applies each message; asgd runs any optimizer.",
    )
  if momentum and rule.down is not None:
    return "multi_asgd", (
      f"The config has momentum {momentum:g}: each worker has one. DANA looks"
      " ahead, which config.compress_down does not allow."
    )
  if momentum:
    state = memory.recipe_bytes("dana_zero", workers, momentum=momentum).total
    state *= nbytes / 4
    text = (
      f"The config has momentum {momentum:g}: at a staleness of"
      f" {way.staleness:.1f} one momentum for all workers diverges, and DANA"
      " has one for each."
    )
    if state > cluster.memory:
      return "dana_slim", (
        f"{text} dana_zero would keep {bytes_text(state)} at the server, more"
        f" than its {bytes_text(cluster.memory)}; dana_slim keeps it at the"
        " workers."
      )
    return "dana_zero", text
  # Compare machines, not steps: a single late step makes one old message only.
  if cluster.spread > _SLOW_FACTOR:
    return "gap_aware", (
      f"The slowest machine takes {cluster.spread:.2g} times as long as the"
      f" fastest (more than {_SLOW_FACTOR}), so its messages are old: gap_aware"
      " divides them by how far the parameters have moved."
    )
  if workers <= _FEW_WORKERS:
    return "asgd", (
      f"Without momentum, {workers} workers lose little to staleness"
      f" (up to {_FEW_WORKERS} workers do)."
    )
  return "dc_asgd_a", (
    f"Without momentum, but with {workers} workers (more than {_FEW_WORKERS}),"
    " messages are compensated for their delay."
  )


def stability_limit(
  recipe_name: str, way: Way, rule: StepRule, step_costs: StepCosts,
  cluster: Machines,
) -> float:
  """Returns the quadratic limit: the largest product of learning rate and
  curvature at which a recipe is stable; NaN if that is not known."""
  is_unknown = rule.optimizer is not None or way.name == LOCAL
  if is_unknown or not math.isfinite(step_costs.sharpness):
    return math.nan
  if way.name == CODED and rule.momentum:
    # The codec has one momentum per worker, as multi_asgd has.
    recipe_name = "multi_asgd"
  recipe = ways_lib.build_recipe(recipe_name, rule, way.workers)
  trace = orders.build(
    *(recipe.order, ways_lib.job_durations(step_costs, cluster)),
    workers=way.workers,
    messages=40 * way.workers,
  )
  rate = rule.rate
  return rate * diagnosis.curvature_limit(recipe, trace, learning_rate=rate)


def rate_for(
  way: Way, rule: StepRule, sharpness: float, limit: float
) -> tuple[float, bool, str]:
  """Returns (peak learning rate, whether it needs a warm-up, reason).

  A mesh of N machines takes N batches at once: the rate is N times that of one
  batch for SGD (Goyal et al. 2017), and root N times for other optimizers
  (Malladi et al. 2022). Updates on single messages do not change the rate. If
  rate times curvature is above `limit`, a warm-up from a lower rate is needed;
  the peak is lowered if the warm-up would begin above `limit`, too.
  """
  rate, workers = rule.rate, way.workers
  text = f"{rate:g}, as in the config."
  if way.name == MESH:
    power = 1.0 if rule.optimizer is None else 0.5
    rate *= workers**power
    factor_text = f"{workers}" if power == 1 else f"the root of {workers}"
    text = (
      f"{rate:.3g}: an update is on {workers} batches, so the rate of the"
      f" config, {rule.rate:g}, is multiplied by {factor_text}, and warmed"
      " up."
    )
  if not math.isfinite(limit):
    return rate, way.name == MESH, f"{text} Its stability limit is not known."
  product = rate * sharpness
  comparison = (
    f"Rate x sharpness is {product:.2g}, the quadratic limit {limit:.2g}"
  )
  if product <= limit:
    return (
      rate,
      way.name == MESH,
      f"{text} {comparison}: stable from the start.",
    )
  factor = _MESH_WARM_UP_FACTOR if way.name == MESH else workers
  if product / factor <= limit:
    return (
      rate,
      True,
      (
        f"{text} {comparison}: begin lower, with a warm-up from"
        f" {rate / factor:.2g}; training then lowers the sharpness."
      ),
    )
  lowered = float(f"{factor * limit / sharpness:.2g}")
  return lowered, factor > 1, (
    f"{lowered:g} instead of {rate:g}. {comparison}, and even a warm-up from"
    f" {rate / factor:.2g} would begin above it."
  )


def memory_for(
  way: Way, recipe_name: str, rule: StepRule, step_costs: StepCosts
) -> tuple[float, float]:
  """Returns the bytes at a worker and at the server, 0.0 without a server."""
  options = ways_lib.optimizer_options(recipe_name, rule)
  if way.name == CODED:
    options = {}  # the codec has the momentum
  per_parameter = memory.recipe_bytes(recipe_name, way.workers, **options)
  at_worker = per_parameter.worker * step_costs.parameters
  at_worker += 2 * step_costs.dense + step_costs.residuals
  state = per_parameter.total * step_costs.parameters
  if way.name in (ONE_MACHINE, MESH):
    return at_worker + state, 0.0
  return at_worker, step_costs.dense + state


# Sentences.


def _distribution_reason(
  candidates: tuple[Way, ...],
  way: Way,
  step_costs: StepCosts,
  cluster: Machines,
) -> str:
  """Returns whether to distribute, and why."""
  start, one_machine = cluster.start_seconds, step_costs.one_machine_seconds
  text = (
    f"One machine trains all {step_costs.batches:,.0f} steps in"
    f" {show_seconds(one_machine)}."
  )
  if len(candidates) == 1:
    return f"No: there is one machine. {text}"
  fastest = max(candidates, key=lambda each: each.speed)
  if way.name != ONE_MACHINE:
    seconds = start + one_machine / way.speed
    return (
      f"Yes. {text} {way.workers} workers, each on a machine like this one,"
      f" need {show_seconds(seconds)}, of which {show_seconds(start)} pass"
      " until they have started."
    )
  if fastest.speed < WORTHWHILE_SPEEDUP:
    return (
      f"No. {text} The fastest other way ({fastest.name}, {fastest.workers}"
      f" workers) is {fastest.speed:.3g} times as fast; below"
      f" {WORTHWHILE_SPEEDUP:g} it is not worth it."
    )
  seconds = start + one_machine / fastest.speed
  return (
    f"No. {text} The fastest other way ({fastest.name}, {fastest.workers}"
    f" workers) needs {show_seconds(seconds)}, of which {show_seconds(start)}"
    " pass until its workers have started."
  )


def _way_reason(
  candidates: tuple[Way, ...],
  way: Way,
  step_costs: StepCosts,
  cluster: Machines,
) -> str:
  """Returns why the way of training and its number of workers were chosen."""
  network, workers = cluster.network, way.workers
  message_seconds = (
    2 * network.latency
    + network.service
    + 2 * step_costs.dense / network.up
  )
  sentences = [
    f"{workers} of {cluster.machines} machines are the fewest that give"
    f" {100 * ways_lib.NEAR_FASTEST:.0f} % of this way's greatest speed.",
    f"A dense message takes {show_seconds(message_seconds)} on its way and at"
    f" the server, a step {show_seconds(step_costs.mean)}; the slowest machine"
    f" takes {cluster.spread:.2g} times as long as the fastest.",
  ]
  if way.name == MESH:
    reduce_seconds = ways_lib.reduce_seconds(step_costs, cluster, workers)
    sentences.append(f"An all-reduce takes {show_seconds(reduce_seconds)}.")
  faster = [other for other in candidates if other.speed > way.speed]
  if faster:
    fastest = max(faster, key=lambda other: other.speed)
    sentences.append(
      f"The fastest way ({fastest.name}) is {fastest.speed / way.speed:.3g}"
      f" times as fast; below {WORTHWHILE_SPEEDUP:g} the simpler way is better."
    )
  return " ".join(sentences)


def _flags(
  way: Way, recipe_name: str, rate: float, warm_up: bool, rule: StepRule,
  config: Mapping[str, Any],
) -> tuple[str, ...]:
  """Returns the flags of asgd train for the advice."""
  # The overrides of all runs, below, replace some of the run's own values; a
  # mesh has no server, and all its machines are in step.
  replaced = {
    MESH: {"batch_size", "compress_down", "durations"},
    CODED: {"compress", "compress_down"},
  }
  dropped = replaced.get(way.name, set())
  if way.name == CODED or "momentum" not in algorithms.options(recipe_name):
    dropped = {*dropped, "momentum"}
  run: dict[str, Any] = {"recipe": recipe_name}
  for key, value in rule.repeated_options.items():
    if isinstance(value, Mapping) and key not in dropped:
      run |= {f"{key}.{inner}": each for inner, each in value.items()}
    elif key not in dropped:
      run[key] = value
  if way.steps > 1:
    run["steps"] = way.steps
  overrides = {f"runs.{_RUN}.{key}": value for key, value in run.items()}
  overrides |= {"only": _RUN, "learning_rate": float(f"{rate:.3g}")}
  engine = "simulate"
  if way.name == MESH:
    engine = "mesh"
    overrides["mesh.axes"] = f"data:{way.workers}"
    overrides["batch_size"] = way.workers * config["batch_size"]
  else:
    overrides["workers"] = way.workers
  if way.name == CODED:
    codec = ways_lib.message_codec(rule)
    codecs = ("compress", codec), ("compress_down", {"name": "top_k"})
    for key, section in codecs:
      overrides |= {f"{key}.{option}": x for option, x in section.items()}
  schedule = config["learning_rate_schedule"]
  if warm_up and not (schedule["warmup_epochs"] or schedule["warmup_examples"]):
    overrides["learning_rate_schedule.warmup_epochs"] = 1.0
  changes = []
  for key, value in overrides.items():
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    changes.append(f"--config.{key}={text}")
  return f"--engine={engine}", *changes


def advise(
  step_costs: StepCosts, cluster: Machines, rule: StepRule,
  config: Mapping[str, Any],
) -> Recommendation:
  """Returns the advice for measurements and machines.

  Args:
    step_costs: the costs of a step, measured on this machine.
    cluster: the machines and links that may be used.
    rule: how the config takes its steps.
    config: resolved.
  """
  candidates = ways_lib.find_ways(step_costs, cluster, rule)
  way = ways_lib.choose(candidates, step_costs, cluster)
  recipe_name, recipe_reason = recipe_for(
    way, rule, cluster, step_costs.dense
  )
  limit = stability_limit(recipe_name, way, rule, step_costs, cluster)
  rate, warm_up, rate_reason = rate_for(
    way, rule, step_costs.sharpness, limit
  )
  at_worker, at_server = memory_for(way, recipe_name, rule, step_costs)
  reasons = {
    "distribute": _distribution_reason(candidates, way, step_costs, cluster)
  }
  if way.name != ONE_MACHINE:
    reasons["way"] = _way_reason(candidates, way, step_costs, cluster)
    reasons["speed-up"] = (
      f"{way.speed:.2g} times the examples per second of one machine, by the"
      f" event simulator. Staleness is {way.staleness:.1f} on average,"
      f" {way.most_stale} at most: the same number of examples may give"
      " a higher loss."
    )
  reasons["recipe"] = f"{recipe_name}. {recipe_reason}"
  reasons["learning rate"] = rate_reason
  text = f"{bytes_text(at_worker)} at each worker"
  if at_server:
    text += f", {bytes_text(at_server)} at the server"
  exceeds_memory = max(at_worker, at_server) > cluster.memory
  reasons["memory"] = f"{text}; a machine has {bytes_text(cluster.memory)}." + (
    " It does not fit: divide the model by a pipeline or a mesh (asgd plan)."
    if exceeds_memory
    else ""
  )
  flags = _flags(way, recipe_name, rate, warm_up, rule, config)
  return Recommendation(way, candidates, recipe_name, rate, flags, reasons)


def describe(step_costs: StepCosts, rule: StepRule) -> dict[str, str]:
  """Returns topic -> sentence about a measurement."""
  times = sorted(step_costs.seconds)
  median = statistics.median(times)
  percentile_90 = times[math.ceil(0.9 * len(times)) - 1]
  noise = ""
  # Rounds wait for the slowest step.
  if percentile_90 > WORTHWHILE_SPEEDUP * median:
    noise = "; they differ, which makes rounds slow: close other programs"
  lines = {
    "step": (
      f"{show_seconds(step_costs.mean)}, the mean of {len(times)} warm steps"
      f" (the median is {show_seconds(median)}; 9 of 10 took at most"
      f" {show_seconds(percentile_90)})" + noise
    ),
    "message": (
      f"{bytes_text(step_costs.dense)} for {step_costs.parameters:,}"
      f" parameters; {bytes_text(step_costs.coded)} with the codec"
      f" {ways_lib.message_codec(rule)['name']}"
    ),
  }
  if math.isfinite(step_costs.sharpness):
    lines["sharpness"] = (
      f"{step_costs.sharpness:.3g}, the largest eigenvalue of the Hessian"
    )
  return lines
