"""Injected faults: each has a (worker, seq) and is counted when it happens.

A script is data. Its faults are the same in threads and in processes, except
that `kill` ends the loop of a thread, and kills a process by signal 9.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import safe_files
from asgd.live.frames import Frame

KINDS = ("kill", "hang", "slow", "nan", "lose", "double", "reorder")
MOST_SECONDS = 1e6  # of a slow job: twelve days
LINK_FAULTS = "lose", "double", "reorder"  # kinds of faults of frames


class Fault(NamedTuple):
  """One fault."""

  worker: int
  seq: int  # index among the jobs of the worker, counted from 0
  kind: str  # one of KINDS
  seconds: float = 0.0  # of a slow job


class Killed(BaseException):
  """Ends a worker's thread where a process would be killed."""


def parse(text: str) -> Fault:
  """Reads KIND:WORKER:SEQ, or slow:WORKER:SEQ:SECONDS; raises ValueError for
  anything else."""
  kind, *numbers = text.split(":")
  try:
    if kind not in KINDS or len(numbers) != 2 + (kind == "slow"):
      raise ValueError  # replaced below, as are those of `int` and `float`
    worker, seq, *seconds = numbers
    fault = Fault(int(worker), int(seq), kind, *map(float, seconds))
  except ValueError:
    raise ValueError(
      f"no fault: {text!r}; write KIND:WORKER:SEQ with a kind of"
      f" {', '.join(KINDS)}, or slow:WORKER:SEQ:SECONDS"
    ) from None
  _check_numbers(fault, text)
  return fault


def _check_numbers(fault: Fault, text: str) -> None:
  """Raises ValueError for a number out of its range; `text` is the fault as a
  user writes it."""
  worker, seq, _, seconds = fault
  for name, value in (("worker", worker), ("seq", seq)):
    if value < 0:
      raise ValueError(f"fault {text!r}: {name} must be 0 or more, not {value}")
  if not 0 <= seconds <= MOST_SECONDS:
    raise ValueError(
      f"fault {text!r}: seconds must be from 0 to {MOST_SECONDS:,.0f}, not"
      f" {seconds:g}"
    )


def check(
  faults: Sequence[Fault], workers: int, jobs: int | None = None
) -> None:
  """Raises ValueError for a fault that cannot happen with these counts of
  workers and jobs (None: the number of jobs is not known), or that is given
  twice."""
  checked_keys = set()  # (worker, seq, kind)
  for fault in faults:
    text = f"{fault.kind}:{fault.worker}:{fault.seq}"  # as `parse` reads it
    text += f":{fault.seconds:g}" if fault.kind == "slow" else ""
    _check_numbers(fault, text)
    if fault.worker >= workers:
      raise ValueError(
        f"fault {text!r}: there is no worker {fault.worker}; the {workers} are"
        f" numbered from 0 to {workers - 1}"
      )
    if jobs is not None and fault.seq >= jobs:
      raise ValueError(
        f"fault {text!r}: the run has {jobs} jobs in all, so none of a worker"
        f" has seq {fault.seq}; use a smaller one"
      )
    if fault[:3] in checked_keys:
      raise ValueError(f"fault {text!r} is given twice; remove one")
    checked_keys.add(fault[:3])


def append_fault(run: Path, fault: Fault) -> None:
  """Writes an injected fault to the run's file."""
  with safe_files.appending(Path(run) / "faults.csv") as file:
    file.write((",".join(map(str, fault)) + "\n").encode())


class Script:
  """Injects faults into worker loops, each fault once."""

  def __init__(
    self,
    faults: Sequence[Fault],
    *,
    kill: Callable[[], None],
    wait: Callable[[float], None],
    record: Callable[[Fault], None] = lambda fault: None,
  ):
    """Takes the faults and the functions by which they act.

    Args:
      faults: the faults of the run.
      kill: ends this worker, and does not return.
      wait: blocks for some seconds.
      record: called with each fault before it happens.
    """
    # (worker, seq, kind) -> fault that has not happened yet.
    self._pending_faults = {fault[:3]: fault for fault in faults}
    self._kill, self._wait, self._record = kill, wait, record
    # Worker -> a frame that the worker sends after its next one.
    self._delayed_frames: dict[int, Frame] = {}
    self._lock = threading.Lock()  # with overlap, a worker has two threads
    self.injected: list[Fault] = []

  def _take(self, worker: int, seq: int, kind: str) -> Fault | None:
    """Returns and records a fault that has not happened yet; None without one.
    """
    with self._lock:
      fault = self._pending_faults.pop((worker, seq, kind), None)
      if fault:
        self.injected.append(fault)
        # Before it happens: a killed process can write nothing.
        self._record(fault)
    return fault

  def apply_to_job(self, worker: int, seq: int) -> None:
    """Kills, hangs or slows down the worker before a job, if a fault asks for
    it."""
    if self._take(worker, seq, "kill"):
      self._kill()
    if self._take(worker, seq, "hang"):
      while True:
        self._wait(3600.0)
    if slow_fault := self._take(worker, seq, "slow"):
      self._wait(slow_fault.seconds)

  def apply_to_message(self, worker: int, seq: int, message: Any) -> Any:
    """Returns the message; with a "nan" fault its real numbers are NaN."""
    if not self._take(worker, seq, "nan"):
      return message

    def with_nan(x: Any) -> Any:
      is_integer = x.dtype.kind in "iub"  # as in codes
      return x if is_integer else np.full(x.shape, np.nan, x.dtype)

    return jax.tree.map(with_nan, message)

  def apply_to_frame(self, worker: int, frame: Frame) -> list[Frame]:
    """Returns the frames to send now. A fault drops the frame, doubles it, or
    delays it until after the next one."""
    if self._take(worker, frame.seq, "lose"):
      return []
    if self._take(worker, frame.seq, "double"):
      return [frame, frame]
    if self._take(worker, frame.seq, "reorder"):
      self._delayed_frames[worker] = frame
      return []
    delayed_frame = self._delayed_frames.pop(worker, None)
    return [frame, delayed_frame] if delayed_frame else [frame]


def script_of(faults: Sequence[Fault], run: Path, inside: Any) -> Script:
  """Returns the script of a worker in a host with this `inside`. The script
  writes each fault to the folder of the run before the fault happens."""
  record = functools.partial(append_fault, run)
  return Script(faults, kill=inside.kill, wait=inside.wait, record=record)
