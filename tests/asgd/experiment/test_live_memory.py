"""Which memory a run takes, and which it does not."""

import os
import shutil
from pathlib import Path

import pytest

from asgd import safe_files
from asgd.experiment import live_memory, storage


@pytest.fixture
def cell(tmp_path):
  folder = tmp_path / "out" / "cells" / "a-n2-s0"
  folder.mkdir(parents=True)
  return folder


@pytest.fixture
def memory_dir(tmp_path):
  (tmp_path / "memory").mkdir()
  return str(tmp_path / "memory")


def stopped(cell, memory_dir):
  """A run that wrote something and was killed; returns its memory."""
  claimed = live_memory.LiveMemory(cell, memory_dir, resume=False)
  claimed.write_running({"worker": 2, "shard": 1})
  (claimed.folder / "shard-0").mkdir()
  (claimed.folder / "shard-0" / "messages").write_text("log")
  for party in ("worker-0", "peer-0", "counter-0"):
    (claimed.folder / f"{party}.pid").write_text("0 0")
  claimed.close()
  return claimed.folder


def resume(cell, memory_dir):
  claimed = live_memory.LiveMemory(cell, memory_dir, resume=True)
  claimed.close()
  return claimed


def test_a_run_goes_on_in_its_own_memory(cell, memory_dir, tmp_path):
  memory = stopped(cell, memory_dir)
  assert memory.stat().st_mode & 0o777 == 0o700
  (tmp_path / "other").mkdir()
  claimed = resume(cell, str(tmp_path / "other"))
  assert (claimed.folder, claimed.is_resumed) == (memory, True)
  assert claimed.replaced == {"worker": 2, "shard": 1}
  assert (memory / "shard-0" / "messages").exists()
  claimed.remove()
  assert not memory.exists()
  assert live_memory.read_running(cell) is None


def test_a_copy_does_not_take_the_memory_of_the_original(cell, memory_dir):
  memory = stopped(cell, memory_dir)
  copy = shutil.copytree(cell, cell.with_name("copy"))
  claimed = resume(copy, memory_dir)
  assert claimed.folder != memory
  assert not claimed.is_resumed
  live_memory.remove_leftover(copy)
  assert resume(cell, memory_dir).is_resumed


def test_what_was_moved_takes_its_memory_with_it(cell, memory_dir):
  memory = stopped(cell, memory_dir)
  claimed = resume(cell.rename(cell.with_name("moved")), memory_dir)
  assert (claimed.folder, claimed.is_resumed) == (memory, True)


def test_a_new_run_in_an_old_place_begins_with_nothing(cell, memory_dir):
  memory = stopped(cell, memory_dir)
  claimed = live_memory.LiveMemory(cell, memory_dir, resume=False)
  assert claimed.folder == memory
  assert sorted(p.name for p in memory.iterdir()) == ["lock", "owner.json"]
  claimed.close()
  assert not resume(cell, memory_dir).is_resumed  # running.json is of the other


def test_memory_that_is_in_use_is_not_taken(cell, memory_dir, monkeypatch):
  monkeypatch.setattr(live_memory, "_TIMEOUT", 0.1)
  claimed = live_memory.LiveMemory(cell, memory_dir, resume=False)
  for again in (True, False):
    with pytest.raises(ValueError, match="is held by another process"):
      live_memory.LiveMemory(cell, memory_dir, resume=again)
  claimed.close()


def precious(folder):
  folder.mkdir(parents=True)
  (folder / "thesis.txt").write_text("years of work")
  return str(folder)


def name_of(tmp_path, name):
  return tmp_path / name.replace("UID", str(os.getuid()))


MINE = "asgd-UID-0123456789ab"


@pytest.mark.parametrize(
  "make, why",
  [
    (lambda p: precious(p / "home"), "its name is not"),
    (lambda p: precious(name_of(p, MINE)), "it holds thesis.txt, which no run"),
    (lambda p: str(Path(precious(name_of(p, MINE + "/shard-0"))).parent),
     "it holds shard-0/thesis.txt"),
    (lambda p: precious(name_of(p, "asgd-4242-0123456789ab")),
     "it is no folder of this user's"),
    (lambda p: precious(p / "x") + "/../" + "x", "its name is not"),
  ],
)
def test_a_folder_that_is_no_memory_is_left_alone(cell, tmp_path, make, why):
  memory = make(tmp_path)
  held = {"driver": 1, "memory": memory, "token": "t", "replaced": {}}
  storage.write_json(cell / "running.json", storage.sealed(held))
  again = lambda cell: resume(cell, str(tmp_path))  # noqa: E731
  for call in (live_memory.read_running, live_memory.remove_leftover, again):
    with pytest.raises(ValueError, match=f"running.json is not what.*{why}"):
      call(cell)
  assert list(Path(memory).rglob("thesis.txt"))


