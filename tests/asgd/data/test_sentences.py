"""Tasks of sentences: files, words, what is trained, and what is refused."""

import io
import lzma
import sys
import tarfile
from pathlib import Path

import bert_files
import jax
import kit
import ml_collections
import numpy as np
import pytest
import tokenizers
from sklearn import metrics

from asgd import models, problems
from asgd.data import DataError, sentences

ROOT = Path(__file__).parents[3]

# A few lines of each task, as their files have them.
FILES = {
  "SST-2": (
    'sentence\tlabel\nall "too familiar \t0\na\u2028gem . \t1\n',
    "sentence\tlabel\nfine \t1\n",
  ),
  "CoLA": (
    "gj04\t1\t\tThey drank the pub dry.\ngj04\t0\t*\tThey drank the pub.\n",
    "cj99\t0\t*\tDrank they.\n",
  ),
  "MRPC": (
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    "1\t7\t8\tHe said so .\tSo he said .\r\n"
    '0\t9\t5\t" Yes .\tNo , " he said .',
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\tA .\tB .\n",
  ),
  "RTE": (
    "index\tsentence1\tsentence2\tlabel\n"
    "0\tIt rains.\tIt is wet.\tentailment\n"
    "1\tIt rains.\tIt is dry.\tnot_entailment\n",
    "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n",
  ),
}
READ = {
  "sst2": (
    [('all "too familiar ',), ("a\u2028gem . ",)],
    [0, 1],
    [1],
  ),
  "cola": (
    [("They drank the pub dry.",), ("They drank the pub.",)],
    *([1, 0], [0]),
  ),
  "mrpc": (
    [("He said so .", "So he said ."), ('" Yes .', 'No , " he said .')],
    *([1, 0], [1]),
  ),
  "rte": (
    [("It rains.", "It is wet."), ("It rains.", "It is dry.")],
    *([0, 1], [1]),
  ),
}


def archive(folder, files=FILES, name="glue_sst2_rte_mrpc_cola.tar.xz"):
  packed = io.BytesIO()
  with tarfile.open(fileobj=packed, mode="w") as tar:
    for task, contents in files.items():
      for file, content in zip(("train", "dev"), contents, strict=True):
        content = content.encode()
        info = tarfile.TarInfo(f"glue_data/{task}/{file}.tsv")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
  (folder / name).write_bytes(lzma.compress(packed.getvalue()))
  return folder / name


def unpacked(folder, files=FILES):
  for task, contents in files.items():
    (folder / task).mkdir(parents=True)
    for file, content in zip(("train", "dev"), contents, strict=True):
      (folder / task / f"{file}.tsv").write_bytes(content.encode())
  return folder


# Files.


@pytest.mark.parametrize("name", READ)
def test_each_task_is_read_from_an_archive_or_a_folder(name, tmp_path):
  pairs, train, test = READ[name]
  form = sentences._FORMS[name].folder
  path = archive(tmp_path)
  whole = unpacked(tmp_path / "here" / "glue_data").parent
  places = (path, tmp_path, whole, whole / "glue_data")
  for place in (*places, whole / "glue_data" / form):
    _, classes, found, held_out = sentences._load_glue(name, str(place))
    assert classes == 2
    assert found.sentences == pairs
    assert found.labels.tolist() == train
    assert held_out.labels.tolist() == test
  held = sentences.load(name, context=8, data_dir=path)
  assert held.source == f"file {path}"
  assert held.train_tokens.shape == (2, 2, 8)
  assert held.train_labels.dtype == np.int32
  measures = {"cola": "matthews", "mrpc": "f1"}
  assert held.measure == measures.get(name)


