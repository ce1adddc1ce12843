"""The command that draws tables: what it says, writes and refuses."""

import json

import kit
import pytest

from asgd.pipeline import analyze, schedules, spans
from asgd.pipeline import table as table_lib
from launch import draw_schedule

pytestmark = pytest.mark.usefixtures("wide_terminal")
FILES = {
  *("grid.txt", "analysis.txt", "schedule.csv", "schedule.json"),
  *("trace.json", "gantt.png", "gantt.svg"),
}


def draw(capsys, name, out=None, **kwargs):
  """Draws a schedule of the options that are no arguments of main."""
  names = ("table", "cost_texts", "action_times", "weights", "measured")
  names += ("transfers",)
  given = {key: kwargs.pop(key) for key in names if key in kwargs}
  options = {key: str(value) for key, value in kwargs.items()}
  draw_schedule.main(schedule=name, options=options, out=out, **given)
  return capsys.readouterr().out


def row(said, name):
  """The cells of a line of a table."""
  (line,) = (x for x in said.splitlines() if x.startswith(name))
  return line.removeprefix(name).split()


def test_the_command_says_and_writes_everything(tmp_path):
  out = tmp_path / "a" / "b"
  done = kit.call(
    *("draw_schedule", "--schedule=one_f_one_b", "--stages=4"),
    *("--microbatches=8", "--forward=1", "--backward=2", f"--out={out}"),
    status=0,
  )
  assert done.stderr == ""
  said = done.stdout
  assert {path.name for path in out.iterdir()} == FILES
  assert all((out / name).stat().st_size for name in FILES)
  table = schedules.build("one_f_one_b", stages=4, microbatches=8)
  grid = (out / "grid.txt").read_text()
  assert grid == table_lib.to_text(table)
  for line in (
    "0 | F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--",
    "makespan  33",
    "bubble    27.3% of the total (idle / devices x makespan)",
    "          37.5% of the ideal (idle / busy)",
  ):
    assert line in said.splitlines()
  assert row(said, "device 0 ") == ["24", "9", "27.3%", "4", "8"]
  assert row(said, "device 1 ") == ["24", "9", "27.3%", "3", "16"]
  assert row(said, "stage 3 ") == ["3", "1", "0", "0"]
  for read, name in (
    (table_lib.from_text, "grid.txt"),
    (table_lib.from_csv, "schedule.csv"),
    (table_lib.from_json, "schedule.json"),
  ):
    assert read((out / name).read_text()).tasks == table.tasks
  trace = json.loads((out / "trace.json").read_text())
  assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 64
  for line in said.splitlines()[-3:]:
    assert str(out) in line


def test_staleness_and_versions_of_an_asynchronous_schedule(capsys):
  said = draw(capsys, "pipedream", stages=3, microbatches=8)
  assert "weights: stash" in said
  for stage in range(3):
    behind = 2 - stage
    assert row(said, f"stage {stage} ") == (
      [str(stage), str(behind + 1), str(behind), str(behind)]
    )
  said = draw(capsys, "pipedream", stages=3, microbatches=8, weights="latest")
  assert row(said, "stage 0 ") == ["0", "1", "2", "0"]
  said = draw(capsys, "pipedream_2bw", stages=3, microbatches=12)
  assert row(said, "stage 0 ") == ["0", "2", "1", "1"]
  assert "weights: 2bw" in said
  # Fewer microbatches than fill the pipeline: there is no one number yet.
  said = draw(capsys, "pipedream", stages=4, microbatches=4)
  assert row(said, "stage 0 ") == ["0", "2", "2-3", "2-3"]


def test_any_file_that_is_written_is_a_table_again(tmp_path, capsys):
  out = tmp_path / "first"
  first = draw(capsys, "chimera", str(out), stages=4, microbatches=4)
  facts = first[: first.index("picture")]
  for name in ("grid.txt", "schedule.csv", "schedule.json"):
    said = draw(capsys, None, table=str(out / name))
    assert said == facts
  # Drawing there again is allowed, and another experiment's folder is not.
  draw(capsys, None, str(out), table=str(out / "grid.txt"))
  (out / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="holds config.json, which is not part"):
    draw(capsys, None, str(out), table=str(out / "grid.txt"))


