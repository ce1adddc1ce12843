"""Errors of calls that train: folders, evaluations, data, a full disk. Each
names the value, the fact and the remedy."""

import errno
import functools
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import jax.numpy as jnp
import kit
import linear
import numpy as np
import pytest
from flax import linen as nn
from linear import DATA, PARAMS, X, criterion, live, mesh, simulate, squares

import asgd
from asgd import calls, data, pipeline, safe_files
from asgd.experiment.engines import NonFiniteResult
from asgd.experiment.machine import Machine
from asgd.live.journal import journal_path, read_journal
from asgd.problems import finite

pytestmark = pytest.mark.usefixtures("blank_pictures")

NOBODY = 65534  # a user without rights
DANA = asgd.dana_zero(0.02, workers=2)
PLAIN = asgd.asgd(0.02, workers=1)
LAYERS = nn.Dense(4), nn.tanh, nn.Dense(1)


def train_pipeline(recipe=PLAIN, **options):
  def train(loss, params, *parts, **options):
    return pipeline.train(LAYERS, criterion, *parts, **options)

  if "epochs" not in options:
    options = {"messages": 16, **options}
  return linear.call(train, recipe, **options)


CALLS = {
  "simulate": simulate,
  "live": functools.partial(live, DANA),
  "mesh": functools.partial(mesh, PLAIN, axes={"data": 1}),
  "pipeline": train_pipeline,
  "tables": functools.partial(simulate, asgd.table(0.02, workers=4)),
  "sandblaster": functools.partial(
    simulate, asgd.sandblaster_lbfgs(0.5, workers=4)
  ),
}


# Folders.


@pytest.mark.parametrize("call", [*CALLS.values(), asgd.replay])
@pytest.mark.parametrize("value", [5, b"x", "", "a\0b", [], 1.5])
def test_a_folder_that_is_no_path_is_refused(call, value):
  with pytest.raises(ValueError) as caught:
    call(folder=value)
  said = str(caught.value)
  assert said.startswith("folder must be a path, a text such as 'runs/mine'")
  assert repr(value) in said and "\n" not in said


LOADS = (
  lambda value: data.load("fashion", data_dir=value),
  lambda value: data.text.load("file", data_dir=value),
  lambda value: data.sentences.load("sst2", data_dir=value, context=8),
  lambda value: asgd.replay("runs", data_dir=value),
)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("value", [5, b"x"])
def test_data_that_are_at_no_path_are_refused(load, value):
  with pytest.raises(ValueError, match="data_dir must be a path, a text such"):
    load(value)


@pytest.mark.parametrize("name", CALLS)
def test_a_folder_that_cannot_be_made_is_refused(name, tmp_path):
  (tmp_path / "file").write_text("mine")
  call = CALLS[name]
  with pytest.raises(ValueError, match="file is a file; choose another folder"):
    call(folder=tmp_path / "file")
  with pytest.raises(ValueError, match="folder=.*file/a/b cannot be opened"):
    call(folder=tmp_path / "file" / "a" / "b")
  with pytest.raises(ValueError, match="File name too long.*another folder"):
    call(folder=tmp_path / ("n" * 300))
  assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def closed():
  """A folder that this user cannot open."""
  with tempfile.TemporaryDirectory() as root:
    path = Path(root, "closed")
    path.mkdir()
    Path(root).chmod(0o755)
    path.chmod(0)
    if os.geteuid() == 0:  # whom modes do not bind
      os.seteuid(NOBODY)
    yield path
    os.seteuid(os.getuid())
    path.chmod(0o700)


def test_a_folder_without_permission_is_refused(closed):
  for path in (closed, closed / "inner"):
    with pytest.raises(ValueError, match="Permission denied|be written to"):
      simulate(folder=path)
    with pytest.raises(ValueError, match="change its permissions, or name"):
      asgd.replay(path)


# Evaluations.


def test_an_evaluation_that_fails_names_call_message_and_remedy():
  def evaluate(params):
    return {"loss": jnp.zeros(2) @ params}

  with pytest.raises(ValueError) as caught:
    simulate(evaluate=evaluate)
  said = str(caught.value)
  assert ": evaluate(params) fails at message 12 (TypeError: " in said
  assert "mend the function, or the model or data that it uses, and" in said
  assert "\n" not in said
  assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("column", ["message", "train_loss", "seconds"])
