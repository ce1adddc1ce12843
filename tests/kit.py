"""What tests share: comparisons, random arrays and small worlds.

A test imports it with `import kit`; see `pythonpath` in pyproject.toml.
"""

import contextlib
import csv
import functools
import hashlib
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest
from absl import app, flags, logging
from absl.testing import flagsaver

from asgd import base, models
from asgd.live import journal
from asgd.live.spans import Span
from asgd.orders import trace as trace_lib

ROOT = Path(__file__).parent.parent
DEADLINE = 400  # seconds until a command is taken to hang

# A run of any engine that takes a moment.
TINY_RUN = {
  "runs": {"run": {"recipe": "asgd", "momentum": 0.5}},
  "model": {"name": "mlp", "hidden": (8,)},
  "workers": (2,),
  "batch_size": 16,
  "examples": 384,  # 24 messages
  "learning_rate": 0.02,
  "evaluations": 3,
  "curvature_checks": 0,
  "evaluation_examples": 32,
}
TINY_TABLE = {"recipe": "table", "bound": 2, "clock_every": 2, "shards": 2}
TINY_RATINGS = {  # of a run on 200 ratings
  "workers": (2,),
  "seeds": (0,),
  "batch_size": 9,
  "epochs": 2.0,  # 40 jobs
  "learning_rate": 0.5,
  "evaluations": 2,
  "curvature_checks": 0,
}


# Columns that say how long something took; of a pipeline that goes on after its
# end, memory is not known any more.
TIMES = {
  *("wall_seconds", "seconds", "seconds_per_update", "examples_per_second"),
  *("bubble_measured", "bubble_predicted", "peak_bytes", "stage_peak_bytes"),
}


def load_module(path, name=None):
  """Returns the module of a file outside of the packages; with a name, it is
  imported by that name."""
  spec = importlib.util.spec_from_file_location(name or path.stem, path)
  module = importlib.util.module_from_spec(spec)
  if name:
    sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def load_config_file(path):
  """Returns the module of a file in configs; a figure may import another."""
  from asgd.experiment import code

  code.add_folder(path.parent)
  return load_module(path)


def config_of(name, variant=None):
  """Returns a config of the folder `configs`, by the name of its file."""
  module = load_config_file(ROOT / "configs" / f"{name}.py")
  assert f"--config=configs/{name}.py" in module.__doc__
  return module.get_config(variant)


def build(config, /, *, dataset=None, data_dir=None, run=None, **more):
  """Returns the experiment of a config and of more keys, with all engines; each
  of its runs has the keys of `run`, too."""
  from asgd import experiment
  from asgd.pipeline.engine import PIPELINE

  if run:
    runs = {**config, **more}["runs"].items()
    more["runs"] = {label: {**given, **run} for label, given in runs}
  config = {**config, **more} if more else config
  engines = {**experiment.ENGINES, "pipeline": PIPELINE}
  return experiment.build(
    config, engines=engines, dataset=dataset, data_dir=data_dir
  )


def tiny(**config):
  """Returns an experiment of TINY_RUN, simulated unless an engine is named."""
  return build(TINY_RUN, **config)


def train_tiny(workdir, **config):
  """Trains all cells of such an experiment in a folder; returns it."""
  from asgd.experiment import folder

  exp = tiny(**config)
  folder.open_folder(str(workdir), "x", exp)
  for index in range(len(exp.cells)):
    train(exp, workdir, index)
  return exp


class Trained(NamedTuple):
  """A cell that was trained; the last three of one that this call ended."""

  result: Any
  place: Any  # its folder
  records: Any = None
  params: Any = None
  rows: Any = None  # evaluations


def train(exp, workdir=None, index=0, **options):
  """Trains a cell of an experiment; options are those of `loop.train`."""
  from asgd.experiment import loop, progress

  cell, kept = exp.cells[index], []
  options = {"bar": progress.Silent(), **options}
  options["on_end"] = lambda *what: kept.extend(what[:3])  # without files
  result = loop.train(exp, cell, workdir, **options)
  return Trained(result, workdir and workdir / "cells" / cell.name, *kept)


def close(actual, expected, *, rtol=0.0, atol=1e-12):
  """Asserts that two trees agree, leaf by leaf, within a tolerance."""
  chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)


def refuses(mistakes, run=lambda call: call(), *, plain=False, longest=None):
  """Returns a test of a table, or of a list: of each (value, message) `run`
  raises a ValueError. The message is a pattern, or a part of it if `plain`; it
  is one line of at most `longest` characters, unless None."""
  names = mistakes if isinstance(mistakes, dict) else range(len(mistakes))

  @pytest.mark.parametrize("name", names)
  def test(name):
    value, message = mistakes[name]
    message = re.escape(message) if plain else message
    with pytest.raises(ValueError, match=message) as caught:
      run(value)
    text = str(caught.value)
    assert longest is None or ("\n" not in text and len(text) <= longest)

  return test


