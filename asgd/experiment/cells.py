"""From a config to the cells of an experiment.

A cell is one training run: a run of the config, a number of workers and a seed.
All mistakes in a config are found here, before anything is written or trained.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asgd import diagnosis, problems, worker
from asgd.experiment import build_cache, checks, problem, protocol, schema
from asgd.experiment.schema import Engines, Run
from asgd.parallel import ahead, meshes
from asgd.parallel.targets import Target
from asgd.problems import own

# The most parameters of a model that `programs` compiles: it makes no arrays.
_MAX_COMPILED_PARAMETERS = 10**13


class Cell(NamedTuple):
  """One training run of an experiment."""

  label: str  # of the run, in the config
  title: str  # of the run, in output
  workers: int
  seed: int

  @property
  def name(self) -> str:
    """The name of the cell's folder."""
    return f"{self.label}-n{self.workers}-s{self.seed}"


class Experiment:
  """The runs of a config with their data. Plans and problems are made once, at
  the first call that needs them."""

  def __init__(
    self,
    config: Mapping[str, Any],
    engines: Engines,
    runs: Mapping[str, Run],
    dataset: problem.Dataset,
    shared_problem: problems.Problem,  # with the config's own batch size
    measurements: dict[str, Any] | None = None,
  ):
    self.config, self.engines = dict(config), engines
    self.runs, self.dataset = dict(runs), dataset
    self.measurements = dict(measurements or {})
    cells = (
      Cell(label, run.title, workers, seed)
      for label, run in runs.items()
      for workers in engines[run.engine].workers(run)
      for seed in config["seeds"]
    )
    # By workers, then run, then seed: the sort is stable.
    self.cells = tuple(sorted(cells, key=lambda cell: cell.workers))
    self._problems = {config["batch_size"]: shared_problem}  # by batch size
    # Label of a run -> the problem of `_problems` with the run's batch size, or
    # the same problem with the optimizer's state in its parameters.
    self._problems_of_runs: dict[str, problems.Problem] = {}
    self._plans: dict[tuple[str, int], Any] = {}  # by (label, workers)

  @functools.cached_property
  def dataset_identity(self) -> dict[str, Any]:
    """The identity of the data; see `problem.identity`."""
    return problem.identity(self.dataset)

  def engine_kind(self, cell: Cell) -> Any:
    """Returns the engine kind of a cell."""
    return self.engines[self.runs[cell.label].engine]

  def problem_of(self, run: Run) -> problems.Problem:
    """Returns the problem with a run's batch size. Its parameters carry the
    optimizer's state if the run averages it, or the recipe carries it."""
    batch_size = run.config["batch_size"]
    if batch_size not in self._problems:
      with checks.prefix_errors(f"runs.{run.label}.batch_size"):
        shared_problem = self._problems[self.config["batch_size"]]
        self._problems[batch_size] = shared_problem.with_batch_size(batch_size)
    if run.label not in self._problems_of_runs:
      self._problems_of_runs[run.label] = _with_carried_state(
        run, self._problems[batch_size]
      )
    return self._problems_of_runs[run.label]

  def sharpness_of(self, run: Run) -> Callable[[Any], float]:
    """Returns the estimate of a run's sharpness, compiled once for all cells of
    its batch size, and for all experiments on one problem."""
    run_problem = self.problem_of(run)
    return _sharpness_cache.get(
      lambda: diagnosis.make_sharpness(run_problem.loss, run_problem.probe),
      *(run.config["batch_size"], run_problem.loss),
    )

  def plan(self, cell: Cell) -> Any:
    """Returns the plan of a cell: what its engine has prepared for training.
    Cells that differ only in the seed share a plan."""
    plan_key = cell.label, cell.workers
    if plan_key not in self._plans:
      run = self.runs[cell.label]
      self._plans[plan_key] = self.engine_kind(cell).plan(
        self, run, cell.workers
      )
    return self._plans[plan_key]

  def check_machine(self, machine: Any) -> None:
    """Raises ValueError if an engine cannot train its cells on a machine, an
    `asgd.experiment.machine.Machine`."""
    # One call for each engine, with the plans of all its cells.
    plans = collections.defaultdict(list)
    for cell in self.cells:
      plans[self.engine_kind(cell).check_machine].append(self.plan(cell))
    for check, plans_of_check in plans.items():
      check(self, plans_of_check, machine)


def _with_carried_state(
  run: Run, problem: problems.Problem
) -> problems.Problem:
  """Returns a run's problem; its parameters carry the state of the optimizer if
  the run averages that state, or its recipe carries it."""
  averages = run.options.get("optimizer_state") == worker.AVERAGED
  # `given_recipe` may be settings of tables or of Sandblaster, which have no
  # attribute `carried`.
  if not averages and getattr(run.given_recipe, "carried", None) is None:
    return problem
  # `carried` does not depend on the number of workers.
  workers = max(run.config["workers"])
  recipe = run.make_recipe(run.config["learning_rate"], workers)
  if recipe.carried is None:
    return problem
  return problems.carrying(problem, recipe.carried)


# Few entries, because each keeps the data of its problem in memory.
_sharpness_cache = build_cache.BuildCache(8)


