"""From the sections `data` and `model` of a config to a Problem."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax

from asgd import data, models, problems
from asgd.data import sentences, text
from asgd.experiment.checks import blame
from asgd.models import encoder

Dataset = data.Dataset | text.Text | sentences.Sentences

TEXTS = ("pydoc", "file")
_WINDOWS = 64  # of a text, on which it is evaluated
_MOST_PARAMETERS = 10**10


def load(
  config: Mapping[str, Any],
  *,
  data_dir: str | None = None,
  dataset: Dataset | None = None,
) -> tuple[Dataset, problems.Problem]:
  """Loads the data and builds the model of a resolved config, checking that
  they fit; arguments are those of `cells.build`."""
  section, model = config["data"], dict(config["model"])
  name, kind = section["name"], model.pop("name")
  _check_model(kind, model)
  examples = config["evaluation_examples"]
  if name in TEXTS:
    with blame("data"):
      dataset = dataset or text.load(name, data_dir=data_dir)
    if kind == "gpt":
      model.setdefault("context", section["context"])
    make, options = problems.language, {"context": section["context"]}
    options["evaluation_windows"] = examples or _WINDOWS
  elif name in sentences.TASKS:
    dataset, weights = _sentences(section, kind, model, data_dir, dataset)
    make, options = problems.classify_sentences, {"weights": weights}
    options["evaluation_examples"] = examples
  else:
    try:
      dataset = dataset or data.load(name, data_dir=data_dir)
    except ValueError as error:
      if not str(error).startswith("unknown dataset"):
        raise
      texts, tasks = ", ".join(TEXTS), ", ".join(sentences.TASKS)
      raise ValueError(
        f"config.data.name: {error}; texts: {texts}; sentences: {tasks}"
      ) from None
    make, options = problems.classification, {"evaluation_examples": examples}
    options |= {key: section[key] for key in ("augment", "partition")}
  with blame("model", tuple(model)):
    layers = models.build(kind, dataset.classes, **model)
  with blame("data") if name in TEXTS else contextlib.nullcontext():
    problem = make(dataset, layers, batch_size=config["batch_size"], **options)
    if name in TEXTS:
      problem.batches(0, 1)  # are there windows?
  _check_fit(config, problem)
  return dataset, problem


def _check_model(kind, model):
  """Refuses a model, and arguments of it, that no data would make right: data
  take long to load."""
  arguments = {k: v for k, v in model.items() if k != "pretrained"}
  if kind == "bert":  # the data say how many words there are
    arguments.setdefault("vocabulary", 2)
  with blame("model", tuple(arguments)):
    models.build(kind, 1, **arguments)


def _sentences(section, kind, model, data_dir, dataset):
  """Returns sentences and weights, if there are, and completes `model`."""
  if kind != "bert":
    raise ValueError(
      f"config.model.name must be 'bert' for sentences, not {kind!r}"
    )
  weights, place, tokenizer = None, model.pop("pretrained", None), None
  if place is not None:
    with blame("model.pretrained"):
      trained = encoder.pretrained(place, pooling=model.get("pooling", "mean"))
    for key in trained.sizes:
      if key in model and key != "pooling":
        raise ValueError(
          f"config.model.{key} follows from config.model.pretrained; drop it"
        )
    model.update(trained.sizes)
    weights, tokenizer = trained.weights, trained.folder
  elif "vocabulary" in model:
    raise ValueError("config.model.vocabulary follows from the data; drop it")
  context = section["context"]
  with blame("data"):
    dataset = dataset or sentences.load(
      section["name"], context=context, data_dir=data_dir, tokenizer=tokenizer
    )
  model.setdefault("context", context)
  model.setdefault("vocabulary", dataset.vocabulary)
  return dataset, weights


def _check_fit(config, problem):
  """Whether the model takes the data, and fits a machine."""
  key = jax.random.key(0)
  model, name = config["model"]["name"], config["data"]["name"]
  try:
    shapes = jax.eval_shape(problem.init, key)
    jax.eval_shape(problem.loss, shapes, problem.batches(0, 1)(0, 0), key)
  except (TypeError, ValueError, OverflowError) as error:
    line = " ".join(str(error).split())[:300]
    raise ValueError(
      f"config.model {model!r} does not fit config.data {name!r}: {line}"
    ) from error
  count, most = models.count(shapes), _MOST_PARAMETERS
  if count > most:
    size = f"config.model has {count:,} parameters"
    raise ValueError(f"{size}; use at most {most:,}")
