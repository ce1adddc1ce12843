"""Types of the keyword arguments of `simulate`, `train_live` and `train_mesh`;
see `asgd.facade`."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import optax

from asgd import algorithms, base, checks, compression, gossip
from asgd.experiment.machine import Machine
from asgd.orders.durations import Durations
from asgd.orders.protocol import Rules
from asgd.sandblaster.settings import Settings as SandblasterSettings
from asgd.tables.settings import TableSettings

# Keys of a config that calls take beside the fields of `RunOptions`.
CONFIG_KEYS = "clip_norm", "on_nan", "checkpoint_seconds"

# The recipes that a call accepts, with those of tables and of Sandblaster.
RecipeLike: TypeAlias = (
  algorithms.Recipe
  | base.Algorithm
  | optax.GradientTransformation
  | TableSettings
  | SandblasterSettings
)
Matrix: TypeAlias = npt.NDArray[np.floating[Any]]
# An order is a name, a dict of a name and options, a protocol (`Rules`), rows
# of a trace, or the worker of each message; or a function that returns such
# rows or workers.
OrderLike: TypeAlias = (
  str | Mapping[str, Any] | Rules | Iterable[Any] | Callable[..., Any]
)
# Forms of durations: a name, a dict, the seconds of each worker (or a row of
# seconds for each), or a function (worker) -> seconds of its jobs.
DurationsLike: TypeAlias = (
  str
  | Mapping[str, Any]
  | Sequence[float]
  | Sequence[Sequence[float]]
  | Matrix
  | Durations
  | Callable[[int], Iterable[float]]
)
TopologyLike: TypeAlias = (
  str
  | Mapping[str, Any]
  | Matrix
  | Sequence[Sequence[float]]
  | gossip.Topology
)


class RunOptions(NamedTuple):
  """How long a call trains, and which results it keeps and shows."""

  messages: int | None  # None: as many as `epochs` or the trace has
  epochs: float | None = None
  workers: int | None = None  # None: the recipe's
  batch_size: int | None = None
  folder: str | os.PathLike[str] | None = None
  seed: int = 0
  evaluate: Callable[[Any], Any] | None = None
  every: int | None = None
  progress: bool = True
  machine: Machine | None = None


class CallOptions(TypedDict, total=False):
  """Keyword arguments that every call takes; see `simulate`."""

  folder: str | os.PathLike[str] | None
  seed: int
  evaluate: Callable[[Any], Any] | None
  every: int | None
  progress: bool
  machine: Machine | None
  clip_norm: float | None


class CheckpointOptions(CallOptions, total=False):
  """Keyword arguments of calls that write checkpoints: keys of a config."""

  on_nan: str
  checkpoint_seconds: float | None


class ServerOptions(CheckpointOptions, total=False):
  """Keyword arguments of `simulate` and `train_live`: keys of a config, and the
  topology of a recipe of peers."""

  order: OrderLike
  topology: TopologyLike
  gate: Mapping[str, Any]
  allocation: Mapping[str, Any]
  network: Mapping[str, Any]
  server: Mapping[str, Any]
  compress: compression.Codec | str | Mapping[str, Any] | None
  compress_down: compression.Codec | str | Mapping[str, Any] | None


class SimulateOptions(ServerOptions, total=False):
  """Further keyword arguments of `simulate`."""

  trace: base.Trace | None
  durations: DurationsLike
  simulator: Mapping[str, Any]


class LiveOptions(ServerOptions, total=False):
  """Further keyword arguments of `train_live`."""

  durations: Sequence[float]
  live: Mapping[str, Any]


class MeshOptions(CheckpointOptions, total=False):
  """Further keyword arguments of `train_mesh`: settings of a mesh."""

  devices: int | None
  accumulate: int
  zero: int
  precision: str
  loss_scale: Mapping[str, Any] | None
  sequence: bool
  microbatches: int | None
  rounds: int | None
  recompute: bool
  form: str
  compress: str | Mapping[str, Any] | None


def read_options(
  positional: Sequence[Any], further: Mapping[str, Any]
) -> tuple[RunOptions, dict[str, Any]]:
  """Returns (options, keys of a config) of a call.

  Args:
    positional: values of the first fields of `RunOptions`.
    further: values of its other fields, and keys of a config.

  Raises ValueError for a folder that is no path, and a machine that is none.
  """
  fields = RunOptions._fields[len(positional) :]
  run_fields = {key: further[key] for key in fields if key in further}
  if run_fields.get("folder") is not None:
    run_fields["folder"] = checks.path("folder", run_fields["folder"])
  if not isinstance(machine := run_fields.get("machine"), Machine | None):
    raise ValueError(
      "machine must be an asgd.experiment.machine.Machine, not"
      f" {checks.shown(machine)}"
    )
  config = {k: v for k, v in further.items() if k not in run_fields}
  return RunOptions(*positional, **run_fields), config
