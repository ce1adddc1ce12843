"""Trains the experiment of a figure, judges its claims, and writes the results.

The experiment is an ordinary one: its folder is that of `asgd train` with the
same config, and resumes after a kill. Besides the files of every experiment,
the folder then has

  NAME.png, .svg, .pdf   the figure
  NAME.csv               its numbers: a row for each seed of each point
  NAME.json              the verdicts, with each seed's numbers, sizes, versions
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from asgd import names
from asgd.checks import line_of
from asgd.experiment import (
  cell_log,
  cells,
  code,
  folder,
  jobs,
  overrides,
  provenance,
  schema,
  storage,
)
from asgd.experiment.machine import Machine
from asgd.experiment.signals import NoSignals
from asgd.figures import columns, drawing, figure_file, gallery, verdicts
from asgd.figures.figure_file import Counts, Figure


def files(figures_folder: Path) -> dict[str, Path]:
  """Returns the figures of a folder: name -> file."""
  return {
    path.stem: path
    for path in sorted(figures_folder.glob("*.py"))
    if not path.stem.startswith("__")
  }


def chosen(
  name: str | None, *, every: bool, figures_folder: Path
) -> list[Path]:
  """Returns the files of the requested figures: the figure `name`, or every
  figure of the folder. Raises ValueError unless exactly one of the two is
  requested."""
  paths = files(figures_folder)
  if (name is None) != every:
    figure_names = ", ".join(paths)
    raise ValueError(
      f"give one figure: a NAME ({figure_names}), a FILE.py, or --all"
    )
  return list(paths.values()) if name is None else [find(name, figures_folder)]


def find(name: str, figures_folder: Path) -> Path:
  """Returns the file of a figure: a name in a folder, or a path that ends in
  .py. Raises ValueError, with the nearest name, if there is no such file."""
  if name.endswith(".py"):
    if not Path(name).is_file():
      raise ValueError(f"{name}: there is no such file")
    return Path(name)
  paths = files(figures_folder)
  if not paths:
    raise ValueError(
      f"{figures_folder} holds no figure; give the path of a FILE.py"
    )
  # `canonical` accepts - for _ in a name.
  path: Path = names.lookup("figure", names.canonical(name, paths), paths)
  return path


class _NoFigureError(ValueError):
  """A file lacks one of the two functions of a figure."""


class Reproduction(NamedTuple):
  """A figure and its experiment, at one of its sizes."""

  figure: Figure
  counts: Counts  # numbers of workers of its runs, at this size
  resolved: schema.Resolved  # the config, at this size
  quick: bool


def load(
  path: Path, engines: schema.Engines, *, quick: bool = False
) -> Reproduction:
  """Reads a figure's file. Raises ValueError, with a text of one line, for any
  fault in the file."""
  # The file may import modules of its folder.
  code.add_folder(path.parent)
  # [1] Run the file, and read its two functions.
  try:
    figure_file.check_name(path.stem)
    config, figure_data = _run(path)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  # [2] Resolve the full size, even for --quick.
  try:
    resolved = schema.resolve(config, engines)
    # Claims are checked against the full size; --quick may lack cells.
    counts = _counts(resolved, engines)
    figure = figure_file.read(path.stem, figure_data, counts)
    if quick and not figure.quick:
      raise ValueError(
        "get_figure() has no 'quick', the keys of a small version"
      )
    # Check the quick keys, also when the full size is trained.
    if figure.quick:
      small_config = overrides.override(config, figure.quick, engines)
      small = schema.resolve(small_config, engines)
      resolved = small if quick else resolved
    return Reproduction(figure, _counts(resolved, engines), resolved, quick)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def _run(path: Path) -> tuple[Any, Any]:
  """Returns the results of the two functions of a figure's file."""
  # Not an import: the file need not be in a package, and the module stays
  # out of sys.modules.
  spec = importlib.util.spec_from_file_location(path.stem, path)
  if spec is None or spec.loader is None:
    raise ValueError("Python cannot load it; name a .py file")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    for name in ("get_config", "get_figure"):
      if not callable(getattr(module, name, None)):
        raise _NoFigureError(
          f"it has no {name}(); a figure's file defines get_config() and"
          " get_figure()"
        )
    return module.get_config(), module.get_figure()
  except _NoFigureError:
    raise
  # absl or argparse in the file may end the process; here it must not.
  except SystemExit as end:
    raise ValueError(
      f"the file called sys.exit (status {end.code!r}); get_config() and"
      " get_figure() must return their data"
    ) from None
  except Exception as error:  # a user's file may raise anything
    raise ValueError(line_of(error)) from error


