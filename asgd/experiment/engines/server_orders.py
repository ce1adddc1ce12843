"""The order of a run with a server: its protocol, and checks of both.

The protocol is that of `config.order`, unless the recipe has its own. For a
simulation `asgd.orders` draws an order; a live run follows the rules of the
protocol. A user's own order (`asgd.orders.own`) is a function that the config
names, or an object that a call passes.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax

from asgd import algorithms, base, names, problems
from asgd.checks import shown
from asgd.data import partitions
from asgd.experiment import checks, refusals
from asgd.experiment.schema import GIVEN_MARK, Run, Setting
from asgd.orders import durations, makers, own, protocol


@checks.name_or_options
def _check_delay_section(value: Any, key: str) -> dict[str, Any] | None:
  """Reads durations: a name, or a dict of a name and options."""
  if value is None:
    return None
  value = {"name": value} if isinstance(value, str) else value
  if not isinstance(value, Mapping):
    raise ValueError(
      f"config.{key} must be a name or a dict of a name and options, as"
      f" config.durations is, not {shown(value)}"
    )
  # "constant" is the default name, which the options may replace.
  with checks.prefix_errors(key, tuple(value)):
    durations.build(**{"name": "constant", **value})
  return dict(value)


SECTIONS: dict[str, Any] = {
  "server": {
    "shards": Setting(1, checks.whole_number(1, 256)),
    "consistent": Setting(False, checks.flag),  # one order for all shards
    # Delays of requests and messages to simulated shards that are out of step,
    # as `durations`; None: no delay.
    "delays": Setting(None, _check_delay_section),
    # Share of a job's time in which a simulated worker reads shard after shard.
    "reads": Setting(0.0, checks.number(most=1.0)),
    # Messages that are kept for recovery.
    "log": Setting(16, checks.whole_number(0, 10_000)),
    "wire": Setting("float32", checks.choice("float32", "bfloat16")),
  },
}
# Added to the seed of a run, which is smaller. So delays and durations of jobs
# are drawn from different streams.
_DELAY_SEED_OFFSET = 2**32
# Keys of config.order in epochs -> the keys in messages.
_WARM_EPOCHS, _STAGE_EPOCHS = "warm_start_epochs", "stage_epochs"
_MESSAGE_KEYS = {_WARM_EPOCHS: "warm_start", _STAGE_EPOCHS: "stages"}


def out_of_step(run: Run) -> bool:
  """Whether a run's server has shards with independent orders."""
  server = run.config["server"]
  return server["shards"] > 1 and not server["consistent"]


def check_delays(run: Run) -> None:
  """Raises ValueError for delays of shards with one order, and for partial
  reads of shards that have one order or delays."""
  server = run.config["server"]
  if server["delays"] is not None and not out_of_step(run):
    raise ValueError(
      "config.server.delays is for shards that are out of step: set"
      " config.server.shards=2 or more and consistent=False, or leave it out"
    )
  # `reads` with one shard that is not consistent is accepted: it has no effect.
  if server["reads"] and (server["delays"] is not None or server["consistent"]):
    key = "delays" if server["delays"] is not None else "consistent"
    raise ValueError(
      f"config.server.reads {server['reads']:g} reads the shards at different"
      f" times, which config.server.{key} rules out: leave one of the two out"
    )


def delays(run: Run, seed: int) -> durations.Durations | None:
  """Returns the delays of requests and messages to shards; None: no delays.

  They are drawn independently of the durations of jobs.
  """
  section = run.config["server"]["delays"]
  if section is None:
    return None
  # The section's seed has precedence.
  return durations.build(**{"seed": _DELAY_SEED_OFFSET + seed, **section})


def check_settings(run: Run) -> None:
  """Raises ValueError for an unknown order or a wrong number of backup workers,
  before a plan is built."""
  order = run.config["order"]
  with checks.prefix_errors("order", ("name",)):
    if own_order(run) is None:
      names.check("order", order["name"], makers.NAMES)
  backup = order.get("backup", 0)
  # `type`, because True is an int too.
  if type(backup) is not int or backup < 0:
    raise ValueError(
      "config.order.backup must be a whole number from 0, below the number of"
      f" workers, not {shown(backup)}"
    )


