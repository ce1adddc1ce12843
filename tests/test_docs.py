"""What the pages of docs/ say can be run runs, and their tables are whole."""

import ast
import inspect
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import flax.serialization
import jax
import kit
import ml_collections
import numpy as np
import optax
import pytest

import asgd
from asgd import algorithms, experiment
from asgd.experiment import schema
from asgd.pipeline import schedules
from asgd.pipeline.engine import PIPELINE

DOCS = kit.ROOT / "docs"
PAGES = {str(p.relative_to(DOCS)): p.read_text() for p in DOCS.rglob("*.md")}
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}


def block(page, word):
  (code,) = (text for text in BLOCK.findall(PAGES[page]) if word in text)
  return code


def devices_made(text):
  """A block without the line that makes devices: tests have more already."""
  line = 'jax.config.update("jax_num_cpu_devices", 4)'
  assert line in text
  return text.replace(line, "")


@pytest.fixture(scope="module")
def tables():
  return kit.load_module(DOCS / "hooks" / "reference_tables.py")


def test_every_block_is_tested_here():
  blocks = {page: len(BLOCK.findall(text)) for page, text in PAGES.items()}
  assert {page: count for page, count in blocks.items() if count} == {
    "gossip.md": 3,
    "tables.md": 2,
    "start.md": 1,
    "coming_from.md": 6,
    "tutorial.md": 5,  # in test_tutorial.py
    "concepts.md": 1,
    "howto/own_model.md": 3,
    "howto/other_models.md": 2,
    "howto/own_data.md": 2,
    "howto/own_algorithm.md": 1,
    "howto/own_order.md": 1,
    "howto/optimizers.md": 2,
    "howto/experiments.md": 2,
    "howto/pipelines.md": 2,
    "howto/meshes.md": 2,
  }


def test_the_first_call(capsys):
  exec(block("start.md", "asgd.simulate"), {})
  assert capsys.readouterr().out == "[1. 1. 1.] 3.0\n"


