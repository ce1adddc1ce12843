"""Keyword arguments of calls, with their types; see `asgd.facade`."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import optax

from asgd import algorithms, base, compression
from asgd.experiment.machine import Machine
from asgd.sandblaster.settings import Settings as SandblasterSettings
from asgd.tables.settings import TableSettings

FURTHER = "clip_norm", "on_nan", "checkpoint_seconds"  # shared keys of a config

# Forms of a recipe; the settings of tables and of Sandblaster are two more.
RecipeLike: TypeAlias = (
  algorithms.Recipe
  | base.Algorithm
  | optax.GradientTransformation
  | TableSettings
  | SandblasterSettings
)


class RunOptions(NamedTuple):
  """How long a call trains, and which results it keeps and shows."""

  messages: int
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

  seed: int
  evaluate: Callable[[Any], Any] | None
  every: int | None
  progress: bool
  machine: Machine | None
  clip_norm: float | None


class ServerOptions(CallOptions, total=False):
  """Keyword arguments of `simulate` and `train_live`: keys of a config."""

  on_nan: str
  checkpoint_seconds: float | None
  order: Mapping[str, Any]
  durations: Mapping[str, Any]
  gate: Mapping[str, Any]
  allocation: Mapping[str, Any]
  network: Mapping[str, Any]
  server: Mapping[str, Any]
  compress: compression.Codec | str | Mapping[str, Any] | None
  compress_down: compression.Codec | str | Mapping[str, Any] | None


class SimulateOptions(ServerOptions, total=False):
  """Further keyword arguments of `simulate`."""

  simulator: Mapping[str, Any]


class LiveOptions(ServerOptions, total=False):
  """Further keyword arguments of `train_live`."""

  live: Mapping[str, Any]


def read_options(
  named: Sequence[Any], further: Mapping[str, Any]
) -> tuple[RunOptions, dict[str, Any]]:
  """Returns (options, keys of a config) of a call.

  Args:
    named: values of the first fields of `RunOptions`.
    further: values of its other fields, and keys of a config.
  """
  fields = RunOptions._fields[len(named) :]
  known = {key: further[key] for key in fields if key in further}
  config = {k: v for k, v in further.items() if k not in known}
  return RunOptions(*named, **known), config
