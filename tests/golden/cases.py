"""The golden cases: name -> a function that computes its digests.

A name is FAMILY/CASE; a family is a file FAMILY.json. Experiments are described
by configs, and traces and tables by names and options: those outlast a change
of the code that runs them.
"""

import functools
import itertools
from collections.abc import Callable
from unittest import mock

import jax
import numpy as np
from golden import digests, live_cells, runs

from asgd import base, compression, diagnosis, experiment, orders
from asgd import gossip as gossip_lib
from asgd.compression import packing
from asgd.experiment import loop, replay
from asgd.experiment.progress import Silent
from asgd.gossip import topologies
from asgd.orders import protocol
from asgd.pipeline import analyze, schedules
from asgd.pipeline import table as table_lib
from asgd.pipeline.engine import PIPELINE

ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
Case = Callable[[], dict[str, str]]


def all_cases() -> dict[str, Case]:
  """Returns all cases, by name."""
  families = {
    "orders": _orders(),
    "schedules": _schedules(),
    "messages": _messages(),
    "live": _live(),
    **{family: _experiments(family) for family in runs.FAMILIES},
  }
  return {
    f"{family}/{name}": case
    for family, cases in families.items()
    for name, case in cases.items()
  }


# Orders.

DURATIONS = {
  "constant": {"slowdown": (1.0, 3.0)},
  "gamma": {"variation": 0.3},
  "heterogeneous": {},
  "pareto": {},
  "bursts": {},
}
ORDERS = {
  "asynchronous": ("asynchronous", {}),
  "depth": ("asynchronous", {"depth": 3}),
  "fetch_every": ("asynchronous", {"fetch_every": 3}),
  "warm_start": ("asynchronous", {"warm_start": 7}),
  "stages": ("asynchronous", {"stages": ((1, 20), (3, 80))}),
  "bulk": ("bulk_synchronous", {}),
  "ssp": ("stale_synchronous", {"bound": 2}),
  "ssp_cache": ("stale_synchronous", {"bound": 2, "cache": True}),
  "ssp_depth": ("stale_synchronous", {"bound": 2, "depth": 2}),
  "backup_workers": ("backup_workers", {"backup": 2}),
  "backup_tasks": ("backup_tasks", {"late": 1.2}),
}
TOPOLOGIES = {
  "ring": {},
  "exponential": {},
  "one_peer_exponential": {},
  "hypercube": {},
  "random_regular": {"degree": 3},
  "matcha": {"rounds": 5},
}


def _trace(trace: base.Trace) -> dict[str, str]:
  return digests.columns(trace)


def _order(name, options, clock):
  durations = orders.durations.build(clock, seed=1, **DURATIONS[clock])
  return _trace(
    orders.build(name, durations, workers=5, messages=200, **options)
  )


def _order_over_network(name, options):
  play = orders.start(
    *(name, orders.durations.build("gamma", seed=2)),
    workers=4,
    network=orders.network.Network(
      latency=0.1, up=30.0, down=40.0, port=60.0, service=0.02, shards=2
    ),
    sizes=orders.play.fixed([8.0, 4.0], [6.0, 6.0]),
    **options,
  )
  play.until(100)
  return _trace(play.trace())


def _out_of_step():
  traces = orders.shards.out_of_step(
    *(protocol.Rules(bound=3), orders.durations.build("gamma", seed=3)),
    orders.durations.build("gamma", seed=4, mean=0.5),
    workers=3,
    messages=60,
    shards=3,
  )
  return {
    f"{shard}.{key}": value
    for shard, trace in enumerate(traces)
    for key, value in _trace(trace).items()
  }


def _peer_order(topology, options, pairs):
  graph = topologies.build({"name": topology, **options}, 8)
  clock = orders.durations.build("gamma", seed=5, variation=0.4)
  if pairs:
    return _trace(gossip_lib.orders.pairs(clock, graph, messages=120))
  return _trace(gossip_lib.orders.rounds(clock, graph, messages=120))


