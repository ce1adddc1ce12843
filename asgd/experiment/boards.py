"""Writes curves for TensorBoard and, with --wandb, for Weights & Biases.

tensorboardX writes events in a thread. On a full disk that thread ends with a
traceback, and later callers wait for ever. `EventFile` writes in the calling
thread and raises `safe_files.DiskFull` there.

`--wandb` sets ASGD_WANDB=1, which the processes of a command inherit. Runs are
written to WORKDIR/wandb. `wandb sync` uploads them later; with
WANDB_MODE=online they are uploaded while they run.
"""

import importlib
import os
import re
import socket
import struct
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd import safe_files

# Environment variable; its value is a key of _ANSWERS, in upper or lower case.
WANDB_VARIABLE = "ASGD_WANDB"
_ANSWERS = dict.fromkeys(("1", "yes", "true"), True)
_ANSWERS |= dict.fromkeys(("", "0", "no", "false"), False)


def open_board(folder: Path, *, purge_step: int | None = None) -> Any:
  """Returns an `EventFile`; without tensorboardX, an object that does nothing.
  TensorBoard hides points of the folder's older files from `purge_step` on."""
  try:
    return EventFile(folder, purge_step)
  except ImportError:
    calls = "add_scalar", "add_scalars", "add_settings", "add_histogram_raw"
    ignored_calls = dict.fromkeys((*calls, "close"), lambda *_, **__: None)
    return types.SimpleNamespace(**ignored_calls)


def is_available() -> bool:
  """Whether tensorboardX, which encodes the events, is installed."""
  try:
    importlib.import_module("tensorboardX")
  except ImportError:
    return False
  return True


class EventFile:
  """One event file, with the methods of a SummaryWriter that asgd uses."""

  def __init__(self, folder: Path, purge_step: int | None = None):
    """Creates a new file; raises ImportError without tensorboardX."""
    from tensorboardX import record_writer, summary
    from tensorboardX.proto import event_pb2

    self._checksum, self._summary = record_writer.masked_crc32c, summary
    self._Event, self._SessionLog = event_pb2.Event, event_pb2.SessionLog
    safe_files.make_folder(folder)
    # TensorBoard finds files by `tfevents`, and reads them in the order of
    # their names, so the time comes first.
    suffix = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    path = folder / f"events.out.tfevents.{suffix}"
    # Without a buffer, closing the file writes nothing and cannot fail.
    self._file = safe_files.appending(path, buffered=False)
    self.close = self._file.close
    self._write(file_version="brain.Event:2")  # must be the first record
    if purge_step is not None:
      # At a START record, readers drop earlier points from its step on: an
      # attempt that was killed wrote them.
      log = self._SessionLog(status=self._SessionLog.START)
      self._write(step=purge_step, session_log=log)

  def add_scalar(self, tag: str, value: float, step: int) -> None:
    """Adds a point to a curve."""
    self._write(step=step, summary=self._summary.scalar(tag, value))

  def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
    """Adds a point to each of several curves, by their tags."""
    for tag, value in scalars.items():
      self.add_scalar(tag, value, step)

  def add_settings(
    self, settings: Mapping[str, Any], metrics: Sequence[str]
  ) -> None:
    """Adds a row to the table of hyperparameters. `settings` are the values by
    name; the table shows the last points of the curves `metrics` beside them.
    """
    placeholders = dict.fromkeys(metrics, 0)
    for content in self._summary.hparams(dict(settings), placeholders):
      self._write(summary=content)

  def add_histogram_raw(self, tag: str, step: int, **histogram: Any) -> None:
    """Adds a histogram, from the arguments of `summary.histogram_raw`."""
    content = self._summary.histogram_raw(tag, **histogram)
    self._write(step=step, summary=content)

  def _write(self, **content: Any) -> None:
    """Adds a record of the TFRecord format: length, its checksum, data, its
    checksum."""
    event = self._Event(wall_time=time.time(), **content)
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))  # uint64, little-endian
    length_checksum, data_checksum = (
      struct.pack("<I", self._checksum(part)) for part in (length, data)
    )
    # Each record is one write. So a kill can cut off only the last record, and
    # readers stop there.
    self._file.write(b"".join((length, length_checksum, data, data_checksum)))


def is_wandb_wanted() -> bool:
  """Whether the environment asks for Weights & Biases. Raises ValueError if the
  value of the variable is neither yes nor no."""
  word = os.environ.get(WANDB_VARIABLE, "")
  if word.strip().lower() not in _ANSWERS:
    raise ValueError(
      f"the environment has {WANDB_VARIABLE}={word[:40]!r}: write 1, yes or"
      " true, or 0, no or false"
    )
  return _ANSWERS[word.strip().lower()]


def request_wandb(is_requested: bool) -> None:
  """Sets the environment variable if Weights & Biases is wanted. Raises
  ValueError if it is not installed, or the variable is neither yes nor no."""
  if is_wandb_wanted() or is_requested:
    _wandb()
    os.environ[WANDB_VARIABLE] = "1"


def _wandb() -> Any:
  """Returns the module wandb; raises ValueError if it is not installed."""
  try:
    import wandb
  except ImportError as error:
    raise ValueError(
      f"--wandb or {WANDB_VARIABLE} asks for Weights & Biases, which is not"
      " installed: pip install 'asgd[wandb]', or drop the flag or variable"
    ) from error
  return wandb


class WandbRun:
  """One cell as a run of Weights & Biases."""

  def __init__(self, workdir: Path, cell: str, settings: Mapping[str, Any]):
    """Starts the run of a cell, or continues it."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    self._run = _wandb().init(
      project="asgd",
      dir=str(workdir),
      group=workdir.name,
      name=cell,
      # The id follows from the names, so a cell that resumes finds its run.
      id=re.sub(r"[^\w.-]", "_", f"{workdir.name}-{cell}"),
      resume="allow",
      config=dict(settings),
    )
    self.close = self._run.finish

  def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
    """Adds a point to each curve."""
    self._run.log(dict(scalars), step=step)
