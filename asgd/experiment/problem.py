"""From the sections `data` and `model` of a config to a Problem."""

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
  """Loads the data and builds the model, checking that they fit.

  Args:
    config: resolved; its sections `data` and `model`, `batch_size` and
      `evaluation_examples` are read.
    data_dir: where the data's files are; of a text, the file. None looks in
      the usual places.
    dataset: one that is loaded already, used as it is.

  Raises:
    ValueError: for an unknown name, naming the nearest, for files that are not
      there, and for a model that does not fit the data.
  """
  makers = dict.fromkeys(TEXTS, _language)
  makers |= dict.fromkeys(sentences.TASKS, _sentences)
  make = makers.get(config["data"]["name"], _images)
  dataset, problem = make(config, data_dir, dataset)
  _check_fit(config, problem)
  return dataset, problem


def _images(config, data_dir, dataset):
  section, model = config["data"], dict(config["model"])
  try:
    dataset = dataset or data.load(section["name"], data_dir=data_dir)
  except ValueError as error:
    if not str(error).startswith("unknown dataset"):
      raise
    texts, tasks = ", ".join(TEXTS), ", ".join(sentences.TASKS)
    raise ValueError(
      f"config.data.name: {error}; texts: {texts}; sentences: {tasks}"
    ) from None
  with blame("model"):
    layers = models.build(model.pop("name"), dataset.classes, **model)
  problem = problems.classification(
    dataset,
    layers,
    batch_size=config["batch_size"],
    augment=section["augment"],
    partition=section["partition"],
    evaluation_examples=config["evaluation_examples"],
  )
  return dataset, problem


def _language(config, data_dir, dataset):
  section, model = config["data"], dict(config["model"])
  with blame("data"):
    dataset = dataset or text.load(section["name"], data_dir=data_dir)
  kind = model.pop("name")
  if kind == "gpt":
    model.setdefault("context", section["context"])
  with blame("model"):
    layers = models.build(kind, dataset.classes, **model)
  with blame("data"):
    problem = problems.language(
      dataset,
      layers,
      batch_size=config["batch_size"],
      context=section["context"],
      evaluation_windows=config["evaluation_examples"] or _WINDOWS,
    )
    problem.batches(0, 1)  # are there windows?
  return dataset, problem


def _sentences(config, data_dir, dataset):
  section, model = config["data"], dict(config["model"])
  if (kind := model.pop("name")) != "bert":
    raise ValueError(
      f"config.model.name must be 'bert' for sentences, not {kind!r}"
    )
  weights, place = None, model.pop("pretrained", None)
  if place is not None:
    try:
      weights = encoder.pretrained(place, pooling=model.get("pooling", "mean"))
    except (TypeError, ValueError) as error:
      raise ValueError(f"config.model.pretrained: {error}") from error
    for key in weights.sizes:
      if key in model and key != "pooling":
        raise ValueError(
          f"config.model.{key} follows from config.model.pretrained; drop it"
        )
    model |= weights.sizes
  elif "vocabulary" in model:
    raise ValueError("config.model.vocabulary follows from the data; drop it")
  with blame("data"):
    dataset = dataset or sentences.load(
      section["name"],
      context=section["context"],
      data_dir=data_dir,
      tokenizer=weights and weights.folder,
    )
  model.setdefault("context", section["context"])
  model.setdefault("vocabulary", dataset.vocabulary)
  with blame("model"):
    layers = models.build(kind, dataset.classes, **model)
  problem = problems.classify_sentences(
    dataset,
    layers,
    batch_size=config["batch_size"],
    evaluation_examples=config["evaluation_examples"],
    weights=weights and weights.weights,
  )
  return dataset, problem


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
  parameters = models.count(shapes)
  if parameters > _MOST_PARAMETERS:
    raise ValueError(
      f"config.model has {parameters:,} parameters; use at most"
      f" {_MOST_PARAMETERS:,}"
    )
