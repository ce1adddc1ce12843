"""Updates per second of the simulator beside a plain jitted optax loop.

These contestants take turns: the simulator's engine on a given trace, a
complete call of `asgd.simulate`, and a loop over one jitted optax step on the
same model and batches with one worker. With torch there is also the loop that a
researcher would write in PyTorch, on the same order of workers
(`launch/bench/torch_loop.py`). The data are random.
"""

import contextlib
import functools
import itertools
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

import asgd
from asgd import base, models, orders, simulator
from asgd.orders import durations
from asgd.problems import Problem, own
from asgd.problems.problem import classification_loss

from . import turns
from .report import BenchReport, Measured, peak_bytes

_LEARNING_RATE = 0.001  # at which no recipe diverges
_EXAMPLES = 2048
_MAX_WORKERS = 4096
_STARTUP_CALLS = 3  # calls that measure the start-up
_RECEIVES = 64  # messages in a turn, at the server alone
_CONTESTANTS = "plain", "engine", "simulate", "torch"
# PyTorch is slower: it makes 1 / _TORCH_SHARE of the updates of a turn.
_TORCH_SHARE = 4


class BenchModel(NamedTuple):
  """A model, and how it is measured."""

  name: str
  kind: str  # of `asgd.models`
  widths: tuple[int, ...]  # of its layers but the last
  shape: tuple[int, ...]  # of an example
  batch: int  # examples
  messages: int  # least messages of a contestant, in all turns
  workers: tuple[int, ...]
  targets: Mapping[str, str]  # recipe -> times the plain loop

  def layers(self) -> models.Layers:
    """Returns the layers."""
    # The last layer has one output for each of 10 classes.
    if self.kind == "mlp":
      return models.mlp(10, hidden=self.widths)
    *features, hidden = self.widths
    return models.cnn(10, features=features, hidden=hidden)

  def parts(self) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """Returns (loss, params, data), as `asgd.simulate` takes them."""
    layers = self.layers()
    example: Any = np.zeros((1, *self.shape), np.float32)

    def loss(params: Any, batch: Any) -> jax.Array:
      logits, _ = models.apply(layers, params, batch[0])
      return classification_loss(logits, batch)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((_EXAMPLES, *self.shape), np.float32)
    labels = rng.integers(0, 10, _EXAMPLES, np.int32)
    return loss, lambda key: models.init(layers, key, example), (x, labels)

  def problem(self, recipe: asgd.Recipe) -> Problem:
    """Returns the problem that `asgd.simulate` makes of the parts."""
    objects = own.Objects(*self.parts(), recipe, batch_size=self.batch)
    return objects.problem()

  def updates_of(self, workers: int, count: int) -> int:
    """Returns the updates of one of `count` turns. In all turns together, each
    worker sends equally many messages.

    Example:
      >>> MODELS[0].updates_of(8, 6), MODELS[-1].updates_of(64, 6)
      (2048, 32)
    """
    # The turns' total is then a multiple of the workers.
    least_messages = workers // math.gcd(workers, count)
    return math.ceil(self.messages / count / least_messages) * least_messages


_DIGITS_TARGETS = {"asgd": ">= 2.5", "dana_zero": ">= 1.5"}
_LARGE_TARGETS = dict.fromkeys(_DIGITS_TARGETS, ">= 0.8")
_IMAGE = (28, 28, 1)
_CNN_TARGETS = dict.fromkeys(_DIGITS_TARGETS, ">= 0.95")
_CNN_TARGETS |= dict.fromkeys(("dc_asgd_a", "nag_asgd", "gap_aware"), "")
MODELS = (
  BenchModel(
    # name, kind, widths, shape, batch; messages, workers, targets.
    *("digits MLP", "mlp", (64,), (64,), 16, 12_288),
    *((8, 64, 512, _MAX_WORKERS), _DIGITS_TARGETS),
  ),
  BenchModel("MLP", "mlp", (64,), _IMAGE, 16, 3072, (64,), _LARGE_TARGETS),
  BenchModel("MLP", "mlp", (256, 256), _IMAGE, 16, 3072, (64,), _LARGE_TARGETS),
  BenchModel(
    *("MLP", "mlp", (1024, 1024), _IMAGE, 64, 192),
    *((64,), _LARGE_TARGETS),
  ),
  BenchModel(
    *("CNN", "cnn", (16, 32, 64), _IMAGE, 64, 144),
    *((8, 64), _CNN_TARGETS),
  ),
)


