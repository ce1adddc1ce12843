"""A figure from its file to verdicts, and the page of all that are kept."""

import json
import os
import re
import runpy
import shutil

import kit
import pytest
from pipeline_experiments import ENGINES

from asgd.experiment import folder, schema
from asgd.experiment.cells import Cell
from asgd.experiment.progress import Silent
from asgd.figures import (
  columns,
  figure_file,
  gallery,
  reproduce,
  statistics,
  verdicts,
)

FIGURES = kit.ROOT / "configs" / "figures"
DOCS = kit.ROOT / "docs"
NAMES = sorted(reproduce.files(FIGURES))
KEPT = gallery.read(DOCS)


def reproduced(task, workdir):
  return reproduce.reproduce(
    *(task, ENGINES),
    workdir=str(workdir),
    bar=lambda messages: Silent(),
    count=1,
  )


def test_the_quick_edge_passes_and_goes_on(tmp_path, capsys, monkeypatch):
  path = FIGURES / "delayed_edge.py"
  task = reproduce.load(path, ENGINES, quick=True)
  place = reproduced(task, tmp_path / "out")
  said = capsys.readouterr().out
  data = json.loads((place / "delayed_edge.json").read_text())
  assert data["size"] == "quick"
  assert data["cells"] == data["of_cells"] == 20
  assert data["messages"] == 20 * 400
  by_name = {claim["name"]: claim["verdict"] for claim in data["claims"]}
  assert by_name["edge at delay 1"] == by_name["edge at delay 4"] == "PASS"
  assert by_name["edge at delay 32"] == "UNDECIDED"  # it was not run
  assert "FAIL" not in by_name.values()
  assert "PASS       edge at delay 1" in said
  for suffix in (".csv", ".png", ".svg", ".pdf"):
    assert (place / "delayed_edge").with_suffix(suffix).stat().st_size
  # A cell that is lost is trained again, the others are not.
  results = sorted(place.glob("cells/*/cell.npz"))
  boards = {path.parent.name for path in place.rglob("events.out*")}
  assert len(boards) == len(results) / 5  # of seeds
  written = [path.stat().st_mtime_ns for path in results[1:]]
  shutil.rmtree(results[0].parent)
  monkeypatch.setattr(reproduce.drawing, "draw", lambda *_: None)
  assert reproduced(task, place) == place
  assert [path.stat().st_mtime_ns for path in results[1:]] == written
  again = json.loads((place / "delayed_edge.json").read_text())
  assert again["claims"] == data["claims"]
  known = folder.finished_result(results[0].parent)
  others = {"seconds", *columns.OF_PEERS, *columns.OF_TABLES}
  others |= {*columns.OF_NETWORKS, *columns.OF_PIPELINES}
  assert set(columns.RESULTS) - others <= set(known)
  # The whole figure is another experiment.
  whole = reproduce.load(path, ENGINES)
  with pytest.raises(ValueError, match="holds another experiment"):
    reproduced(whole, place)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quick", [False, True])
def test_a_figure_is_judged_on_five_seeds_or_more(name, quick):
  task = reproduce.load(FIGURES / f"{name}.py", ENGINES, quick=quick)
  seeds = task.resolved.config["seeds"]
  assert seeds == list(range(len(seeds))) and len(seeds) >= 5
  assert task.figure.tuned
  assert task.figure.panels
  for panel in task.figure.panels:
    assert all(known["source"] for known in panel.published)


def test_the_second_problem_of_dana_changes_the_problem_alone():
  """So that its gaps compare with those of the figure."""
  get_config = runpy.run_path(str(FIGURES / "dana.py"))["get_config"]
  full, second = (
    schema.resolve(get_config(arg), ENGINES) for arg in (None, "fashion")
  )
  assert second.config["data"]["name"] == "fashion"
  labels = "asgd", "nag", "dc", "dana"
  labels += tuple(f"{label}-het" for label in labels)
  assert sorted(second.runs) == sorted(labels)
  for label in labels:
    assert second.config["runs"][label] == full.config["runs"][label]
  for key in ("batch_size", "learning_rate"):
    assert second.config[key] == full.config[key]


