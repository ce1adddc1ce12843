"""--compile=TOPOLOGY of commands: the programs of a config, compiled for
devices that are not here, and compared with the planner."""

from asgd.checks import shortened
from asgd.experiment import cells, schema
from asgd.parallel import ahead, targets
from asgd.parallel.memory import GB

from . import flags

HELP = (
  "Compile the programs of the config for v5e:4x4, v5p:4x4x4, two slices"
  " v5e:2x2*2, or GPUs h100:8, none of which need be here, and compare them"
  " with the planner."
)
_LONGEST = 300  # characters of a difference


def main(
  resolved: schema.Resolved, topology: str, data_dir: str | None = None
) -> None:
  """Compiles, and prints a report of each program; `flags.Failed` if one is
  not as planned, or does not fit."""
  target, failed = targets.find(topology), []
  jobs = cells.programs(
    resolved, target, engines=flags.ENGINES, data_dir=data_dir
  )
  for job in jobs:
    compiled = ahead.compile_program(job, target.options)
    differences = ahead.compare(compiled, target)
    print(ahead.describe(compiled, target), end="\n\n")
    for line in differences:
      print(f"  not as planned: {shortened(line, _LONGEST)}")
    if compiled.peak > target.memory:
      failed.append(
        f"{job.name} needs {compiled.peak / GB:.3g} GB of a device, which has"
        f" {target.memory / GB:.3g}: use another mesh"
      )
    if differences:
      failed.append(f"{job.name} is not as planned on {topology}")
  if failed:
    raise flags.Failed("; ".join(failed))
