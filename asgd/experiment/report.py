"""Reports of an experiment: a line for each cell, a table, a figure, a page."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd import output, safe_files, text_table
from asgd.experiment import (
  cell_log,
  figure,
  folder,
  problem,
  protocol,
  schema,
  storage,
)
from asgd.experiment.cells import Experiment
from asgd.experiment.engines import Column, networks, traffic
from asgd.experiment.figure import Row, Rows
from asgd.experiment.schema import Engines
from asgd.experiment.signals import Stopped
from asgd.pages import page, panels, run_files
from asgd.parallel import processes

_MAX_PANELS = 32  # cells with panels on a page
_COMPENSATING_RECIPES = ("gap_aware", "dana_zero", "dana_slim", "dana_dc")

# Columns of every table; columns of the engine follow.
_FIRST_COLUMNS = (
  Column("run", "algorithm"),
  Column("workers", "workers"),
  Column("accuracy %", "test_accuracy", 100, "{:.1f}"),
  Column("loss", "test_loss"),
)
# Columns that follow where runs of several engines are compared.
_COMPARISON_COLUMNS = (
  Column("engine", "engine"),
  Column("updates", "updates"),
  Column("time", "simulated_time"),
  Column("seconds", "seconds", 1, "{:.1f}"),
  Column("staleness", "staleness_mean"),
  Column("gap", "gap_mean"),
)
# (key, columns that are shown if a result has the key).
_COLUMNS_BY_KEY = (
  ("codec", traffic.COLUMNS),
  ("codec_down", traffic.COLUMNS),
  ("link_utilisation", networks.COLUMNS),
)
_MISSED_COLUMN = Column("missed", "missed", form="{:.0f}")


def quality_text(accuracy: Any, measure: Any, loss: Any) -> str:
  """Returns the accuracy, else the task's measure, else the loss, as text that
  ends with a comma; "" if none is known."""
  if storage.is_finite(accuracy):
    return f"accuracy {100 * accuracy:.1f} %, "
  if storage.is_finite(measure):
    return f"measure {100 * measure:.1f} %, "
  return f"test loss {loss:.4g}, " if storage.is_finite(loss) else ""


def result_lines(result: Row, describe: Callable[[Row], str]) -> list[str]:
  """Returns a line on a finished cell, and warnings with their remedies.
  `describe`: the engine's function, result -> text."""
  cell, keys = result["cell"], ("accuracy", "measure", "loss")
  score = quality_text(*(result.get(f"test_{key}") for key in keys))
  # Further columns are those that the problem, or a caller's `evaluate`, names.
  for key, value in result.items():
    name = key.removeprefix("test_")
    if name != key and name not in keys and storage.is_finite(value):
      score += f"{name} {value:.4g}, "
  lines = [f"{cell}: {score}{describe(result)}"]
  limit, product = result["rate_x_sharpness_limit"], result["sustained"]
  remedy = "fewer workers or a longer warm-up"
  if result["recipe"] not in _COMPENSATING_RECIPES:
    remedy += ", or a cure such as dana_zero or gap_aware"
  # 1.25: the limit is known up to a step of its grid. Unknown values are NaN.
  is_measured = storage.is_finite(product) and storage.is_finite(limit)
  if is_measured and product > 1.25 * limit:
    lower_rate = result["learning_rate"] * limit / product
    lines.append(
      f"warning: {cell}: learning rate x sharpness stayed at {product:.2g} or"
      f" more; at a mean staleness of {result['staleness_mean']:.1f} this"
      f" algorithm is stable below {limit:.2g} on a quadratic. If the loss"
      f" suffers, try a learning rate of {lower_rate:.2g}, {remedy}"
    )
  if result["diverged"]:
    remedy = f"Try a lower learning rate, {remedy}"
    lines.append(f"warning: {cell}: the loss diverged. {remedy}")
  return lines


def _cell_text(column: Column, group: Rows) -> str:
  """Returns a cell of the table: the mean over seeds, their largest count, or
  their common value."""
  # JSON has null for NaN: a seed may have no value.
  values = [row[column.key] for row in group if row.get(column.key) is not None]
  match group[0].get(column.key):
    case list() as items:
      return " ".join(map(str, items))
    case bool() as flag:
      return "yes" if flag else "no"
    case str():
      return max(values)
    case int():  # a count, of which the largest is shown, as in results.csv
      largest, form = column.scale * max(values), column.form
      return str(largest) if column.scale == 1 else form.format(largest)
  mean, std = figure.mean_and_std(group, column.key)
  if not np.isfinite(mean):
    return "-"
  text = column.form.format(column.scale * mean)
  # Other columns have no deviation in text: results.csv has it.
  if column.scale == 100 and np.isfinite(std) and "accuracy" in column.key:
    text += f" ± {column.scale * std:.1f}"
  return text


