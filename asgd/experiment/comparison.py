"""A live cell beside its simulations with the durations that its jobs had.

There are two simulations. In one, the jobs of a worker take what they took, one
after the other: that is the run again, and says whether the simulator does what
the runtime does. In the other, times are drawn from those of each worker: a
prediction from how they are distributed alone.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import text_table
from asgd.experiment import figure as figure_lib
from asgd.experiment import live_files, predict, replay, storage
from asgd.orders import durations

_WAYS = (0.5, 0.9)  # that a live run's loss goes
_EARLY = 0.05  # of the messages, from where on it is said
_BINS = 40  # of time, in the picture
_POINTS = 2000  # most of a curve in the picture
LIVE, _ORDER, _DRAWN = "live", "in order", "drawn"
_KINDS = (LIVE, _ORDER, _DRAWN)


class LiveComparison(NamedTuple):
  """A cell, live and simulated."""

  name: str
  runs: dict[str, predict.Outcome]  # by kind
  zero: int  # the message with which clocks start
  parts: dict[str, float] | None  # where the time of a live job goes


def _streams(cell, read, other, durations_of):
  """Yields (kind, times of the jobs of each worker) of the simulations."""
  jobs = predict.jobs(other.journals[0], other.spans)
  if not jobs:
    raise ValueError(
      f"{durations_of} holds no message: there is no time of a job to be"
      " measured; train longer (--config.epochs)"
    )
  measured_at = 1 + max(job.worker for job in jobs)
  settled = predict.settled(jobs, measured_at)
  rows = settled if other is not read else predict.in_order(jobs, measured_at)
  again = durations.measured(settled)  # a worker may do more than it did
  numbers = range(cell.workers)
  yield (
    _ORDER,
    [itertools.chain(rows[w % measured_at], again.stream(w)) for w in numbers],
  )
  drawn = durations.measured(settled, resample=True, seed=cell.seed)
  yield _DRAWN, [drawn.stream(w) for w in numbers]


def compare(
  folder: Path,
  *,
  durations_of: Path | None = None,
  data_dir: str | None = None,
) -> LiveComparison:
  """Compares a live run with its simulations.

  Args:
    folder: WORKDIR/cells/NAME.
    durations_of: another one that gives the times; None is this one.
    data_dir: where the dataset's files are; None looks in the usual places.

  Raises:
    ValueError: if there is nothing to compare, or too little.
  """
  read = live_files.read(folder)
  other = live_files.read(durations_of) if durations_of else read
  experiment, cell = replay.load(folder, data_dir=data_dir)
  plan = experiment.plan(cell)
  records, journal = read.records[0], read.journals[0]
  messages = len(records.loss)
  there = predict.all_there(records.worker, cell.workers)
  if 2 * there > messages:
    raise ValueError(
      f"{cell.name}: {there} of {messages} messages had come when all workers"
      " were there; train longer (--config.epochs)"
    )
  result = storage.read_json(folder / "result.json") or {}
  accuracy = result.get("test_accuracy", np.nan)
  began = live_files.first_ticket(journal)
  runs = {LIVE: predict.of_records(records, began, accuracy)}
  comes = predict.joins(journal, cell.workers)
  for kind, streams in _streams(*(cell, read, other, durations_of or folder)):
    trace = predict.play(plan.rules(), streams, comes, messages)
    runs[kind] = predict.simulate(plan, cell.seed, trace)
  began = float(records.time[there - 1])
  return LiveComparison(
    cell.name,
    runs,
    max(predict.all_there(r.worker, cell.workers) for r in runs.values()),
    predict.where_time_goes(journal, read.spans, began),
  )


def _curves(both, zero):
  return {kind: predict.curve(run, zero) for kind, run in both.runs.items()}


def quantities(both: LiveComparison) -> list[dict[str, Any]]:
  """Returns the rows of a comparison's table: a quantity, what it is in each
  run, and the ratios of the simulations to the live run."""
  curves, rows = _curves(both, both.zero), []

  def row(name, of):
    values = {kind: float(of(kind)) for kind in _KINDS}
    live = values[LIVE]
    ratios = {
      f"{kind}, ratio": value / live if live else np.nan
      for kind, value in values.items()
      if kind != LIVE
    }
    rows.append({"quantity": name, **values, **ratios})

  def staleness(kind):
    return both.runs[kind].staleness[both.zero :]

  row("messages/s", lambda kind: predict.rate(both.runs[kind], both.zero))
  row("staleness, mean", lambda kind: staleness(kind).mean())
  row("staleness, max", lambda kind: staleness(kind).max())
  for share in _WAYS:
    loss = curves[LIVE].way(share)
    name = f"s to loss {loss:.3g} ({100 * share:.0f} % of the way)"
    row(name, lambda kind, loss=loss: curves[kind].reaches(loss))
  row("accuracy %", lambda kind: 100 * both.runs[kind].accuracy)
  return rows


def _number(value: float) -> str:
  return f"{value:.4g}" if np.isfinite(value) else "-"


def _ratio(value: float) -> str:
  return f"{value:.2f}" if np.isfinite(value) else "-"


def table(rows: list[dict[str, Any]]) -> str:
  """Returns `quantities` as text."""
  header, lines = ["", LIVE], []
  for kind in _KINDS[1:]:
    header += [kind, "ratio"]
  for row in rows:
    line = [row["quantity"], _number(row[LIVE])]
    for kind in _KINDS[1:]:
      line += [_number(row[kind]), _ratio(row[f"{kind}, ratio"])]
    lines.append(line)
  return text_table.format_table(header, lines)


def parts_text(parts: dict[str, float] | None) -> str:
  """Says where the time of a job goes."""
  if parts is None:
    return (
      "where the time of a job goes is not known: run launch.train with"
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


def points(both: LiveComparison) -> list[dict[str, Any]]:
  """Returns the numbers of the picture: panel, series, x, value.

  Panels: "staleness" (share of the messages against staleness), "throughput"
  (messages per second against seconds) and "loss" (against seconds); seconds
  are those since all workers were there.
  """
  out = []

  def add(panel, kind, xs, values):
    for x, value in zip(xs, values, strict=True):
      point = dict(panel=panel, series=kind, x=float(x), value=float(value))
      out.append(point)

  times = {
    kind: run.time[both.zero :] - run.time[both.zero - 1]
    for kind, run in both.runs.items()
  }
  edges = np.linspace(0, max(time[-1] for time in times.values()), _BINS + 1)
  for kind, curve in _curves(both, both.zero).items():
    counts = np.bincount(both.runs[kind].staleness[both.zero :])
    add("staleness", kind, range(len(counts)), counts / counts.sum())
    # The last bin that a run reaches is not full.
    full = int(np.searchsorted(edges, times[kind][-1], "right")) - 1
    rates = np.histogram(times[kind], edges)[0] / edges[1]
    add("throughput", kind, edges[:full], rates[:full])
    every = len(curve.time) // _POINTS + 1
    add("loss", kind, curve.time[::every], curve.loss[::every])
  return out


def _staleness_panel(axis, chosen):
  """Draws bars side by side, up to where a message in a hundred is."""
  most = 0
  for place, kind in enumerate(_KINDS):
    x, share = chosen("staleness", kind)
    axis.bar(x + 0.27 * (place - 1), 100 * share, 0.27, label=kind)
    most = max(most, x[np.cumsum(share) < 0.99].max(initial=0) + 1)
  axis.set_xlim(-0.7, most + 0.7)
  axis.set(xlabel="staleness", ylabel="messages (%)")


def draw(both: LiveComparison, stem: Path) -> None:
  """Draws a comparison as STEM.png and STEM.svg.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  plt = figure_lib.pyplot()
  numbers = points(both)

  def chosen(panel, kind):
    rows = [(p["panel"], p["series"]) == (panel, kind) for p in numbers]
    rows = [p for p, mine in zip(numbers, rows, strict=True) if mine]
    return np.array([[p["x"], p["value"]] for p in rows]).reshape(-1, 2).T

  figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
  _staleness_panel(axes[0], chosen)
  styles = dict(zip(_KINDS, ("-", "--", ":"), strict=True))
  for kind, run in both.runs.items():
    label = f"{kind}: {predict.rate(run, both.zero):.4g} messages/s"
    x, rates = chosen("throughput", kind)
    axes[1].step(x, rates, styles[kind], where="post", label=label)
    label = f"{kind}: accuracy {100 * run.accuracy:.1f} %"
    axes[2].plot(*chosen("loss", kind), styles[kind], label=label)
  axes[1].set(xlabel="seconds", ylabel="messages per second")
  axes[1].set_ylim(0)
  axes[2].set(xlabel="seconds", ylabel="training loss", yscale="log")
  for axis in axes:
    axis.grid(alpha=0.3)
    axis.legend()
  heading = f"{both.name}: live, and simulated with measured durations"
  figure_lib.save(figure, heading, stem)


