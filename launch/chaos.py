"""Kills the processes of a live run at random, and audits what comes of it.

  python -m launch.chaos --config=configs/simulate_digits.py --mtbf=5 \\
    --seconds=60 --kinds=worker,shard,hang,driver,term --seed=0 \\
    --config.workers=4 --config.only=dana_zero --config.seeds=0 \\
    --config.epochs=200

Runs `launch.serve` with the flags and the config that it is given (the runtime
is Ray unless --runtime says another), and from the first message on, for so
many seconds, does one of these things after another to a process of it, at
exponential times with a mean of --mtbf seconds:

  worker   SIGKILL to a worker
  shard    SIGKILL to a server shard
  hang     SIGSTOP to a worker: it says nothing more, and nobody is told
  term     SIGTERM to a worker, as a preemption notice
  driver   SIGKILL to the driver, which is started again with --resume

Then the run ends in peace, and each of its cells is audited:

  jobs      each was received once, at the lead and at every shard
  updates   each acknowledged message is an update and a row of the records;
            without a log (--config.server.log=0), how many were rolled back
  deaths    who was killed is gone in the trace and did no more work, and who is
            gone in the trace was killed, or took too long
  order     the trace is one that the protocol allows
  replay    the trace leads to the same records and parameters, to the bit
  left      no process and no shared memory is left behind

The exit status is 1 if anything fails, or if the run stands still for
--patience seconds.
"""

import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags

from asgd import base, names, orders
from asgd.runtimes import files, protocol, shard
from launch import cli, experiment, outputs, replay, serve, session

KINDS = ("worker", "shard", "hang", "driver", "term")
_SIGNALS = {
  "worker": signal.SIGKILL,
  "shard": signal.SIGKILL,
  "hang": signal.SIGSTOP,
  "term": signal.SIGTERM,
}
_LOOK = 0.05  # seconds between two looks at the run

_MTBF = flags.DEFINE_float(
  "mtbf", 5.0, "Mean seconds between two failures.", lower_bound=0.01
)
_SECONDS = flags.DEFINE_float(
  "seconds", 60.0, "How long failures are injected.", lower_bound=0.0
)
_KINDS = flags.DEFINE_list("kinds", list(KINDS), "What is done to whom.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the failures' times and victims.")
_PATIENCE = flags.DEFINE_float(
  "patience", 180.0, "Seconds without an event after which the run has hung."
)


class Failure(NamedTuple):
  """One thing that was done to a process."""

  kind: str
  cell: str
  index: int  # worker or shard
  holders: tuple[tuple[int, int], ...]  # (worker, holder) who died by it
  before: int  # rows of the lead's journal before it was done
  after: int  # and when it had taken effect


class _Hung(Exception):
  """The run stands still."""


def _say(text):
  print(f"chaos: {text}", file=sys.stderr, flush=True)


def _holders(entries) -> dict[int, int]:
  """Returns worker -> number of its latest holder."""
  return {e.worker: e.job for e in entries if e.action == base.JOIN}


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
    self.failures: list[Failure] = []
    self._memories: set[Path] = set()
    self._processes: set[tuple[int, str]] = set()  # (number, when started)
    self._journal: tuple[int, int] = (0, 0)  # how many, bytes
    self._moved = time.monotonic()
    self._start(resume)

  def _start(self, resume):
    command = [sys.executable, "-m", "launch.serve", *self._arguments]
    self.process = subprocess.Popen(
      [*command, "--resume"] if resume else command
    )

  def _cell(self) -> tuple[str, Path] | None:
    """Returns the name and the memory of the cell that is run now."""
    for path in sorted(self._out.glob(f"cells/*/{serve.RUNNING}")):
      held = outputs.read_json(path)
      if held and held["driver"] == self.process.pid:
        memory = Path(held["memory"])
        self._memories.add(memory)
        return path.parent.name, memory
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
    """Whether messages have come."""
    found = self._cell()
    return found is not None and any(
      entry.action == base.RECEIVE for entry in self._entries(found[0])
    )

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
    before = len(self._entries(cell))
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
    holders = [] if kind == "shard" else [index]
    self._note(kind, cell, index, holders, before)
    return True

  def _kill_driver(self, cell, before, pids):
    self.process.kill()
    self.process.wait()
    self._start(True)
    # Its processes work on until they notice.
    old = {p for k in pids.values() for p in k.values()}
    old = {process for process in self._processes if process[0] in old}
    _wait_for(lambda: all(_state(p) in "ZX" for p in old), 20.0)
    holders = {entry.worker for entry in self._entries(cell)}
    self._note("driver", cell, 0, sorted(holders), before)

  def _note(self, kind, cell, index, workers, before):
    entries = self._entries(cell)
    held = _holders(entries)
    dead = tuple((w, held[w]) for w in workers if w in held)
    failure = Failure(kind, cell, index, dead, before, len(entries))
    self.failures.append(failure)
    whom = "driver" if kind == "driver" else f"worker {index}"
    whom = f"shard {index}" if kind == "shard" else whom
    _say(f"{kind}: {whom} of {cell}, at row {failure.after}")

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


