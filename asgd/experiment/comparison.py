"""Compares a live cell with simulations that use its jobs' measured durations,
or, if no server decides the order of its protocol, with its replay.

There are two simulations. In the first, each worker's jobs take their measured
times in their order: this tests the simulator. In the second, times are drawn
from each worker's measured times: this predicts a run from their distribution.

If the links of a run took time (config.network), the measured jobs exclude that
time. Messages and tickets of the counted bytes pass the same simulated network.

A replay must have the same records; the first that differs is named.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base, output
from asgd.experiment import cell_files, live_files, predict, protocol, replay
from asgd.experiment import figure as figure_lib
from asgd.experiment import folder as folders
from asgd.experiment.engines import networks
from asgd.orders import durations

_WAYS = (0.5, 0.9)  # shares of a live run's decrease of the loss
_BINS = 40  # of time, in the picture
# Share of messages before all workers had sent one, above which a note says so.
_EARLY = 0.05
_POINTS = 2000  # most points of a curve in the picture
LIVE, _ORDER, _DRAWN, _REPLAYED = "live", "in order", "drawn", "replayed"
_HATCHES = {LIVE: "", _ORDER: "///", _DRAWN: "...", _REPLAYED: "///"}
_LOSS = "training loss, moving average\nover 1/40 of the messages"


class LiveComparison(NamedTuple):
  """A cell, live and simulated, or live and replayed."""

  name: str
  runs: dict[str, predict.Outcome]  # by kind, the live one first
  zero: int  # index of the message at which times start
  parts: dict[str, float] | None  # seconds of each part of a live job
  # Rows (worker, seconds) of its jobs, for `durations` of a config.
  jobs: Sequence[dict[str, float]] = ()
  replay: str = ""  # comparison with the replay; "": there was none


def _measured(files: live_files.LiveFiles) -> list[predict.MeasuredJob]:
  """Returns the jobs of a live run, without the time of its network."""
  journal, spans = files.journals[0], files.spans
  transport = _transport(files)
  if transport["network"] is None:
    return predict.jobs(journal, spans)
  workers = files.description["cell"]["workers"]
  return predict.off_network(journal, spans, **transport, workers=workers)


def _streams(
  cell: Any,
  files: live_files.LiveFiles,
  timed: live_files.LiveFiles,
  timed_name: Path,
) -> dict[str, list[Iterator[float]]]:
  """Returns streams of job durations for each worker, by simulation.

  Args:
    cell: the simulated cell.
    files: of that cell.
    timed: files of the cell with the durations, which may be another.
    timed_name: its name in an error.
  """
  jobs = _measured(timed)
  if not jobs:
    raise ValueError(f"{timed_name} has no message: {predict.SHORT}")
  timed_workers = 1 + max(job.worker for job in jobs)
  settled = predict.settled(jobs, timed_workers)
  # A worker may do more jobs than were measured: it then repeats them.
  repeated = durations.measured(predict.shifted(settled, cell.workers))
  drawn = durations.measured(settled, resample=True, seed=cell.seed)
  first = predict.in_order(jobs, timed_workers) if timed is files else [[]]
  workers = range(cell.workers)
  return {
    _ORDER: [
      itertools.chain(first[w % len(first)], repeated.stream(w))
      for w in workers
    ],
    _DRAWN: [drawn.stream(w) for w in workers],
  }


def _transport(files: live_files.LiveFiles) -> dict[str, Any]:
  """Returns the `network` of a live run (None: it takes no time), and the
  `sizes` of its messages in bytes."""
  description, records = files.description, files.records
  section = description["config"].get("network")
  network = section and networks.from_section(section, len(records))
  sizes = predict.sizes_of(records, description["cell"]["workers"])
  return {"network": network, "sizes": sizes}


def compare(
  folder: Path,
  *,
  durations_of: Path | None = None,
  data_dir: str | None = None,
  trust: bool = False,
) -> LiveComparison:
  """Compares a live cell with its simulations or with its replay.

  Args:
    folder: of the cell, or of an experiment with one live cell.
    durations_of: folder of another cell with the durations for simulations.
    data_dir: folder of the data set; None: the default.
    trust: whether code of other users may be imported.

  Raises:
    ValueError: the cell is too short, was changed since it ended, or names code
      that is not trusted; or one of two cells has no simulation.
  """
  cell_folder = live_files.only_cell(folder)
  folders.finished_result(cell_folder, repeatable=False)
  files = live_files.read(cell_folder)
  timed = live_files.read(durations_of) if durations_of else files
  cells = protocol.of_cell(cell_folder, files.description).live
  timed_cells = protocol.of_cell(cell_folder, timed.description).live
  if durations_of and not (cells.simulation and timed_cells.simulation):
    raise ValueError(
      f"--durations_of={durations_of} needs two cells with a server that"
      f" decides the order of jobs: one of it and {folder} has no such server."
      " Drop it, or name two cells that have one"
    )
  loaded = {"data_dir": data_dir, "trust": trust}
  if cells.simulation is None:
    return _with_replay(cell_folder, files, **loaded)
  experiment, cell = replay.load(cell_folder, **loaded)
  plan = experiment.plan(cell)
  rules, train_in_order = cells.simulation(plan, cell, cell_folder)
  records, journal = files.records[0], files.journals[0]
  messages = len(records.loss)
  early = _early_messages(cell_folder, records.worker, cell.workers)
  began = live_files.first_ticket(journal)
  runs = {LIVE: predict.Outcome(began, records, _accuracy(cell_folder))}
  joins = predict.joins(journal, cell.workers)
  streams_of = _streams(cell, files, timed, durations_of or folder)
  for kind, streams in streams_of.items():
    trace = predict.play(rules, streams, joins, messages, **_transport(files))
    params, simulated = train_in_order(trace)
    accuracy = plan.problem.evaluate(params).accuracy
    runs[kind] = predict.Outcome(float(trace.time[0]), simulated, accuracy)
  # All runs are compared from a message at which every worker works in each.
  workers = [run.records.worker for run in runs.values()]
  zero = max(predict.all_there(column, cell.workers) for column in workers)
  began = float(records.time[early - 1])
  parts = predict.where_time_goes(journal, files.spans, began)
  return LiveComparison(cell.name, runs, zero, parts, _rows(_measured(files)))


def _early_messages(
  cell_folder: Path, worker: np.ndarray, workers: int
) -> int:
  """Returns the count of messages until each worker had sent one. Raises
  ValueError if these are more than half of all."""
  early, messages = predict.all_there(worker, workers), len(worker)
  if 2 * early > messages:
    text = f"{early} of {messages} messages arrived before each worker sent one"
    raise ValueError(f"{cell_folder.name}: {text}: {predict.SHORT}")
  return early


def _rows(jobs: Sequence[predict.MeasuredJob]) -> list[dict[str, float]]:
  return [{"worker": j.worker, "seconds": j.end - j.start} for j in jobs]


def _accuracy(cell_folder: Path) -> float:
  """Returns the accuracy of a result; NaN if its task has none."""
  accuracy = replay.read_result(cell_folder).get("test_accuracy")
  return np.nan if accuracy is None else accuracy


def _with_replay(
  cell_folder: Path, files: live_files.LiveFiles, **loaded: Any
) -> LiveComparison:
  """Compares a live cell with its replay."""
  columns = cell_files.read_records(cell_folder)
  records = base.Records(*(columns[name] for name in base.Records._fields))
  workers = files.description["cell"]["workers"]
  zero = _early_messages(cell_folder, records.worker, workers)
  began = live_files.first_ticket(files.jobs)
  result = replay.replay(cell_folder, **loaded)
  replayed = result.records
  runs = {
    LIVE: predict.Outcome(began, records, _accuracy(cell_folder)),
    _REPLAYED: predict.Outcome(began, replayed, result.accuracy),
  }
  digests = [str(x)[:16] for x in (result.recorded, result.digest)]
  text = f"parameters {digests[0]}, replayed {digests[1]}"
  text += f"; {first_difference(records, replayed) or 'the same records'}"
  jobs = _rows(predict.jobs(files.jobs, files.spans))
  return LiveComparison(cell_folder.name, runs, zero, None, jobs, text)


def first_difference(records: base.Records, replayed: Any) -> str:
  """Returns the first record, by worker and job, in which a run and its replay
  differ: its column and both values; "" if none differs."""
  if len(records.loss) != len(replayed.loss):
    return f"{len(records.loss)} records, replayed {len(replayed.loss)}"
  sides = [
    {name: getattr(side, name)[np.lexsort((side.job, side.worker))]
      for name in base.Records._fields}
    for side in (records, replayed)
  ]
  firsts = []
  for name, was in sides[0].items():
    now = sides[1][name]
    # Two NaNs are equal here.
    same = np.equal(was, now) | ((was != was) & (now != now))
    if not same.all():
      firsts.append((int(np.argmin(same)), name))
  if not firsts:
    return ""
  row, name = min(firsts)
  worker, job, was = (sides[0][key][row] for key in ("worker", "job", name))
  return (
    f"{name} of worker {worker}, job {job} is {was}, replayed"
    f" {sides[1][name][row]}"
  )


def _curves(both, zero):
  return {kind: predict.curve(run, zero) for kind, run in both.runs.items()}


def quantities(both: LiveComparison) -> list[dict[str, Any]]:
  """Returns a row for each quantity: its value in each kind of run, and the
  ratios to the live run."""
  curves = _curves(both, both.zero)
  losses = {share: curves[LIVE].way(share) for share in _WAYS}
  columns = {}
  for kind, run in both.runs.items():
    staleness = run.records.staleness[both.zero :]
    columns[kind] = {
      "messages/s": predict.rate(run, both.zero),
      "staleness, mean": float(staleness.mean()),
      "staleness, max": float(staleness.max()),
      **{
        f"s to loss {loss:.3g} ({100 * share:.0f} % of the way)": (
          curves[kind].reaches(loss)
        )
        for share, loss in losses.items()
      },
      "messages": len(run.records.loss),
      "MB up": float(run.records.bytes_up.sum()) / 1e6,
      "MB down": float(run.records.bytes_down.sum()) / 1e6,
      "accuracy %": 100 * run.accuracy,
    }
  rows = []
  for name, live in columns[LIVE].items():
    row = {kind: columns[kind][name] for kind in both.runs}
    for kind in list(both.runs)[1:]:
      row[f"{kind}, ratio"] = row[kind] / live if live else np.nan
    rows.append({"quantity": name, **row})
  return rows


def _text(value, form="{:.4g}"):
  return form.format(value) if np.isfinite(value) else "-"


def table(rows: list[dict[str, Any]]) -> str:
  """Returns `quantities` as text."""
  kinds = [key for key in rows[0] if f"{key}, ratio" in rows[0]]
  header, lines = ["", LIVE], []
  for kind in kinds:
    header += [kind, "ratio"]
  for row in rows:
    line = [row["quantity"], _text(row[LIVE])]
    for kind in kinds:
      line += [_text(row[kind]), _text(row[f"{kind}, ratio"], "{:.2f}")]
    lines.append(line)
  return output.table(header, lines)


def parts_text(parts: dict[str, float] | None) -> str:
  """Returns a line on the parts of a live job's time."""
  if parts is None:
    return (
      "the parts of a job's time were not measured: run asgd train with"
      " --config.live.spans=True"
    )
  words = ", ".join(
    f"{name} {1000 * value:.2f}"
    for name, value in parts.items()
    if name != predict.BUSY
  )
  return (
    f"a live job in ms: {words}; the server is busy"
    f" {100 * parts[predict.BUSY]:.0f} % of the time or less"
  )


