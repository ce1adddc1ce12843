"""From a config to the cells of an experiment.

A cell is one training run: an algorithm, a number of workers and a seed. An
experiment is all of them on one problem. Everything that can be wrong with a
config is found here, before anything is written or trained.
"""

import ast
import contextlib
import copy
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_collections

from asgd import (
  algorithms,
  base,
  data,
  diagnosis,
  dispatch,
  durations,
  models,
  names,
  orders,
  problems,
  schedules,
  sharding,
  simulator,
  transforms,
)
from asgd import server as server_lib
from asgd import worker as worker_lib

DEFAULTS = {
  "data": {"name": "digits", "augment": False, "partition": "shared"},
  "model": {"name": "mlp"},
  "algorithms": {},  # label -> {recipe, [title, workers, ...], options}
  "only": (),  # labels to run; () is all
  "workers": (8,),
  "seeds": (0,),
  "batch_size": 32,
  "epochs": 1.0,
  "learning_rate": 0.1,
  "schedule": {"warmup_epochs": 0.0, "decay_epochs": (), "decay_factor": 0.1},
  "order": {"name": "asynchronous"},
  "durations": {"name": "homogeneous"},
  "gate": {"max_staleness": None},  # messages staler than that are dropped
  "clip_norm": None,  # global norm to which messages are clipped
  "server": {
    "shards": 1,
    "consistent": False,  # all shards apply messages in one order
    "log": 16,  # messages kept until a snapshot; 0: none
    "wire": "float32",  # or "bfloat16": how parameters and messages travel
  },
  "live": {
    "slowdown": (),  # factors on the time of workers 0, 1, ...; () is none
    "refill": True,  # replace workers that die
    "together": True,  # wait for every worker before the first begins
    "late_mads": 10.0,  # see asgd.runtimes.deadlines
    "late_seconds": 2.0,
    "start_seconds": 120.0,
    "worker_cpus": 0.0,  # what Ray reserves for each worker
    "worker_gpus": 0.0,
    "devices": 1,  # of each worker, and how they divide its work
    "parallel": "data",  # or "tensor"
    "spans": False,  # write what workers do when
  },
  "evaluations": 10,  # per cell, evenly spaced, the last at the end
  "evaluation_examples": 0,  # test examples used; 0 is all
  "curvature_checks": 4,  # how many of them estimate the sharpness
  "checkpoint_seconds": 30.0,
  "on_nan": "stop",  # or "record": keep the cell as diverged and go on
}
# Sections whose other keys are arguments of what their name selects.
_OPEN_SECTIONS = ("model", "order", "durations")
# What the experiment passes to makers itself.
_RESERVED = {
  "model": ("classes",),
  "order": ("durations", "workers", "messages", "delay"),
  "durations": (),
}
_MOST_WORKERS, _MOST_MESSAGES, _MOST_PARAMETERS = 10_000, 10**8, 10**10
_MOST_NUMBER = 1e30  # so that float32 holds it, and its inverse
_MOST_INTEGER = 2**31 - 1  # so that int32 holds it
_MOST_SECONDS = 1e9  # that a clock can count
# Of a live run, on one machine.
_MOST_SHARDS, _MOST_DEVICES, _MOST_LOG, _MOST_SLOWDOWN = 256, 256, 10_000, 1e4
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # a folder's name
_LABEL_KEYS = ("recipe", "title", "workers", "learning_rate")


class Cell(NamedTuple):
  """One training run of an experiment."""

  label: str  # of the algorithm, in the config
  title: str  # of the algorithm, for people
  workers: int
  seed: int

  @property
  def name(self) -> str:
    """Its folder."""
    return f"{self.label}-n{self.workers}-s{self.seed}"


class Plan(NamedTuple):
  """What cells that differ only in the seed have in common."""

  server: base.Server
  worker: base.Worker
  host: simulator.Host
  learning_rate: float  # the peak
  schedule: Any  # float, or update -> learning rate
  order: str
  messages: int  # received in one cell
  steps: int  # batches in one message
  curvature_limit: float  # largest stable curvature at the peak rate, or NaN


class Experiment(NamedTuple):
  """All there is to run."""

  config: dict[str, Any]  # resolved: every key, plain data
  dataset: data.Dataset
  problem: problems.Problem
  cells: tuple[Cell, ...]


