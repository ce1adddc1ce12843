"""Builds a Problem from a config: from the sections `data` and `model`, or from
a user's function in the section `problem`."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from asgd import base, data, losses, models, names, problems
from asgd.checks import shown, user_code
from asgd.data import partitions, sentences, text
from asgd.experiment import build_cache, schema, storage
from asgd.experiment.checks import prefix_errors
from asgd.models import encoder, own
from asgd.problems import own as own_problem
from asgd.problems import streams


class ProblemSource(NamedTuple):
  """The identity of the data of a user's problem."""

  name: str  # MODULE:FUNCTION
  source: str
  probe: base.Batch  # the data are identified by its checksum


Dataset = (
  data.Dataset
  | text.Text
  | sentences.Sentences
  | ProblemSource
  | own_problem.Objects
)

TEXT_NAMES = ("pydoc", "file")
_EVALUATION_WINDOWS = 64  # windows of a text that an evaluation reads
_MAX_PARAMETERS = 10**10
# Keys of the config that the problem of `data` and `model` depends on.
_BUILD_KEYS = ("data", "model", "batch_size", "evaluation_examples")


def load(
  config: Mapping[str, Any],
  *,
  data_dir: str | None = None,
  dataset: Dataset | None = None,
  max_parameters: int = _MAX_PARAMETERS,
) -> tuple[Dataset, problems.Problem]:
  """Loads the data and builds the model of a resolved config.

  The task (text, sentences, classes, values) follows from the type of the data,
  not from their name.

  Args:
    config: the resolved config.
    data_dir: as in `cells.build`.
    dataset: as in `cells.build`.
    max_parameters: the largest number of parameters that a model may have.

  Returns:
    The data and the problem.

  Raises:
    ValueError: data and model do not fit, or a key has a wrong value.
  """
  if isinstance(dataset, own_problem.Objects):
    return dataset, dataset.problem()
  if config["problem"]["name"] is not None:
    return _load_users_problem(config, data_dir)
  section, model = config["data"], dict(config["model"])
  model_name = model.pop("name")
  # [1] First the checks that need no data, because data take long to load.
  _check_model(model_name, model)
  pretrained = None
  if dataset is None and section["name"] in sentences.TASKS:
    pretrained = _load_encoder(model_name, model)
  # [2] The data.
  if dataset is None:
    dataset = _load_data(section, data_dir, pretrained and pretrained[1])
  # For these two types the function has returned above.
  assert not isinstance(dataset, ProblemSource | own_problem.Objects)
  # [3] The task, by the type of the data. `model` gets the sizes of the data.
  if isinstance(dataset, sentences.Sentences) and pretrained is None:
    pretrained = _load_encoder(model_name, model)
  weights = pretrained and pretrained[0]
  make, options = _problem_maker(dataset, config, weights)
  if isinstance(dataset, text.Text):
    _set_sizes(model_name, model, {"context": section["context"]})
  elif isinstance(dataset, sentences.Sentences):
    sizes = {"context": dataset.train_tokens.shape[-1]}
    sizes["vocabulary"] = dataset.vocabulary
    _set_sizes(model_name, model, sizes)
  if isinstance(dataset, data.Dataset) and dataset.classes is None:
    outputs = int(dataset.train_labels[0].size)  # values of an example
  else:
    outputs = dataset.classes or 0  # classes of an example, or of a position
  from_user = isinstance(dataset, text.Text) or names.is_import(section["name"])

  # [4] The model and the problem.
  def build() -> problems.Problem:
    """Builds the problem; the cache calls it for new configs only."""
    user_errors = _function_errors("model", model_name)
    with prefix_errors("model", tuple(model)), user_errors:
      layers = models.build(model_name, outputs, **model)
    errors = prefix_errors("data") if from_user else contextlib.nullcontext()
    with errors, _model_errors(config):
      problem = make(
        dataset, layers, batch_size=config["batch_size"], **options
      )
    _check_fit(config, problem, max_parameters)
    return problem

  if weights is not None:
    return dataset, build()  # not cached: the files may have changed
  build_values = [config[key] for key in _BUILD_KEYS]
  checksum = identity(dataset)["sha256"]
  return dataset, _problem_cache.get(build, build_values, checksum)


