"""What the command refuses, each in one line, and what it lists."""

import re
import sys
import types

import kit
import pytest

from asgd import algorithms, models
from asgd.pipeline import schedules
from launch import train

FILE = "--config=configs/digits.py"
# (arguments, what the one line says).
MISTAKES = (
  ([FILE, "--config.runs.asgd.recipe=asgdd"], "'asgdd'; did you mean 'asgd'"),
  ([FILE, "--config.lr=3"],
   "unknown config key 'lr'; did you mean 'learning_rate'"),
  ([FILE, "--config.runs.asg.momentum", "1"],
   "unknown config key 'runs.asg' (a new run begins with runs.asg.recipe)"),
  ([FILE, "--workdri=x"], "unknown flag --workdri=x; did you mean --workdir=x"),
  ([FILE, "--engine=thread"], "--engine=thread: value should be one of"),
  ([FILE, "--config.epochs=many"],
   "config.epochs must be a number above 0 to 1e+09, not 'many'"),
  ([FILE, "--config.runs.asgd.title=DC-ASGD"], "have the same title 'DC-ASGD'"),
  ([FILE, "--config.only=dana"], "did you mean 'dana_zero'"),
  ([FILE, "--config.runs.dana_zero.recipe=[]"],
   "config.runs.dana_zero: unknown algorithm []; known: ad_psgd, adadelay"),
  ([FILE, "--config.runs.asgd.engine=[]", "--config.runs.asgd.stages=2"],
   "config.runs.asgd.engine: unknown engine []"),
  ([FILE, "--config.model.hidden={[]:1}"],
   "hidden must be a sequence of widths, as (64,), not '{[]:1}'"),
  ([FILE, f"--config.model.hidden={'-' * 20_000}"],
   "hidden must be a sequence of widths, as (64,), not '---"),
  ([FILE, "--flagfile=/nix"], "--flagfile cannot be read: "),
  ([FILE, FILE, "--config.epochs=1"],
   "--config is given 2 times: give one file"),
  ([FILE, "--config.=3"], "--config.=3 has no valid key; write"),
  ([FILE, "--config.model.=3"], "--config.model.=3 has no valid"),
  ([FILE, "--noconfig.x"], "--noconfig.x has no valid key"),
  ([FILE, "--config.workers[0]=3"], "workers[0]=3 has no valid key"),
  ([FILE, "--config.nosuch=3"],
   "unknown config key 'nosuch'; known: allocation, batch_size"),
  ([FILE, f"--config.runs.asgd.title={'x' * 5000}"],
   "config.runs.asgd.title has 5,000 characters; use at most 100"),
  ([FILE, "--jobs=4", "--profile=x"],
   "--profile traces this process, but --jobs=4 trains in others: drop one"),
  ([FILE, "--jobs=0"], "--jobs must be auto, ray, or a number from 1 to"),
  ([FILE, "--fault=kill:1:3"],
   "--fault is for engine threads or ray, but no run here uses it: add"),
  ([FILE, "--processes=2"], "--processes is for engine pipeline"),
  ([FILE, "--gpus_per_process=1"],
   "--gpus_per_process is for engine pipeline, but no run here"),
  (["--config=configs/pipeline_digits.py", "--gpus_per_process=nan"],
   "--gpus_per_process must be 0 or more, not nan"),
  ([FILE, "--cells=3/2"], "--cells must be I/N with I from 1 to N"),
  ([], "no --config; try --config=configs/digits.py"),
  (["--config=configs/nope.py"], "there is no such file"),
  (["digits"],
   "'digits'; flags start with --; for a config write --config=digits"),
  (["--config.epochs=0.1", "digits"],
   "'config.epochs': a config comes first, as --config=configs/digits.py"),
  ([FILE, "--config.runs.asgd.title='a\\nb'"],
   "config.runs.asgd.title is 'a\\nb', and stands in one line"),
  ([FILE, "digits"], "unexpected argument 'digits'"),
  (["--config=configs/cifar10.py", "--data_dir=/nonexistent"], "/nonexistent"),
)
LIVE = (
  *(FILE, "--engine=threads", "--config.only=dana_zero"),
  *("--config.workers=3", "--config.seeds=0"),
)
OF_LIVE_RUNS = (
  (["--fault=kill:1"], "write KIND:WORKER:SEQ with a kind of kill"),
  (["--config.order.name=fixed_delay"],
   "'fixed_delay' is for simulations only"),
  (["--engine=ray", "--address=192.0.2.1:6379"],
   "--address=192.0.2.1:6379 joins a Ray cluster, which other"),
  (["--memory_dir=/nonexistent"], "--memory_dir=/nonexistent is no folder"),
  (["--memory_dir=/proc"], "--memory_dir=/proc: no folder can be made there"),
  (["--grace_seconds=nan"], "--grace_seconds must be 0 to 1e+09"),
  (["--grace_seconds=-1"], "to 1e+09, not -1"),
  (["--spans"],
   "--spans is for engine pipeline, but no run here uses it: add --engine"),
  (["--address=192.0.2.1:6379"], "no run here uses it: add --engine=ray"),
  (["--config.server.shards=2", "--config.runs.dana_zero.recipe=ssgd"],
   "set config.server.consistent=True, or config.server.shards=1"),
)
OF_LIVE_RUNS = [([*LIVE, *given], message) for given, message in OF_LIVE_RUNS]


@pytest.mark.parametrize(("arguments", "message"), [*MISTAKES, *OF_LIVE_RUNS])
def test_a_mistake_is_one_line_with_the_remedy(tmp_path, arguments, message):
  workdir = tmp_path / "out"
  result = kit.call("train", *arguments, f"--workdir={workdir}")
  kit.assert_one_line(result, message)
  # The first line of a run comes before its data and devices are checked.
  assert re.fullmatch(r"(training .*\n)?", result.stdout)
  assert not workdir.exists()
  assert len(result.stderr) <= 601


@pytest.mark.parametrize(
  "body, message",
  [
    ("import sys; sys.exit(5)", "the file called sys.exit (status 5)"),
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