def _inject(victim: Victim, kinds: list[str], rng: random.Random) -> None:
  """Lets things fail for the time that the flags say, and waits for the end."""
  end = due = kind = None
  while victim.process.poll() is None:
    time.sleep(_LOOK)
    victim.check()
    now = time.monotonic()
    if end is None:
      if victim.working():
        end = now + _SECONDS.value
        due = now + rng.expovariate(1 / _MTBF.value)
    elif due <= now < end:
      kind = kind or rng.choice(kinds)
      with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        if victim.fail(kind, rng):
          due, kind = now + rng.expovariate(1 / _MTBF.value), None
  if end is None or time.monotonic() < end:
    _say("the run ended before the time was over; try more --config.epochs")


# The audit.

Finding = tuple[str, str, bool]  # what, what was found, whether that is well


def _jobs(journals, jobs, consistent) -> Iterator[Finding]:
  """Each job once at the lead, and what the other shards make of it."""
  lost = sum(entry.action == base.LOST for entry in journals[0])
  lead = [e.event[1:] for e in journals[0] if e.action != base.ROLLBACK]
  for index, entries in enumerate(journals):
    counts = collections.Counter(
      entry.job for entry in entries if entry.action == base.RECEIVE
    )
    missing = sum(job not in counts for job in range(jobs))
    doubled = sum(counts.values()) - len(counts)
    strange = sum(not 0 <= job < jobs for job in counts)
    found = f"{len(counts)} of {jobs} received, {doubled} twice"
    well = missing == doubled == strange == 0
    name = "jobs" if len(journals) == 1 else f"jobs of shard {index}"
    if index and consistent:
      same = lead == [e.event[1:] for e in entries if e.action != base.ROLLBACK]
      found += ", in the order of shard 0" if same else ", NOT as shard 0"
      well = well and same
    elif index:
      # A worker that dies between its parts of a message leaves one half.
      here = sum(entry.action == base.LOST for entry in entries)
      found += f" (shard 0 lost {lost} tickets, this one {here})"
      well = not strange and doubled <= lost and missing <= here
    yield name, found, well


def rolled_back(entries: list) -> tuple[int, int]:
  """Returns how many ROLLBACK rows there are, and how many updates they undid.

  Args:
    entries: of a journal.
  """
  alive, count, undone = [], 0, 0  # rows of messages that are in the state
  for row, entry in enumerate(entries):
    if entry.action == base.RECEIVE:
      alive.append(row)
    elif entry.action == base.ROLLBACK:
      kept = [r for r in alive if r < entry.job]
      undone += len(alive) - len(kept)
      alive, count = kept, count + 1
  return count, undone


def _updates(folder, journals, result, every, log) -> Iterator[Finding]:
  """What was acknowledged is in the parameters and in the records."""
  for index, entries in enumerate(journals):
    name = "updates" if len(journals) == 1 else f"updates of shard {index}"
    received = sum(entry.action == base.RECEIVE for entry in entries)
    records = files.read_records(files.records_path(folder, index))
    rollbacks, undone = rolled_back(entries)
    found = f"{received} received, {len(records.loss)} records"
    well = len(records.loss) == received
    if rollbacks:
      found += f", {rollbacks} rollbacks that undid {undone} updates"
      # What a shard saw since it last looked up dies with it.
      well = not log and received - undone <= len(records.loss) <= received
    else:
      updates = int(records.update[-1]) if len(records.loss) else 0
      accepted = int(records.accepted.sum())
      found += f", {updates} updates"
      well = well and updates == accepted // every
      if index == 0:
        well = well and updates == result["updates"]
    yield name, found, well


def _deaths(entries, failures, depth, slow) -> Iterator[Finding]:
  """Who was killed is gone, and who is gone was killed or took too long."""
  killed: dict[tuple[int, int], Failure] = {}
  for failure in failures:
    for key in failure.holders:
      killed.setdefault(key, failure)
  holder: dict[int, int] = {}  # worker -> number
  opened: dict[tuple[int, int], float] = {}
  late: set[int] = set()  # workers whose last ticket was given up
  left: set[tuple[int, int]] = set()
  done_dead: collections.Counter[tuple[int, int]] = collections.Counter()
  how: collections.Counter[str] = collections.Counter()
  # Who has no more to do may go.
  last = max(
    (r for r, e in enumerate(entries) if e.action == base.RECEIVE), default=0
  )
  for row, entry in enumerate(entries[: last + 1]):
    when, worker, job, action = entry.event
    key = worker, holder.get(worker, -1)
    failure = killed.get(key)
    if action == base.JOIN:
      holder[worker] = job
      late.discard(worker)
    elif action in (base.SEND, base.KEEP):
      opened[worker, job] = when
    elif action == base.RECEIVE:
      opened.pop((worker, job))
      if failure and row >= failure.after:
        done_dead[key] += 1
    elif action in (base.LOST, base.REJECT):
      if when - opened.pop((worker, job)) >= slow:
        late.add(worker)
    elif action == base.LEAVE:
      left.add(key)
      if failure and row >= failure.before:
        how[failure.kind] += 1
      else:
        how["took too long" if worker in late else "NOT EXPLAINED"] += 1
  # What was on its way when a worker was killed still comes in.
  ghosts = [key for key, count in done_dead.items() if count > depth + 1]
  deaths = ", ".join(f"{count} {name}" for name, count in sorted(how.items()))
  found = f"{len(left)} left ({deaths or 'nobody'})"
  for worker, number in ghosts:
    failure = killed[worker, number]
    found += f"; worker {worker} worked on after {failure.kind} at"
    found += f" row {failure.after}"
  yield "deaths", found, not ghosts and not how["NOT EXPLAINED"]


