"""Kills and stops processes of a live run.

This module starts the run as a separate command, `asgd train`. `asgd chaos`
chooses the kinds and the rate of the failures.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from asgd import base
from asgd.experiment import audit, live_memory
from asgd.experiment.protocol import Protocol
from asgd.live import processes
from asgd.orders.trace import Event, follow

KINDS = ("worker", "shard", "hang", "driver", "term")
_SIGNALS = {"hang": signal.SIGSTOP, "term": signal.SIGTERM}  # others: SIGKILL
_POLL_SECONDS = 0.05  # seconds between two looks at the run
_END_SECONDS = 20.0  # to wait for the end of processes


class Hung(Exception):
  """No row was written for `patience` seconds."""


def _exit_on_sigterm(*_: object) -> None:
  """Handles SIGTERM as a normal exit, which runs `finally` blocks."""
  raise SystemExit(128 + signal.SIGTERM)


def log_line(text: str) -> None:
  """Prints a line on stderr."""
  print(f"chaos: {text}", file=sys.stderr, flush=True)


def wait_for_end(live_processes: Iterable[tuple[int, str]]) -> list[int]:
  """Waits until processes have ended, or for _END_SECONDS; returns the ids of
  those that still run. `live_processes` has (process id, start time): an id
  with another start time belongs to another process."""
  deadline = time.monotonic() + _END_SECONDS
  while True:
    pids = []
    for pid, start_time in live_processes:
      with contextlib.suppress(OSError):  # the process has ended
        state, actual_start_time = processes.process_stat(pid)
        # States Z and X: it has ended, and its parent has not read its status.
        if actual_start_time == start_time and state not in "ZX":
          pids.append(pid)
    if not pids or time.monotonic() > deadline:
      return sorted(pids)
    time.sleep(_POLL_SECONDS)


class InjectedRun:
  """A run of `asgd train`, and the failures injected into it."""

  def __init__(
    self, workdir: Path, command: list[str], protocols: Mapping[str, Protocol]
  ):
    """Starts the run.

    Args:
      workdir: the folder of its results.
      command: the command line.
      protocols: cell name -> its protocol.
    """
    self._workdir, self._command, self._protocols = workdir, command, protocols
    # Kept across restarts of the driver, for the audit and for `end`.
    self.failures: list[audit.Failure] = []
    self.memories: set[Path] = set()  # memory folders of cells
    self.processes: set[tuple[int, str]] = set()  # (process id, start time)
    # For `check_progress`: (count of journals, their bytes), and when they last
    # changed.
    self._journal_sizes = 0, 0
    self._last_change = time.monotonic()
    # For `is_working`: (driver's id, cell); the number of the cell's rows at
    # the first call for these two; whether a message was received since.
    self._watched_run: tuple[int, str] | None = None
    self._first_rows, self._has_received = 0, False
    # SIGTERM must reach `end`; otherwise the run would outlive this process.
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    self._start_command()

  def _start_command(self) -> None:
    """Starts the command in a separate session: the terminal's Ctrl-C reaches
    this process only, which then ends the run."""
    self.process = subprocess.Popen(self._command, start_new_session=True)

  def _current_cell(self) -> tuple[str, Path] | None:
    """Returns the name and the memory folder of the cell that runs now, and
    stores the folder."""
    for path in sorted(self._workdir.glob(f"cells/*/{live_memory.RUNNING}")):
      owner = live_memory.read_running(path.parent)
      if owner and owner.driver == self.process.pid:
        self.memories.add(owner.memory)
        return path.parent.name, owner.memory
    return None

  def _pids(self, memory: Path) -> dict[str, dict[int, int]]:
    """Returns kind -> index -> process id of a cell, and stores the ids."""
    pids = processes.live_pids(memory)
    for pid in [pid for by_index in pids.values() for pid in by_index.values()]:
      with contextlib.suppress(OSError):
        self.processes.add((pid, processes.process_stat(pid)[1]))
    return pids

  def _events(self, cell: str) -> list[Event]:
    """Returns the rows of a cell's trace so far."""
    return self._protocols[cell].live.rows(self._workdir / "cells" / cell)

  def is_working(self) -> bool:
    """Whether a message was received since the first call for this driver and
    this cell."""
    current = self._current_cell()
    if current is None:
      return False
    run = self.process.pid, current[0]
    if run == self._watched_run and self._has_received:
      return True  # the common case; it reads no file
    events = self._events(current[0])
    if run != self._watched_run:
      self._watched_run, self._first_rows = run, len(events)
    new_events = events[self._first_rows :]
    self._has_received = any(
      event.action == base.RECEIVE for event in new_events
    )
    return self._has_received

  def check_progress(self, patience: float) -> None:
    """Raises Hung if no journal has changed for `patience` seconds."""
    paths = list(self._workdir.glob("cells/*/trace-*.csv"))
    # A driver that resumes may drop rows, so any change is a sign of life.
    sizes = len(paths), sum(path.stat().st_size for path in paths)
    if sizes != self._journal_sizes:
      self._journal_sizes, self._last_change = sizes, time.monotonic()
    if time.monotonic() - self._last_change > patience:
      cell = self._current_cell()
      if cell is None:
        waited = f"for asgd train to begin a cell in {self._workdir}"
      elif not self.is_working():
        waited = f"for the first message of a worker of {cell[0]}"
      else:
        waited = f"for the next row in a trace of {cell[0]}"
      raise Hung(
        f"nothing has happened for {patience:g} s: asgd chaos waited {waited}."
        " On a busy machine Ray and compilers take long to start: set a longer"
        " --patience. Otherwise the run has hung"
      )

  def inject_failure(self, kind: str, rng: random.Random) -> bool:
    """Injects a failure of a kind. Returns False if no process runs now that
    could have this failure."""
    current = self._current_cell()
    if current is None:
      return False
    cell, memory = current
    events_before = self._events(cell)
    if not events_before:
      return False  # the processes are starting
    # [1] Choose a process that runs and is not stopped.
    pids = self._pids(memory)
    if kind == "driver":
      self._kill_driver(cell, events_before, pids)
      return True
    parties = self._protocols[cell].live.parties
    party = parties["shard" if kind == "shard" else "worker"]
    # Some protocols have peers instead of workers.
    if party == "worker" and "peer" in pids:
      party = "peer"
    running = {
      index: pid
      for index, pid in pids[party].items()
      if processes.process_stat(pid)[0] not in "Tt"
    }
    if not running:
      return False
    # [2] Send the signal.
    index = rng.choice(sorted(running))
    os.kill(running[index], _SIGNALS.get(kind, signal.SIGKILL))
    log_line(f"{kind}: {party} {index} of {cell}")
    # [3] Record the incarnation for which the audit must find a LEAVE row. If
    # the worker has not joined, record its next incarnation, which may join.
    events_after = self._events(cell)
    incarnations: tuple[tuple[int, int], ...] = ()
    possible_incarnation: tuple[int, int] | None = None
    if kind != "shard":  # a shard has no LEAVE rows
      ledger = follow(events_before)
      # A worker that had not joined before the signal may have a JOIN row now.
      if index not in ledger.present:
        ledger = follow(events_after)
      incarnation = ledger.incarnations.get(index, -1)
      if index in ledger.present:
        incarnations = ((index, incarnation),)
      else:
        possible_incarnation = index, incarnation + 1
    row_counts = len(events_before), len(events_after)
    self.failures.append(
      audit.Failure(
        kind, cell, index, incarnations, *row_counts, possible_incarnation
      )
    )
    return True

  def _kill_driver(
    self,
    cell: str,
    events_before: Sequence[Event],
    pids: Mapping[str, Mapping[int, int]],
  ) -> None:
    """Kills the driver, starts its command again, and waits for the end of the
    killed driver's processes, which work until they notice."""
    self.process.kill()
    self.process.wait()
    log_line(f"driver: the driver of {cell}")
    self._start_command()
    # These processes may append rows until they end.
    orphans = {pid for by_index in pids.values() for pid in by_index.values()}
    wait_for_end([p for p in self.processes if p[0] in orphans])
    events_after = self._events(cell)
    # All incarnations end with their driver.
    incarnations = tuple(sorted(follow(events_after).incarnations.items()))
    row_counts = len(events_before), len(events_after)
    self.failures.append(
      audit.Failure("driver", cell, 0, incarnations, *row_counts)
    )

  def end(self) -> None:
    """Ends the run: asks it to stop, then kills its processes."""
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGINT)  # saves, then ends its processes
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(60.0)
      self.process.kill()
      self.process.wait()
      # Processes of a killed driver may be stopped, and end only by a kill.
      for memory in self.memories:
        processes.kill_run(memory)