_NOT_IN_CSV = {"cell", "seed", "params_sha256", "label"}


def _csv_row(group: Rows) -> dict[str, Any]:
  """Returns all columns of results; floats as mean and deviation over seeds."""
  first_row = group[0]
  row = {key: first_row[key] for key in ("algorithm", "workers")}
  row["seeds"] = len(group)
  # By the type of the first seed's value: all seeds of a run have the same.
  for key in dict.fromkeys(itertools.chain(*group)):
    if key in _NOT_IN_CSV or key in row:
      continue
    match first_row.get(key):
      case _ if key == "diverged":
        row[key] = sum(bool(result[key]) for result in group)
      case dict():  # such as counts by kind of process: no column fits them
        continue
      case list() as items:
        row[key] = " ".join(map(str, items))
      case float() | None:  # None: NaN in this seed
        row[key], row[f"{key}_std"] = figure.mean_and_std(group, key)
      case bool() | str() as value:
        row[key] = value
      case int():
        row[key] = max(result.get(key) or 0 for result in group)
  return row


def table_columns(results: Rows, engines: Engines) -> list[Column]:
  """Returns the columns that a table of these results shows."""
  # [1] Run, workers and the measures of quality that the task has.
  columns = list(_FIRST_COLUMNS)
  if not figure.has_values(results, "test_accuracy"):
    columns = [column for column in columns if column.key != "test_accuracy"]
    if not figure.has_values(results, "test_loss"):
      columns[-1] = Column("mean train loss", "train_loss")
  if any(storage.is_finite(row.get("test_measure")) for row in results):
    columns.insert(-1, Column("measure %", "test_measure", 100, "{:.1f}"))
  # [2] The columns of the engine or, for several engines, of a comparison. A
  # column without a value in any run is left out.
  kinds = {tuple(engines[row["engine"]].columns) for row in results}
  engine_columns = (
    kinds.pop() if len(kinds) == 1 else _COMPARISON_COLUMNS if kinds else ()
  )
  columns += [
    column
    for column in engine_columns
    if any(_cell_text(column, [row]) != "-" for row in results)
  ]
  # [3] The columns of protocols, codecs and networks that some run has.
  for candidate in protocol.PROTOCOLS.values():
    if candidate.column and any(candidate.column in row for row in results):
      columns += candidate.columns
  for key, key_columns in _COLUMNS_BY_KEY:
    if any(key in row for row in results):
      columns += key_columns
  # [4] Messages that are missing or were dropped, if there are any.
  if any(row.get("missed") for row in results):
    columns.append(_MISSED_COLUMN)
  accepted = [row.get("accepted") for row in results]
  if any(share is not None and share < 1 for share in accepted):
    columns.append(Column("accepted %", "accepted", 100, "{:.1f}"))
  # A key has one column: the last one, at the position of the first.
  return list({column.key: column for column in columns}.values())


Table = list[dict[str, Any]]  # rows


def tabulate(results: Rows, engines: Engines) -> tuple[Table, str]:
  """Returns (CSV rows, text table), with a row for each run and number of
  workers."""
  csv_rows, header, text_rows = table_rows(results, engines)
  return csv_rows, text_table.format_table(header, text_rows)


def table_rows(
  results: Rows, engines: Engines
) -> tuple[Table, list[str], list[list[str]]]:
  """Returns (CSV rows, header and rows of the table), as `tabulate`."""
  columns = table_columns(results, engines)
  csv_rows, text_rows = [], []
  for group in figure.group_by(results, "workers", "algorithm").values():
    csv_rows.append(_csv_row(group))
    diverged = sum(bool(row["diverged"]) for row in group)
    note = f"{diverged} of {len(group)}" if diverged else ""
    text_rows.append([*(_cell_text(column, group) for column in columns), note])
  # The last column has a header if it has a note.
  header = [column.header for column in columns]
  header.append("diverged" if any(note for *_, note in text_rows) else "")
  return csv_rows, header, text_rows