def own_order(run: Run) -> Any:
  """Returns a user's own order of a run, a function or a Trace; None for an
  order of `asgd.orders.makers`. Raises ValueError if it cannot be imported."""
  name = run.config["order"]["name"]
  # An object that a call passed: the config has a mark instead of a name.
  if name == GIVEN_MARK:
    return refusals.given_object(run, "order")
  return names.import_function("order", name) if names.is_import(name) else None


def _order_call(run: Run) -> tuple[str, dict[str, Any]]:
  """Returns the name of a run's own order, for errors, and its options."""
  options = dict(run.config["order"])
  name: str = options.pop("name")
  if name == GIVEN_MARK:  # the user knows the function by its name
    name = getattr(run.objects.get("order"), "__name__", name)
  return name, options


def with_protocol(run: Run, workers: int) -> Run:
  """Returns the run. If a user gave it an order that is a protocol, the name
  and options of that protocol replace the order. So simulated and live runs
  follow it like any protocol."""
  maker = own_order(run)
  if not callable(maker) or not own.is_protocol(maker):
    return run
  # The function is called with the options; it may return Rules or a trace.
  name, options = _order_call(run)
  rules = own.call_maker(maker, name, options, workers=workers)
  if not isinstance(rules, protocol.Rules):
    return run
  with checks.prefix_errors("order"):
    order = makers.named(rules, workers)
  return run._replace(config={**run.config, "order": order})


def own_trace(
  run: Run,
  times: durations.Durations,
  *,
  workers: int,
  messages: int,
  fetch_every: int = 1,
) -> base.Trace | None:
  """Returns a run's own order; None for a run without one.

  Args:
    run: the run.
    times: the durations of jobs.
    workers, messages: the numbers of workers and messages of the cell.
    fetch_every: jobs per ticket of the recipe; above 1, it is an option of the
      user's function.

  Raises:
    ValueError: for an invalid order; see `orders.own.read`.
  """
  order = own_order(run)
  if order is None:
    return None
  if isinstance(order, base.Trace):
    return own.read(order, workers=workers, messages=messages)
  name, options = _order_call(run)
  # The config's value, if there is one, has precedence over the recipe's.
  if fetch_every > 1:
    options = {"fetch_every": fetch_every, **options}
  counts = {"workers": workers, "messages": messages}
  return own.make(order, name, times, **counts, **options)


def _check_own_order(plan: Any) -> None:
  """Raises ValueError for a user's order if other settings determine times."""
  run = plan.run
  if own_order(run) is None:
    return
  # A network, or shards out of step, would change the times of the order.
  key = "network" if plan.network is not None else "server.shards"
  if key == "network" or ("live" not in run.config and out_of_step(run)):
    reason = "delays it" if key == "network" else "needs one for each shard"
    raise ValueError(
      f"config.order.name {run.config['order']['name']!r} is one order with its"
      f" own times, but config.{key} {reason}: leave one of the two out"
    )


def plan_order(
  run: Run, problem: problems.Problem, recipe: algorithms.Recipe
) -> dict[str, Any]:
  """Returns a run's order, a dict of name and options with counts in messages.

  It is the recipe's order if the recipe has one, else the config's. Raises
  ValueError, naming the key, for an option that does not fit.
  """
  order = _recipe_order(run, recipe)
  if not _MESSAGE_KEYS.keys() & order.keys():
    return order
  order = dict(order)

  def messages(epochs: Any, key: str) -> int:
    """Epochs of batches become messages of `steps` batches."""
    epochs = checks.number(most=1e9)(epochs, f"order.{key}")
    return round(epochs * problem.batches_per_epoch / recipe.steps)

  for key in _MESSAGE_KEYS.keys() & order.keys():
    value, in_messages = order.pop(key), _MESSAGE_KEYS[key]
    if in_messages in order:
      raise ValueError(
        f"config.order.{in_messages} and .{key} say the same thing; drop one"
      )
    if key == _WARM_EPOCHS:
      order[in_messages] = messages(value, key)
      continue
    pairs = value if isinstance(value, tuple | list) else [value]
    if not all(isinstance(s, tuple | list) and len(s) == 2 for s in pairs):
      raise ValueError(
        f"config.order.{key} must be pairs (workers, epochs), as ((1, 0.5), (4,"
        f" 1.0)), not {shown(value)}"
      )
    order[in_messages] = tuple((n, messages(e, key)) for n, e in value)
  return order


