"""The section `network` of a config, and the load of a cell's network."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from asgd import sharding, wire
from asgd.experiment import checks
from asgd.experiment.engines import Column
from asgd.experiment.schema import Run, Setting
from asgd.orders.network import INCAST, LinkUse, Network
from asgd.orders.play import Sizes, fixed

_BANDWIDTHS = "up", "down", "port"
_BANDWIDTH = checks.optional(checks.positive)  # None: no limit

# Times are in the unit of the durations; for live threads in seconds. See
# `asgd.orders.network`.
SECTIONS = {
  "network": {
    "latency": Setting(0.0, checks.number()),  # one way
    "up": Setting(None, _BANDWIDTH),  # of a worker's link, in bytes a unit
    "down": Setting(None, _BANDWIDTH),
    "port": Setting(None, _BANDWIDTH),  # of a shard, each way
    "service": Setting(0.0, checks.number()),  # a shard's time for a message
    "incast": Setting("queue", checks.choice(*INCAST)),
  }
}


def run_network(run: Run) -> Network | None:
  """Returns the network of a run, None if its messages take no time."""
  config = run.config
  return make_network(config["network"], config["server"]["shards"])


def make_network(section: Mapping[str, Any], shards: int) -> Network | None:
  """Returns the network of a section with a number of shards; None if its
  messages take no time."""
  # None in a config is no limit.
  section = dict(section)
  for key in _BANDWIDTHS:
    section[key] = math.inf if section[key] is None else float(section[key])
  network = Network(**section, shards=shards)
  return None if network.is_instant else network


def check(run: Run) -> None:
  """Raises ValueError for a network that a simulated run cannot have."""
  server, codecs = run.config["server"], ("compress", "compress_down")
  out_of_step = server["shards"] > 1 and not server["consistent"]
  if "live" in run.config or not out_of_step or run_network(run) is None:
    return
  defaults = {"delays": None, "reads": 0.0}
  first_key = next((k for k, x in defaults.items() if server[k] != x), None)
  if first_key is not None:
    raise ValueError(
      f"config.server.{first_key} and config.network both say when messages"
      " arrive: leave one of the two out"
    )
  # The order is made before the values, but the sizes of codes may depend on
  # the values. Consistent shards have one order, which is made with the values.
  if codec := next(
    (first_key for first_key in codecs if run.config[first_key]), None
  ):
    raise ValueError(
      f"config.{codec} makes sizes depend on the values, and over a network the"
      f" order of {server['shards']} shards that are out of step is made before"
      " them: set config.server.consistent=True, or leave one of the two out"
    )


def shard_bytes(plan: Any, shards: int) -> list[int]:
  """Returns the bytes of the parameters at each of S shards, as they travel.
  Raises ValueError, naming the key, if they cannot be split."""
  # Shapes alone; the parameters are not made.
  params = jax.eval_shape(plan.problem.init, jax.random.key(0))
  with checks.prefix_errors("server", ("shards",)):
    split = sharding.make_plan(params, shards)
  return [wire.layout(part).nbytes for part in sharding.split(split, params)]


def dense_sizes(plan: Any) -> Sizes:
  """Returns the sizes of messages and tickets without codecs."""
  # A dense message has the bytes of the parameters, as a ticket does.
  nbytes = shard_bytes(plan, plan.network.shards)
  return fixed(nbytes, nbytes)


def has_coded_sizes(plan: Any) -> bool:
  """Whether a codec makes sizes depend on the sent values."""
  config = plan.run.config
  return bool(config["compress"] or config["compress_down"])


def divide_bytes(nbytes: float, proportions: Sequence[float]) -> list[float]:
  """Divides the bytes of a packet in the proportions of `proportions`."""
  total = sum(proportions)
  return [nbytes * proportion / total for proportion in proportions]


def columns(use: LinkUse, messages: int, time: float) -> dict[str, float]:
  """Returns the columns of a result on its network."""
  return {
    "throughput": messages / time,  # a unit of simulated time
    "link_utilisation": use.utilisation,
    "service_utilisation": use.service,
    "queue_wait": use.waited,
  }


def describe(result: Mapping[str, Any]) -> str:
  """Returns the load of a cell's network in a few words."""
  if "link_utilisation" not in result:
    return ""
  return (
    f", {result['throughput']:.3g} messages a unit of time, the busiest port"
    f" busy {100 * result['link_utilisation']:.0f} % of it, a message queued"
    f" for {result['queue_wait']:.2g}"
  )


# Columns of tables in which a cell has a network.
COLUMNS = (
  Column("messages/time", "throughput"),
  Column("port busy %", "link_utilisation", 100, "{:.1f}"),
  Column("shard busy %", "service_utilisation", 100, "{:.1f}"),
  Column("queued", "queue_wait"),
)