def write_tables(
  out: Path,
  heading: str,
  text: str,
  csv_rows: Rows,
  results: Rows,
  curves: Rows,
) -> str:
  """Writes the text table, results.csv, the figure and its numbers.

  Args:
    out: the folder.
    heading: the heading of the figure.
    text: the text of table.txt.
    csv_rows: the rows of results.csv.
    results: the results of the cells.
    curves: the rows of their evaluations.

  Returns:
    The paths of the figure, or the reason why it was not drawn.
  """
  stem, points = out / "figure", figure.figure_points(results, curves)
  numbers = stem.with_suffix(".csv")
  safe_files.write(out / "table.txt", text)
  storage.write_csv(out / "results.csv", csv_rows)
  storage.write_csv(numbers, points)
  try:
    figure.draw(points, results, stem, heading)
  except ImportError:
    return f"not drawn: pip install 'asgd[viz]'; {numbers}"
  except Exception as error:
    # The runs are finished: an error of drawing must not hide their results.
    return f"not drawn: {error!r}; {numbers}"
  return f"{stem}.png, .svg, .pdf; its numbers {numbers}"


def warnings(results: Rows) -> list[str]:
  """Returns the warnings of finished cells. For each run and number of workers
  they are the warnings of the first seed that has some."""
  texts = []
  for group in figure.group_by(results, "label", "workers").values():
    warnings_by_seed = (result_lines(row, lambda _: "")[1:] for row in group)
    texts += next(filter(None, warnings_by_seed), [])
  return [text.removeprefix("warning: ") for text in texts]


def write_page(
  workdir: Path,
  results: Rows,
  csv_rows: Rows,
  engines: Engines,
  *,
  title: str,
  lead: str,
  notes: Sequence[str] = (),
) -> Path:
  """Writes report.html of a folder.

  Args:
    workdir: the folder, with config.json.
    results: the results of the cells.
    csv_rows: from `tabulate`.
    engines: the engines, by name.
    title: the title of the page.
    lead: a line below the title.
    notes: the lines that were printed in training.

  Returns:
    The path of the page.
  """
  # [1] The config, with the keys that may change, and facts on the command.
  identity = folder.read_identity(workdir) or {"config": {}, "free": {}}
  facts = dict(identity["free"])
  config = {**identity["config"]}
  config |= {key: facts.pop(key) for key in schema.FREE_KEYS if key in facts}
  modules = facts.pop("modules", {})
  # `lead` shows the source of the data, and the fact "machine" the cores.
  facts = {k: v for k, v in facts.items() if k not in ("cpus", "data source")}
  for name, module in modules.items():
    facts[f"module {name}"] = f"{module['file']}, SHA-256 {module['sha256']}"
  # [2] Checkpoints that were moved aside (`Checkpoints.restore`).
  damaged = [
    f"{path.relative_to(workdir)} cannot be used: damaged, or of another model"
    for path in sorted(workdir.glob("cells/*/damaged-*"))
  ]
  notes = [note.removeprefix("warning: ") for note in notes]
  defaults = {
    key: schema.default_of(node)
    for key, node in schema.sections(engines).items()
  }
  pictures = [workdir / "figure.svg", workdir / "compare.svg"]
  pictures += sorted(workdir.glob("cells/*/compare.svg"))
  columns = [*table_columns(results, engines), Column("diverged", "diverged")]
  # [3] Panels of the first seed of each run and number of workers.
  groups = figure.group_by(results, "label", "workers").values()
  first_seeds = [workdir / "cells" / group[0]["cell"] for group in groups]

  def files(directory: Path) -> list[str]:
    """Returns the paths of a folder's files, relative to the page."""
    paths = sorted(p for p in directory.iterdir() if p.is_file())
    names = (p.relative_to(workdir).as_posix() for p in paths)
    hidden = ".lock", "report.html"
    return [n for n in names if n.rpartition("/")[2] not in hidden]

  content = page.render(
    title,
    lead,
    warnings=page.merge_warnings([*notes, *warnings(results), *damaged]),
    pictures=page.pictures(pictures),
    results=page.results(csv_rows, columns),
    panels=[
      panels.cell_panels(run_files.read_cell(path))
      for path in first_seeds[:_MAX_PANELS]
    ],
    left_out=len(results) - len(first_seeds[:_MAX_PANELS]),
    config=page.config(config, defaults),
    facts=page.facts(facts),
    files=files(workdir),
    cells=[files(workdir / "cells" / row["cell"]) for row in results],
  )
  path = workdir / "report.html"
  safe_files.write(path, content)
  return path


