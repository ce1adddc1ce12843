"""The processes of a run, as its folder of memory names them."""

import os
import signal
import subprocess

from asgd.live import processes


def test_what_a_killed_driver_left_is_ended(tmp_path):
  processes.write_pid(tmp_path, "worker", 3)
  assert processes.live_pids(tmp_path) == {"worker": {3: os.getpid()}}
  with subprocess.Popen(["sleep", "60"]) as process:
    _, began = processes.process_stat(process.pid)
    (tmp_path / "worker-3.pid").write_text(f"{process.pid} {began}")
    # Somebody else has the number now.
    (tmp_path / "shard-0.pid").write_text(f"{os.getpid()} 0")
    processes.kill_run(tmp_path)
    assert process.wait() == -signal.SIGKILL
  assert processes.live_pids(tmp_path) == {}
  assert processes.live_pids(tmp_path / "gone") == {}
