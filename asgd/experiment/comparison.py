"""Compares a live cell with simulations that use its jobs' measured durations,
or, if no server decides the order of its protocol, with its replay.

There are two simulations. In the first, each worker's jobs take their measured
times in their order: this tests the simulator. In the second, times are drawn
from each worker's measured times: this predicts a run from their distribution.

If the links of a run took time (config.network), the measured jobs exclude that
time. The simulations send tickets and messages of the recorded sizes through
the same network.

A replay must have the same records; the first record that differs is named.

`compare` makes a `LiveComparison`; `quantities`, `race` and `describe` turn it
into rows and text, and `comparison_figure` draws it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base, output
from asgd.experiment import (
  cell_files,
  cells,
  live_files,
  predict,
  protocol,
  replay,
)
from asgd.experiment import folder as folders
from asgd.experiment.engines import networks
from asgd.orders import durations
from asgd.orders.network import Network
from asgd.orders.play import Sizes

_LOSS_SHARES = (0.5, 0.9)  # shares of a live run's decrease of the loss
# Above this share of messages before all workers have sent one, a note says so.
_MAX_EARLY_SHARE = 0.05
# Kinds of runs: keys of `LiveComparison.runs`, and words in tables.
LIVE, IN_ORDER, RESAMPLED, REPLAYED = "live", "in order", "drawn", "replayed"


class LiveComparison(NamedTuple):
  """A cell, live and simulated, or live and replayed."""

  name: str
  runs: dict[str, predict.Outcome]  # by kind, the live one first
  first_messages: int  # messages before the compared part, 1 or more
  # `predict.where_time_goes` of the live run; None: it was not measured
  parts: dict[str, float] | None
  # Rows (worker, seconds) of its jobs, for `durations` of a config.
  jobs: Sequence[dict[str, float]] = ()
  replay: str = ""  # comparison with the replay; "": there was none


class _Transport(NamedTuple):
  """The network of a live run, and the sizes of its messages."""

  network: Network | None  # None: the messages took no time
  sizes: Sizes  # bytes of messages and tickets


def _transport(files: live_files.LiveFiles) -> _Transport:
  """Returns the network of a live run, and the counted sizes of its messages.
  """
  description, records = files.description, files.records
  section = description["config"].get("network")
  network = section and networks.make_network(section, len(records))
  sizes = predict.job_sizes(records, description["cell"]["workers"])
  return _Transport(network, sizes)


def _measured_jobs(files: live_files.LiveFiles) -> list[predict.MeasuredJob]:
  """Returns the jobs of a live run, without the time of its network."""
  journal, spans = files.journals[0], files.spans
  network, sizes = _transport(files)
  if network is None:
    return predict.measure_jobs(journal, spans)
  workers = files.description["cell"]["workers"]
  return predict.measure_work(journal, spans, network, sizes, workers)


def _streams(
  cell: cells.Cell,
  files: live_files.LiveFiles,
  timed_files: live_files.LiveFiles,
  timed_folder: Path,
) -> dict[str, list[Iterator[float]]]:
  """Returns kind of simulation -> a stream of job durations for each worker.

  Args:
    cell: the simulated cell.
    files: the files of that cell.
    timed_files: files of the cell with the durations, which may be another.
    timed_folder: the folder of `timed_files`, for errors.
  """
  # [1] The jobs of the timed cell, and durations after its start ("settled").
  jobs = _measured_jobs(timed_files)
  if not jobs:
    raise ValueError(f"{timed_folder} has no message: {predict.TOO_SHORT}")
  timed_workers = 1 + max(job.worker for job in jobs)
  settled_rows = predict.settled_durations(jobs, timed_workers)
  # [2] Endless streams. IN_ORDER has all jobs of the simulated cell, those of
  # its start too, and then repeats the settled jobs. With another cell's
  # durations it has the settled jobs only. RESAMPLED draws from settled jobs.
  repeated = durations.measured(
    predict.shifted_durations(settled_rows, cell.workers)
  )
  resampled = durations.measured(settled_rows, resample=True, seed=cell.seed)
  is_same_cell = timed_files is files
  first_jobs: list[list[float]] = [[]]
  if is_same_cell:
    first_jobs = predict.durations_by_worker(jobs, timed_workers)
  workers = range(cell.workers)
  return {
    IN_ORDER: [
      itertools.chain(first_jobs[w % len(first_jobs)], repeated.stream(w))
      for w in workers
    ],
    RESAMPLED: [resampled.stream(w) for w in workers],
  }


def compare(
  folder: Path,
  *,
  durations_of: Path | None = None,
  data_dir: str | None = None,
  trust: bool = False,
) -> LiveComparison:
  """Compares a live cell with its simulations or with its replay.

  Args:
    folder: the folder of the cell, or of an experiment with one live cell.
    durations_of: folder of another cell with the durations for simulations.
    data_dir: folder of the data set; None: the default.
    trust: whether code of other users may be imported.

  Raises:
    ValueError: the cell is too short, was changed since it ended, or names code
      that is not trusted; or `durations_of` is given and no server decides the
      order of one of the two cells.
  """
  # [1] The files of the cell, and of the cell with the durations.
  cell_folder = live_files.only_cell(folder)
  folders.finished_result(cell_folder, repeatable=False)
  files = live_files.read(cell_folder)
  timed_folder, timed_files = cell_folder, files
  if durations_of:
    timed_folder = live_files.only_cell(durations_of)
    timed_files = live_files.read(timed_folder)
  # [2] Whether a server decides the order, so that it can be simulated.
  live = protocol.of_cell(cell_folder, files.description).live
  timed_live = protocol.of_cell(timed_folder, timed_files.description).live
  if durations_of and not (live.simulation and timed_live.simulation):
    raise ValueError(
      f"--durations_of={durations_of}: in this cell or in {folder} no server"
      " decides the order of jobs. Drop the flag, or name two cells with such a"
      " server"
    )
  if live.simulation is None:
    return _with_replay(cell_folder, files, data_dir, trust=trust)
  # [3] The live run. Index 0 is the lead, which decides the order.
  experiment, cell = replay.load(cell_folder, data_dir=data_dir, trust=trust)
  plan = experiment.plan(cell)
  rules, train_in_order = live.simulation(plan, cell, cell_folder)
  records, journal = _records(cell_folder), files.journals[0]
  messages = len(records.loss)
  n_early = _early_messages(cell_folder, records.worker, cell.workers)
  start_time = live_files.first_ticket(journal)
  runs = {LIVE: predict.Outcome(start_time, records, _accuracy(cell_folder))}
  # [4] The simulations: an order from the durations, then training in it.
  joins = predict.join_times(journal, cell.workers)
  network, sizes = _transport(files)
  streams_by_kind = _streams(cell, files, timed_files, timed_folder)
  for kind, streams in streams_by_kind.items():
    trace = predict.play(
      rules, streams, joins, messages, network=network, sizes=sizes
    )
    params, simulated = train_in_order(trace)
    accuracy = plan.problem.evaluate(params).accuracy
    runs[kind] = predict.Outcome(float(trace.time[0]), simulated, accuracy)
  # [5] Runs are compared after a number of messages by which, in each run,
  # every worker has sent one.
  first_messages = max(
    predict.count_until_all_sent(run.records.worker, cell.workers)
    for run in runs.values()
  )
  all_sent_time = float(records.time[n_early - 1])
  parts = predict.where_time_goes(journal, files.spans, all_sent_time)
  jobs = _duration_rows(_measured_jobs(files))
  return LiveComparison(cell.name, runs, first_messages, parts, jobs)


def _early_messages(
  cell_folder: Path, worker: np.ndarray, workers: int
) -> int:
  """Returns the count of messages until each worker had sent one. Raises
  ValueError if these are more than half of all."""
  n_early, messages = predict.count_until_all_sent(worker, workers), len(worker)
  if 2 * n_early > messages:
    text = f"{n_early} of {messages} messages came before each worker sent one"
    raise ValueError(f"{cell_folder.name}: {text}: {predict.TOO_SHORT}")
  return n_early


def _duration_rows(
  jobs: Sequence[predict.MeasuredJob],
) -> list[dict[str, float]]:
  """Returns rows (worker, seconds), as `durations` of a config read them."""
  return [{"worker": j.worker, "seconds": j.end - j.start} for j in jobs]


def _accuracy(cell_folder: Path) -> float:
  """Returns the accuracy of a result; NaN if its task has none."""
  accuracy = replay.read_result(cell_folder).get("test_accuracy")
  return np.nan if accuracy is None else accuracy


def _records(cell_folder: Path) -> base.Records:
  """Returns the records of a finished cell, with the bytes of all shards."""
  columns = cell_files.read_records(cell_folder)
  return base.Records(*(columns[name] for name in base.Records._fields))


def _with_replay(
  cell_folder: Path,
  files: live_files.LiveFiles,
  data_dir: str | None,
  *,
  trust: bool,
) -> LiveComparison:
  """Compares a live cell with its replay."""
  records = _records(cell_folder)
  workers = files.description["cell"]["workers"]
  first_messages = _early_messages(cell_folder, records.worker, workers)
  start_time = live_files.first_ticket(files.jobs)
  result = replay.replay(cell_folder, data_dir=data_dir, trust=trust)
  replayed = result.records
  # A replay has no clock: its records have the times of the trace.
  runs = {
    LIVE: predict.Outcome(start_time, records, _accuracy(cell_folder)),
    REPLAYED: predict.Outcome(start_time, replayed, result.accuracy),
  }
  digests = [str(x)[:16] for x in (result.recorded, result.digest)]
  text = f"parameters {digests[0]}, replayed {digests[1]}"
  text += f"; {first_difference(records, replayed) or 'the same records'}"
  jobs = _duration_rows(predict.measure_jobs(files.jobs, files.spans))
  name = cell_folder.name
  return LiveComparison(name, runs, first_messages, None, jobs, text)


def first_difference(records: base.Records, replayed: Any) -> str:
  """Describes the first record (by worker and job) in which a run and its
  replay differ, with its column and both values; "" if none differs."""
  if len(records.loss) != len(replayed.loss):
    return f"{len(records.loss)} records, replayed {len(replayed.loss)}"
  # Rows by worker and job: the files of several workers have no common order.
  live_columns, replay_columns = (
    {
      name: getattr(rows, name)[np.lexsort((rows.job, rows.worker))]
      for name in base.Records._fields
    }
    for rows in (records, replayed)
  )
  differences = []  # (first row that differs, column)
  for name, column in live_columns.items():
    # Two NaNs are equal here.
    replay_column = replay_columns[name]
    both_nan = (column != column) & (replay_column != replay_column)
    is_equal = np.equal(column, replay_column) | both_nan
    if not is_equal.all():
      differences.append((int(np.argmin(is_equal)), name))
  if not differences:
    return ""
  row, name = min(differences)
  keys = "worker", "job", name
  worker, job, value = (live_columns[key][row] for key in keys)
  return (
    f"{name} of worker {worker}, job {job} is {value}, replayed"
    f" {replay_columns[name][row]}"
  )


def loss_curves(
  comparison: LiveComparison, first_messages: int
) -> dict[str, predict.Curve]:
  """Returns the curve of each kind of run after the first messages; see
  `predict.curve`."""
  runs = comparison.runs.items()
  return {kind: predict.curve(run, first_messages) for kind, run in runs}


def quantities(comparison: LiveComparison) -> list[dict[str, Any]]:
  """Returns a row for each quantity: its value in each kind of run, and the
  ratios to the live run."""
  first_messages = comparison.first_messages
  curves = loss_curves(comparison, first_messages)
  # Losses of the live run; a simulation may pass them at other times.
  losses = {
    share: curves[LIVE].loss_after_share(share) for share in _LOSS_SHARES
  }
  columns = {}
  for kind, run in comparison.runs.items():
    staleness = run.records.staleness[first_messages:]
    columns[kind] = {
      "messages/s": predict.rate(run, first_messages),
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
  for name, live_value in columns[LIVE].items():
    row = {kind: columns[kind][name] for kind in comparison.runs}
    for kind in list(comparison.runs)[1:]:
      row[f"{kind}, ratio"] = row[kind] / live_value if live_value else np.nan
    rows.append({"quantity": name, **row})
  return rows


def _format(value: float, form: str = "{:.4g}") -> str:
  return form.format(value) if np.isfinite(value) else "-"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns `quantities` as text."""
  kinds = [key for key in rows[0] if f"{key}, ratio" in rows[0]]
  header, text_rows = ["", LIVE], []
  for kind in kinds:
    header += [kind, "ratio"]
  for row in rows:
    text_row = [row["quantity"], _format(row[LIVE])]
    for kind in kinds:
      text_row += [
        _format(row[kind]),
        _format(row[f"{kind}, ratio"], "{:.2f}"),
      ]
    text_rows.append(text_row)
  return output.table(header, text_rows)


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