def _problem_maker(
  dataset: data.Dataset | text.Text | sentences.Sentences,
  config: Mapping[str, Any],
  weights: Any,
) -> tuple[Callable[..., problems.Problem], dict[str, Any]]:
  """Returns (function that builds a problem of this type of data, its options).
  `weights`: those of a pre-trained encoder, for sentences."""
  section, examples = config["data"], config["evaluation_examples"]
  if isinstance(dataset, text.Text):
    if partitions.divides(section["partition"]):
      raise ValueError(
        f"config.data.partition {shown(section['partition'])} divides labelled"
        f" examples, and {section['name']!r} is a text; leave it out"
      )
    windows = {"evaluation_windows": examples or _EVALUATION_WINDOWS}
    return problems.language, {"context": section["context"], **windows}
  options = {"partition": section["partition"], "evaluation_examples": examples}
  if isinstance(dataset, sentences.Sentences):
    return problems.classify_sentences, {**options, "weights": weights}
  options["augment"] = section["augment"]
  is_regression = dataset.classes is None
  make = problems.regression if is_regression else problems.classification
  return make, options


# Few entries, because each keeps its data in memory.
_problem_cache = build_cache.BuildCache(8)


# (data, checksum) of the last call: a checksum of large data takes seconds.
_latest_checksum: list[tuple[Dataset, str]] = []


def identity(dataset: Dataset) -> dict[str, Any]:
  """Returns the dataset's name and a checksum of its arrays. A caller's objects
  bring their identity."""
  if isinstance(dataset, own_problem.Objects):
    return dataset.identity
  if not any(known_dataset is dataset for known_dataset, _ in _latest_checksum):
    arrays = jax.tree.leaves(dataset[2:])  # without its name and source
    checksum = storage.digest(arrays)
    # Writable arrays may change, so their checksum is not cached.
    if any(getattr(x, "flags", None) and x.flags.writeable for x in arrays):
      return {"name": dataset.name, "sha256": checksum}
    _latest_checksum[:] = [(dataset, checksum)]
  return {"name": dataset.name, "sha256": _latest_checksum[0][1]}


def title(config: Mapping[str, Any], dataset: Dataset) -> str:
  """Returns the names of data and model, for a title."""
  if isinstance(dataset, own_problem.Objects):
    return "a caller's data and model"
  if isinstance(dataset, ProblemSource):
    return dataset.name
  return f"{dataset.name}, {config['model']['name']}"


def _set_sizes(
  model_name: str, model: dict[str, Any], sizes: Mapping[str, int]
) -> None:
  """Sets those sizes of the data that a model takes as arguments."""
  for key in models.takes(model_name, sizes):
    model.setdefault(key, sizes[key])


def _load_data(
  section: Mapping[str, Any], data_dir: str | None, tokenizer: Any
) -> Dataset:
  """Loads the data of the section `data`. `tokenizer`: that of a pre-trained
  encoder, for sentences."""
  name, context = section["name"], section["context"]
  if name in TEXT_NAMES:
    with prefix_errors("data"):
      return text.load(name, data_dir=data_dir, tokenizer=section["tokenizer"])
  if section["tokenizer"] != text.CHARACTERS and not names.is_import(name):
    raise ValueError(
      f"config.data.tokenizer {section['tokenizer']!r} is for the texts"
      f" {', '.join(TEXT_NAMES)}, not for {name!r}; drop it"
    )
  if name in sentences.TASKS:
    with prefix_errors("data"):
      return sentences.load(
        name, context=context, data_dir=data_dir, tokenizer=tokenizer
      )
  if names.is_import(name):
    with prefix_errors("data"):
      value = _call("dataset", section, {"data_dir": data_dir})
      with _prefix_value_errors(f"dataset {name!r}"):
        return data.as_dataset(value, name)
  try:
    return data.load(name, data_dir=data_dir)
  except ValueError as error:
    if not str(error).startswith("unknown dataset"):
      raise
    # The error lists the names of `data`; a config may name other data, too.
    texts, tasks = ", ".join(TEXT_NAMES), ", ".join(sentences.TASKS)
    raise ValueError(
      f"config.data.name: {error}; texts: {texts}; sentences: {tasks}; or"
      " MODULE:FUNCTION, a function that returns data"
    ) from None


# Functions of users.