# Contestants: each call makes the updates of a turn.


def _plain_sgd(problem: Problem, updates: int) -> turns.Contestant:
  """Returns a contestant that trains with one worker and no simulator."""
  tx = optax.sgd(_LEARNING_RATE)
  step = turns.plain_step(problem, tx)
  batch, key = problem.batches(0, 1), jax.random.key(0)
  params, jobs = problem.init(key), itertools.count()

  def make_updates(state: Any) -> Any:
    """Makes the updates of a turn."""
    losses = []
    for job in itertools.islice(jobs, updates):
      *state, loss = step(*state, batch(0, job), key)
      losses.append(loss)
    # Losses are read once per turn, as the simulator does.
    jax.device_get(losses)
    return state

  return turns.repeated(make_updates, (params, tx.init(params)))


def _trace(workers: int, messages: int) -> base.Trace:
  """Returns an asynchronous order with drawn durations."""
  return orders.asynchronous(
    durations.homogeneous(), workers=workers, messages=messages
  )


def _choice(
  recipe: asgd.Recipe, problem: Problem, trace: base.Trace, messages: int
) -> simulator.Choice:
  """Returns the engine that `asgd.simulate` would choose."""
  worker = recipe.make_worker(problem.loss)
  # Shapes are enough to choose, so no parameters are made.
  params = jax.eval_shape(problem.init, jax.random.key(0))
  jobs = simulator.JobShapes(params, problem.batches(0, 1)(0, 0), messages)
  return simulator.choose(recipe.server(), worker, trace, jobs)


def _engine(
  choice: simulator.Choice,
  problem: Problem,
  trace: base.Trace,
  workers: int,
  updates: int,
) -> turns.Contestant:
  """Returns a contestant that replays the next `updates` messages of a
  trace."""
  engine = choice.simulator
  # The row of the trace at which each turn ends.
  ends = iter(simulator.end_of_message(trace)[updates - 1 :: updates])
  batch, root = problem.batches(0, workers), jax.random.key(0)
  simulation = engine.init(problem.init(root), workers)
  run = engine.follow(simulation, trace, batch=batch, root=root)
  return lambda: run.until(int(next(ends)))


def _with_simulate(
  call: Callable[..., Any],
  updates: int,
  messages: int,
  others: turns.Contestants,
) -> dict[str, npt.NDArray[np.float64]]:
  """Returns contestant -> seconds of each turn. `call` calls `asgd.simulate`.

  The call evaluates after each of its turns; in this evaluation each other
  contestant has a turn. The first turns, which compile, are not counted.
  """
  seconds: dict[str, list[float]] = {"simulate": [], **{k: [] for k in others}}
  start_time = time.perf_counter()

  def evaluate(params: Any) -> float:
    """Ends a turn of the call, and runs the turns of the others."""
    nonlocal start_time
    # The updates of the turn may still be running.
    jax.block_until_ready(params)
    seconds["simulate"].append(time.perf_counter() - start_time)
    for name, contestant in others.items():
      start_time = time.perf_counter()
      contestant()
      seconds[name].append(time.perf_counter() - start_time)
    start_time = time.perf_counter()
    return 0.0

  call(messages=messages, every=updates, evaluate=evaluate)
  return {name: np.array(times[1:]) for name, times in seconds.items()}


