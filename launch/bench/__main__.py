"""Benchmarks: ratios against a baseline in the same run.

  python -m launch.bench simulator
  python -m launch.bench server
  python -m launch.bench pipeline
  python -m launch.bench parallel

Machines are noisy, so each contestant takes turns with its baseline in short
blocks, and what is printed is the median over rounds of its speed over the
baseline's. A row is printed as soon as it is measured.
"""

from asgd import names
from launch import flags
from launch.bench import parallel, pipeline, server, simulator

_ROUNDS = {"simulator": 9, "server": 1, "pipeline": 6, "parallel": 5}
_F = flags.define(
  {
    "rounds": (
      int,
      None,
      "Turns of each contestant. Default: 9, 6 (pipeline), 5 (parallel).",
    ),
    "block": (int, 24, "Updates of a turn (simulator)."),
    "batch_size": (int, 64, "Images in a batch (simulator)."),
    "sizes": (
      list,
      ["0.1", "1", "10", "100"],
      "MB of parameters (server).",
    ),
    "seconds": (float, 3.0, "For each contestant (server)."),
    "peer": (
      str,
      None,
      "Python that has torch (pipeline). Default: this, if it has.",
    ),
  }
)


def main(name: str = "") -> None:
  """Runs one benchmark."""
  if not name:
    raise ValueError(f"which benchmark? one of: {', '.join(_ROUNDS)}")
  default = names.lookup("benchmark", name, _ROUNDS)
  given = {flag: holder.value for flag, holder in _F.items()}
  rounds = default if given["rounds"] is None else given["rounds"]
  if rounds < 1 or given["block"] < 1 or not given["seconds"] > 0:
    raise ValueError("--rounds, --block and --seconds must be positive")
  if name == "simulator":
    simulator.run(rounds, given["block"], given["batch_size"])
  elif name == "server":
    server.run(given["seconds"], [float(size) for size in given["sizes"]])
  elif name == "pipeline":
    pipeline.run(rounds, given["peer"])
  else:
    parallel.run(rounds)


if __name__ == "__main__":
  flags.run(main, words=1)