def common_loss(cells: Sequence[LiveComparison]) -> float:
  """Returns a loss that every run reaches: 90 % of the way of the one that gets
  least far."""
  curves = [curve for both in cells for curve in _curves(both, 0).values()]
  start = min(curve.loss[0] for curve in curves)
  worst = max(curve.loss.min() for curve in curves)
  return float(start - 0.9 * (start - worst))


def race(cells: Sequence[LiveComparison], loss: float) -> list[dict[str, Any]]:
  """Returns when each cell reached a loss, counted from its first ticket, live
  and simulated, and how many times faster that is than the slowest."""
  rows = [
    {
      "cell": both.name,
      **{
        f"{kind}, messages/s": predict.rate(run, both.zero)
        for kind, run in both.runs.items()
      },
      **{
        f"{kind}, seconds": curve.reaches(loss)
        for kind, curve in _curves(both, 0).items()
      },
    }
    for both in cells
  ]
  for kind in _KINDS:
    times = np.array([row[f"{kind}, seconds"] for row in rows])
    slowest = times.max(initial=0, where=np.isfinite(times))
    for row, time in zip(rows, times, strict=True):
      row[f"{kind}, faster"] = slowest / time
  return rows


def race_table(rows: Sequence[dict[str, Any]], loss: float) -> str:
  """Returns `race` as text."""
  header = ["cell"]
  for what in ("messages/s", f"s to loss {loss:.3g}", "times faster"):
    header += [f"{what}, {LIVE}", *_KINDS[1:]]
  lines = [
    [
      row["cell"],
      *(
        (_ratio if what == "faster" else _number)(row[f"{kind}, {what}"])
        for what in ("messages/s", "seconds", "faster")
        for kind in _KINDS
      ),
    ]
    for row in rows
  ]
  return text_table.format_table(header, lines)


def draw_race(cells: Sequence[LiveComparison], loss: float, stem: Path) -> None:
  """Draws the losses of all cells against time, as STEM.png and STEM.svg."""
  plt = figure_lib.pyplot()
  figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
  for i, both in enumerate(cells):
    for style, (kind, curve) in zip(
      ("-", "--", ":"), _curves(both, 0).items(), strict=True
    ):
      label = f"{both.name}, {kind}".replace("$", r"\$")
      axis.plot(*curve, style, color=f"C{i % 10}", label=label)
  axis.axhline(loss, color="gray", lw=0.8)
  axis.set(xlabel="seconds", ylabel="training loss", yscale="log")
  axis.grid(alpha=0.3)
  axis.legend()
  figure_lib.save(figure, "live, and simulated with measured durations", stem)