def test_what_editors_and_full_disks_leave_behind(tmp_path, capsys):
  table, out = schedules.gpipe(2, 2), tmp_path / "out"
  path = tmp_path / "A.CSV"
  path.write_text(table_lib.to_csv(table), encoding="utf-8-sig")
  out.mkdir()
  (out / "schedule.json.tmp").write_text("{")
  draw_schedule.main(table=str(path), out=str(out))
  made = table_lib.from_json((out / "schedule.json").read_text())
  assert made.name == "gpipe"
  capsys.readouterr()


def test_costs_are_for_all_stages_or_for_each(capsys):
  said = draw(
    capsys,
    "gpipe",
    stages=2,
    microbatches=2,
    cost_texts={"forward": "1,3", "backward": "2,4", "transfer": "0.5"},
  )
  assert "makespan  18\n" in said
  assert row(said, "device 1 ")[0] == "14"


def test_schedules_that_ask_for_costs_get_them(capsys):
  costs = {"forward": "1", "input": "1", "weight": "3"}
  said = draw(capsys, "zb_h1", stages=3, microbatches=6, cost_texts=costs)
  cost = analyze.costs(3, weight=3.0)
  table = schedules.build("zb_h1", stages=3, microbatches=6, costs=cost)
  assert f"makespan  {analyze.analyze(table, cost).makespan:g}\n" in said
  assert table_lib.to_text(table).splitlines()[1] in said


def test_own_actions_of_a_table(tmp_path, capsys):
  path = tmp_path / "mine.txt"
  path.write_text("# mine; every 1\n0 | F0 sync B0\n")
  said = draw(capsys, None, table=str(path), action_times={"sync": "2.5"})
  assert "makespan  5.5\n" in said


@pytest.mark.parametrize("name", sorted(draw_schedule._SCHEDULES))
def test_every_schedule_can_be_drawn(name, capsys):
  known = draw_schedule._SCHEDULES[name]
  options = {"microbatches": 12}
  lists = name in ("ftpipe", "zero_bubble")
  for option, value in (
    ("stages", 4),
    ("devices", "0,1,2,0" if lists else 2),
    *(("chunks", 2), ("max_activations", 4)),
  ):
    if option in known:
      options[option] = value
  said = draw(capsys, name, **options)
  assert f"{name}: 4 stages on " in said


def measure(path, table, begin=50.0, factor=0.01):
  timing = analyze.times(table, analyze.costs(table.stages, backward=2))
  rows = [
    spans.TaskSpan(*task[1:], begin + factor * start, begin + factor * end)
    for task, start, end in zip(table.tasks, *timing, strict=True)
  ]
  path.write_text(spans.to_json(rows))


def test_a_measured_run_is_held_against_its_plan(tmp_path, capsys):
  table = schedules.build("one_f_one_b", stages=2, microbatches=3)
  path = tmp_path / "run.json"
  measure(path, table)
  out = tmp_path / "out"
  options = {"stages": 2, "microbatches": 3}
  said = draw(capsys, "one_f_one_b", str(out), measured=str(path), **options)
  # The plan takes what was measured, and nothing was lost.
  assert "makespan  0.12 planned, 0.12 measured" in said
  assert "measured: the last batch only;" in said
  assert row(said, "of the total") == ["25.0%", "25.0%"]
  assert row(said, "of the ideal") == ["33.3%", "33.3%"]
  trace = json.loads((out / "trace.json").read_text())["traceEvents"]
  groups = [e["args"]["name"] for e in trace if e["name"] == "process_name"]
  assert groups == ["planned", "measured"]
  assert "measured 25.0%" in (out / "gantt.svg").read_text()
  said = draw(
    capsys,
    "one_f_one_b",
    measured=str(path),
    cost_texts={"backward": "1"},
    **options,
  )
  assert "makespan  8 planned, 0.12 measured" in said
  rows = json.loads(path.read_text())["spans"]
  path.write_text(json.dumps({"spans": rows[:-2]}))
  said = draw(capsys, "one_f_one_b", measured=str(path), **options)
  assert "2 tasks of the table were not measured" in said


