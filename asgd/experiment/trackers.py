"""Weights & Biases, beside TensorBoard, for the curves of cells.

It is asked for by `--wandb`, or ASGD_WANDB=1 in the environment, which other
processes of a command have too. Runs are written to WORKDIR/wandb and sent
nowhere, unless WANDB_MODE says so: `wandb sync` sends them later.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASKED = "ASGD_WANDB"  # environment variable


_WORDS = dict.fromkeys(("1", "yes", "true"), True)
_WORDS |= dict.fromkeys(("", "0", "no", "false"), False)


def asked() -> bool:
  """Whether runs are to be written for Weights & Biases; ValueError for a value
  of the environment variable that is neither yes nor no."""
  word = os.environ.get(ASKED, "")
  if word.strip().lower() not in _WORDS:
    raise ValueError(
      f"the environment has {ASKED}={word[:40]!r}: write 1, yes or true, or 0,"
      " no or false"
    )
  return _WORDS[word.strip().lower()]


def ask(wanted: bool) -> None:
  """Asks for it if it is wanted; ValueError if it is asked for and not
  installed, or the environment says neither yes nor no."""
  if asked() or wanted:
    _import()
    os.environ[ASKED] = "1"


def _import() -> Any:
  try:
    import wandb
  except ImportError as error:
    raise ValueError(
      f"--wandb or {ASKED} asks for Weights & Biases, which is not installed:"
      " pip install 'asgd[wandb]', or go without it"
    ) from error
  return wandb


class WandbRun:
  """One cell as a run, with the methods of an `event_file.EventFile`."""

  def __init__(self, workdir: Path, cell: str, settings: Mapping[str, Any]):
    """Starts the run of a cell, or goes on with it."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    self._run = _import().init(
      project="asgd",
      dir=str(workdir),
      group=workdir.name,
      name=cell,
      id=re.sub(r"[^\w.-]", "_", f"{workdir.name}-{cell}"),
      resume="allow",
      config=dict(settings),
    )

  def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
    """Adds a point to each curve."""
    self._run.log(dict(scalars), step=step)

  def close(self) -> None:
    """Ends the run."""
    self._run.finish()
