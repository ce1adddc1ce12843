"""Codecs of a config, and the traffic of a cell in bytes up and down."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from asgd import algorithms, base, compression, problems, wire
from asgd.checks import shown
from asgd.compression import user_codecs
from asgd.experiment import build_cache, checks, refusals
from asgd.experiment.engines import Column, networks
from asgd.experiment.schema import GIVEN_MARK, Run, Setting
from asgd.orders.trace import Event


@checks.name_or_options
def _check_codec(value: Any, key: str) -> dict[str, Any] | None:
  """Checks a codec: its name, or a dict of its name and options."""
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
  # The name of a reducer is not checked here: engine mesh makes the reducer.
  # Other engines make the codec of that name or, if there is none, refuse it.
  if name != GIVEN_MARK and name not in list(compression.REDUCERS):
    with checks.prefix_errors(key, tuple(value)):
      compression.named(**value)
  return dict(value)


SECTIONS = {
  # Codec of messages, from `asgd.compression`: a name, or a dict of its name
  # and options.
  "compress": Setting(None, _check_codec),
  # Codec of the server's updates, which workers then get instead of parameters.
  "compress_down": Setting(None, _check_codec),
}


# (workers, messages per epoch of each worker; None: the data are a stream).
CodecSize = tuple[int, float | None]


def codec_size(
  dataset: Any, problem: problems.Problem, workers: int, batches: int
) -> CodecSize:
  """Returns the size that codecs are fitted to.

  Args:
    dataset: the dataset of the experiment; `per_epoch` None marks a stream.
    problem: the problem on this dataset.
    workers: number of messages that are averaged, one from each worker.
    batches: number of batches in all these messages together.
  """
  if getattr(dataset, "per_epoch", problem.batches_per_epoch) is None:
    return workers, None
  return workers, problem.batches_per_epoch / batches


# Cells with equal codecs and sizes share one object, and so one compilation.
_codec_cache = build_cache.BuildCache(32)
_check_own_codec = functools.lru_cache(maxsize=32)(user_codecs.checked)
_cached_fitted = functools.lru_cache(maxsize=32)(compression.fitted)
_cached_decoding = functools.lru_cache(maxsize=32)(compression.decoding)
_cached_updates = functools.lru_cache(maxsize=32)(
  compression.compressed_updates
)


def run_codec(run: Run, key: str, size: CodecSize) -> compression.Codec | None:
  """Returns the codec of a run's key; None if it has none. Raises ValueError if
  the config refers to an object that the call was not given."""
  section = run.config[key]
  if section is None:
    return None
  if section["name"] != GIVEN_MARK:
    with checks.prefix_errors(key, tuple(section)):
      codec = _codec_cache.get(lambda: compression.named(**section), section)
      return _cached_fitted(codec, *size)
  codec = refusals.given_object(run, key)
  return _cached_fitted(_check_own_codec(codec, f"given as {key}"), *size)


def run_codecs(
  run: Run,
  dataset: Any,
  problem: problems.Problem,
  recipe: algorithms.Recipe,
  workers: int,
) -> tuple[compression.Codec | None, compression.Codec | None]:
  """Returns the codecs of a run's messages and of its server's updates; None
  where there is no codec."""
  # The server sends updates as messages, each made of `recipe.every` messages.
  batches_per_message = recipe.push_every * recipe.steps
  up_size = codec_size(dataset, problem, workers, workers * batches_per_message)
  down_size = codec_size(
    dataset, problem, 1, recipe.every * batches_per_message
  )
  return run_codec(run, "compress", up_size), run_codec(
    run, "compress_down", down_size
  )


def decoding_server(
  run: Run,
  server: base.Server,
  codec: compression.Codec | None,
  problem: problems.Problem,
) -> base.Server:
  """Returns a server that decodes the messages of the run's codec. Raises
  ValueError, naming the key, if the parameters cannot be encoded."""
  if codec is None:
    return server
  params = jax.eval_shape(problem.init, jax.random.key(0))
  with checks.prefix_errors("compress", tuple(run.config["compress"])):
    compression.layout(codec, params)  # raises if an array has no code
  return _cached_decoding(server, codec)


def with_encoded_updates(
  run: Run,
  recipe: algorithms.Recipe,
  codec: compression.Codec | None,
  problem: problems.Problem,
) -> algorithms.Recipe:
  """Returns a recipe with encoded updates, if the run has a codec for them.
  Raises ValueError, naming the key, if they cannot be encoded."""
  if codec is None:
    return recipe
  params = jax.eval_shape(problem.init, jax.random.key(0))
  option_names = tuple(run.config["compress_down"])
  with checks.prefix_errors("compress_down", option_names):
    compression.layout(codec, base.weights_of(params))
    algorithm = _cached_updates(recipe.algorithm, codec)
  return recipe._replace(algorithm=algorithm)


# The cells of a run share one Worker, and so one compilation.
compressed_worker = functools.lru_cache(maxsize=32)(compression.compressed)


def dense_bytes(plan: Any) -> int:
  """Returns the bytes of a message without a codec."""
  params = jax.eval_shape(plan.problem.init, jax.random.key(0))
  dtype = networks.dtype_on_wire(plan.run.config)
  return wire.layout(params, compress=dtype).nbytes


def columns(plan: Any, records: base.Records, kept: int) -> dict[str, Any]:
  """Returns a result's columns: bytes up and down, and the factor by which
  dense messages and parameters would be larger. `kept`: messages on tickets
  that workers had kept, for which no parameters were sent."""
  dense, messages = dense_bytes(plan), len(records.loss)
  row: dict[str, Any] = {}
  for direction, key, count in (
    ("up", "compress", messages), ("down", "compress_down", messages - kept)
  ):
    nbytes = int(getattr(records, f"bytes_{direction}").sum())
    section = plan.run.config[key]
    row[f"bytes_{direction}"] = nbytes
    # 1 without a codec: the message is dense.
    row[f"compression_{direction}"] = (
      dense * count / max(nbytes, 1) if section else 1.0
    )
    if section:
      row["codec" if direction == "up" else "codec_down"] = section["name"]
  return row


def lost_residual(
  plan: Any, journal: Sequence[Event], records: base.Records
) -> dict[str, float]:
  """Returns, as a column, the residuals of codecs that were lost with workers
  that left before the last message: the root of the sum of squares of their
  RMS. Returns {} without a codec."""
  if plan.run.config["compress"] is None:
    return {}
  job_keys = zip(records.worker.tolist(), records.job.tolist(), strict=True)
  norms = dict(zip(job_keys, records.residual_norm.tolist(), strict=True))
  residuals: dict[int, float] = {}  # by worker
  # Sums of squares: of the residuals that count as lost, and of those of
  # workers that left since the last message.
  lost_squares, left_squares = 0.0, 0.0
  for event in journal:
    if event.action == base.RECEIVE:
      # A message follows, so the residuals of workers that left before it
      # count: they would have been sent.
      lost_squares, left_squares = lost_squares + left_squares, 0.0
      residuals[event.worker] = norms.get((event.worker, event.job), 0.0)
    elif event.action == base.LEAVE:
      left_squares += residuals.pop(event.worker, 0.0) ** 2
  return {"residual_lost": math.sqrt(lost_squares)}


# Columns of tables in which a cell has a codec.
COLUMNS = (
  Column("MB up", "bytes_up", 1e-6),
  Column("MB down", "bytes_down", 1e-6),
  Column("dense / up", "compression_up"),
  Column("dense / down", "compression_down"),
)


def megabytes(records: Sequence[base.Records]) -> float:
  """Returns the traffic of messages, up and down, of all shards."""
  sums = (
    records_of_shard.bytes_up.sum() + records_of_shard.bytes_down.sum()
    for records_of_shard in records
  )
  return float(sum(sums)) / 1e6
