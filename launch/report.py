"""What an experiment says at its end: lines, warnings, table and figure."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch import cell_book, experiment, figures, outputs

Row = Mapping[str, Any]  # of a result.json
_CURES = ("gap_aware", "dana_zero", "dana_slim", "dana_dc")


def line(result: Row) -> str:
  """One cell in one line."""
  text = (
    f"{result['cell']}: accuracy {_percent(result['test_accuracy'])}, staleness"
    f" mean {result['staleness_mean']:.1f} max {result['staleness_max']}, gap"
    f" mean {result['gap_mean']:.2g} max {result['gap_max']:.2g}, effective"
    f" learning rate {result['effective_rate']:.2g}"
  )
  if outputs.is_known(result["rate_x_sharpness"]):
    limit = result["rate_x_sharpness_limit"]
    below = f"{limit:.2g}" if outputs.is_known(limit) else "-"
    text += (
      f", rate x sharpness up to {result['rate_x_sharpness']:.2g} (stable below"
      f" {below})"
    )
  if result["accepted"] < 1:
    text += f", {_percent(result['accepted'])} of the messages accepted"
  return text


def _percent(value) -> str:
  return f"{100 * value:.1f} %" if outputs.is_known(value) else "-"


def warnings(result: Row) -> list[str]:
  """What a user should know about a cell, with the remedy."""
  lines = []
  limit, product = result["rate_x_sharpness_limit"], result["sustained"]
  remedy = "fewer workers or a longer warm-up"
  if result["recipe"] not in _CURES:
    remedy += ", or a cure such as dana_zero or gap_aware"
  # A tolerance of one step of the limit's grid.
  if outputs.is_known(product) and product > 1.25 * limit:
    lower = result["learning_rate"] * limit / product
    lines.append(
      f"warning: {result['cell']}: learning rate x sharpness stayed at"
      f" {product:.2g} or more; at a mean staleness of"
      f" {result['staleness_mean']:.1f} this algorithm is stable below"
      f" {limit:.2g} on a quadratic. If the loss suffers, try a learning rate"
      f" of {lower:.2g}, {remedy}"
    )
  if result["diverged"]:
    lines.append(
      f"warning: {result['cell']}: the loss diverged. Try a lower learning"
      f" rate, {remedy}"
    )
  return lines


def _columns(results):
  """Returns (header, key, scale) of each column of the table."""
  time = figures.time_key(results)
  columns = [
    ("algorithm", "algorithm", None),
    ("workers", "workers", None),
    ("accuracy %", "test_accuracy", 100),
    ("loss", "test_loss", 1),
    ("seconds" if time == "seconds" else "time", time, 1),
    ("staleness", "staleness_mean", 1),
    ("max", "staleness_max", None),
    ("gap", "gap_mean", 1),
    ("eff. rate", "effective_rate", 1),
    ("rate x sharp.", "rate_x_sharpness", 1),
    ("stable below", "rate_x_sharpness_limit", 1),
  ]
  if any(row["accepted"] < 1 for row in results):
    columns.append(("accepted %", "accepted", 100))
  return columns


def _tabulate(results):
  """Returns (CSV rows, text table): one row per algorithm and workers."""
  columns = _columns(results)
  groups = figures.group_by(results, "workers", "algorithm")
  csv_rows, text_rows = [], []
  for group in groups.values():
    csv_row = {"algorithm": group[0]["algorithm"]}
    csv_row.update(workers=group[0]["workers"], seeds=len(group))
    cells = []
    for _, key, scale in columns:
      if scale is None:
        csv_row[key] = max(r[key] for r in group)
        cells.append(str(csv_row[key]))
        continue
      mean, std = figures.mean_and_std(group, key)
      csv_row[key], csv_row[f"{key}_std"] = mean, std
      text = f"{scale * mean:.1f}" if scale == 100 else f"{mean:.3g}"
      if scale == 100 and np.isfinite(std):
        text += f" ± {scale * std:.1f}"
      cells.append(text if np.isfinite(mean) else "-")
    mean, std = figures.mean_and_std(group, "sent_accuracy")
    csv_row["sent_accuracy"], csv_row["sent_accuracy_std"] = mean, std
    diverged = sum(r["diverged"] for r in group)
    csv_row["diverged"] = diverged
    cells.append(f"{diverged} of {len(group)} diverged" if diverged else "")
    csv_rows.append(csv_row)
    text_rows.append(cells)
  header = [name for name, _, _ in columns] + [""]
  return csv_rows, outputs.format_table(header, text_rows)


def write(
  folder: Path, exp: experiment.Experiment, results: Sequence[Row]
) -> None:
  """Writes what is made from all cells, and says where everything is."""
  rows = []
  for cell in exp.cells:
    rows += cell_book.read_rows(folder / "cells" / cell.name)
  outputs.write_atomically(folder / "metrics.jsonl", outputs.to_lines(rows))
  csv_rows, table = _tabulate(results)
  outputs.write_csv(folder / "results.csv", csv_rows)
  heading = (
    f"{exp.dataset.name}, {exp.config['model']['name']},"
    f" {exp.config['epochs']:g} epochs, {len(exp.config['seeds'])} seeds\n"
    f"data: {exp.dataset.source}"
  )
  outputs.write_atomically(folder / "table.txt", f"{heading}\n\n{table}")
  points = figures.numbers(results, rows)
  outputs.write_csv(folder / "figure.csv", points)

  def draw():
    time = figures.time_label(results)
    figures.draw(points, folder / "figure", heading, time)

  conclude(folder, f"{heading}\n\n{table}", draw)


def conclude(folder: Path, text: str, draw: Callable[[], None]) -> None:
  """Draws the figure, if that can be, prints the table and says where
  everything is.

  Args:
    folder: of the results.
    text: heading and table.
    draw: writes figure.png and figure.svg.
  """
  figure = f"{folder}/figure.png, .svg; its numbers {folder}/figure.csv"
  try:
    draw()
  except ImportError:
    figure = f"not drawn: pip install -e '.[viz]'; {folder}/figure.csv"
  except Exception as error:  # the runs are done: their numbers come first
    figure = f"not drawn: {error!r}; {folder}/figure.csv"
  print(f"\n{text}")
  print(
    f"figure       {figure}\n"
    f"table        {folder}/table.txt, {folder}/results.csv\n"
    f"metrics      {folder}/metrics.jsonl, and {folder}/tensorboard for"
    " TensorBoard\n"
    f"each run     {folder}/cells/ (params.msgpack, records.npz, result.json)\n"
    f"config       {folder}/config.json"
  )