def resolve(config: ml_collections.ConfigDict | Mapping) -> dict[str, Any]:
  """Returns the config as plain data, with defaults filled in.

  Raises:
    ValueError: for a key that means nothing, naming the nearest that does.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  resolved = {}
  for key in config:
    if key not in DEFAULTS:
      raise ValueError(f"unknown config key {key!r}; {_near(key, DEFAULTS)}")
  for key, default in DEFAULTS.items():
    value = config.get(key, default)
    if isinstance(default, dict):
      if not isinstance(value, Mapping):
        raise ValueError(f"config.{key} must be a dict, not {value!r}")
      if key not in (*_OPEN_SECTIONS, "algorithms"):
        for inner in value:
          if inner not in default:
            full = f"{key}.{inner}"
            raise ValueError(
              f"unknown config key {full!r}; {_near(inner, default)}"
            )
      if key in _OPEN_SECTIONS and "name" in value:
        default = {}  # the arguments of another name's default mean nothing
      value = {**default, **value}
    if isinstance(default, tuple) and isinstance(value, (str, int, float)):
      value = [value]
    resolved[key] = plain(value)
  return resolved


def override(
  config: ml_collections.ConfigDict | Mapping,
  overrides: Iterable[tuple[str, str]],
) -> dict[str, Any]:
  """Applies command-line overrides to a config.

  Args:
    config: keys as in DEFAULTS.
    overrides: (dotted key, text); text is a Python literal, or else a string.
      A list may be written as 1,2,3, and one of one element as that element.
      Another name for a model, an order or durations drops the arguments that
      the config has for the old one.

  Returns:
    The config as plain data; `resolve` checks its keys.

  Raises:
    ValueError: for a key below something that is no section.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  if not isinstance(config, Mapping):
    raise ValueError(
      f"get_config() must return a ConfigDict, not {type(config).__name__}"
    )
  config = copy.deepcopy(dict(config))
  overrides = list(overrides)
  # Names first, so that arguments of the new name survive in any order.
  overrides.sort(key=lambda pair: not pair[0].endswith(".name"))
  for path, text in overrides:
    *sections, key = path.split(".")
    place, default = config, DEFAULTS
    for depth, section in enumerate(sections):
      default = default.get(section, {}) if isinstance(default, Mapping) else {}
      if section not in place and (depth or section not in DEFAULTS):
        where = ".".join(sections[: depth + 1])
        known = place if depth else DEFAULTS
        raise ValueError(
          f"unknown config key {where!r}; {_near(section, known)}"
        )
      if isinstance(default, dict):
        place = place.setdefault(section, dict(default))
      if not isinstance(default, dict) or not isinstance(place, dict):
        raise ValueError(f"config.{path}: {section!r} has no keys below it")
    old = place.get(key, default.get(key) if default else None)
    value = _parse(text, old)
    if key == "name" and sections[0] in _OPEN_SECTIONS and value != old:
      place.clear()
    place[key] = value
  return config


def _parse(text: str, old: Any) -> Any:
  """Reads the text of an override, as a list where there was one."""
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = {"true": True, "false": False}.get(text, text)
  if isinstance(old, (list, tuple)) and not isinstance(value, (list, tuple)):
    return value.split(",") if isinstance(value, str) else [value]
  return value


def _near(key, known):
  return names.nearest(key, known)


def plain(value):
  """Returns a config's value with tuples as lists, as they will be when read
  back from JSON.

  Raises:
    ValueError: for what is no plain data.
  """
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple, range)):
    return [plain(v) for v in value]
  if value is not None and not isinstance(value, (bool, int, float, str)):
    raise ValueError(
      f"a config holds numbers, strings, lists and dicts, not {value!r}"
    )
  return value


def _numbers(config, key, least, most, section=""):
  values = config[key]
  values = values if isinstance(values, list) else [values]
  bad = [v for v in values if type(v) is not int or not least <= v <= most]
  if bad or not values or len(set(values)) != len(values):
    what = bad[0] if bad else values
    raise ValueError(
      f"config.{section}{key} must be different whole numbers from {least} to"
      f" {most}, at least one of them, not {what!r}"
    )
  return values


