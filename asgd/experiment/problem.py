"""From the sections `data` and `model` of a config to a Problem; or from the
section `problem`, a function of one's own that makes it whole."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from asgd import base, data, losses, models, names, problems
from asgd.checks import shown, user_code
from asgd.data import sentences, text
from asgd.experiment import build_cache, schema, storage
from asgd.experiment.checks import blame
from asgd.models import encoder, own
from asgd.problems import own as own_problem


class ProblemSource(NamedTuple):
  """What is known of the data of a problem of one's own."""

  name: str  # MODULE:FUNCTION
  source: str
  probe: base.Batch  # by which it is recognised


Dataset = (
  data.Dataset
  | text.Text
  | sentences.Sentences
  | ProblemSource
  | own_problem.Objects
)

TEXTS = ("pydoc", "file")
_WINDOWS = 64  # of a text, on which it is evaluated
_MOST_PARAMETERS = 10**10


def load(
  config: Mapping[str, Any],
  *,
  data_dir: str | None = None,
  dataset: Dataset | None = None,
  most: int = _MOST_PARAMETERS,
) -> tuple[Dataset, problems.Problem]:
  """Loads the data and builds the model of a resolved config, checking that
  they fit; `most` are the most parameters of a model, the other arguments those
  of `cells.build`. What the data are decides what is learnt, not their name."""
  if isinstance(dataset, own_problem.Objects):
    return dataset, dataset.problem()
  if config["problem"]["name"] is not None:
    return _given(config, data_dir)
  section, model = config["data"], dict(config["model"])
  kind = model.pop("name")
  _check_model(kind, model)
  trained = None
  if dataset is None and section["name"] in sentences.TASKS:
    trained = _encoder(kind, model)  # before data are loaded
  if dataset is None:
    dataset = _load_data(section, data_dir, trained and trained[1])
  options = {"evaluation_examples": config["evaluation_examples"]}
  if isinstance(dataset, text.Text):
    make, options = problems.language, {"context": section["context"]}
    options["evaluation_windows"] = config["evaluation_examples"] or _WINDOWS
    _follow(kind, model, {"context": section["context"]})
  elif isinstance(dataset, sentences.Sentences):
    trained = trained or _encoder(kind, model)
    make, options["weights"] = problems.classify_sentences, trained[0]
    sizes = {"context": dataset.train_tokens.shape[-1]}
    _follow(kind, model, {**sizes, "vocabulary": dataset.vocabulary})
  else:
    of_classes = dataset.classes is not None
    make = problems.classification if of_classes else problems.regression
    options |= {key: section[key] for key in ("augment", "partition")}
  outputs = dataset.classes  # of an example, or of a position
  if outputs is None:
    outputs = int(dataset.train_labels[0].size)

  def build():
    with blame("model", tuple(model)), _of_function("model", kind):
      layers = models.build(kind, outputs, **model)
    where = contextlib.nullcontext()
    if isinstance(dataset, text.Text) or names.is_import(section["name"]):
      where = blame("data")
    with where, _of_model(config):
      sizes = {"batch_size": config["batch_size"]}
      problem = make(dataset, layers, **sizes, **options)
    _check_fit(config, problem, most)
    return problem

  if options.get("weights") is not None:  # of files, which may have changed
    return dataset, build()
  read = ("data", "model", "batch_size", "evaluation_examples")
  plain = [config[key] for key in read]
  return dataset, _problems.get(build, plain, identity(dataset)["sha256"])


_problems = build_cache.BuildCache(8)  # and their data


_latest: list[tuple[Dataset, str]] = []  # the data read last, their checksum


def identity(dataset: Dataset) -> dict[str, Any]:
  """Returns the dataset's name, and a checksum of its arrays; of objects of a
  caller what else is known of them."""
  if isinstance(dataset, own_problem.Objects):
    return dataset.identity
  if not any(known is dataset for known, _ in _latest):
    arrays = jax.tree.leaves(dataset[2:])
    checksum = storage.digest(arrays)
    if any(getattr(x, "flags", None) and x.flags.writeable for x in arrays):
      return {"name": dataset.name, "sha256": checksum}  # may be changed
    _latest[:] = [(dataset, checksum)]
  return {"name": dataset.name, "sha256": _latest[0][1]}


