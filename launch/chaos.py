"""Kills the processes of a live run at random, and audits what comes of it.

  asgd chaos --config=configs/digits.py --mtbf=5 \\
    --seconds=60 --kinds=worker,shard,hang,driver,term --seed=0 \\
    --config.workers=4 --config.only=dana_zero --config.seeds=0 \\
    --config.epochs=200

Runs `asgd train` with the flags and the config that it is given (on engine
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

  asgd chaos --simulate=1000 --jobs=2

runs small live runs in a simulated world instead, one for each seed, with the
clock, the network, the disk and the order of all steps drawn from it, checks
them in the same way, and prints for a seed that fails the command that repeats
it with as few faults as possible. --protocol=tables, =sandblaster and =gossip
run these instead of the parameter server. Ctrl-C ends with the count so far.

The exit status is 1 if anything fails, if nothing was done to it, or if the run
stands still for --patience seconds.
"""

import collections
import math
import random
import signal
import sys
from collections.abc import Sequence

from asgd import names
from asgd.experiment import audit, build, chaos, protocol
from asgd.live.world import explore

from . import flags

_EVERY = 500  # seeds between two lines of --simulate

_CONFIG = flags.define_config()
_TRAINING = flags.define(
  {**flags.TRAINING, "engine": (flags.LIVE, "ray", "Of all runs.")}
)
_F = flags.define(
  {
    "mtbf": (float, 5.0, "Mean seconds between two failures."),
    "seconds": (float, 60.0, "How long they are made, while messages come."),
    "kinds": (list, list(chaos.KINDS), "What is done to which processes."),
    "seed": (int, 0, "Of the failures' times and victims."),
    "patience": (float, 180.0, "Seconds without an event: the run has hung."),
    "simulate": (int, 0, "So many runs in a simulated world, from --seed on."),
    "protocol": (
      *(tuple(explore.PROTOCOLS), "server"),
      "Protocol of the runs of --simulate.",
    ),
    "faults": (list, None, "With --simulate=1, the numbers of those to come."),
    "jobs": (int, 1, "Processes for --simulate."),
  }
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
  kinds, choose = _F["kinds"].value, f"choose of {','.join(chaos.KINDS)}"
  if not any(kinds):
    raise ValueError(f"--kinds is empty; {choose}")
  if not all(kinds):
    raise ValueError(
      f"--kinds={','.join(kinds)} has a comma too many, or a kind too few;"
      f" {choose}"
    )
  for kind in kinds:
    if kind not in chaos.KINDS:
      raise ValueError(f"--kinds={kind}: {names.nearest(kind, chaos.KINDS)}")
  if engine != "ray" and set(kinds) != {"driver"}:
    raise ValueError(
      f"--engine={engine} has one process, the driver: use --kinds=driver, or"
      " --engine=ray"
    )
  return kinds


def summary(kinds: Sequence[str], failures: Sequence[audit.Failure]) -> str:
  """Says what was done, and what was to be and was not."""
  count = collections.Counter(failure.kind for failure in failures)
  done = ", ".join(
    f"{count[kind]} {kind}" for kind in chaos.KINDS if count[kind]
  )
  text = f"injected: {done or 'nothing'}"
  never = [kind for kind in chaos.KINDS if kind in kinds and not count[kind]]
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
  alive = chaos.alive(victim.processes)  # Ray takes its time
  left = [f"memory {path}" for path in sorted(victim.memories) if path.exists()]
  left += [f"process {pid}" for pid in alive]
  _print_finding("left behind", ", ".join(left) or "nothing", not left)
  return fine and not left


def _print_finding(what, text, well):
  print(f"{'ok' if well else 'FAILED':6}  {what}: {text}", flush=True)


def _simulate() -> None:
  """Runs in a simulated world; see `asgd.live.world`."""
  count, first, numbers = (_F[x].value for x in ("simulate", "seed", "faults"))
  jobs, keep = _F["jobs"].value, None
  for name, value in (("simulate", count), ("jobs", jobs)):
    if value < 1:
      raise ValueError(f"--{name}={value} must be 1 or more")
  for name, given in (
    ("config", flags.has_config()),
    ("workdir", _TRAINING["workdir"].value is not None),
  ):
    if given:
      raise ValueError(f"--simulate has runs of its own: drop --{name}")
  protocol = _F["protocol"].value
  drawn = explore.drawn(first, protocol)
  if numbers is not None:
    there = len(drawn.faults)
    if count != 1:
      raise ValueError("--faults are those of one seed: add --simulate=1")
    if not all(x.isdecimal() and int(x) < there for x in numbers):
      raise ValueError(
        f"--faults={','.join(numbers)}: seed {first} has faults 0 to"
        f" {there - 1}; name some of them, such as --faults=0,1"
      )
    keep = [int(x) for x in numbers]
  seeds, tally = range(first, first + count), explore.Tally(protocol)
  options = {"jobs": jobs, "keep": keep, "protocol": protocol}
  try:
    for outcome in explore.run_seeds(seeds, **options):
      tally.add(outcome)
      if outcome.error:
        print(explore.explain(outcome, keep, protocol), flush=True)
      elif count == 1:
        those = range(len(drawn.faults)) if keep is None else keep
        print(f"{drawn.describe(those)}\n")
      if tally.runs % _EVERY == 0 and tally.runs < count:
        failed = len(tally.failed)
        print(f"{tally.runs:,} of {count:,} seeds, {failed} failed", flush=True)
  except KeyboardInterrupt:
    print(tally.table())
    print(
      f"chaos: interrupted after {tally.runs:,} of {count:,} seeds, of which"
      f" {len(tally.failed)} failed",
      file=sys.stderr,
    )
    sys.exit(128 + signal.SIGINT)
  print(tally.table())
  if tally.failed:
    raise flags.Failed(f"chaos: {len(tally.failed)} of {count} seeds failed")


def main() -> None:
  """Runs, disturbs, audits."""
  if _F["simulate"].value:
    _simulate()
    return
  if _F["faults"].value is not None:
    raise ValueError("--faults are those of --simulate=1: add it")
  _check_flags()
  engine = _TRAINING["engine"].value
  kinds = _check_kinds(engine)
  exp = build(
    flags.load_config("configs/digits.py", engine),
    engines=flags.ENGINES,
    data_dir=_TRAINING["data_dir"].value,
  )
  out, command = flags.training_command("chaos")
  protocols = {
    cell.name: protocol.of(exp.runs[cell.label]) for cell in exp.cells
  }
  victim = chaos.Victim(out, command, protocols)
  times = {name: _F[name].value for name in ("mtbf", "seconds", "patience")}
  try:
    chaos.inject(victim, kinds, random.Random(_F["seed"].value), **times)
  except chaos.Hung as error:
    raise flags.Failed(f"chaos: {error}") from error
  finally:
    victim.end()
  status = victim.process.returncode
  if status not in (0, flags.INCOMPLETE):  # the audit reports what is missing
    raise flags.Failed(f"chaos: asgd train ended with status {status}")
  if not _report(exp, out, victim, kinds):
    raise flags.Failed("chaos: the audit failed")
  if not victim.failures:
    raise flags.Failed("chaos: nothing was injected, so nothing was tried")
  print("\nthe audit found nothing wrong")


if __name__ == "__main__":
  flags.run(main)