def _positive(config, key, *, or_zero=False, section=""):
  """Returns a number that must be positive, whole if its default is."""
  value, kind = config[key], type(DEFAULTS[key])
  name = f"config.{section}{key}"
  known = (int,) if kind is int else (int, float)
  if isinstance(value, bool) or not isinstance(value, known):
    what = "whole number" if kind is int else "number"
    raise ValueError(f"{name} must be a {what}, not {value!r}")
  if not (value > 0 or (or_zero and value == 0)) or value == math.inf:
    least = "0 or more" if or_zero else "positive"
    raise ValueError(f"{name} must be {least} and finite, not {value!r}")
  if value > _MOST_NUMBER:
    raise ValueError(f"{name} must be at most {_MOST_NUMBER:g}, not {value!r}")
  return value


def build(
  config: ml_collections.ConfigDict | Mapping,
  *,
  data_dir: str | None = None,
  dataset: data.Dataset | None = None,
) -> Experiment:
  """Builds an experiment from a config, checking all of it.

  Args:
    config: keys as in DEFAULTS.
    data_dir: where the dataset's files are; None looks in the usual places.
    dataset: one that is loaded already, used as it is; `config.data.name` is
      not looked for.

  Returns:
    The Experiment; `plan` builds what each cell needs.

  Raises:
    ValueError: for anything wrong, naming it and the remedy.
  """
  try:
    return _build(resolve(config), data_dir, dataset)
  except (TypeError, OverflowError, ArithmeticError, LookupError) as error:
    raise ValueError(
      f"the config has a value of the wrong kind: {error}"
    ) from error


def _build(config, data_dir, dataset) -> Experiment:
  _numbers(config, "workers", 1, _MOST_WORKERS)
  _numbers(config, "seeds", 0, 2**32 - 1)
  for key in ("batch_size", "epochs", "learning_rate", "evaluations"):
    _positive(config, key)
  for key in ("evaluation_examples", "curvature_checks", "checkpoint_seconds"):
    _positive(config, key, or_zero=True)
  if config["on_nan"] not in ("stop", "record"):
    raise ValueError(
      f"config.on_nan must be 'stop' or 'record', not {config['on_nan']!r}"
    )
  if not isinstance(config["data"]["augment"], bool):
    raise ValueError(
      f"config.data.augment must be True or False, not"
      f" {config['data']['augment']!r}"
    )
  _check_live(config)
  for section in _OPEN_SECTIONS:
    for key in _RESERVED[section]:
      if key in config[section]:
        raise ValueError(
          f"config.{section}.{key} is set by other keys; drop it"
        )
  _check_clip_norm(config["clip_norm"])
  _check_gate(config["gate"]["max_staleness"])
  _check_order(config["order"])
  cells = tuple(_cells(config))
  for cell in cells:
    with _blame(f"algorithms.{cell.label}", config["algorithms"][cell.label]):
      _recipe(config, cell.label, cell.workers, config["learning_rate"])
  with _blame("durations", config["durations"]):
    times = durations.build(**config["durations"])
    for worker in range(max(cell.workers for cell in cells)):
      if not 0 <= next(times.stream(worker)) <= _MOST_NUMBER:
        raise ValueError(f"a job may take at most {_MOST_NUMBER:g}")
  if dataset is None:
    dataset = data.load(config["data"]["name"], data_dir=data_dir)
  options = dict(config["model"])
  with _blame("model"):
    layers = models.build(options.pop("name"), dataset.classes, **options)
  problem = problems.classification(
    dataset,
    layers,
    batch_size=config["batch_size"],
    augment=config["data"]["augment"],
    partition=config["data"]["partition"],
    evaluation_examples=config["evaluation_examples"],
  )
  with _blame("model"):  # does it fit the data, and a machine?
    shapes = jax.eval_shape(problem.init, jax.random.key(0))
  parameters = models.count(shapes)
  if parameters > _MOST_PARAMETERS:
    raise ValueError(
      f"config.model has {parameters:,} parameters; use at most"
      f" {_MOST_PARAMETERS:,}"
    )
  if config["server"]["shards"] > 1:
    with _blame("server", config["server"]):
      sharding.plan(shapes, config["server"]["shards"])
  experiment = Experiment(config, dataset, problem, cells)
  for cell in cells:
    with _blame("schedule", config["schedule"]):
      _schedule(experiment, cell.label, cell.workers)
    problem.batches(cell.seed, cell.workers)
    if messages(experiment, cell) > _MOST_MESSAGES:
      raise ValueError(
        f"config.epochs {config['epochs']:g} is"
        f" {messages(experiment, cell):.3g} messages in one cell; use at most"
        f" {_MOST_MESSAGES:.0e}"
      )
    _check_length(experiment, cell)
    with _blame("order", config["order"]):
      trace(experiment, cell, messages=cell.workers)
      _check_fetches(experiment, cell)
  return experiment