def title(config: Mapping[str, Any], dataset: Dataset) -> str:
  """Returns what is trained, in a few words."""
  if isinstance(dataset, own_problem.Objects):
    return "a caller's data and model"
  if isinstance(dataset, ProblemSource):
    return dataset.name
  return f"{dataset.name}, {config['model']['name']}"


def _follow(kind, model, sizes):
  """Gives a model, of those that it takes, the sizes of its data."""
  for key in models.takes(kind, sizes):
    model.setdefault(key, sizes[key])


def _load_data(section, data_dir, tokenizer) -> Dataset:
  name, context = section["name"], section["context"]
  if name in TEXTS:
    with blame("data"):
      return text.load(name, data_dir=data_dir, tokenizer=section["tokenizer"])
  if section["tokenizer"] != text.CHARACTERS and not names.is_import(name):
    raise ValueError(
      f"config.data.tokenizer {section['tokenizer']!r} is for the texts"
      f" {', '.join(TEXTS)}, not for {name!r}; drop it"
    )
  if name in sentences.TASKS:
    with blame("data"):
      return sentences.load(
        name, context=context, data_dir=data_dir, tokenizer=tokenizer
      )
  if names.is_import(name):
    with blame("data"):
      made = _call("dataset", section, {"data_dir": data_dir})
      with _naming(f"dataset {name!r}"):
        return data.as_dataset(made, name)
  try:
    return data.load(name, data_dir=data_dir)
  except ValueError as error:
    if not str(error).startswith("unknown dataset"):
      raise
    texts, tasks = ", ".join(TEXTS), ", ".join(sentences.TASKS)
    raise ValueError(
      f"config.data.name: {error}; texts: {texts}; sentences: {tasks}; or"
      " MODULE:FUNCTION, one's own"
    ) from None


# Functions of one's own.


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
  """Names a function in the errors of what it returned."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{what}: {error}") from error


def _of_function(
  kind: str, name: str | None
) -> contextlib.AbstractContextManager[None]:
  """Returns a context that turns whatever a function of one's own raises into
  one line."""
  if not names.is_import(name):
    return contextlib.nullcontext()
  return user_code(f"{kind} {name!r} fails", passes=(ValueError,))


def _call(kind: str, section: Mapping[str, Any], given: Mapping[str, Any]):
  """Calls the function that a section names: with the section's other keys, and
  those of `given` and of the section's own that it takes."""
  name = section["name"]
  make = names.imported(kind, name)
  taken = inspect.signature(make).parameters
  own = schema.keys_of(schema.SHARED["data"]) if kind == "dataset" else ()
  arguments = {
    key: value
    for key, value in section.items()
    if key != "name" and (key not in own or key in taken)
  }
  arguments |= {key: given[key] for key in given if key in taken}
  with _of_function(kind, name):
    return names.call(kind, name, make, arguments)


def _given(config, data_dir) -> tuple[Dataset, problems.Problem]:
  """The problem that a function of one's own makes."""
  section = config["problem"]
  name = section["name"]
  if not names.is_import(name):
    raise ValueError(
      f"config.problem.name must be MODULE:FUNCTION, not {shown(name)}; what is"
      " known already is named by config.data and config.model"
    )
  for key in ("data", "model"):
    if config[key] != schema.default_of(schema.SHARED[key]):
      raise ValueError(
        f"config.problem.name {name!r} says what is trained: drop config.{key}"
      )

  def make(size):
    problem = _call(
      "problem", section, {"batch_size": size, "data_dir": data_dir}
    )
    if not isinstance(problem, problems.Problem):
      raise ValueError(
        f"{name!r} returned {shown(problem)}; return an asgd.problems.Problem"
      )
    loss = problem.loss  # called with a key, whatever its signature says
    problem = problem._replace(
      loss=losses.as_loss(lambda params, batch, key: loss(params, batch, key)),
      evaluate=_evaluating(problem.evaluate, name),
    )
    if problem.rebatch is not None:
      return problem
    return problem._replace(rebatch=make)

  with blame("problem"):
    taken = inspect.signature(names.imported("problem", name)).parameters
    if "batch_size" not in taken:
      raise ValueError(
        f"problem {name!r} takes no argument batch_size, by which runs differ;"
        " add it"
      )
    problem = make(config["batch_size"])
    _check_problem(problem)
  _check_size(jax.eval_shape(problem.init, jax.random.key(0)))
  return ProblemSource(name, name, problem.probe), problem


