"""--compile=TOPOLOGY of commands: compiles the programs of a config for devices
that this machine lacks, and compares them with the planner's numbers."""

from asgd.checks import shortened
from asgd.experiment import cells, schema
from asgd.parallel import ahead, targets
from asgd.parallel.memory import GB

from . import flags

_MAX_DIFFERENCE_LENGTH = 300  # most characters of a printed difference


def main(
  resolved: schema.Resolved, topology: str, data_dir: str | None = None
) -> None:
  """Compiles the programs and prints a report of each. Raises `flags.Failed` if
  a program differs from the plan, or does not fit into memory."""
  target = targets.find(topology)
  failures: list[str] = []  # all are reported, not only the first
  programs = cells.programs(
    resolved, target, engines=flags.ENGINES, data_dir=data_dir
  )
  for program in programs:
    compiled = ahead.compile_program(program, target.options)
    # Bytes that the compiled collectives send, to compare with the plan's.
    traffic = ahead.traffic(compiled, target.slices)
    differences = ahead.compare(compiled, traffic)
    print(ahead.describe(compiled, target, traffic), end="\n\n")
    for line in differences:
      print(f"  not as planned: {shortened(line, _MAX_DIFFERENCE_LENGTH)}")
    if compiled.peak > target.memory:
      failures.append(
        f"{program.name} needs {compiled.peak / GB:.3g} GB on each device,"
        f" which has {target.memory / GB:.3g} GB: use another mesh"
      )
    if differences:
      failures.append(f"{program.name} differs from the plan on {topology}")
  if failures:
    raise flags.Failed("; ".join(failures))
