"""Kills the processes of a live run at random, and audits its results.

  asgd chaos --config=configs/digits.py --mtbf=5 \\
    --seconds=60 --kinds=worker,shard,hang,driver,term --seed=0 \\
    --config.workers=4 --config.only=dana_zero --config.seeds=0 \\
    --config.epochs=200

runs `asgd train` with the given flags and config (on engine ray, unless
--engine is threads). From the first message on, for --seconds, it disturbs one
process after another. The times between two failures are exponential, with a
mean of --mtbf seconds; each kind of failure is used once before any is used
again. Only seconds in which messages arrive count: while a driver restarts,
nothing is injected.

  worker   SIGKILL to a worker
  shard    SIGKILL to a server shard
  hang     SIGSTOP to a worker: it sends nothing more and does not exit
  term     SIGTERM to a worker, as a preemption notice
  driver   SIGKILL to the driver; the same command restarts it

Then the run finishes undisturbed, and each cell is audited
(`asgd.experiment.audit`):

- every job was received once;
- every acknowledged message is an update and a row of the records;
- every failure in the trace is an injected one;
- the order was allowed, and the replay equals the run to the bit;
- no process and no memory is left behind.

  asgd chaos --simulate=1000 --jobs=2

runs small live runs in a simulated world instead, one for each seed. The seed
draws the clock, the network, the disk and the order of all steps. The same
checks follow. For a seed that fails, the command that repeats it with as few
faults as possible is printed. --protocol=tables, --protocol=sandblaster and
--protocol=gossip check these protocols instead of the parameter server. Ctrl-C
ends with the counts so far.

The exit status is 1 if a check fails, if nothing was injected, or if the run
makes no progress for --patience seconds.
"""

import collections
import math
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from asgd import names
from asgd.experiment import audit, build, cells, chaos, protocol
from asgd.live.world import explore

from . import flags

_MAX_SEEDS, _MAX_JOBS = 10**9, 1024  # of --simulate
_SEEDS_PER_LINE = 500  # seeds between two printed lines of --simulate

_FLAGS = flags.define("chaos")


def _check_flags() -> None:
  """Raises ValueError for a time out of its range, before anything starts."""
  for name in ("mtbf", "seconds", "patience"):
    value = _FLAGS[name].value
    if not 0 < value < math.inf:  # NaN fails, too
      raise ValueError(
        f"--{name}={value:g} must be positive and finite; it is a time in"
        " seconds"
      )


def _check_kinds(engine: str) -> list[str]:
  """Returns --kinds; ValueError for kinds that the engine does not have."""
  kinds, choose = _FLAGS["kinds"].value, f"choose from {','.join(chaos.KINDS)}"
  if not any(kinds):
    raise ValueError(f"--kinds is empty; {choose}")
  if not all(kinds):
    raise ValueError(
      f"--kinds={','.join(kinds)} has an empty name between commas; {choose}"
    )
  for kind in kinds:
    # One by one: the error names the nearest kind of a wrong one.
    if kind not in chaos.KINDS:
      raise ValueError(f"--kinds={kind}: {names.nearest(kind, chaos.KINDS)}")
  # Threads share the driver's process, so only that one can be killed.
  if engine != "ray" and set(kinds) != {"driver"}:
    raise ValueError(
      f"--engine={engine} has one process, the driver: use --kinds=driver, or"
      " --engine=ray"
    )
  return kinds


def summary(kinds: Sequence[str], failures: Sequence[audit.Failure]) -> str:
  """Returns a text of the injected failures, and of kinds never injected."""
  # In the order of KINDS, not of the failures.
  count_by_kind = collections.Counter(failure.kind for failure in failures)
  counts = ", ".join(
    f"{count_by_kind[kind]} {kind}"
    for kind in chaos.KINDS
    if count_by_kind[kind]
  )
  text = f"injected: {counts or 'nothing'}"
  missing_kinds = [
    kind for kind in chaos.KINDS if kind in kinds and not count_by_kind[kind]
  ]
  if not missing_kinds:
    return text
  return (
    f"{text}\nnever injected: {', '.join(missing_kinds)}; give it more"
    " --seconds, more --config.epochs or a smaller --mtbf"
  )


def _report(
  exp: cells.Experiment,
  workdir: Path,
  run: chaos.InjectedRun,
  kinds: Sequence[str],
) -> bool:
  """Prints the failures and the findings; returns whether all checks passed."""
  print(f"\n{summary(kinds, run.failures)}\n")
  flags.add_json(workdir=str(workdir), injected=len(run.failures))
  data_dir, passed = _FLAGS["data_dir"].value, True
  # [1] Each cell against the failures that were injected into it.
  for cell in exp.cells:
    plan, cell_folder = exp.plan(cell), workdir / "cells" / cell.name
    failures = [f for f in run.failures if f.cell == cell.name]
    for finding in audit.findings(
      plan, cell_folder, failures, data_dir=data_dir
    ):
      _print_finding(
        f"{cell.name}, {finding.check}", finding.text, finding.passed
      )
      passed &= finding.passed
  # [2] The machine: no process and no memory may outlive the run.
  running = chaos.wait_for_end(run.processes)  # Ray takes a while to end them
  memories = [path for path in sorted(run.memories) if path.exists()]
  leftovers = [f"memory {path}" for path in memories]
  leftovers += [f"process {pid}" for pid in running]
  text = ", ".join(leftovers) or "nothing"
  _print_finding("left behind", text, not leftovers)
  return passed and not leftovers


