"""Ray is started so that nobody else gets at it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import kit
import pytest

from asgd.experiment import jobs, ray_runtime, signals
from asgd.live import processes, ray_internals

ray = pytest.importorskip("ray")
# Ray ends processes of its own without waiting for them.
pytestmark = pytest.mark.filterwarnings(
  "ignore:subprocess .* is still running:ResourceWarning"
)

OF_RAY = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class Begun(Exception):
  """Ray would start now."""


@pytest.fixture
def settings(monkeypatch):
  """What Ray is given, and the environment that it starts in."""
  given = {}

  def init(**options):
    given.update(options)
    given["environment"] = dict(os.environ)
    raise Begun

  for name in OF_RAY:
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(ray, "is_initialized", lambda: False)
  monkeypatch.setattr(ray, "init", init)
  return given


def test_a_ray_that_does_not_come_up_is_one_line(settings, monkeypatch):
  def init(**options):
    raise Exception("The current node timed out during startup.")

  monkeypatch.setattr(ray, "init", init)
  with pytest.raises(ValueError, match=r"timed out .*run the same command ag"):
    ray_runtime.start(None, allow_network=True)


def job_of(runtime_env):
  return json.dumps({"runtime_env": runtime_env})


@pytest.mark.parametrize("network", [False, True])
def test_ray_is_told_to_ask_for_a_token_and_to_keep_its_files_closed(
  settings, network
):
  with pytest.raises(Begun):
    ray_runtime.start(None, allow_network=network)
  environment = settings["environment"]
  assert environment["RAY_AUTH_MODE"] == "token"
  assert len(environment["RAY_AUTH_TOKEN"]) == 64
  assert settings["address"] == "local"
  assert settings["include_dashboard"] is False
  closed = Path(settings["_temp_dir"]).parent
  # It was made for this cluster alone, and nothing is left of it.
  assert not closed.exists()
  assert not set(OF_RAY) & set(os.environ)
  first = environment["RAY_AUTH_TOKEN"]
  with pytest.raises(Begun):
    ray_runtime.start(None, allow_network=network)
  assert settings["environment"]["RAY_AUTH_TOKEN"] != first


@pytest.mark.parametrize("before", [None, "/a/folder"])
def test_its_processes_import_what_this_one_can(settings, monkeypatch, before):
  monkeypatch.delenv("PYTHONPATH", raising=False)
  if before:
    monkeypatch.setenv("PYTHONPATH", before)
  monkeypatch.setattr(sys, "path", ["/of/a/script", *sys.path])
  with pytest.raises(Begun):
    ray_runtime.start(None)
  assert settings["environment"]["PYTHONPATH"] == os.pathsep.join(sys.path)
  assert "runtime_env" not in settings  # which takes a process more for each
  assert os.environ.get("PYTHONPATH") == before


def test_the_files_are_in_a_folder_of_the_owner_alone(settings, monkeypatch):
  seen = []

  def init(**options):
    seen.append(Path(options["_temp_dir"]).parent.stat().st_mode & 0o777)
    raise Begun

  monkeypatch.setattr(ray, "init", init)
  with pytest.raises(Begun):
    ray_runtime.start(None)
  assert seen == [0o700]


def test_what_the_user_has_set_is_left(settings, monkeypatch):
  monkeypatch.setenv("RAY_AUTH_MODE", "token")
  monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/a/file")
  with pytest.raises(Begun):
    ray_runtime.start(None)
  assert "RAY_AUTH_TOKEN" not in settings["environment"]
  assert settings["environment"]["RAY_AUTH_TOKEN_PATH"] == "/a/file"


def test_who_asks_this_process_to_end_is_still_heard_by_it(monkeypatch):
  def init(**options):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray puts its own

  def ours(number, frame):
    pass

  monkeypatch.setattr(ray, "is_initialized", lambda: False)
  monkeypatch.setattr(ray, "init", init)
  monkeypatch.setattr(ray, "shutdown", lambda: None)
  before = signal.signal(signal.SIGTERM, ours)
  try:
    assert ray_runtime.start("1.2.3.4:6379", allow_network=True)
    assert signal.getsignal(signal.SIGTERM) is ours
  finally:
    signal.signal(signal.SIGTERM, before)
    ray_runtime.stop()


@pytest.mark.parametrize("mode", ["disabled", "none"])
def test_without_a_token_the_user_is_told(monkeypatch, capsys, mode):
  monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
  if mode == "none":  # an older Ray
    monkeypatch.delattr(ray._raylet, "get_authentication_mode")
  monkeypatch.setattr(ray, "is_initialized", lambda: False)
  monkeypatch.setattr(ray, "init", lambda **options: None)
  assert ray_runtime.start(None, allow_network=True)
  monkeypatch.setattr(ray, "shutdown", lambda: None)
  ray_runtime.stop()
  (line,) = capsys.readouterr().err.splitlines()
  assert "every user of this machine can run code as you" in line


@pytest.mark.parametrize("job", [{}, {"env_vars": {"A": "1"}}])
def test_a_cluster_is_sent_code_and_where_compiled_programs_are(
  settings, monkeypatch, job
):
  monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job_of(job))
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/a/cache")
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # of this machine
  with pytest.raises(Begun):
    ray_runtime.start("1.2.3.4:6379", allow_network=True)
  sent = settings["runtime_env"]
  assert sent["env_vars"]["JAX_COMPILATION_CACHE_DIR"] == "/a/cache"
  assert all("_CACHE_" in name for name in sent["env_vars"])
  assert not Path(sent["working_dir"]).exists()  # of a try that has failed


def test_what_a_job_has_itself_is_left_to_it(settings, monkeypatch):
  own = {"working_dir": "/b", "env_vars": {"JAX_COMPILATION_CACHE_DIR": "/b"}}
  monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job_of(own))
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/b")
  monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "7")
  for name in [name for name in os.environ if name.startswith("JAX_PERSIST")]:
    monkeypatch.delenv(name)
  with pytest.raises(Begun):
    ray_runtime.start("1.2.3.4:6379", allow_network=True)
  assert settings["runtime_env"] == {
    "env_vars": {"JAX_COMPILATION_CACHE_MAX_SIZE": "7"}
  }


# A cluster.


def test_workers_have_the_priority_of_the_driver(ray_session):
  task = ray.remote(num_cpus=0)(lambda: os.nice(0))
  assert ray.get(task.remote()) == os.nice(0)


def test_what_a_run_has_no_use_for_is_not_started(ray_session):
  kinds = {kind for kind, _ in ray_internals.node().live_processes()}
  assert kinds >= {"gcs_server", "raylet"}
  assert not kinds & {"monitor", "dashboard", "log_monitor"}


JOIN = """
import sys
from ray._raylet import GcsClient
try:
  GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"fun", timeout=60)
