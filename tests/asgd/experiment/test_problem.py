"""From `data` and `model` of a config to a problem: images, text, sentences.

Configs of sentences that were trained before are in asgd/data/test_sentences.
"""

import jax
import kit
import numpy as np
import pytest

import asgd
from asgd import experiment
from asgd.experiment import problem, schema

GPT = {"name": "gpt", "depth": 1, "width": 8, "heads": 2}
BERT = {"name": "bert", "depth": 1, "width": 8, "heads": 2}
TEXT = {"name": "pydoc", "context": 8}
TOPICS, DIGITS = {"name": "topics"}, {"name": "digits"}


def load(data, model, **config):
  runs = {"a": {"recipe": "asgd"}}
  resolved = schema.resolve(
    {"data": data, "model": model, "runs": runs, **config}, experiment.ENGINES
  )
  return problem.load(resolved.config)


KINDS = {
  "images": ({"name": "digits"}, {"name": "mlp", "hidden": (8,)}),
  "text": (TEXT, GPT),
  "sentences": ({"name": "topics", "context": 16}, BERT),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_data_gives_a_problem_that_begins_near_guessing(kind):
  dataset, loaded = load(*KINDS[kind], batch_size=4, evaluation_examples=8)
  params = jax.jit(loaded.init)(jax.random.key(0))
  batch = loaded.batches(0, 2)(1, 3)
  assert {len(leaf) for leaf in jax.tree.leaves(batch)} == {4}
  evaluation = loaded.evaluate(params)
  assert 0.5 < float(evaluation.loss) / np.log(dataset.classes) < 2
  assert 0 <= evaluation.accuracy <= 1
  assert loaded.pieces is not None


@pytest.mark.parametrize(
  ("kind", "engine"),
  [
    ("text", "threads"),
    ("sentences", "simulate"),
    ("sentences", "mesh"),
    ("regression", "threads"),
    ("regression", "mesh"),
  ],
)
def test_each_kind_of_data_is_trained_by_each_engine(kind, engine, tmp_path):
  kinds = {**KINDS, "regression": ({"name": "diabetes"}, {"name": "mlp"})}
  section, model = kinds[kind]
  place, result, _ = kit.train_live(
    tmp_path / "out",
    data=section,
    model=model,
    engine=engine,
    runs={"a": {"recipe": "asgd"}},
    workers=(2,),
    batch_size=4,
    examples=32,
    evaluations=1,
    evaluation_examples=4,
    mesh={"axes": {"data": 2}},
  )
  assert np.isfinite(result["test_loss"])
  assert np.isfinite(result["test_accuracy"]) == (kind != "regression")
  if engine == "threads":
    assert asgd.replay(place).same


def test_a_text_of_a_file_is_read(tmp_path):
  path = tmp_path / "text"
  path.write_text("to be or not to be, " * 200)
  resolved = schema.resolve(
    {
      "data": {"name": "file", "context": 8},
      "model": GPT,
      "runs": {"a": {"recipe": "asgd"}},
      "batch_size": 4,
    },
    experiment.ENGINES,
  )
  dataset, loaded = problem.load(resolved.config, data_dir=str(path))
  assert dataset.classes <= 11
  assert np.asarray(loaded.batches(0, 1)(0, 0)).shape == (4, 9)


MISTAKES = (
  ({"name": "pydok"}, {"name": "mlp"},
   "^config.data.name: unknown .*'pydok'.* texts: pydoc, file; sentences:"),
  ({"name": "file"}, GPT, "^config.data: .*data_dir"),
  (TEXT, {"name": "gpd"}, "^config.model: .*did you mean 'gpt'"),
  ({"name": "digits"}, {"name": "mlp", "hiden": 3},
   "^config.model: .*did you mean 'hidden'"),
  (TEXT, {"name": "mlp"},
   "^config.model 'mlp' does not fit config.data 'pydoc': "),
  ({"name": "digits"}, GPT,
   "^config.model 'gpt' does not fit config.data 'digits': "),
  (TEXT, {**GPT, "context": 4}, "do not fit into a context of 4"),
  ({"name": "pydoc", "context": 10**6}, GPT, "^config.data"),
  ({"name": "topics"}, {"name": "mlp"},
   "^config.model.name must be 'bert' .*, or MODULE:FUNCTION, not 'mlp'"),
  ({"name": "topics"}, {**BERT, "vocabulary": 9},
   "^config.model.vocabulary follows from the data; drop it"),
  ({"name": "digits"}, {"name": "mlp", "hidden": (10**6, 10**6)},
   "^config.model has 1,000,0.* parameters; use at most 10,000,000,000"),
)


test_a_model_that_does_not_fit_is_told = kit.refuses(
  [((a, b), why) for a, b, why in MISTAKES],
  lambda value: load(*value), longest=700,
)


@pytest.mark.parametrize(
  ("data", "model", "message"),
  [
    (TEXT, {**GPT, "depth": 10**9}, "^config.model.depth must be at most 200"),
    (TEXT, {**GPT, "width": True}, "^config.model.width must be .* not True"),
    (TOPICS, {**BERT, "heads": True}, "^config.model.heads must be"),
    (TOPICS, {**BERT, "epsilon": "x"}, "^config.model.epsilon must"),
    (DIGITS, {"name": "cnn", "norm": 3}, "^config.model: unknown norm 3"),
  ],
)
def test_a_wrong_model_is_told_before_data_are_loaded(
  data, model, message, monkeypatch
):
  def load_nothing(*args, **kwargs):
    raise AssertionError("data are loaded")

  for place in (problem.text, problem.sentences, problem.data):
    monkeypatch.setattr(place, "load", load_nothing)
  with pytest.raises(ValueError, match=message):
    load(data, model)