def _recipe_order(run: Run, recipe: algorithms.Recipe) -> dict[str, Any]:
  """Returns the order that the recipe prescribes, else the config's.

  A recipe prescribes an order if it names one, or if its workers do several
  jobs on a ticket.
  """
  # A user's own order is used, whatever the recipe prescribes.
  if own_order(run) is not None:
    return run.config["order"]
  if recipe.order != "asynchronous":
    _check_prescribed(run, recipe.order)
    return {"name": recipe.order, **dict(recipe.order_options)}
  order, call = run.config["order"], recipe.build
  recipe_option = None if call is None else call.options.get("fetch_every")
  if recipe.fetch_every == 1 and recipe_option is None:
    return order
  for key in ("fetch_every", "cache"):
    if order.get(key):
      raise ValueError(
        f"config.order.{key} is {order[key]}, but the recipe has"
        f" {recipe.fetch_every} jobs on a ticket; drop one of the two"
      )
  return {**order, "fetch_every": recipe.fetch_every}


def _check_prescribed(run: Run, prescribed: str) -> None:
  """Raises ValueError if a config asks for another order than the recipe's."""
  order = run.config["order"]
  # The name alone may repeat the recipe's order.
  set_options = {key: value for key, value in order.items() if key != "name"}
  if not set_options and order["name"] in ("asynchronous", prescribed):
    return
  key, value = next(iter(set_options.items()), ("name", order["name"]))
  raise ValueError(
    f"config.order.{key} {shown(value)} is not for {refusals.recipe_text(run)},"
    f" which prescribes the order {prescribed}: leave it"
    f" out{refusals.other_runs_remedy(run)}"
  )


def replaces_rounds(order: Mapping[str, Any], recipe: Any) -> bool:
  """Whether a config's order replaces the rounds of a recipe of a server."""
  # "asynchronous" without options is the default, and stands for the recipe's
  # order. With an option, such as depth=1, it replaces that order.
  in_rounds = getattr(recipe, "order", None) == "bulk_synchronous"
  return in_rounds and order != {"name": "asynchronous"}


def in_order(
  run: Run, recipe: algorithms.Recipe, workers: int
) -> algorithms.Recipe:
  """Returns a recipe with updates that fit the order of a config.

  A recipe of rounds may run in any order of a server. Its updates still average
  the same number of messages, but some may be late, or from one worker. If
  rounds leave out the slowest workers, an update has the messages of one round.
  """
  order = run.config["order"]
  if replaces_rounds(order, recipe):
    recipe = recipe._replace(order="asynchronous")
  rounds = "backup_workers", "backup_tasks"
  if recipe.order == "asynchronous" and order["name"] in rounds:
    recipe = recipe._replace(every=max(workers - order.get("backup", 0), 1))
  return recipe


def keeps(order: Mapping[str, Any]) -> bool:
  """Whether jobs of an order may share a ticket."""
  return bool(order.get("cache")) or order.get("fetch_every", 1) > 1


def rules(
  order: Mapping[str, Any], messages_per_update: int, workers: int
) -> protocol.Rules:
  """Returns the protocol of a live run with this order. Raises ValueError if
  the order is not for live runs."""
  options = dict(order)
  name = options.pop("name")
  if name == "bulk_synchronous":
    # An update of several messages makes a round; otherwise bound 0 makes
    # workers wait for each other.
    return (
      protocol.Rules(round=messages_per_update)
      if messages_per_update > 1
      else protocol.Rules(bound=0)
    )
  if name in ("backup_workers", "backup_tasks"):
    return protocol.Rules(round=messages_per_update, **options)
  if name in ("asynchronous", "stale_synchronous"):
    # A bound of 0 with averages over all workers makes rounds: a worker starts
    # a job when all messages of the last round have arrived.
    in_rounds = options.get("bound") == 0 and messages_per_update == workers > 1
    if in_rounds and not options.get("warm_start"):
      rounds = {**options, "bound": math.inf, "round": messages_per_update}
      return protocol.check_rules(protocol.Rules(**rounds))
    return protocol.check_rules(protocol.Rules(**options))
  if name == "with_stops":
    raise ValueError(
      "config.order.name 'with_stops' is for simulations of one order only: a"
      " live worker computes each job to its end. Leave out stops (Ringmaster)"
      " or budget (MindFlayer): the server drops late messages as they arrive"
    )
  raise ValueError(
    f"config.order.name {name!r} is for simulations only: the times of live"
    " workers are not drawn; use asynchronous, stale_synchronous,"
    " bulk_synchronous, backup_tasks or backup_workers, or a function of"
    " workers that returns asgd.orders.protocol.Rules"
  )