def inject(
  run: InjectedRun,
  kinds: Sequence[str],
  rng: random.Random,
  *,
  mtbf: float,
  seconds: float,
  patience: float,
) -> None:
  """Injects failures into a run, and waits for its end.

  Args:
    run: the run.
    kinds: the kinds of failures; each comes once before any comes again.
    rng: draws the order of the kinds, and the times.
    mtbf: mean seconds of work between two failures.
    seconds: seconds of work after which no failure is injected.
    patience: seconds without a new row, after which the run has hung.

  Raises:
    Hung: the run has hung.
  """
  rate = 1 / mtbf
  # Both are in seconds of the run's work.
  worked_seconds, next_failure = 0.0, rng.expovariate(rate)
  next_kinds: list[str] = []  # the kinds that must still come once
  last_time = time.monotonic()
  while run.process.poll() is None:
    time.sleep(_POLL_SECONDS)
    run.check_progress(patience)
    # Only time in which the run works counts: neither the start of processes
    # nor the compilation.
    now = time.monotonic()
    if run.is_working():
      worked_seconds += now - last_time
    last_time = now
    if not next_failure <= worked_seconds < seconds:
      continue
    next_kinds = next_kinds or rng.sample(kinds, len(kinds))
    # A process may end between the look at its files and the signal.
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
      # Rotate: a kind without a running process must not block the others.
      next_kinds.insert(0, next_kinds.pop())
      if run.inject_failure(next_kinds[0], rng):
        next_kinds.pop(0)
        next_failure = worked_seconds + rng.expovariate(rate)
        last_time = time.monotonic()  # the time of the injection is no work
  if run.process.returncode == 0 and worked_seconds < seconds:
    log_line(
      f"the run ended after {worked_seconds:.0f} of {seconds:g} seconds; set a"
      " larger --config.epochs"
    )
