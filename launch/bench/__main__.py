"""Benchmarks: ratios against a baseline in the same run.

  asgd bench simulator
  asgd bench server
  asgd bench pipeline
  asgd bench parallel
  asgd bench compression
  asgd bench tables
  asgd bench network

Machines are noisy, so each contestant takes turns with its baseline in short
blocks, and what is printed is the median over rounds of its speed over the
baseline's. A row is printed as soon as it is measured.
"""

from asgd import names

from .. import flags
from . import (
  compression,
  network,
  parallel,
  pipeline,
  server,
  simulator,
  tables,
)

_BENCHMARKS = {  # name -> what runs it, its flags
  "simulator": (simulator.run, ("rounds", "block", "batch_size")),
  "server": (server.run, ("seconds", "sizes")),
  "pipeline": (pipeline.run, ("rounds", "peer")),
  "parallel": (parallel.run, ("rounds",)),
  "compression": (compression.run, ("rounds", "seconds")),
  "tables": (tables.run, ("rounds",)),
  "network": (network.run, ("rounds", "seconds", "links")),
}
_F = flags.define(
  {
    "rounds": (int, None, "Turns. Default: 3, 5 or 9."),
    "block": (int, 24, "Updates of a turn (simulator)."),
    "batch_size": (int, 64, "Images in a batch (simulator)."),
    "sizes": (list, [0.1, 1, 10, 100], "MB of parameters (server)."),
    "seconds": (float, None, "For each contestant. Default: 3; 8 (network)."),
    "links": (("threads", "tc"), "threads", "Which are slow (network)."),
    "peer": (str, None, "Python with torch (pipeline). Default: this one."),
  }
)


def main(name: str = "") -> None:
  """Runs one benchmark."""
  if not name:
    raise ValueError(f"which benchmark? one of: {', '.join(_BENCHMARKS)}")
  run, takes = names.lookup("benchmark", name, _BENCHMARKS)
  given = {k: f.value for k, f in _F.items() if f.value is not None}
  if not all(given.get(k, 1) > 0 for k in ("rounds", "block", "seconds")):
    raise ValueError("--rounds, --block and --seconds must be positive")
  run(**{k: given[k] for k in takes if k in given})


if __name__ == "__main__":
  flags.run(main, words=1)
