"""Benchmarks: ratios against a baseline in the same run.

  python -m launch.bench simulator
  python -m launch.bench server
  python -m launch.bench pipeline
  python -m launch.bench parallel

Machines are noisy, so each contestant takes turns with its baseline in short
blocks, and what is printed is the median over rounds of its speed over the
baseline's. A row is printed as soon as it is measured.
"""

from absl import flags

from asgd import names
from launch import flags as flags_lib
from launch.bench import parallel, pipeline, server, simulator

_ROUNDS = flags.DEFINE_integer(
  "rounds",
  None,
  "Turns of each contestant. Default: 9, 6 (pipeline), 5 (parallel).",
)
_BLOCK = flags.DEFINE_integer("block", 24, "Updates of a turn (simulator).")
_BATCH = flags.DEFINE_integer(
  "batch_size", 64, "Images in a batch (simulator)."
)
_SIZES = flags.DEFINE_list(
  "sizes", ["0.1", "1", "10", "100"], "MB of parameters (server)."
)
_SECONDS = flags.DEFINE_float("seconds", 3.0, "For each contestant (server).")
_PEER = flags.DEFINE_string(
  "peer", None, "Python that has torch (pipeline). Default: this, if it has."
)

BENCHMARKS = {
  "simulator": lambda rounds: simulator.run(rounds, _BLOCK.value, _BATCH.value),
  "server": lambda rounds: server.run(
    _SECONDS.value, [float(size) for size in _SIZES.value]
  ),
  "pipeline": lambda rounds: pipeline.run(rounds, _PEER.value),
  "parallel": parallel.run,
}
_DEFAULT_ROUNDS = {"simulator": 9, "server": 1, "pipeline": 6, "parallel": 5}


def main(name: str = "") -> None:
  """Runs one benchmark."""
  if not name:
    raise ValueError(f"which benchmark? one of: {', '.join(BENCHMARKS)}")
  run = names.lookup("benchmark", name, BENCHMARKS)
  rounds = _DEFAULT_ROUNDS[name] if _ROUNDS.value is None else _ROUNDS.value
  if rounds < 1 or _BLOCK.value < 1 or not _SECONDS.value > 0:
    raise ValueError("--rounds, --block and --seconds must be positive")
  run(rounds)


if __name__ == "__main__":
  flags_lib.run(main, words=1)
