"""What a pipeline experiment says at its end: lines, table and figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch import figures, outputs, pipeline_experiment, report

Row = Mapping[str, Any]
_PANELS = (
  ("examples", "examples"),
  ("updates", "updates of a stage"),
  ("seconds", "seconds of training"),
)


def lines(result: Row) -> list[str]:
  """One cell in one line, and a warning if it diverged."""
  stale = " ".join(map(str, result["staleness"]))
  out = [
    f"{result['cell']}: test loss {result['test_loss']:.3f}, accuracy"
    f" {100 * result['test_accuracy']:.1f} %, {result['seconds']:.1f} s,"
    f" staleness of stages {stale}, versions"
    f" {' '.join(map(str, result['weight_versions']))}, activations"
    f" {max(result['peak_bytes']) / 2**20:.3g} MiB, bubble"
    f" {_percent(result['bubble_measured'])} (predicted"
    f" {_percent(result['bubble_predicted'])})"
  ]
  if result["diverged"]:
    out.append(
      f"warning: {result['cell']}: the loss diverged. Try a lower learning rate"
      f" (--config.runs.{result['label']}.learning_rate), a longer warm-up,"
      " --config.clip_norm, or a cure such as gap_aware or predict"
    )
  return out


def _percent(share):
  """Of a run that has ended before it was resumed nothing was measured."""
  return f"{100 * share:.0f} %" if outputs.is_known(share) else "unknown"


# Header, key, scale and digits; None: as it is, of the first seed.
_COLUMNS = (
  ("run", "algorithm", None),
  ("schedule", "schedule", None),
  ("weights", "weights", None),
  ("recompute", "recompute", None),
  ("every", "every", None),
  ("rate", "learning_rate", None),
  ("test loss", "test_loss", (1, "{:.3f}")),
  ("accuracy %", "test_accuracy", (100, "{:.1f}")),
  ("measure %", "test_measure", (100, "{:.1f}")),  # of tasks that have one
  ("train loss", "train_loss", (1, "{:.3f}")),
  ("seconds", "seconds", (1, "{:.1f}")),
  ("staleness", "staleness", None),
  ("versions", "weight_versions", None),
  ("peak MiB", "peak_bytes", (2**-20, "{:.3g}")),
  ("bubble %", "bubble_measured", (100, "{:.0f}")),
  ("predicted", "bubble_predicted", (100, "{:.0f}")),
)


def tabulate(results: Sequence[Row]) -> tuple[list[dict[str, Any]], str]:
  """Returns (CSV rows, text table): one row for each run, means over seeds."""
  results = [{**row, "peak_bytes": max(row["peak_bytes"])} for row in results]
  # JSON has null for NaN.
  held = [row.get("test_measure") for row in results]
  measured = any(value is not None and np.isfinite(value) for value in held)
  columns = [
    column
    for column in _COLUMNS
    if measured or column[1] != "test_measure"
  ]
  csv_rows, text_rows = [], []
  for group in figures.group_by(results, "algorithm").values():
    csv_row, cells = {"seeds": len(group)}, []
    for _, key, form in columns:
      if form is None:
        value = group[0][key]
        if isinstance(value, list):
          value = " ".join(map(str, value))
        csv_row[key] = value
        if isinstance(value, bool):
          value = "yes" if value else "no"
        short = isinstance(value, float)
        cells.append(f"{value:.3g}" if short else str(value))
        continue
      mean, std = figures.mean_and_std(group, key)
      csv_row[key], csv_row[f"{key}_std"] = mean, std
      scale, pattern = form
      cells.append(pattern.format(scale * mean) if np.isfinite(mean) else "-")
    for key in ("stages", "devices", "updates", "examples"):
      csv_row[key] = group[0][key]
    diverged = sum(row["diverged"] for row in group)
    csv_row["diverged"] = diverged
    cells.append(f"{diverged} of {len(group)} diverged" if diverged else "")
    csv_rows.append({"algorithm": csv_row.pop("algorithm"), **csv_row})
    text_rows.append(cells)
  header = [name for name, _, _ in columns] + [""]
  return csv_rows, outputs.format_table(header, text_rows)


def numbers(curves: Sequence[Row]) -> list[dict[str, Any]]:
  """Reduces evaluations to the points of the figure, means over seeds.

  Args:
    curves: rows as in metrics.jsonl.

  Returns:
    Rows of panel, algorithm, x, mean, std, seeds: the test loss against
    examples, updates and seconds.
  """
  points = []
  groups = figures.group_by(curves, "algorithm", "message")
  for panel, _ in _PANELS:
    key = "update" if panel == "updates" else panel
    for (title, _), rows in groups.items():
      x, _ = figures.mean_and_std(rows, key)
      mean, std = figures.mean_and_std(rows, "test_loss")
      point = {"panel": panel, "algorithm": title, "x": x, "mean": mean}
      points.append({**point, "std": std, "seeds": len(rows)})
  return points


def draw(points: Sequence[Row], stem: Path, heading: str) -> None:
  """Draws the points of `numbers` as STEM.png and STEM.svg, side by side.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  titles = list(dict.fromkeys(point["algorithm"] for point in points))
  figure, axes = plt.subplots(
    1, 3, figsize=(16, 5.5), layout="constrained", sharey=True
  )
  for axis, (panel, label) in zip(axes, _PANELS, strict=True):
    for i, title in enumerate(titles):
      rows = [
        p
        for p in points
        if p["panel"] == panel
        and p["algorithm"] == title
        and np.isfinite(p["mean"])
      ]
      x, mean = (np.array([p[k] for p in rows], float) for k in ("x", "mean"))
      std = np.nan_to_num([p["std"] for p in rows])
      color = plt.get_cmap("tab20")((2 * i + 2 * i // 20) % 20)
      axis.plot(
        *(x, mean),
        color=color,
        marker="osv^D*XPhd"[i % 10],
        ls=("-", "--")[i // 10 % 2],
        ms=4,
        label=title.replace("$", r"\$"),
      )
      axis.fill_between(x, mean - std, mean + std, color=color, alpha=0.15)
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)
    if panel == "updates":
      axis.set_xscale("log")
  drawn = [p["mean"] for p in points if np.isfinite(p["mean"])]
  if drawn and min(drawn) > 0:  # a run that diverged would hide the others
    first = [
      next(p["mean"] for p in points if p["algorithm"] == t) for t in titles
    ]
    first = [value for value in first if np.isfinite(value)]
    top = 1.1 * max(first, default=max(drawn))
    axes[0].set_ylim(0.95 * min(drawn), min(top, 1.05 * max(drawn)))
  axes[0].set_ylabel("test loss")
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=min(len(labels), 5)
  )
  figure.suptitle(heading.replace("$", r"\$"))
  for suffix in (".png", ".svg"):
    figure.savefig(stem.with_suffix(suffix), dpi=110)
  plt.close(figure)


def write(
  folder: Path,
  exp: pipeline_experiment.Experiment,
  results: Sequence[Row],
  rows: Sequence[Row],
) -> None:
  """Writes what is made from all cells, and says where everything is."""
  outputs.write_atomically(folder / "metrics.jsonl", outputs.to_lines(rows))
  csv_rows, table = tabulate(results)
  outputs.write_csv(folder / "results.csv", csv_rows)
  config = exp.config
  count = config["updates"] * config["microbatches"]
  heading = (
    f"{exp.dataset.name}, {config['model']['name']}, {config['stages']} stages,"
    f" {count} microbatches of {config['microbatch_size']},"
    f" {len(config['seeds'])} seeds"
  )
  text = f"{heading}\ndata: {exp.dataset.source}\n\n{table}"
  outputs.write_atomically(folder / "table.txt", text)
  points = numbers(rows)
  outputs.write_csv(folder / "figure.csv", points)
  report.conclude(
    folder, text, lambda: draw(points, folder / "figure", heading)
  )
