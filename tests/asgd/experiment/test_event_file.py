"""Curves for TensorBoard: what is in the file, and what a full disk does."""

import errno
import subprocess
import sys
from pathlib import Path

import event_files
import kit
import pytest

from asgd.experiment import event_file

pytest.importorskip("tensorboardX")


def test_a_file_begins_with_its_version_and_the_step_from_which_it_counts(
  tmp_path,
):
  board = event_file.open_board(tmp_path / "a" / "b", purge_step=7)
  board.add_scalar("loss", 0.5, 9)
  board.close()
  (path,) = (tmp_path / "a" / "b").iterdir()
  assert path.name.startswith("events.out.tfevents.")
  version, purge, loss = event_files.read(path)
  assert version.file_version == "brain.Event:2"
  assert (purge.step, purge.session_log.status) == (7, 1)  # START
  assert loss.step == 9
  (value,) = loss.summary.value
  assert (value.tag, value.simple_value) == ("loss", 0.5)


def test_a_full_disk_is_an_error_of_the_caller(tmp_path):
  board = event_file.open_board(tmp_path)
  board.close()
  with Path("/dev/full").open("wb", buffering=0) as board._file:
    for _ in range(20):  # more than the queue of a thread would hold
      with pytest.raises(OSError) as caught:
        board.add_scalar("loss", 0.5, 9)
      assert caught.value.errno == errno.ENOSPC


FULL = """
import contextlib, resource, sys
from pathlib import Path
import numpy as np
from asgd.experiment import cell_log, checkpoint

place = Path(sys.argv[1])
place.mkdir()
log = cell_log.CellLog(place, place / "board", [])
checkpoints = checkpoint.Checkpoints(place / "checkpoints")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
with contextlib.suppress(OSError):
  for message in range(1000):
    log.write({"message": message, **{f"loss {i}": 0.5 for i in range(20)}})
tree = {i: np.random.default_rng(i).normal(size=5000) for i in range(20)}
try:
  checkpoints.save(1, tree, {})
except ValueError as error:
  print(error)
with contextlib.suppress(OSError):
  log.close()
checkpoints.close()
"""


@pytest.mark.process
def test_a_full_disk_has_one_line_also_when_python_ends(tmp_path):
  result = subprocess.run(
    [sys.executable, "-c", FULL, str(tmp_path / "cell")],
    cwd=kit.ROOT,
    capture_output=True,
    text=True,
    timeout=kit.DEADLINE,
  )
  assert result.returncode == 0, result.stderr
  assert result.stderr == ""
  (line,) = result.stdout.splitlines()
  assert line.startswith(f"cannot write a checkpoint to {tmp_path}")
  assert line.endswith("make room and run the same command again to go on")