def test_wide_tables_are_cut_on_the_terminal_only(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setenv("COLUMNS", "50")
  out = tmp_path / "out"
  said = draw(capsys, "gpipe", str(out), stages=4, microbatches=30)
  lines = said.splitlines()[:10]
  assert max(map(len, lines)) == 50 and lines[1].endswith(" ...")
  assert "F29" in (out / "grid.txt").read_text()


def test_without_matplotlib_the_rest_is_there(tmp_path, capsys, monkeypatch):
  def missing(*_, **__):
    raise ImportError("pictures need matplotlib: pip install 'asgd[viz]'")

  monkeypatch.setattr(draw_schedule.render, "gantt", missing)
  said = draw(capsys, "gpipe", str(tmp_path), stages=2, microbatches=2)
  assert "not drawn: pictures need matplotlib: pip install" in said
  names = {path.name for path in tmp_path.iterdir()}
  assert names == FILES - {"gantt.png", "gantt.svg"}


@pytest.mark.parametrize(
  "text, value",
  [
    *(("3", 3), ("-1", -1), ("0.5", 0.5), ("true", True), ("None", None)),
    *(("0,1,2,0", [0, 1, 2, 0]), ("4,", [4]), ("name", "name")),
  ],
)
def test_values_of_options(text, value):
  assert draw_schedule._parse_value(text) == value
  assert type(draw_schedule._parse_value(text)) is type(value)


def test_options_in_one_flag():
  texts = ["devices=0", "1", "2", "every=2"]
  found = draw_schedule._parse_pairs("options", texts)
  assert found == {"devices": "0,1,2", "every": "2"}


# Mistakes: (arguments of main, what the one line says).

GPIPE = {"schedule": "gpipe", "options": {"stages": "2", "microbatches": "2"}}
BROKEN = "# t; every 1\n0 | B0 F0\n"
MISTAKES = (
  ({}, "give a table: either --schedule=NAME, one of breadth_first, "),
  ({**GPIPE, "table": "x"}, "give a table: either"),
  ({"schedule": "one_f_two_b"},
   "unknown schedule 'one_f_two_b'; did you mean 'one_f_one_b'"),
  ({"schedule": "custom"}, "unknown schedule 'custom'"),
  ({"schedule": "gpipe", "options": {"stage": "2"}},
   "schedule 'gpipe' takes no argument 'stage'; did you mean 'stages'"),
  ({"schedule": "gpipe", "options": {"stages": "2"}},
   "schedule 'gpipe' needs the argument 'microbatches'"),
  ({"schedule": "gpipe", "options": {"stages": "x", "microbatches": "2"}},
   "stages must be a positive whole number, not 'x'"),
  ({"schedule": "zb_h1", "options": {"costs": "1"}},
   "costs are flags: --forward=1"),
  ({**GPIPE, "cost_texts": {"forward": "fast"}},
   "--forward must be a number, or one for each stage .1,2,1., not 'fast'"),
  ({**GPIPE, "cost_texts": {"weight": "-1"}}, "weight must be finite"),
  ({**GPIPE, "cost_texts": {"forward": "1,2,3"}},
   "forward must be a number or 2 of them"),
  ({**GPIPE, "cost_texts": {"overlap": "1,2"}},
   "overlap must be one number, not"),
  ({**GPIPE, "weights": "old"}, "latest, stash, 2bw, vertical, not"),
  ({**GPIPE, "transfers": "slow"}, "buffered, rendezvous, not"),
  ({**GPIPE, "max_in_flight": 1}, "makes 2 in flight"),
  ({"schedule": "pipedream",
    "options": {"stages": "2", "microbatches": "4", "replicas": "2"}},
   "replicas must be 2 numbers, one for each stage, not 2"),
  ({"schedule": "gpipe", "options": {"stages": "9999", "microbatches": "999"}},
   "gpipe of 9,989,001 forwards is too large to be drawn"),
  ({"schedule": "gpipe", "options": {"stages": "1000", "microbatches": "1000"}},
   "gpipe of 1,000,000 forwards is too large to be drawn"),
  ({**GPIPE, "action_times": {"F": "3"}}, "own='F' is no action of the user's"),
  ({**GPIPE, "cost_texts": {"input": "1e31"}}, "input must be at most"),
  ({"table": "nope.txt"}, "--table=nope.txt cannot be read .No such file"),
  ({**GPIPE, "measured": "nope.json"}, "--measured=nope.json cannot be"),
)


@pytest.mark.parametrize(("kwargs", "message"), MISTAKES)
def test_mistakes_are_one_line_and_nothing_is_written(
  kwargs, message, tmp_path, capsys
):
  out = tmp_path / "out"
  with pytest.raises((ValueError, OSError), match=message) as caught:
    draw_schedule.main(**kwargs, out=str(out))
  assert "\n" not in str(caught.value)
  assert not out.exists()
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("a.txt", "hello", "/a.txt: line 1: 'hello' must be '# NAME; every N'"),
    ("a.csv", "# t; every 1\n0,0\n", "line 2 must be time,device"),
    ("a.json", "{}", "/a.json: not a schedule in JSON"),
    ("a.txt", b"\xff\xfe", "a.txt is not UTF-8 text: save it as UTF-8"),
    ("a.csv",
     "# t; every 1\ntime,device,stage,microbatch,action\n2000000000,0,0,0,F\n",
     "t has 2000000001 slots on 1 devices, too many to be drawn"),
    ("a.txt", "# t; every 1\n0 | F2000000000\n",
     "F of stage 0, microbatch 0 is"),
    ("a.txt", BROKEN, "B of stage 0, microbatch 0 .* which is not done before"),
  ],
)
def test_files_that_are_no_table(name, content, message, tmp_path, capsys):
  path, out = tmp_path / name, tmp_path / "out"
  if isinstance(content, bytes):
    path.write_bytes(content)
  else:
    path.write_text(content)
  with pytest.raises(ValueError, match=message) as caught:
    draw_schedule.main(table=str(path), out=str(out))
  assert "\n" not in str(caught.value)
  assert not out.exists()
  if content == BROKEN:  # the table is shown, with the cells
    assert "0 | !B0! !F0!" in capsys.readouterr().err