def _same(a: base.Records, b: base.Records) -> bool:
  return all(
    np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
    for x, y in zip(a, b, strict=True)
  )


def _replay(folder, result, rollbacks) -> Iterator[Finding]:
  """The trace leads to the same."""
  replayed = replay.run(folder, data_dir=session.DATA_DIR.value)
  same = replayed.digest == result["params_sha256"]
  yield (
    "replay",
    f"parameters {replayed.digest[:12]}, live {result['params_sha256'][:12]}",
    same,
  )
  if not rollbacks:
    live = files.read_records(files.records_path(folder, 0))
    well = _same(live, replayed.records)
    yield "records", "the same" if well else "NOT those of the replay", well
  yield (
    "accuracy",
    f"{100 * replayed.accuracy:.2f} %, live"
    f" {100 * result['test_accuracy']:.2f} %",
    not same or replayed.accuracy == result["test_accuracy"],
  )


def audit(
  exp: experiment.Experiment,
  cell: experiment.Cell,
  folder: Path,
  failures: list[Failure],
) -> Iterator[Finding]:
  """Yields what there is to say of a finished cell.

  Args:
    exp: the experiment.
    cell: which one.
    folder: of the cell.
    failures: what was done to it.
  """
  result = outputs.read_json(folder / "result.json")
  if result is None:
    yield "result", f"{folder} has no result.json", False
    return
  try:
    _, journals = replay.load(folder)
  except ValueError as error:
    yield "journals", str(error), False
    return
  server, rules = exp.config["server"], experiment.rules(exp, cell)
  recipe = experiment.recipe(exp, cell)
  consistent = server["consistent"] and server["shards"] > 1
  yield from _jobs(journals, experiment.messages(exp, cell), consistent)
  yield from _updates(
    folder, journals, result, recipe.every, server["log"]
  )
  # No ladder is shorter, see `asgd.runtimes.deadlines`.
  slow = 3 * exp.config["live"]["late_seconds"]
  yield from _deaths(journals[0], failures, rules.depth, slow)
  wrong = []
  for index, entries in enumerate(journals):
    try:
      # Only the lead decides; others may hold what it has closed.
      depth = len(entries) if index or rules.round else rules.depth
      orders.check(shard.entries_to_trace(entries), depth=depth)
    except ValueError as error:
      wrong.append(f"shard {index}: {error}")
  yield "order", "; ".join(wrong) or "obeys the protocol", not wrong
  try:
    yield from _replay(folder, result, any(map(_rolls_back, journals)))
  except ValueError as error:
    yield "replay", str(error), False


def _rolls_back(entries):
  return any(entry.action == base.ROLLBACK for entry in entries)


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


def _check_kinds(runtime: str) -> list[str]:
  kinds = _KINDS.value
  for kind in kinds:
    if kind not in KINDS:
      raise ValueError(f"--kinds={kind}: {names.nearest(kind, KINDS)}")
  if not kinds:
    raise ValueError(f"--kinds is empty; choose of {','.join(KINDS)}")
  if runtime != "ray" and set(kinds) != {"driver"}:
    raise ValueError(
      f"--runtime={runtime} has one process, the driver: use --kinds=driver, or"
      " --runtime=ray"
    )
  return kinds


def _report(exp, out, victim) -> bool:
  """Prints what was done and what came of it; whether all is well."""
  count = collections.Counter(failure.kind for failure in victim.failures)
  done = ", ".join(f"{count[kind]} {kind}" for kind in KINDS if count[kind])
  print(f"\ninjected: {done or 'nothing'}\n")
  rows, fine = [], True
  for cell in exp.cells:
    failures = [f for f in victim.failures if f.cell == cell.name]
    for what, found, well in audit(
      exp, cell, out / "cells" / cell.name, failures
    ):
      rows.append([cell.name, what, "ok" if well else "FAILED", found])
      fine &= well
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
  exp = session.build("configs/simulate_digits.py")
  for cell in exp.cells:
    experiment.rules(exp, cell)
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
  if not _report(exp, out, victim):
    raise cli.Failed("chaos: the audit failed")
  print("\nthe audit found nothing wrong")


if __name__ == "__main__":
  flags.FLAGS.set_default("runtime", "ray")
  cli.run(main)
