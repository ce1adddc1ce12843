"""The tutorial: its files and commands run as a reader would run them."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import kit
import pytest

from asgd.live import ray_internals

PAGE = (kit.ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CNN, LOOP, SIMULATED, LIVE, REPLAY = BLOCKS


@pytest.fixture
def folder(tmp_path, monkeypatch):
  (tmp_path / "cnn.py").write_text(CNN)
  (tmp_path / "live.py").write_text(LIVE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  yield tmp_path
  sys.modules.pop("cnn", None)


# The driver kills a host itself, at an evaluation, when the others train.
KILL = """
import os, pathlib, runpy, signal
import cnn
from asgd.live import processes

accuracy, killed = cnn.accuracy, []

def accuracy_and_kill(params):
  hosts = [
    pid
    for pid in processes.descendants(os.getppid())  # which has the nodes
    if "HostActor-worker" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
  ]
  if hosts and not killed:
    killed.append(max(hosts))
    os.kill(max(hosts), signal.SIGKILL)
  return accuracy(params)

cnn.accuracy = accuracy_and_kill
runpy.run_path("live.py", run_name="__main__")
"""


def numbers(out):
  """Returns (accuracy, mean staleness), the last line that a run prints."""
  return [float(word) for word in out.splitlines()[-1].split()]


def replay(name, capsys):
  exec(REPLAY.replace("runs/killed", f"runs/{name}"), {})
  return capsys.readouterr().out.splitlines()[-1]


def test_the_plain_loop_and_the_simulations(folder, capsys):
  names = {}
  exec(LOOP, names)
  alone = float(capsys.readouterr().out)
  exec(SIMULATED, names)
  lines = capsys.readouterr().out.splitlines()
  rows = [line.split() for line in lines]
  found = {name: list(map(float, numbers)) for name, *numbers in rows}
  (shared, staleness, gap), own = found["nag_asgd"], found["dana_zero"]
  assert alone > 0.93 and own[0] > 0.93 and shared < 0.85
  assert staleness == own[1] == pytest.approx(7.0, abs=0.1)
  assert gap > 10 * own[2]


@pytest.mark.usefixtures("blank_pictures")
def test_threads(folder, capsys, monkeypatch):
  words = ["live.py", "threads", "runs/threads", "500"]
  monkeypatch.setattr(sys, "argv", words)
  runpy.run_path("live.py", run_name="__main__")
  result = numbers(capsys.readouterr().out)
  assert result[0] > 0.9 and 2.5 < result[1] < 3.5
  assert replay("threads", capsys) == "True"


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:os.fork.. was called")
def test_a_killed_worker_of_two_nodes_and_the_same_bits(folder, capsys):
  pytest.importorskip("ray")
  from ray import cluster_utils

  (folder / "kill.py").write_text(KILL)
  node = dict(num_cpus=2, include_dashboard=False)
  with ray_internals.without_unused_processes():
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=2)
  path = os.pathsep.join([str(kit.ROOT), os.environ.get("PYTHONPATH", "")])
  words = "ray", "runs/killed", "1000", cluster.address
  try:
    done = subprocess.run(
      [sys.executable, "kill.py", *words],
      env={**os.environ, "PYTHONPATH": path},
      capture_output=True,
      text=True,
      timeout=kit.DEADLINE,
    )
  finally:
    cluster.shutdown()
  assert done.returncode == 0, done.stderr
  assert numbers(done.stdout)[0] > 0.9
  (trace,) = Path().glob("runs/killed/cells/*/trace-0.csv")
  text = trace.read_text()
  assert text.count("receive") == 1000 and "lost" in text
  assert replay("killed", capsys) == "True"