def same(actual, expected):
  """Asserts that two trees are equal, dtypes and shapes included."""
  trees = jax.tree.map(np.asarray, (actual, expected))
  chex.assert_trees_all_equal_dtypes(*trees)  # chex casts bfloat16 below
  chex.assert_trees_all_equal(*trees, strict=True)


def compiled_once(function):
  """Returns a jitted function that may not be traced a second time."""
  chex.clear_trace_counter()
  return jax.jit(chex.assert_max_traces(function, n=1))


def normal(*shape, seed=0):
  """Returns standard normal numbers, float64[shape]."""
  return np.random.default_rng(seed).standard_normal(shape)


def parameters(layers, example):
  """Returns parameters of a model; quicker than models.init, and no bias is 0.

  float64 of standard deviation 1/3; the seed of a leaf is its number.
  """
  shapes = shapes_of_parameters(layers, example.shape, example.dtype)
  leaves, structure = jax.tree.flatten(shapes)
  values = [normal(*leaf.shape, seed=i) / 3 for i, leaf in enumerate(leaves)]
  return jax.tree.unflatten(structure, values)


@functools.cache
def shapes_of_parameters(layers, shape, dtype):
  """Returns shapes and dtypes of a model's parameters, traced once."""
  example = jax.ShapeDtypeStruct(shape, dtype)
  key = jax.random.key(0)
  return jax.eval_shape(lambda key: models.init(layers, key, example), key)


def equations(jaxpr):
  """Yields the equations of a jaxpr and of those inside of it, in order."""
  for eqn in jaxpr.eqns:
    yield eqn
    for value in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from equations(inner)


# Leaves of several ranks and sizes, to be cut into shards.
VARIABLES = base.Variables(
  {
    "w": np.arange(15.0).reshape(5, 3),
    "b": np.linspace(-1, 1, 4),
    "scale": np.float64(2),
  },
  {"mean": np.arange(3.0)},
)
# Two workers, the second half as fast: the example of asgd.orders.trace.
TRACE = """\
time,worker,seq,job,action
0.0,0,0,0,send
0.0,1,0,1,send
1.0,0,0,0,receive
1.0,0,1,2,send
1.5,1,0,1,receive
1.5,1,1,3,send
2.0,0,1,2,receive
"""


def trace(*rows):
  """Returns a Trace of rows such as "0.0,1,5,send": time, worker, job, action.

  The seqs are counted at each worker, and of a row that ends a job found by the
  job. A row with a seq of its own, "0.0,1,0,5,send", keeps it.
  """
  started, seqs, lines = {}, {}, []
  for row in rows:
    time, worker, *middle, job, action = row.split(",")
    seq = trace_lib.NO_SEQ
    if action in ("send", "keep"):
      seq = started.get(worker, 0)
    elif action in ("receive", "lost", "reject"):
      seq = seqs.get((worker, job), 0)
    seq = int(middle[0]) if middle else seq
    if action in ("send", "keep"):
      started[worker], seqs[worker, job] = seq + 1, seq
    lines.append(f"{time},{worker},{seq},{job},{action}")
  return trace_lib.load(f"{line}\n" for line in (trace_lib.HEADER, *lines))


def steps(trace):
  """Returns the rows of a Trace by their times, as "1.0  receive 0:0  send 0:2"
  with worker:job."""
  times = {}
  for event in trace_lib.events(trace):
    row = f"  {base.ACTIONS[event.action]} {event.worker}:{event.job}"
    times[event.time] = times.get(event.time, f"{event.time}") + row
  return list(times.values())


def records(count=0, **columns):
  """Returns Records with these columns; the others are `count` zeros."""
  zeros = dict.fromkeys(base.Records._fields, np.zeros(count))
  return base.Records(**{**zeros, **columns})


def lasting(row):
  """Returns what of a row or result is not a time."""
  return {key: value for key, value in row.items() if key not in TIMES}


def iterates(place):
  """Returns the rows of iterates.csv without their times, which only grow."""
  table = list(csv.DictReader((place / "iterates.csv").read_text().split()))
  times = [float(row.pop("time")) for row in table]
  assert times == sorted(times)
  return table


def same_bits(actual, expected):
  """Asserts that two trees are equal to the bit, signs of zeros included."""
  assert bits(actual) == bits(expected)


