"""Kills the processes of a live run at random, and audits what comes of it.

  python -m launch.chaos --config=configs/simulate_digits.py --mtbf=5 \\
    --seconds=60 --kinds=worker,shard,hang,driver,term --seed=0 \\
    --config.workers=4 --config.only=dana_zero --config.seeds=0 \\
    --config.epochs=200

Runs `launch.serve` with the flags and the config that it is given (the runtime
is Ray unless --runtime says another), and from the first message on, for so
many seconds, does one of these things after another to a process of it, at
exponential times with a mean of --mtbf seconds, each kind once before any comes
again. The seconds are those in which messages come: while a driver is started
again nothing is done, and no time is counted.

  worker   SIGKILL to a worker
  shard    SIGKILL to a server shard
  hang     SIGSTOP to a worker: it says nothing more, and nobody is told
  term     SIGTERM to a worker, as a preemption notice
  driver   SIGKILL to the driver, which is started again with --resume

Then the run ends in peace, and each of its cells is audited (`launch.audit`):
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

from absl import flags

from asgd import base, names
from asgd.runtimes import files, protocol
from launch import audit, cli, live_run, running, serve, session

KINDS = ("worker", "shard", "hang", "driver", "term")
_SIGNALS = {
  "worker": signal.SIGKILL,
  "shard": signal.SIGKILL,
  "hang": signal.SIGSTOP,
  "term": signal.SIGTERM,
}
_LOOK = 0.05  # seconds between two looks at the run

for _module in (session, serve):  # --help lists theirs, too
  flags.adopt_module_key_flags(_module)
_MTBF = flags.DEFINE_float("mtbf", 5.0, "Mean seconds between two failures.")
_SECONDS = flags.DEFINE_float(
  "seconds", 60.0, "How long failures are injected, while messages come."
)
_KINDS = flags.DEFINE_list("kinds", list(KINDS), "What is done to whom.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the failures' times and victims.")
_PATIENCE = flags.DEFINE_float(
  "patience", 180.0, "Seconds without an event after which the run has hung."
)


class _Hung(Exception):
  """The run stands still."""


def _say(text):
  print(f"chaos: {text}", file=sys.stderr, flush=True)


def _holders(entries) -> tuple[dict[int, int], set[int]]:
  """Returns (worker -> number of its latest holder, workers that are there)."""
  held, there = {}, set()
  for entry in entries:
    if entry.action == base.JOIN:
      held[entry.worker] = entry.job
      there.add(entry.worker)
    elif entry.action == base.LEAVE:
      there.discard(entry.worker)
  return held, there


def _state(process) -> str:
  """How a process of (number, when it was started) is, in the kernel's words;
  "X" if it has ended."""
  try:
    state, started = files.process(process[0])
  except OSError:
    return "X"
  return state if started == process[1] else "X"


def _wait_for(condition, seconds) -> bool:
  end = time.monotonic() + seconds
  while not (found := condition()) and time.monotonic() < end:
    time.sleep(_LOOK)
  return found


class Victim:
  """A run of `launch.serve`, and what is done to it."""

  def __init__(self, out: Path, arguments: list[str], *, resume: bool):
    """Starts it.

    Args:
      out: folder of its results.
      arguments: of `launch.serve`.
      resume: whether there is something to go on with.
    """
    self._out, self._arguments = out, arguments
    self.failures: list[audit.Failure] = []
    self._memories: set[Path] = set()
    self._processes: set[tuple[int, str]] = set()  # (number, when started)
    self._journal: tuple[int, int] = (0, 0)  # how many, bytes
    self._moved = time.monotonic()
    self._run: tuple[int, str] | None = None  # driver, cell
    self._rows, self._works = 0, False  # before it; a message has come since
    self._start(resume)

  def _start(self, resume):
    command = [sys.executable, "-m", "launch.serve", *self._arguments]
    # In a session of its own, or Ctrl-C would interrupt it, too, and not once.
    self.process = subprocess.Popen(
      [*command, "--resume"] if resume else command, start_new_session=True
    )

  def _cell(self) -> tuple[str, Path] | None:
    """Returns the name and the memory of the cell that is run now."""
    for path in sorted(self._out.glob(f"cells/*/{running.RUNNING}")):
      held = running.read(path.parent)
      if held and held.driver == self.process.pid:
        self._memories.add(held.memory)
        return path.parent.name, held.memory
    return None

  def _pids(self, memory) -> dict[str, dict[int, int]]:
    """Returns its processes, and remembers them."""
    found = files.pids(memory)
    for pid in (*found["worker"].values(), *found["shard"].values()):
      with contextlib.suppress(OSError):
        self._processes.add((pid, files.process(pid)[1]))
    return found

  def _path(self, cell: str) -> Path:
    """The lead's journal."""
    return files.journal_path(self._out / "cells" / cell, 0)

  def _entries(self, cell: str) -> list[protocol.Entry]:
    path = self._path(cell)
    return files.read_journal(path) if path.exists() else []

  def working(self) -> bool:
    """Whether messages have come since this driver began with this cell."""
    found = self._cell()
    if found is None:
      return False
    run = self.process.pid, found[0]
    if run == self._run and self._works:
      return True
    entries = self._entries(found[0])
    if run != self._run:
      self._run, self._rows = run, len(entries)
    new = entries[self._rows :]
    self._works = any(entry.action == base.RECEIVE for entry in new)
    return self._works

  def check(self) -> None:
    """Raises _Hung if nothing has happened for long."""
    journals = list(self._out.glob("cells/*/trace-*.csv"))
    seen = len(journals), sum(path.stat().st_size for path in journals)
    if seen != self._journal:
      self._journal, self._moved = seen, time.monotonic()
    if time.monotonic() - self._moved > _PATIENCE.value:
      raise _Hung

  def fail(self, kind: str, rng: random.Random) -> bool:
    """Does something; False if there is nobody to do it to now."""
    found = self._cell()
    if found is None:
      return False
    cell, memory = found
    before = self._entries(cell)
    if not before:
      return False
    pids = self._pids(memory)
    if kind == "driver":
      self._kill_driver(cell, before, pids)
      return True
    there = {
      index: pid
      for index, pid in pids["shard" if kind == "shard" else "worker"].items()
      if files.process(pid)[0] not in "Tt"
    }
    if not there:
      return False
    index = rng.choice(sorted(there))
    os.kill(there[index], _SIGNALS[kind])
    whom = "shard" if kind == "shard" else "worker"
    _say(f"{kind}: {whom} {index} of {cell}")
    after = self._entries(cell)
    dead, coming = (), None
    if kind != "shard":
      held, present = _holders(before)
      if index not in present:  # it was on its way; has it come?
        held, present = _holders(after)
      if index in present:
        dead = ((index, held[index]),)
      else:
        coming = index, held.get(index, -1) + 1
    self.failures.append(
      audit.Failure(kind, cell, index, dead, len(before), len(after), coming)
    )
    return True

  def _kill_driver(self, cell, before, pids):
    self.process.kill()
    self.process.wait()
    _say(f"driver: that of {cell}")
    self._start(True)
    # Its processes work on until they notice.
    old = {p for k in pids.values() for p in k.values()}
    old = {process for process in self._processes if process[0] in old}
    _wait_for(lambda: all(_state(p) in "ZX" for p in old), 20.0)
    after = self._entries(cell)
    dead = tuple(sorted(_holders(after)[0].items()))
    self.failures.append(
      audit.Failure("driver", cell, 0, dead, len(before), len(after))
    )

  def left(self) -> tuple[list[Path], list[int]]:
    """Returns (memory, processes) that are left when it has ended."""
    gone = lambda: all(_state(p) in "ZX" for p in self._processes)  # noqa: E731
    _wait_for(gone, 20.0)  # Ray takes its time
    return (
      sorted(path for path in self._memories if path.exists()),
      sorted(p[0] for p in self._processes if _state(p) not in "ZX"),
    )

  def end(self) -> None:
    """Ends whatever runs."""
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGINT)
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(60.0)
      self.process.kill()
      self.process.wait()
      for memory in self._memories:
        files.end_all(memory)