def _check_clip_norm(value):
  known = type(value) in (int, float) and 0 < value <= _MOST_NUMBER
  if value is not None and not known:
    raise ValueError(
      "config.clip_norm must be a positive number, at most"
      f" {_MOST_NUMBER:g}, or None, not {value!r}"
    )


def _check_gate(value):
  known = type(value) is int and 0 <= value <= _MOST_MESSAGES
  if value is not None and not known:
    raise ValueError(
      "config.gate.max_staleness must be a whole number from 0 to"
      f" {_MOST_MESSAGES}, or None, not {value!r}"
    )


def _check_order(order):
  """Checks what is read before a trace is made, which checks the rest."""
  backup = order.get("backup", 0)
  if type(backup) is not int or backup < 0:
    raise ValueError(
      "config.order.backup must be a whole number from 0, below the number of"
      f" workers, not {backup!r}"
    )


def _check_fetches(experiment, cell):
  """A ticket kept for longer than there are jobs is the first and the last."""
  recipe = _cell_recipe(experiment, cell)
  order = _order(experiment.config, recipe)
  fetch_every = order.get("fetch_every", 1)
  jobs = messages(experiment, cell) // cell.workers
  if fetch_every <= max(jobs, 1):
    return
  key = f"algorithms.{cell.label}.fetch_every"
  if "fetch_every" in experiment.config["order"]:
    key = "order.fetch_every"
  raise ValueError(
    f"config.{key} makes {fetch_every} jobs on one ticket, and each of"
    f" {cell.workers} workers has {jobs} in all, so that none would ever fetch"
    " again; make it smaller, or config.epochs larger"
  )


def _check_length(experiment, cell):
  """A round of long jobs may be more than was asked for."""
  steps = _cell_recipe(experiment, cell).steps
  epochs = experiment.config["epochs"]
  passes = round(epochs * experiment.problem.batches_per_epoch)
  if steps > 1 and steps * cell.workers > passes:
    raise ValueError(
      f"config.epochs {epochs:g} is {passes} batches, and one message from each"
      f" of {cell.workers} workers takes {steps * cell.workers}, as a job of"
      f" config.algorithms.{cell.label} has {steps}; use more epochs, fewer"
      f" workers or shorter jobs (steps, push_every)"
    )


def _check_live(config):
  """Checks what is read by live runs only."""
  server, live = config["server"], config["live"]
  for key, least, most in (("shards", 1, _MOST_SHARDS), ("log", 0, _MOST_LOG)):
    value = server[key]
    if type(value) is not int or not least <= value <= most:
      raise ValueError(
        f"config.server.{key} must be a whole number from {least} to {most},"
        f" not {value!r}"
      )
  if server["wire"] not in ("float32", "bfloat16"):
    raise ValueError(
      f"config.server.wire must be 'float32' or 'bfloat16', not"
      f" {server['wire']!r}"
    )
  for section, key in (
    ("server", "consistent"),
    ("live", "refill"),
    ("live", "together"),
    ("live", "spans"),
  ):
    if not isinstance(config[section][key], bool):
      raise ValueError(
        f"config.{section}.{key} must be True or False, not"
        f" {config[section][key]!r}"
      )
  if server["consistent"] and server["shards"] > 1 and not server["log"]:
    raise ValueError(
      "config.server.consistent needs a log, or shards that come back would"
      " differ from the others; set config.server.log=16"
    )
  for key in ("late_mads", "late_seconds", "start_seconds"):
    value = live[key]
    if type(value) not in (int, float) or not 0 < value <= _MOST_SECONDS:
      raise ValueError(
        f"config.live.{key} must be positive, at most {_MOST_SECONDS:g}, not"
        f" {value!r}"
      )
  for key in ("worker_cpus", "worker_gpus"):
    value = live[key]
    if type(value) not in (int, float) or not 0 <= value <= _MOST_WORKERS:
      raise ValueError(
        f"config.live.{key} must be from 0 to {_MOST_WORKERS}, not {value!r}"
      )
  devices = check_devices(live["devices"])
  if live["parallel"] not in ("data", "tensor"):
    raise ValueError(
      "config.live.parallel must be 'data' or 'tensor', not"
      f" {live['parallel']!r}"
    )
  if live["parallel"] == "data" and config["batch_size"] % devices:
    raise ValueError(
      f"config.live.devices {devices} must divide config.batch_size"
      f" {config['batch_size']}, or each device would do the whole batch; use"
      f" {math.gcd(devices, config['batch_size'])}, or another batch size"
    )
  slowdown = live["slowdown"]
  if not isinstance(slowdown, list) or any(
    type(x) not in (int, float) or not 1 <= x <= _MOST_SLOWDOWN
    for x in slowdown
  ):
    raise ValueError(
      "config.live.slowdown must be factors from 1 to"
      f" {_MOST_SLOWDOWN:g}, not {slowdown!r}"
    )


