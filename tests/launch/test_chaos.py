"""Chaos: what is killed is counted, and nothing is lost."""

import random
import re

import kit
import pytest
from absl import flags
from absl.testing import flagsaver

from asgd.experiment import audit
from asgd.experiment import chaos as chaos_lib
from asgd.live.world import explore
from launch import chaos as command

if not flags.FLAGS.is_parsed():
  flags.FLAGS(["test"])

CONFIG = (
  "--config=configs/digits.py",
  "--config.only=dana_zero",
  "--config.workers=3",
  "--config.seeds=0",
  "--config.model.hidden=(8,)",
  "--config.epochs=5",
  "--config.evaluations=2",
  "--config.curvature_checks=0",
  "--config.learning_rate_schedule.decay_epochs=()",
  "--config.live.slowdown=40,40,40",  # they wait most of their time
)
MESSAGES = 444

pytestmark = pytest.mark.usefixtures(
  "commands_as_here", "commands_without_pictures"
)


def chaos(*arguments, status=None):
  """Runs the command, whose victims are processes, in this process."""
  return kit.call("chaos", *CONFIG, *arguments, status=status)


def injected(result):
  """How often what was done, as the line that counts says."""
  (line,) = re.findall(r"^injected: (.*)$", result.stdout, re.MULTILINE)
  return {kind: int(n) for n, kind in re.findall(r"(\d+) (\w+)", line)}


def said(result):
  """The same, as it was said when it was done."""
  return re.findall(r"^chaos: (\w+): ", result.stderr, re.MULTILINE)


@pytest.mark.process
@pytest.mark.slow
def test_a_process_is_killed_and_nothing_is_lost(tmp_path):
  result = chaos(
    *("--engine=threads", "--kinds=driver", f"--workdir={tmp_path / 'out'}"),
    *("--mtbf=1", "--seconds=1", "--seed=1"),
    status=0,
  )
  assert injected(result)["driver"] == len(said(result)) >= 1
  assert f"{MESSAGES} of {MESSAGES} received, 0 twice" in result.stdout
  assert "FAILED" not in result.stdout
  assert "the audit found no fault" in result.stdout
  assert "Traceback" not in result.stderr


@pytest.mark.process
@pytest.mark.slow
def test_processes_are_killed_and_nothing_is_lost(tmp_path):
  pytest.importorskip("ray")
  result = chaos(
    *("--kinds=worker,shard,term", f"--workdir={tmp_path / 'out'}"),
    *("--mtbf=0.5", "--seconds=2", "--seed=1"),
    *("--config.workers=2", "--config.live.slowdown=40,40"),
    status=0,
  )
  assert sum(injected(result).values()) == len(said(result)) >= 1
  assert "FAILED" not in result.stdout
  assert "(raylet)" not in result.stdout + result.stderr
  assert "Traceback" not in result.stderr


# Mistakes: (arguments, what the one line says).
MISTAKES = {
  "kind": (["--kinds=wroker"], "--kinds=wroker: did you mean 'worker'"),
  "threads": (["--engine=threads"], "use --kinds=driver, or --engine=ray"),
  "config": (["--config.epocs=3"], "did you mean 'epochs'"),
}