def random_like(tree, count):
  """Returns so many trees of standard normal numbers, of a tree's shapes."""
  rng = np.random.default_rng(1)
  return [
    jax.tree.map(lambda x: rng.normal(size=np.shape(x)), tree)
    for _ in range(count)
  ]


def bits(tree):
  """Returns all bits of a tree, and how it is made."""
  leaves, structure = jax.tree.flatten(tree)
  return str(structure), [
    (np.asarray(x).dtype, np.shape(x), np.asarray(x).tobytes()) for x in leaves
  ]


def double(tree):
  """Returns a tree as NumPy arrays in float64."""
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def flip(path):
  """Changes one bit in the middle of a file, of the same length."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(bytes(content))


def until(condition, what, also=lambda: None):
  """Waits until a condition holds and returns its value; calls `also`
  meanwhile."""
  end = time.monotonic() + DEADLINE
  while not (value := condition()):
    assert time.monotonic() < end, f"{what} did not happen"
    also()
    time.sleep(0.005)
  return value


def track_names(events):
  """Returns (process, thread) -> name of the tracks of Perfetto's events."""
  return {
    (event["pid"], event["tid"]): event["args"]["name"]
    for event in events
    if event["name"] == "thread_name"
  }


def pixels(*shape, seed=0):
  """Returns random pixels, uint8[shape]."""
  return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def md5(content):
  """Returns the checksum of bytes, in hex."""
  return hashlib.md5(content).hexdigest()


def serve(monkeypatch, files):
  """Answers urlopen from a dict of url -> bytes or exception; logs the urls."""
  asked = []

  def urlopen(url, *, timeout):
    assert timeout > 0
    asked.append(url)
    answer = files[url]
    if isinstance(answer, Exception):
      raise answer
    return io.BytesIO(answer)

  monkeypatch.setattr(urllib.request, "urlopen", urlopen)
  return asked


def cached_files(cache):
  """Returns the names of all files in a folder."""
  return sorted(path.name for path in cache.rglob("*") if path.is_file())


def nested(dotted):
  """Returns a config of dotted keys."""
  config = {}
  for key, value in dotted.items():
    *above, last = key.split(".")
    place = config
    for name in above:
      place = place.setdefault(name, {})
    place[last] = value
  return config


