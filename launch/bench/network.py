"""Messages a second over slow links, predicted from one worker, and live."""

import numpy as np

from . import network_speed, turns


def run(links: str = "threads", seconds: float = 8.0, rounds: int = 3) -> None:
  """Prints for numbers of workers and shards what their links allow, what live
  runs of so many seconds came to, and what had been simulated, in turns."""
  with network_speed.RUNTIMES[links](seconds) as runtime:
    slow = runtime.links
    print(
      f"jobs of {slow.job:.3g} s, {slow.latency:.3g} s each way, a port takes"
      f" {slow.port / slow.nbytes:.3g} messages a second\n",
      flush=True,
    )
    header = ["workers", "shards", "at most/s", "live/s", "simulated/s"]
    table = turns.TimingTable([*header, "of live", "range", "late %"], first=7)
    for workers, shards in runtime.runs:
      taken = [
        network_speed.turn(runtime, workers, shards, seed)
        for seed in range(rounds)
      ]
      bound, live, simulated, late = np.transpose(taken)
      speeds = [f"{np.median(x):.2f}" for x in (bound, live, simulated)]
      ratio = turns.ratio_cells(simulated / live)
      late = f"{100 * late.max():.1f}"
      table.row(str(workers), str(shards), *speeds, *ratio, late)
