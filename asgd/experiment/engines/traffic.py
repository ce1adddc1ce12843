"""Codecs of a config, and the traffic of a cell: bytes up and down."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from asgd import algorithms, base, compression, problems, wire
from asgd.checks import shown
from asgd.compression import own
from asgd.experiment import checks
from asgd.experiment.engines import Column
from asgd.experiment.schema import GIVEN, Run, Setting
from asgd.orders.trace import Event


def _codec(value: Any, key: str) -> dict[str, Any] | None:
  """Reads a codec: its name, or a dict of it and its options."""
  if value is None:
    return None
  if isinstance(value, str):
    value = {"name": value}
  if not isinstance(value, Mapping) or "name" not in value:
    raise ValueError(
      f"config.{key} must be the name of a codec, a dict with its name and"
      f" options, or None, not {shown(value)}"
    )
  name = value["name"]
  # Reducers are of engine mesh alone, which makes them; other engines refuse
  # them, or make the codec of that name.
  if name != GIVEN and name not in list(compression.REDUCERS):
    with checks.blame(key, tuple(value)):
      compression.named(**value)
  return dict(value)


SECTIONS = {
  # Of `asgd.compression`, of messages: a name, or a dict of it and options.
  "compress": Setting(None, _codec),
  # The same, of the server's updates, which workers are sent.
  "compress_down": Setting(None, _codec),
}


# Workers, and messages of each in an epoch; None: the data have no end.
Size = tuple[int, float | None]


def size_of(
  dataset: Any, problem: problems.Problem, workers: int, batches: int
) -> Size:
  """Returns what codecs are fitted to.

  Args:
    dataset: of the experiment; `per_epoch` None says that it has no end.
    problem: on it.
    workers: whose messages are averaged.
    batches: of which one message of each of them is made, together.
  """
  if getattr(dataset, "per_epoch", problem.batches_per_epoch) is None:
    return workers, None
  return workers, problem.batches_per_epoch / batches


# One codec for all cells that have it, and of a size: one compilation.
_named = functools.lru_cache(maxsize=32)(
  lambda section: compression.named(**json.loads(section))
)
_checked = functools.lru_cache(maxsize=32)(own.checked)
_fitted = functools.lru_cache(maxsize=32)(compression.fitted)
_decoding = functools.lru_cache(maxsize=32)(compression.decoding)
_compressed_updates = functools.lru_cache(maxsize=32)(
  compression.compressed_updates
)


def _codec_of(run: Run, key: str, size: Size) -> compression.Codec | None:
  """Returns the codec of a run's key, None if there is none. Raises ValueError
  for one that was given to a call and is not there."""
  section = run.config[key]
  if section is None:
    return None
  if section["name"] != GIVEN:
    with checks.blame(key, tuple(section)):
      return _fitted(_named(json.dumps(section, sort_keys=True)), *size)
  if key not in run.codecs:
    raise ValueError(
      f"config.{key} {GIVEN!r} stands for a codec that is given to a call, such"
      f" as asgd.simulate(..., {key}=codec): give it again, or name one"
    )
  return _fitted(_checked(run.codecs[key], f"given as {key}"), *size)


def codecs_of(
  run: Run,
  dataset: Any,
  problem: problems.Problem,
  recipe: algorithms.Recipe,
  workers: int,
) -> tuple[compression.Codec | None, compression.Codec | None]:
  """Returns the codecs of a run's messages and of its updates, which the server
  alone sends; None for what is dense."""
  message = recipe.push_every * recipe.steps
  up = size_of(dataset, problem, workers, workers * message)
  down = size_of(dataset, problem, 1, recipe.every * message)
  return _codec_of(run, "compress", up), _codec_of(run, "compress_down", down)


def compressed(
  run: Run,
  server: base.Server,
  codec: compression.Codec | None,
  problem: problems.Problem,
) -> base.Server:
  """Returns a server that decodes what the run's codec makes. Raises
  ValueError, naming the key, if its parameters cannot be encoded."""
  if codec is None:
    return server
  params = jax.eval_shape(problem.init, jax.random.key(0))
  with checks.blame("compress", tuple(run.config["compress"])):
    compression.layout(codec, params)
  return _decoding(server, codec)


def downward(
  run: Run,
  recipe: algorithms.Recipe,
  codec: compression.Codec | None,
  problem: problems.Problem,
) -> algorithms.Recipe:
  """Returns a recipe whose updates are codes, if the run has a codec of them.
  Raises ValueError, naming the key, if they cannot be."""
  if codec is None:
    return recipe
  params = jax.eval_shape(problem.init, jax.random.key(0))
  with checks.blame("compress_down", tuple(run.config["compress_down"])):
    compression.layout(codec, base.weights_of(params))
    algorithm = _compressed_updates(recipe.algorithm, codec)
  return recipe._replace(algorithm=algorithm)


# One Worker for all cells of a run: one compilation.
compressed_worker = functools.lru_cache(maxsize=32)(compression.compressed)


def columns(plan: Any, records: base.Records) -> dict[str, Any]:
  """Returns the columns of a result with its bytes up and down, and how many
  times more there are without codecs (a message and parameters for a job)."""
  params = jax.eval_shape(plan.problem.init, jax.random.key(0))
  dense = wire.layout(params).nbytes * len(records.loss)
  row = {}
  for way, key in (("up", "compress"), ("down", "compress_down")):
    nbytes = int(getattr(records, f"bytes_{way}").sum())
    section = plan.run.config[key]
    row[f"bytes_{way}"] = nbytes
    row[f"compression_{way}"] = dense / max(nbytes, 1) if section else 1.0
    if section:
      row["codec" if way == "up" else "codec_down"] = section["name"]
  return row


def lost(
  plan: Any, journal: Sequence[Event], records: base.Records
) -> dict[str, float]:
  """Returns a column with the residuals that codecs of workers held when they
  left early, the root of the sum of squares of their RMS; {} without one."""
  if plan.run.config["compress"] is None:
    return {}
  keys = zip(records.worker.tolist(), records.job.tolist(), strict=True)
  norms = dict(zip(keys, records.residual_norm.tolist(), strict=True))
  kept: dict[int, float] = {}  # by worker
  total, left = 0.0, 0.0  # of squares: in all, and since the last message
  for event in journal:
    if event.action == base.RECEIVE:
      total, left = total + left, 0.0
      kept[event.worker] = norms.get((event.worker, event.job), 0.0)
    elif event.action == base.LEAVE:
      left += kept.pop(event.worker, 0.0) ** 2
  return {"residual_lost": math.sqrt(total)}


# Of tables in which a cell has a codec.
COLUMNS = (
  Column("MB up", "bytes_up", 1e-6),
  Column("MB down", "bytes_down", 1e-6),
  Column("dense / up", "compression_up"),
  Column("dense / down", "compression_down"),
)


def megabytes(records: Sequence[base.Records]) -> float:
  """Returns the traffic of messages, up and down, of all shards."""
  sums = (part.bytes_up.sum() + part.bytes_down.sum() for part in records)
  return float(sum(sums)) / 1e6