def test_seeds_take_turns():
  cells = [Cell(x, x, 4, seed) for x in "ab" for seed in (0, 1, 2)]
  order = [(c.seed, c.label) for c in reproduce.in_turns(cells)]
  assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_the_page_is_that_of_the_verdicts():
  assert (DOCS / "figures.md").read_text() == gallery.page(DOCS), (
    "write it anew with asgd reproduce --docs"
  )


def test_each_kept_figure_has_a_picture_and_a_file():
  assert set(KEPT) <= set(NAMES)
  for name in KEPT:
    assert (DOCS / "figures" / f"{name}.svg").stat().st_size


@pytest.mark.parametrize("name", sorted(KEPT))
def test_kept_verdicts_follow_from_their_numbers(name):
  """And are of the claims that the figure's file makes."""
  task = reproduce.load(FIGURES / f"{name}.py", ENGINES)
  assert KEPT[name].get("finding", "") == task.figure.finding
  own = {claim.name: claim for claim in task.figure.claims}
  assert [claim["name"] for claim in KEPT[name]["claims"]] == list(own)
  for claim in KEPT[name]["claims"]:
    said, bounds = [], own[claim["name"]].bounds
    for part in claim["parts"]:
      if claim["kind"] not in ("ordering", "monotone"):
        assert (float(part["above"]), float(part["below"])) == bounds
      again = verdicts.decide(verdicts.part_of(part), claim["statistic"])
      assert (again.verdict, again.why) == (part["verdict"], part["why"])
      said.append(again.verdict)
    assert claim["verdict"] == statistics.conclude(said)
    for key in ("says", "kind", "column", "statistic", "note"):
      assert claim[key] == getattr(own[claim["name"]], key)


def test_a_file_that_is_no_figure_is_named(tmp_path):
  for text, message in (
    ("x =", "SyntaxError"),
    ("get_config = dict", "has no get_figure"),
    ("get_config = get_figure = dict", "names no run"),
    ("def get_config(): return {'runs': {'a': {'recipe': 'asgd'}}}\n"
     "def get_figure():\n"
     "  bound = dict(name='c', says='s', kind='bound', column='gap_mean')\n"
     "  claims = [dict(bound, of='a', above='x')]\n"
     "  return dict(title='t', paper='p', about='a', claims=claims)",
     "claim 'c' of kind 'bound': above must be a number"),
    ("import sys; sys.exit('bye')",
     r"the file called sys.exit \(status 'bye'\)"),
    ("def get_config(): 1 / 0\nget_figure = dict", "ZeroDivisionError"),
  ):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
      reproduce.load(path, ENGINES)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("config", "would overwrite a file of its experiment"),
    ("Figure", "would overwrite a file"),
    ("results", "would overwrite a file"),
    ("dots.v2", "rename it to letters, digits, _ and -"),
    ("a b", "rename it"),
  ],
)
def test_a_name_whose_files_collide_is_refused(tmp_path, name, message):
  path = tmp_path / f"{name}.py"
  path.write_text("raise RuntimeError")  # it is not run
  with pytest.raises(ValueError, match=message):
    reproduce.load(path, ENGINES)


def test_a_verdict_that_is_none_is_named(tmp_path):
  (tmp_path / "figures").mkdir()
  (tmp_path / "figures" / "mine.json").write_text("{}")
  with pytest.raises(ValueError, match="holds no verdicts of that figure"):
    gallery.page(tmp_path)