def test_a_link_is_no_memory(cell, tmp_path):
  link = name_of(tmp_path, MINE)
  link.symlink_to(precious(tmp_path / "home"))
  held = {"driver": 1, "memory": str(link), "token": "t", "replaced": {}}
  storage.write_json(cell / "running.json", storage.sealed(held))
  with pytest.raises(ValueError, match="it is no folder of this user's"):
    live_memory.read_running(cell)


@pytest.mark.parametrize(
  "text",
  [
    *("", "{}", "[]", "nonsense", '{"driver": 1}', '{"memory": "/x"}'),
    '{"driver": 1, "memory": "/x", "token": "", "replaced": {}}',
  ],
)
def test_what_is_not_what_a_run_wrote_is_one_line(cell, text):
  (cell / "running.json").write_text(text)
  with pytest.raises(ValueError, match="running.json is not what a run wrote"):
    live_memory.read_running(cell)


@pytest.mark.parametrize(
  "read", [live_memory.read_running, live_memory.remove_leftover]
)
def test_a_reader_does_not_create_a_memory_that_the_run_removes_meanwhile(
  cell, memory_dir, monkeypatch, read
):
  """`asgd chaos` reads running.json while the run ends."""
  memory, hold_folder = stopped(cell, memory_dir), safe_files.hold_folder

  def remove_first(path, **options):
    shutil.rmtree(path)
    return hold_folder(path, **options)

  monkeypatch.setattr(safe_files, "hold_folder", remove_first)
  read(cell)
  assert not memory.exists()


def test_a_running_json_that_a_run_removes_meanwhile_is_no_mistake(
  cell, memory_dir, monkeypatch
):
  stopped(cell, memory_dir)
  read = storage.read_sealed

  def read_late(path):
    path.unlink()
    return read(path)

  monkeypatch.setattr(storage, "read_sealed", read_late)
  assert live_memory.read_running(cell) is None


def test_a_memory_that_is_gone_is_no_mistake(cell, memory_dir):
  memory = stopped(cell, memory_dir)
  shutil.rmtree(memory)
  assert live_memory.read_running(cell).memory == memory
  claimed = resume(cell, memory_dir)
  assert not claimed.is_resumed
  assert claimed.replaced == {"worker": 2, "shard": 1}


@pytest.mark.parametrize("resumes", [False, True])
def test_a_link_that_appears_before_the_folder_is_made_empties_nothing(
  cell, memory_dir, tmp_path, resumes, monkeypatch
):
  home, make = Path(precious(tmp_path / "home")), os.mkdir

  def race(path, *arguments, **options):
    if Path(path).name.startswith("asgd-"):
      os.symlink(home, path)  # by another user, after all was checked
    make(path, *arguments, **options)

  monkeypatch.setattr(os, "mkdir", race)
  with pytest.raises(ValueError, match="cannot be the memory of the run: "):
    live_memory.LiveMemory(cell, memory_dir, resume=resumes)
  assert [path.name for path in home.iterdir()] == ["thesis.txt"]


def test_a_folder_that_takes_the_place_of_a_memory_is_left_alone(
  cell, memory_dir, tmp_path
):
  claimed = live_memory.LiveMemory(cell, memory_dir, resume=False)
  claimed.folder.rename(tmp_path / "aside")
  home = Path(precious(tmp_path / "home"))
  claimed.folder.symlink_to(home)
  claimed.remove()
  claimed.close()
  assert [path.name for path in home.iterdir()] == ["thesis.txt"]
  assert not list((tmp_path / "aside").iterdir())


def test_a_lock_that_is_a_link_is_refused(cell, memory_dir, tmp_path):
  memory = stopped(cell, memory_dir)
  (memory / "lock").unlink()
  (memory / "lock").symlink_to(tmp_path / "made")
  with pytest.raises(ValueError, match="is a symbolic link"):
    resume(cell, memory_dir)
  assert not (tmp_path / "made").exists()


def test_a_file_that_is_written_during_the_removal_is_removed_too(
  cell, memory_dir, monkeypatch
):
  claimed = live_memory.LiveMemory(cell, memory_dir, resume=False)
  claimed.write_running({"worker": 1})
  empty, calls = live_memory._remove_files, []

  def empty_late(folder, *kept):
    empty(folder, *kept)
    calls.append(folder)
    if len(calls) == 1:  # a process that is being killed writes once more
      (claimed.folder / "worker-0-3.message.tmp").write_text("half")

  monkeypatch.setattr(live_memory, "_remove_files", empty_late)
  claimed.remove()
  assert not claimed.folder.exists()
  assert len(calls) == 2
  claimed.close()
