"""What the command refuses, each in one line, and what it lists."""

import re
import subprocess
import sys
import types

import kit
import pytest

from asgd import algorithms, models
from launch import train
from pipeline import schedules

FILE = "--config=configs/digits.py"
# (arguments, what the one line says).
MISTAKES = {
  "recipe": (
    [FILE, "--config.runs.asgd.recipe=asgdd"],
    "'asgdd'; did you mean 'asgd'",
  ),
  "initials": (
    [FILE, "--config.lr=3"],
    "unknown config key 'lr'; did you mean 'learning_rate'",
  ),
  "nested config key": (
    [FILE, "--config.runs.asg.momentum", "1"],
    "unknown config key 'runs.asg' (a new run begins with runs.asg.recipe)",
  ),
  "flag": ([FILE, "--workdri=x"], "Unknown command line flag 'workdri'"),
  "engine": (
    [FILE, "--engine=thread"],
    "--engine=thread: value should be one of",
  ),
  "type": (
    [FILE, "--config.epochs=many"],
    "config.epochs must be a number above 0 to 1e+09, not 'many'",
  ),
  "title": (
    [FILE, "--config.runs.asgd.title=DC-ASGD"],
    "have the same title 'DC-ASGD'",
  ),
  "label": ([FILE, "--config.only=dana"], "did you mean 'dana_zero'"),
  "recipe of the wrong kind": (
    [FILE, "--config.runs.dana_zero.recipe=[]"],
    "config.runs.dana_zero: unknown algorithm []; known: ad_psgd, asgd",
  ),
  "engine of the wrong kind": (
    [FILE, "--config.runs.asgd.engine=[]", "--config.runs.asgd.stages=2"],
    "config.runs.asgd.engine: unknown engine []",
  ),
  "no literal": (
    [FILE, "--config.model.hidden={[]:1}"],
    "hidden must be a sequence of widths, as (64,), not '{[]:1}'",
  ),
  "no end of literals": (
    [FILE, f"--config.model.hidden={'-' * 20_000}"],
    "hidden must be a sequence of widths, as (64,), not '---",
  ),
  "flag file": ([FILE, "--flagfile=/nix"], "--flagfile cannot be read: "),
  "two files": (
    [FILE, FILE, "--config.epochs=1"],
    "--config is given 2 times: choose one file",
  ),
  "no key": ([FILE, "--config.=3"], "--config.=3 names no key; write"),
  "no key below": ([FILE, "--config.model.=3"], "--config.model.=3 names no"),
  "no key at all": ([FILE, "--noconfig.x"], "--noconfig.x names no key"),
  "brackets": ([FILE, "--config.workers[0]=3"], "workers[0]=3 names no key"),
  "nothing alike": (
    [FILE, "--config.nosuch=3"],
    "unknown config key 'nosuch'; known: allocation, batch_size",
  ),
  "long title": (
    [FILE, f"--config.runs.asgd.title={'x' * 5000}"],
    "config.runs.asgd.title has 5,000 characters; use at most 100",
  ),
  "jobs": (
    [FILE, "--jobs=4", "--profile=x"],
    "--profile traces this process, and --jobs=4 trains in others: drop one",
  ),
  "number of jobs": (
    [FILE, "--jobs=0"],
    "--jobs must be auto, ray, or a number from 1 to",
  ),
  "faults of live runs": (
    [FILE, "--fault=kill:1:3"],
    "--fault is for engine threads or ray, and nothing here runs on it: add",
  ),
  "processes": ([FILE, "--processes=2"], "--processes is for engine pipeline"),
  "GPUs of simulations": (
    [FILE, "--gpus_per_process=1"],
    "--gpus_per_process is for engine pipeline, and nothing here",
  ),
  "GPUs": (
    ["--config=configs/pipeline_digits.py", "--gpus_per_process=nan"],
    "--gpus_per_process must be 0 or more, not nan",
  ),
  "share": ([FILE, "--cells=3/2"], "--cells must be I/N with I from 1 to N"),
  "no config": ([], "no --config; try --config=configs/digits.py"),
  "no config file": (["--config=configs/nope.py"], "there is no such file"),
  "config without its flag": (
    ["digits"],
    "'digits'; flags start with --, a config is --config=digits",
  ),
  "key before the config": (
    ["--config.epochs=0.1", "digits"],
    "'config.epochs': a config comes first, as --config=configs/digits.py",
  ),
  "title of two lines": (
    [FILE, "--config.runs.asgd.title='a\\nb'"],
    "config.runs.asgd.title is 'a\\nb', and stands in one line",
  ),
  "stray word": ([FILE, "digits"], "unexpected argument 'digits'"),
  "no data": (
    ["--config=configs/cifar10.py", "--data_dir=/nonexistent"],
    "/nonexistent",
  ),
}
LIVE = (
  *(FILE, "--engine=threads", "--config.only=dana_zero"),
  *("--config.workers=3", "--config.seeds=0"),
)
OF_LIVE_RUNS = {
  "fault": (["--fault=kill:1"], "write KIND:WORKER:SEQ with a kind of kill"),
  "order": (
    ["--config.order.name=fixed_delay"],
    "'fixed_delay' is kept by simulations only",
  ),
  "address": (
    ["--engine=ray", "--address=192.0.2.1:6379"],
    "--address=192.0.2.1:6379 joins a Ray cluster, which other",
  ),
  "memory": (
    ["--memory_dir=/nonexistent"],
    "--memory_dir=/nonexistent is no folder",
  ),
  "no folder can be made": (
    ["--memory_dir=/proc"],
    "--memory_dir=/proc: no folder can be made there",
  ),
  "grace": (["--grace_seconds=nan"], "--grace_seconds must be 0 to 1e+09"),
  "no grace": (["--grace_seconds=-1"], "to 1e+09, not -1"),
  "spans of pipelines": (
    ["--spans"],
    "--spans is for engine pipeline, and nothing here runs on it: add --engine",
  ),
  "an address for threads": (
    ["--address=192.0.2.1:6379"],
    "runs on it: add --engine=ray",
  ),
  "rounds in shards": (
    ["--config.server.shards=2", "--config.runs.dana_zero.recipe=ssgd"],
    "set config.server.consistent=True, or config.server.shards=1",
  ),
}
MISTAKES |= {
  name: ([*LIVE, *arguments], message)
  for name, (arguments, message) in OF_LIVE_RUNS.items()
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(tmp_path, name):
  arguments, message = MISTAKES[name]
  workdir = tmp_path / "out"
  result = kit.call("train", *arguments, f"--workdir={workdir}")
  kit.assert_one_line(result, message)
  assert result.stdout == ""
  assert not workdir.exists()
  assert len(result.stderr) <= 601


@pytest.mark.parametrize(
  "body, message",
  [
    ("import sys; sys.exit(5)", "ended the program (status 5)"),
    ("assert False", "FILE.py: AssertionError"),
    ("return {}['foo']", "FILE.py: KeyError: 'foo'"),
    ("raise TypeError('of mine')", "FILE.py: TypeError: of mine"),
    ("return open('/nix')", "FILE.py: OSError: "),
    ("return = 3", "FILE.py: SyntaxError: invalid syntax"),
  ],
)
def test_a_config_file_that_fails_is_named(tmp_path, body, message):
  path = tmp_path / "FILE.py"
  path.write_text(f"def get_config():\n  {body}\n")
  result = kit.call("train", f"--config={path}")
  kit.assert_one_line(result, message)
  kit.assert_one_line(result, f"error: --config={path}: ")


def test_without_ray_the_run_that_needs_it_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  arguments = "--config=configs/compare_engines.py", f"--workdir={tmp_path}/out"
  result = kit.call("train", *arguments)
  kit.assert_one_line(result, "or use --config.runs.ray.engine=threads")
  result = kit.call("train", *LIVE, "--engine=ray", *arguments[1:])
  kit.assert_one_line(result, "or use --config.engine=threads")


def test_the_list_names_everything_that_a_config_may():
  text = kit.call("train", "--list", status=0).stdout
  for name in (
    *(*algorithms.RECIPES, *schedules.SCHEDULES, *models.MODELS),
    *("simulate", "threads", "ray", "mesh", "pipeline"),
    *("digits", "pydoc", "topics"),
  ):
    assert re.search(rf"\b{re.escape(name)}\b", text), name
  assert max(map(len, text.splitlines())) <= 80


@pytest.mark.process
def test_the_package_lists_its_commands():
  text = subprocess.run(
    [sys.executable, "-m", "launch"],
    cwd=kit.ROOT,
    capture_output=True,
    text=True,
    timeout=kit.DEADLINE,
    check=True,
  ).stdout
  named = re.findall(r"^asgd (\w+) +(\S.*)$", text, re.MULTILINE)
  files = (kit.ROOT / "launch").glob("*.py")
  places = {path.stem for path in files if path.stem[0] != "_"}
  library = {"flags", "listing"}
  assert {name for name, _ in named} == (places - library) | {"bench"}


@pytest.mark.process
def test_help_lists_the_flags_of_the_command():
  text = kit.launch("train", "--help").stdout
  for flag in ("config", "workdir", "engine", "grace_seconds", "fault"):
    assert re.search(rf"^  --{flag}: ", text, re.MULTILINE), flag
  assert "hang" in text
  assert "--mtbf" not in text


def test_the_readme_and_ci_run_the_same_test_command():
  ci = [
    line
    for line in (kit.ROOT / ".ci" / "run").read_text().splitlines()
    if line and not line.startswith(("#", "set ", "cd "))
  ]
  readme = (kit.ROOT / "README.md").read_text()
  assert "\n".join(ci) in readme


@pytest.mark.parametrize(
  ("engines", "environment", "platforms"),
  [
    (["ray"], "", ["cpu"]),
    (["ray"], "cuda", []),  # as it is asked for
    (["ray", "simulate"], "", []),
    (["threads"], "", []),
  ],
)
def test_a_driver_of_ray_leaves_gpus_to_its_workers(
  monkeypatch, engines, environment, platforms
):
  updates = []
  config = types.SimpleNamespace(update=lambda *args: updates.append(args))
  monkeypatch.setattr(train.jax, "config", config)
  monkeypatch.setenv("JAX_PLATFORMS", environment)
  runs = {name: types.SimpleNamespace(engine=name) for name in engines}
  train._keep_off_accelerators(runs)
  assert updates == [("jax_platforms", value) for value in platforms]
