"""Configs of the golden experiments of one cell: family -> case -> config."""

from asgd import algorithms, compression

WORLD = {
  "problem": {"name": "golden.world:regression"},
  "workers": (3,),
  "batch_size": 4,
  "examples": 4 * 24,
  "learning_rate": 0.05,
  "durations": {"name": "gamma", "variation": 0.3},
  "evaluations": 2,
  "curvature_checks": 0,
  "on_nan": "record",
}


def _run(recipe, run=None, **config):
  return {**WORLD, **_single(recipe, run), **config}


def _single(recipe, run=None):
  return {"runs": {"run": {"recipe": recipe, **(run or {})}}}


def _recipes():
  # slowmo has the workers of model_averaging, and its tests by hand.
  out = {name: _run(name) for name in algorithms.RECIPES if name != "slowmo"}
  for name in ("model_averaging", "diloco", "fedasync", "easgd"):
    out[name]["runs"]["run"]["steps"] = 2
  for name in ("async_diloco", "fedbuff"):
    out[name]["runs"]["run"]["steps"] = 2
  for name in ("asgd", "ssgd", "nag_asgd", "multi_asgd", "gap_aware"):
    out[f"{name}-momentum"] = _run(name, {"momentum": 0.9})
  for name in ("asgd", "dana_zero", "dc_asgd_a", "gap_aware"):
    out[f"{name}-adamw"] = _run(name, {"optimizer": "adamw"})
  plain = {"momentum": 0.0}
  return out | {
    "gap_aware-plain": _run("gap_aware", plain),
    "gap_aware-updates": _run("gap_aware", {**plain, "average": "updates"}),
    "gap_aware-splits": _run("gap_aware", {"splits": 1}),
    "dana_slim-decay": _run("dana_slim", {"weight_decay": 0.01}),
    "ringmaster_asgd-stops": _run(
      "ringmaster_asgd", {"stops": True, "threshold": 2}
    ),
    "mindflayer_sgd-budget": _run("mindflayer_sgd", {"budget": 1.1}),
    "schedule": _run(
      "dana_zero",
      learning_rate_schedule={"warmup_examples": 32, "decay_examples": (64,)},
    ),
    "clip": _run("asgd", clip_norm=0.5),
  }


def _protocols():
  ssp = {"name": "stale_synchronous", "bound": 2}
  gate = {"max_staleness": 1}
  network = {"latency": 0.1, "up": 100.0, "port": 80.0, "service": 0.02}
  delays = {"name": "gamma", "mean": 0.8}
  return {
    "ssp": _run("asgd", order=ssp),
    "ssp_cache": _run("asgd", order={**ssp, "cache": True}),
    "bulk": _run("ssgd", order={"name": "bulk_synchronous"}),
    "backup_workers": _run(
      "asgd", order={"name": "backup_workers", "backup": 1}
    ),
    "backup_tasks": _run("asgd", order={"name": "backup_tasks", "late": 1.2}),
    "fixed_delay": _run("dana_zero", order={"name": "fixed_delay"}),
    "depth": _run("gap_aware", order={"name": "asynchronous", "depth": 2}),
    "fetch_every": _run(
      "asgd", order={"name": "asynchronous", "fetch_every": 2}
    ),
    "warm_start": _run("asgd", order={"name": "asynchronous", "warm_start": 5}),
    "stages": _run(
      "asgd", order={"name": "asynchronous", "stage_epochs": ((1, 0.1),)}
    ),
    "gate": _run("asgd", gate=gate),
    "network": _run("dana_zero", network=network),
    "network_shards": _run(
      "asgd", network=network, server={"shards": 2, "consistent": True}
    ),
    "out_of_step": _run("asgd", server={"shards": 3, "delays": delays}),
    "heterogeneous": _run("dana_zero", durations={"name": "heterogeneous"}),
    "allocation": _run("asgd", allocation={"batch_size": (2, 4, 6)}),
    "allocated_steps": _run(
      "model_averaging", {"steps": 3}, allocation={"steps": (2, 3, 4)}
    ),
  }


