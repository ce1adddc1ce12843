"""What a synchronous experiment says at its end: lines, table and figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch import figures, outputs, report, sync_experiment

Row = Mapping[str, Any]
_PANELS = (("updates", "update"), ("seconds of training", "seconds"))
_CURVES = ("test_loss", "train_loss")


def lines(result: Row) -> list[str]:
  """One cell in one line, and a warning if it diverged."""
  out = [
    f"{result['cell']}: test loss {result['test_loss']:.3f}, accuracy"
    f" {100 * result['test_accuracy']:.1f} %, {result['seconds']:.1f} s,"
    f" {result['examples_per_second']:.4g} examples a second, state"
    f" {result['state_bytes'] / 2**20:.3g} MiB on each device"
  ]
  if result["skipped"]:
    out.append(
      f"{result['cell']}: {result['skipped']} updates were skipped, as their"
      " gradient was not finite with the loss scale"
    )
  if result["diverged"]:
    out.append(
      f"warning: {result['cell']}: the loss diverged. Try a lower"
      " --config.learning_rate, a longer warm-up, or --config.clip_norm"
    )
  return out


# Header, key, scale and form.
_COLUMNS = (
  ("train loss", "train_loss", 1, "{:.4f}"),
  ("test loss", "test_loss", 1, "{:.4f}"),
  ("accuracy %", "test_accuracy", 100, "{:.1f}"),
  ("seconds", "seconds", 1, "{:.1f}"),
  ("ms/update", "seconds_per_update", 1000, "{:.1f}"),
  ("examples/s", "examples_per_second", 1, "{:.4g}"),
  ("MiB/device", "state_bytes", 2**-20, "{:.3g}"),
)


def tabulate(results: Sequence[Row]) -> tuple[list[dict[str, Any]], str]:
  """Returns (CSV rows, text table): a row for each seed, and the mean of all
  if there are several."""
  csv_rows, text_rows = [], []
  for result in results:
    csv_row = {
      key: value
      for key, value in result.items()
      if not isinstance(value, Mapping)
    }
    csv_rows.append(csv_row)
    cells = [f"seed {result['seed']}"]
    for _, key, scale, form in _COLUMNS:
      known = outputs.is_known(result[key])
      cells.append(form.format(scale * result[key]) if known else "-")
    text_rows.append([*cells, "diverged" if result["diverged"] else ""])
  if len(results) > 1:
    cells = ["mean"]
    for _, key, scale, form in _COLUMNS:
      mean, _ = figures.mean_and_std(results, key)
      cells.append(form.format(scale * mean) if np.isfinite(mean) else "-")
    text_rows.append([*cells, ""])
  header = ["run", *(column[0] for column in _COLUMNS), ""]
  return csv_rows, outputs.format_table(header, text_rows)


def numbers(rows: Sequence[Row]) -> list[dict[str, Any]]:
  """Reduces evaluations to the points of the figure, means over seeds.

  Args:
    rows: as in metrics.jsonl.

  Returns:
    Rows of panel, curve, x, mean, std, seeds.
  """
  points = []
  for panel, key in _PANELS:
    for curve in _CURVES:
      for group in figures.group_by(rows, "update").values():
        x, _ = figures.mean_and_std(group, key)
        mean, std = figures.mean_and_std(group, curve)
        point = {"panel": panel, "curve": curve, "x": x, "mean": mean}
        points.append({**point, "std": std, "seeds": len(group)})
  return points


def draw(points: Sequence[Row], stem: Path, heading: str) -> None:
  """Draws the points of `numbers` as STEM.png and STEM.svg, side by side.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(
    1, len(_PANELS), figsize=(11, 4.5), layout="constrained", sharey=True
  )
  for axis, (panel, _) in zip(axes, _PANELS, strict=True):
    for curve, marker in zip(_CURVES, "os", strict=True):
      chosen = [
        point
        for point in points
        if (point["panel"], point["curve"]) == (panel, curve)
        and np.isfinite(point["mean"])
      ]
      x, mean = (np.array([p[k] for p in chosen], float) for k in ("x", "mean"))
      std = np.nan_to_num([p["std"] for p in chosen])
      label = curve.replace("_", " ")
      (line,) = axis.plot(x, mean, marker=marker, ms=4, label=label)
      shade = dict(color=line.get_color(), alpha=0.15)
      axis.fill_between(x, mean - std, mean + std, **shade)
    axis.set_xlabel(panel)
    axis.grid(alpha=0.3)
  axes[0].set_ylabel("loss")
  axes[0].legend()
  figure.suptitle(heading.replace("$", r"\$"), fontsize=10)
  for suffix in (".png", ".svg"):
    figure.savefig(stem.with_suffix(suffix), dpi=110)
  plt.close(figure)


def write(
  folder: Path,
  exp: sync_experiment.Experiment,
  results: Sequence[Row],
  rows: Sequence[Row],
) -> None:
  """Writes what is made from all cells, and says where everything is."""
  outputs.write_atomically(folder / "metrics.jsonl", outputs.to_lines(rows))
  csv_rows, table = tabulate(results)
  outputs.write_csv(folder / "results.csv", csv_rows)
  config = exp.config
  heading = (
    f"{exp.dataset.name}, {config['model']['name']}, {exp.title},"
    f" {config['updates']} updates of {config['batch_size']}"
  )
  text = f"{heading}\ndata: {exp.dataset.source}\n\n{table}"
  outputs.write_atomically(folder / "table.txt", text)
  points = numbers(rows)
  outputs.write_csv(folder / "figure.csv", points)
  report.conclude(
    folder, text, lambda: draw(points, folder / "figure", heading)
  )
