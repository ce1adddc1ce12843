"""The tutorial: its files and commands run as a reader would run them."""

import os
import re
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
    for pid in processes.descendants(os.getpid())
    if "HostActor" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
  ]
  if hosts and not killed:
    killed.append(max(hosts))
    os.kill(max(hosts), signal.SIGKILL)
  return accuracy(params)

cnn.accuracy = accuracy_and_kill
runpy.run_path("live.py", run_name="__main__")
"""


def start(*arguments, script="live.py"):
  path = os.pathsep.join([str(kit.ROOT), os.environ.get("PYTHONPATH", "")])
  return subprocess.Popen(
    [sys.executable, script, *arguments],
    env={**os.environ, "PYTHONPATH": path},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def finish(process):
  """Returns (accuracy, mean staleness), the last line that a run prints."""
  out, _ = process.communicate(timeout=kit.DEADLINE)
  assert process.returncode == 0, out
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


def test_threads(folder, capsys):
  result = finish(start("threads", "runs/threads", "1000"))
  assert result[0] > 0.9 and 2.5 < result[1] < 3.5
  assert replay("threads", capsys) == "True"


@pytest.mark.process
def test_a_killed_worker_and_the_same_bits(folder, capsys):
  pytest.importorskip("ray")
  (folder / "kill.py").write_text(KILL)
  process = start("ray", "runs/killed", "2000", script="kill.py")
  assert finish(process)[0] > 0.9
  (trace,) = Path().glob("runs/killed/cells/*/trace-0.csv")
  text = trace.read_text()
  assert text.count("receive") == 2000 and "lost" in text
  assert replay("killed", capsys) == "True"


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:os.fork.. was called")
def test_a_cluster_of_two_nodes(folder):
  pytest.importorskip("ray")
  from ray import cluster_utils

  node = dict(num_cpus=2, include_dashboard=False)
  with ray_internals.without_unused_processes():
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=2)
  try:
    result = finish(start("ray", "runs/cluster", "1000", cluster.address))
  finally:
    cluster.shutdown()
  assert result[0] > 0.9