def _inject(victim: Victim, kinds: Sequence[str], rng: random.Random) -> None:
  """Lets things fail for the time that the flags say, and waits for the end."""
  worked, due = 0.0, rng.expovariate(1 / _MTBF.value)  # seconds of its work
  waiting: list[str] = []  # kinds whose turn is to come
  last = time.monotonic()
  while victim.process.poll() is None:
    time.sleep(_LOOK)
    victim.check()
    now = time.monotonic()
    if victim.working():
      worked += now - last
    last = now
    if not due <= worked < _SECONDS.value:
      continue
    waiting = waiting or rng.sample(kinds, len(kinds))
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
      if victim.fail(waiting[-1], rng):
        waiting.pop()
        due = worked + rng.expovariate(1 / _MTBF.value)
        last = time.monotonic()  # what that took does not count
  if victim.process.returncode == 0 and worked < _SECONDS.value:
    _say(
      f"the run ended after {worked:.0f} of {_SECONDS.value:g} seconds; try"
      " more --config.epochs"
    )


def _free_folder(name: str) -> Path:
  number = 1
  while (folder := Path("runs") / f"{name}-{number:03d}").exists():
    number += 1
  return folder


def _arguments(out: Path) -> list[str]:
  """The flags of `launch.serve` among those that were given."""
  given = [f"--config={flags.FLAGS['config'].config_filename}"]
  given += [f"--config.{key}={value}" for key, value in cli.overrides()]
  mine = flags.FLAGS.flags_by_module_dict()
  for flag in (*mine[serve.__name__], *mine[session.__name__]):
    if flag.name in ("config", "out", "resume"):
      continue
    if flag.present or flag.name == "runtime":
      given += flag.serialize().splitlines()
  return [*given, f"--out={out}"]


