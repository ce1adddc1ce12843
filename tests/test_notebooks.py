"""The notebooks run at a small size, cell after cell, without Jupyter."""

import json

import kit
import pytest

FOLDER = kit.ROOT / "examples" / "notebooks"
NOTEBOOKS = {path.stem: path for path in FOLDER.glob("*.ipynb")}
SMALL = {"MESSAGES": 64, "WORKERS": (2, 4)}


def code(path):
  cells = json.loads(path.read_text())["cells"]
  return [
    "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"
  ]


@pytest.fixture
def run(monkeypatch):
  """Runs a notebook at the small size, and returns its names."""
  pyplot = pytest.importorskip("matplotlib.pyplot")
  monkeypatch.setattr(pyplot, "show", lambda: None)

  def run(name):
    sizes, *others = code(NOTEBOOKS[name])
    names = {"__name__": name}
    exec(sizes, names)
    assert set(SMALL) < set(names)
    names.update(SMALL)
    for text in others:
      exec(text, names)
    pyplot.close("all")
    return names

  return run


def test_every_notebook_is_tested_and_documented():
  page = (kit.ROOT / "docs" / "examples.md").read_text()
  assert {f"test_{name}" for name in NOTEBOOKS} < set(globals())
  for path in NOTEBOOKS.values():
    assert f"examples/notebooks/{path.name}" in page
    assert path.stat().st_size < 100_000


def test_staleness(run):
  records = run("staleness")["records"]
  assert set(records) == {
    (name, workers)
    for name in ("asgd", "dana_zero", "ssgd")
    for workers in SMALL["WORKERS"]
  }
  for (name, workers), run_records in records.items():
    mean = run_records.staleness.mean()
    if name == "ssgd":
      assert mean == 0
    else:
      assert workers - 1.5 < mean <= workers - 1


def test_own_algorithm(run):
  names = run("own_algorithm")
  assert list(names["losses"]) == ["asgd", "dc_asgd_a", "braked_asgd"]
  assert all(len(losses) == 2 for losses in names["losses"].values())
  # A gap of four times the mean makes a gradient a quarter.
  jnp, tx = names["jnp"], names["brake"]()
  state = names["BrakeState"](jnp.float32(0.5))
  params = jnp.float32([2.0, 0.0])
  sent, _ = tx.update(
    jnp.float32([8.0, 4.0]), state, params, sent_params=jnp.zeros(2)
  )
  assert sent.tolist() == [2.0, 1.0]
