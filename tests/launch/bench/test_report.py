"""What benchmarks print, their JSON, and the table of several runs."""

import json
import sys

import kit
import numpy as np
import pytest

from launch.bench import report, summary
from launch.bench.report import Measured

RATIOS = np.array([0.5, 1.0, 0.75])


def rows(ratio, target=""):
  made = report.BenchReport()
  table = made.table("MLP", "who", {"ms": ".1f"}, {"of it": ".2f"}, width=8)
  table.row("a", 12.04, None)
  table.row("b", None, Measured(ratio, target))
  return made.rows


def run(ratio, **more):
  result = {"name": "simulator", "command": "asgd bench simulator"}
  result |= {"device": "cpu", "cores": 2, "busy": [0.0, 0.04], "seconds": 90.0}
  return [{**result, "rows": rows(ratio, ">= 1"), **more}]


def test_a_table_is_aligned_and_kept(capsys):
  made = rows(RATIOS, ">= 1")
  assert capsys.readouterr().out.splitlines() == [
    "",
    "MLP",
    "",
    "who              ms                     of it",
    "-" * 45,
    "a              12.0",
    f"b{' ' * 23}0.75 (0.50-1.00) >= 1",
  ]
  ratio = {"median": 0.75, "range": [0.5, 1.0], "target": ">= 1"}
  assert made == [
    {"table": "MLP", "name": "a", "values": {"ms": 12.04}, "measured": {}},
    {"table": "MLP", "name": "b", "values": {}, "measured": {"of it": ratio}},
  ]


def test_a_file_of_json_is_read_again(tmp_path):
  results = run(RATIOS) + [{"name": "tables", "failed": 1, "rows": []}]
  path = tmp_path / "runs.json"
  path.write_text(report.to_json(results))
  assert report.read(path) == results
  assert len(path.read_text().splitlines()) == 5  # a row on each
  # What is not finite is null.
  (_, row) = rows(np.array([np.nan, 1.0]))
  text = json.dumps(row, allow_nan=False)
  assert '"median": null' in text


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"name": "a"}]'])
def test_another_file_is_refused(text, tmp_path):
  path = tmp_path / "runs.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=r"runs\.json (is no file|has no b)"):
    report.read(path)


def test_rows_of_another_process_are_added():
  code = (
    "import sys; from launch.bench import report; r = report.BenchReport();"
    " r.table('MLP', 'who', {}, {'s': '.0f'}).row('a', report.Measured(2.0));"
    " r.save(sys.argv[1])"
  )
  made = report.BenchReport()
  made.add_from([sys.executable, "-c", code], None)
  (row,) = made.rows
  assert row["measured"] == {"s": {"median": 2.0, "range": [2.0, 2.0]}}


def test_the_share_of_others_is_that_of_ticks_while_asleep():
  ticks = iter([(100.0, 1000.0), (130.0, 1200.0)])
  slept = []
  assert report.busy_share(7, lambda: next(ticks), slept.append) == 0.15
  assert slept == [7]
  assert 0 <= report.busy_share(0, lambda: None) <= 1  # no /proc/stat


def test_runs_are_joined_by_the_median_of_their_medians():
  made = summary.table([run(x) for x in (RATIOS, 4 * RATIOS, 2 * RATIOS)])
  assert made == (
    "On 2 cores, cpu, while other programs used at most 4% of the cores;"
    " minutes of each run: 1.5, 1.5, 1.5. Commands: `asgd bench simulator`.\n\n"
    "| what is measured | median (its range over several runs; the target) |\n"
    "| --- | --- |\n"
    "| **simulator**: MLP |  |\n"
    "| b | of it: **1.5** (0.75 to 3; target >= 1) |\n"
  )


def test_runs_that_cannot_be_joined():
  other = run(RATIOS)
  other[0]["rows"][1]["name"] = "c"
  with pytest.raises(ValueError, match="simulator / MLP / b / of it is in s"):
    summary.table([run(RATIOS), other])
  with pytest.raises(ValueError, match="simulator has failed: run it again"):
    summary.table([run(RATIOS), run(RATIOS, failed=1)])
  other = run(RATIOS, command="asgd bench simulator --rounds=1")
  with pytest.raises(ValueError, match="another by `asgd .* --rounds=1`: make"):
    summary.table([run(RATIOS), other])
  with pytest.raises(ValueError, match="is not finite"):
    summary.table([run(np.nan * RATIOS)])


def test_a_page_has_the_table_between_its_marks(tmp_path):
  page, file = tmp_path / "page.md", tmp_path / "run.json"
  file.write_text(report.to_json(run(RATIOS)))
  page.write_text("# A\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nB\n")
  for _ in "12":
    summary.show([file], str(page))
    assert page.read_text() == (
      "# A\n<!-- bench: begin -->\n\n"
      f"{summary.table([run(RATIOS)])}\n<!-- bench: end -->\nB\n"
    )
  page.write_text("# A\n")
  with pytest.raises(ValueError, match=r"page\.md has no lines <!-- bench"):
    summary.show([file], str(page))


def test_the_page_has_the_table_of_its_files(tmp_path):
  files = sorted((kit.ROOT / "docs" / "benchmarks").glob("*.json"))
  page, copy = kit.ROOT / "docs" / "benchmarks.md", tmp_path / "page.md"
  copy.write_text(page.read_text())
  summary.show(files, str(copy))
  assert copy.read_text() == page.read_text()
