"""Advice: whether to distribute a config, and how, each with its number.

`asgd.experiment.ways` measures and plays the ways of training. `advise` adds
recipe, learning rate and memory by the rules of docs/howto/choosing.md: the
first question there that a config answers with yes gives its recipe. The
stability limit is that of `asgd.diagnosis.curvature_limit`, the memory that of
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
  ONE,
  WORTH,
  Machines,
  StepCosts,
  StepRule,
  Way,
)
from asgd.pages.panels import bytes_text
from asgd.parallel import memory

_FEW = 8  # workers up to which plain `asgd` loses little
_OLD = 4  # a machine this many times as slow sends very old messages
_RUN = "advised"  # label of the proposed run
_MESH_WARM_UP = 10  # a mesh starts at this part of the peak rate


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


# Rules. Each returns its result and the sentences that give the reason.


def recipe_for(
  way: Way, training: StepRule, cluster: Machines, nbytes: float
) -> tuple[str, str]:
  """Returns the recipe of a way of training.

  Args:
    way: the chosen one.
    training: how the config takes its steps.
    cluster: the machines.
    nbytes: the bytes of the parameters.
  """
  workers, momentum = way.workers, training.momentum
  if way.name in (ONE, MESH):
    name = "asgd" if way.name == ONE else "ssgd"
    return name, "Nothing is stale: no rule against staleness is needed."
  if way.name == LOCAL:
    return ways_lib.local_recipe(training, cluster), (
      f"Workers send a message after {way.steps} steps, so there are"
      f" {way.steps} times fewer messages."
    )
  if way.name == CODED:
    codec = ways_lib.codec_of(training)["name"]
    return "asgd", (
      f"The codec {codec} makes messages small"
      + (", and keeps the momentum at the workers." if momentum else ".")
    )
  if training.optimizer is not None:
    name = training.optimizer["name"]
    return "asgd", f"{name} applies each message; asgd runs any optimizer."
  if momentum and training.down is not None:
    return "multi_asgd", (
      f"The config has momentum {momentum:g}: each worker has one. DANA looks"
      " ahead, which config.compress_down does not allow."
    )
  if momentum:
    state = memory.recipe_bytes("dana_zero", workers, momentum=momentum).total
    state *= nbytes / 4
    text = (
      f"The config has momentum {momentum:g}: at a staleness of"
      f" {way.stale:.1f} one momentum for all workers diverges, and DANA has"
      " one for each."
    )
    if state > cluster.memory:
      return "dana_slim", (
        f"{text} dana_zero would keep {bytes_text(state)} at the server, more"
        f" than its {bytes_text(cluster.memory)}; dana_slim keeps it at the"
        " workers."
      )
    return "dana_zero", text
  # Of machines, not of steps: one late step makes one old message.
  if cluster.spread > _OLD:
    return "gap_aware", (
      f"The slowest machine takes {cluster.spread:.2g} times as long as the"
      f" fastest (more than {_OLD}), so its messages are old: gap_aware divides"
      " them by how far the parameters have moved."
    )
  if workers <= _FEW:
    return "asgd", (
      f"Without momentum {workers} workers lose little to staleness"
      f" (at most {_FEW})."
    )
  return "dc_asgd_a", (
    f"Without momentum, but with {workers} workers (more than {_FEW}), messages"
    " are compensated for their delay."
  )


def limit_of(
  name: str, way: Way, training: StepRule, measured: StepCosts,
  cluster: Machines,
) -> float:
  """Returns the quadratic limit: the largest product of learning rate and
  curvature at which a recipe is stable; NaN if that is not known."""
  unknown = training.optimizer is not None or way.name == LOCAL
  if unknown or not math.isfinite(measured.sharpness):
    return math.nan
  if way.name == CODED and training.momentum:
    name = "multi_asgd"  # one momentum for each worker, as the codec has it
  recipe = ways_lib.built(name, training, way.workers)
  trace = orders.build(
    *(recipe.order, ways_lib.clock(measured, cluster)),
    workers=way.workers,
    messages=40 * way.workers,
  )
  rate = training.rate
  return rate * diagnosis.curvature_limit(recipe, trace, learning_rate=rate)


def rate_for(
  way: Way, training: StepRule, sharpness: float, limit: float
) -> tuple[float, bool, str]:
  """Returns (peak learning rate, whether it needs a warm-up, reason).

  A mesh of N machines takes N batches at once: the rate is N times that of one
  batch for SGD (Goyal et al. 2017), and root N times for other optimizers
  (Malladi et al. 2022). Updates on single messages keep it. If rate times
  curvature is above `limit`, the rate has to begin below it (a warm-up from
  peak / N), and the peak is lowered until it does.
  """
  rate, workers = training.rate, way.workers
  text = f"{rate:g}, as in the config."
  if way.name == MESH:
    power = 1.0 if training.optimizer is None else 0.5
    rate *= workers**power
    factor = f"{workers}" if power == 1 else f"the root of {workers}"
    text = (
      f"{rate:.3g}: an update is on {workers} batches, so the rate of the"
      f" config, {training.rate:g}, is multiplied by {factor}, and warmed up."
    )
  if not math.isfinite(limit):
    return rate, way.name == MESH, f"{text} Its stability limit is not known."
  product = rate * sharpness
  words = f"Rate x sharpness is {product:.2g}, the quadratic limit {limit:.2g}"
  if product <= limit:
    return rate, way.name == MESH, f"{text} {words}: stable from the start."
  start = _MESH_WARM_UP if way.name == MESH else workers
  if product / start <= limit:
    return rate, True, (
      f"{text} {words}: begin lower, with a warm-up from {rate / start:.2g};"
      " training then lowers the sharpness."
    )
  lowered = float(f"{start * limit / sharpness:.2g}")
  return lowered, start > 1, (
    f"{lowered:g} instead of {rate:g}. {words}, and even a warm-up from"
    f" {rate / start:.2g} would begin above it."
  )


def memory_for(
  way: Way, name: str, training: StepRule, measured: StepCosts
) -> tuple[float, float]:
  """Returns the bytes at a worker and at the server, 0.0 without a server."""
  options = ways_lib.options_of(name, training)
  if way.name == CODED:
    options = {}  # the codec has the momentum
  need = memory.recipe_bytes(name, way.workers, **options)
  at_worker = 2 * measured.dense + need.worker * measured.parameters
  at_worker += measured.kept
  state = need.total * measured.parameters
  if way.name in (ONE, MESH):
    return at_worker + state, 0.0
  return at_worker, measured.dense + state


# Sentences.


def _distribution(
  found: tuple[Way, ...], way: Way, measured: StepCosts, cluster: Machines
) -> str:
  """Returns whether to distribute, and why."""
  text = (
    f"One machine trains all {measured.batches:,.0f} steps in"
    f" {show_seconds(measured.alone)}."
  )
  if len(found) == 1:
    return f"No: there is one machine. {text}"
  fastest = max(found, key=lambda each: each.speed)
  if way.name != ONE:
    took = cluster.start + measured.alone / way.speed
    return (
      f"Yes. {text} {way.workers} workers, each on a machine like this one,"
      f" need {show_seconds(took)}, of which {show_seconds(cluster.start)} pass"
      " until they have started."
    )
  if fastest.speed < WORTH:
    return (
      f"No. {text} The fastest other way ({fastest.name}, {fastest.workers}"
      f" workers) is {fastest.speed:.3g} times as fast; below {WORTH:g} it is"
      " not worth it."
    )
  took = cluster.start + measured.alone / fastest.speed
  return (
    f"No. {text} The fastest other way ({fastest.name}, {fastest.workers}"
    f" workers) needs {show_seconds(took)}, of which"
    f" {show_seconds(cluster.start)} pass until its workers have started."
  )


def _way(
  found: tuple[Way, ...], way: Way, measured: StepCosts, cluster: Machines
) -> str:
  """Returns why the way of training and its number of workers were chosen."""
  network, workers = cluster.network, way.workers
  each = (
    2 * network.latency
    + network.service
    + 2 * measured.dense / network.up
  )
  texts = [
    f"Fewer workers than these {workers} (of {cluster.machines}) would give"
    f" less than {100 * ways_lib.ENOUGH:.0f} % of its greatest speed.",
    f"A dense message takes {show_seconds(each)} on its way and at the server,"
    f" a step {show_seconds(measured.mean)}; the slowest machine takes"
    f" {cluster.spread:.2g} times as long as the fastest.",
  ]
  if way.name == MESH:
    reducing = ways_lib.reduce_seconds(measured, cluster, workers)
    texts.append(f"An all-reduce takes {show_seconds(reducing)}.")
  faster = [each for each in found if each.speed > way.speed]
  if faster:
    most = max(faster, key=lambda each: each.speed)
    texts.append(
      f"The fastest way ({most.name}) is {most.speed / way.speed:.3g} times as"
      f" fast; below {WORTH:g} the simpler way is better."
    )
  return " ".join(texts)


def _flags(
  way: Way, name: str, rate: float, warm_up: bool, training: StepRule,
  config: Mapping[str, Any],
) -> tuple[str, ...]:
  """Returns the flags of asgd train for the advice."""
  options = dict(training.own)
  if way.name == CODED or "momentum" not in algorithms.options(name):
    options.pop("momentum", None)
  if way.steps > 1:
    options["steps"] = way.steps
  optimizer = options.pop("optimizer", {})
  run = {"recipe": name, **options}
  run |= {f"optimizer.{key}": value for key, value in optimizer.items()}
  sets = {f"runs.{_RUN}.{key}": value for key, value in run.items()}
  sets |= {"only": _RUN, "learning_rate": float(f"{rate:.3g}")}
  engine = "simulate"
  if way.name == MESH:
    engine = "mesh"
    sets["mesh.axes"] = f"data:{way.workers}"
    sets["batch_size"] = way.workers * config["batch_size"]
  else:
    sets["workers"] = way.workers
  if way.name == CODED:
    codec = ways_lib.codec_of(training)
    both = ("compress", codec), ("compress_down", {"name": "top_k"})
    for key, section in both:
      sets |= {f"{key}.{option}": x for option, x in section.items()}
  section = config["learning_rate_schedule"]
  if warm_up and not (section["warmup_epochs"] or section["warmup_examples"]):
    sets["learning_rate_schedule.warmup_epochs"] = 1.0
  changes = (f"--config.{key}={value}" for key, value in sets.items())
  return f"--engine={engine}", *changes


def advise(
  measured: StepCosts, cluster: Machines, training: StepRule,
  config: Mapping[str, Any],
) -> Recommendation:
  """Returns the advice for measurements and machines.

  Args:
    measured: the costs of a step, measured on this machine.
    cluster: the machines and links that may be used.
    training: how the config takes its steps.
    config: resolved.
  """
  found = ways_lib.ways(measured, cluster, training)
  way = ways_lib.choose(found, measured, cluster)
  name, why = recipe_for(way, training, cluster, measured.dense)
  limit = limit_of(name, way, training, measured, cluster)
  rate, warm_up, of_rate = rate_for(way, training, measured.sharpness, limit)
  at_worker, at_server = memory_for(way, name, training, measured)
  reasons = {"distribute": _distribution(found, way, measured, cluster)}
  if way.name != ONE:
    reasons["way"] = _way(found, way, measured, cluster)
    reasons["speed-up"] = (
      f"{way.speed:.2g} times the examples a second of one machine, by the"
      f" event simulator. Staleness is {way.stale:.1f} on average, {way.oldest}"
      " at most: the same number of examples may give a higher loss."
    )
  reasons["recipe"] = f"{name}. {why}"
  reasons["learning rate"] = of_rate
  text = f"{bytes_text(at_worker)} at each worker"
  if at_server:
    text += f", {bytes_text(at_server)} at the server"
  over = max(at_worker, at_server) > cluster.memory
  reasons["memory"] = f"{text}; a machine has {bytes_text(cluster.memory)}." + (
    " It does not fit: divide the model by a pipeline or a mesh (asgd plan)."
    if over
    else ""
  )
  flags = _flags(way, name, rate, warm_up, training, config)
  return Recommendation(way, found, name, rate, flags, reasons)


def describe(measured: StepCosts, training: StepRule) -> dict[str, str]:
  """Returns topic -> sentence on each measurement."""
  times = sorted(measured.seconds)
  middle = statistics.median(times)
  most = times[math.ceil(0.9 * len(times)) - 1]
  noise = ""
  if most > WORTH * middle:  # rounds wait for the slowest step
    noise = "; they differ, which makes rounds slow: close other programs"
  lines = {
    "step": (
      f"{show_seconds(measured.mean)}, the mean of {len(times)} warm steps (the"
      f" median is {show_seconds(middle)}; 9 of 10 took at most"
      f" {show_seconds(most)})" + noise
    ),
    "message": (
      f"{bytes_text(measured.dense)} for {measured.parameters:,} parameters;"
      f" {bytes_text(measured.coded)} with the codec"
      f" {ways_lib.codec_of(training)['name']}"
    ),
  }
  if math.isfinite(measured.sharpness):
    lines["sharpness"] = (
      f"{measured.sharpness:.3g}, the largest eigenvalue of the Hessian"
    )
  return lines