# The same, without a process of their own.
WRONG_FLAGS = [
  ("patience", "-1", "--patience=-1 must be positive and finite"),
  ("seconds", "nan", "--seconds=nan must be positive and finite"),
  ("seconds", "0", "--seconds=0 must be positive and finite"),
  ("mtbf", "nan", "--mtbf=nan must be positive and finite"),
  ("mtbf", "inf", "--mtbf=inf must be positive and finite"),
  ("kinds", "driver,,worker", "=driver,,worker has an empty name between"),
  ("kinds", "", "--kinds is empty; choose from worker,shard"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_FLAGS)
def test_flags_that_cannot_be_are_named(name, value, message):
  # Another command, imported beside it, may have defined flags of these names.
  given = {"mtbf": "5", "seconds": "60", "patience": "180", name: value}
  with (
    flagsaver.as_parsed(**given),
    pytest.raises(ValueError, match=message),
  ):
    command._check_flags()
    command._check_kinds("ray")


def test_it_says_what_was_done_and_what_was_never_tried():
  failures = [
    audit.Failure(kind, "a", 0, (), 0, 0) for kind in ("term", "worker", "term")
  ]
  some = command.summary(["term", "worker"], failures)
  assert some == "injected: 1 worker, 2 term"
  first, second = command.summary(chaos_lib.KINDS, failures).splitlines()
  assert first == some
  assert second.startswith("never injected: shard, hang, driver; give it more")
  none = command.summary(["driver"], [])
  assert none.startswith("injected: nothing\nnever injected: driver;")


class Still:
  """A run that works when the test says so; killing its driver takes long."""

  def __init__(self, clock):
    self.clock, self.done, self.process = clock, [], self
    self.returncode = None
    self.down = 0.0  # until when

  def poll(self):
    if self.clock.now > 500.0:
      self.returncode = 0
    return self.returncode

  def check_progress(self, patience):
    pass

  def is_working(self):
    return self.clock.now >= self.down

  def inject_failure(self, kind, rng):
    del rng
    if not self.is_working():
      return False
    self.done.append(kind)
    if kind == "driver":
      self.clock.now += 20.0  # until its processes have gone
      self.down = self.clock.now + 15.0  # until it works again
    return True


class Clock:
  now = 0.0

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds


def test_a_driver_that_starts_again_takes_no_time_of_the_others(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(chaos_lib, "time", clock)
  run = Still(clock)
  times = dict(mtbf=2.0, seconds=60.0, patience=180.0)
  chaos_lib.inject(run, chaos_lib.KINDS, random.Random(0), **times)
  # Thirty are expected, give or take; each kind comes before any comes again.
  assert 15 <= len(run.done) <= 45
  assert set(run.done[:5]) == set(chaos_lib.KINDS)
  assert run.done.count("driver") >= 4


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(tmp_path, name):
  arguments, message = MISTAKES[name]
  result = chaos(*arguments, f"--workdir={tmp_path / 'out'}")
  kit.assert_one_line(result, message)
  assert not (tmp_path / "out").exists()


@pytest.mark.process
@pytest.mark.slow
def test_a_run_that_hangs_is_ended_and_told(tmp_path):
  result = chaos(
    *("--engine=threads", "--kinds=driver", "--patience=0.01"),
    f"--workdir={tmp_path / 'out'}",
    status=1,
  )
  assert "nothing has happened for 0.01 s" in result.stderr
  assert "has hung" in result.stderr


def test_seeds_of_a_simulated_world_are_tallied():
  result = kit.call("chaos", "--simulate=3", "--seed=1")
  assert result.stdout.startswith("3 runs, ")
  assert re.search(r"kill worker +\d", result.stdout)
  assert re.search(r"every job is received once +3", result.stdout)
  result = kit.call("chaos", "--simulate=2", "--faults=0", status=2)
  kit.assert_one_line(result, "selects faults of one seed: add --simulate=1")


def test_a_seed_says_which_faults_come_to_it():
  result = kit.call("chaos", "--simulate=1", "--seed=1")
  first, second = result.stdout.splitlines()[:2]
  assert first.startswith("seed 1: ServerCase(recipe=")
  assert second.startswith("  fault 0: ")


@pytest.mark.parametrize(
  ("args", "text"),
  [
    (["--faults=0"], "--faults is for --simulate=1: add it"),
    (["--simulate=1", "--workdir=x"], "drop --workdir"),
    (["--simulate=-1"], "--simulate must be from 1 to 1,000,000,000, not -1"),
    (["--simulate=1", "--jobs=0"], "--jobs must be from 1 to 1,024, not 0"),
    (["--simulate=1", "--config=configs/digits.py"], "drop --config"),
  ],
)
def test_flags_that_say_nothing_of_a_simulated_world(args, text):
  kit.assert_one_line(kit.call("chaos", *args, status=2), text)


def test_an_interrupted_simulation_keeps_its_count(monkeypatch):
  run_seeds = explore.run_seeds

  def interrupted(seeds, **options):
    yield from run_seeds(seeds[:2], **options)
    raise KeyboardInterrupt

  monkeypatch.setattr(explore, "run_seeds", interrupted)
  result = kit.call(
    *("chaos", "--simulate=5", "--protocol=tables"), status=130
  )
  assert "2 runs, " in result.stdout
  assert result.stderr.endswith(
    "chaos: interrupted after 2 of 5 seeds, of which 0 failed\n"
  )
