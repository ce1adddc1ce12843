"""What a command prints before any library is imported."""

import inspect
import json
import re
import subprocess
import sys

import kit
import pytest

from asgd import algorithms, models, names
from asgd.experiment import chaos, schema
from asgd.live import faults
from asgd.live.world import explore
from asgd.parallel import memory, workloads
from asgd.pipeline import analyze, schedules
from launch import command_flags, command_line, flags, listing, platforms
from launch.command_flags import COMMANDS


def test_the_copied_names_are_those_of_their_modules():
  assert tuple(flags.ENGINES) == command_flags.ENGINES
  assert command_flags.LIVE_ENGINES == flags.LIVE
  assert chaos.KINDS == command_flags.FAILURE_KINDS
  assert faults.KINDS == command_flags.FAULTS
  assert tuple(explore.PROTOCOLS) == command_flags.PROTOCOLS
  assert workloads.RECIPES == command_flags.RECIPES
  assert tuple(memory.OPTIMIZERS) == command_flags.OPTIMIZERS
  assert tuple(memory.PRECISIONS) == command_flags.PRECISIONS
  assert tuple(memory.ACTIVATIONS) == command_flags.ACTIVATIONS
  assert analyze.WEIGHTS == command_flags.WEIGHTS
  makers = dict(schedules.SCHEDULES)
  del makers["custom"]  # takes a function, which a flag cannot pass
  options = set()
  for maker in makers.values():
    options |= inspect.signature(maker).parameters.keys()
  assert options - {"costs"} == command_flags.SCHEDULE_OPTIONS.keys()


def test_the_catalogue_is_what_the_code_gives():
  stored = command_line.catalogue()
  made = json.loads(json.dumps(listing.catalogue(flags.ENGINES)))
  assert made == stored, "update it with python -m launch.listing"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_usage_line_and_every_flag(name, capsys):
  with pytest.raises(SystemExit) as ended:
    command_line.dispatch(name, ["--config=x", "--help=all"])
  assert ended.value.code == 0
  usage, *lines = capsys.readouterr().out.splitlines()
  assert usage.startswith(f"usage: asgd {name} ")
  listed = lines[lines.index("flags:") :] if COMMANDS[name].flags else []
  first = [m[1] for m in (re.match(r"  ([\w.-]+)", x) for x in listed) if m]
  for flag in COMMANDS[name].flags:
    assert first.count(f"--{flag}") == 1, flag
  keys = command_line.catalogue()["keys"]
  assert (keys.keys() <= set(first)) == bool(COMMANDS[name].config)
  assert max(map(len, lines)) <= 80


def test_each_key_of_a_config_has_its_kind_and_default():
  keys = command_line.catalogue()["keys"]
  assert keys["workers"] == ["a list", [8]]
  assert keys["batch_size"] == ["a whole number from 1 to 10000000", 32]
  assert keys["live.spans"] == ["True or False", False]
  sections = {key.partition(".")[0] for key in keys}
  assert sections == set(schema.sections(flags.ENGINES))


@pytest.mark.parametrize(
  ("command", "words", "message"),
  [
    ("train", ["--wrokers=4"], "--wrokers=4; did you mean --config.workers=4?"),
    ("train", ["--lr=0.1"], "did you mean --config.learning_rate=0.1?"),
    ("train", ["--workdri", "x"], "--workdri; did you mean --workdir? asgd"),
    ("train", ["--dry-run"], "--dry-run; did you mean --dry_run?"),
    ("train", ["--schedule=gpipe"], "--config.pipeline.schedule=gpipe?"),
    ("train", ["--zzzzz"], "unknown flag --zzzzz; asgd train --help lists all"),
    ("replay", ["--thrust"], "did you mean --trust?"),
    ("replay", ["--wrokers=4"], "unknown flag --wrokers=4; asgd replay"),
    ("draw_schedule", ["--stage=4"], "did you mean --stages=4?"),
  ],
)
def test_a_wrong_flag_gets_the_nearest_flag_or_key(command, words, message):
  assert message in command_line.mistake(command, words)


@pytest.mark.parametrize(
  "words",
  [
    ["--config=digits", "--config.lr=3", "--noquiet", "--jobs", "--wrokers"],
    ["--config", "digits", "--config.epochs", "--2", "--flagfile=x"],
    ["-jobs=2", "--verbosity=1", "--", "--wrokers"],
    ["word", "-"],
  ],
)
def test_values_and_flags_of_absl_are_no_mistakes(words):
  assert command_line.mistake("train", words) is None


@pytest.mark.parametrize(
  ("name", "exact"),
  [
    ("1f1b", "one_f_one_b"),
    ("1F1B", "one_f_one_b"),
    ("ZBH1", "zb_h1"),
    ("one-f-one-b", "one_f_one_b"),
    ("gpipes", "gpipes"),
  ],
)
def test_a_name_is_found_in_other_spellings(name, exact):
  assert names.canonical(name, schedules.SCHEDULES) == exact