# Options of the codecs: a message of eleven numbers is not to be empty.
CODECS = {name: {} for name in compression.CODECS} | {
  "threshold": {"tau": 0.02},
  "adaptive_threshold": {"tau": 0.02, "most": 0.1},
  "top_k": {"density": 0.25},
  "dgc": {"density": 0.1, "warm_up": 1},
  "random_k": {"density": 0.25},
  "powersgd": {"rank": 1},
  "demo": {"k": 2, "chunk": 4},
}


def _codecs():
  out = {
    name: _run("asgd", compress={"name": name, **options})
    for name, options in CODECS.items()
  }
  return out | {
    "top_k-feedback": _run(
      "dana_zero",
      compress={"name": "top_k", "density": 0.25, "error_feedback": True},
    ),
    "qsgd-down": _run(
      *("asgd",), compress={"name": "qsgd"}, compress_down={"name": "int8"}
    ),
    "shards": _run(
      "asgd",
      compress={"name": "threshold", "tau": 0.02},
      server={"shards": 2, "delays": {"name": "gamma", "mean": 0.8}},
    ),
  }


_UNDIRECTED = "ad_psgd", "choco_sgd", "d2"  # graphs that stay as they are


def _peers():
  topologies = "ring", "exponential", "one_peer_exponential"
  out = {}
  for name in algorithms.PEER_RECIPES:
    known = "topology" in algorithms.options(name)
    for topology in topologies if known else (None,):
      if topology != "ring" and name in _UNDIRECTED:
        continue
      case = name + (f"-{topology}" if topology else "")
      run = {"topology": topology} if topology else {}
      if "steps" in algorithms.options(name):
        run["steps"] = 2
      out[case] = _run(name, run, workers=(4,))
  codec = {"name": "top_k", "density": 0.25}
  return out | {
    "choco_sgd-top_k": _run(
      "choco_sgd", {"codec": codec, "gamma": 0.3}, workers=(4,)
    ),
    "sgp-overlap": _run("sgp", {"overlap": 1}, workers=(4,)),
    "d_psgd-momentum": _run("d_psgd", {"momentum": 0.9}, workers=(4,)),
  }


_FACTORS = "asgd.problems.factorisation:matrix_factorisation"
_RATINGS = {"name": _FACTORS, "rank": 2}


def _table(run=None, **config):
  return _run(
    *("table", {"clock_every": 2, **(run or {})}),
    problem=_RATINGS,
    batch_size=50,
    examples=50 * 24,
    learning_rate=8.0,
    **config,
  )


def _tables():
  bounded = {"bound": 2}
  significant = {"name": "significantly_modified", "threshold": 0.01}
  out = {
    name: _table({"consistency": name, **options})
    for name, options in {
      "bulk_synchronous": {},
      "ssp": bounded,
      "essp": bounded,
      "managed": {**bounded, "budget": 20},
      "value_bounded": {"threshold": 0.5},
      "delay_bounded": bounded,
      "asynchronous": {},
    }.items()
  }
  return out | {
    "shards": _table({"shards": 3, "rebalance_every": 2}),
    "filters": _table({"filters": (significant,)}),
    "value_bounded-filters": _table(
      {
        "consistency": "value_bounded",
        "threshold": 0.5,
        "filters": (significant,),
      }
    ),
    "within_clocks": _table(
      {
        "consistency": "managed",
        **bounded,
        "budget": 20,
        "clock_every": 4,
        "push_every": 2,
        "filters": ({"name": "largest_change", "nbytes": 200},),
      }
    ),
    "adagrad": _table({"optimizer": "adagrad"}),
    "network": _table(
      {"shards": 2}, network={"latency": 0.1, "port": 2000.0, "service": 0.01}
    ),
  }


def _sandblaster():
  batch = {"portions": 8, "push_every": 2}
  failures = (1.5, "worker", 1), (3.0, "shard", 0), (5.0, "coordinator", 0)
  budget = {"examples": 4 * 8 * 12}
  return {
    "plain": _run("sandblaster", batch, **budget),
    "shards": _run("sandblaster", {**batch, "shards": 3}, **budget),
    "killed": _run(
      "sandblaster", {**batch, "shards": 2, "failures": failures}, **budget
    ),
  }