def test_coming_from_another_library(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = {}
  for text in BLOCK.findall(PAGES["coming_from.md"]):
    exec(text, names)
    if "result" in names:
      # Each snippet trains: the loss at the start is 0.61.
      assert names["loss"](names["result"].params, names["data"]) < 0.55


def test_the_memory_of_recipes():
  """The table of howto/choosing.md, by the sizes of states."""
  table = PAGES["howto/choosing.md"].partition("## Memory of each worker")[2]
  rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
  rows = {row[0]: row[1:] for row in rows if row[0].startswith("`")}
  assert len(rows) == 9
  params = np.zeros(1000, np.float32)

  def copies(state):
    sizes = [np.size(leaf) for leaf in jax.tree.leaves(state)]
    return sum(size for size in sizes if size >= 1000) // 1000

  for names, counts in rows.items():
    for name in re.findall("`([a-z_]+)`", names):
      few, many = (asgd.build(name, 0.1, workers=n) for n in (2, 5))
      if "without momentum" in names:
        few, many = (
          asgd.build(name, 0.1, workers=n, momentum=0.0) for n in (2, 5)
        )
      small, large = (
        copies(recipe.server().init(params)) - 1 for recipe in (few, many)
      )
      each = (large - small) // 3
      own = copies(few.make_worker(lambda w, batch: w).init(params))
      assert [small - 2 * each, each, own] == [
        int(count.split(":")[0]) for count in counts[:3]
      ], name


def test_peers_without_a_server(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)

  def loss(w, batch):
    return ((batch[0] @ w - batch[1]) ** 2).mean()

  given = {"params": np.zeros(3, np.float32), "data": [(x, x.sum(1))] * 8}
  names = {"loss": loss, **given}
  exec(block("gossip.md", "asgd.simulate"), names)
  np.testing.assert_allclose(names["result"].params, 1, atol=1e-3)
  config = ml_collections.ConfigDict()
  exec(block("gossip.md", "config.runs"), {"config": config})
  plans = experiment.build(config, engines=ENGINES)
  assert {cell.label for cell in plans.cells} == {"ring", "pairs", "small"}
  names = {}
  exec(block("gossip.md", "second_eigenvalue"), names)
  found = names["topologies"].second_eigenvalue(names["topology"])
  assert found == pytest.approx(0.5)
  assert (tmp_path / "torus.svg").exists()


def test_tables_in_python(capsys):
  exec(block("tables.md", "Table.sparse"), {})
  assert capsys.readouterr().out == "[[2. 2.]\n [0. 0.]\n [1. 1.]]\n"
  exec(block("tables.md", "Tasks("), {})
  assert capsys.readouterr().out == "[[0. 0.]\n [1. 1.]]\n"


def test_a_model_of_your_own(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = {}
  exec(block("howto/own_model.md", "runs/own"), names)
  losses = ast.literal_eval(capsys.readouterr().out)
  assert len(losses) == 4
  assert losses[-1] < names["loss"](names["params"], names["data"]) / 2
  exec(block("howto/own_model.md", "nn.Dropout"), names)
  assert float(capsys.readouterr().out) < 0.4
  exec(block("howto/own_model.md", "asgd.TrainState"), names)
  assert names["state"].step == 1


def test_models_of_equinox_and_haiku():
  for word in ("equinox", "haiku"):
    names = {}
    exec(block("howto/other_models.md", f"import {word}"), names)
    losses = names["result"].records.loss
    assert losses[-40:].mean() < losses[:40].mean()


def test_iterators_and_columns():
  names = {}
  exec(block("howto/own_data.md", "grain"), names)
  np.testing.assert_allclose(names["result"].params, 1, atol=0.05)
  table = {"image": np.zeros((4, 8, 8)), "label": np.arange(4)}
  names = {"dataset": kit.Table(table)}
  exec(block("howto/own_data.md", "columns.arrays"), names)
  assert [x.shape for x in names["data"]] == [(4, 8, 8), (4,)]


def test_optimizers_and_schedules_of_recipes():
  for word in ("adamw", "cosine"):
    names = {"asgd": asgd, "optax": optax}
    exec(block("howto/optimizers.md", word), names)
    assert isinstance(names["recipe"], asgd.Recipe)


def test_an_order_of_your_own(capsys):
  names = {}
  exec(block("howto/own_order.md", "trace=slow.trace"), names)
  most, again = map(int, capsys.readouterr().out.split())
  assert most == again > 3
  turns = names["turns"].records.worker[:6].tolist()
  assert turns == [0, 1, 0, 2, 0, 3]
  np.testing.assert_allclose(names["peers"].params, 1, atol=0.5)


def test_a_mesh_in_one_call(capsys):
  exec(block("howto/meshes.md", "asgd.train_mesh"), {})
  assert capsys.readouterr().out == "[1. 1. 1.]\n"


@pytest.mark.slow
def test_the_parts_of_a_simulation(capsys):
  names = {}
  exec(block("concepts.md", "make_host"), names)
  staleness, gap = map(float, capsys.readouterr().out.split()[:2])
  assert 6.5 < staleness <= 7
  assert gap > 0
  assert (
    names["problem"].evaluate(names["simulation"].server.params).accuracy > 0.8
  )


def test_an_algorithm_of_your_own(capsys, monkeypatch):
  module = types.ModuleType("mymodule")
  exec(block("howto/own_algorithm.md", "halve_when_stale"), vars(module))
  assert capsys.readouterr().out == "asynchronous\n"
  monkeypatch.setitem(sys.modules, "mymodule", module)
  exp = experiment.build(
    {"runs": {"mine": {"recipe": "mymodule:careful", "limit": 2}}},
    engines=ENGINES,
  )
  (cell,) = exp.cells
  assert np.isfinite(exp.plan(cell).curvature_limit)


def test_a_config_of_your_own():
  names = {}
  exec(block("howto/experiments.md", "softsync"), names)
  config = names["get_config"]()
  assert isinstance(config, ml_collections.ConfigDict)
  exp = experiment.build(config, engines=ENGINES)
  assert {cell.label for cell in exp.cells} == {"softsync", "dana"}


def test_a_cell_is_read_as_the_page_says(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = Path("runs/digits-001/cells/asgd-n8-s0/cell.npz")
  path.parent.mkdir(parents=True)
  with zipfile.ZipFile(path, "w") as archive:  # as asgd.experiment.folder
    with archive.open("gap.npy", "w") as file:
      np.save(file, np.float32([0, 1]))
    params = flax.serialization.to_bytes({"w": np.float32([2])})
    archive.writestr("params.msgpack", params)
  names = {"np": np, "flax": flax}
  exec(block("howto/experiments.md", "cell.npz"), names)
  assert names["gap"].tolist() == [0, 1]
  assert names["params"]["w"].tolist() == [2]


def test_a_pipeline_in_one_call(capsys):
  exec(block("howto/pipelines.md", "pipeline.train"), {})
  assert float(capsys.readouterr().out.splitlines()[-1]) < 0.2


@pytest.mark.slow
def test_the_parts_of_a_pipeline(capsys):
  text = devices_made(block("howto/pipelines.md", "schedules.pipedream"))
  names = {}
  exec(text, names)
  assert capsys.readouterr().out.startswith("[3 2 1 0]")
  assert sorted(names["result"].losses) == list(range(16))


@pytest.mark.slow
def test_a_step_on_a_mesh():
  text = devices_made(block("howto/meshes.md", "hybrid.make_step"))
  names = {}
  exec(text, names)
  problem, params = names["problem"], names["program"].params(names["state"])
  assert problem.evaluate(problem.init(jax.random.key(0))).accuracy < 0.3
  assert problem.evaluate(params).accuracy > 0.8


def test_pages_ask_for_tables_that_there_are(tables):
  asked = re.findall(r"<!-- (table|api): (\w+) -->", "".join(PAGES.values()))
  known = {"table": tables.TABLES, "api": tables.NAMES}
  pairs = [(kind, name) for kind, names in known.items() for name in names]
  assert sorted(asked) == sorted(pairs)
  page = tables.page("a\n<!-- table: recipes -->\nb\n<!-- api: recipes -->\n")
  assert "| [`dana_zero`]" in page and tables.page(page) == page
  assert "\n::: asgd.algorithms.dana_zero\n" in tables.fill(page)


def test_committed_pages_have_their_tables_as_the_code_has_them(tables):
  assert len(tables.pages()) > 4
  for path in tables.pages():
    text = path.read_text()
    assert text == tables.page(text), f"run {tables.__file__}"


def test_the_table_of_recipes_has_every_option_and_its_default(tables):
  rows = dict(zip(asgd.RECIPES, tables.recipes().splitlines()[2:], strict=True))
  for name, maker in asgd.RECIPES.items():
    assert rows[name].startswith(f"| [`{name}`]")
    options = dict(re.findall(r"`(\w+)=([^`]+)`", rows[name]))
    parameters = inspect.signature(maker).parameters.values()
    expected = {
      p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY
    }
    assert {k: ast.literal_eval(v) for k, v in options.items()} == expected
    text = f"{maker.__doc__}\n{algorithms.__doc__}"  # the latter: of most
    for option in set(expected) - {"outer_optimizer"}:
      named = rf"^ +{option}(:|  )|`{option}`"
      assert re.search(named, text, re.MULTILINE), (name, option)


def test_sources_are_those_of_the_docstrings(tables):
  def maker():
    """Does it.

    Source:
      Doe, "A paper",
      2020.

    Example:
      >>> 1
      1
    """

  assert tables.sources({"a": maker, "b": len}).splitlines()[2:] == [
    '| `a` | Doe, "A paper", 2020. |'
  ]


def test_the_table_of_schedules_has_every_one(tables):
  text = tables.schedule_table()
  for name in schedules.SCHEDULES:
    assert f"[`{name}`]" in text
  assert re.search(r"gpipe.*after each batch.*`latest`.*`reverse=False`", text)
  assert re.search(r"\[`pipemare`\].*never", text)


def test_the_table_of_engines_has_every_setting(tables):
  text = tables.engine_table()
  for name, kind in ENGINES.items():
    for section, node in kind.sections.items():
      row = re.search(rf"^\| `{section}` \| .*`{name}`.* \|.*$", text, re.M)[0]
      for key in schema.keys_of(node):
        assert f"`{key}=" in row


def test_the_table_of_refusals_has_every_one_with_its_reason(tables):
  page = tables.refusal_table()
  for protocol in experiment.PROTOCOLS.values():
    for refusal in protocol.refusals:
      key = f"`{refusal.key.removeprefix('recipe.')}"
      rows = [row for row in page.splitlines() if key in row]
      assert any(f"| {protocol.participants} " in row for row in rows), key
      assert any(refusal.why.rstrip("=") in row for row in rows), key


def test_the_table_of_protocols_says_which_engines_run_them(tables):
  rows = tables.protocol_table().splitlines()[2:]
  served = {row.split("|")[1].strip(): row.split("|")[3:-1] for row in rows}
  assert [x.strip() for x in served["tables"]] == ["yes"] * 3 + ["no"] * 2
  of_servers = [x.strip() for x in served["a server"]]
  assert of_servers[:3] == ["yes"] * 3
  # Recipes with local steps of workers that are not in rounds.
  assert of_servers[3].startswith("yes, except `downpour`, `easgd`")
  on_mesh, in_pipeline = (
    set(cell.removeprefix("yes, except ").split(", "))
    for cell in of_servers[3:5]
  )
  # A pipeline also refuses all other local steps, and recipes that drop late
  # gradients.
  assert in_pipeline - on_mesh == {
    *("`model_averaging`", "`slowmo`", "`diloco`"),
    *("`ringmaster_asgd`", "`rennala_sgd`", "`mindflayer_sgd`"),
  }
  assert on_mesh < in_pipeline and "`ssgd`" not in in_pipeline
  assert served["peers"][3].strip() == (
    "yes, except `ad_psgd`, `async_threshold_sharing`"
  )


def test_the_page_of_configs_names_every_one():
  for path in (kit.ROOT / "configs").glob("*.py"):
    assert f"`configs/{path.name}`" in PAGES["reference/commands.md"]


@pytest.mark.parametrize("page", [*sorted(PAGES), "../README.md"])
def test_configs_that_a_page_names_exist(page):
  for path in re.findall(r"configs/\w+\.py", (DOCS / page).read_text()):
    assert (kit.ROOT / path).exists(), path


def test_the_files_that_the_architecture_names_exist():
  paths = re.findall(r"`(\w+/[\w/.]*)`", PAGES["architecture.md"])
  assert len(set(paths)) > 80
  assert [path for path in paths if not (kit.ROOT / path).exists()] == []


def test_the_functions_that_the_architecture_names_exist():
  text = PAGES["architecture.md"]
  methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
  code = [path.read_text() for path in kit.ROOT.glob("asgd/**/*.py")]
  assert len(methods) > 8
  for owner, name in methods:
    (module,) = (x for x in code if re.search(rf"^class {owner}\b", x, re.M))
    assert re.search(rf"^  def {name}\(", module, re.M), (owner, name)


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.sh")))
def test_a_script_is_one_of_bash(path):
  subprocess.run(["bash", "-n", str(path)], check=True)