class Malice:
  """Pickles into a call of Path.touch."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return Path.touch, (self.path,)


# Live runs.


def row(time, worker, job, action, seq=-1, version=-1):
  """Returns a row of the journal of a live shard."""
  return trace_lib.Event(
    time=time, worker=worker, job=job, action=action, seq=seq, version=version
  )


def sealed(text):
  """Returns the text of a journal with the checksums of its rows."""
  header, *rows = text.split("\n")
  for number, row in enumerate(rows[:-1]):
    row = row.rpartition(",")[0]
    rows[number] = f"{row},{zlib.crc32(row.encode()):08x}"
  return "\n".join([header, *rows])


def write_journal(path, rows):
  """Writes a journal of these rows, in place of one that is there."""
  path.unlink(missing_ok=True)
  file = journal.FileJournal(path)
  for each in rows:
    file.append(each)


# Two workers, three messages; the second one is then taken for dead.
JOURNAL = [
  row(1.0, 0, 0, base.JOIN),
  row(1.0, 0, 0, base.SEND, 0, 0),
  row(1.5, 1, 0, base.JOIN),
  row(1.5, 1, 1, base.SEND, 0, 0),
  row(2.0, 0, 0, base.RECEIVE, 0),
  row(2.0, 0, 2, base.SEND, 1, 1),
  row(3.0, 0, 2, base.RECEIVE, 1),
  row(3.0, 0, 3, base.SEND, 2, 2),
  row(4.0, 1, 1, base.RECEIVE, 0),
  row(4.0, 1, 4, base.SEND, 1, 3),
  row(9.0, 1, 4, base.LOST, 1),
  row(9.0, 1, 0, base.LEAVE),
]
SPANS = {
  0: [
    Span("fetch", 1.25, 1.25, 0, 0),
    Span("compute", 1.25, 1.75, 0, 0),
    Span("push", 1.75, 1.875, 0, 0),
    Span("fetch", 2.125, 2.25, 1, 2),
    Span("compute", 2.25, 2.75, 1, 2),
    Span("push", 2.75, 3.0, 1, 2),
    Span("fetch", 5.0, 5.0, 2, 3),  # it heard of it late
  ],
}


def write_live_cell(workdir, rows, name="a-n2-s0"):
  """Writes the files of a live cell in threads; returns its folder."""
  from asgd.experiment import folder

  place = workdir / "cells" / name
  place.mkdir(parents=True)
  config = {"server": {"shards": 1}}
  description = {"engine": "threads", "config": config}
  description |= {"version": folder.VERSION, "modules": {}}
  (place / "cell.json").write_text(json.dumps(description))
  write_journal(journal.journal_path(place, 0), rows)
  return place


class StopAfter:
  """A bar that counts messages, and asks to stop after so many."""

  def __init__(self, messages=float("inf")):
    self._left, self.lines = messages, []

  @property
  def received(self):
    """The signal that asked to stop, if one did."""
    return 2 if self._left <= 0 else 0

  def update(self, cell, progress):
    """Counts messages."""
    self._left -= progress.messages

  def line(self, text):
    """Keeps what the user is told."""
    self.lines.append(text)

  def skip(self, messages):
    """Counts nothing."""

  def finish(self, cell, result):
    """Counts nothing."""


class AfterLooks:
  """A signal that arrives after the run loop has looked for it some times."""

  def __init__(self, looks, number=signal.SIGTERM):
    self._left, self._number = looks, number

  @property
  def received(self):
    """The signal, once it has arrived."""
    self._left -= 1
    return self._number if self._left < 0 else 0


def simulation_of(experiment, restore=lambda rebuild: None):
  """Returns the engine of an experiment of one simulated cell."""
  from asgd.experiment import engines
  from asgd.experiment.machine import Machine

  (cell,) = experiment.cells
  plan = experiment.plan(cell)
  return experiment.engine_kind(cell).start(
    engines.Context(
      *(experiment, cell, plan, None, None, restore, (), Machine())
    )
  )


def to_its_end(engine):
  """Advances an engine to its last message; returns it."""
  while engine.done < engine.total:
    engine.advance(engine.total)
  return engine


def simulated(**config):
  """Returns the engine of a tiny simulated run, at its end."""
  return to_its_end(simulation_of(tiny(**config)))


def resumed_simulation(build, messages):
  """Returns the engine of `build()`, an experiment of one simulated cell, that
  was saved after so many messages and resumed, at its end."""
  from asgd.experiment import checkpoint, engines

  half = simulation_of(build())
  half._pace = engines.Pace(1e9, messages)
  half.advance(half.total)
  assert half.done == messages
  _, tree, notes = half.save()
  names, _ = checkpoint._leaves_by_name(tree)
  arrays = {name: np.array(leaf) for name, leaf in names.items()}
  saved = checkpoint.Restored(arrays, json.loads(json.dumps(notes)))
  return to_its_end(simulation_of(build(), lambda rebuild: rebuild(saved)))


def train_live(workdir, *, stop=(), memory_dir="/dev/shm", **settings):
  """Trains one small live cell, by default of three workers in threads.

  Args:
    workdir: folder of the experiment.
    stop: after so many messages it is stopped, and gone on with.
    memory_dir: for its shared memory.
    **settings: keys of the config.

  Returns:
    (folder of the cell, result, what the user was told).
  """
  from asgd import experiment as lib
  from asgd.experiment import folder, machine, signals

  config = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": ()},
    "runs": {"a": {"recipe": "dana_zero"}},
    "engine": "threads",
    "workers": (3,),
    "batch_size": 16,
    "epochs": 2.0,
    "learning_rate": 0.005,
    "evaluations": 2,
    "curvature_checks": 0,
    **settings,
  }
  experiment = lib.build(config, engines=lib.ENGINES)
  (cell,) = experiment.cells
  folder.open_folder(str(workdir), "live", experiment)
  where, told = machine.Machine(memory_dir=memory_dir), []
  for messages in (*stop, float("inf")):
    bar = StopAfter(messages)
    try:
      result = lib.train(
        experiment, cell, workdir, bar=bar, machine=where, signals=bar
      )
    except signals.Stopped as stopped:
      told.append(str(stopped))
    told += bar.lines
  return workdir / "cells" / cell.name, result, told


def outcome(time, loss, worker=None, staleness=None, began=0.0, accuracy=0.5):
  """Returns an Outcome of a run; by default of one worker, never stale."""
  from asgd.experiment import predict

  columns = {"time": np.array(time, float), "loss": np.array(loss, float)}
  nothing = np.zeros(len(time), int)
  columns["worker"] = nothing if worker is None else np.array(worker)
  columns["staleness"] = nothing if staleness is None else np.array(staleness)
  seen = records(len(time), **columns)
  return predict.Outcome(began, seen, accuracy)


def command(module, *arguments):
  """Returns the command line of `python -m launch.MODULE`."""
  return [sys.executable, "-m", f"launch.{module}", *map(str, arguments)]


def launch(module, *arguments, status=None, deadline=DEADLINE):
  """Runs a command of `launch` to its end.

  Args:
    module: of launch.
    arguments: of its command line.
    status: the exit status that it has to end with; None: any.
    deadline: seconds until it is taken to hang.
  """
  result = subprocess.run(
    command(module, *arguments),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=deadline,
  )
  if status is not None:
    assert result.returncode == status, result.stdout + result.stderr
  return result


@contextlib.contextmanager
def _new_flags():
  """Absl's flags as a command finds them: none of another command."""
  saved = flagsaver.save_flag_values()
  commands = flags.FLAGS.flags_by_module_dict().get("launch.flags", [])
  aside = {flag.name: flag for flag in commands}
  for name in aside:
    delattr(flags.FLAGS, name)
  others = set(flags.FLAGS)
  flags.FLAGS.unparse_flags()
  try:
    yield
  finally:
    for name in set(flags.FLAGS) - others:
      delattr(flags.FLAGS, name)
    for name, flag in aside.items():
      flags.FLAGS[name] = flag
      flags.FLAGS.register_flag_by_module("launch.flags", flag)
    flagsaver.restore_flag_values(saved)
    flags.FLAGS.mark_as_parsed()