BROKEN = {
  "columns": ("sentence\tlabel\na b 1\n", "train.tsv, line 2: expected 2 col"),
  "label": ("sentence\tlabel\na b\t2\n", "line 2: the label is '2', expected"),
  "no rows": ("sentence\tlabel\n", "train.tsv has no examples"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_of_another_form_is_refused(name, tmp_path):
  content, message = BROKEN[name]
  unpacked(tmp_path, {"SST-2": (content, content)})
  with pytest.raises(DataError, match=message):
    sentences.load("sst2", context=8, data_dir=tmp_path)


def test_what_is_not_there_is_told(tmp_path):
  def load(name, **options):
    return sentences.load(name, **{"context": 8, **options})

  with pytest.raises(ValueError, match="unknown task of sentences 'sst3'; did"):
    load("sst3")
  with pytest.raises(ValueError, match="'cola' needs data_dir: the archive"):
    load("cola")
  with pytest.raises(ValueError, match="is part of Python: leave data_dir out"):
    load("topics", data_dir=tmp_path)
  with pytest.raises(DataError, match="gone.tar.xz does not exist; give"):
    load("rte", data_dir=tmp_path / "gone.tar.xz")
  with pytest.raises(DataError, match="has no train.tsv and dev.tsv.*RTE/"):
    load("rte", data_dir=tmp_path)
  for context in (4, True, 8.0):
    with pytest.raises(ValueError, match=f"5 or more, not {context}"):
      load("topics", context=context)
  path = archive(tmp_path, {"RTE": FILES["RTE"]})
  with pytest.raises(DataError, match="lacks CoLA/train.tsv"):
    load("cola", data_dir=path)
  path.write_bytes(path.read_bytes()[:-9])
  with pytest.raises(DataError, match="cannot be read .*; replace it"):
    load("rte", data_dir=path)
  (tmp_path / "RTE").mkdir()
  path.unlink()
  for file in ("train.tsv", "dev.tsv"):
    (tmp_path / "RTE" / file).write_bytes(b"\xff\xfe")
  with pytest.raises(DataError, match="train.tsv is not UTF-8 text"):
    load("rte", data_dir=tmp_path)


# Words.


def test_words_are_those_that_are_frequent_in_training(tmp_path):
  train = "sentence\tlabel\nb a, a b!\t0\nc a\t1\n"
  unpacked(tmp_path, {"SST-2": (train, "sentence\tlabel\nA? c B\t1\n")})
  held = sentences.load("sst2", context=6, data_dir=tmp_path)
  assert held.vocabulary == 6  # four that are special, a, b
  unknown, start, end, a, b = 1, 2, 3, 4, 5
  assert held.train_tokens[:, 0].tolist() == [
    [start, b, a, unknown, a, end],
    [start, unknown, a, end, 0, 0],
  ]
  row = held.test_tokens[0, 0].tolist()
  assert row == [start, a, unknown, unknown, b, end]
  assert not held.train_tokens[:, 1].any()
  assert not held.train_tokens.flags.writeable


def test_a_pair_loses_words_of_its_longer_sentence():
  long, short = "a a a a a a", "b b"
  examples = sentences.Examples([(long, short), (short, long)], np.zeros(2))
  number, encode = sentences._word_vocabulary(examples)
  assert number == 6
  tokens = encode(examples, 8)
  assert tokens[:, 0].tolist() == [
    [2, 4, 4, 4, 3, 5, 5, 3],
    [2, 5, 5, 3, 4, 4, 4, 3],
  ]
  assert tokens[:, 1].tolist() == [
    [0, 0, 0, 0, 0, 1, 1, 1],
    [0, 0, 0, 0, 1, 1, 1, 1],
  ]
  assert encode(examples, 20)[0, 1].tolist() == [0] * 8 + [1] * 3 + [0] * 9


PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "it", "is", ".")


def tokenizer(folder):
  """A WordPiece tokenizer as those of BERT are."""
  folder.mkdir(exist_ok=True)
  table = {piece: number for number, piece in enumerate(PIECES)}
  made = tokenizers.Tokenizer(
    tokenizers.models.WordPiece(table, unk_token="[UNK]")
  )
  made.normalizer = tokenizers.normalizers.BertNormalizer()
  made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  made.post_processor = tokenizers.processors.BertProcessing(
    ("[SEP]", 3), ("[CLS]", 2)
  )
  made.save(str(folder / "tokenizer.json"))
  return folder


def test_pieces_are_those_of_the_tokenizer(tmp_path):
  folder = tokenizer(tmp_path / "model")
  number, encode = sentences._pretrained_tokenizer(folder)
  assert number == len(PIECES)
  one = sentences.Examples([("It is playing.",), ("ö",)], np.zeros(2))
  assert encode(one, 8)[:, 0].tolist() == [
    [2, 6, 7, 4, 5, 8, 3, 0],
    [2, 1, 3, 0, 0, 0, 0, 0],
  ]
  assert encode(one, 5)[0, 0].tolist() == [2, 6, 7, 4, 3]
  pair = sentences.Examples([("Playing is it.", "is it")], np.zeros(1))
  tokens = encode(pair, 8)
  assert tokens.tolist() == [
    [[2, 4, 5, 7, 3, 7, 6, 3], [0, 0, 0, 0, 0, 1, 1, 1]]
  ]
  assert tokens.dtype == np.int32


def test_a_tokenizer_that_is_none_is_refused(tmp_path, monkeypatch):
  def load():
    return sentences.load("topics", context=8, tokenizer=tmp_path)

  with pytest.raises(DataError, match="lacks tokenizer.json"):
    load()
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(DataError, match="tokenizer.json cannot be read"):
    load()
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(DataError, match="pip install tokenizers"):
    load()


# The embedded task.


def test_the_embedded_task_can_be_learned():
  held = sentences.load(context=48)
  assert held.classes == 4
  assert len(held.train_labels) > 600 and len(held.test_labels) > 150
  rows = [{row.tobytes() for row in part} for part in (held[2], held[4])]
  assert len(rows[0] & rows[1]) < 3  # cut off, two sentences may be one
  assert set(held.test_labels) == set(range(4))
  assert held.train_tokens.max() == held.vocabulary - 1

  def bags(tokens):
    out = np.zeros((len(tokens), held.vocabulary), np.float32)
    out[np.arange(len(tokens))[:, None], tokens[:, 0]] = 1
    return out

  # Ridge regression, in its dual form.
  train, test = bags(held.train_tokens), bags(held.test_tokens)
  products = train @ train.T + np.eye(len(train))
  scores = test @ train.T @ np.linalg.solve(
    products, np.eye(4)[held.train_labels]
  )
  accuracy = (scores.argmax(1) == held.test_labels).mean()
  most = np.bincount(held.test_labels).max() / len(held.test_labels)
  assert accuracy > most + 0.25


# Problems.


def drawn_task(measure=None, count=40):
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, 9, (count, 2, 5)).astype(np.int32)
  tokens[:, 1] = 0
  labels = (tokens[:, 0] == 4).any(1).astype(np.int32)
  return sentences.Sentences(
    *("none", "drawn here", tokens, labels, tokens[:9], labels[:9], 2, 9),
    measure,
  )