@contextlib.contextmanager
def _prefix_value_errors(name: str) -> Iterator[None]:
  """Prefixes errors about a function's return value with its name."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from error


def _function_errors(
  kind: str, name: str | None
) -> contextlib.AbstractContextManager[None]:
  """Returns a context that turns any error of a user's function into a
  ValueError of one line."""
  if not names.is_import(name):
    return contextlib.nullcontext()
  return user_code(f"{kind} {name!r} fails", passes=(ValueError,))


def _call(
  kind: str, section: Mapping[str, Any], extra_arguments: Mapping[str, Any]
) -> Any:
  """Calls the function that a section names.

  Its arguments are the section's keys. The keys that each section `data` has,
  and those of `extra_arguments`, are passed only if the function takes them.
  """
  name = section["name"]
  make = names.import_function(kind, name)
  parameters = inspect.signature(make).parameters
  # These keys of the section `data` have values even if the config sets none.
  data_keys = schema.keys_of(schema.SHARED_KEYS["data"])
  fixed = data_keys if kind == "dataset" else ()
  arguments = {
    key: value
    for key, value in section.items()
    if key != "name" and (key not in fixed or key in parameters)
  }
  arguments |= {
    key: extra_arguments[key] for key in extra_arguments if key in parameters
  }
  with _function_errors(kind, name):
    return names.call(kind, name, make, arguments)


def _load_users_problem(
  config: Mapping[str, Any], data_dir: str | None
) -> tuple[Dataset, problems.Problem]:
  """Returns the problem that a user's function makes, and its data."""
  section = config["problem"]
  name = section["name"]
  # [1] The section names a function, and no other section is set.
  if not names.is_import(name):
    raise ValueError(
      f"config.problem.name must be MODULE:FUNCTION, not {shown(name)}; for"
      " built-in problems set config.data and config.model"
    )
  for key in ("data", "model"):
    if config[key] != schema.default_of(schema.SHARED_KEYS[key]):
      raise ValueError(
        f"config.problem.name {name!r} already gives data and model: drop"
        f" config.{key}"
      )

  # [2] The problem. Its parts are checked and completed.
  def make(size: int) -> problems.Problem:
    """Calls the user's function for a batch size."""
    problem = _call(
      "problem", section, {"batch_size": size, "data_dir": data_dir}
    )
    if not isinstance(problem, problems.Problem):
      raise ValueError(
        f"{name!r} returned {shown(problem)}; return an asgd.problems.Problem"
      )
    loss = problem.loss  # always called with three arguments
    problem = with_copied_batches(problem)._replace(
      loss=losses.as_loss(lambda params, batch, key: loss(params, batch, key)),
      evaluate=_completed_evaluate(problem.evaluate, name),
    )
    # Runs may set another batch size: the function is then called again.
    if problem.rebatch is not None:
      return problem
    return problem._replace(rebatch=make)

  with prefix_errors("problem"):
    function = names.import_function("problem", name)
    if "batch_size" not in inspect.signature(function).parameters:
      raise ValueError(
        f"problem {name!r} takes no argument batch_size, which runs may set;"
        " add it"
      )
    problem = make(config["batch_size"])
    _check_problem(problem)
  _check_size(jax.eval_shape(problem.init, jax.random.key(0)))
  return ProblemSource(name, name, problem.probe), problem


def with_copied_batches(problem: problems.Problem) -> problems.Problem:
  """Returns a user's problem with copied batches, so that the user's loader
  cannot refill them."""
  batches, rebatch = problem.batches, problem.rebatch
  if rebatch is not None:
    problem = problem._replace(
      rebatch=lambda size: with_copied_batches(rebatch(size))
    )
  return problem._replace(
    batches=lambda seed, workers: streams.copied(batches(seed, workers))
  )


def _completed_evaluate(
  evaluate: Callable[[base.Params], Any], name: str
) -> Callable[[base.Params], problems.Evaluation]:
  """Returns a user's `evaluate` that always returns an Evaluation; the user's
  function may return only a loss."""

  def evaluate_completely(params: base.Params) -> problems.Evaluation:
    value = evaluate(params)
    with (
      prefix_errors("problem"),
      _prefix_value_errors(f"evaluate of {name!r}"),
    ):
      return own_problem.as_evaluation(value, "loss")

  return evaluate_completely


def _check_problem(problem: problems.Problem) -> None:
  """Raises ValueError if the parts of a problem do not fit."""
  with user_code("batches(seed, workers)(worker, job) fails"):
    batches = problem.batches(0, 1)
    batch, repeated = batches(0, 0), batches(0, 0)
  # A cell that resumes, and a replay, compute batches again.
  if storage.digest(batch) != storage.digest(repeated):
    raise ValueError(
      "batches(seed, workers)(worker, job) gave two different batches for one"
      " job; make it a function of seed, worker and job only, for example with"
      " numpy.random.default_rng((seed, worker, job))"
    )
  params = own_problem.check_loss(problem.init, problem.loss, batch)
  if problem.keyed is not None:
    tables: Any = jax.tree.structure(params)
    with user_code("keyed.keys(batch) fails"):
      keys: Any = jax.tree.structure(problem.keyed.keys(batch))
    if keys != tables:
      raise ValueError(
        "keyed.keys(batch) must return an array of keys for each table,"
        f" {shown(tables)}, not {shown(keys)}"
      )
  if problem.updates is not None:
    _check_updates(problem.updates, params, batch)


