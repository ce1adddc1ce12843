"""Predicted and measured: live runs beside their simulations, in one picture.

  python -m launch.compare RESULTS/cells/NAME

measures how long the jobs of a live run took, plays the same protocol with
these times, trains the same cell in simulation, and draws both: how stale
messages were, how many came in a second, and the loss against time. There are
two simulations. In one, the jobs of a worker take what they took, one after the
other: that is the run again, and says that the simulator does what the runtime
does. In the other, times are drawn from those of each worker: a prediction from
how they are distributed alone. It takes workers for independent; where they
share cores, what slows all of them at once is more than it knows of.

The time of a job holds that of the server and of waiting for it. So it is that
of a number of workers, and of machines as busy as they were.

With RESULTS alone, all its cells are compared, and with each other: when each
of them reached the same loss. With --durations_of=RESULTS/cells/OTHER, times
are those of another run. And

  python -m launch.compare --config=configs/straggler_digits.py

trains a config live before, with the flags of launch.serve.
"""

import itertools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from asgd import durations
from launch import (
  cell_book,
  checkpoints,
  cli,
  experiment,
  live_cell,
  live_run,
  measured,
  outputs,
  serve,
  session,
)

_DURATIONS_OF = flags.DEFINE_string(
  "durations_of", None, "Other RESULTS/cells/NAME to take the durations from."
)
_WAYS = (0.5, 0.9)  # that a live run's loss goes
_EARLY = 0.05  # of the messages, from where on it is said
_BINS = 40  # of time, in the picture
_POINTS = 2000  # most of a curve in the picture
_LIVE, _ORDER, _DRAWN = "live", "in order", "drawn"
_KINDS = (_LIVE, _ORDER, _DRAWN)


class Comparison(NamedTuple):
  """A cell, live and simulated."""

  name: str
  runs: dict[str, measured.Run]  # by kind
  zero: int  # the message with which clocks start
  parts: dict[str, float] | None  # where the time of a live job goes


def _experiment(held, folder, data_dir):
  """Returns (experiment, cell) of a live run's folder."""
  config = {**held["config"], **held["free"]}
  config = {k: v for k, v in config.items() if k in experiment.DEFAULTS}
  exp = experiment.build(config, data_dir=data_dir)
  if checkpoints.digest(exp.dataset[2:]) != held["dataset"]["sha256"]:
    raise ValueError(
      f"the data is not that of the run ({exp.dataset.source}); give the folder"
      " with --data_dir"
    )
  for cell in exp.cells:
    if cell.name == folder.name:
      return exp, cell
  raise ValueError(f"{folder}: the experiment has no cell {folder.name!r}")


def _streams(cell, read, other, durations_of):
  """Yields (kind, times of the jobs of each worker) of the simulations."""
  found = measured.jobs(other.journals[0], other.spans)
  if not found:
    raise ValueError(
      f"{durations_of} holds no message: there is no time of a job to be"
      " measured; train longer (--config.epochs)"
    )
  measured_at = 1 + max(job.worker for job in found)
  settled = measured.settled(found, measured_at)
  rows = settled if other is not read else measured.in_order(found, measured_at)
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
) -> Comparison:
  """Compares a live run with its simulations.

  Args:
    folder: RESULTS/cells/NAME.
    durations_of: another one, whose times are taken; None is this one.
    data_dir: where the dataset's files are; None looks in the usual places.

  Raises:
    ValueError: if there is nothing to compare, or too little.
  """
  read = live_cell.read(folder)
  other = live_cell.read(durations_of) if durations_of else read
  exp, cell = _experiment(read.held, folder, data_dir)
  records, journal = read.records[0], read.journals[0]
  messages = len(records.loss)
  there = measured.all_there(records.worker, cell.workers)
  if 2 * there > messages:
    raise ValueError(
      f"{cell.name}: {there} of {messages} messages had come when all workers"
      " were there; train longer (--config.epochs)"
    )
  result = outputs.read_json(folder / "result.json") or {}
  accuracy = result.get("test_accuracy", np.nan)
  began = live_run.first_ticket(journal)
  runs = {_LIVE: measured.of_records(records, began, accuracy)}
  comes = measured.joins(journal, cell.workers)
  for kind, streams in _streams(
    *(cell, read, other, durations_of or folder)
  ):
    rules = experiment.rules(exp, cell)
    trace = measured.play(rules, streams, comes, messages)
    runs[kind] = measured.simulate(exp, cell, trace)
  began = float(records.time[there - 1])
  return Comparison(
    cell.name,
    runs,
    max(measured.all_there(r.worker, cell.workers) for r in runs.values()),
    measured.where_time_goes(journal, read.spans, began),
  )