def heading(comparison: LiveComparison) -> str:
  """Returns a line that says which kinds of runs are compared."""
  comparison_text = "simulated with measured durations"
  comparison_text = "replayed" if comparison.replay else comparison_text
  return f"{comparison.name}: live, and {comparison_text}"


def describe(
  comparison: LiveComparison,
  rows: Sequence[Mapping[str, Any]],
  durations_of: str | None = None,
) -> str:
  """Returns a comparison, with its `quantities`, as text."""
  if comparison.replay:
    text = f"{heading(comparison)}\n\n{table(rows)}\n{comparison.replay}"
    return f"\n{text}"
  source = f", with the durations of {durations_of}" if durations_of else ""
  text = (
    f"\n{comparison.name}: live, and simulated with its durations in order, and"
    f" drawn from them{source}\n\n{table(rows)}\n{parts_text(comparison.parts)}"
  )
  n_early = comparison.first_messages
  messages = len(comparison.runs[LIVE].records.time)
  if n_early > _MAX_EARLY_SHARE * messages:
    text += (
      f"\nnote: {n_early} of {messages} messages arrived before each worker"
      " sent one: times that start at the first ticket depend on them"
    )
  return text


def common_loss(cells: Sequence[LiveComparison]) -> float:
  """Returns a loss that all runs reach: 90 % of the way from the lowest first
  loss to the highest minimum."""
  # The curves start at the first ticket, because a race includes the start.
  curves = [curve for cell in cells for curve in loss_curves(cell, 0).values()]
  start = min(curve.loss[0] for curve in curves)
  worst = max(curve.loss.min() for curve in curves)
  return float(start - 0.9 * (start - worst))


