"""What takes turns in the simulator's benchmark computes the same."""

import contextlib

import chex
import jax
import numpy as np
import pytest

import asgd
from launch.bench import simulator
from launch.bench.report import BenchReport

SMALL = simulator.MODELS[0]._replace(
  widths=(8,),
  shape=(4,),
  batch=4,
  messages=3,
  workers=(2,),
  targets={"asgd": ">= 2.5"},
)


def test_a_turn_is_a_whole_number_of_rounds_at_the_end():
  for model in simulator.MODELS:
    for workers in model.workers:
      for rounds in (1, 2, 5, 9):
        messages = (rounds + 1) * model.updates_of(workers, rounds + 1)
        assert messages >= model.messages
        assert messages % workers == 0


def test_the_engine_and_simulate_train_the_same():
  recipe = asgd.dana_zero(0.01, workers=2)
  loss, init, data = SMALL.parts()
  params = init(jax.random.key(0))
  result = asgd.simulate(
    *(loss, params, data, recipe), messages=8, batch_size=4, progress=False
  )
  problem = SMALL.problem(recipe)
  choice = simulator._choice(recipe, problem, result.trace, 8)
  once = simulator._engine(choice, problem, result.trace, 2, 4)
  losses = np.concatenate([once().loss for _ in "12"])
  np.testing.assert_allclose(losses, result.records.loss, rtol=1e-5)


def test_others_have_their_turns_while_simulate_evaluates():
  order = []

  def call(messages, every, evaluate):
    assert (messages, every) == (6, 2)
    for _ in range(messages // every):
      order.append("simulate")
      evaluate(())

  others = {name: lambda name=name: order.append(name) for name in "ab"}
  seconds = simulator._with_simulate(call, 2, 6, others)
  assert order == ["simulate", "a", "b"] * 3
  # The first ones are not counted.
  assert {k: x.shape for k, x in seconds.items()} == dict.fromkeys(
    ("simulate", "a", "b"), (2,)
  )


def test_a_row_has_all_ratios(monkeypatch):
  monkeypatch.setattr(simulator.turns, "python_with_torch", lambda peer: None)
  report = BenchReport()
  simulator._speed(report, SMALL, 1, None)
  (row,) = report.rows
  assert row["table"] == "digits MLP of 130 parameters, batch 4"
  values, measured = row["values"], row["measured"]
  assert list(values) == ["plain/s", "engine/s", "simulate/s"]
  assert list(measured) == ["engine / plain loop", "simulate / plain loop"]
  ratio = values["simulate/s"] / values["plain/s"]
  whole_call = measured["simulate / plain loop"]
  assert whole_call["median"] == pytest.approx(ratio, 0.01)
  assert whole_call["target"] == ">= 2.5"


def test_a_receive_and_an_update_alone_end_at_the_same_parameters(monkeypatch):
  monkeypatch.setattr(simulator, "MODELS", (SMALL,))
  ends = {}

  def repeated(step, state):
    def call():
      ends[step.__name__] = step(ends.get(step.__name__, state))

    return call

  monkeypatch.setattr(simulator.turns, "repeated", repeated)
  report = BenchReport()
  simulator._receives(report, 1)
  (row,) = report.rows
  assert row["name"] == "130"
  assert set(row["values"]) == {"receive us", "update alone us"}
  chex.assert_trees_all_equal(ends["receive"].params, ends["update"])


def test_a_python_without_torch_is_named():
  torch = simulator.TorchProcess("false")
  with pytest.raises(ValueError, match=r"^false .* has this Python torch\?$"):
    torch.loop(SMALL, simulator._trace(2, 2), 2, 1)()
  torch.close()


def test_torch_chooses_its_threads_before_the_turns(tmp_path):
  """Otherwise it would choose while this process compiles."""
  chosen, python = tmp_path / "chosen", tmp_path / "python"
  python.write_text(
    f"#!/bin/sh\nread line\nsleep 0.2\ntouch {chosen}\necho\nread line\n"
  )
  python.chmod(0o755)
  with contextlib.closing(simulator.TorchProcess(str(python))) as torch:
    torch.loop(SMALL, simulator._trace(2, 2), 2, 1)
    assert chosen.exists()