def _counts(resolved: schema.Resolved, engines: schema.Engines) -> Counts:
  """Returns the numbers of workers of each run."""
  return {
    label: list(engines[run.engine].workers(run))
    for label, run in resolved.runs.items()
  }


def listing(figures_folder: Path, engines: schema.Engines) -> str:
  """Returns the figures of a folder with their titles, one on each line."""
  paths = files(figures_folder)
  width = max(map(len, paths), default=0)
  titles = {k: load(path, engines).figure.title for k, path in paths.items()}
  return "\n".join(f"{k.ljust(width)}  {title}" for k, title in titles.items())


def in_turns(order: Sequence[cells.Cell]) -> list[cells.Cell]:
  """Returns cells seed by seed, every second seed backwards: ABC CBA ABC. A
  slow phase of the machine then affects all runs of a seed, and no run is
  always the first."""
  result = []
  for number, seed in enumerate(sorted({cell.seed for cell in order})):
    cells_of_seed = [cell for cell in order if cell.seed == seed]
    result += cells_of_seed[::-1] if number % 2 else cells_of_seed
  return result


def _size(task: Reproduction) -> str:
  return "quick" if task.quick else "full"


def _check_size(
  task: Reproduction, experiment: cells.Experiment, workdir: Path
) -> None:
  """Raises ValueError for a folder of the figure's other size: verdicts on
  other cells would replace the verdicts in the folder."""
  name, size = task.figure.name, _size(task)
  # [1] A judged folder says in NAME.json which size it has.
  remedy = "choose another folder with --workdir"
  stored_verdicts = storage.read_json(workdir / f"{name}.json") or {}
  if stored_verdicts.get("size", size) != size:
    raise ValueError(
      f"--workdir={workdir} holds another experiment: {name} at its"
      f" {stored_verdicts['size']} size, but this is the {size} size; {remedy}"
    )
  # [2] A folder without verdicts has the size of its config. For the full size,
  # `folder.open_folder` checks it.
  if (
    not task.quick or stored_verdicts or not (workdir / "config.json").exists()
  ):
    return
  # The folder of an experiment that is trained, but not yet judged.
  stored_identity = folder.read_identity(workdir) or {}
  # Through JSON, as the stored config went: tuples became lists.
  identity = json.loads(storage.to_json(folder.identity(experiment)))
  if stored_identity.get("config") != identity["config"]:
    raise ValueError(
      f"--workdir={workdir} holds another experiment than {name} at its quick"
      f" size; {remedy}"
    )


def train(
  task: Reproduction,
  engines: schema.Engines,
  *,
  workdir: str | None,
  data_dir: str | None = None,
  machine: Machine | None = None,
  bar: Any,
  count: int | None = None,
  signals: Any = NoSignals,
) -> tuple[cells.Experiment, Path]:
  """Trains the cells that are not finished; returns (experiment, its folder).

  Args:
    task: the figure and its config.
    engines: the engines, by name.
    workdir: the folder. None: the folder runs/NAME-001, ..., that has this
      experiment, or the next free one; for a quick figure runs/NAME-quick-001,
      ....
    data_dir: the folder of the dataset's files.
    machine: the machine that trains; None: this machine.
    bar: (total messages) -> an `asgd.experiment.progress.ProgressBar`.
    count: simulated cells at once; None: one for each core.
    signals: requests to stop.

  Raises:
    ValueError: for another experiment's folder, or if a cell fails.
    Stopped: after a stop, when all is saved.
  """
  name, machine = task.figure.name, machine or Machine()
  # All errors of the config and the machine appear before anything is written.
  experiment = cells.build(task.resolved, engines=engines, data_dir=data_dir)
  experiment.check_machine(machine)
  if workdir is not None and Path(workdir).is_dir():
    _check_size(task, experiment, Path(workdir))
  # The two sizes never share a folder.
  name += "-quick" if task.quick else ""
  result_folder = folder.open_folder(workdir, name, experiment)
  order = list(experiment.cells)
  if task.figure.turns:
    order = in_turns(order)
  # Progress counts messages, since cells differ in length.
  progress_bar = bar(sum(experiment.plan(cell).messages for cell in order))
  try:
    jobs.train_all(
      experiment,
      result_folder,
      bar=progress_bar,
      machine=machine,
      jobs=count or jobs.default_jobs(),
      cells=order,
      signals=signals,
      data_dir=data_dir,
    )
  finally:
    progress_bar.close()
    machine.close()
  return experiment, result_folder