def test_no_two_names_are_spellings_of_one_another():
  for table in (schedules.SCHEDULES, algorithms.ALL, models.MODELS, COMMANDS):
    for name in table:
      others = [other for other in table if other != name]
      assert names.canonical(name, others) == name


def test_a_config_may_spell_names_in_another_way():
  runs = {"a": {"recipe": "Dana-Zero"}, "b": {"recipe": "asgd"}}
  runs["b"] |= {"engine": "PIPELINE", "schedule": "1f1b"}
  config = {"runs": runs, "only": "A", "model": {"name": "MLP"}}
  resolved = schema.resolve(config, flags.ENGINES)
  (run,) = resolved.runs.values()
  assert (run.recipe, run.config["model"]["name"]) == ("dana_zero", "mlp")
  assert schema.resolve({**config, "only": "b"}, flags.ENGINES).runs["b"].engine


def test_help_and_mistakes_import_no_library():
  code = (
    "import runpy, sys\n"
    "try:\n  runpy.run_module('launch', run_name='__main__', alter_sys=True)\n"
    "except SystemExit as end:\n  print(end.code)\n"
    "print({'jax', 'flax', 'optax', 'ml_collections'} & set(sys.modules))"
  )
  for words, status in (["plan", "--help"], 0), (["train", "--wrokers"], 2):
    ended = subprocess.run(
      [sys.executable, "-c", code, *words],
      cwd=kit.ROOT, capture_output=True, text=True, check=True,
    )
    assert ended.stdout.splitlines()[-2:] == [str(status), "set()"]


# Stands for stdout: ends the process at its first line, and prints that line
# and what has been imported and started by then.
_AT_FIRST_LINE = """
import io, os, runpy, sys

class Stdout(io.StringIO):
  def write(self, text):
    from asgd import internals
    heavy = {"matplotlib", "pandas", "PIL", "ray", "scipy", "sklearn"}
    heavy |= {"tensorboardX", "tokenizers", "torch", "wandb"}
    told = text, heavy & set(sys.modules), internals.has_devices()
    print(*told, sep="|", file=sys.__stdout__, flush=True)
    os._exit(0)

  def reconfigure(self, **options):
    pass

sys.stdout = Stdout()
runpy.run_module("launch", run_name="__main__", alter_sys=True)
"""


@pytest.mark.process
@pytest.mark.parametrize(
  ("words", "line"),
  [
    (  # 3 numbers of workers, 3 seeds
      ["digits", "--config.only=asgd,dana_zero"],
      "training digits: 18 cells of 2 runs on simulate in runs/digits-",
    ),
    (
      ["digits:tiny", "--engine=ray", "--config.only=asgd", "--workdir=x"],
      "training digits: 1 cell of 1 run on ray in x",
    ),
    (
      ["pipeline_digits:tiny", "--cells=1/2"],
      "on pipeline, of which this command trains 1/2, in runs/pipeline_digits-",
    ),
  ],
)
def test_a_run_prints_its_first_line_before_heavy_work(words, line):
  ended = subprocess.run(
    [sys.executable, "-c", _AT_FIRST_LINE, "train", *words],
    cwd=kit.ROOT, capture_output=True, text=True, check=True,
  )
  text, imported, has_devices = ended.stdout.rstrip().split("|")
  assert line in text
  assert (imported, has_devices) == ("set()", "False")


@pytest.mark.parametrize(
  ("device", "setting", "plugins", "platform"),
  [
    (None, None, [], "cpu"),
    (None, None, ["xla_cuda12"], "cpu"),  # no GPU for it either
    (None, None, ["neuron"], None),
    ("accel0", None, [], None),
    ("vfio/0", None, [], None),
    ("nvidia0", None, [], None),
    (None, "TPU_NAME", [], None),
    (None, "JAX_FORCE_TPU_INIT", [], None),
  ],
)
def test_libtpu_without_a_tpu_is_left_alone(
  tmp_path, monkeypatch, device, setting, plugins, platform
):
  monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: True)
  monkeypatch.setattr(platforms, "_plugins", lambda: plugins)
  environment = {setting: "x"} if setting else {}
  if device:
    path = tmp_path / "dev" / device
    path.parent.mkdir(parents=True)
    path.touch()
  platforms.choose(environment, tmp_path)
  assert environment.get("JAX_PLATFORMS") == platform


def test_a_tpu_on_the_bus_and_a_users_platform_stay(tmp_path, monkeypatch):
  monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: True)
  chip = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
  chip.mkdir(parents=True)
  (chip / "vendor").write_text("0x1ae0\n")
  environment = {}
  platforms.choose(environment, tmp_path)
  assert environment == {}
  environment = {"JAX_PLATFORMS": ""}
  platforms.choose(environment, tmp_path / "none")
  assert environment == {"JAX_PLATFORMS": ""}
