"""Kills and stops the processes of a live run of another command.

`asgd chaos` says what is done, and when.
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
_LOOK = 0.05  # seconds between two looks at the run
_ENDING = 20.0  # seconds for processes to end


class Hung(Exception):
  """Nothing happens any more."""


def _leave(*_):
  raise SystemExit(128 + signal.SIGTERM)


def say(text: str) -> None:
  """Prints a line on stderr."""
  print(f"chaos: {text}", file=sys.stderr, flush=True)


def alive(running: Iterable[tuple[int, str]]) -> list[int]:
  """Returns the processes of (number, when it was started) that run still, once
  all have ended or after some time."""
  end = time.monotonic() + _ENDING
  while True:
    there = []
    for number, began in running:
      with contextlib.suppress(OSError):
        state, started = processes.stat(number)
        if started == began and state not in "ZX":
          there.append(number)
    if not there or time.monotonic() > end:
      return sorted(there)
    time.sleep(_LOOK)


class Victim:
  """A run of `asgd train`, and what is done to it."""

  def __init__(
    self, out: Path, command: list[str], protocols: Mapping[str, Protocol]
  ):
    """Starts it, with the folder of its results, the command, and the protocol
    of each cell, by its name."""
    self._out, self._command, self._protocols = out, command, protocols
    self.failures: list[audit.Failure] = []
    self.memories: set[Path] = set()
    self.processes: set[tuple[int, str]] = set()  # (number, when started)
    self._journal = 0, 0  # how many there are, bytes
    self._moved = time.monotonic()
    self._run: tuple[int, str] | None = None  # driver, cell
    self._rows, self._works = 0, False  # before it; a message has come since
    # So that `end` is called, or the run would go on without this process.
    signal.signal(signal.SIGTERM, _leave)
    self._start()

  def _start(self):
    # In a session of its own, or Ctrl-C would interrupt it, too, and not once.
    self.process = subprocess.Popen(self._command, start_new_session=True)

  def _cell(self) -> tuple[str, Path] | None:
    """Returns name and memory of the cell that is run now."""
    for path in sorted(self._out.glob(f"cells/*/{live_memory.RUNNING}")):
      owner = live_memory.read(path.parent)
      if owner and owner.driver == self.process.pid:
        self.memories.add(owner.memory)
        return path.parent.name, owner.memory
    return None

  def _pids(self, memory) -> dict[str, dict[int, int]]:
    """Returns its processes, and remembers them."""
    pids = processes.pids(memory)
    for pid in [pid for each in pids.values() for pid in each.values()]:
      with contextlib.suppress(OSError):
        self.processes.add((pid, processes.stat(pid)[1]))
    return pids

  def _events(self, cell: str) -> list[Event]:
    return self._protocols[cell].live.rows(self._out / "cells" / cell)

  def working(self) -> bool:
    """Whether messages have come since this driver began with this cell."""
    current = self._cell()
    if current is None:
      return False
    run = self.process.pid, current[0]
    if run == self._run and self._works:
      return True
    events = self._events(current[0])
    if run != self._run:
      self._run, self._rows = run, len(events)
    new = events[self._rows :]
    self._works = any(event.action == base.RECEIVE for event in new)
    return self._works

  def check(self, patience: float) -> None:
    """Raises Hung if nothing has happened for so many seconds."""
    journals = list(self._out.glob("cells/*/trace-*.csv"))
    seen = len(journals), sum(path.stat().st_size for path in journals)
    if seen != self._journal:
      self._journal, self._moved = seen, time.monotonic()
    if time.monotonic() - self._moved > patience:
      cell = self._cell()
      if cell is None:
        waited = f"for asgd train to begin a cell in {self._out}"
      elif not self.working():
        waited = f"for the first job that workers of {cell[0]} hand in"
      else:
        waited = f"for the next row in a trace of {cell[0]}"
      raise Hung(
        f"nothing has happened for {patience:g} s: it waited {waited}. If the"
        " machine is busy, Ray and compilers take long to start: give them more"
        " with --patience; else the run has hung"
      )

  def fail(self, kind: str, rng: random.Random) -> bool:
    """Does something; False if no such process is running now."""
    current = self._cell()
    if current is None:
      return False
    cell, memory = current
    before = self._events(cell)
    if not before:
      return False
    pids = self._pids(memory)
    if kind == "driver":
      self._kill_driver(cell, before, pids)
      return True
    parties = self._protocols[cell].live.parties
    victims = parties["shard" if kind == "shard" else "worker"]
    if victims == "worker" and "peer" in pids:
      victims = "peer"
    running = {
      index: pid
      for index, pid in pids[victims].items()
      if processes.stat(pid)[0] not in "Tt"
    }
    if not running:
      return False
    index = rng.choice(sorted(running))
    os.kill(running[index], _SIGNALS.get(kind, signal.SIGKILL))
    say(f"{kind}: {victims} {index} of {cell}")
    after, dead, coming = self._events(cell), (), None
    if kind != "shard":
      ledger = follow(before)
      if index not in ledger.present:  # it was on its way; has it come?
        ledger = follow(after)
      holder = ledger.holders.get(index, -1)
      if index in ledger.present:
        dead = ((index, holder),)
      else:
        coming = index, holder + 1
    rows = len(before), len(after)
    self.failures.append(audit.Failure(kind, cell, index, dead, *rows, coming))
    return True

  def _kill_driver(self, cell, before, pids):
    self.process.kill()
    self.process.wait()
    say(f"driver: that of {cell}")
    self._start()
    # Its processes work on until they notice.
    old = {p for k in pids.values() for p in k.values()}
    alive([process for process in self.processes if process[0] in old])
    after = self._events(cell)
    dead = tuple(sorted(follow(after).holders.items()))
    rows = len(before), len(after)
    self.failures.append(audit.Failure("driver", cell, 0, dead, *rows))

  def end(self) -> None:
    """Ends whatever runs."""
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGINT)
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(60.0)
      self.process.kill()
      self.process.wait()
      for memory in self.memories:
        processes.end_all(memory)


def inject(
  victim: Victim,
  kinds: Sequence[str],
  rng: random.Random,
  *,
  mtbf: float,
  seconds: float,
  patience: float,
) -> None:
  """Lets things fail for so many seconds of work, and waits for the end."""
  rate = 1 / mtbf
  worked, due = 0.0, rng.expovariate(rate)  # seconds of its work
  waiting: list[str] = []  # kinds that are to come before any comes again
  last = time.monotonic()
  while victim.process.poll() is None:
    time.sleep(_LOOK)
    victim.check(patience)
    now = time.monotonic()
    if victim.working():
      worked += now - last
    last = now
    if not due <= worked < seconds:
      continue
    waiting = waiting or rng.sample(kinds, len(kinds))
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
      waiting.insert(0, waiting.pop())  # if no such process runs, others first
      if victim.fail(waiting[0], rng):
        waiting.pop(0)
        due = worked + rng.expovariate(rate)
        last = time.monotonic()  # what that took does not count
  if victim.process.returncode == 0 and worked < seconds:
    say(
      f"the run ended after {worked:.0f} of {seconds:g} seconds; try more"
      " --config.epochs"
    )