def build(
  config: schema.Config | schema.Resolved,
  *,
  engines: Engines,
  data_dir: str | None = None,
  dataset: problem.Dataset | None = None,
  measurements: dict[str, Any] | None = None,
  plans_all: bool = True,
) -> Experiment:
  """Builds an experiment from a config, checking all of it.

  Args:
    config: keys of `schema.SHARED_KEYS` and of the engines' sections; or what
      `schema.resolve` returned, which is not checked again.
    engines: the engines, by their names.
    data_dir: the folder of the dataset's files, or the file of a text; None
      searches the usual folders.
    dataset: a loaded dataset, used unchanged; or a caller's data, model and
      recipe (`own.Objects`), for all runs.
    measurements: the measurements of an earlier build, on which plans depend;
      None: measure.
    plans_all: whether to plan all cells, which checks them. False, for a config
      that was checked so: a cell is planned when it is trained.

  Raises:
    ValueError: for anything wrong, naming the key, the value and the remedy.
  """
  if not isinstance(config, schema.Resolved):
    config = schema.resolve(config, engines)
  # [1] Checks that need neither data nor devices, so mistakes show at once.
  config = _checked_config(config, engines, dataset)
  # [2] Devices. JAX takes the count of CPU devices only before it starts.
  runs = config.runs.values()
  devices = max(engines[run.engine].devices(run) for run in runs)
  meshes.want_cpu_devices(devices)
  meshes.find_devices()
  # [3] Data and model; checks that they fit each other.
  experiment = _load(config, engines, data_dir, dataset, measurements)
  # [4] A plan for each run and number of workers; its checks raise here.
  for cell in experiment.cells if plans_all else ():
    experiment.plan(cell)
  return experiment


def programs(
  config: schema.Resolved,
  target: Target,
  *,
  engines: Engines,
  data_dir: str | None = None,
) -> Iterator[ahead.Compilation]:
  """Yields the programs of a config's runs, for devices that need not exist.

  Raises:
    ValueError: see `build`; also for an engine without programs, and for a mesh
      that does not fit the devices of `target`.
  """
  config = _checked_config(config, engines)
  for run in config.runs.values():
    if engines[run.engine].programs is None:
      raise ValueError(
        f"config.runs.{run.label}: engine {run.engine!r} has no program that"
        " could be compiled ahead: use engine=mesh"
      )
  experiment = _load(
    config, engines, data_dir, max_parameters=_MAX_COMPILED_PARAMETERS
  )
  for run in config.runs.values():
    kind = engines[run.engine]
    for workers in dict.fromkeys(kind.workers(run)):
      yield from kind.programs(experiment, run, workers, target)


def _checked_config(
  config: schema.Resolved,
  engines: Engines,
  dataset: problem.Dataset | None = None,
) -> schema.Resolved:
  """Checks a config as far as possible without data and devices. If
  `dataset` is a caller's `own.Objects`, the returned runs have its recipe and
  its objects."""
  resolved, runs = config
  if isinstance(dataset, own.Objects):
    caller_objects = dict(given_recipe=dataset.recipe, objects=dataset.objects)
    runs = {k: run._replace(**caller_objects) for k, run in runs.items()}
  for run in runs.values():
    protocol.check_engine(run, engines[run.engine].protocols())
    _check_codec_and_network(run, resolved, engines)
    engines[run.engine].check(run)
  return config._replace(runs=runs)


def _load(
  config: schema.Resolved,
  engines: Engines,
  data_dir: str | None,
  dataset: problem.Dataset | None = None,
  measurements: dict[str, Any] | None = None,
  **options: Any,
) -> Experiment:
  """Loads data and model, without plans. `options` are those of
  `problem.load`."""
  resolved, runs = config
  options |= {"data_dir": data_dir, "dataset": dataset}
  dataset, shared_problem = problem.load(resolved, **options)
  for run in runs.values():
    # `updates` replaces the gradient; only some protocols can apply it.
    if shared_problem.updates is not None and not protocol.of(run).updates:
      raise ValueError(
        "config.problem: its workers compute updates, not gradients; the recipe"
        f" {run.recipe!r} of config.runs.{run.label} cannot apply them: use"
        " recipe='table'"
      )
  return Experiment(
    resolved, engines, runs, dataset, shared_problem, measurements
  )


def _check_codec_and_network(
  run: Run, config: Mapping[str, Any], engines: Engines
) -> None:
  """Raises ValueError if the config sets a codec or a network for all runs, and
  the engine of this run has none."""
  for key in ("compress", "compress_down"):
    if config.get(key) and key not in engines[run.engine].sections:
      raise ValueError(
        f"config.{key}: engine {run.engine!r} of config.runs.{run.label} sends"
        f" nothing that a codec could take; set {key} in the entries of other"
        f" runs alone, config.runs.LABEL.{key}"
      )
  # The defaults of the keys of `network` come from all engines, because the
  # engine of this run may have no such section.
  sections = [
    engine_kind.sections.get("network") or {}
    for engine_kind in engines.values()
  ]
  network_keys = {
    key: node for section in sections for key, node in section.items()
  }
  has_links = "network" in engines[run.engine].sections
  if not has_links and schema.changed_keys(config.get("network"), network_keys):
    raise ValueError(
      f"config.network: engine {run.engine!r} of config.runs.{run.label} has no"
      " links whose time could be set: use engine simulate or threads, or set"
      " config.runs.LABEL.network in the entries of other runs alone"
    )


def single_cell_config(run: Run, cell: Cell) -> dict[str, Any]:
  """Returns a config with this cell alone, for other processes and replays."""
  # The engine is a key of the entry: a config with one run needs no default.
  config = {k: v for k, v in run.config.items() if k != "engine"}
  entry = {"engine": run.engine, "recipe": run.recipe, "title": run.title}
  return {
    **config,
    "runs": {run.label: {**entry, **run.options}},
    "only": [],
    "workers": [cell.workers],
    "seeds": [cell.seed],
  }


def groups(cells: Sequence[Cell]) -> list[list[Cell]]:
  """Groups consecutive cells that share a plan, in their order."""
  by_plan = itertools.groupby(cells, lambda cell: (cell.label, cell.workers))
  return [list(group) for _, group in by_plan]
