"""One cell of an experiment, run live: real workers, real time, real faults.

The driver watches: it replaces what dies, evaluates the parameters that the
shards keep for it, and writes down what it sees. Training does not wait for it.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, elementwise, sharding, simulator, transforms
from asgd.runtimes import files, memory, protocol, threads
from asgd.runtimes.deadlines import Ladder
from asgd.runtimes.protocol import Entry
from asgd.runtimes.shard import Setup, sizes
from asgd.runtimes.worker_loop import Disconnected, Duty
from launch import cell_book, checkpoints, experiment

_LOOK = 0.1  # seconds between two looks at the cluster


class Live(NamedTuple):
  """What a live run is made of; a runtime makes a cluster of it."""

  exp: experiment.Experiment
  plan: experiment.Plan
  cell: experiment.Cell
  setup: Setup
  folder: Path  # of the cell
  memory: Path  # shared memory and sockets
  params: Any  # NumPy arrays, before the first message


def dtype_on_wire(config: Mapping[str, Any]) -> str | None:
  """Returns the dtype to which numbers are rounded on their way, or None."""
  wire = config["server"]["wire"]
  return None if wire == "float32" else wire


def group(
  exp: experiment.Experiment, cell: experiment.Cell
) -> simulator.Group:
  """Returns the devices of each worker of a cell."""
  live = exp.config["live"]
  several = experiment.recipe(exp, cell).steps > 1  # batches in a job
  return simulator.Group(live["devices"], live["parallel"], int(several))


def prepare(
  exp: experiment.Experiment,
  plan: experiment.Plan,
  cell: experiment.Cell,
  folder: Path,
  memory: Path,
) -> Live:
  """Says what a live run of a cell is.

  Raises:
    ValueError: for an order that only a simulation can keep, and for an
      algorithm that cannot be split into shards.
  """
  server, live = exp.config["server"], exp.config["live"]
  key, _ = jax.random.split(jax.random.key(cell.seed))
  params = jax.device_get(exp.problem.init(key))
  totals = check(exp, cell)
  if totals:
    _check_totals(plan, params, server["shards"])
  book = cell_book.Book(exp, plan, cell, lambda params: 0.0)
  setup = Setup(
    rules=experiment.rules(exp, cell),
    workers=cell.workers,
    jobs=plan.messages,
    shards=server["shards"],
    consistent=server["consistent"] and server["shards"] > 1,
    totals=totals,
    log=server["log"],
    snapshot_seconds=exp.config["checkpoint_seconds"],
    owned=exp.config["data"]["partition"] == "sharded",
    ladder=Ladder(
      live["late_mads"], live["late_seconds"], live["start_seconds"]
    ),
    keep_params_at=tuple(book.due),
    together=live["together"],
  )
  return Live(exp, plan, cell, setup, folder, memory, params)


def check(exp: experiment.Experiment, cell: experiment.Cell) -> bool:
  """Checks that a cell can be run live, before anything is written.

  Returns:
    Whether its algorithm, on shards, needs numbers of the whole.

  Raises:
    ValueError: for an order that only a simulation can keep, and for what
      cannot be split into shards, naming the remedy.
  """
  server, rules = exp.config["server"], experiment.rules(exp, cell)
  if server["shards"] == 1:
    return False
  if rules.round and not server["consistent"]:
    raise ValueError(
      f"{cell.label} works in rounds, of which shards with an order of their"
      " own would make different ones after a failure: set"
      " config.server.consistent=True, or config.server.shards=1"
    )
  params = jax.device_get(exp.problem.init(jax.random.key(cell.seed)))
  sharding.plan(params, server["shards"])
  recipe = experiment.recipe(exp, cell)
  algorithm = transforms.own_statistics(recipe.algorithm)
  try:
    elementwise.check(algorithm, params)
    return False
  except ValueError as error:
    refused = error
  try:
    elementwise.check(algorithm, params, totals=True)
  except ValueError:
    raise refused from None
  if not server["consistent"]:
    raise ValueError(
      f"{cell.label} needs a norm over all shards, which are of one version in"
      " a consistent run only: set config.server.consistent=True, or"
      " config.server.shards=1"
    )
  if recipe.every > 1 or exp.config["gate"]["max_staleness"] is not None:
    raise ValueError(
      f"{cell.label} needs a norm over all shards, which works where each"
      " message is an update: without rounds, gate or averaging, or with"
      " config.server.shards=1"
    )
  return True


def memory_needed(exp: experiment.Experiment, cell: experiment.Cell) -> int:
  """Returns the bytes of shared memory that a cell takes, or a little less."""
  server = exp.config["server"]
  setup = Setup(
    experiment.rules(exp, cell), cell.workers, 0, log=server["log"]
  )
  params = jax.eval_shape(exp.problem.init, jax.random.key(cell.seed))
  return memory.needed(
    sizes(setup), params, compress=dtype_on_wire(exp.config)
  )


def first_ticket(entries: Sequence[Entry]) -> float:
  """Returns when the first ticket was sent, in seconds; clocks that start with
  the run count the time in which workers come, too."""
  sent = (e.time for e in entries if e.action in (base.SEND, base.KEEP))
  return next(sent, entries[0].time if entries else 0.0)


def read_journals(folder: Path, shards: int) -> list[list[Entry]]:
  """Returns the journals of a cell that is to go on, empty if it did nothing.

  Raises:
    ValueError: if they are not all there, or not what a run wrote.
  """
  paths = [files.journal_path(folder, index) for index in range(shards)]
  journals = [files.read_journal(p) if p.exists() else [] for p in paths]
  sinks = [files.records_path(folder, index) for index in range(shards)]
  left = [path for path in (*sinks, folder / "metrics.jsonl") if _size(path)]
  left += (folder / "checkpoints").glob("[0-9]*")
  for path, entries in zip(paths, journals, strict=True):
    began = left or (journals[0] and not path.exists() and paths[:1])
    if not entries and began:
      raise ValueError(
        f"{path} is gone or empty, and {began[0]} is there: what the run did"
        " cannot be known without it. Put it back, or start anew in another"
        " folder (--out)"
      )
    files.check_entries(path, entries)
  return journals


def read_rows(folder: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell that is to go on; a last one that was cut
  short is dropped.

  Raises:
    ValueError: naming the line that is none.
  """
  path, rows = folder / "metrics.jsonl", []
  if not path.exists():
    return rows
  lines = path.read_text(encoding="utf-8", errors="replace").splitlines(True)
  for number, line in enumerate(lines, 1):
    if not line.endswith("\n"):
      break
    try:
      row = json.loads(line)
    except ValueError:
      row = None
    if not isinstance(row, dict) or not row.keys() >= _IN_A_ROW or not (
      isinstance(row["message"], int)
    ):
      raise ValueError(
        f"{path}, line {number} is no evaluation: {line[:60].strip()!r}. Put"
        " the file back as the run wrote it, or remove it; evaluations that"
        " were made are then made again, with the parameters of now"
      )
    rows.append(row)
  return rows