_DIGITS = {k: v for k, v in WORLD.items() if k != "problem"} | {
  "data": {"name": "digits"},
  "model": {"name": "mlp", "hidden": (8, 8, 8)},
}


def _pipelines():
  cases = {
    "gpipe": {"schedule": "gpipe", "recipe": "ssgd", "momentum": 0.9},
    "pipedream": {"schedule": "pipedream", "recipe": "dana_zero"},
    "pipedream_2bw": {"schedule": "pipedream_2bw", "every": 4},
    "stale-recompute": {"schedule": "stale", "recompute": True},
    "pipemare": {"schedule": "pipemare"},
    "ftpipe": {"schedule": "ftpipe"},
    "zb_h1": {"schedule": "zb_h1"},
    "replicas": {"schedule": "pipedream", "replicas": (1, 2)},
  }
  return {
    name: {
      "runs": {"run": {"recipe": "asgd", **run}},
      "engine": "pipeline",
      "pipeline": {"stages": 2, "microbatches": 4},
      **_DIGITS,
      "examples": 4 * 8,
    }
    for name, run in cases.items()
  }


def _meshes():
  cases = {
    "data": {},
    "zero": {"mesh": {"axes": {"data": 4}, "zero": 3}},
    "accumulate": {"mesh": {"axes": {"data": 2}, "accumulate": 2}},
    "powersgd": {"compress": {"name": "powersgd", "rank": 1}},
    "onebit_adam": {"compress": {"name": "onebit_adam", "warm_up": 4}},
    "onebit_adam-auto": {
      "compress": {"name": "onebit_adam", "b2": 0.5},
      "learning_rate": 1e-3,
    },
  }
  return {
    name: {
      "runs": {"run": {"optimizer": {"name": "sgd", "momentum": 0.9}}},
      "engine": "mesh",
      "mesh": {"axes": {"data": 2}},
      **_DIGITS,
      "examples": 8 * 6,
      "batch_size": 8,
      **config,
    }
    for name, config in cases.items()
  }


FAMILIES = {
  "recipes": _recipes(),
  "protocols": _protocols(),
  "codecs": _codecs(),
  "peers": _peers(),
  "tables": _tables(),
  "sandblaster": _sandblaster(),
  "pipelines": _pipelines(),
  "meshes": _meshes(),
}

# Live cells on threads, with faults as of `asgd train --fault`. What they
# compute depends on the order of real events, so their folders are kept.


def _live(recipe, run=None, **config):
  return {
    **_DIGITS,
    **_single(recipe, run),
    "engine": "threads",
    "model": {"name": "mlp", "hidden": (8,)},
    "batch_size": 16,
    "examples": 16 * 36,
    **config,
  }


LIVE = {
  "dense": (_live("dana_zero"), ("kill:1:3", "double:0:2", "reorder:2:4")),
  "dense_ssp": (
    _live(
      "dc_asgd_a",
      order={"name": "stale_synchronous", "bound": 2},
      gate={"max_staleness": 2},
    ),
    (),
  ),
  "dense_shards": (
    _live(
      "nag_asgd",
      server={"shards": 2},
      compress={"name": "top_k", "density": 0.1},
    ),
    ("kill:0:4",),
  ),
  "dense_rounds": (_live("ssgd"), ("kill:2:2",)),
  "peers_rounds": (_live("choco_sgd", {"gamma": 0.4}), ("kill:1:3",)),
  "peers_pairs": (_live("ad_psgd"), ("kill:1:3",)),
  "tables": (
    {
      **_table({"consistency": "ssp", "bound": 2, "shards": 2}),
      "engine": "threads",
    },
    ("kill:1:3",),
  ),
  "tables_essp": (
    {**_table({"consistency": "essp", "bound": 2}), "engine": "threads"},
    (),
  ),
  "sandblaster": (
    _live(
      "sandblaster",
      {"portions": 8, "push_every": 2, "shards": 2},
      examples=16 * 8 * 6,
    ),
    ("kill:1:2",),
  ),
}