def _check_updates(
  updates: Callable[..., Any], params: base.Params, batch: base.Batch
) -> None:
  """Raises ValueError if updates and parameters differ in shapes or types."""
  key = jax.random.key(0)
  with user_code("updates(params, batch, key) fails"):
    (loss, _), values = jax.eval_shape(updates, params, batch, key)
  expected, actual = (
    jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    for tree in (params, values)
  )
  if loss.shape != () or expected != actual:
    raise ValueError(
      "updates(params, batch, key) must return ((loss, Aux), values like the"
      f" parameters, {shown(expected)}), not {shown(actual)}"
    )


def _check_model(model_name: str, model: Mapping[str, Any]) -> None:
  """Raises ValueError for a model or arguments that are wrong for any data.
  This comes before the data are loaded, which takes long."""
  arguments = {k: v for k, v in model.items() if k != "pretrained"}
  with prefix_errors("model", tuple(arguments)):
    if names.is_import(model_name):
      # A user's function is not called yet: its arguments' names must fit.
      maker = names.import_function("model", model_name)
      sizes = "classes", "context", "vocabulary", "rngs"
      keys = [*arguments, *models.takes(model_name, sizes)]
      names.check_arguments("model", model_name, maker, keys)
      return
    if model_name == "bert":  # the real vocabulary follows from the data
      arguments.setdefault("vocabulary", 2)
    # With one output: this call only checks the arguments.
    models.build(model_name, 1, **arguments)


def _load_encoder(model_name: str, model: dict[str, Any]) -> tuple[Any, Any]:
  """Returns (weights, tokenizer) of a pre-trained model for sentences, and adds
  its sizes to `model`. Returns (None, None) if the config names none."""
  if names.is_import(model_name):
    return None, None
  if model_name != "bert":
    raise ValueError(
      "config.model.name must be 'bert' for sentences, or MODULE:FUNCTION, not"
      f" {model_name!r}"
    )
  pretrained = model.pop("pretrained", None)
  if pretrained is None:
    if "vocabulary" in model:
      raise ValueError("config.model.vocabulary follows from the data; drop it")
    return None, None
  with prefix_errors("model.pretrained"):
    pooling = model.get("pooling", "mean")
    loaded = encoder.pretrained(pretrained, pooling=pooling)
  # The sizes follow from the weights; `pooling` is no size, and may be set.
  for key in loaded.sizes:
    if key in model and key != "pooling":
      raise ValueError(
        f"config.model.{key} follows from config.model.pretrained; drop it"
      )
  model.update(loaded.sizes)
  return loaded.weights, loaded.folder


@contextlib.contextmanager
def _model_errors(config: Mapping[str, Any]) -> Iterator[None]:
  """Prefixes errors of a user's model with its name."""
  name = config["model"]["name"]
  try:
    with _function_errors("config.model", name):
      yield
  except models.ModelError as error:
    raise ValueError(f"config.model {name!r}: {error}") from error


def _check_fit(
  config: Mapping[str, Any], problem: problems.Problem, max_parameters: int
) -> None:
  """Raises ValueError if the model does not take the data, or is too large."""
  key = jax.random.key(0)
  model, name = config["model"]["name"], config["data"]["name"]
  try:
    shapes = jax.eval_shape(problem.init, key)
    jax.eval_shape(problem.loss, shapes, problem.batches(0, 1)(0, 0), key)
  except Exception as error:
    # A user's model may raise anything; our models raise others only for bugs.
    is_usual = isinstance(error, TypeError | ValueError | OverflowError)
    if not is_usual and not names.is_import(model):
      raise
    line = " ".join(str(error).split())[:300]
    error_name = "" if is_usual else f"{type(error).__name__}: "
    raise ValueError(
      f"config.model {model!r} does not fit config.data {name!r}:"
      f" {error_name}{line}"
    ) from error
  if names.is_import(model) and problem.pieces is not None:
    with _model_errors(config):
      own.check_layers(problem.init, "or return one Module")
  _check_size(shapes, max_parameters)


def _check_size(shapes: Any, max_parameters: int = _MAX_PARAMETERS) -> None:
  """Raises ValueError for a model with too many parameters."""
  count = models.count(shapes)
  if count > max_parameters:
    text = f"config.model has {count:,} parameters"
    raise ValueError(f"{text}; use at most {max_parameters:,}")
