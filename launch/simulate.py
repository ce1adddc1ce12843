"""Trains with many simulated workers and shows what staleness costs.

  python -m launch.simulate --config=configs/simulate_digits.py

Each cell of the experiment (algorithm x number of workers x seed) is a training
run in simulated time. Ctrl-C, or a kill, loses nothing that matters: the same
command with --resume ends with the same parameters, to the bit.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
from absl import flags

from asgd import base, diagnosis, simulator
from launch import checkpoints, cli, experiment, figures, outputs, progress

_CONFIG = cli.define_config()
_OUT = flags.DEFINE_string(
  "out", None, "Folder for results. Default: the next free runs/CONFIG-NNN."
)
_RESUME = flags.DEFINE_bool(
  "resume", False, "Go on with this experiment where it stopped."
)
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Folder with the dataset's files. Default: look for them."
)

_CURES = ("gap_aware", "dana_zero", "dana_slim", "dana_dc")
_CHUNK_SECONDS = 0.25  # between two looks at clocks and signals


class _Signals:
  """Remembers the first request to stop; a second one interrupts at once."""

  def __init__(self):
    self.received = 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, self._handle)

  def _handle(self, number, frame):
    del frame
    if self.received:
      raise KeyboardInterrupt
    self.received = number


def _summary(records: base.Records) -> dict[str, float]:
  """What a stretch of records says, as the columns of an evaluation."""
  messages = float(records.message_norm.sum())
  return {
    "train_loss": float(records.loss.mean()),
    "staleness_mean": float(records.staleness.mean()),
    "staleness_max": int(records.staleness.max()),
    "gap_mean": float(records.gap.mean()),
    "gap_max": float(records.gap.max()),
    # Parameter change per unit of message: plain SGD's learning rate.
    "effective_rate": float(records.update_norm.sum()) / max(messages, 1e-30),
    "accepted": float(records.accepted.mean()),
  }


def _finite(records: base.Records) -> np.ndarray:
  """Which messages left finite numbers, bool[U]."""
  return np.isfinite(records.loss) & np.isfinite(records.update_norm)


def _part(records: base.Records, start: int) -> base.Records:
  return base.Records(*(column[start:] for column in records))


class _CellRun:
  """One cell: runs it, evaluates it, keeps its checkpoints and its log."""

  def __init__(self, exp, plan, cell, folder, sharpness, board):
    self._exp, self._plan, self._cell = exp, plan, cell
    self._folder = folder
    self._sharpness = sharpness
    config = exp.config
    self.trace = experiment.trace(exp, cell, plan.messages)
    self._ends = simulator.end_of_message(self.trace)
    count = min(config["evaluations"], plan.messages)
    self._evaluations = [
      round((k + 1) * plan.messages / count) for k in range(count)
    ]
    checks = np.linspace(0, count - 1, min(config["curvature_checks"], count))
    self._checks = {self._evaluations[round(i)] for i in checks}
    self._batch = exp.problem.batches(cell.seed, cell.workers)
    init_key, self._root = jax.random.split(jax.random.key(cell.seed))
    folder.mkdir(parents=True, exist_ok=True)
    self._checkpoints = checkpoints.Checkpoints(folder / "checkpoints")
    simulation = plan.host.init(exp.problem.init(init_key), cell.workers)
    saved = self._checkpoints.restore(simulation)
    if saved is None:
      saved = checkpoints.Saved(simulation, simulator.concatenate([]), [])
    self.simulation = saved.simulation
    self._parts = [saved.records]
    self.rows = saved.notes
    self.message = len(saved.records.loss)  # received so far
    self.diverged = not _finite(saved.records).all()
    self._log = outputs.CellLog(folder, board, self.rows)

  def advance(self, messages: int) -> base.Records:
    """Obeys the trace for up to that many messages, not past an evaluation."""
    end = min(self.message + messages, self._next_evaluation())
    self.simulation, part = self._plan.host.run(
      self.simulation,
      self.trace,
      int(self._ends[end - 1]),
      batch=self._batch,
      root=self._root,
    )
    self._parts.append(part)
    self.message = end
    self._look_for_nan(part)
    if end == self._next_evaluation():
      self._evaluate()
    return part

  def _next_evaluation(self):
    return self._evaluations[len(self.rows)]

  @property
  def finished(self) -> bool:
    """Whether the last evaluation, or the first after a NaN, was made."""
    if self.diverged:
      return bool(self.rows) and self.rows[-1]["message"] == self.message
    return len(self.rows) == len(self._evaluations)

  def _records(self):
    self._parts = [simulator.concatenate(self._parts)]
    return self._parts[0]

  def save(self) -> None:
    """Writes a checkpoint."""
    self._checkpoints.save(self.simulation, self._records(), self.rows)

  def close(self) -> None:
    """Releases the files."""
    self._log.close()
    self._checkpoints.close()

  def _look_for_nan(self, part):
    finite = _finite(part)
    if finite.all() or self.diverged:
      return
    self.diverged = True
    if self._exp.config["on_nan"] == "record":
      return
    first = int(np.argmin(finite))
    cell, plan = self._cell, self._plan
    raise NotFinite(
      f"{cell.name}: the loss is {part.loss[first]} and the update"
      f" {part.update_norm[first]} at message"
      f" {self.message - len(finite) + first + 1}, staleness"
      f" {part.staleness[first]}, with learning rate {plan.learning_rate:g}."
      f" This algorithm at {cell.workers} workers is stable up to a sharpness"
      f" of {plan.curvature_limit:.3g} at that rate: lower"
      f" --config.learning_rate, use fewer workers or a longer warm-up, or set"
      f" --config.on_nan=record to keep the cell as diverged and go on"
    )

  def _evaluate(self):
    cell, plan = self._cell, self._plan
    start = self._evaluations[len(self.rows) - 1] if self.rows else 0
    state = self.simulation.server
    result = self._exp.problem.evaluate(state.params)
    version = int(state.version)
    rate = plan.schedule(version) if callable(plan.schedule) else plan.schedule
    row = {
      "cell": cell.name,
      "algorithm": cell.title,
      "workers": cell.workers,
      "seed": cell.seed,
      "message": self.message,
      "update": version,
      "epoch": self.message / self._exp.problem.batches_per_epoch,
      "time": float(self.trace.time[self._ends[self.message - 1] - 1]),
      "learning_rate": float(rate),
      **_summary(_part(self._records(), start)),
      "test_loss": result.loss,
      "test_accuracy": result.accuracy,
    }
    if self.message in self._checks:
      row["sharpness"] = self._sharpness(state.params)
      row["rate_x_sharpness"] = row["learning_rate"] * row["sharpness"]
    self.rows.append(row)
    self._log.write(row)

  def result(self, seconds: float) -> dict[str, Any]:
    """What the cell came to."""
    cell, plan = self._cell, self._plan
    records, state = self._records(), self.simulation.server
    last, products = self.rows[-1], self._products()
    sent_accuracy = last["test_accuracy"]
    if not plan.server.sends_current:
      ticket = plan.server.send(state, jax.numpy.int32(0))
      sent_accuracy = self._exp.problem.evaluate(ticket.params).accuracy
    return {
      "cell": cell.name,
      "algorithm": cell.title,
      "recipe": self._exp.config["algorithms"][cell.label]["recipe"],
      "workers": cell.workers,
      "seed": cell.seed,
      "order": plan.order,
      "messages": len(records.loss),
      "evaluations": len(self.rows),
      "updates": int(state.version),
      "simulated_time": float(records.time[-1]),
      "test_accuracy": last["test_accuracy"],
      "test_loss": last["test_loss"],
      "sent_accuracy": sent_accuracy,
      **_summary(records),
      "learning_rate": plan.learning_rate,
      "rate_x_sharpness": products[0],
      "sustained": products[min(1, len(products) - 1)],
      "rate_x_sharpness_limit": plan.learning_rate * plan.curvature_limit,
      "diverged": self.diverged or self._collapsed(),
      "params_sha256": checkpoints.digest(state.params),
      "seconds": seconds,
    }

  def _products(self) -> list[float]:
    """Learning rate x sharpness where it is known, the largest first. The
    second largest is sustained: one check may be of a moment only."""
    values = [r.get("rate_x_sharpness") for r in self.rows]
    return sorted(filter(_known, values), reverse=True) or [float("nan")]

  def _collapsed(self) -> bool:
    """Whether the training loss blew up and ended no better than chance."""
    losses = [row["train_loss"] for row in self.rows]
    chance = np.log(self._exp.dataset.classes)
    if losses[-1] < 0.9 * chance:
      return False  # it has learnt something
    return bool(
      losses[-1] > 1.15 * min(losses)
      or losses[0] > 1.5 * chance
      or max(losses) > 1.1 * max(losses[0], chance)
    )

  def finish(self, result: dict[str, Any]) -> None:
    """Writes what is kept of a finished cell, result.json last."""
    self.save()
    outputs.save_records(self._folder / "records.npz", self._records())
    params = flax.serialization.to_bytes(
      jax.device_get(self.simulation.server.params)
    )
    outputs.write_atomically(self._folder / "params.msgpack", params)
    outputs.write_atomically(
      self._folder / "result.json", outputs.to_json(result, indent=2) + "\n"
    )


class NotFinite(ValueError):
  """A loss or an update is NaN or infinite."""


def _run_cell(run: _CellRun, exp, cell, bar, signals) -> dict[str, Any]:
  """Runs one cell to its end, or raises Stopped after saving it."""
  start = saved = time.monotonic()
  bar.skip(run.message)
  chunk = 16
  while not run.finished:
    began = time.monotonic()
    part = run.advance(chunk)
    now = time.monotonic()
    chunk = max(1, round(chunk * min(2, _CHUNK_SECONDS / (now - began))))
    bar.update(
      cell.name,
      len(part.loss),
      float(part.loss.mean()),
      float(part.staleness.mean()),
      float(part.gap.mean()),
    )
    if signals.received and not run.finished:
      run.save()
      raise cli.Stopped(
        f"stopped in {cell.name} at message {run.message}; the same command"
        " with --resume goes on from there",
        signals.received,
      )
    if now - saved >= exp.config["checkpoint_seconds"] and not run.finished:
      run.save()
      saved = time.monotonic()
  result = run.result(time.monotonic() - start)
  run.finish(result)
  return result


def _line(result) -> str:
  """One cell in one line."""
  text = (
    f"{result['cell']}: accuracy {_percent(result['test_accuracy'])}, staleness"
    f" mean {result['staleness_mean']:.1f} max {result['staleness_max']}, gap"
    f" mean {result['gap_mean']:.2g} max {result['gap_max']:.2g}, effective"
    f" learning rate {result['effective_rate']:.2g}"
  )
  if _known(result["rate_x_sharpness"]):
    text += (
      f", rate x sharpness up to {result['rate_x_sharpness']:.2g} (stable below"
      f" {result['rate_x_sharpness_limit']:.2g})"
    )
  return text


def _known(value) -> bool:
  return value is not None and np.isfinite(value)


def _percent(value) -> str:
  return f"{100 * value:.1f} %" if _known(value) else "-"


def _warnings(result) -> list[str]:
  """What a user should know about a cell, with the remedy."""
  lines = []
  limit, product = result["rate_x_sharpness_limit"], result["sustained"]
  remedy = "fewer workers or a longer warm-up"
  if result["recipe"] not in _CURES:
    remedy += ", or a cure such as dana_zero or gap_aware"
  # A tolerance of one step of the limit's grid.
  if _known(product) and product > 1.25 * limit:
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


_TABLE = (
  ("algorithm", "algorithm", None),
  ("workers", "workers", None),
  ("accuracy %", "test_accuracy", 100),
  ("loss", "test_loss", 1),
  ("time", "simulated_time", 1),
  ("staleness", "staleness_mean", 1),
  ("max", "staleness_max", None),
  ("gap", "gap_mean", 1),
  ("eff. rate", "effective_rate", 1),
  ("rate x sharp.", "rate_x_sharpness", 1),
  ("stable below", "rate_x_sharpness_limit", 1),
)


_RESULT_KEYS = {key for _, key, _ in _TABLE} | {
  *("sent_accuracy", "diverged", "messages", "evaluations"),
}


def _tabulate(results):
  """Returns (CSV rows, text table): one row per algorithm and workers."""
  groups: dict[tuple, list] = {}
  for result in results:
    key = result["workers"], result["algorithm"]
    groups.setdefault(key, []).append(result)
  columns = (*_TABLE, ("", "sent_accuracy", 100))  # the last in the CSV only
  csv_rows, text_rows = [], []
  for group in groups.values():
    csv_row = {"algorithm": group[0]["algorithm"]}
    csv_row.update(workers=group[0]["workers"], seeds=len(group))
    cells = []
    for _, key, scale in columns:
      if scale is None:
        cells.append(str(max(r[key] for r in group)))
        csv_row[key] = max(r[key] for r in group)
        continue
      values = [np.nan if r[key] is None else r[key] for r in group]
      mean, std = figures.mean_and_std(values)
      csv_row[key], csv_row[f"{key}_std"] = mean, std
      text = f"{scale * mean:.1f}" if scale == 100 else f"{mean:.3g}"
      if scale == 100 and np.isfinite(std):
        text += f" ± {scale * std:.1f}"
      cells.append(text if np.isfinite(mean) else "-")
    cells.pop()
    diverged = sum(r["diverged"] for r in group)
    csv_row["diverged"] = diverged
    cells.append(f"{diverged} of {len(group)} diverged" if diverged else "")
    csv_rows.append(csv_row)
    text_rows.append(cells)
  header = [name for name, _, _ in _TABLE] + [""]
  return csv_rows, outputs.format_table(header, text_rows)


def _report(folder: Path, exp, results) -> None:
  """Writes what is made from all cells, and says where everything is."""
  rows = []
  for cell in exp.cells:
    rows += _read_rows(folder / "cells" / cell.name)
  outputs.write_atomically(
    folder / "metrics.jsonl",
    "".join(outputs.to_json(row) + "\n" for row in rows),
  )
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
  figure = "figure       {0}/figure.png, .svg; its numbers {0}/figure.csv"
  try:
    figures.draw(points, folder / "figure", heading)
  except ImportError:
    figure = "figure       not drawn: pip install -e '.[viz]'; {0}/figure.csv"
  except Exception as error:  # the runs are done: their numbers come first
    figure = f"figure       not drawn: {error!r}; {{0}}/figure.csv"
  print(f"\n{heading}\n\n{table}")
  for line in (
    figure,
    "table        {0}/table.txt, {0}/results.csv",
    "metrics      {0}/metrics.jsonl, and {0}/tensorboard for TensorBoard",
    "each run     {0}/cells/ (params.msgpack, records.npz, result.json)",
    "config       {0}/config.json",
  ):
    print(line.format(folder))


def _finished_result(folder: Path) -> dict[str, Any] | None:
  """Returns the result of a cell that is finished and whole, else None: it is
  then made again from its last checkpoint."""
  result = outputs.read_json(folder / "result.json")
  try:
    rows = _read_rows(folder)
    with np.load(folder / "records.npz") as records:
      whole = len(records["loss"]) == result["messages"]
    whole = whole and len(rows) == result["evaluations"]
    return result if whole and set(result) >= _RESULT_KEYS else None
  except Exception:  # whatever is missing or cut short
    return None


def _read_rows(folder: Path) -> list[dict[str, Any]]:
  text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
  return [json.loads(line) for line in text.splitlines()]


def main() -> None:
  """Runs the experiment that the flags describe."""
  if _CONFIG.value is None:
    raise ValueError("no --config; try --config=configs/simulate_digits.py")
  try:
    jax.devices()
  except RuntimeError as error:
    raise ValueError(
      f"JAX finds no device: {error}; see the variable JAX_PLATFORMS"
    ) from error
  config = experiment.override(_CONFIG.value, cli.overrides())
  exp = experiment.build(config, data_dir=_DATA_DIR.value)
  free = ("on_nan", "checkpoint_seconds")  # may differ when resuming
  identity = {
    "config": {k: v for k, v in exp.config.items() if k not in free},
    "dataset": {
      "name": exp.dataset.name,
      "sha256": checkpoints.digest(exp.dataset[2:]),
    },
    "free": {
      **{k: exp.config[k] for k in free},
      "data source": exp.dataset.source,
      "jax": f"{jax.__version__} on {jax.default_backend()}",
    },
  }
  name = Path(flags.FLAGS["config"].config_filename.split(":")[0]).stem
  folder = outputs.open_folder(_OUT.value, name, identity, resume=_RESUME.value)
  print(f"data: {exp.dataset.source}\nresults go to {folder}")
  signals = _Signals()
  sharpness = diagnosis.make_sharpness(exp.problem.loss, exp.problem.probe)
  plans: dict[tuple, experiment.Plan] = {}
  total = sum(experiment.messages(exp, cell) for cell in exp.cells)
  bar = progress.Progress(total)
  results, warned = [], set()
  try:
    for cell in exp.cells:
      place = folder / "cells" / cell.name
      result = _finished_result(place)
      if result is None:
        key = cell.label, cell.workers
        if key not in plans:
          plans.clear()  # compiled code of cells that are done
          plans[key] = experiment.plan(exp, cell)
        board = folder / "tensorboard" / cell.name
        run = _CellRun(exp, plans[key], cell, place, sharpness, board)
        try:
          result = _run_cell(run, exp, cell, bar, signals)
        finally:
          run.close()
        bar.line(_line(result))
        if key not in warned:
          lines = _warnings(result)
          warned |= {key} if lines else set()
          for line in lines:
            bar.line(line)
      else:
        bar.skip(experiment.messages(exp, cell))
      results.append(result)
      if signals.received and len(results) < len(exp.cells):
        raise cli.Stopped(
          f"stopped after {cell.name}; the same command with --resume goes on"
          " from there",
          signals.received,
        )
  finally:
    bar.close()
  _report(folder, exp, results)


if __name__ == "__main__":
  cli.run(main)
