"""Asked twice to stop, a command ends whatever it is doing."""

import signal
import subprocess
import sys
import time

import kit
import pytest

from asgd.experiment import signals

pytestmark = pytest.mark.process

# Waits in a library, where Python calls no handlers: for a lock that it holds.
# It has so many files open that select() would not take one more.
STUCK = """
import ctypes, os, resource, subprocess, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
from asgd.experiment.signals import Signals
Signals()
subprocess.Popen(["sleep", "1000"])
print("stuck", flush=True)
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
while True:
  try:
    libc.pthread_mutex_lock(lock)
  except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_end_what_hangs_and_the_processes_it_started(number):
  process = subprocess.Popen(
    [sys.executable, "-c", STUCK],
    cwd=kit.ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stdout.readline() == "stuck\n"
    end = time.monotonic() + kit.DEADLINE
    while process.poll() is None:  # two that come together are one
      assert time.monotonic() < end
      process.send_signal(number)
      time.sleep(0.02)
    # The child has these pipes, too: they are closed when it has ended.
    _, said = process.communicate(timeout=kit.DEADLINE)
  finally:
    process.kill()
  assert process.returncode == 128 + signal.SIGINT
  *_, line = said.strip().splitlines()
  assert line == f"ended at once, before all was saved; {signals.RERUN}"