@contextlib.contextmanager
def _to_file(patch, name, descriptor):
  """Sends a stream of this process, and of those it starts, to a file."""
  kept = os.dup(descriptor)
  with tempfile.TemporaryFile("a+") as file:
    file.reconfigure(line_buffering=True)
    patch.setattr(sys, name, file)
    os.dup2(file.fileno(), descriptor)
    try:
      yield file
    finally:
      os.dup2(kept, descriptor)
      os.close(kept)


def call(module, *arguments, status=None):
  """Does what `launch` does in this process, which has imported everything.

  Args:
    module: of launch.
    arguments: of its command line.
    status: the exit status that it has to end with; None: any.
  """
  from asgd.experiment import progress

  def run(main, flags_parser):
    sys.exit(main(flags_parser(sys.argv)))

  numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
  handlers = {number: signal.getsignal(number) for number in numbers}
  with (
    _new_flags(),
    pytest.MonkeyPatch.context() as patch,
    _to_file(patch, "stdout", 1) as out,
    _to_file(patch, "stderr", 2) as err,
    warnings.catch_warnings(),
  ):
    warnings.simplefilter("ignore", DeprecationWarning)
    # A test has imported the module, which is run here anew.
    warnings.filterwarnings("ignore", "'launch", RuntimeWarning)
    patch.chdir(ROOT)
    patch.setattr(sys, "argv", [f"launch/{module}.py", *map(str, arguments)])
    # Without what absl does to the logging of a process.
    patch.setattr(app, "run", run)
    patch.setattr(logging, "set_verbosity", lambda level: None)
    # Set by commands for the rest of their process.
    patch.setattr(sys, "unraisablehook", sys.unraisablehook)
    patch.setattr(threading, "excepthook", threading.excepthook)
    defaults = progress.ProgressBar.__init__.__kwdefaults__
    patch.setitem(defaults, "stream", err)
    status_now = 0
    try:
      name = f"launch.{module}"
      runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
      status_now = ended.code or 0
    finally:
      for number, handler in handlers.items():
        signal.signal(number, handler)
    texts = []
    for file in (out, err):
      file.seek(0)
      texts.append(file.read())
  result = subprocess.CompletedProcess(arguments, status_now, *texts)
  if status is not None:
    assert result.returncode == status, result.stdout + result.stderr
  return result


class Table:
  """The interface of a map-style `datasets.Dataset`."""

  def __init__(self, columns):
    self.columns, self.column_names = columns, list(columns)

  def with_format(self, kind, columns):
    assert kind == "numpy"
    return Table({name: self.columns[name] for name in columns})

  def __len__(self):
    return len(next(iter(self.columns.values())))

  def __getitem__(self, rows):
    return {name: column[rows] for name, column in self.columns.items()}


def start(module, *arguments, until):
  """Starts a command of `launch`; returns its process once a condition holds.

  Args:
    module: of launch.
    arguments: of its command line.
    until: called again and again.
  """
  process = subprocess.Popen(
    command(module, *arguments),
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  end = time.monotonic() + DEADLINE
  while not until():
    assert process.poll() is None, process.stdout.read()
    assert time.monotonic() < end
    time.sleep(0.02)
  return process


def assert_one_line(result, message):
  """Asserts that a command was refused in one line that holds a message."""
  assert result.returncode == 2, result.stdout + result.stderr
  (line,) = result.stderr.strip().splitlines()
  assert message in line, line