@pytest.fixture
def docs(tmp_path):
  """Docs with the verdicts of one figure; saves what is changed in them."""
  (tmp_path / "figures").mkdir()
  path = tmp_path / "figures" / "stragglers.json"
  data = json.loads((DOCS / "figures" / "stragglers.json").read_text())

  def changed(change):
    change(data, data["claims"][0], data["claims"][0]["parts"][0])
    path.write_text(json.dumps(data))
    return tmp_path

  return changed


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda d, c, p: c.pop("verdict"), "claim 0 needs 'verdict'"),
    (lambda d, c, p: c.update(verdict="NO"), "claim 0: unknown verdict: 'NO'"),
    (lambda d, c, p: c.update(verdict="FAIL"), "contradicts its parts"),
    (lambda d, c, p: c.update(parts=[]), "contradicts its parts"),
    (lambda d, c, p: d.update(seconds=None), "seconds must be a number"),
    (lambda d, c, p: d.update(claims=5), "claims must be a list, not 5"),
    (lambda d, c, p: d.update(claims=[5]), "claim 0 must be a dict, not 5"),
    (lambda d, c, p: d["versions"].pop("jax"), "versions needs 'jax'"),
    (lambda d, c, p: p.update(low="abc"), "low must be a number, not 'abc'"),
    (lambda d, c, p: p.update(above=None), "above must be a number, not None"),
    (lambda d, c, p: p.update(values={"x": 1}),
     "value under a key that is not a seed number"),
    (lambda d, c, p: p.update(values={"0": "x"}), "0 must be a number"),
  ],
)
def test_damaged_verdicts_are_named(docs, change, message):
  place = docs(change)
  with pytest.raises(ValueError, match=message) as error:
    gallery.write(place)
  said = str(error.value)
  assert said.startswith(f"{place}/figures/stragglers.json is damaged: ")
  assert said.endswith("asgd reproduce stragglers --docs")
  assert not (place / "figures.md").exists()


def test_the_front_counts_every_verdict_and_says_why_a_claim_fails():
  front, _, _ = gallery.page(DOCS).partition("## How claims are judged")
  claims = [claim for data in KEPT.values() for claim in data["claims"]]
  counts = {
    verdict: sum(claim["verdict"] == verdict for claim in claims)
    for verdict in statistics.VERDICTS
  }
  said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
  assert f"{len(claims)} claims" in front and f"**{said}**" in front
  rows = re.findall(r"\n\[!\[.*\]\(figures/(\w+)\.svg\)\]\(#", front)
  assert rows == sorted(KEPT)
  failed = [claim for claim in claims if claim["verdict"] == "FAIL"]
  assert failed and all(claim["note"] for claim in failed)
  assert len(re.findall(r"^- \*\*FAIL\*\* .*\. \*.+\*$", front, re.M)) == len(
    failed
  )


def test_the_front_begins_with_what_each_figure_found():
  rows = gallery.page(DOCS).partition("\n<div")[0].splitlines()
  rows = [row for row in rows if row.startswith("| [")]
  failures = [int(row.split("|")[-3]) for row in rows]
  assert failures == sorted(failures, reverse=True)
  assert len(rows) == len(KEPT)
  for data in KEPT.values():
    (row,) = [row for row in rows if f"[{data['title']}](#" in row]
    assert (data.get("finding") or "see its row") in row


def test_a_row_of_the_front_has_two_examples_and_every_failure(docs):
  def change(data, first, part):
    del part
    data["claims"] = [dict(first, says=says) for says in "aabc"]
    note = "By 2.5 times. And more."
    failed = {"verdict": "FAIL", "note": note, "name": "f", "says": "it is"}
    parts = [dict(first["parts"][0], verdict="FAIL")]
    data["claims"].append(dict(first, **failed, parts=parts))

  front = gallery.page(docs(change)).partition("## How")[0]
  name = "waiting, simulated"
  bullets = [line for line in front.splitlines() if line.startswith("- ")]
  assert bullets == [
    f"- **PASS** {name}: a.",
    f"- **PASS** {name}: b.",
    "- **FAIL** f: it is. *By 2.5 times.*",
  ]
  assert "4 PASS, 1 FAIL, 0 UNDECIDED; `asgd reproduce stragglers`" in front


def test_both_commands_of_a_quick_figure_are_quick(docs):
  text = gallery.page(docs(lambda data, claim, part: data.update(size="quick")))
  assert text.count("`asgd reproduce stragglers --quick`") == 2


def test_a_row_of_the_page_is_one_line_without_tags(docs):
  said = {"says": "a\n<script>x</script> | b < c", "note": "x\n\n</td>"}
  text = gallery.page(docs(lambda data, claim, part: claim.update(said)))
  lines = [line for line in text.splitlines() if "script" in line]
  (row,) = [line for line in lines if line.startswith("|")]
  assert "a &lt;script>x&lt;/script> \\| b < c | " in row
  assert row.endswith("| x &lt;/td> |")


