"""A command whose reader has gone ends without a word."""

import os
import signal
import subprocess
import sys

import kit
import pytest

# The file alone: the package imports JAX.
PRINTS = """
import runpy
import sys

@runpy.run_path("asgd/output.py")["exit_on_broken_pipe"]()
def main():
  print("a line")
  sys.exit(1)

main()
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_without_a_reader_a_program_ends_as_by_sigpipe(unbuffered):
  reader, writer = os.pipe()
  os.close(reader)
  result = subprocess.run(
    [sys.executable, "-c", PRINTS],
    cwd=kit.ROOT,
    env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    stdout=writer,
    stderr=subprocess.PIPE,
    timeout=kit.DEADLINE,
  )
  os.close(writer)
  assert result.stderr == b""
  assert result.returncode == 128 + signal.SIGPIPE