def check_devices(value: Any) -> int:
  """Returns config.live.devices, which is used before all else is checked.

  Raises:
    ValueError: for what is no number of devices.
  """
  if type(value) is not int or not 1 <= value <= _MOST_DEVICES:
    raise ValueError(
      f"config.live.devices must be a whole number from 1 to {_MOST_DEVICES},"
      f" not {value!r}"
    )
  return value


@contextlib.contextmanager
def _blame(section, keys=()):
  """Names the section of the config in errors about its values, and the key if
  an error begins with it."""
  try:
    yield
  except (TypeError, OverflowError, ArithmeticError) as error:
    raise ValueError(
      f"config.{section} has a value of the wrong kind: {error}"
    ) from error
  except ValueError as error:
    text = str(error)
    if "config." in text:
      raise
    mark = "." if text.split(" ")[0] in keys else ": "
    raise ValueError(f"config.{section}{mark}{text}") from error


def _cells(config) -> Iterator[Cell]:
  """Yields cells: by workers, then algorithm, then seed."""
  labels = config["algorithms"]
  if not labels:
    raise ValueError(
      "config.algorithms names no algorithm; give it entries such as"
      " dana=dict(recipe='dana_zero')"
    )
  for label in config["only"]:
    names.lookup("label in config.only", label, labels)
  titles = {}
  chosen = {}
  for label, entry in labels.items():
    if not _LABEL.fullmatch(label):
      raise ValueError(
        f"config.algorithms: a label names a folder; use letters, digits and"
        f" _.- for {label!r}, and its title for other text"
      )
    if not isinstance(entry, Mapping) or "recipe" not in entry:
      raise ValueError(
        f"config.algorithms.{label} must be a dict with a recipe, one of"
        f" {', '.join(algorithms.RECIPES)}"
      )
    _check_options(label, entry)
    title = str(entry.get("title", label))
    if title in titles:
      raise ValueError(
        f"config.algorithms.{label} and .{titles[title]} have the same title"
        f" {title!r}; give each its own"
      )
    titles[title] = label
    if not config["only"] or label in config["only"]:
      own = (
        _numbers(entry, "workers", 1, _MOST_WORKERS, f"algorithms.{label}.")
        if "workers" in entry
        else None
      )
      chosen[label] = own or config["workers"]
  for workers in sorted({n for ns in chosen.values() for n in ns}):
    for label, numbers in chosen.items():
      if workers in numbers:
        for seed in config["seeds"]:
          title = labels[label].get("title", label)
          yield Cell(label, str(title), workers, seed)


def _check_options(label, entry):
  known = [*_LABEL_KEYS, *algorithms.options(entry["recipe"])]
  for key in entry:
    if key not in known:
      raise ValueError(
        f"unknown config key 'algorithms.{label}.{key}'; {_near(key, known)}"
      )
    value = entry[key]
    if key in _LABEL_KEYS or not isinstance(value, (int, float)):
      continue
    most = _MOST_INTEGER if isinstance(value, int) else _MOST_NUMBER
    if not abs(value) <= most:
      raise ValueError(
        f"config.algorithms.{label}.{key} must be a number up to"
        f" {_MOST_NUMBER:g}, a whole one up to {_MOST_INTEGER}, not {value!r}"
      )