_IN_A_ROW = {
  *("message", "update", "time", "train_loss", "test_loss", "test_accuracy")
}


def _check_totals(plan, params, shards):
  """Checks that the totals of an algorithm can be asked for, on a shard."""
  parts = sharding.split(sharding.plan(params, shards), params)
  steps = simulator.compile_steps(plan.server, None)
  state = simulator.start(plan.server, parts[0])
  ticket = steps.send(state, jax.numpy.int32(0))
  jax.eval_shape(steps.stage, (), state, ticket, parts[0], np.float32(0))


def make_duty(live: Live) -> Duty:
  """Returns what its workers do."""
  exp, cell, setup = live.exp, live.cell, live.setup
  _, root = jax.random.split(jax.random.key(cell.seed))
  split = sharding.plan(live.params, setup.shards) if setup.shards > 1 else None
  return Duty(
    simulator.compile_work(live.plan.worker, group(exp, cell)),
    live.plan.worker.init,
    experiment.batches(exp, cell),
    root,
    live.params,
    split,
    setup.consistent,
    setup.rules.depth,
    tuple(exp.config["live"]["slowdown"]),
  )


class NotFinite(ValueError):
  """Workers send what is not finite."""


class LiveRun:
  """Watches a cell until it is done."""

  def __init__(
    self,
    live: Live,
    make_cluster: Callable[..., Any],
    sharpness: Callable[[Any], float],
    board: Path,
    *,
    resume: bool,
    replaced: Mapping[str, int] | None = None,
  ):
    """Starts the cell, or goes on where its journals end.

    Args:
      live: what is run.
      make_cluster: (live, images, resumed, began) -> a cluster.
      sharpness: from `diagnosis.make_sharpness`.
      board: folder for TensorBoard.
      resume: go on, if there is something to go on with.
      replaced: processes, before that.

    Raises:
      ValueError: if what is there is not all there, or does not fit together.
    """
    self._live, self._replaced = live, dict(replaced or {})
    self._ticket: float | None = None  # when the first was sent
    folder = live.folder
    folder.mkdir(parents=True, exist_ok=True)
    count = range(live.setup.shards)
    self._journals = [files.journal_path(folder, index) for index in count]
    self._sinks = [files.records_path(folder, index) for index in count]
    journals = read_journals(folder, len(count)) if resume else [[]]
    entries = journals[0]
    self._book = cell_book.Book(live.exp, live.plan, live.cell, sharpness)
    self._checkpoints = checkpoints.LiveCheckpoints(folder / "checkpoints")
    images, rows = None, []
    if entries:
      held = [len(journal) for journal in journals]
      images = self._checkpoints.restore(self._template(), held)
      rows = read_rows(folder)
    received = sum(entry.action == base.RECEIVE for entry in entries)
    rows = [row for row in rows if row["message"] <= received]
    self._book.open(folder, board, rows)
    before = entries[-1].time if entries else 0.0
    self._began = time.monotonic() - before
    self.message = received
    self._rollbacks = [None for _ in count]  # that were told
    # What is to be told once it is known.
    self._resumed = bool(entries)
    self._fresh = not (live.memory / "shard-0" / "messages").exists()
    self._gathers = live.setup.together and not received
    self.cluster = make_cluster(live, images, bool(entries), self._began)
    self._saved = time.monotonic()
    self._next_look = 0.0
    self.looked = self._saved  # when records were last read

  def _template(self):
    live = self._live
    parts = [live.params]
    if live.setup.shards > 1:
      plan = sharding.plan(live.params, live.setup.shards)
      parts = sharding.split(plan, live.params)
    return [simulator.start(live.plan.server, part) for part in parts]

  def start(self) -> None:
    """Starts the cluster."""
    self.cluster.start()

  def look(self) -> tuple[list[str], base.Records, bool]:
    """Looks at the cluster once; to be called again and again.

    Returns:
      What there is to tell, the records that are new, whether all is done.

    Raises:
      NotFinite: if nothing else comes, and that is not to be recorded.
    """
    pause = self._next_look - time.monotonic()
    if pause > 0:
      time.sleep(pause)
    self._next_look = time.monotonic() + _LOOK
    news = self.cluster.check()
    status = self.cluster.status()
    if status is None:
      return news, simulator.concatenate([]), False
    self._check_files()
    news += self._news(status)
    new = self._new_records()
    self.looked = time.monotonic()
    self._check_refused(status[0])
    done = threads.finished(status)
    with contextlib.suppress(Disconnected):  # the next look will do
      self._evaluate(status, done)
      if time.monotonic() - self._saved > self._live.exp.config[
        "checkpoint_seconds"
      ]:
        self.save()
    done = done and (self._book.next is None or not self.message)
    return news, new, done

  def _check_files(self):
    """Raises ValueError if what the shards write is not there any more."""
    for path in (*self._journals, *self._sinks):
      if not path.exists():
        raise ValueError(files.gone(path))

  def _news(self, status) -> list[str]:
    """What the shards have to tell: where they go on, and who is there."""
    news, shards = [], len(status)
    if self._resumed:
      self._resumed = False
      news.append(self._going_on(status))
      self._rollbacks = [shard["rollback"] for shard in status]
    for index, shard in enumerate(status):
      if shard["rollback"] in (None, self._rollbacks[index]):
        continue
      self._rollbacks[index] = back = shard["rollback"]
      of = f"shard {index} " if shards > 1 else ""
      why = f" ({back.why})" if back.why else ""
      news.append(
        f"{of}rolled back {back.updates} updates, to message {back.message}"
        f"{why}"
      )
    workers, there = self._live.setup.workers, len(status[0]["workers"])
    if self._gathers and status[0]["received"]:
      self._gathers = False
      if there < workers:
        news.append(
          f"it began with only {there} of {workers} workers; the others may"
          " still come"
        )
    return news

  def _going_on(self, status):
    at = f"going on at message {self.message}, from"
    back = [shard["rollback"] for shard in status if shard["rollback"]]
    if not back:
      # Everything since the checkpoint, if there is one, was without effect.
      return f"{at} {'the trace' if self._fresh else 'shared memory'}"
    undone = sum(rollback.updates for rollback in back)
    from_where = f"the checkpoint of message {back[0].message}"
    if not back[0].row:
      from_where = "the beginning, as there is no checkpoint"
    of = f" of {len(back)} shards" if len(back) > 1 else ""
    why = f" ({back[0].why})" if back[0].why else ""
    return f"{at} {from_where}: {undone} updates{of} rolled back{why}"

  def _read_records(self):
    return _combine(
      [files.read_records(path) for path in self._sinks], self._live
    )

  def _new_records(self):
    new = files.read_records(self._sinks[0], self.message)
    self.message += len(new.loss)
    return new

  def _check_refused(self, status):
    if status["refused"] <= 3 * self._live.setup.workers:
      return
    cell, plan = self._live.cell, self._live.plan
    raise NotFinite(
      f"{cell.name}: the last {status['refused']} messages were not finite, at"
      f" message {status['received']}, with learning rate"
      f" {plan.learning_rate:g}. This algorithm at {cell.workers} workers is"
      f" stable up to a sharpness of {plan.curvature_limit:.3g} at that rate:"
      " lower --config.learning_rate, use fewer workers or a longer warm-up"
    )

  def _evaluate(self, status, done):
    """Makes the evaluations whose parameters are there."""
    while self._book.next is not None:
      due = self._book.next
      last = due == self._live.setup.jobs
      # Shards of their own mind may receive a job twice or, in the end, not.
      if not done and (last or any(s["received"] < due for s in status)):
        return
      kept = not last and all(due in s["kept_params"] for s in status)
      # What was kept died with a shard: the parameters of now will do.
      message = due if kept else status[0]["received"]
      params = self.cluster.params(due if kept else None)
      records = files.read_records(self._sinks[0])
      first = self._book.rows[-1]["message"] if self._book.rows else 0
      # At least one; without a log, some die with a shard.
      first = max(min(first, message - 1, len(records.loss) - 1), 0)
      part = base.Records(*(column[first:message] for column in records))
      if not len(part.loss):
        return
      seconds = float(part.time[-1]) - self._first_ticket()
      self._book.evaluate(message, params, int(part.update[-1]), seconds, part)

  def _first_ticket(self):
    if self._ticket is None:
      self._ticket = first_ticket(files.read_journal(self._journals[0]))
    return self._ticket

  def save(self) -> None:
    """Writes a checkpoint.

    Raises:
      Disconnected: if a shard is gone.
      ValueError: if it cannot be written.
    """
    self._checkpoints.save(self.cluster.images())
    self._saved = time.monotonic()

  def drain(self, seconds: float) -> bool:
    """Lets workers finish what they do, and writes a checkpoint; False if they
    did not in that time."""
    end = time.monotonic() + seconds
    self._ask(self.cluster.pause)
    whole = False
    while not whole and time.monotonic() < end:
      status = self.cluster.status()
      whole = status and not any(shard["busy"] for shard in status)
      if not whole:
        time.sleep(_LOOK)
    self._ask(self.save)
    self._new_records()
    return bool(whole)

  def _ask(self, question: Callable[[], Any]) -> Any:
    """Asks the shards something, again if one has to be replaced first."""
    while True:
      try:
        return question()
      except Disconnected:
        self.cluster.check()
        time.sleep(_LOOK)

  def finish(self) -> dict[str, Any]:
    """Writes what is kept of a finished cell, and returns its result.

    Raises:
      ValueError: if what the shards wrote is not all there.
    """
    live = self._live
    params = self._ask(self.cluster.params)
    images = self._ask(self.cluster.images)
    self._check_files()
    journals = [files.read_journal(path) for path in self._journals]
    for path, sink, entries, (_, meta) in zip(
      self._journals, self._sinks, journals, images, strict=True
    ):
      if len(entries) < meta["rows"]:
        raise ValueError(
          f"{path} has {len(entries)} rows where the run wrote {meta['rows']}:"
          " it was cut short or changed; start anew in another folder (--out)"
        )
      count = _size(sink) // files.RECORD.itemsize
      files.check_records(sink, count, entries, whole=True)
    sent = None
    if not live.plan.server.sends_current:
      send = jax.jit(live.plan.server.send)
      parts = [send(state, np.int32(0)).params for state, _ in images]
      sent = parts[0]
      if len(parts) > 1:
        plan = sharding.plan(live.params, len(parts))
        sent = sharding.join(plan, jax.device_get(parts))
    records = self._read_records()
    seconds = float(records.time[-1]) - first_ticket(journals[0])
    result = self._book.result(
      *(records, params, sent, int(images[0][0].version), seconds),
      diverged=not cell_book.finite(records).all(),
    )
    undone = sum(protocol.rolled_back(entries)[1] for entries in journals)
    del result["simulated_time"]  # it is real
    result.update(
      replaced=self.replaced,
      rolled_back=undone,
      took_part=len(np.unique(records.worker)),
    )
    cell_book.finish(live.folder, result, records, params)
    return result

  @property
  def replaced(self) -> dict[str, int]:
    """How many processes were replaced since the cell began."""
    return {
      kind: self._replaced.get(kind, 0) + count
      for kind, count in self.cluster.replaced.items()
    }

  def close(self) -> None:
    """Ends the cluster and releases the files."""
    self.cluster.close()
    self._book.close()
    self._checkpoints.close()