def _print_finding(check: str, text: str, passed: bool) -> None:
  """Prints the line of one check, and adds it to the object of --json."""
  flags.append_json("checks", {"what": check, "result": text, "passed": passed})
  print(f"{'ok' if passed else 'FAILED':6}  {check}: {text}", flush=True)


def _simulate() -> None:
  """Checks seeds in the simulated world, see `asgd.live.world`."""
  n_seeds, first = _FLAGS["simulate"].value, _FLAGS["seed"].value
  fault_indices, jobs = _FLAGS["faults"].value, _FLAGS["jobs"].value
  kept_faults = None  # all faults of a seed
  flags.in_range("simulate", n_seeds, 1, _MAX_SEEDS)
  flags.in_range("jobs", jobs, 1, _MAX_JOBS)
  for name, is_given in (
    ("config", flags.has_config()),
    ("workdir", _FLAGS["workdir"].value is not None),
  ):
    if is_given:
      raise ValueError(f"--simulate makes its own runs: drop --{name}")
  protocol = _FLAGS["protocol"].value
  # The seed draws the faults, too, so --faults can name them by index.
  scenario = explore.scenario_of(first, protocol)
  if fault_indices is not None:
    fault_count = len(scenario.faults)
    if n_seeds != 1:
      raise ValueError("--faults selects faults of one seed: add --simulate=1")
    # Indices of faults are those of the one seed that --seed names.
    if not all(x.isdecimal() and int(x) < fault_count for x in fault_indices):
      raise ValueError(
        f"--faults={','.join(fault_indices)}: seed {first} has faults 0 to"
        f" {fault_count - 1}; name some of them, such as --faults=0,1"
      )
    kept_faults = [int(x) for x in fault_indices]
  seeds, tally = range(first, first + n_seeds), explore.Tally(protocol)
  options = {"jobs": jobs, "keep": kept_faults, "protocol": protocol}
  try:
    # Outcomes arrive in the order of the seeds, whichever process ends first.
    for outcome in explore.run_seeds(seeds, **options):
      tally.add(outcome)
      if outcome.error:
        print(explore.explain(outcome, kept_faults, protocol), flush=True)
      elif n_seeds == 1:
        shown_faults = (
          range(len(scenario.faults)) if kept_faults is None else kept_faults
        )
        print(f"{scenario.describe(shown_faults)}\n")
      # No line at the end: the table follows.
      if tally.runs % _SEEDS_PER_LINE == 0 and tally.runs < n_seeds:
        failed = len(tally.failed_seeds)
        progress = f"{tally.runs:,} of {n_seeds:,} seeds"
        print(f"{progress}, {failed} failed", flush=True)
  # The seeds so far are a result, too, so print their table before exiting.
  except KeyboardInterrupt:
    print(tally.table())
    print(
      f"chaos: interrupted after {tally.runs:,} of {n_seeds:,} seeds, of which"
      f" {len(tally.failed_seeds)} failed",
      file=sys.stderr,
    )
    sys.exit(128 + signal.SIGINT)  # as a shell reports a signal
  print(tally.table())
  flags.add_json(seeds=n_seeds, failed=sorted(tally.failed_seeds))
  if n_failed := len(tally.failed_seeds):
    raise flags.Failed(f"chaos: {n_failed} of {n_seeds} seeds failed")


def main() -> None:
  """Trains with injected failures, and audits the results."""
  if _FLAGS["simulate"].value:
    _simulate()
    return
  if _FLAGS["faults"].value is not None:
    raise ValueError("--faults is for --simulate=1: add it")
  _check_flags()
  engine = _FLAGS["engine"].value
  kinds = _check_kinds(engine)
  exp = build(
    flags.load_config("configs/digits.py", engine),
    engines=flags.ENGINES,
    data_dir=_FLAGS["data_dir"].value,
  )
  workdir, command = flags.training_command("chaos")
  protocols = {
    cell.name: protocol.of(exp.runs[cell.label]) for cell in exp.cells
  }
  # [1] Train in other processes, which this one kills.
  # The audit needs the plans of the cells. Building them first also finds wrong
  # flags before a process is started.
  run = chaos.InjectedRun(workdir, command, protocols)
  times = {name: _FLAGS[name].value for name in ("mtbf", "seconds", "patience")}
  try:
    chaos.inject(run, kinds, random.Random(_FLAGS["seed"].value), **times)
  except chaos.Hung as error:
    raise flags.Failed(f"chaos: {error}") from error
  finally:
    run.end()
  # [2] Audit the results, unless the training itself failed.
  status = run.process.returncode
  # The audit reports the faults of a cell without a valid result.
  if status not in (0, flags.INCOMPLETE):
    raise flags.Failed(f"chaos: asgd train ended with status {status}")
  if not _report(exp, workdir, run, kinds):
    raise flags.Failed("chaos: the audit failed")
  # A pass without a failure would prove nothing.
  if not run.failures:
    raise flags.Failed("chaos: no failure was injected, so nothing was tested")
  print("\nthe audit found no fault")


if __name__ == "__main__":
  flags.run(main, "chaos")