SMALL = {"vocabulary": 9, "depth": 1, "width": 4, "heads": 2, "context": 5}


def sentence_problem(held=None, **options):
  layers = models.build("bert", 2, **SMALL)
  held = drawn_task() if held is None else held
  return problems.classify_sentences(held, layers, batch_size=4, **options)


@pytest.mark.parametrize("seed", range(4))
def test_measures_are_those_of_scikit_learn(seed):
  rng = np.random.default_rng(seed)
  labels, said = rng.integers(0, 2, (2, 50)) * [[seed != 0], [seed != 1]]
  found = {name: of(labels, said) for name, of in sentences.MEASURES.items()}
  assert found == pytest.approx({
    "matthews": metrics.matthews_corrcoef(labels, said),
    "f1": metrics.f1_score(labels, said, zero_division=0.0),
  }, rel=1e-12)


def test_loss_and_measures_are_those_of_the_logits():
  # Five of nine are right: 2 of 4 positives, 3 of 5 negatives.
  truth = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0], np.int32)
  said = np.array([1, 1, 0, 0, 1, 1, 0, 0, 0])
  # All that distinguishes examples is their first word.
  held = drawn_task()._replace(test_labels=truth)
  held.test_tokens[:, 0] = np.where(said == 1, 4, 5)[:, None]
  layers = models.build("bert", 2, **SMALL)
  shapes = jax.eval_shape(sentence_problem().init, jax.random.key(1))
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes
  )
  apply = jax.jit(lambda x: models.apply(layers[:-1], params[:-1], x)[0])
  one, other = np.asarray(apply(held.test_tokens[[0, 2]]).mean(1))
  # A head that tells these two apart.
  kernel = np.stack([np.zeros_like(one), one - other], 1)
  bias = np.array([0, -(one + other) @ (one - other) / 2], np.float32)
  params = (*params[:-1], {"classifier": {"kernel": kernel, "bias": bias}})
  z = (2 * said - 1) * ((one - other) @ (one - other)) / 2
  losses = np.log1p(np.exp(np.where(truth == 1, -z, z)))
  for measure, value in (("matthews", 2 / 20), ("f1", 0.5), (None, np.nan)):
    found = sentence_problem(held._replace(measure=measure)).evaluate(params)
    assert found.accuracy == pytest.approx(5 / 9)
    assert found.measure == pytest.approx(value, nan_ok=True)
    assert found.loss == pytest.approx(losses.mean(), rel=1e-5)


def test_batches_are_those_of_the_data():
  made, held = sentence_problem(), drawn_task()
  tokens, labels = made.batches(3, 1)(0, 7)
  assert tokens.shape == (4, 2, 5)
  where = [
    np.flatnonzero((held.train_tokens == row).all((1, 2)))[0] for row in tokens
  ]
  np.testing.assert_array_equal(held.train_labels[where], labels)
  assert made.batches_per_epoch == 10


def test_weights_are_where_training_begins():
  key = jax.random.key(0)
  init = sentence_problem().init
  first = init(key)
  weights = (*jax.tree.map(np.asarray, first[:-1]), {})
  init_from = sentence_problem(weights=weights).init
  for seed in (1, 2):
    params = init_from(jax.random.key(seed))
    jax.tree.map(np.testing.assert_array_equal, params[:-1], first[:-1])
    fresh = init(jax.random.key(seed))
    jax.tree.map(np.testing.assert_array_equal, params[-1], fresh[-1])
    kernels = (p[-1]["classifier"]["kernel"] for p in (params, first))
    assert (np.not_equal(*kernels)).all()


