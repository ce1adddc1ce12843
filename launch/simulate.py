"""Trains with many simulated workers and shows what staleness costs.

  python -m launch.simulate --config=configs/simulate_digits.py

Each cell of the experiment (algorithm x number of workers x seed) is a training
run in simulated time. Ctrl-C, or a kill, loses nothing that matters: the same
command with --resume ends with the same parameters, to the bit.
"""

import time
from pathlib import Path
from typing import Any

from absl import flags

from asgd import diagnosis
from launch import (
  cell_book,
  cell_run,
  cli,
  experiment,
  progress,
  replay,
  report,
  session,
)

flags.adopt_module_key_flags(session)  # --help lists them, too
_TRACE = flags.DEFINE_string(
  "trace",
  None,
  "Folder RESULTS/cells/NAME of a live run: compute it again from its trace.",
)

_CHUNK_SECONDS = 0.25  # between two looks at clocks and signals


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


def _run_all(exp, folder, bar) -> list[dict[str, Any]]:
  """Runs the cells that are not finished; returns the results of all."""
  signals = session.Signals()
  sharpness = diagnosis.make_sharpness(exp.problem.loss, exp.problem.probe)
  plan, planned, warned = None, None, set()
  results = []
  for cell in exp.cells:
    place = folder / "cells" / cell.name
    result = cell_book.finished_result(place)
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


def _replay(folder):
  """Replays a live run; the exit status says whether it came to the same."""
  if session.CONFIG.value is not None or cli.overrides():
    raise ValueError("--trace brings its own config; drop --config")
  held, _ = replay.load(folder)
  replayed = replay.run(folder, data_dir=session.DATA_DIR.value)
  print(replay.describe(replayed, held))
  if replayed.recorded not in (None, replayed.digest):
    raise cli.Failed("the replay differs from the run")


def main() -> None:
  """Runs the experiment that the flags describe."""
  if _TRACE.value is not None:
    _replay(Path(_TRACE.value))
    return
  exp = session.build("configs/simulate_digits.py")
  folder = session.open_folder(exp)
  total = sum(experiment.messages(exp, cell) for cell in exp.cells)
  bar = progress.Progress(total)
  try:
    results = _run_all(exp, folder, bar)
  finally:
    bar.close()
  report.write(folder, exp, results)


if __name__ == "__main__":
  cli.run(main)