def _recipe(config, label, workers, learning_rate) -> algorithms.Recipe:
  entry = config["algorithms"][label]
  options = {k: v for k, v in entry.items() if k not in _LABEL_KEYS}
  recipe = algorithms.build(entry["recipe"], learning_rate, workers, **options)
  if config["clip_norm"] is not None:
    algorithm = transforms.precede(
      recipe.algorithm, sharding.clip_by_global_norm(config["clip_norm"])
    )
    recipe = recipe._replace(algorithm=algorithm)
  order = config["order"]
  if recipe.order == "asynchronous" and order["name"] == "backup_workers":
    # An update takes the messages of a round, without those of the slowest.
    backup = order.get("backup", 0)
    recipe = recipe._replace(every=max(workers - backup, 1))
  return recipe


def _server(config, recipe) -> base.Server:
  """The server, with its gate."""
  bound = config["gate"]["max_staleness"]
  order = _order(config, recipe)["name"]
  if order == "backup_workers":
    bound = 0 if bound is None else min(bound, 0)
  if bound is None:
    return recipe.server()
  return recipe.server(gate=server_lib.max_staleness(bound))


def only(config: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
  """Returns the config of an experiment that has this cell alone."""
  config = copy.deepcopy(dict(config))
  entry = {**config["algorithms"][cell.label], "workers": [cell.workers]}
  config["algorithms"] = {cell.label: entry}
  return {
    **config,
    "only": [],
    "workers": [cell.workers],
    "seeds": [cell.seed],
  }


def rules(experiment: Experiment, cell: Cell) -> dispatch.Rules:
  """Returns the protocol of a cell, for a live run.

  Raises:
    ValueError: for an order that only a simulation can keep.
  """
  config, recipe = experiment.config, _cell_recipe(experiment, cell)
  options = dict(_order(config, recipe))
  name = options.pop("name")
  if name == "bulk_synchronous":
    if recipe.every > 1:
      return dispatch.Rules(round=recipe.every)
    return dispatch.Rules(bound=0)
  if name == "backup_workers":
    return dispatch.Rules(round=recipe.every, **options)
  if name in ("asynchronous", "stale_synchronous"):
    if options.get("bound") == 0 and recipe.every == cell.workers > 1:
      return dispatch.Rules(round=recipe.every)
    return dispatch.check_rules(dispatch.Rules(**options))
  raise ValueError(
    f"config.order.name {name!r} is kept by simulations only: a live worker"
    " takes the time it takes; use asynchronous, stale_synchronous,"
    " bulk_synchronous or backup_workers"
  )


def _peak(config, label) -> float:
  entry = config["algorithms"][label]
  if "learning_rate" in entry:
    section = f"algorithms.{label}."
    return float(_positive(entry, "learning_rate", section=section))
  return float(_positive(config, "learning_rate"))


def _schedule(experiment, label, workers):
  config = experiment.config
  peak = _peak(config, label)
  recipe = _recipe(config, label, workers, peak)
  batches_per_update = recipe.every * recipe.steps
  updates_per_epoch = experiment.problem.batches_per_epoch / batches_per_update
  section = config["schedule"]
  most = _MOST_INTEGER / updates_per_epoch
  for key in ("warmup_epochs", "decay_epochs"):
    values = section[key] if key == "decay_epochs" else [section[key]]
    if not all(0 <= value <= most for value in values):
      raise ValueError(
        f"{key} must be from 0 to {most:.3g} epochs, not {section[key]!r}"
      )
  if not 0 < section["decay_factor"] <= _MOST_NUMBER:
    raise ValueError(
      f"decay_factor must be positive, at most {_MOST_NUMBER:g}, not"
      f" {section['decay_factor']!r}"
    )
  return schedules.warmup_steps(
    peak,
    warmup=round(section["warmup_epochs"] * updates_per_epoch),
    start=peak / workers,
    boundaries=[round(e * updates_per_epoch) for e in section["decay_epochs"]],
    factor=float(section["decay_factor"]),
  )


def _order(config, recipe) -> dict[str, Any]:
  """A recipe made for a protocol of its own keeps it, and so does one whose
  workers do several jobs on a ticket."""
  if recipe.order != "asynchronous":
    return {"name": recipe.order}
  order = config["order"]
  if recipe.fetch_every == 1:
    return order
  if "fetch_every" in order:
    raise ValueError(
      f"config.order.fetch_every is {order['fetch_every']}, but the recipe has"
      f" {recipe.fetch_every} jobs on a ticket; drop one of the two"
    )
  return {**order, "fetch_every": recipe.fetch_every}


def _of_jobs(times: durations.Durations, steps: int) -> durations.Durations:
  """A job takes the time of its batches, one after the other."""
  if steps == 1:
    return times

  def stream(worker):
    batches = times.stream(worker)
    while True:
      yield math.fsum(itertools.islice(batches, steps))

  return durations.Durations(stream)


def _cell_recipe(experiment, cell) -> algorithms.Recipe:
  """The recipe at its peak rate, for all but its learning rate."""
  config = experiment.config
  return _recipe(config, cell.label, cell.workers, _peak(config, cell.label))


def trace(experiment: Experiment, cell: Cell, messages: int) -> base.Trace:
  """Builds the order of a cell: a function of the config and the seed."""
  config, recipe = experiment.config, _cell_recipe(experiment, cell)
  times = durations.build(**{"seed": cell.seed, **config["durations"]})
  return orders.build(
    durations=_of_jobs(times, recipe.steps),
    workers=cell.workers,
    messages=messages,
    **_order(config, recipe),
  )


def messages(experiment: Experiment, cell: Cell) -> int:
  """Returns how many messages are received: whole rounds, at least one."""
  steps = _cell_recipe(experiment, cell).steps
  passes = experiment.config["epochs"] * experiment.problem.batches_per_epoch
  return max(round(passes / steps) // cell.workers, 1) * cell.workers


def batches(experiment: Experiment, cell: Cell) -> problems.Batches:
  """Returns what the jobs of a cell are done on, as its workers take it."""
  return worker_lib.job_batches(
    experiment.problem.batches(cell.seed, cell.workers),
    _cell_recipe(experiment, cell).steps,
  )


# One Worker for all algorithms that send plain gradients: one compile.
_gradient_worker = functools.lru_cache(maxsize=8)(worker_lib.gradient_worker)


def _worker(recipe, loss) -> base.Worker:
  if recipe.worker is None and recipe.steps == 1:
    return _gradient_worker(loss, recipe.message)
  return recipe.make_worker(loss)


def _curvature_limit(experiment, cell) -> float:
  recipe = _cell_recipe(experiment, cell)
  start = trace(experiment, cell, messages=40 * cell.workers)
  # It is measured with workers that send one gradient for each ticket: of
  # others nothing is known.
  if recipe.worker is not None or (start.action == base.KEEP).any():
    return math.nan
  peak = _peak(experiment.config, cell.label)
  return diagnosis.curvature_limit(recipe, start, learning_rate=peak)


def recipe(experiment: Experiment, cell: Cell) -> algorithms.Recipe:
  """Builds the recipe of a cell, with its schedule."""
  schedule = _schedule(experiment, cell.label, cell.workers)
  return _recipe(experiment.config, cell.label, cell.workers, schedule)


def server(experiment: Experiment, cell: Cell) -> base.Server:
  """Builds the server of a cell."""
  return _server(experiment.config, recipe(experiment, cell))


def worker(experiment: Experiment, cell: Cell) -> base.Worker:
  """Builds what the workers of a cell do."""
  return _worker(recipe(experiment, cell), experiment.problem.loss)


def plan(experiment: Experiment, cell: Cell) -> Plan:
  """Builds what the seeds of a cell have in common."""
  config = experiment.config
  built = recipe(experiment, cell)
  server = _server(config, built)
  worker = _worker(built, experiment.problem.loss)
  return Plan(
    server=server,
    worker=worker,
    host=simulator.make_host(server, worker),
    learning_rate=_peak(config, cell.label),
    schedule=_schedule(experiment, cell.label, cell.workers),
    order=_order(config, built)["name"],
    messages=messages(experiment, cell),
    steps=built.steps,
    curvature_limit=_curvature_limit(experiment, cell),
  )