def test_an_evaluation_has_no_column_of_the_run(column):
  with pytest.raises(ValueError, match=f"'{column}'.* such as 'my_{column}'"):
    simulate(evaluate=lambda params: {column: 1.0})


def test_an_evaluation_may_have_any_other_column():
  names = "loss", "accuracy", "epoch", "test_loss", "mine"
  values = dict(zip(names, range(5), strict=True))
  (row,) = simulate(evaluate=lambda params: values).evaluations
  assert {name: row[name] for name in names} == values
  assert row["message"] == 12


def test_a_live_run_that_fails_without_a_folder_leaves_no_memory(tmp_path):
  machine = Machine(memory_dir=str(tmp_path))
  with pytest.raises(ValueError, match="evaluate.params. fails"):
    live(DANA, evaluate=lambda params: 1 / 0, machine=machine)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["simulate", "live", "pipeline"])
def test_a_finished_folder_has_the_evaluations_of_its_own_evaluate(
  name, tmp_path
):
  call, place = CALLS[name], tmp_path / "run"

  def first(params):
    return 1.0

  result = call(folder=place, evaluate=first)
  assert call(folder=place, evaluate=first).evaluations == result.evaluations
  assert call(folder=place).evaluations == result.evaluations
  with pytest.raises(ValueError, match="with another evaluate, and has finish"):
    call(folder=place, evaluate=lambda params: 2.0)
  other = tmp_path / "other"
  call(folder=other)
  with pytest.raises(ValueError, match="trained without evaluate, and has fin"):
    call(folder=other, evaluate=first)


def test_an_evaluation_that_was_mended_continues_the_run(tmp_path):
  def wrong(params):
    raise KeyError("test")

  with pytest.raises(ValueError, match="KeyError: 'test'"):
    simulate(folder=tmp_path, evaluate=wrong)
  result = simulate(folder=tmp_path, evaluate=lambda params: 1.0)
  assert result.evaluations[-1]["value"] == 1


MODEL = """
import flax.linen as nn

class Model(nn.Module):
  classes: int

  @nn.compact
  def __call__(self, x, train):
    if not train and len(x) > 1:
      raise KeyError("statistics")
    return nn.Dense(self.classes)(x.reshape(x.shape[0], -1))

def make(classes):
  return Model(classes)
"""


@pytest.mark.parametrize("engine", ["simulate", "threads"])
def test_a_model_of_a_config_that_fails_in_an_evaluation_is_named(
  engine, tmp_path, monkeypatch
):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "model_of_errors.py").write_text(MODEL)
  with pytest.raises(ValueError) as caught:
    kit.train_tiny(
      tmp_path / "out", model={"name": "model_of_errors:make"}, engine=engine
    )
  said = str(caught.value)
  assert ": evaluate(params) fails at message " in said
  assert "KeyError: 'statistics'" in said and "run the same command" in said


# Data that are not finite.


def spoiled(value=np.nan):
  x = X.copy()
  x[17, 2] = value
  return x, DATA[1]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_that_are_not_finite_are_named_with_array_and_index(name, value):
  with pytest.raises(ValueError) as caught:
    CALLS[name](data=spoiled(value), epochs=4)
  said = str(caught.value)
  wanted = f"data[0][17, 2] is {value}; no learning rate cures that: replace"
  assert wanted in said.partition("If the loss leaves them out")[0]
  assert "\n" not in said


@pytest.mark.parametrize("name", ["simulate", "live", "mesh", "pipeline"])
def test_a_batch_of_a_function_is_named_by_worker_and_job(name):
  def data(worker, job):
    x = X[:8].copy()
    x[5, 1] = np.nan if job == 7 else 1.0
    return x, DATA[1][:8]

  said = r"data\(\d, 7\)\[0\]\[5, 1\] is nan; no learning rate"
  with pytest.raises(ValueError, match=said):
    CALLS[name](data=data, batch_size=None)