def _evaluating(evaluate: Callable, name: str) -> Callable:
  """A function of one's own may return a loss alone."""

  def whole(params):
    said = evaluate(params)
    with blame("problem"), _naming(f"evaluate of {name!r}"):
      return own_problem.as_evaluation(said, "loss")

  return whole


def _check_problem(problem) -> None:
  """Raises ValueError for a problem whose parts do not fit."""
  with user_code("batches(seed, workers)(worker, job) fails"):
    batches = problem.batches(0, 1)
    batch, again = batches(0, 0), batches(0, 0)
  if storage.digest(batch) != storage.digest(again):
    raise ValueError(
      "batches(seed, workers)(worker, job) gave two batches for one job; make"
      " it a function of seed, worker and job alone, as"
      " numpy.random.default_rng((seed, worker, job)) draws"
    )
  params = own_problem.check_loss(problem.init, problem.loss, batch)
  if problem.updates is not None:
    _check_updates(problem, params, batch)


def _check_updates(problem, params, batch):
  """Raises ValueError for updates that are not like the parameters."""
  key = jax.random.key(0)
  with user_code("updates(params, batch, key) fails"):
    (loss, _), values = jax.eval_shape(problem.updates, params, batch, key)
  wanted, given = (
    jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    for tree in (params, values)
  )
  if loss.shape != () or wanted != given:
    raise ValueError(
      "updates(params, batch, key) must return ((loss, Aux), values like the"
      f" parameters, {shown(wanted)}), not {shown(given)}"
    )


def _check_model(kind, model):
  """Refuses a model, and arguments of it, that no data would make right: data
  take long to load."""
  arguments = {k: v for k, v in model.items() if k != "pretrained"}
  with blame("model", tuple(arguments)):
    if names.is_import(kind):
      maker = names.imported("model", kind)
      sizes = "classes", "context", "vocabulary", "rngs"
      given = [*arguments, *models.takes(kind, sizes)]
      names.check_arguments("model", kind, maker, given)
      return
    if kind == "bert":  # the data say how many words there are
      arguments.setdefault("vocabulary", 2)
    models.build(kind, 1, **arguments)


def _encoder(kind, model):
  """Returns (weights, tokenizer), if there are, of a model for sentences, and
  completes `model`."""
  if names.is_import(kind):
    return None, None
  if kind != "bert":
    raise ValueError(
      "config.model.name must be 'bert' for sentences, or MODULE:FUNCTION, not"
      f" {kind!r}"
    )
  place = model.pop("pretrained", None)
  if place is None:
    if "vocabulary" in model:
      raise ValueError("config.model.vocabulary follows from the data; drop it")
    return None, None
  with blame("model.pretrained"):
    trained = encoder.pretrained(place, pooling=model.get("pooling", "mean"))
  for key in trained.sizes:
    if key in model and key != "pooling":
      raise ValueError(
        f"config.model.{key} follows from config.model.pretrained; drop it"
      )
  model.update(trained.sizes)
  return trained.weights, trained.folder


@contextlib.contextmanager
def _of_model(config) -> Iterator[None]:
  """Names the model in what is wrong with one of one's own."""
  name = config["model"]["name"]
  try:
    with _of_function("config.model", name):
      yield
  except models.ModelError as error:
    raise ValueError(f"config.model {name!r}: {error}") from error


def _check_fit(config, problem, most):
  """Whether the model takes the data, and fits a machine."""
  key = jax.random.key(0)
  model, name = config["model"]["name"], config["data"]["name"]
  try:
    shapes = jax.eval_shape(problem.init, key)
    jax.eval_shape(problem.loss, shapes, problem.batches(0, 1)(0, 0), key)
  except Exception as error:
    known = isinstance(error, TypeError | ValueError | OverflowError)
    if not known and not names.is_import(model):
      raise
    line = " ".join(str(error).split())[:300]
    kind = "" if known else f"{type(error).__name__}: "
    raise ValueError(
      f"config.model {model!r} does not fit config.data {name!r}: {kind}{line}"
    ) from error
  if names.is_import(model) and problem.pieces is not None:
    with _of_model(config):
      own.check_layers(problem.init)
  _check_size(shapes, most)


def _check_size(shapes, most=_MOST_PARAMETERS):
  count = models.count(shapes)
  if count > most:
    size = f"config.model has {count:,} parameters"
    raise ValueError(f"{size}; use at most {most:,}")
