"""Trains with many simulated workers and shows what staleness costs.

  python -m launch.simulate --config=configs/simulate_digits.py

Each cell of the experiment (algorithm x number of workers x seed) is a training
run in simulated time. Ctrl-C, or a kill, loses nothing that matters: the same
command with --resume ends with the same parameters, to the bit.
"""

import signal
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags

from asgd import diagnosis
from launch import (
  cell_run,
  checkpoints,
  cli,
  experiment,
  outputs,
  progress,
  report,
)

_CONFIG = cli.define_config()
_OUT = flags.DEFINE_string(
  "out", None, "Folder for results. Default: the next free runs/CONFIG-NNN."
)
_RESUME = flags.DEFINE_bool(
  "resume", False, "Go on with this experiment where it stopped."
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder with the dataset's files. Default: look for them."
)

_CHUNK_SECONDS = 0.25  # between two looks at clocks and signals


class _Signals:
  """Remembers the first request to stop; a second one interrupts at once."""

  def __init__(self):
    self.received = 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, self._handle)

  def _handle(self, number, frame):
    del frame
    if self.received:
      raise KeyboardInterrupt
    self.received = number


def _run_cell(run: cell_run.CellRun, exp, cell, bar, signals) -> dict[str, Any]:
  """Runs one cell to its end, or raises Stopped after saving it."""
  start = saved = time.monotonic()
  bar.skip(run.message)
  chunk = 16
  while not run.finished:
    began = time.monotonic()
    part = run.advance(chunk)
    now = time.monotonic()
    chunk = max(1, round(chunk * min(2, _CHUNK_SECONDS / (now - began))))
    bar.update(
      cell.name,
      len(part.loss),
      float(part.loss.mean()),
      float(part.staleness.mean()),
      float(part.gap.mean()),
    )
    if signals.received and not run.finished:
      run.save()
      raise cli.Stopped(
        f"stopped in {cell.name} at message {run.message}; the same command"
        " with --resume goes on from there",
        signals.received,
      )
    if now - saved >= exp.config["checkpoint_seconds"] and not run.finished:
      run.save()
      saved = time.monotonic()
  result = run.result(time.monotonic() - start)
  run.finish(result)
  return result


def _open_folder(exp: experiment.Experiment) -> Path:
  """Finds or makes the folder of this experiment and of no other."""
  free = ("on_nan", "checkpoint_seconds")  # may differ when resuming
  identity = {
    "config": {k: v for k, v in exp.config.items() if k not in free},
    "dataset": {
      "name": exp.dataset.name,
      "sha256": checkpoints.digest(exp.dataset[2:]),
    },
    "free": {
      **{k: exp.config[k] for k in free},
      "data source": exp.dataset.source,
      "jax": f"{jax.__version__} on {jax.default_backend()}",
    },
  }
  name = Path(flags.FLAGS["config"].config_filename.split(":")[0]).stem
  return outputs.open_folder(_OUT.value, name, identity, resume=_RESUME.value)


def _run_all(exp, folder, bar) -> list[dict[str, Any]]:
  """Runs the cells that are not finished; returns the results of all."""
  signals = _Signals()
  sharpness = diagnosis.make_sharpness(exp.problem.loss, exp.problem.probe)
  plan, planned, warned = None, None, set()
  results = []
  for cell in exp.cells:
    place = folder / "cells" / cell.name
    result = cell_run.finished_result(place)
    if result is not None:
      bar.skip(experiment.messages(exp, cell))
      results.append(result)
      continue
    key = cell.label, cell.workers
    if key != planned:
      plan, planned = experiment.plan(exp, cell), key
    board = folder / "tensorboard" / cell.name
    run = cell_run.CellRun(exp, plan, cell, place, sharpness, board)
    try:
      result = _run_cell(run, exp, cell, bar, signals)
    finally:
      run.close()
    results.append(result)
    bar.line(report.line(result))
    if key not in warned:  # one seed tells
      lines = report.warnings(result)
      warned |= {key} if lines else set()
      for line in lines:
        bar.line(line)
    if signals.received and len(results) < len(exp.cells):
      raise cli.Stopped(
        f"stopped after {cell.name}; the same command with --resume goes on"
        " from there",
        signals.received,
      )
  return results


def main() -> None:
  """Runs the experiment that the flags describe."""
  if _CONFIG.value is None:
    raise ValueError("no --config; try --config=configs/simulate_digits.py")
  try:
    jax.devices()
  except RuntimeError as error:
    raise ValueError(
      f"JAX finds no device: {error}; see the variable JAX_PLATFORMS"
    ) from error
  config = experiment.override(_CONFIG.value, cli.overrides())
  exp = experiment.build(config, data_dir=_DATA_DIR.value)
  folder = _open_folder(exp)
  print(f"data: {exp.dataset.source}\nresults go to {folder}")
  total = sum(experiment.messages(exp, cell) for cell in exp.cells)
  bar = progress.Progress(total)
  try:
    results = _run_all(exp, folder, bar)
  finally:
    bar.close()
  report.write(folder, exp, results)


if __name__ == "__main__":
  cli.run(main)