def _check_flags() -> None:
  """Raises ValueError for what cannot be, before anything is started."""
  for flag in (_MTBF, _SECONDS, _PATIENCE):
    if not 0 < flag.value < math.inf:
      raise ValueError(
        f"--{flag.name}={flag.value:g} must be positive and finite; it is a"
        " time in seconds"
      )
  if flags.FLAGS["fault"].value:
    raise ValueError(
      f"--fault={flags.FLAGS['fault'].value[0]}: the audit knows of what chaos"
      " does alone; drop it, or give it to launch.serve"
    )


def _check_kinds(runtime: str) -> list[str]:
  kinds = _KINDS.value
  if not any(kinds):
    raise ValueError(f"--kinds is empty; choose of {','.join(KINDS)}")
  for kind in kinds:
    if not kind:
      raise ValueError(
        f"--kinds={','.join(kinds)} has a comma too many, or a kind too few;"
        f" choose of {','.join(KINDS)}"
      )
    if kind not in KINDS:
      raise ValueError(f"--kinds={kind}: {names.nearest(kind, KINDS)}")
  if runtime != "ray" and set(kinds) != {"driver"}:
    raise ValueError(
      f"--runtime={runtime} has one process, the driver: use --kinds=driver, or"
      " --runtime=ray"
    )
  return kinds


def summary(kinds: Sequence[str], failures: Sequence[audit.Failure]) -> str:
  """Says what was done, and what was to be and was not."""
  count = collections.Counter(failure.kind for failure in failures)
  done = ", ".join(f"{count[kind]} {kind}" for kind in KINDS if count[kind])
  text = f"injected: {done or 'nothing'}"
  never = [kind for kind in KINDS if kind in kinds and not count[kind]]
  if never:
    text += f"\nnever tried: {', '.join(never)}; give it more --seconds, more"
    text += " --config.epochs or a smaller --mtbf"
  return text


def _report(exp, out, victim, kinds) -> bool:
  """Prints what was done and what came of it; whether all is well."""
  print(f"\n{summary(kinds, victim.failures)}\n")
  rows, fine = [], True
  for cell in exp.cells:
    failures = [f for f in victim.failures if f.cell == cell.name]
    place = out / "cells" / cell.name
    for finding in audit.findings(
      exp, cell, place, failures, data_dir=session.DATA_DIR.value
    ):
      how = "ok" if finding.well else "FAILED"
      rows.append([cell.name, finding.what, how, finding.found])
      fine &= finding.well
  memory, processes = victim.left()
  left = [f"memory {path}" for path in memory]
  left += [f"process {pid}" for pid in processes]
  rows.append(["", "left", "FAILED" if left else "ok", ", ".join(left) or "-"])
  print(_table(["cell", "check", "", "found"], rows))
  return fine and not left


def _table(header, rows):
  widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
  lines = [
    "  ".join(map(str.ljust, row, widths)).rstrip() for row in [header, *rows]
  ]
  lines.insert(1, "-" * max(map(len, lines)))
  return "\n".join(lines)


def main() -> None:
  """Runs, disturbs, audits."""
  _check_flags()
  exp = session.build("configs/simulate_digits.py")
  for cell in exp.cells:
    live_run.check(exp, cell)
  kinds = _check_kinds(flags.FLAGS.runtime)
  if session.OUT.value is None:
    name = Path(flags.FLAGS["config"].config_filename.split(":")[0]).stem
    out = _free_folder(f"{name}-chaos")
  else:
    out = Path(session.OUT.value)
  victim = Victim(out, _arguments(out), resume=session.RESUME.value)
  try:
    _inject(victim, kinds, random.Random(_SEED.value))
  except _Hung:
    raise cli.Failed(
      f"chaos: nothing has happened for {_PATIENCE.value:g} s; the run in"
      f" {out} has hung"
    ) from None
  finally:
    victim.end()
  if victim.process.returncode:
    raise cli.Failed(
      f"chaos: launch.serve ended with status {victim.process.returncode}"
    )
  if not _report(exp, out, victim, kinds):
    raise cli.Failed("chaos: the audit failed")
  if not victim.failures:
    raise cli.Failed("chaos: nothing was injected, so nothing was tried")
  print("\nthe audit found nothing wrong")


if __name__ == "__main__":
  flags.FLAGS.set_default("runtime", "ray")
  cli.run(main)