def judge(
  task: Reproduction, experiment: cells.Experiment, workdir: Path
) -> tuple[list[verdicts.ClaimVerdict], list[dict[str, Any]], dict[str, Any]]:
  """Returns the verdicts on a trained experiment, the points of the figure, and
  the content of NAME.json."""
  figure, machine = task.figure, provenance.machine()
  # Cells that did not run, or failed, are missing: their claims are UNDECIDED.
  results = columns.read(workdir, experiment.cells)
  table = columns.CellTable(results, figure.columns)
  claim_verdicts = verdicts.judge(figure.claims, table, task.counts)
  points = drawing.points(figure, table, task.counts)
  data = {
    "version": verdicts.VERSION,
    "figure": figure.name,
    "title": figure.title,
    "paper": figure.paper,
    "finding": figure.finding,
    "about": figure.about,
    "tuned": figure.tuned,
    "size": _size(task),
    "seeds": table.seeds,
    "cells": len(results),
    "of_cells": len(experiment.cells),
    "messages": sum(cell.result["messages"] for cell in results.values()),
    "diverged": sum(bool(cell.result["diverged"]) for cell in results.values()),
    "sizes": _sizes(experiment),
    "seconds": sum(cell.result["wall_seconds"] for cell in results.values()),
    "versions": {
      **provenance.versions(),
      "scipy": metadata.version("scipy"),  # computes the statistics
    },
    "machine": {key: machine[key] for key in ("cores", "devices")},
    "published": [
      {"panel": panel.title, "title": line["title"], "source": line["source"]}
      for panel in figure.panels
      for line in panel.published
    ],
    "claims": [verdicts.as_data(verdict) for verdict in claim_verdicts],
  }
  return claim_verdicts, points, data


def _sizes(experiment: cells.Experiment) -> dict[str, Any]:
  """Returns data, model, workers and sizes of an experiment, for JSON."""
  config = experiment.config
  shared = ("epochs", "examples", "batch_size", "learning_rate")
  return {
    "data": experiment.dataset.name,
    "model": config["problem"]["name"] or config["model"],
    "engines": sorted({run.engine for run in experiment.runs.values()}),
    "runs": len(experiment.runs),
    "workers": sorted({cell.workers for cell in experiment.cells}),
    **{key: config[key] for key in shared},
  }


def write(
  figure: Figure,
  points: Sequence[Mapping[str, Any]],
  data: Mapping[str, Any],
  result_folder: Path,
) -> str:
  """Writes picture, points and verdicts. Returns the picture's files, or why it
  was not drawn."""
  stem = result_folder / figure.name
  storage.write_csv(stem.with_suffix(".csv"), list(points))
  # The CSV and the verdicts are written first: they need no Matplotlib.
  storage.write_json(stem.with_suffix(".json"), data)
  seeds = f"{len(data['seeds'])} seeds, {data['size']} size"
  if not figure.panels:
    return "not drawn: get_figure() has no panels"
  try:
    drawing.draw(figure, points, stem, f"{figure.title} ({seeds})")
  except ImportError:
    return "not drawn: pip install 'asgd[viz]'"
  return f"{stem}.png, .svg, .pdf"


def reproduce(
  task: Reproduction,
  engines: schema.Engines,
  *,
  docs: Path | None = None,
  **options: Any,
) -> Path:
  """Trains, judges and writes a figure, and prints the verdicts; returns its
  folder. `options` are those of `train`. If `docs` is given, the verdicts are
  also copied there (`gallery.copy_to_docs`); before training the function
  checks that this is possible."""
  if docs is not None:
    gallery.check_destination(docs, task.figure.name, size=_size(task))
  # [1] Train.
  experiment, result_folder = train(task, engines, **options)
  with storage.locked_folder(result_folder):
    results = folder.read_results(result_folder)
    cell_log.join(result_folder, experiment, results)
  # [2] Judge the claims.
  claim_verdicts, points, data = judge(task, experiment, result_folder)
  # [3] Draw and write.
  picture_text = write(task.figure, points, data, result_folder)
  stem = result_folder / task.figure.name
  cells_text = f"{data['cells']} of {data['of_cells']} cells"
  print(
    f"\n{task.figure.title}\n{task.figure.paper}\n{cells_text},"
    f" {len(data['seeds'])} seeds, {data['size']} size,"
    f" {data['seconds']:.0f} s of training\n\n{verdicts.text(claim_verdicts)}\n"
    f"figure    {picture_text}\npoints    {stem}.csv\nverdicts  {stem}.json"
  )
  if docs is not None:
    gallery.copy_to_docs(result_folder, task.figure.name, docs)
  return result_folder