def _curves(both, zero):
  return {kind: measured.curve(run, zero) for kind, run in both.runs.items()}


def quantities(both: Comparison) -> list[dict[str, Any]]:
  """Returns the rows of a comparison's table: a quantity, what it is in each
  run, and the ratios of the simulations to the live run."""
  curves, rows = _curves(both, both.zero), []

  def row(name, of):
    values = {kind: float(of(kind)) for kind in _KINDS}
    live = values[_LIVE]
    ratios = {
      f"{kind}, ratio": value / live if live else np.nan
      for kind, value in values.items()
      if kind != _LIVE
    }
    rows.append({"quantity": name, **values, **ratios})

  def staleness(kind):
    return both.runs[kind].staleness[both.zero :]

  row("messages/s", lambda kind: measured.rate(both.runs[kind], both.zero))
  row("staleness, mean", lambda kind: staleness(kind).mean())
  row("staleness, max", lambda kind: staleness(kind).max())
  for share in _WAYS:
    loss = curves[_LIVE].way(share)
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
  header, lines = ["", _LIVE], []
  for kind in _KINDS[1:]:
    header += [kind, "ratio"]
  for row in rows:
    line = [row["quantity"], _number(row[_LIVE])]
    for kind in _KINDS[1:]:
      line += [_number(row[kind]), _ratio(row[f"{kind}, ratio"])]
    lines.append(line)
  return outputs.format_table(header, lines)


def parts_text(parts: dict[str, float] | None) -> str:
  """Says where the time of a job goes."""
  if parts is None:
    return (
      "where the time of a job goes is not known: run launch.serve with"
      " --config.live.spans=True"
    )
  words = ", ".join(
    f"{name} {1000 * value:.2f}"
    for name, value in parts.items()
    if name != measured.BUSY
  )
  return (
    f"a live job in ms: {words}; the server is busy"
    f" {100 * parts[measured.BUSY]:.0f} % of the time or less"
  )


def points(both: Comparison) -> list[dict[str, Any]]:
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


def _pyplot():
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  return plt


def _save(plt, figure, heading, stem):
  figure.suptitle(heading.replace("$", r"\$"))
  for suffix in (".png", ".svg"):
    figure.savefig(stem.with_suffix(suffix), dpi=110)
  plt.close(figure)


