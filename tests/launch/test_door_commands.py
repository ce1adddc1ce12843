"""Command lines of a demanding new user, right and wrong: what each gives."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kit
import numpy as np
import pytest

from asgd import algorithms, experiment
from asgd.experiment import dry_run, folder, storage
from asgd.pipeline.engine import PIPELINE
from asgd.problems import own
from launch import command_line, new, show

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]

TINY = "digits:tiny", "--config.only=asgd,dana_zero", "--jobs=1"
LIVE = "digits:tiny", "--config.only=asgd", "--engine=threads"
# (command line, exit status, a part of what it prints). {run} and {live} are
# folders of trained cells, {new} does not exist.
COMMANDS = (
  # What is there?
  ("", 0, "asgd train          Trains the runs of a config"),
  ("--help", 0, "asgd show "),
  ("help", 0, "asgd completion "),
  ("help replay", 0, "usage: asgd replay WORKDIR/cells/NAME"),
  ("--version", 0, "asgd 0."),
  ("--list", 0, "dana_zero"),
  ("train --list", 0, "one_f_one_b"),
  ("train -h", 0, "--help=all has 17 more flags and 81 more keys"),
  ("train --help=all", 0, "learning_rate_schedule.warmup_epochs"),
  ("train digits --help", 0, "usage: asgd train --config=CONFIG"),
  ("plan -h", 0, "--bandwidth=NUMBER"),
  ("bench", 0, "asgd bench server"),
  ("reproduce --list", 0, "delayed_edge"),
  # Mistakes in names.
  ("trian digits", 2, "unknown command 'trian'; did you mean 'train'?"),
  ("train digit", 2, "did you mean 'digits'?"),
  ("train digits --wrokers=4", 2, "did you mean --config.workers=4?"),
  ("train digits --epochs 3", 2, "did you mean --config.epochs?"),
  ("train digits --dry-run", 2, "did you mean --dry_run?"),
  ("train digits --config.wrokers=4", 2, "did you mean 'workers'?"),
  ("train digits --config.lr=0.1", 2, "did you mean 'learning_rate'?"),
  ("train digits --config.only=dana", 2, "did you mean 'dana_zero'?"),
  ("train digits --config.runs.asgd.recipe=dana", 2, "unknown algorithm"),
  ("train digits --config.model.name=cnnn", 2, "did you mean 'cnn'?"),
  ("train digits --engine=thread", 2, "should be one of <simulate|threads"),
  ("train digits --config.epochs=many", 2, "must be a number above 0"),
  ("train digits --jobs=0", 2, "--jobs must be auto, ray, or a number"),
  ("train", 2, "no --config; try --config=configs/digits.py"),
  ("train digits --quiet=maybe", 2, "maybe: quiet is on or off; write --quiet"),
  ("train digits fashion", 2, "unexpected argument 'fashion'"),
  ("draw_schedule", 2, "give a table: either --schedule=NAME"),
  ("draw_schedule --schedule=one_f_one", 2, "did you mean 'one_f_one_b'?"),
  ("show", 2, "asgd show takes one folder"),
  ("show {new}", 2, "does not exist: name a folder that asgd train made"),
  ("show -- {live}", 0, "cells     1 of 1 finished"),
  ("show {run}/cells", 2, "holds no experiment"),
  ("new {run}", 2, "is not empty: choose another folder"),
  ("replay", 2, "no run is named: write asgd replay WORKDIR/cells/NAME"),
  ("compare {run}", 2, "no finished live cell to compare"),
  ("completion fish", 2, "takes bash or zsh, not fish"),
  ("plan --params=1.5e9", 2, "give --devices, as in --devices=64"),
  # Work.
  ("draw-schedule --schedule=1F1B --stages=2 --microbatches=3", 0, "F0"),
  ("plan --params=1e9 --devices=8 --bandwidth=25", 0, "data, ring"),
  ("show {run}", 0, "cells     2 of 2 finished"),
  ("train {tiny} --workdir={run}", 0, "report       {run}/report.html"),
  ("train {tiny} --jobs=1 --workdir={run}", 0, "all 2 cells had finished"),
  ("train {tiny} --workdir={run} --quiet", 0, ""),
  ("train {tiny} --workdir={new} --dry_run", 0, "2 cells, 16 messages"),
  ("train {tiny} --workdir={new} --jobs=1 --dry_run", 0, " on 1 cores"),
  ("train {tiny} --workdir={run} --config.batch_size=8", 2, "was 16, now 8"),
  ("replay {live}", 0, "bit"),
  ("timeline {live}", 0, "drop the file on https://ui.perfetto.dev"),
)


def asgd(*words, status=None):
  """Runs the command `asgd` in this process."""
  return kit.call("__main__", *words, status=status)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  above = tmp_path_factory.mktemp("door")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("asgd.experiment.figure.draw", lambda *args: [])
    for name, words in {"run": TINY, "live": LIVE}.items():
      asgd("train", *words, f"--workdir={above / name}", status=0)
  return {name: str(above / name) for name in ("run", "live", "new")}


@pytest.mark.parametrize(("line", "status", "part"), COMMANDS)
def test_a_command_line_gives_what_a_user_expects(folders, line, status, part):
  given = {**folders, "tiny": " ".join(TINY)}
  result = asgd(*line.format(**given).split(), status=status)
  if status:
    (said,) = result.stderr.splitlines()  # one line, with the remedy
    assert said.startswith("error: ")
    assert part.format(**given) in said
    # The first line of a run comes before its data and devices are checked.
    assert re.fullmatch(r"(training .*\n)?", result.stdout)
  elif part:
    assert part.format(**given) in result.stdout
  else:
    assert result.stdout == result.stderr == ""
  assert not Path(folders["new"]).exists()


def test_there_are_as_many_as_were_asked_for():
  assert len(COMMANDS) == len({line for line, *_ in COMMANDS}) == 51


def test_json_is_one_object_on_stdout(folders):
  place = f"--workdir={folders['run']}"
  result = asgd("train", *TINY, place, "--json", status=0)
  found = json.loads(result.stdout)
  assert [row["cell"] for row in found["cells"]] == [
    *("asgd-n2-s0", "dana_zero-n2-s0"),
  ]
  assert found["missing"] == []
  assert Path(found["report"]).is_file()
  assert "results go to" in result.stderr  # the rest of the output


def test_a_dry_run_as_json_has_minutes_of_each_run(folders):
  words = *TINY, f"--workdir={folders['new']}", "--dry_run", "--json"
  rows = json.loads(asgd("train", *words, status=0).stdout)["dry_run"]
  shown = [(row["run"], row["cells"], row["messages"]) for row in rows]
  assert shown == [("asgd", 1, 8), ("dana_zero", 1, 8)]
  assert all(row["minutes"] >= 0 for row in rows)


def test_a_new_folder_trains_at_once_with_the_printed_command(tmp_path):
  folder = tmp_path / "my own"
  said = asgd("new", folder, status=0).stdout.splitlines()[-1]
  _, *words = shlex.split(said)
  results = f"--workdir={folder}/results"
  assert words[1:] == [f"--config={folder}/config.py", results]
  words[1] += ":tiny"
  asgd(*words, "--jobs=1", status=0)
  shown = asgd("show", folder / "results", status=0).stdout
  assert "cells     2 of 2 finished" in shown
  for name in ("README.md", "config.py"):
    assert said.strip() in (folder / name).read_text()
  sys.modules.pop("model")


def test_bash_completes_commands_flags_values_and_keys(tmp_path):
  script = tmp_path / "completion.bash"
  script.write_text(asgd("completion", "bash", status=0).stdout)
  for line, expected in {
    "asgd tr": ["train"],
    "asgd train --engine=th": ["threads"],
    "asgd train --config.epo": ["--config.epochs="],
    "asgd train pipeline_g": ["pipeline_gpt"],
    "asgd train --num_p": ["--num_processes="],
    "asgd completion z": ["zsh"],
  }.items():
    code = f'source {script}; COMP_WORDS=({line}); COMP_LINE="{line}"'
    code += f"; COMP_CWORD={line.count(' ')}; COMP_POINT={len(line)}; _asgd"
    ended = subprocess.run(
      ["bash", "-c", f'{code}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
      capture_output=True, text=True, check=True,
    )
    assert ended.stdout.split() == expected, line


@pytest.mark.process
def test_the_first_lines_come_from_a_process_of_their_own(folders):
  words = [sys.executable, "-m", "launch", "show", folders["run"]]
  environment = {**os.environ, "PYTHONPATH": str(kit.ROOT)}
  shown = subprocess.run(
    words, cwd=kit.ROOT, env=environment, capture_output=True, text=True
  )
  assert shown.returncode == 0
  assert shown.stderr == ""
  assert "cells     2 of 2 finished" in shown.stdout


def test_the_name_of_a_run_is_shown_as_it_is(tmp_path):
  table = tmp_path / "results.csv"
  table.write_text("algorithm,workers,test_loss\n1e3,8,0.51234\n")
  *_, row = show._results(table).splitlines()
  assert row.split() == ["1e3", "8", "0.5123"]


def damaged(content, rng):
  """Returns the bytes of a file after a random damage."""
  start, end = sorted(rng.integers(0, len(content) + 1, 2))
  noise = rng.integers(0, 256, 20, dtype=np.uint8).tobytes()
  deep = b"[" * 10**5, b'{"a":' * 10**5
  inserted = noise, *deep, b"\0", b"1e999", b"\x1b[2J"
  kind = rng.integers(4)
  if kind == 0:
    return content[:start]
  if kind == 1:
    return content[:start] + content[end:]
  if kind == 2:
    return content[:start] + inserted[rng.integers(6)] + content[start:]
  try:  # another value in the place of one of JSON
    tree = json.loads(content)
  except ValueError:
    return noise
  node = tree["config"]
  while True:
    key = [*node][rng.integers(len(node))]
    inner = node[key]
    if not (isinstance(inner, dict) and inner) or rng.integers(2):
      break
    node = inner
  others = None, [], {}, "x\ud800", 1, [[[]]], {"\x1b[2J": {}}, [None]
  node[key] = others[rng.integers(len(others))]
  if rng.integers(3) == 0:
    del node[key]
  return json.dumps(tree).encode()


def test_300_damages_of_a_folder_are_a_line_each(folders, tmp_path):
  run, wrong = Path(folders["run"]), 0
  for seed in range(300):
    rng = np.random.default_rng(seed)
    for name in ("config.json", "results.csv"):
      (tmp_path / name).write_bytes((run / name).read_bytes())
    name = ("config.json", "results.csv")[seed % 2]
    content = damaged((run / name).read_bytes(), rng)
    (tmp_path / name).write_bytes(content)
    said, faults = show.describe(tmp_path)
    for fault in faults:
      wrong += 1
      assert fault.isprintable() and len(fault) < 500, (seed, fault)
      assert f"{tmp_path / name} is damaged (" in fault
      assert "train again" in fault or "in another folder" in fault
    assert said.replace("\n", "").isprintable(), (seed, said)
  assert 100 < wrong < 300


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", "cut"])
def test_a_damaged_cell_is_named_below_the_rest_of_the_folder(
  folders, tmp_path, content
):
  shutil.copytree(folders["run"], tmp_path / "run")
  path = tmp_path / "run" / "cells" / "asgd-n2-s0" / "cell.npz"
  if content == "cut":
    content = path.read_bytes()[:-100]
  path.write_bytes(content)
  result = asgd("show", tmp_path / "run", status=1)
  assert "cells     1 of 2 finished\nto do     asgd-n2-s0\n" in result.stdout
  assert "DANA-Zero" in result.stdout  # the table
  (said,) = result.stderr.splitlines()
  assert said.startswith(f"error: {path} is damaged, empty or cut short: ")
  assert "repeat its asgd train" in said


def test_a_damaged_folder_is_no_wrong_usage(folders, tmp_path):
  (tmp_path / "config.json").write_text("[" * 10**5)
  result = asgd("show", tmp_path, status=1)
  (said,) = result.stderr.splitlines()
  assert said.startswith("error: ") and "RecursionError" in said


@pytest.mark.parametrize("name", ['q"x', "back\\N", "{name}", "line\nend"])
def test_a_name_that_no_file_can_quote_is_refused(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="use another name"):
    new.write(Path(name))
  assert not list(tmp_path.iterdir())


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
  (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
  with pytest.raises(ValueError, match="elsewhere, which does not exist: make"):
    new.write(tmp_path / "link")
  assert not (tmp_path / "elsewhere").exists()


def test_the_first_screen_of_help_is_short(capsys):
  with pytest.raises(SystemExit):
    command_line.dispatch("train", ["--help"])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) <= 40 and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
  ("minutes", "text"),
  [
    (None, "-"),
    (0.0, "1 second or less"),
    (0.2, "12 seconds"),
    (1.25, "1.2 minutes"),
  ],
)
def test_a_short_time_is_in_seconds(minutes, text):
  row = dict.fromkeys(dry_run._HEADER, 1) | {"minutes": minutes}
  said = dry_run.describe([row], 1)
  assert text in said and ("0.0" not in said)


def test_the_cells_of_every_engine_are_named(tmp_path):
  assert set(show.PEER_RECIPES) == set(algorithms.PEER_RECIPES)
  runs = {
    "one": {"recipe": "asgd", "workers": 4},
    "mesh": {"recipe": "asgd", "engine": "mesh"},
    "peers": {"recipe": "d_psgd", "engine": "mesh"},
    "pipe": {"recipe": "asgd", "engine": "pipeline"},
  }
  exp = experiment.build(
    {"data": {"name": "digits"}, "runs": runs, "workers": (2,), "epochs": 0.2},
    engines={**experiment.ENGINES, "pipeline": PIPELINE},
    plans_all=False,
  )
  identity = storage.to_json(folder.identity(exp))
  (tmp_path / "config.json").write_text(identity)
  said, faults = show.describe(tmp_path)
  assert not faults
  (to_do,) = re.findall("to do     (.*)", said)
  assert sorted(to_do.split(", ")) == sorted(cell.name for cell in exp.cells)


def test_the_problem_of_a_python_call_is_named_as_its_report_does(tmp_path):
  name = own.Objects.name
  config = {
    "problem": {"name": ""},
    "model": {"name": name},
    "data": {"name": name},
    "runs": {"a": {}},
    "workers": [2],
    "seeds": [0],
  }
  text = json.dumps({"config": config})
  (tmp_path / "config.json").write_text(text)
  said, _ = show.describe(tmp_path)
  assert "problem   a caller's data and model\n" in said
