"""Bodies: whole, or dropped if a kill cut them short, or refused."""

import os

import pytest

from asgd.live import store


def log_of(path, *bodies):
  log = store.Log(path)
  for body in bodies:
    log.append(body)
  return log


def refuses_each_changed_byte(path, read):
  data = path.read_bytes()
  for index in range(len(data)):
    changed = bytearray(data)
    changed[index] ^= 1
    path.write_bytes(changed)
    with pytest.raises(store.Changed, match="is not what the run wrote"):
      read(path)
  path.write_bytes(data)


def test_a_log_that_was_cut_is_read_as_far_as_it_is_whole(tmp_path):
  path = tmp_path / "log"
  log_of(path, b"one", b"two")
  data = path.read_bytes()
  for cut in range(len(data) // 2, len(data)):
    path.write_bytes(data[:cut])
    assert store.Log(path).bodies == [b"one"]
    assert path.read_bytes() == data[: len(data) // 2]


def test_a_changed_byte_of_a_log_is_refused(tmp_path):
  log_of(tmp_path / "log", b"one", b"two")
  refuses_each_changed_byte(tmp_path / "log", store.Log)


def test_a_log_is_replaced_at_once_and_goes_on(tmp_path):
  log = log_of(tmp_path / "log", b"one")
  log.replace([b"two", b""])
  log.append(b"three")
  assert store.Log(tmp_path / "log").bodies == [b"two", b"", b"three"]
  log.replace()
  assert log.size == 0 and store.Log(tmp_path / "log").bodies == []


def test_a_changed_byte_of_a_body_is_refused(tmp_path):
  path = tmp_path / "body"
  store.write_body(path, b"rows")
  assert store.read_body(path) == b"rows"
  refuses_each_changed_byte(path, store.read_body)
  data = path.read_bytes()
  for cut in (data[:-1], b""):
    path.write_bytes(cut)
    with pytest.raises(store.Changed):
      store.read_body(path)


class FullDisk:
  """Has room for half of what is written."""

  def write(self, file, data):
    if len(data) == 1:
      raise OSError(28, "No space left on device")
    return os.write(file, data[: len(data) // 2])

  replace = staticmethod(os.replace)


def test_what_does_not_fit_leaves_what_was_there(tmp_path):
  path = tmp_path / "body"
  store.write_body(path, b"rows")
  with pytest.raises(ValueError, match=r"cannot write .*make room"):
    store.write_body(path, b"others", FullDisk())
  assert store.read_body(path) == b"rows"
  log = store.Log(tmp_path / "log", FullDisk())
  with pytest.raises(ValueError, match=r"cannot write .*make room"):
    log.append(b"one")
  assert store.Log(tmp_path / "log").bodies == []
