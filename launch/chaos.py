"""Kills the processes of a live run at random, and audits what comes of it.

  python -m launch.chaos --config=configs/digits.py --mtbf=5 \\
    --seconds=60 --kinds=worker,shard,hang,driver,term --seed=0 \\
    --config.workers=4 --config.only=dana_zero --config.seeds=0 \\
    --config.epochs=200

Runs `launch.train` with the flags and the config that it is given (on engine
ray unless --engine says threads), and from the first message on, for so
many seconds, does one of these things after another to a process of it, at
exponential times with a mean of --mtbf seconds, each kind once before any comes
again. The seconds are those in which messages come: while a driver is started
again nothing is done, and no time is counted.

  worker   SIGKILL to a worker
  shard    SIGKILL to a server shard
  hang     SIGSTOP to a worker: it says nothing more, and no process is told
  term     SIGTERM to a worker, as a preemption notice
  driver   SIGKILL to the driver, which is started again with the same command

Then the run ends in peace, and each cell is audited (`asgd.experiment.audit`):
every job received once, every acknowledged message an update and a row of the
records, every death in the trace one of these, the order allowed, the replay
the same to the bit, and no process and no memory left behind.

The exit status is 1 if anything fails, if nothing was done to it, or if the run
stands still for --patience seconds.
"""

import collections
import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from asgd import base, names
from asgd.experiment import audit, build, claim
from asgd.live import processes
from asgd.live.journal import journal_path, read_journal
from asgd.orders.trace import Event, follow
from launch import flags

KINDS = ("worker", "shard", "hang", "driver", "term")
_SIGNALS = {"hang": signal.SIGSTOP, "term": signal.SIGTERM}  # others: SIGKILL
_LOOK = 0.05  # seconds between two looks at the run
_ENDING = 20.0  # seconds for processes to end

_CONFIG = flags.define_config()
_TRAINING = flags.define(
  {**flags.TRAINING, "engine": (flags.LIVE, "ray", "Of all runs.")}
)
_F = flags.define(
  {
    "mtbf": (float, 5.0, "Mean seconds between two failures."),
    "seconds": (float, 60.0, "How long they are made, while messages come."),
    "kinds": (list, list(KINDS), "What is done to which processes."),
    "seed": (int, 0, "Of the failures' times and victims."),
    "patience": (float, 180.0, "Seconds without an event: the run has hung."),
  }
)


def _say(text):
  print(f"chaos: {text}", file=sys.stderr, flush=True)


def _alive(running) -> list[int]:
  """Returns the processes of (number, when it was started) that run still, once
  all have ended or after some time."""
  end = time.monotonic() + _ENDING
  while True:
    alive = []
    for number, began in running:
      with contextlib.suppress(OSError):
        state, started = processes.stat(number)
        if started == began and state not in "ZX":
          alive.append(number)
    if not alive or time.monotonic() > end:
      return sorted(alive)
    time.sleep(_LOOK)


