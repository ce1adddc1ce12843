"""Simulated runs in which the parameters are tables of keyed rows.

The result of a cell follows from its config and seed, as for all simulated
runs. Which worker waits for which depends on the rows that they read, so the
order is not known before the run. The cell writes its trace to `trace.csv`.
`staleness.csv` has the number of rows read at each clock differential, which is
the row's clock - 1 - the reader's clock.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from asgd import base, names, orders, problems, sharding, tables
from asgd import worker as worker_lib
from asgd.checks import blame_batch
from asgd.experiment import checkpoint, checks, engines, refusals
from asgd.experiment.engines import (
  learning_rates,
  networks,
  outcomes,
  server_results,
  traffic,
)
from asgd.experiment.engines.simulated import (
  Restore,
  SimulatedEngine,
  rows_between,
)
from asgd.experiment.schema import Run
from asgd.orders import trace
from asgd.orders.network import Network
from asgd.tables import functions


@functools.lru_cache(maxsize=32)
def _compile_step(gradient: Any) -> Any:
  """Returns (params, batch, root, worker, job) -> (loss, gradient), compiled.
  The program also makes the job's key: as a separate operation, the key would
  take as long as the gradient of a small job."""

  def step(params, batch, root, worker, job):
    key = worker_lib.job_key(root, worker, job)
    (loss, _), gradients = gradient(params, batch, key)
    return loss, gradients

  return jax.jit(step)


@dataclasses.dataclass(frozen=True, eq=False)
class TablePlan(outcomes.OutcomePlan):
  """The parts that the cells of a run share. The schedule of the learning rate
  counts clocks, not messages."""

  shapes: Any = None  # shapes of the parameters
  dataset: Any = None
  batches: int = 1  # in one message

  @functools.cached_property
  def names(self) -> list[str]:
    """Names of the tables: the paths of the leaves."""
    paths = jax.tree_util.tree_flatten_with_path(self.shapes)[0]
    path_name = functools.partial(
      jax.tree_util.keystr, simple=True, separator="/"
    )
    return [path_name(path) or "params" for path, _ in paths]

  def split(self, params: base.Params) -> dict[str, np.ndarray]:
    """Returns the leaves as tables; a leaf without axes is one row."""
    leaves = jax.tree.leaves(params)
    return {
      name: np.asarray(leaf).reshape(np.shape(leaf) or (1,))
      for name, leaf in zip(self.names, leaves, strict=True)
    }

  def join(self, rows: Mapping[str, Any]) -> base.Params:
    """Returns the parameters, with these complete tables as leaves."""
    leaves, structure = jax.tree.flatten(self.shapes)
    return jax.tree.unflatten(
      structure,
      [
        rows[name].reshape(leaf.shape)
        for name, leaf in zip(self.names, leaves, strict=True)
      ],
    )

  @functools.cached_property
  def _every_key(self) -> dict[str, np.ndarray]:
    # Zeros without memory: only lengths are needed.
    shapes = jax.tree.map(lambda x: np.broadcast_to(0.0, x.shape), self.shapes)
    return {k: np.arange(len(x)) for k, x in self.split(shapes).items()}

  def work(self, seed: int, root: jax.Array) -> tables.Work:
    """Returns the batches, keys and gradients of the workers' jobs."""
    batches = self.problem.batches(seed, self.workers)
    keyed, step = self.problem.keyed, _compile_step(self.gradient)

    # Both `keys` and `gradient` ask for a batch, so it is cached.
    @functools.lru_cache(maxsize=4 * self.workers)
    def batch(worker, job):
      with blame_batch(f"worker {worker}, job {job}"):
        return batches(worker, job)

    def keys(batch):
      if keyed is None:  # dense: all rows of all tables
        return self._every_key
      keys_of_tables = jax.tree.leaves(keyed.keys(batch))
      return dict(zip(self.names, keys_of_tables, strict=True))

    def gradient(
      rows: Any, batch: Any, keys: Any, worker: int, job: int
    ) -> tuple[float, dict[str, np.ndarray]]:
      """Returns (loss, gradient by table) of a job, on the rows it has read."""
      if keyed is None:
        params = self.join(rows)
      else:
        # Padded to few sizes, so that the program is compiled only a few times.
        padded = [
          functions.padded(rows[name], functions.bucket(len(rows[name])))
          for name in self.names
        ]
        structure = jax.tree.structure(self.shapes)
        params = jax.tree.unflatten(structure, padded)
        order = [keys[name] for name in self.names]
        batch = keyed.localise(batch, jax.tree.unflatten(structure, order))
      # Always of this type: other types would compile the program again.
      job_id = np.int32(worker), np.int32(job)
      loss, gradients = jax.device_get(step(params, batch, root, *job_id))
      # Without the padding, and in the shapes of the tables.
      return float(loss), {
        name: np.asarray(leaf).reshape(-1, *rows[name].shape[1:])[
          : len(rows[name])
        ]
        for name, leaf in zip(
          self.names, jax.tree.leaves(gradients), strict=True
        )
      }

    return tables.Work(batch, keys, gradient)

  @property
  def call_network(self) -> Network | None:
    """Network of requests and answers; None if they take no time."""
    section, shards = self.run.config["network"], self.settings.shards
    return networks.make_network(section, shards)

  def simulation(
    self, seed: int, params: base.Params, root: jax.Array
  ) -> tables.TableRun:
    """Returns the simulation of a cell, before its first event."""
    simulation_class: type[tables.TableRun] = tables.Simulation
    options: dict[str, Any] = {}
    if (network := self.call_network) is not None:
      simulation_class, options = tables.OverNetwork, {"network": network}
    return simulation_class(
      *(self.settings, self.split(params), self.work(seed, root)),
      self.durations(seed),
      workers=self.workers,
      messages=self.messages,
      seed=seed,
      **options,
    )