def test_a_run_of_another_table_is_refused(tmp_path, capsys):
  path = tmp_path / "run.json"
  measure(path, schedules.build("gpipe", stages=2, microbatches=3))
  with pytest.raises(ValueError, match="is not in the table gpipe"):
    draw_schedule.main(**GPIPE, measured=str(path), out=str(tmp_path / "out"))
  assert not (tmp_path / "out").exists()
  path.write_text("[1]")
  with pytest.raises(ValueError, match="run.json: not spans in JSON .TypeErr"):
    draw_schedule.main(**GPIPE, measured=str(path))
  with pytest.raises(ValueError, match="run.json is a file; choose a folder"):
    draw_schedule.main(**GPIPE, out=str(path))
  with pytest.raises(ValueError, match="--table already contains --stages;"):
    draw_schedule.main(table="x", options={"stages": "2"})
  capsys.readouterr()


def test_the_exit_status_of_a_mistake_is_2(tmp_path):
  done = kit.call(
    *("draw_schedule", "--schedule=gpipe", "--stages=3"),
    *("--options=stages=2", f"--out={tmp_path / 'out'}"),
  )
  kit.assert_one_line(done, "stages is given twice, also in --options; drop")
  assert done.stdout == ""
  assert not (tmp_path / "out").exists()