@contextlib.contextmanager
def report_at_end(
  workdir: Path | None, experiment: Experiment, bar: Any
) -> Iterator[None]:
  """Writes and prints the report when a block that trains ends, is stopped or
  is incomplete. All processes call it; only process 0 has a folder."""

  def print_report() -> None:
    # All processes end together, because JAX limits the time for which a
    # process that ends waits for the others.
    processes.fail_together(
      lambda: workdir and print(write(workdir, experiment, bar.notes), end="")
    )

  try:
    yield
  except (Stopped, folder.Incomplete):
    print_report()
    raise
  print_report()


def write(
  workdir: Path, experiment: Experiment, notes: Sequence[str] = ()
) -> str:
  """Writes table, figure and page of the finished cells.

  Args:
    workdir: folder of the experiment. If it is read-only, nothing is written.
    experiment: the experiment of the folder.
    notes: the lines that were printed in training.

  Returns:
    The table and the paths as text; "" if no cell is finished.
  """
  if not safe_files.is_writable(workdir):
    return _write(workdir, experiment, notes)
  # Commands that share a folder may end at the same time. They write one after
  # the other, so the last one finds the cells of all.
  with storage.locked_folder(workdir):
    return _write(workdir, experiment, notes)


def _write(
  workdir: Path, experiment: Experiment, notes: Sequence[str]
) -> str:
  """See `write`; the caller holds the lock of a folder that is writable."""
  results = folder.read_results(workdir)
  if not results:
    return ""
  # [1] The rows of all finished cells, also of earlier commands.
  cell_folders = [workdir / "cells" / row["cell"] for row in results]
  rows = [row for path in cell_folders for row in folder.read_rows(path)]
  csv_rows, header, text_rows = table_rows(results, experiment.engines)
  table = text_table.format_table(header, text_rows)
  shown = output.table(header, text_rows, f"{workdir}/results.csv")
  # [2] The title, and how many of this command's cells are finished.
  config, dataset = experiment.config, experiment.dataset
  budget = f"{config['epochs']:g} epochs"
  if config["examples"] is not None:
    budget = f"{config['examples']:,} examples"
  seeds = len({row["seed"] for row in results})
  heading = problem.title(config, dataset)
  heading += f", {budget}, {seeds} seed{'s' * (seeds != 1)}"
  cells = {cell.name for cell in experiment.cells}
  n_finished = len(cells & {row["cell"] for row in results})
  is_complete = n_finished == len(cells)
  so_far = "" if is_complete else f"{n_finished} of {len(cells)} cells"
  title = f"{heading}{so_far and ', ' + so_far}\ndata: {dataset.source}"
  text = f"{title}\n\n{table}"
  if so_far:
    note = f"so far {so_far}: means are over the seeds that are finished"
    notes, text = [note, *notes], f"{text}{note}\n"
    shown += f"{note}\n"
  if not safe_files.is_writable(workdir):
    return (
      f"\n{title}\n\n{shown}\nnothing is written: {workdir} is read-only; its"
      f" report is {workdir}/report.html\n"
    )
  # [3] The files. The page comes last, because it shows the figure.
  safe_files.write(workdir / "metrics.jsonl", storage.to_lines(rows))
  figure_line = write_tables(workdir, title, text, csv_rows, results, rows)
  html = write_page(
    workdir,
    results,
    csv_rows,
    experiment.engines,
    title=heading,
    lead=f"{n_finished} of {len(cells)} cells finished; data: {dataset.source}",
    notes=notes,
  )
  cell_log.join(workdir, experiment, results)
  return (
    f"\n{title}\n\n{shown}\n"
    f"report       {html}\n"
    f"figure       {figure_line}\n"
    f"table        {workdir}/table.txt, {workdir}/results.csv\n"
    f"metrics      {workdir}/metrics.jsonl, and {workdir}/tensorboard for"
    " TensorBoard\n"
    f"each cell    {workdir}/cells/ (cell.npz; of live runs params.msgpack,"
    " records.npz, result.json)\n"
    f"config       {workdir}/config.json\n"
  )