def _add_function(
  run: Run, problem: problems.Problem, options: dict[str, Any]
) -> None:
  """Adds to `options` the server's function that a problem needs. The problem
  sets some options of the function, too, such as an L1 penalty."""
  name, required_options = problem.function
  if name == functions.ADD:
    return
  run_options = dict(options.get(name) or {})
  repeated = [key for key in required_options if key in run_options]
  if repeated:
    raise ValueError(
      f"config.runs.{run.label}.{name}.{repeated[0]} follows from"
      " config.problem: drop it"
    )
  options[name] = {**required_options, **run_options}


def _check_updates(
  run: Run, problem: problems.Problem, settings: tables.TableSettings
) -> tables.TableSettings:
  """Returns the settings, with `direct` set if the problem's workers compute
  updates and no gradients. Raises ValueError if the server's function does not
  take such values."""
  run_key, name = f"config.runs.{run.label}", settings.function.name
  if problem.updates is None:
    if name == functions.PROXIMAL:
      raise ValueError(
        f"{run_key}.proximal needs a problem with gradients and curvatures by"
        " feature: drop it, or use ftrl or an optimizer"
      )
    return settings
  required, _ = problem.function
  if name != required:
    raise ValueError(
      f"{run_key}: the problem's updates are for the function {required!r} at"
      f" the server, not for {name!r}: drop optimizer, ftrl and proximal"
    )
  if run.config["curvature_checks"]:
    raise ValueError(
      f"config.curvature_checks {run.config['curvature_checks']} is for"
      " gradients, which this problem does not have: set it to 0"
    )
  return settings._replace(direct=True)


def _settings(
  run: Run, problem: problems.Problem, workers: int
) -> tables.TableSettings:
  """Builds the settings of a run with its schedule, which counts clocks."""
  options, peak = dict(run.options), float(run.config["learning_rate"])
  if run.config["optimizer"] is not None:
    options["optimizer"] = run.config["optimizer"]
  _add_function(run, problem, options)

  # The schedule needs `clock_every` of the recipe's settings. So the settings
  # are made twice: with the peak, then with the schedule.
  def make_settings(rate: Any) -> Any:
    """Returns the settings of the recipe at a rate."""
    with checks.prefix_errors(f"runs.{run.label}", tuple(run.options)):
      return names.call(
        *("recipe", run.recipe, tables.RECIPES[run.recipe]),
        {"learning_rate": rate, "workers": workers, **options},
      )

  rate = learning_rates.schedule(
    *(run, problem),
    peak=peak,
    # The batches of all workers in one clock.
    batches=workers * make_settings(peak).clock_every,
    start=peak / workers,
  )
  return make_settings(rate)


