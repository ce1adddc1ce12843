"""Draws the main job's figure from the folder of a finished run.

  python -m launch.train --config=configs/digits.py --workdir=runs/main
  python docs/figures/main_job.py runs/main docs/figures/main_job.svg

Test error and gap against the number of workers: each seed a point, the median
a line, a diverged seed a cross; in the colours of the run's own report.
"""

import statistics
import sys
from pathlib import Path

import matplotlib

from asgd.experiment.figure import styles
from asgd.experiment.folder import read_results

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ONE = "SGD (1 worker)"


def cells(folder: Path) -> dict[str, list[dict]]:
  """Returns the results of all cells by the title of their run."""
  by_title: dict[str, list[dict]] = {}
  for result in read_results(folder):
    by_title.setdefault(result["algorithm"], []).append(result)
  return by_title


def error(row: dict) -> float:
  """The test error of a cell in percent."""
  return 100 * (1 - row["test_accuracy"])


def draw(folder: Path, out: Path) -> None:
  """Draws the figure of a folder, with text that stays text."""
  plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "main job"})
  plt.rcParams.update({"font.size": 10, "font.family": "sans-serif"})
  by_title = cells(folder)
  figure, axes = plt.subplots(1, 2, figsize=(8, 3.1), layout="constrained")
  looks = styles(list(by_title))
  level_look = looks.pop(ONE)
  titles = "(a) Test error (%)", "(b) Mean gap"
  reads = error, lambda row: row["gap_mean"]
  for axis, title, read in zip(axes, titles, reads, strict=True):
    for name, look in looks.items():
      rows = by_title[name]
      counts = sorted({row["workers"] for row in rows})
      medians = []
      for count in counts:
        of_count = [row for row in rows if row["workers"] == count]
        medians.append(statistics.median(map(read, of_count)))
        for row in of_count:
          mark = "x" if row["diverged"] else "."
          axis.plot(count, read(row), mark, color=look["color"], ms=4)
      axis.plot(counts, medians, label=name, lw=1.4, ms=4, **look)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_yscale("log")
    axis.set_xlabel("workers")
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#dddddd", lw=0.6)
  one = by_title[ONE]
  level = statistics.median(map(error, one))
  axes[0].axhline(level, color=level_look["color"], lw=0.8)
  axes[0].annotate(
    *("SGD, one worker", (14, level), (0, -11)),
    textcoords="offset points",
    fontsize=8,
  )
  axes[0].set_yticks([2, 5, 10, 20, 50, 90], map(str, [2, 5, 10, 20, 50, 90]))
  axes[0].minorticks_off()
  axes[0].set_ylim(1.6, 110)
  figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right")
  figure.savefig(out, metadata={"Date": None})
  # Matplotlib ends lines with blanks.
  lines = out.read_text().splitlines()
  out.write_text("\n".join(line.rstrip() for line in lines) + "\n")


if __name__ == "__main__":
  draw(Path(sys.argv[1]), Path(sys.argv[2]))