def _heading(both: LiveComparison) -> str:
  beside = "simulated with measured durations"
  return f"{both.name}: live, and {'replayed' if both.replay else beside}"


def describe(
  both: LiveComparison,
  rows: list[dict[str, Any]],
  durations_of: str | None = None,
) -> str:
  """Returns a comparison, with its `quantities`, as text."""
  if both.replay:
    return f"\n{_heading(both)}\n\n{table(rows)}\n{both.replay}"
  of = f", with the durations of {durations_of}" if durations_of else ""
  text = (
    f"\n{both.name}: live, and simulated with its durations in order, and drawn"
    f" from them{of}\n\n{table(rows)}\n{parts_text(both.parts)}"
  )
  early, messages = both.zero, len(both.runs[LIVE].records.time)
  if early > _EARLY * messages:
    text += (
      f"\nnote: {early} of {messages} messages arrived before each worker sent"
      " one: times that start at the first ticket depend on them"
    )
  return text


def _edges(both: LiveComparison) -> np.ndarray:
  """Returns the edges of the bins of time in which messages are counted."""
  columns = (run.records.time for run in both.runs.values())
  longest = max(time[-1] - time[both.zero - 1] for time in columns)
  return np.linspace(0, longest, _BINS + 1)


def _series(
  both: LiveComparison,
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
  """Yields (panel, kind, xs, values) of the picture."""
  times = {kind: run.records.time for kind, run in both.runs.items()}
  times = {k: t[both.zero :] - t[both.zero - 1] for k, t in times.items()}
  edges = _edges(both)
  for kind, curve in _curves(both, both.zero).items():
    counts = np.bincount(both.runs[kind].records.staleness[both.zero :])
    yield "staleness", kind, np.arange(len(counts)), counts / counts.sum()
    # The last bin that a run reaches is not full, so it is not drawn.
    full = int(np.searchsorted(edges, times[kind][-1], "right")) - 1
    rates = np.histogram(times[kind], edges)[0] / edges[1]
    yield "throughput", kind, edges[:full], rates[:full]
    every = len(curve.time) // _POINTS + 1
    yield "loss", kind, curve.time[::every], curve.loss[::every]


def points(both: LiveComparison) -> list[dict[str, Any]]:
  """Returns the picture's numbers, as rows of panel, series, x and value.

  The panels are "staleness" (share of the messages by staleness), "throughput"
  (messages per second) and "loss". The last two are by seconds since each
  worker had sent a message.
  """
  return [
    {"panel": panel, "series": kind, "x": float(x), "value": float(value)}
    for panel, kind, xs, values in _series(both)
    for x, value in zip(xs, values, strict=True)
  ]


def draw(both: LiveComparison, stem: Path) -> None:
  """Draws a comparison as STEM.png, .svg, .pdf; ImportError without `viz`."""
  with figure_lib.style():
    _draw(both, stem)


def _looks(kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
  """Returns colour and dashes of each kind of run, without a marker."""
  styles = figure_lib.styles(list(kinds))
  keys = "color", "ls"
  return {name: {k: own[k] for k in keys} for name, own in styles.items()}


def _draw(both: LiveComparison, stem: Path) -> None:
  """Draws the three panels of a comparison."""
  figure, ((bars, steps, lines),) = figure_lib.new_figure(1, 3, 7.2, 2.9)
  kinds = list(both.runs)
  looks = _looks(kinds)
  most = 0  # staleness on the axis, without the 1 % of largest values
  for panel, kind, x, values in _series(both):
    run, look = both.runs[kind], looks[kind]
    if panel == "staleness":
      left = x + 0.27 * (kinds.index(kind) - 1)
      face = {"color": look["color"], "hatch": _HATCHES[kind]}
      bars.bar(left, 100 * values, 0.27, ec="white", lw=0, label=kind, **face)
      most = max(most, x[np.cumsum(values) < 0.99].max(initial=0) + 1)
    elif panel == "throughput":
      label = f"{kind}: {predict.rate(run, both.zero):.4g} in the mean"
      edges = _edges(both)[: len(x) + 1]
      line = {"baseline": None, "lw": 1.1, "label": label}
      steps.stairs(values, edges, **line, **look)
    else:
      label = kind
      if np.isfinite(run.accuracy):
        label += f": accuracy {100 * run.accuracy:.1f} %"
      lines.plot(x, values, label=label, **look)
  bars.set(xlabel="staleness", ylabel="messages (%)", xlim=(-0.7, most + 0.7))
  bars.locator_params("x", integer=True)
  rates = f"messages per second,\nmeans over 1/{_BINS} of the time"
  steps.set(xlabel="seconds", ylabel=rates)
  steps.set_ylim(0)
  lines.set(xlabel="seconds", ylabel=_LOSS)
  losses = [line.get_ydata() for line in lines.lines]
  figure_lib.scale_by_logarithm(lines, "y", np.concatenate(losses))
  for axis in (bars, steps, lines):
    axis.grid()
    axis.legend(
      loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=7
    )
  figure_lib.save(figure, _heading(both), stem)


def common_loss(cells: Sequence[LiveComparison]) -> float:
  """Returns a loss that all runs reach: 90 % of the smallest decrease."""
  curves = [curve for both in cells for curve in _curves(both, 0).values()]
  start = min(curve.loss[0] for curve in curves)
  worst = max(curve.loss.min() for curve in curves)
  return float(start - 0.9 * (start - worst))


def _common(cells: Sequence[LiveComparison]) -> list[str]:
  """Returns the kinds of runs that all cells have."""
  first, *others = cells
  return [k for k in first.runs if all(k in both.runs for both in others)]


def race(cells: Sequence[LiveComparison], loss: float) -> list[dict[str, Any]]:
  """Returns a row for each cell, over the kinds of runs that all cells have:
  messages per second, seconds from the first ticket to a loss, and how many
  times faster that is than the slowest cell."""
  rows, kinds = [], _common(cells)
  for both in cells:
    row: dict[str, Any] = {"cell": both.name}
    for kind in kinds:
      row[f"{kind}, messages/s"] = predict.rate(both.runs[kind], both.zero)
    for kind in kinds:
      curve = predict.curve(both.runs[kind], 0)
      row[f"{kind}, seconds"] = curve.reaches(loss)
    rows.append(row)
  for kind in kinds:
    times = np.array([row[f"{kind}, seconds"] for row in rows])
    slowest = times.max(initial=0, where=np.isfinite(times))
    for row, time in zip(rows, times, strict=True):
      row[f"{kind}, faster"] = slowest / time
  return rows


def race_table(rows: Sequence[dict[str, Any]], loss: float) -> str:
  """Returns `race` as text."""
  columns = {
    "messages/s": ("messages/s", "{:.4g}"),
    f"s to loss {loss:.3g}": ("seconds", "{:.4g}"),
    "times faster": ("faster", "{:.2f}"),
  }
  kinds = [k.removesuffix(", faster") for k in rows[0] if k.endswith("faster")]
  header, lines = ["cell"], [[row["cell"]] for row in rows]
  for title, (key, form) in columns.items():
    header += [f"{title}, {LIVE}", *kinds[1:]]
    for row, line in zip(rows, lines, strict=True):
      line += [_text(row[f"{kind}, {key}"], form) for kind in kinds]
  return output.table(header, lines)


def draw_race(cells: Sequence[LiveComparison], loss: float, stem: Path) -> None:
  """Draws the losses of all cells against time: STEM.png, .svg and .pdf."""
  with figure_lib.style():
    _draw_race(cells, loss, stem)


def _draw_race(cells: Sequence[LiveComparison], loss: float, stem: Path):
  """Draws one axis with a curve for each cell and kind of run."""
  figure, axes = figure_lib.new_figure(1, 1, 5, 3.4)
  axis = axes.item()
  looks = figure_lib.styles([both.name for both in cells])
  kinds = dict.fromkeys(kind for both in cells for kind in both.runs)
  dashes = {kind: look["ls"] for kind, look in _looks(kinds).items()}
  for both in cells:
    look = looks[both.name]
    for kind, curve in _curves(both, 0).items():
      label = figure_lib.plain_text(f"{both.name}, {kind}")
      every = max(len(curve.time) // 5, 1)
      line = {**look, "ls": dashes[kind], "markevery": every, "label": label}
      axis.plot(*curve, **line)
  axis.axhline(loss, color="gray", lw=0.8)
  axis.set(xlabel="seconds", ylabel=_LOSS)
  drawn = [line.get_ydata() for line in axis.lines]
  figure_lib.scale_by_logarithm(axis, "y", np.concatenate(drawn))
  axis.grid()
  figure_lib.legend(figure, axes)
  title = "live cells, and their simulations or replays"
  figure_lib.save(figure, title, stem)