def _common_kinds(cells: Sequence[LiveComparison]) -> list[str]:
  """Returns the kinds of runs that all cells have."""
  first_cell, *other_cells = cells
  return [
    k for k in first_cell.runs if all(k in cell.runs for cell in other_cells)
  ]


def race(cells: Sequence[LiveComparison], loss: float) -> list[dict[str, Any]]:
  """Returns a row for each cell. For each kind of run that all cells have, it
  has the messages per second, the seconds from the first ticket to a loss, and
  how many times faster that is than in the slowest cell."""
  rows, kinds = [], _common_kinds(cells)
  for cell in cells:
    row: dict[str, Any] = {"cell": cell.name}
    for kind in kinds:
      rate = predict.rate(cell.runs[kind], cell.first_messages)
      row[f"{kind}, messages/s"] = rate
    for kind in kinds:
      curve = predict.curve(cell.runs[kind], 0)
      row[f"{kind}, seconds"] = curve.reaches(loss)
    rows.append(row)
  for kind in kinds:
    times = np.array([row[f"{kind}, seconds"] for row in rows])
    # A cell that never reaches the loss has NaN, and cannot be the slowest.
    slowest = times.max(initial=0, where=np.isfinite(times))
    for row, time in zip(rows, times, strict=True):
      row[f"{kind}, faster"] = slowest / time
  return rows


def race_table(rows: Sequence[Mapping[str, Any]], loss: float) -> str:
  """Returns `race` as text."""
  columns = {
    "messages/s": ("messages/s", "{:.4g}"),
    f"s to loss {loss:.3g}": ("seconds", "{:.4g}"),
    "times faster": ("faster", "{:.2f}"),
  }
  kinds = [k.removesuffix(", faster") for k in rows[0] if k.endswith("faster")]
  header, text_rows = ["cell"], [[row["cell"]] for row in rows]
  for title, (key, form) in columns.items():
    header += [f"{title}, {LIVE}", *kinds[1:]]
    for row, text_row in zip(rows, text_rows, strict=True):
      text_row += [
        _format(row[f"{kind}, {key}"], form) for kind in kinds
      ]
  return output.table(header, text_rows)
