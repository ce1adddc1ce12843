"""Reads the arguments of `simulate`, `train_live` and other calls, and adapts
their errors.
"""

import contextlib
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import optax

from asgd import algorithms, base, checks, compression, names, orders
from asgd.call_options import CONFIG_KEYS, RunOptions, SimulateOptions
from asgd.experiment import protocol, schema
from asgd.experiment.checks import MOST_COUNT
from asgd.experiment.engines import server_orders
from asgd.orders.protocol import Rules
from asgd.problems import own, streams, user_code

# Modules that a caller may have taken for a recipe -> the recipe.
_RECIPE_OF = {"sandblaster": "sandblaster_lbfgs", "tables": "table"}
# Orders in which each round has a message of every worker. Rounds of
# "backup_workers" have fewer, and late messages arrive between rounds.
_ORDERS_IN_ROUNDS = "bulk_synchronous", "backup_tasks"


def read_recipe(
  recipe: Any, workers: int | None = None, topology: Any = None
) -> Any:
  """Returns a caller's `recipe` argument as a Recipe, or as settings of tables
  or of Sandblaster, for `workers` workers.

  Args:
    recipe: in one of the forms of `call_options.RecipeLike`.
    workers: the number of workers of the call; None: the recipe's.
    topology: the topology of the call, for a recipe of peers; None: the
      recipe's.

  Raises:
    ValueError: for anything else, with the remedy.
  """
  if isinstance(recipe, (base.Algorithm, optax.GradientTransformation)):
    send = getattr(recipe, "send", base.send_current)
    recipe = algorithms.Recipe(base.as_algorithm(recipe, send))
  if getattr(recipe, "protocol", None) not in protocol.PROTOCOLS:
    raise ValueError(_recipe_error(recipe, workers))
  if workers is None and recipe.workers is None:
    raise ValueError(
      "the recipe does not give the number of workers: add workers="
    )
  if workers is not None:
    checks.integer("workers", workers)
    if recipe.workers not in (None, workers):
      raise ValueError(
        f"workers={workers}, but the recipe was built for {recipe.workers}:"
        f" drop workers=, or build the recipe with workers={workers}"
      )
    recipe = recipe._replace(workers=workers)
  return recipe if topology is None else _with_topology(recipe, topology)


def _recipe_error(value: Any, workers: int | None) -> str:
  """Returns the error for a value that is no recipe."""
  recipe_names = {_RECIPE_OF.get(key, key) for key in protocol.recipes()}
  name = value if isinstance(value, str) else getattr(value, "__name__", "")
  name = name.rpartition(".")[2]
  name, count = _RECIPE_OF.get(name, name), workers or 8
  if name in recipe_names:
    fault = "a name" if isinstance(value, str) else "not called"
    fault = "a module" if isinstance(value, types.ModuleType) else fault
    text = checks.shown(getattr(value, "__name__", value))
    return (
      f"the recipe {text} is {fault}: give it a learning rate, as"
      f" asgd.{name}(0.01, workers={count})"
    )
  if isinstance(value, str):
    hint = names.nearest(name, recipe_names)
    return (
      f"the recipe {checks.shown(value)} is a name, and unknown; {hint}. Call"
      f" one, as asgd.dana_zero(0.01, workers={count})"
    )
  if inspect.isfunction(value) or inspect.isclass(value):
    return (
      f"the recipe is the function {user_code.name_of(value)}, which was not"
      " called: give it its arguments, as optax.sgd(0.01)"
    )
  return (
    f"the recipe must be one of asgd, such as asgd.dana_zero(0.01,"
    f" workers={count}), an asgd.Recipe or an optax transform, not"
    f" {checks.shown(value)}"
  )


def _with_topology(recipe: Any, topology: Any) -> algorithms.Recipe:
  """Returns a recipe of peers with another topology."""
  if getattr(recipe, "gossip", None) is None:
    raise ValueError(
      "topology= is for a recipe of peers, such as asgd.d_psgd(0.01, workers="
      f"{recipe.workers}, topology=...): drop it, or use such a recipe"
    )
  if not algorithms.is_as_built(recipe):
    raise ValueError(
      "topology= builds the recipe again, but this Recipe was made or changed"
      " by hand: give topology= to its function, such as asgd.d_psgd, and"
      " change the result"
    )
  built_from = recipe.build
  if "topology" in built_from.options:
    raise ValueError(
      f"topology={checks.shown(topology)}, but the recipe was built with"
      f" topology={checks.shown(built_from.options['topology'])}: drop one of"
      " them"
    )
  options = {**built_from.options, "topology": topology}
  return algorithms.build(
    built_from.name, built_from.learning_rate, recipe.workers, **options
  )


