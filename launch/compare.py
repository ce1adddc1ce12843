"""Predicted and measured: live cells beside their simulations, in one picture.

  asgd compare WORKDIR/cells/NAME

1. measures how long each job of a live cell took;
2. trains the same cell twice in simulation, by the same protocol;
3. draws live cell and simulations: staleness of messages, messages a second,
   and loss against time.

In one simulation the jobs of a worker take their measured times, in order. In
the other, the time of a job is drawn from the measured times of its worker, as
if workers were independent (on shared cores they are not). The time of a job
includes the server's work and the wait for it, so a prediction holds for this
number of workers on equally busy machines.

In runs of peers, tables and Sandblaster no single server decides the order of
messages. Their cells are compared with their replay, and the first record that
differs is named.

WORKDIR alone compares each of its live cells with its simulations, and prints
when each cell reached a common loss. --durations_of=WORKDIR/cells/OTHER takes
the times of another cell.

  asgd compare --config=configs/straggler_digits.py --engine=ray

first trains a config, as asgd train does with the same flags.

  asgd compare WORKDIR OTHER_WORKDIR ...

draws experiments of any engines in one figure, with one table and one
report.html, in --out or the next free runs/compare-001, -002, ... It imports no
code that their configs name. The other forms import this code, so they require
--trust if another user made the folder. If that folder is read-only, their
results are written to runs/compare-001, -002, ..., too.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgd import safe_files
from asgd.experiment import (
  comparison,
  comparison_figure,
  folder,
  overlay,
  storage,
)

from . import flags

_FLAGS = flags.define("compare")


def _draw(draw: Callable[..., None], *arguments: Any) -> None:
  """Draws a picture; prints where it is, or which package is missing."""
  stem = arguments[-1]  # path without a suffix
  try:
    draw(*arguments)
    print(f"picture  {stem}.png, .svg, .pdf; its numbers are in {stem}.csv")
  except ImportError:
    need = "pip install 'asgd[viz]'"
    print(f"picture  not drawn: {need}; its numbers are in {stem}.csv")


def _compare_cell(
  cell_folder: Path, out: Path | None
) -> comparison.LiveComparison:
  """Compares a cell, prints the result and writes it, by default in its
  folder."""
  out, times_folder = out or cell_folder, _FLAGS["durations_of"].value
  # [1] Measure, and train the simulations.
  result = comparison.compare(
    cell_folder,
    durations_of=Path(times_folder) if times_folder else None,
    data_dir=_FLAGS["data_dir"].value,
    trust=_FLAGS["trust"].value,
  )
  stem, rows = out / "compare", comparison.quantities(result)
  # [2] Write the numbers first; the picture needs Matplotlib.
  with storage.naming_folder(out):
    safe_files.make_folder(out.resolve())
    storage.write_csv(out / "compare.csv", comparison_figure.points(result))
    storage.write_csv(out / "compare-table.csv", rows)
    storage.write_csv(out / "durations.csv", result.jobs)
    print(comparison.describe(result, rows, times_folder))
    _draw(comparison_figure.draw, result, stem)
  json_cell = {"cell": result.name, "out": str(out), "rows": rows}
  flags.append_json("cells", json_cell)
  return result


def _compare_all(workdir: Path, out: Path | None) -> None:
  """Compares each live cell of an experiment with its simulations, and then all
  of them with each other."""
  results = folder.read_results(workdir)
  for fault in folder.faults(workdir):
    print(f"warning: {fault}; the cell is left out")
  live_cells = [row["cell"] for row in results if row["engine"] in flags.LIVE]
  if not live_cells:
    raise ValueError(
      f"{workdir} holds no finished live cell to compare: train one with"
      f" --engine={' or --engine='.join(flags.LIVE)}"
    )
  folders = [workdir / "cells" / name for name in live_cells]
  cells = [_compare_cell(path, out and out / path.name) for path in folders]
  # One cell has nothing to race against.
  if len(cells) == 1:
    return
  # The lowest loss that every live cell reached, so that no time is infinite.
  loss, stem = comparison.common_loss(cells), (out or workdir) / "compare"
  rows = comparison.race(cells, loss)
  with storage.naming_folder(stem.parent):
    storage.write_csv(stem.with_suffix(".csv"), rows)
    print(f"\n{comparison.race_table(rows, loss)}")
    _draw(comparison_figure.draw_losses, cells, loss, stem)
  flags.add_json(loss=loss, race=rows)


def _check_live() -> None:
  """Raises ValueError for a config without a live run, before training it."""
  engine = _FLAGS["engine"].value
  resolved = flags.load_config("configs/straggler_digits.py", engine)
  if not any(run.engine in flags.LIVE for run in resolved.runs.values()):
    raise ValueError(
      "no run of this config is live, and only live runs are compared with"
      f" their simulation: add --engine={' or --engine='.join(flags.LIVE)}"
    )


def main(*folders: str) -> None:
  """Compares several folders, one folder, or a config that it first trains."""
  config = flags.has_config()
  first_folder = folders[0] if folders else None
  if first_folder is not None and config:
    raise ValueError(f"{first_folder} has its own config: drop --config")
  if first_folder is None and not config:
    raise ValueError(
      "no run is named: write asgd compare WORKDIR/cells/NAME, a folder that"
      " asgd train made, or --config=FILE to train one"
    )
  out = Path(_FLAGS["out"].value) if _FLAGS["out"].value else None
  if out and any(path.is_file() for path in (out, *out.parents)):
    raise ValueError(f"--out={out} is a file, or is below one; choose a folder")
  # [1] Several folders: nothing is trained.
  if len(folders) > 1:
    paths = list(map(Path, folders))
    out = out or flags.next_free_folder(Path("runs"), "compare")
    print(overlay.write(paths, out, flags.ENGINES))
    flags.add_json(out=str(out), folders=list(folders))
    return
  # [2] A config: train it first, in a new folder.
  if config:
    _check_live()
    # Train by the command itself, which handles signals and exit statuses.
    workdir, command = flags.training_command("compare")
    status = subprocess.run(command).returncode
    if status in (flags.USAGE_ERROR, flags.INCOMPLETE):
      sys.exit(status)  # asgd train has printed the reason
    if status:
      raise flags.Failed(f"compare: asgd train ended with status {status}")
  # [3] The folder of an experiment or of a cell.
  else:
    workdir = Path(folders[0])
  # The folder of another user can be compared, but not written to.
  if out is None and not safe_files.is_writable(workdir):
    out = flags.next_free_folder(Path("runs"), "compare")
  if (workdir / "cells").is_dir():
    _compare_all(workdir, out)
  else:
    _compare_cell(workdir, out)


if __name__ == "__main__":
  flags.run(main, "compare")
