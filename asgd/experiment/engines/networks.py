"""The section `network` of a config, and result columns about a network."""

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

_BANDWIDTH_KEYS = "up", "down", "port"
_BANDWIDTH_CHECK = checks.optional(checks.positive)  # None: no limit

# Times are in the unit of the durations (live threads: seconds), bandwidths in
# bytes per this unit. See `asgd.orders.network`.
SECTIONS = {
  "network": {
    "latency": Setting(0.0, checks.number()),  # one way
    "up": Setting(None, _BANDWIDTH_CHECK),  # of a worker's link
    "down": Setting(None, _BANDWIDTH_CHECK),
    "port": Setting(None, _BANDWIDTH_CHECK),  # of a shard, each way
    "service": Setting(0.0, checks.number()),  # a shard's time for a message
    "incast": Setting("queue", checks.choice(*INCAST)),
  }
}


def run_network(run: Run) -> Network | None:
  """Returns the network of a run, None if its messages take no time."""
  config = run.config
  return make_network(config["network"], config["server"]["shards"])


def make_network(section: Mapping[str, Any], shards: int) -> Network | None:
  """Returns the network that a section describes, for `shards` shards; None if
  its messages take no time."""
  # None in a config means no limit.
  section = dict(section)
  for key in _BANDWIDTH_KEYS:
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
  # The orders of such shards are computed before the values, but the sizes of
  # codes may depend on the values. Consistent shards have one order, which is
  # computed along with the values.
  if codec := next((key for key in codecs if run.config[key]), None):
    raise ValueError(
      f"config.{codec} makes sizes depend on the values, and over a network the"
      f" orders of {server['shards']} shards that are out of step are computed"
      " before the values: set config.server.consistent=True, or leave one of"
      " the two out"
    )


def dtype_on_wire(config: Mapping[str, Any]) -> str | None:
  """Returns the dtype of sent numbers; None: they are sent unchanged."""
  dtype = config["server"]["wire"]
  return None if dtype == "float32" else dtype


def shard_bytes(plan: Any, shards: int) -> list[int]:
  """Returns the bytes of each shard's parameters in a packet. Raises
  ValueError, naming server.shards, if the parameters cannot be split."""
  # Shapes only: no parameters are computed.
  params = jax.eval_shape(plan.problem.init, jax.random.key(0))
  with checks.prefix_errors("server", ("shards",)):
    split = sharding.make_plan(params, shards)
  dtype, parts = dtype_on_wire(plan.run.config), sharding.split(split, params)
  return [wire.layout(part, compress=dtype).nbytes for part in parts]


def dense_sizes(plan: Any) -> Sizes:
  """Returns the sizes of messages and tickets without codecs."""
  # A dense message is as large as the parameters, and so is a ticket.
  nbytes = shard_bytes(plan, plan.network.shards)
  return fixed(nbytes, nbytes)


def has_coded_sizes(plan: Any) -> bool:
  """Whether a codec makes sizes depend on the sent values."""
  config = plan.run.config
  return bool(config["compress"] or config["compress_down"])


def divide_bytes(nbytes: float, proportions: Sequence[float]) -> list[float]:
  """Returns the parts of a packet's bytes in the given proportions."""
  total = sum(proportions)
  return [nbytes * proportion / total for proportion in proportions]


def columns(use: LinkUse, messages: int, time: float) -> dict[str, float]:
  """Returns the columns of a result that describe its network."""
  return {
    "throughput": messages / time,  # per unit of simulated time
    "link_utilisation": use.utilisation,
    "service_utilisation": use.service,
    "queue_wait": use.waited,
  }


def describe(result: Mapping[str, Any]) -> str:
  """Returns the load of a cell's network in a few words."""
  if "link_utilisation" not in result:
    return ""
  return (
    f", {result['throughput']:.3g} messages per unit of time, the busiest port"
    f" busy {100 * result['link_utilisation']:.0f} % of the time, a message"
    f" queued for {result['queue_wait']:.2g}"
  )


# Columns of tables in which a cell has a network.
COLUMNS = (
  Column("messages/time", "throughput"),
  Column("port busy %", "link_utilisation", 100, "{:.1f}"),
  Column("shard busy %", "service_utilisation", 100, "{:.1f}"),
  Column("queued", "queue_wait"),
)