def read_config(
  config: Mapping[str, Any], workers: int, *, live: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns (config, objects) of a call.

  `objects` has the codecs, the order and the durations that the caller gave as
  objects; the config has the mark `schema.GIVEN_MARK` instead. Other forms of
  orders and durations become plain data in the config.

  Args:
    config: keyword arguments of the call.
    workers: N.
    live: whether workers run in real time, which `durations` cannot decide.
  """
  config = dict(config)
  objects = {
    key: value
    for key, value in config.items()
    if isinstance(value, compression.Codec)
  }
  if "trace" in config:
    trace = config.pop("trace")
    if "order" in config or not isinstance(trace, base.Trace):
      raise ValueError(
        "trace must be the order of another run, such as result.trace, without"
        f" order=, not {checks.shown(trace)}; tables and meshes have no trace"
      )
    count = int(trace.worker.max(initial=-1)) + 1
    if count < workers:
      raise ValueError(
        f"the trace is of {count} workers, and the run has {workers}: use"
        f" workers={count}, or the trace of another run"
      )
    config["order"] = trace
  if "order" in config:
    order = config["order"]
    # Rows of a trace, or the workers of messages in order, define the times.
    has_times = isinstance(order, Iterable) and not callable(order)
    has_times = has_times and not isinstance(order, str | Mapping | Rules)
    if has_times and "durations" in config:
      kind = "trace" if isinstance(order, base.Trace) else "order"
      raise ValueError(
        f"durations={checks.shown(config['durations'])} change nothing, because"
        f" the {kind} gives the time of each message: drop one of them"
      )
    config["order"] = _read_order(order, workers, live=live)
    if config["order"] == {"name": schema.GIVEN_MARK}:
      objects["order"] = order
  if "durations" in config:
    if live:
      _read_slowdown(config, workers)
    elif _is_object(config["durations"]):
      _check_function(config["durations"])
      objects["durations"] = config["durations"]
      config["durations"] = {"name": schema.GIVEN_MARK}
    else:
      config["durations"] = _read_durations(config["durations"], workers)
  codecs = {k: v for k, v in objects.items() if k not in ("order", "durations")}
  return {**config, **dict.fromkeys(codecs, schema.GIVEN_MARK)}, objects


def _read_order(order: Any, workers: int, *, live: bool) -> Any:
  """Returns an order as a section of a config; {"name": GIVEN_MARK} for an
  object that is used unchanged."""
  if isinstance(order, str):
    return {"name": order}
  if isinstance(order, Mapping):
    if order and "name" not in order:
      raise ValueError(
        f"the order {checks.shown(order)} has no name: add one, as {{'name':"
        " 'fixed_delay'}"
      )
    return order
  if live and callable(order) and orders.own.is_protocol(order):
    name = user_code.name_of(order)
    order = orders.own.call_maker(order, name, {}, workers=workers)
  if isinstance(order, Rules):
    return orders.makers.named(order, workers)
  if live:
    raise ValueError(
      "the order of a live run must be a name, a dict, Rules or a function of"
      f" workers that returns Rules, not {checks.shown(order)}: live workers"
      " take the time that they take; use asgd.simulate for such an order"
    )
  if callable(order) or isinstance(order, Iterable):
    return {"name": schema.GIVEN_MARK}
  raise ValueError(
    "order must be a name, a dict of it and options, asgd.orders.protocol.Rules"
    f", {orders.own.FORMS}, not {checks.shown(order)}"
  )


def _is_object(value: Any) -> bool:
  """Whether durations are an object or a function, which is used unchanged."""
  return isinstance(value, orders.durations.Durations) or callable(value)


def _read_durations(value: Any, workers: int) -> Any:
  """Returns durations as a section of a config."""
  if isinstance(value, str | Mapping):
    return {"name": value} if isinstance(value, str) else value
  if not isinstance(value, list | tuple | np.ndarray):
    raise ValueError(
      "durations must be the seconds of each worker, as [1, 1, 1, 3], a name, a"
      " dict of it and options, Durations, or a function (worker) -> seconds of"
      f" its jobs, not {checks.shown(value)}"
    )
  if len(value) != workers:
    raise ValueError(
      f"durations has {len(value)} values, and the run has {workers} workers:"
      " give one for each worker"
    )
  rows = [np.atleast_1d(row) for row in value]
  for worker, row in enumerate(rows):
    if row.dtype.kind not in "iuf":
      raise ValueError(
        f"durations[{worker}] must be seconds, a number or a row of numbers,"
        f" not {checks.shown(value[worker])}; a function (worker) -> seconds is"
        " given without a list"
      )
  with checks.section_errors("durations", ("samples",)):
    orders.durations.measured(rows)
  return {"name": "measured", "samples": [row.tolist() for row in rows]}


def _check_function(value: Any) -> None:
  """Raises ValueError unless a function of durations takes a worker, and
  returns something to iterate over."""
  if isinstance(value, orders.durations.Durations):
    return
  name, remedy = user_code.name_of(value), "; write a function (worker)"
  remedy += " -> seconds of its jobs, as lambda worker: itertools.repeat(2.0)"
  if not streams.accepts(value, 1):
    raise ValueError(
      f"durations is the function {name}, which takes"
      f" {streams.arguments_of(value)}{remedy}"
    )
  with checks.user_code(f"durations(0) fails, of {name}", remedy):
    seconds = value(0)
  if not isinstance(seconds, Iterable) or isinstance(seconds, str):
    raise ValueError(
      f"durations(0) returned {checks.shown(seconds)}, which is one value and"
      f" no sequence{remedy}"
    )


def _read_slowdown(config: dict[str, Any], workers: int) -> None:
  """Replaces the durations of a live run by its `slowdown`: real workers have
  real speeds, which can only be lowered."""
  value, live = config.pop("durations"), config.get("live") or {}
  if not isinstance(live, Mapping):
    return  # the check of the config refuses it
  is_list = isinstance(value, list | tuple | np.ndarray)
  rows = _read_durations(value, workers)["samples"] if is_list else ()
  if "slowdown" in live or not rows or max(map(len, rows)) > 1:
    raise ValueError(
      "durations of a live run must be the relative seconds of each worker, as"
      f" [1, 1, 1, 3], without live={{'slowdown': ...}}, not"
      f" {checks.shown(value)}: workers are slowed down, and have real times"
    )
  least = min(row[0] for row in rows)
  slowdown = [row[0] / least for row in rows]
  config["live"] = {**live, "slowdown": slowdown}


def check_keys(config: Mapping[str, Any], allowed_keys: Iterable[str]) -> None:
  """Raises ValueError for a keyword argument that is not in `allowed_keys`; the
  call would ignore it."""
  allowed_keys = [*allowed_keys, *CONFIG_KEYS]
  for key in config:
    if key not in allowed_keys:
      hint = names.nearest(key, [*allowed_keys, *RunOptions._fields])
      if key == "topology":
        hint = "give it to the recipe, as asgd.d_psgd(0.01, 4, topology='ring')"
      elif key in SimulateOptions.__annotations__:
        hint = "asgd.simulate takes it"
      raise ValueError(f"unknown argument {key!r}; {hint}")


# The length of a run.


def check_length(options: RunOptions, *, has_trace: bool = False) -> None:
  """Raises ValueError unless a call says in one way how long it trains."""
  lengths = {"messages": options.messages, "epochs": options.epochs}
  lengths = {key: value for key, value in lengths.items() if value is not None}
  if len(lengths) > 1:
    raise ValueError(
      f"messages={checks.shown(options.messages)} and"
      f" epochs={checks.shown(options.epochs)} both say how long to train: drop"
      " one"
    )
  if not lengths and not has_trace:
    raise ValueError(
      "the call does not say how long to train: add messages=400, or epochs=2"
    )
  if "messages" in lengths:
    checks.integer("messages", options.messages, most=MOST_COUNT)
  elif lengths:
    checks.positive("epochs", options.epochs)
  checks.integer("seed", options.seed, 0, 2**32 - 1)


def quantum_of(
  recipe: Any, config: Mapping[str, Any], workers: int
) -> tuple[int, str]:
  """Returns (n, format text for a group of n messages); `messages` of the run
  must be a multiple of n. In rounds n is the number of workers, otherwise 1."""
  order = config.get("order") or {"name": "asynchronous"}
  is_in_rounds = order["name"] in _ORDERS_IN_ROUNDS or order.get("bound") == 0
  if not server_orders.replaces_rounds(order, recipe):
    is_in_rounds |= recipe.rounds
  if is_in_rounds and order["name"] != schema.GIVEN_MARK:
    return workers, "rounds of {} workers"
  return 1, "messages"


def count_messages(
  options: RunOptions, caller: own.Objects, quantum: tuple[int, str]
) -> int:
  """Returns the number of messages of a run, from `messages`, `epochs` or the
  trace. Raises ValueError if `messages` is no multiple of the quantum."""
  trace, messages = caller.objects.get("order"), options.messages
  size, group_text = quantum
  check_length(options, has_trace=isinstance(trace, base.Trace))
  if messages is None and options.epochs is None:
    return int((trace.action == base.RECEIVE).sum())
  if messages is not None:
    checks.multiple(messages, "messages", size, group_text)
    return int(messages)
  if caller.per_epoch is None:
    raise ValueError(
      f"epochs={options.epochs}, but data has no end, and so no epochs: give"
      " messages="
    )
  count = round(options.epochs * caller.per_epoch / caller.recipe.steps)
  if count > MOST_COUNT:
    raise ValueError(
      f"epochs={options.epochs:g} of {caller.per_epoch} batches are {count:.3g}"
      f" messages; at most {MOST_COUNT:.0e} are counted: use fewer epochs"
    )
  return max(count // size, 1) * size


def read_rows(caller: own.Objects, workers: int, messages: int) -> None:
  """Replaces an order that a call gave as rows, or as workers, by its Trace: a
  generator can be read only once."""
  order = caller.objects.get("order")
  if order is not None and not callable(order):
    caller.objects["order"] = orders.own.read(
      order, workers=workers, messages=messages
    )


def check_sequential(caller: own.Objects, engine: str) -> None:
  """Raises ValueError for data from iterators if the engine may request a
  worker's batches in another order than that of its jobs."""
  recipe_protocol = protocol.PROTOCOLS[caller.recipe.protocol]
  keeps_order = recipe_protocol.iterators and engine in recipe_protocol.runners
  if caller.sequential and not keeps_order:
    subject = (
      f"engine {engine!r}" if recipe_protocol.iterators else "this recipe"
    )
    raise ValueError(
      f"iterators as data are for a server of one model (simulate, train_live,"
      f" train_mesh), not for {subject}: give arrays, or a function (worker,"
      " job) -> batch"
    )


def check_travels(caller: own.Objects) -> None:
  """Raises ValueError for an object that cannot be sent to other processes."""
  from ray import cloudpickle

  # Pickle the parts one by one, to name the one that fails.
  state = caller.__getstate__()
  parts = {
    "the loss": [state["_loss"], state["_pieces"]],
    "params": state["_init"],
    "data": state["_stream"],
    "the recipe": state["recipe"],
    **state["objects"],
  }
  for name, part in parts.items():
    remedy = ": make what it holds (locks, files, generators) inside of the"
    remedy += " function, or use runtime='threads'"
    with checks.user_code(f"{name} cannot be sent to other processes", remedy):
      cloudpickle.dumps(part)


@contextlib.contextmanager
def in_words_of_calls(engine: str = "") -> Iterator[None]:
  """Replaces command-line words in errors by those of function calls.

  Args:
    engine: keys of a section of this name are arguments of the call.

  Example:
    >>> with in_words_of_calls("mesh"):
    ...   raise ValueError("config.mesh.zero must be 0 to 3: see a/config.json")
    Traceback (most recent call last):
    ValueError: zero must be 0 to 3: see a/config.json
  """
  try:
    yield
  except ValueError as error:
    text = str(error)
    for old, new in _REPLACEMENTS:
      text = re.sub(old.format(engine), new, text)
    # A subclass with other arguments cannot be rebuilt from a text.
    takes_text = type(error).__init__ is ValueError.__init__
    if text == str(error) or not takes_text:
      raise
    raise type(error)(text) from error.__cause__


_NO_PATH = r"(?<![\w./-])"  # before a word that is no part of a path
# Regular expressions, in which {} is an engine, and their replacements. Longer
# texts precede texts that they contain.
_REPLACEMENTS = (
  ("choose another folder with --workdir", "choose another folder"),
  (r" \(--workdir\)", ""),
  ("--workdir=", "folder="),
  ("--workdir", "folder"),
  ("with --data_dir", "with data_dir="),
  (rf"{_NO_PATH}dataset\.sha256", "the checksum of params and data"),
  (rf"{_NO_PATH}dataset\.", ""),
  (
    "JAX_PLATFORMS=cpu in the environment, where this command makes as many of"
    " the host's CPU as are needed",
    "on a CPU, jax.config.update('jax_num_cpu_devices', 8) before JAX is used",
  ),
  ("use fewer, or engine simulate", "use fewer, make more, or asgd.simulate"),
  ("--config.on_nan=record", "on_nan='record'"),
  (r"unknown config key '(?:{}\.)?", "unknown argument '"),
  # The beginning of a key; config.json and config.py are files.
  (
    rf"(?:--|{_NO_PATH})config\.(?!json\b|py\b)"
    r"(?:runs\.[\w-]+(?:\.|: ))?(?:{}(?:\.|: ))?",
    "",
  ),
  (r"(?:the )?(model|recipe) 'given'", r"the \1"),
  (r"use engine='simulate'(?:(?:, | or )'\w+')*", "use asgd.simulate"),
  ("run the same command again", "make the same call again"),
)