@pytest.mark.parametrize("folder", [None, "run"])
def test_a_batch_of_one_worker_is_named(folder, tmp_path):
  def data(worker, job):
    x = X[:8].copy()
    x[5, 1] = np.nan if worker == 1 and job > 4 else 1.0
    return x, DATA[1][:8]

  said = r"^[^:]*: data\(1, \d\)\[0\]\[5, 1\] is nan; no learning rate"
  with pytest.raises(NonFiniteResult, match=said):
    simulate(data=data, batch_size=None, folder=folder and tmp_path / folder)


def test_an_element_of_a_list_is_named_by_its_index():
  batches = [(X[i : i + 8], DATA[1][i : i + 8]) for i in range(0, 48, 8)]
  batches[3] = (batches[3][0], np.full(8, np.inf, np.float32))
  with pytest.raises(
    NonFiniteResult, match=r"data\[3\]\[1\]\[0\] is inf \(8 such values"
  ):
    simulate(data=batches, batch_size=None)


def test_parameters_that_are_not_finite_are_named():
  with pytest.raises(NonFiniteResult, match=r"params\[1\] is nan; no learning"):
    simulate(params=np.float32([0, np.nan, 0]))


def test_a_rate_that_is_too_high_is_blamed_where_data_are_finite():
  with pytest.raises(NonFiniteResult) as caught:
    simulate(asgd.asgd(1e30, workers=2))
  said = str(caught.value)
  assert "data" not in said and "lower learning_rate" in said
  assert "on_nan='record'" in said


def test_a_recorded_run_warns_of_its_data(capsys):
  simulate(data=spoiled(), on_nan="record", progress=True, epochs=4)
  assert "warning: data[0][17, 2] is nan; no" in capsys.readouterr().err


def test_a_tree_is_searched_for_values_that_are_not_finite():
  tree = {"a": np.arange(3), "b": [np.ones(2), np.float32(np.inf)]}
  assert finite.first_fault(tree, "data") == "data['b'][1] is inf"
  tree["b"][1] = jnp.bfloat16(1)
  assert finite.first_fault(tree, "data") == ""


def test_batches_of_a_problem_are_searched_unless_they_have_a_position():
  def batches(worker, job):
    if job == 4:
      raise IndexError
    return {"x": np.float32([worker, np.nan if job == 3 else 0])}

  problem = types.SimpleNamespace(
    init=lambda key: jnp.zeros(2),
    batches=lambda seed, workers: batches,
    sequential=False,
  )
  options = {"seed": 0, "workers": 2}
  jobs = [(0, 0), (1, 3), (0, 4)]
  assert finite.find_fault(problem, None, jobs=jobs, **options) == (
    "batches(seed, workers)(1, 3)['x'][1] is nan"
  )
  assert finite.find_fault(problem, None, jobs=jobs[::2], **options) == ""
  problem.sequential = True
  assert finite.find_fault(problem, (), jobs=jobs, **options) == ""


# Words.


def test_remedies_of_a_pipeline_name_arguments():
  peers = asgd.d_psgd(0.1, workers=2)
  cases = (
    (dict(stages=5), "set stages=2, or a deeper model"),
    (dict(stages="2"), "stages must be a positive whole number, not '2'"),
    (dict(stages=257), "stages must be a whole number from 1 to 256, not 257"),
    (dict(schedule="gpipes"), "did you mean 'gpipe'"),
    (dict(schedule=5), "unknown schedule 5; known: "),
    (dict(weights="newest"), "weights 'newest' is not known"),
    (dict(recompute="most"), "recompute must be True or False"),
    (dict(cuts=[0, 1]), "cuts: 2 stages are cut at 3 layers"),
    (dict(partition="mixed_pipe"), "partition=mixed_pipe is not for"),
    (dict(group=3), "unknown argument 'group'"),
    (dict(recipe=peers), "the recipe has peers instead"),
    (dict(recipe=peers), "does not run: use asgd.simulate"),
  )
  for options, part in cases:
    with pytest.raises(ValueError) as caught:
      train_pipeline(**options)
    said = str(caught.value)
    assert part in said
    assert not re.search(r"config|runs\.|--|pipeline\.", said), said