def plan(experiment: Any, run: Run, workers: int) -> TablePlan:
  """Builds and checks the plan of a run with a number of workers."""
  problem, config = experiment.problem_of(run), run.config
  shapes = jax.eval_shape(problem.init, jax.random.key(0))
  if isinstance(shapes, base.Variables):
    raise ValueError(
      f"config.runs.{run.label}: the recipe {run.recipe} does not take"
      " statistics of batches (BatchNorm): use a model without them, or another"
      " recipe"
    )
  settings: Any = run.given_recipe or _settings(run, problem, workers)
  settings = _check_updates(run, problem, settings)
  # A given recipe may have a schedule already.
  rate = settings.learning_rate
  peak = float(config["learning_rate"])
  if run.given_recipe is not None:
    peak = math.nan if callable(rate) else float(rate)
  with checks.prefix_errors(f"runs.{run.label}", tuple(run.options)):
    sharding.make_plan(shapes, settings.shards)
  if config["compress"] is not None:
    refusals.refuse_codec_object(run, "compress")
    if settings.codec:
      raise ValueError(
        f"config.runs.{run.label}.codec {dict(settings.codec)['name']!r} and"
        f" config.compress {config['compress']['name']!r} are both the codec of"
        " messages: drop one"
      )
    # As hashable pairs, since settings are a key of caches.
    settings = settings._replace(codec=tuple(config["compress"].items()))
    with checks.prefix_errors("compress"):
      settings.make_codec()
  has_integers = any(
    # Counts, such as words by topic, must not be rounded.
    np.issubdtype(x.dtype, np.integer) for x in jax.tree.leaves(shapes)
  )
  if settings.codec and has_integers:
    raise ValueError(
      f"config.runs.{run.label}: the codec {dict(settings.codec)['name']!r} is"
      " for floats, and the problem has tables of whole numbers: drop it"
    )
  batches = learning_rates.budget_batches(run, problem)
  # All workers make the same number of jobs.
  messages = max(round(batches) // workers, 1) * workers
  checks.check_message_count(config, messages)
  with checks.prefix_errors(f"runs.{run.label}", tuple(run.options)):
    settings = settings.of_run(workers, messages // workers)
  # Errors of a user's data appear before the first cell.
  for seed in config["seeds"]:
    problem.batches(seed, workers)
  return TablePlan(
    *(run, workers, problem, settings, messages, peak, rate),
    shapes=shapes,
    dataset=experiment.dataset,
  )


class TableEngine(SimulatedEngine):
  """A cell of tables in simulated time."""

  _divergence: str | None = None  # the error for an update that is not finite

  def _make_simulation(
    self, seed: int, params: base.Params, root: jax.Array, restore: Restore
  ) -> int:
    """Makes the simulation, new or from a checkpoint; see the base."""
    plan, params = self._plan, jax.device_get(params)

    def unpack(saved: checkpoint.Restored) -> tables.TableRun:
      """Returns the simulation of a checkpoint."""
      simulation = plan.simulation(seed, params, root)
      # The state is one array of bytes: its format is that of messages.
      state = saved.tree({"state": checkpoint.ANY})["state"]
      simulation.unpack(tables.wire.load(state.tobytes()))
      return simulation

    self._simulation = restore(unpack) or plan.simulation(seed, params, root)
    return self._simulation.received

  @property
  def ended(self) -> bool:
    """Whether the cell has ended early, because an update was not finite."""
    return self._divergence is not None

  def _run(self, end: int) -> base.Records:
    """Simulates to message `end`. An update that is not finite ends the cell.
    """
    simulation = self._simulation
    try:
      simulation.advance(end)
    except ValueError as error:
      # Other errors come from the user's loss or data.
      if "is not finite" not in str(error):
        raise
      self._divergence = server_results.divergence_error(
        self._plan, f"{error}, at message {simulation.received + 1}", self._name
      )
    return simulation.records(self.done)

  def _error_text(self, new_records):
    del new_records
    return self._divergence

  def _trace(self):
    return self._simulation.rows, len(self._simulation.rows)

  def snapshot(self) -> engines.Snapshot:
    """Returns the server's rows, at the simulated time."""
    simulation = self._simulation
    clock = {
      "time": simulation.now,
      "megabytes": traffic.megabytes([simulation.records()]),
    }
    params = self._plan.join(simulation.tables())
    return engines.Snapshot(
      params, self.done, simulation.server.slowest, clock
    )

  def records(self) -> base.Records:
    """Returns a row for each message."""
    return self._simulation.records()

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness, gap and losses of messages `start`, ..., `end` - 1."""
    return self._summary(rows_between(self.records(), start, end))

  def _summary(self, records: base.Records) -> dict[str, Any]:
    """Returns the summary of records, of which there are none if the first
    message was not finite."""
    # One row of zeros, as means and maxima of no rows are errors.
    if not records.loss.size:
      records = base.Records(*(np.zeros(1, column.dtype) for column in records))
    summary = server_results.summary(records)
    return {**summary, "train_loss": math.nan} if self.ended else summary

  def columns(self) -> dict[str, Any]:
    """Returns the columns of the cell's result."""
    simulation, records = self._simulation, self.records()
    summary, time = self._summary(records), simulation.now
    if isinstance(simulation, tables.OverNetwork) and time > 0:
      summary |= networks.columns(simulation.use(), self.done, time)
    columns = result_columns(
      *(self._plan.settings.rules, records, summary, simulation.differentials),
      simulation.held,
      updates=simulation.server.slowest,
      ranges_moved=simulation.moved,
    )
    return {**columns, "simulated_time": time}

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns tables, workers' copies, messages in transit, and records."""
    state = tables.wire.dump(self._simulation.pack())
    return self.done, {"state": np.frombuffer(state, np.uint8)}, {}

  def extras(self) -> dict[str, str]:
    """Returns the trace, and the profile of staleness."""
    simulation = self._simulation
    return {
      "trace.csv": orders.dump(trace.from_events(simulation.rows)),
      "staleness.csv": profile_table(simulation.differentials),
    }


# Columns and tables of all engines of tables.


def result_columns(
  rules: tables.ConsistencyRules,
  records: base.Records,
  summary: Mapping[str, Any],
  profile: Mapping[int, int],
  filtered_counts: tuple[int, int],
  *,
  updates: int,
  **move_columns: float,
) -> dict[str, Any]:
  """Returns the columns of a cell's result, without its time.

  Args:
    rules: the rules of reads.
    records: the records of all jobs of the cell.
    summary: the summary of these records.
    profile: clock differential -> number of rows read at it.
    filtered_counts: counts of rows that filters held back and dropped.
    updates: the slowest worker's clock.
    **move_columns: columns about ranges of keys that moved.
  """
  n_rows, summary = max(sum(profile.values()), 1), dict(summary)
  del summary["train_loss"]  # the result has the last evaluation's
  return {
    "order": rules.consistency.name,
    "bound": rules.bound,
    "messages": len(records.loss),
    "updates": updates,
    # d = -1 is the last complete clock; smaller is older.
    "differential_mean": sum(d * n for d, n in profile.items()) / n_rows,
    "differential_least": min(profile, default=0),
    # Share of rows at differential -1.
    "fresh_reads": profile.get(-1, 0) / n_rows,
    "rows_held_back": filtered_counts[0],
    "rows_dropped": filtered_counts[1],
    **move_columns,
    "bytes_up": int(records.bytes_up.sum()),
    "bytes_down": int(records.bytes_down.sum()),
    **summary,
  }


def profile_table(profile: Mapping[int, int]) -> str:
  """Returns the number of rows read at each clock differential, as CSV."""
  lines = [f"{d},{n}" for d, n in sorted(profile.items())]
  return "\n".join(["differential,rows", *lines, ""])


# Columns of a table of results, if the parameters of one of its cells are
# tables.
COLUMNS = (
  engines.Column("clock diff.", "differential_mean", 1, "{:.2f}"),
  engines.Column("fresh %", "fresh_reads", 100, "{:.1f}"),
  engines.Column("MB up", "bytes_up", 1e-6),
  engines.Column("MB down", "bytes_down", 1e-6),
)


def filters_text(result: Mapping[str, Any]) -> str:
  """Returns the filters' counts in a few words; "" if they are 0."""
  held_back, dropped = result["rows_held_back"], result["rows_dropped"]
  if not (held_back or dropped):
    return ""
  return f", filters held back {held_back:,} rows and dropped {dropped:,}"


def loss_text(result: Mapping[str, Any]) -> str:
  """Returns the losses and clocks of a cell in a few words; without a test loss
  if it was not evaluated."""
  test_loss = result["test_loss"]
  test_text = "" if math.isnan(test_loss) else f" (test {test_loss:.4g})"
  return (
    f"{result['order']}, loss {result['train_loss']:.4g}{test_text}, clock"
    f" differential {result['differential_mean']:.2f} (least"
    f" {result['differential_least']})"
  )


def describe(result: Mapping[str, Any]) -> str:
  """Returns a cell's result in a few words."""
  text = f"{loss_text(result)}, time {result['simulated_time']:.4g}"
  megabytes = (result["bytes_up"] + result["bytes_down"]) / 1e6
  text += f", {megabytes:.3g} MB" + filters_text(result)
  return text + networks.describe(result)