class Victim:
  """A run of `launch.train`, and what is done to it."""

  def __init__(self, out: Path, command: list[str]):
    """Starts it, with the folder of its results and the command."""
    self._out, self._command = out, command
    self.failures: list[audit.Failure] = []
    self.memories: set[Path] = set()
    self.processes: set[tuple[int, str]] = set()  # (number, when started)
    self._journal = 0, 0  # how many there are, bytes
    self._moved = time.monotonic()
    self._run: tuple[int, str] | None = None  # driver, cell
    self._rows, self._works = 0, False  # before it; a message has come since
    self._start()

  def _start(self):
    # In a session of its own, or Ctrl-C would interrupt it, too, and not once.
    self.process = subprocess.Popen(self._command, start_new_session=True)

  def _cell(self) -> tuple[str, Path] | None:
    """Returns name and memory of the cell that is run now."""
    for path in sorted(self._out.glob(f"cells/*/{claim.RUNNING}")):
      owner = claim.read(path.parent)
      if owner and owner.driver == self.process.pid:
        self.memories.add(owner.memory)
        return path.parent.name, owner.memory
    return None

  def _pids(self, memory) -> dict[str, dict[int, int]]:
    """Returns its processes, and remembers them."""
    pids = processes.pids(memory)
    for pid in (*pids["worker"].values(), *pids["shard"].values()):
      with contextlib.suppress(OSError):
        self.processes.add((pid, processes.stat(pid)[1]))
    return pids

  def _events(self, cell: str) -> list[Event]:
    return read_journal(journal_path(self._out / "cells" / cell, 0))

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

  def check(self) -> None:
    """Raises flags.Failed if nothing has happened for long."""
    journals = list(self._out.glob("cells/*/trace-*.csv"))
    seen = len(journals), sum(path.stat().st_size for path in journals)
    if seen != self._journal:
      self._journal, self._moved = seen, time.monotonic()
    if time.monotonic() - self._moved > _F["patience"].value:
      raise flags.Failed(
        f"chaos: nothing has happened for {_F['patience'].value:g} s; the run"
        f" in {self._out} has hung"
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
    victims = "shard" if kind == "shard" else "worker"
    running = {
      index: pid
      for index, pid in pids[victims].items()
      if processes.stat(pid)[0] not in "Tt"
    }
    if not running:
      return False
    index = rng.choice(sorted(running))
    os.kill(running[index], _SIGNALS.get(kind, signal.SIGKILL))
    _say(f"{kind}: {victims} {index} of {cell}")
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
    _say(f"driver: that of {cell}")
    self._start()
    # Its processes work on until they notice.
    old = {p for k in pids.values() for p in k.values()}
    _alive([process for process in self.processes if process[0] in old])
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


def _inject(victim: Victim, kinds: Sequence[str], rng: random.Random) -> None:
  """Lets things fail for the time that the flags say, and waits for the end."""
  rate, seconds = 1 / _F["mtbf"].value, _F["seconds"].value
  worked, due = 0.0, rng.expovariate(rate)  # seconds of its work
  waiting: list[str] = []  # kinds that are to come before any comes again
  last = time.monotonic()
  while victim.process.poll() is None:
    time.sleep(_LOOK)
    victim.check()
    now = time.monotonic()
    if victim.working():
      worked += now - last
    last = now
    if not due <= worked < seconds:
      continue
    waiting = waiting or rng.sample(kinds, len(kinds))
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
      if victim.fail(waiting[-1], rng):
        waiting.pop()
        due = worked + rng.expovariate(rate)
        last = time.monotonic()  # what that took does not count
  if victim.process.returncode == 0 and worked < seconds:
    _say(
      f"the run ended after {worked:.0f} of {seconds:g} seconds; try more"
      " --config.epochs"
    )


def _check_flags() -> None:
  """Raises ValueError for what cannot be, before anything is started."""
  for name in ("mtbf", "seconds", "patience"):
    value = _F[name].value
    if not 0 < value < math.inf:
      raise ValueError(
        f"--{name}={value:g} must be positive and finite; it is a time in"
        " seconds"
      )


def _check_kinds(engine: str) -> list[str]:
  kinds, choose = _F["kinds"].value, f"choose of {','.join(KINDS)}"
  if not any(kinds):
    raise ValueError(f"--kinds is empty; {choose}")
  if not all(kinds):
    raise ValueError(
      f"--kinds={','.join(kinds)} has a comma too many, or a kind too few;"
      f" {choose}"
    )
  for kind in kinds:
    if kind not in KINDS:
      raise ValueError(f"--kinds={kind}: {names.nearest(kind, KINDS)}")
  if engine != "ray" and set(kinds) != {"driver"}:
    raise ValueError(
      f"--engine={engine} has one process, the driver: use --kinds=driver, or"
      " --engine=ray"
    )
  return kinds


def summary(kinds: Sequence[str], failures: Sequence[audit.Failure]) -> str:
  """Says what was done, and what was to be and was not."""
  count = collections.Counter(failure.kind for failure in failures)
  done = ", ".join(f"{count[kind]} {kind}" for kind in KINDS if count[kind])
  text = f"injected: {done or 'nothing'}"
  never = [kind for kind in KINDS if kind in kinds and not count[kind]]
  if not never:
    return text
  return (
    f"{text}\nnever tried: {', '.join(never)}; give it more --seconds, more"
    " --config.epochs or a smaller --mtbf"
  )


def _report(exp, out, victim, kinds) -> bool:
  """Prints what was done and what came of it; whether all is well."""
  print(f"\n{summary(kinds, victim.failures)}\n")
  data_dir, fine = _TRAINING["data_dir"].value, True
  for cell in exp.cells:
    plan, place = exp.plan(cell), out / "cells" / cell.name
    failures = [f for f in victim.failures if f.cell == cell.name]
    for finding in audit.findings(plan, place, failures, data_dir=data_dir):
      _print_finding(f"{cell.name}, {finding.what}", finding.text, finding.well)
      fine &= finding.well
  alive = _alive(victim.processes)  # Ray takes its time
  left = [f"memory {path}" for path in sorted(victim.memories) if path.exists()]
  left += [f"process {pid}" for pid in alive]
  _print_finding("left behind", ", ".join(left) or "nothing", not left)
  return fine and not left


def _print_finding(what, text, well):
  print(f"{'ok' if well else 'FAILED':6}  {what}: {text}", flush=True)


def main() -> None:
  """Runs, disturbs, audits."""
  _check_flags()
  engine = _TRAINING["engine"].value
  kinds = _check_kinds(engine)
  exp = build(
    flags.load_config("configs/digits.py", engine),
    engines=flags.ENGINES,
    data_dir=_TRAINING["data_dir"].value,
  )
  out, command = flags.training_command("chaos")
  victim = Victim(out, command)
  try:
    _inject(victim, kinds, random.Random(_F["seed"].value))
  finally:
    victim.end()
  if victim.process.returncode:
    raise flags.Failed(
      f"chaos: launch.train ended with status {victim.process.returncode}"
    )
  if not _report(exp, out, victim, kinds):
    raise flags.Failed("chaos: the audit failed")
  if not victim.failures:
    raise flags.Failed("chaos: nothing was injected, so nothing was tried")
  print("\nthe audit found nothing wrong")


if __name__ == "__main__":
  flags.run(main)