def draw(both: Comparison, stem: Path) -> None:
  """Draws a comparison as STEM.png and STEM.svg.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  plt = _pyplot()
  numbers = points(both)

  def chosen(panel, kind):
    rows = [(p["panel"], p["series"]) == (panel, kind) for p in numbers]
    rows = [p for p, mine in zip(numbers, rows, strict=True) if mine]
    return np.array([[p["x"], p["value"]] for p in rows]).reshape(-1, 2).T

  figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
  _staleness_panel(axes[0], chosen)
  styles = dict(zip(_KINDS, ("-", "--", ":"), strict=True))
  for kind, run in both.runs.items():
    label = f"{kind}: {measured.rate(run, both.zero):.4g} messages/s"
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
  _save(plt, figure, heading, stem)


def common_loss(found: Sequence[Comparison]) -> float:
  """Returns a loss that every run reaches: 90 % of the way of the one that gets
  least far."""
  curves = [curve for both in found for curve in _curves(both, 0).values()]
  start = min(curve.loss[0] for curve in curves)
  worst = max(curve.loss.min() for curve in curves)
  return float(start - 0.9 * (start - worst))


def race(found: Sequence[Comparison], loss: float) -> list[dict[str, Any]]:
  """Returns when each cell reached a loss, counted from its first ticket, live
  and simulated, and how many times faster that is than the slowest."""
  rows = [
    {
      "cell": both.name,
      **{
        f"{kind}, messages/s": measured.rate(run, both.zero)
        for kind, run in both.runs.items()
      },
      **{
        f"{kind}, seconds": curve.reaches(loss)
        for kind, curve in _curves(both, 0).items()
      },
    }
    for both in found
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
    header += [f"{what}, {_LIVE}", *_KINDS[1:]]
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
  return outputs.format_table(header, lines)


def draw_race(found: Sequence[Comparison], loss: float, stem: Path) -> None:
  """Draws the losses of all cells against time, as STEM.png and STEM.svg."""
  plt = _pyplot()
  figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
  for i, both in enumerate(found):
    for style, (kind, curve) in zip(
      ("-", "--", ":"), _curves(both, 0).items(), strict=True
    ):
      label = f"{both.name}, {kind}".replace("$", r"\$")
      axis.plot(*curve, style, color=f"C{i % 10}", label=label)
  axis.axhline(loss, color="gray", lw=0.8)
  axis.set(xlabel="seconds", ylabel="training loss", yscale="log")
  axis.grid(alpha=0.3)
  axis.legend()
  _save(plt, figure, "live, and simulated with measured durations", stem)


def _picture(make, stem):
  """Draws; says where the picture is, or what is missing."""
  try:
    make()
  except ImportError:
    return f"picture  not drawn: pip install -e '.[viz]'; {stem}.csv"
  return f"picture  {stem}.png, .svg; its numbers {stem}.csv"


def _compare_cell(folder, out):
  """Compares a cell, says what came of it and writes it down."""
  other = Path(_DURATIONS_OF.value) if _DURATIONS_OF.value else None
  both = compare(folder, durations_of=other, data_dir=session.DATA_DIR.value)
  out.mkdir(parents=True, exist_ok=True)
  stem, rows = out / "compare", quantities(both)
  outputs.write_csv(out / "compare.csv", points(both))
  outputs.write_csv(out / "compare-table.csv", rows)
  of = f", with the durations of {other}" if other else ""
  print(
    f"\n{both.name}: live, and simulated with its durations in order, and drawn"
    f" from them{of}\n\n{table(rows)}\n{parts_text(both.parts)}"
  )
  early, messages = both.zero, len(both.runs[_LIVE].time)
  if early > _EARLY * messages:
    print(
      f"note: {early} of {messages} messages came before all workers were"
      " there: what is counted from the first ticket depends on that"
    )
  print(_picture(lambda: draw(both, stem), stem))
  return both


def _compare_all(folder, out):
  """Compares all cells of an experiment, and them with each other."""
  cells = [
    place
    for place in sorted((folder / "cells").iterdir())
    if cell_book.finished_result(place)
  ]
  if not cells:
    raise ValueError(f"{folder} holds no finished run to be compared")
  found = [
    _compare_cell(place, out / place.name if out else place) for place in cells
  ]
  if len(found) == 1:
    return
  loss, stem = common_loss(found), (out or folder) / "compare"
  rows = race(found, loss)
  outputs.write_csv(stem.with_suffix(".csv"), rows)
  print(f"\n{race_table(rows, loss)}")
  print(_picture(lambda: draw_race(found, loss, stem), stem))


def main(folder: str | None = None) -> None:
  """Compares the run or the experiment that is named."""
  out = None
  if folder is not None:
    if session.CONFIG.value is not None or cli.overrides():
      raise ValueError(f"{folder} brings its own config; drop --config")
    place = Path(folder)
    out = Path(session.OUT.value) if session.OUT.value else None
  elif session.CONFIG.value is not None:
    place = serve.train()
    signal.signal(signal.SIGINT, signal.default_int_handler)
  else:
    raise ValueError(
      "which run? write python -m launch.compare RESULTS/cells/NAME, a folder"
      " that launch.serve made, or --config=FILE to train one"
    )
  if (place / "cells").is_dir():
    _compare_all(place, out)
  else:
    _compare_cell(place, out or place)


if __name__ == "__main__":
  cli.run(main, words=1)