def test_mistakes_of_a_problem_are_told():
  with pytest.raises(ValueError, match="none has 10 .* words, but the model"):
    sentence_problem(drawn_task()._replace(vocabulary=10))
  with pytest.raises(ValueError, match="3 layers need a dict of weights each"):
    sentence_problem(weights=({},))
  weights = ({"words": np.zeros((8, 4), np.float32)}, {}, {})
  with pytest.raises(ValueError, match="given for layer 0 have other sizes"):
    jax.eval_shape(sentence_problem(weights=weights).init, jax.random.key(0))
  with pytest.raises(ValueError, match="evaluation_examples must be 0"):
    sentence_problem(evaluation_examples=-1)
  with pytest.raises(ValueError, match="batch_size 4 is larger than the 3"):
    sentence_problem(drawn_task(count=3))


# From a config.


def test_the_topics_config_builds_and_its_first_run_is_the_embedded_task():
  config = kit.config_of("pipeline_sentences", "topics")
  assert config.is_locked
  exp = kit.build(config)
  assert exp.dataset.name == "topics"
  assert list(exp.runs) == list(config.only)
  assert set(config.only) <= set(config.runs)
  assert {exp.plan(cell).table.stages for cell in exp.cells} == {4}
  with pytest.raises(ValueError, match="unknown variant 'smal'"):
    kit.config_of("pipeline_sentences", "smal")


@pytest.fixture
def fine_tuning(tmp_path):
  """A config of a tiny checkpoint and a tiny SST-2, and where that is."""
  folder = tokenizer(tmp_path / "model")
  numbers = len(PIECES), 1, 4, 2, 8, 8, 2, 1e-12
  sizes = dict(zip(bert_files.SIZES, numbers, strict=True))
  held = bert_files.tensors(sizes, pooler=False)
  bert_files.write(folder, held, sizes)
  train = "".join(f"it is playing .\t{i % 2}\n" for i in range(8))
  files = {"SST-2": (f"sentence\tlabel\n{train}",) * 2}
  unpacked(tmp_path / "glue", files)
  config = {
    "data": {"name": "sst2", "context": 6},
    "model": {"name": "bert", "pretrained": str(folder)},
    "batch_size": 2,
    "examples": 4,
    "engine": "pipeline",
    "pipeline": {"microbatches": 2},
    "runs": {"x": {"schedule": "gpipe"}},
  }
  return config, tmp_path / "glue", held


def test_a_config_names_what_was_trained_before(fine_tuning):
  config, place, held = fine_tuning
  exp = kit.build(config, data_dir=str(place))
  params = exp.plan(exp.cells[0]).problem.init(jax.random.key(0))
  np.testing.assert_array_equal(
    params[0]["words"], held["embeddings.word_embeddings.weight"]
  )
  np.testing.assert_array_equal(
    params[1]["up"]["kernel"],
    held["encoder.layer.0.intermediate.dense.weight"].T,
  )
  assert params[-1]["classifier"]["kernel"].shape == (4, 2)
  assert exp.dataset.train_tokens[0, 0].tolist() == [2, 6, 7, 4, 5, 3]
  same = ml_collections.ConfigDict(config)
  assert kit.build(same, data_dir=str(place)).cells == exp.cells


MISTAKES = {
  "model": ({"name": "mlp"}, "config.model.name must be 'bert' for"),
  "no such": (
    {"name": "bert", "pretrained": "no_such_bert"},
    "config.model.pretrained: .*pip install --no-deps no-such-bert",
  ),
  "size": ({"width": 8}, "config.model.width follows from config.model.pre"),
  "pooler": ({"pooling": "first"}, "config.model.pretrained: .*pooler.dense"),
  "words": (
    {"pretrained": None, "vocabulary": 9},
    "config.model.vocabulary follows from the data",
  ),
  "option": ({"droput": 0.1}, "config.model: .*did you mean 'dropout'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_config_names_key_and_remedy(name, fine_tuning):
  config, place, _ = fine_tuning
  changes, message = MISTAKES[name]
  config["model"] = {**config["model"], **changes}
  with pytest.raises(ValueError, match=message):
    kit.build(config, data_dir=str(place))


def test_the_data_has_its_place_and_its_room(fine_tuning):
  config, place, _ = fine_tuning
  with pytest.raises(ValueError, match="config.data: .*'sst2' needs data_dir"):
    kit.build(config)
  config["data"] = {"name": "sst2", "context": 12}
  with pytest.raises(ValueError, match="12 positions do not fit into a contex"):
    kit.build(config, data_dir=str(place))
  config["data"] = {"name": "sst3"}
  with pytest.raises(
    ValueError, match="config.data.name: .* sentences: topics"
  ):
    kit.build(config)