def _orders():
  out = {
    f"{case}-{clock}": functools.partial(_order, name, options, clock)
    for (case, (name, options)), clock in itertools.product(
      ORDERS.items(), DURATIONS
    )
  }
  for case in ("asynchronous", "ssp_cache", "backup_workers", "bulk"):
    out[f"{case}-network"] = functools.partial(
      _order_over_network, *ORDERS[case]
    )
  for name, options in TOPOLOGIES.items():
    out[f"rounds-{name}"] = functools.partial(_peer_order, name, options, False)
  out["pairs-ring"] = functools.partial(_peer_order, "ring", {}, True)
  return out | {"shards_out_of_step": _out_of_step}


# Tables of pipeline schedules.

SIZES = {"small": (4, 8), "odd": (3, 7), "large": (8, 24)}


def _own_rule(device, state):
  return state.first("B") or state.first("F")


def _schedule(name, stages, microbatches):
  options = {"rule": _own_rule} if name == "custom" else {}
  traits = schedules.describe(name)
  stages *= traits.chunks if "devices" not in traits.options else 1
  table = schedules.make(
    name, stages=stages, total=2 * microbatches, batch=microbatches, **options
  )
  return {"csv": digests.text(table_lib.to_csv(table))}


def _schedule_of_costs(name):
  places = 4 if name.startswith("zb_h") else 8
  costs = analyze.costs(places, forward=10, input=11, weight=7)
  table = schedules.SCHEDULES[name](4, 8, costs=costs)
  return {"csv": digests.text(table_lib.to_csv(table))}


def _schedules():
  out = {
    f"{name}-costs": functools.partial(_schedule_of_costs, name)
    for name in ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min")
  }
  for name, (size, (stages, count)) in itertools.product(
    schedules.SCHEDULES, SIZES.items()
  ):
    if size == "odd" and name in ("chimera", "dualpipe", "interleaved"):
      continue  # these need an even number of stages or microbatches
    out[f"{name}-{size}"] = functools.partial(_schedule, name, stages, count)
  return out


# Experiments of one cell.


def _cell(config):
  exp = experiment.build(config, engines=ENGINES)
  (cell,), ended = exp.cells, []
  with mock.patch.object(diagnosis, "curvature_limit", return_value=0.0):
    loop.train(  # without a column of the result, which is not compared
      *(exp, cell, None),
      bar=Silent(),
      on_end=lambda *what: ended.extend(what),
    )
  records, params, rows, _ = ended
  out = {f"records.{k}": v for k, v in digests.columns(records).items()}
  out |= {f"params{k}": v for k, v in digests.digest(params).items()}
  keys = ("message", "update", "time", "test_loss", "diverged")
  last = {key: rows[-1][key] for key in keys if key in rows[-1]}
  return out | digests.digest(last)


def _experiments(family):
  return {
    name: functools.partial(_cell, config)
    for name, config in runs.FAMILIES[family].items()
  }


# Messages as bytes.


def _packed(name):
  codec = compression.named(name, **runs.CODECS[name])
  codec = compression.fitted(codec, workers=3, epoch=1.0)
  rng = np.random.default_rng(0)
  sizes = {"w": (6, 4), "b": (3,)}
  tree = {k: rng.normal(size=n).astype(np.float32) for k, n in sizes.items()}
  state, out = codec.init(tree), {}
  encode, decode = jax.jit(codec.encode), jax.jit(codec.decode)
  for number in range(3):
    code, state = encode(state, tree, jax.random.key(number))
    sent = packing.pack(packing.layout(code), code)
    out[f"{number}.bytes"] = digests.octets(sent)
    decoded = digests.digest(decode(code)).items()
    out |= {f"{number}{key}": value for key, value in decoded}
  return out


def _messages():
  return {
    name: functools.partial(_packed, name) for name in compression.CODECS
  }


# Live runs: a finished cell, which is computed again from its traces.


def _replayed(folder):
  result = replay.replay(folder)
  out = {f"params{k}": v for k, v in digests.digest(result.params).items()}
  out |= {f"trace.{k}": v for k, v in digests.columns(result.trace).items()}
  return out


def _live():
  return {
    name: functools.partial(_replayed, live_cells.FOLDER / name)
    for name in runs.LIVE
  }