def test_a_page_without_verdicts_is_left(tmp_path):
  (tmp_path / "figures.md").write_text("as it was")
  with pytest.raises(ValueError, match="holds no verdicts"):
    gallery.write(tmp_path)
  assert (tmp_path / "figures.md").read_text() == "as it was"


def test_where_verdicts_cannot_be_kept_is_said_before_training(tmp_path):
  task = reproduce.load(FIGURES / "dana.py", ENGINES)

  def kept(docs):
    place = tmp_path / "out"
    reproduce.reproduce(
      task, ENGINES, docs=docs, workdir=str(place), bar=None
    )

  with pytest.raises(ValueError, match="docs does not exist"):
    kept(tmp_path / "docs")
  (tmp_path / "figures").write_text("a file")
  with pytest.raises(ValueError, match="figures cannot be written"):
    kept(tmp_path)
  assert not (tmp_path / "out").exists()


def test_a_picture_of_no_figure_is_not_overwritten():
  with pytest.raises(ValueError, match=r"main_job\.svg belongs to no figure"):
    gallery.check_destination(DOCS, "main_job")


def test_quick_verdicts_are_not_kept_instead_of_full_ones(docs, tmp_path):
  docs(lambda data, claim, part: data.update(size="full"))
  place, message = tmp_path / "run", r"verdicts of the full size.*--quick"
  with pytest.raises(ValueError, match=message):
    gallery.check_destination(tmp_path, "stragglers", size="quick")
  place.mkdir()
  (place / "stragglers.json").write_text('{"size": "quick"}')
  with pytest.raises(ValueError, match=message):
    gallery.copy_to_docs(place, "stragglers", tmp_path)
  gallery.check_destination(tmp_path, "stragglers")
  docs(lambda data, claim, part: data.update(size="quick"))
  gallery.check_destination(tmp_path, "stragglers", size="quick")


def test_an_old_picture_is_not_kept_beside_new_verdicts(docs, tmp_path):
  """As without Matplotlib."""
  docs(lambda data, claim, part: None)
  verdicts_file = tmp_path / "figures" / "stragglers.json"
  place = tmp_path / "run"
  place.mkdir()
  for name in ("stragglers.json", "stragglers.svg"):
    (place / name).write_bytes(verdicts_file.read_bytes())
  os.utime(place / "stragglers.svg", (1, 1))
  with pytest.raises(ValueError, match=r"svg is older than the verdicts.*viz"):
    gallery.copy_to_docs(place, "stragglers", tmp_path)
  os.utime(place / "stragglers.svg")
  gallery.copy_to_docs(place, "stragglers", tmp_path)
  assert (tmp_path / "figures" / "stragglers.svg").exists()


@pytest.mark.parametrize("quick", [False, True])
def test_the_other_size_is_not_written_over(tmp_path, quick):
  path = FIGURES / "delayed_edge.py"
  task = reproduce.load(path, ENGINES, quick=quick)
  before = '{"size": "%s"}' % ("full" if quick else "quick")
  (tmp_path / "delayed_edge.json").write_text(before)
  with pytest.raises(ValueError, match="choose another folder with --workdir"):
    reproduced(task, tmp_path)
  assert (tmp_path / "delayed_edge.json").read_text() == before


def test_a_figure_without_panels_is_judged(tmp_path):
  task = reproduce.load(FIGURES / "delayed_edge.py", ENGINES)
  figure = task.figure._replace(panels=[])
  data = {"seeds": [0], "size": "full", "claims": []}
  said = reproduce.write(figure, [], data, tmp_path)
  assert said == "not drawn: get_figure() has no panels"
  assert json.loads((tmp_path / "delayed_edge.json").read_text()) == data


def test_the_newest_of_a_cell():
  counts = {"a": (16, 4)}
  assert figure_file.find_cell("a@least", counts) == ("a", 4)
  assert figure_file.cell_of("a@8", counts) is None