def check_length(plan: Any, batches: int) -> None:
  """Raises ValueError if one message from each worker takes more batches than
  the cell has."""
  run, recipe, workers = plan.run, plan.recipe, plan.workers
  # Batches of one message.
  steps = recipe.steps * recipe.push_every
  # A call gives messages, not batches, and they need not be of all workers.
  if run.given_recipe is None and steps > 1 and steps * workers > batches:
    raise ValueError(
      f"config.epochs {run.config['epochs']:g} is {batches} batches, and one"
      f" message from each of {workers} workers takes {steps * workers}, as a"
      f" message of config.runs.{run.label} takes {steps}; use more epochs,"
      " fewer workers or shorter jobs (steps, push_every)"
    )


def check(plan: Any) -> None:
  """Raises ValueError if a plan's order does not fit its recipe, its codec or
  its length."""
  run, recipe, order = plan.run, plan.recipe, plan.order
  config, workers, label = run.config, plan.workers, run.label
  _check_own_order(plan)
  # Jobs that push nothing fit neither rounds nor a codec's residual.
  key = "compress" if plan.server.codec is not None else "order.name"
  if recipe.push_every > 1 and (key == "compress" or recipe.every > 1):
    raise ValueError(
      f"config.{key} is not for config.runs.{label}, whose fetch_every is no"
      f" multiple of its push_every: {recipe.push_every - 1} of"
      f" {recipe.push_every} jobs push nothing; use such a multiple, or leave"
      f" {key} out"
    )
  # Each worker has its own part of the data.
  is_partitioned = partitions.divides(config["data"]["partition"])
  if order["name"] == "backup_tasks" and is_partitioned:
    raise ValueError(
      "config.order.name 'backup_tasks' hands a worker's job to another, which"
      " has other data: use config.data.partition='shared'"
    )
  # With more jobs on a ticket than a worker has, it would fetch only once.
  fetch_every, jobs = order.get("fetch_every", 1), plan.messages // workers
  if fetch_every > max(jobs, 1):
    is_config_key = "fetch_every" in config["order"]
    key = f"{'order' if is_config_key else f'runs.{label}'}.fetch_every"
    raise ValueError(
      f"config.{key} makes {fetch_every} jobs on one ticket, and each of"
      f" {workers} workers has {jobs} in all, so that none would ever fetch"
      " again; make it smaller, or config.epochs larger"
    )
  if plan.keeps:  # then workers read their own writes, if the recipe allows it
    key = "cache" if order.get("cache") else "fetch_every"
    params = jax.eval_shape(plan.problem.init, jax.random.key(0))
    try:
      # Shapes suffice: `init` refuses what the worker cannot rebuild.
      plan.coded_worker().init(params)
    except ValueError as error:
      raise ValueError(
        f"config.order.{key} is not for config.runs.{label}: {error}"
      ) from error
  warm_start = order.get("warm_start", 0)
  if warm_start >= plan.messages:  # the other workers would have no job
    key = _WARM_EPOCHS if _WARM_EPOCHS in config["order"] else "warm_start"
    raise ValueError(
      f"config.order.{key} {config['order'][key]} is {warm_start} messages of"
      f" one worker, and a cell has {plan.messages} in all, so that the other"
      " workers would never start; make it smaller, or config.epochs larger"
    )
  _check_stages(plan)


def _check_stages(plan: Any) -> None:
  """Raises ValueError for a stage with all workers or messages of the cell."""
  config_order, stages = plan.run.config["order"], plan.order.get("stages")
  if not stages:
    return
  key = _STAGE_EPOCHS if _STAGE_EPOCHS in config_order else "stages"
  for count, messages in stages:
    if messages >= plan.messages or count >= plan.workers:
      raise ValueError(
        f"config.order.{key} {shown(config_order[key])} has a stage of {count}"
        f" workers until message {messages}, and a cell has {plan.workers}"
        f" workers and {plan.messages} messages: a stage has fewer of both"
      )
