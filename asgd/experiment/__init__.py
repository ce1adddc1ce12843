"""Experiments: one config, cells, one run loop, one folder, one report.

  config -> schema.resolve -> cells.build -> plans -> jobs -> loop -> folder
  folder -> report, figure, overlay, replay, audit, comparison

This is the only room of asgd with files and clocks. A config names runs on a
problem, and an engine (`asgd.experiment.engines`) executes a run. Engines of
other packages are passed as arguments: `{**ENGINES, "pipeline": PIPELINE}`.

Begin with `cells.build`, then `loop`.
"""

from asgd.experiment.cells import Cell, Experiment, build
from asgd.experiment.engines import Engine, EngineKind
from asgd.experiment.engines.live import RAY, THREADS
from asgd.experiment.engines.mesh import MESH
from asgd.experiment.engines.simulate import SIMULATE
from asgd.experiment.loop import train
from asgd.experiment.protocol import PROTOCOLS, Protocol
from asgd.experiment.protocols import peers, sandblaster, server, tables

# The recipe of a run selects its protocol; a new protocol is a line here.
PROTOCOLS |= {
  "server": server.PROTOCOL,
  "peers": peers.PROTOCOL,
  "tables": tables.PROTOCOL,
  "sandblaster": sandblaster.PROTOCOL,
}

ENGINES: dict[str, EngineKind] = {
  "simulate": SIMULATE,
  "threads": THREADS,
  "ray": RAY,
  "mesh": MESH,
}

__all__ = [
  "ENGINES",
  "PROTOCOLS",
  "Cell",
  "Engine",
  "EngineKind",
  "Experiment",
  "Protocol",
  "build",
  "train",
]