except Exception as error:
  sys.exit(f"refused: {error}")
print("read the functions that Ray calls")
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("token", ["none", "wrong", "right"])
def test_who_has_not_the_token_gets_no_answer(ray_session, tmp_path, token):
  environment = {k: v for k, v in os.environ.items() if k not in OF_RAY}
  environment["HOME"] = str(tmp_path)
  if token != "none":
    environment["RAY_AUTH_MODE"] = "token"
    right = os.environ["RAY_AUTH_TOKEN"]
    environment["RAY_AUTH_TOKEN"] = right if token == "right" else "0" * 64
  address = ray.get_runtime_context().gcs_address
  result = subprocess.run(
    [sys.executable, "-c", JOIN, address],
    env=environment,
    capture_output=True,
    text=True,
    timeout=kit.DEADLINE,
  )
  assert bool(result.stdout) == (token == "right"), result.stderr
  assert ("InvalidAuthToken" in result.stderr) == (token != "right")


@pytest.mark.process
@pytest.mark.slow
def test_a_task_that_dies_is_one_line_that_says_so(ray_session):
  def die(*args):
    os._exit(3)

  ((kind, line),) = jobs._train_on_ray(die, [[]], None, None, signals.NoSignals)
  assert kind == "error"
  assert line.startswith("a task of Ray has died (WorkerCrashedError")
  assert line.endswith(signals.RERUN)
  assert len(line) < 400


def test_folders_of_drivers_that_were_killed_are_removed(tmp_path):
  """Not those of one that is alive, or of somebody else's programs."""
  dead, alive, other = (tmp_path / f"ray-{name}" for name in (
    *("deaddead", "alivealv", "otherone"),
  ))
  for folder in (dead, alive, other):
    (folder / "s").mkdir(parents=True)
  processes.write_pid(alive, "worker", 0)
  pid, started = (alive / "worker-0.pid").read_text().split()
  (dead / "worker-0.pid").write_text(f"{pid} {int(started) - 1}")
  (tmp_path / "ray-alinkali").symlink_to(dead)
  ray_runtime._remove_abandoned(tmp_path)
  assert not dead.exists()
  assert alive.exists() and other.exists()


def test_the_code_for_a_cluster_includes_every_package(tmp_path):
  module = tmp_path / "own.py"
  module.write_text("")
  with contextlib.ExitStack() as undo:
    folder = Path(ray_runtime._copy_code([module], undo))
    sent = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
  assert {"own.py", "asgd/__init__.py", "asgd/pipeline/__init__.py"} <= sent
  assert not any(name.startswith("configs/") for name in sent)