class TorchProcess:
  """PyTorch's loop, in a process of another Python."""

  def __init__(self, python: str):
    """Starts the process."""
    script = str(Path(__file__).with_name("torch_loop.py"))
    self._command = [python, script]
    self._process = subprocess.Popen(
      self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert self._process.stdin is not None and self._process.stdout is not None
    self._input, self._output = self._process.stdin, self._process.stdout

  def _write(self, **line: Any) -> None:
    """Sends a command; ValueError if the process has ended."""
    try:
      print(json.dumps(line), file=self._input, flush=True)
    except BrokenPipeError:
      raise self._failed() from None

  def _wait_for_line(self) -> None:
    """Waits for an answer; ValueError if the process has ended."""
    if not self._output.readline():
      raise self._failed()

  def _failed(self) -> ValueError:
    """Returns the error of a process that has ended."""
    command = " ".join(self._command)
    return ValueError(f"{command} has failed: has this Python torch?")

  def loop(
    self, model: BenchModel, trace: base.Trace, workers: int, updates: int
  ) -> turns.Contestant:
    """Returns a contestant that makes `updates` updates in the trace's order.

    It replaces the loop of an earlier call. The process has chosen its threads
    when the call returns.
    """
    # The order alone, not the times: PyTorch's loop has no clock.
    order = trace.worker[trace.action == base.RECEIVE].tolist()
    keys = "kind", "widths", "shape", "batch"
    sizes = {key: getattr(model, key) for key in keys}
    self._write(**sizes, rate=_LEARNING_RATE, workers=workers, order=order)

    self._wait_for_line()

    def make_updates() -> None:
      """Makes the updates; the process answers with a line."""
      self._write(updates=updates)
      self._wait_for_line()

    return make_updates

  def close(self) -> None:
    """Ends the process."""
    with contextlib.suppress(BrokenPipeError):
      self._input.close()
    self._process.wait()
    self._output.close()


# Tables.


def _rates(
  model: BenchModel,
  plain: turns.Contestant,
  name: str,
  workers: int,
  rounds: int,
  torch: TorchProcess | None,
) -> tuple[str, list[npt.NDArray[np.float64] | None]]:
  """Returns (name of the engine, updates per second of each turn for each of
  _CONTESTANTS). For torch they are None if it does not run this recipe."""
  # One turn more than those that count: the first turn compiles.
  updates = model.updates_of(workers, rounds + 1)
  messages = (rounds + 1) * updates
  recipe = asgd.build(name, _LEARNING_RATE, workers)
  trace, problem = _trace(workers, messages), model.problem(recipe)
  choice = _choice(recipe, problem, trace, messages)
  engine = _engine(choice, problem, trace, workers, updates)
  # Updates of a turn; the plain loop has one worker.
  updates_of = {"plain": model.updates_of(1, rounds + 1)}
  updates_of |= {"engine": updates, "simulate": updates}
  others = {"plain": plain, "engine": engine}
  if torch is not None and name == "asgd":
    updates_of["torch"] = max(updates // _TORCH_SHARE, 1)
    loop = torch.loop(model, trace, workers, updates_of["torch"])
    others["torch"] = loop
  parts = *model.parts(), recipe

  def call(**options: Any) -> None:
    asgd.simulate(*parts, batch_size=model.batch, progress=False, **options)

  seconds = _with_simulate(call, updates, messages, others)
  rates = {key: updates_of[key] / times for key, times in seconds.items()}
  return choice.name, [rates.get(key) for key in _CONTESTANTS]


def _speed(
  report: BenchReport,
  model: BenchModel,
  rounds: int,
  torch: TorchProcess | None,
) -> None:
  """Prints updates/s, and their ratios to the plain loop's and PyTorch's."""
  problem = model.problem(asgd.asgd(_LEARNING_RATE, workers=1))
  parameters = models.count(problem.init(jax.random.key(0)))
  names = ["plain/s", "engine/s", "simulate/s"]
  headers = ["engine / plain loop", "simulate / plain loop"]
  if torch is not None:
    names, headers = [*names, "torch/s"], [*headers, "simulate / torch loop"]
  table = report.table(
    f"{model.name} of {parameters:,} parameters, batch {model.batch}",
    "recipe, workers, method",
    dict.fromkeys(names, ".0f"),
    dict.fromkeys(headers, ".2f"),
    width=31,
  )
  # One plain loop for all rows: it is the same problem.
  plain = _plain_sgd(problem, model.updates_of(1, rounds + 1))
  for recipe, workers in itertools.product(model.targets, model.workers):
    name, rates = _rates(model, plain, recipe, workers, rounds, torch)
    plain_rates, engine_rates, simulate_rates, torch_rates = rates
    assert (
      plain_rates is not None
      and engine_rates is not None
      and simulate_rates is not None
    )
    speeds = [None if x is None else float(np.median(x)) for x in rates]
    ratios = [
      Measured(engine_rates / plain_rates),
      Measured(simulate_rates / plain_rates, model.targets[recipe]),
      None
      if torch_rates is None
      else Measured(simulate_rates / torch_rates, ">= 1"),
    ]
    columns = slice(None if torch else -1)
    row = f"{recipe}, {workers} workers, {name}"
    table.row(row, *speeds[columns], *ratios[columns])


def _receive_and_update(
  server: base.Server, params: Any
) -> turns.Contestants:
  """Returns contestants: `receive` of an asgd server, and its update alone.
  They start from `params`, which are every message, too."""
  tx = optax.sgd(_LEARNING_RATE)
  compiled_receive = simulator.compile_steps(
    server, None, keeps_messages=True
  ).receive
  first_state = simulator.start(server, params)
  ticket, loss = server.send(first_state, jnp.int32(0)), jnp.float32(0)

  def receive(state: Any) -> Any:
    """Returns the server's state after a message."""
    return compiled_receive(state, ticket, params, loss)[0]

  @jax.jit  # donates no parameters, as tickets may have them
  def compiled_update(current_params: Any, message: Any) -> Any:
    updates, _ = tx.update(message, tx.init(message), current_params)
    return optax.apply_updates(current_params, updates)

  def update(current_params: Any) -> Any:
    """Returns the parameters after a message."""
    return compiled_update(current_params, params)

  return {
    "receive": turns.repeated(receive, first_state),
    "update": turns.repeated(update, params),
  }


def _receives(report: BenchReport, rounds: int) -> None:
  """Prints how much longer the server takes for a message because it measures
  the gap and the norms of the message and of the update."""
  table = report.table(
    "a message of asgd at the server, by number of parameters",
    "parameters",
    {"receive us": ".0f", "update alone us": ".0f"},
    {"receive / update": ".2f"},
  )
  recipe = asgd.asgd(_LEARNING_RATE, workers=1)
  for model in MODELS:
    params = model.problem(recipe).init(jax.random.key(0))
    contestants = _receive_and_update(recipe.server(), params)
    receive, update = turns.take_turns(contestants, rounds, _RECEIVES).values()
    medians = [1e6 * float(np.median(times)) for times in (receive, update)]
    table.row(f"{models.count(params):,}", *medians, Measured(receive / update))


def _simulate_digits(workers: int, messages: int) -> None:
  """Calls `asgd.simulate` as a user would."""
  recipe = asgd.asgd(_LEARNING_RATE, workers=workers)
  batch_size = MODELS[0].batch
  asgd.simulate(
    *(*MODELS[0].parts(), recipe),
    messages=messages,
    batch_size=batch_size,
    progress=False,
  )


def _whole_calls(report: BenchReport) -> None:
  """Prints how long a second call takes, and how much memory a worker adds.
  Call it before the other measurements: the peak of memory never falls."""
  few_workers, title = (
    MODELS[0].workers[0],
    f"calls of asgd.simulate, {MODELS[0].name}",
  )
  columns = {"seconds": ".2f", "copies of the parameters": ".2f"}
  table = report.table(title, "", {}, columns, width=42)
  for messages in (few_workers, _MAX_WORKERS):
    call = functools.partial(_simulate_digits, few_workers, messages)
    # The call before the first round compiles; the others find the programs.
    (seconds,) = turns.take_turns({"": call}, _STARTUP_CALLS).values()
    name = f"second call, with {messages:,} messages"
    table.row(name, Measured(seconds, "<= 1"), None)
  # As many messages as below, so that only the workers differ.
  _simulate_digits(few_workers, 2 * _MAX_WORKERS)
  peak_before = peak_bytes()
  _simulate_digits(_MAX_WORKERS, 2 * _MAX_WORKERS)
  problem = MODELS[0].problem(asgd.asgd(_LEARNING_RATE, workers=1))
  nbytes = 4 * models.count(problem.init(jax.random.key(0)))
  copies = (peak_bytes() - peak_before) / (_MAX_WORKERS - few_workers) / nbytes
  table.row("memory of each further worker", None, Measured(copies))


@contextlib.contextmanager
def _torch(peer: str | None) -> Iterator[TorchProcess | None]:
  """Yields PyTorch's process; None without torch."""
  python = turns.python_with_torch(peer)
  if python is None:
    yield None
    return
  with contextlib.closing(TorchProcess(python)) as process:
    yield process


def run(
  report: BenchReport,
  rounds: int = 5,
  block: int | None = None,
  peer: str | None = None,
) -> None:
  """Measures calls, then all models, in `rounds` turns. A turn has about
  `block` updates; None: the model's number. `peer` is a Python that has torch;
  None: this Python."""
  _whole_calls(report)
  with _torch(peer) as torch:
    for model in MODELS:
      if block is not None:
        model = model._replace(messages=(rounds + 1) * block)
      _speed(report, model, rounds, torch)
  _receives(report, rounds)
