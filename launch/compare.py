"""Predicted and measured: live cells beside their simulations, in one picture.

  asgd compare WORKDIR/cells/NAME

measures how long the jobs of a live cell took, plays the same protocol with
these times, trains the same cell in simulation, and draws both: how stale
messages were, how many came in a second, and the loss against time. In one
simulation the jobs of a worker take what they took, one after the other; in the
other, times are drawn from those of each worker, as if workers were independent
(on shared cores they are not). The time of a job includes that of the server
and of waiting for it: it holds for this number of workers on machines as busy.

A cell of peers, tables or Sandblaster, where no server decides the order, is
compared with its replay; the first record that differs is named.

With WORKDIR alone, all its live cells are compared, and with each other: when
each of them reached the same loss. With --durations_of=WORKDIR/cells/OTHER,
times are those of another cell. And

  asgd compare --config=configs/straggler_digits.py --engine=ray

trains a config before, as asgd train does with the same flags.

  asgd compare WORKDIR OTHER_WORKDIR ...

lays experiments over each other, whatever their engines: one figure, one table
and one report.html, in --out or the next of runs/compare-001, -002, ... It
imports no code that their configs name. The simulations of the other forms run
that code, and ask for --trust if another user made the folder; what they make
of a folder that can only be read is in runs/compare-001, -002, ..., too.
"""

import subprocess
import sys
from pathlib import Path

from asgd import safe_files
from asgd.experiment import comparison, folder, overlay, storage

from . import flags

_CONFIG = flags.define_config()
_TRAINING = flags.define(flags.TRAINING)
_F = flags.define(
  {
    "durations_of": (str, None, "Take the times of this WORKDIR/cells/NAME."),
    "trust": flags.TRUST,
    "out": (str, None, "Folder to write to. Default: that of the cell."),
  }
)
_MOST = 24  # experiments in one figure


def _draw(draw, *what):
  """Draws; says where the picture is, or what is missing."""
  stem = what[-1]
  try:
    draw(*what)
    print(f"picture  {stem}.png, .svg, .pdf; its numbers {stem}.csv")
  except ImportError:
    print(f"picture  not drawn: pip install 'asgd[viz]'; {stem}.csv")


def _compare_cell(place, out):
  """Says what came of a cell and writes it down, by default in its folder."""
  out, other = out or place, _F["durations_of"].value
  both = comparison.compare(
    place,
    durations_of=Path(other) if other else None,
    data_dir=_TRAINING["data_dir"].value,
    trust=_F["trust"].value,
  )
  stem, rows = out / "compare", comparison.quantities(both)
  with storage.naming_folder(out):
    safe_files.make_folder(out.resolve())
    storage.write_csv(out / "compare.csv", comparison.points(both))
    storage.write_csv(out / "compare-table.csv", rows)
    storage.write_csv(out / "durations.csv", both.jobs)
    print(comparison.describe(both, rows, other))
    _draw(comparison.draw, both, stem)
  return both


def _compare_all(workdir, out):
  """Compares all live cells of an experiment, and them with each other."""
  results = folder.read_results(workdir)
  for fault in folder.faults(workdir):
    print(f"warning: {fault}; the cell is left out")
  live = [row["cell"] for row in results if row["engine"] in flags.LIVE]
  if not live:
    raise ValueError(f"{workdir} holds no finished live cell to be compared")
  places = [workdir / "cells" / name for name in live]
  cells = [_compare_cell(place, out and out / place.name) for place in places]
  if len(cells) == 1:
    return
  loss, stem = comparison.common_loss(cells), (out or workdir) / "compare"
  rows = comparison.race(cells, loss)
  with storage.naming_folder(stem.parent):
    storage.write_csv(stem.with_suffix(".csv"), rows)
    print(f"\n{comparison.race_table(rows, loss)}")
    _draw(comparison.draw_race, cells, loss, stem)


def _check_live():
  """Refuses a config that would be trained for nothing."""
  engine = _TRAINING["engine"].value
  resolved = flags.load_config("configs/straggler_digits.py", engine)
  if not any(run.engine in flags.LIVE for run in resolved.runs.values()):
    raise ValueError(
      "no run of this config is live, and none can be compared with its"
      f" simulation: add --engine={' or --engine='.join(flags.LIVE)}"
    )


def main(*places: str) -> None:
  """Compares the cell or the experiment that is named, or trains one before;
  several experiments with each other."""
  config, place = flags.has_config(), places[0] if places else None
  if place is not None and config:
    raise ValueError(f"{place} brings its own config; drop --config")
  if place is None and not config:
    raise ValueError(
      "which run? write asgd compare WORKDIR/cells/NAME, a folder"
      " that asgd train made, or --config=FILE to train one"
    )
  out = Path(_F["out"].value) if _F["out"].value else None
  if out and any(path.is_file() for path in (out, *out.parents)):
    raise ValueError(f"--out={out} is, or is in, a file; choose a folder")
  if len(places) > 1:
    paths = list(map(Path, places))
    out = out or flags.next_free(Path("runs"), "compare")
    print(overlay.write(paths, out, flags.ENGINES))
    return
  if config:
    _check_live()
    where, command = flags.training_command("compare")
    status = subprocess.run(command).returncode
    if status in (flags.USAGE_ERROR, flags.INCOMPLETE):
      sys.exit(status)  # it has said why
    if status:
      raise flags.Failed("compare: asgd train did not end well")
  else:
    where = Path(place)
  if out is None and not safe_files.is_writable(where):
    out = flags.next_free(Path("runs"), "compare")
  if (where / "cells").is_dir():
    _compare_all(where, out)
  else:
    _compare_cell(where, out)


if __name__ == "__main__":
  flags.run(main, words=_MOST)