def _size(path):
  """Bytes of a file; 0 if there is none."""
  return path.stat().st_size if path.exists() else 0


def _combine(parts, live) -> base.Records:
  """Makes one table of the shards' records: that of the lead, with the norms of
  the whole where every shard has received the message."""
  lead = parts[0]
  if len(parts) == 1 or not len(lead.loss):
    return lead
  plan = sharding.plan(live.params, len(parts))
  sizes = sharding.trained_sizes(plan, live.params)
  rows = [
    {(w, j): i for i, (w, j) in enumerate(zip(part.worker, part.job))}  # noqa: B905
    for part in parts
  ]
  whole = [
    i
    for i, key in enumerate(zip(lead.worker.tolist(), lead.job.tolist()))  # noqa: B905
    if all(key in index for index in rows)
  ]
  keys = [(lead.worker[i], lead.job[i]) for i in whole]
  reports = []
  for part, index in zip(parts, rows, strict=True):
    at = [index[key] for key in keys]
    columns = [getattr(part, field)[at] for field in base.Report._fields]
    reports.append(base.Report(*columns))
  combined = sharding.combine(reports, sizes)._asdict()
  out = {}
  for name, column in lead._asdict().items():
    out[name] = column.copy()
    if name in combined:
      out[name][whole] = combined[name]
  return base.Records(**out)
