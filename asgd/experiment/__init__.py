"""Experiments: one config, cells, one run loop, one folder, one report.

This is the only room of asgd with files and clocks. A config names runs on a
problem; an engine (`asgd.experiment.engines`) makes a run; everything around it
is written once. An engine that asgd does not know, such as that of
`pipeline.engine`, is handed in: `{**ENGINES, "pipeline": PIPELINE}`.
"""

from asgd.experiment.cells import Cell, Experiment, build
from asgd.experiment.engines import Engine, EngineKind
from asgd.experiment.engines.live import RAY, THREADS
from asgd.experiment.engines.mesh import MESH
from asgd.experiment.engines.simulate import SIMULATE
from asgd.experiment.loop import train

ENGINES: dict[str, EngineKind] = {
  "simulate": SIMULATE,
  "threads": THREADS,
  "ray": RAY,
  "mesh": MESH,
}

__all__ = [
  "ENGINES",
  "Cell",
  "Engine",
  "EngineKind",
  "Experiment",
  "build",
  "train",
]