def test_a_pipeline_that_diverges_names_arguments():
  recipe = asgd.asgd(1e30, workers=1, momentum=0.9)
  with pytest.raises(ValueError) as caught:
    train_pipeline(recipe, messages=64)
  said = str(caught.value)
  assert "set a lower learning_rate, a longer warm-up or clip_norm" in said
  assert "on_nan='record'" in said
  result = train_pipeline(recipe=recipe, messages=64, on_nan="record")
  assert not np.isfinite(result.records.loss).all()


def test_names_of_files_stay_in_the_words_of_calls(tmp_path):
  place = tmp_path / "config.b" / "dataset.c"
  simulate(folder=place)
  (place / "config.json").write_text("{")
  with pytest.raises(ValueError) as caught:
    simulate(folder=place)
  assert f"{place}/config.json cannot be read or was changed" in (
    str(caught.value)
  )
  with (
    pytest.raises(ValueError, match="^batch_size and a config.json of zero$"),
    calls.in_words_of_calls("mesh"),
  ):
    raise ValueError(
      "--config.batch_size and a config.json of config.runs.my-run.mesh.zero"
    )


# A full disk.


FULL = """
import resource, sys
import numpy as np
import asgd
x = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
def loss(params, batch):
  errors = batch[0] @ params["w"] - batch[1]
  return (errors**2).mean() + 0 * params["b"].sum()
params = {"w": np.zeros(3, np.float32), "b": np.zeros(20_000, np.float32)}
calls = asgd.simulate, asgd.simulate, asgd.train_live
_, root, *limits = sys.argv
for index, (call, limit) in enumerate(zip(calls, limits, strict=True)):
  resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), -1))
  try:
    result = call(
      loss, params, (x, x.sum(1)), asgd.asgd(0.02, workers=2), messages=40,
      every=10, batch_size=8, folder=f"{root}/{index}", progress=False,
    )
    print(len(result.records.loss), len(result.evaluations))
  except OSError as error:
    print(error)
"""


@pytest.mark.process
def test_a_full_disk_is_named_and_the_same_calls_resume(
  tmp_path, monkeypatch, capsys
):
  """A limit is of one file: config.json, the parameters, or a journal."""
  words = ["-c", FULL, str(tmp_path), "100", "40000", "2000"]
  lines = subprocess.run(
    [sys.executable, *words],
    stdout=subprocess.PIPE,
    text=True,
    cwd=kit.ROOT,
    check=True,
  ).stdout.splitlines()
  assert len(lines) == 3
  for index, line in enumerate(lines):
    assert re.match(f"cannot write {tmp_path}/{index}.*File too large", line)
    assert "make room" in line
  assert not list(tmp_path.rglob("*.tmp"))
  # Without a limit they need no process of their own.
  monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path), "-1", "-1", "-1"])
  exec(FULL, {"__name__": "__main__"})
  assert capsys.readouterr().out.splitlines() == 3 * ["40 4"]


def test_a_file_that_grows_is_written_completely_or_named(tmp_path):
  path = tmp_path / "log"
  path.symlink_to("/dev/full")
  with pytest.raises(ValueError, match="is a symbolic link"):
    safe_files.appending(path)
  with (
    Path("/dev/full").open("wb") as full,
    safe_files.appending(tmp_path / "rows", buffered=False) as file,
    pytest.raises(safe_files.DiskFull) as caught,
  ):
    os.dup2(full.fileno(), file.fileno())
    file.write(b"row")
  assert caught.value.errno == errno.ENOSPC
  assert str(caught.value).startswith(f"cannot write {tmp_path}/rows (No space")
  assert "make room, and run this again" in str(caught.value)


# A replay.


def test_a_replay_of_a_trace_that_was_cut_names_its_end(tmp_path):
  live(DANA, folder=tmp_path / "run", messages=20)
  (cell,) = (tmp_path / "run" / "cells").iterdir()
  path = journal_path(cell, 0)
  rows = read_journal(path)
  kit.write_journal(path, rows[: len(rows) // 2])
  replayed = asgd.replay(cell, squares, PARAMS, DATA, DANA)
  assert not replayed.same
  count = len(replayed.records.loss)
  assert replayed.reason.startswith(
    f"the trace ends at message {count} of 20: it was cut short; put the"
  )
  assert replayed.reason in repr(replayed)
  assert len(repr(replayed)) < 1000
