"""A symbolic link leads no write and no removal elsewhere."""

import ast
import os

import kit
import pytest

from asgd import safe_files


@pytest.fixture
def mine(tmp_path):
  """A file that is not to be touched."""
  path = tmp_path / "thesis.txt"
  path.write_text("years of work")
  yield path
  assert path.read_text() == "years of work"


@pytest.mark.parametrize("name", ["figure.svg", "figure.svg.tmp"])
def test_a_link_in_the_place_of_a_file_is_replaced(mine, tmp_path, name):
  (tmp_path / name).symlink_to(mine)
  path = tmp_path / "figure.svg"
  safe_files.write(path, "<svg/>")
  assert path.read_text() == "<svg/>"
  assert not path.is_symlink()
  assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, mine.name]


def test_a_write_that_fails_leaves_what_was_there(mine):
  with pytest.raises(KeyboardInterrupt), safe_files.replacing(mine) as file:
    file.write(b"half")
    raise KeyboardInterrupt
  assert [path.name for path in mine.parent.iterdir()] == [mine.name]


@pytest.mark.parametrize(
  "open_file",
  [
    safe_files.appending,
    lambda path: safe_files.truncate(path, 0),
    lambda path: safe_files.descriptor(path, os.O_RDWR | os.O_CREAT),
  ],
)
def test_a_file_that_grows_is_not_reached_by_a_link(mine, open_file):
  link = mine.with_name("link")
  link.symlink_to(mine)
  with pytest.raises(ValueError, match="link is a symbolic link"):
    open_file(link)


def test_a_file_that_grows_keeps_what_it_has(tmp_path):
  for text in (b"one ", b"two"):
    with safe_files.appending(tmp_path / "log") as file:
      file.write(text)
  safe_files.truncate(tmp_path / "log", 5)
  assert (tmp_path / "log").read_text() == "one t"


@pytest.mark.parametrize(
  "make", [safe_files.make_folder, safe_files.make_private]
)
def test_a_folder_is_no_link_and_no_file(mine, make):
  folder, link = mine.parent / "a" / "b", mine.parent / "link"
  for _ in range(2):
    make(folder)
  assert folder.is_dir()
  for target in (folder, mine, mine.parent / "nothing"):
    link.symlink_to(target)
    with pytest.raises(ValueError, match="link is a symbolic link"):
      make(link)
    link.unlink()
  with pytest.raises(ValueError, match="is a file, but a folder is needed"):
    make(mine)


def test_a_private_folder_is_this_users_alone(tmp_path, monkeypatch):
  folder = tmp_path / "memory"
  folder.mkdir(mode=0o755)
  safe_files.make_private(folder)
  assert folder.stat().st_mode & 0o777 == 0o700
  monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
  with pytest.raises(ValueError, match="is a folder of another user"):
    safe_files.make_private(folder)


# Calls that write to a path, by the function's name; and those that are of a
# module.
_WRITES = {
  *("write_text", "write_bytes", "savefig", "makedirs"),
  *("copy2", "copyfile", "copytree"),
}
_OF_MODULES = {"shutil": {"copy", "move"}, "os": {"truncate"}}
# What the files are in: folders that this process has just made for itself, or
# a memory, which no other user can open. (TensorBoard's and JAX's profiles are
# theirs to write.)
_OWN_FOLDERS = {
  "asgd/experiment/ray_runtime.py": {"copytree", "copy"},
  "asgd/live/processes.py": {"write_text"},
  "asgd/live/slots.py": {"open"},
  "asgd/live/world/storage.py": {"write_bytes"},
  "launch/train.py": {"makedirs"},
}


def _writes(tree):
  """Yields the names of calls by which a module may write through a link."""
  for node in ast.walk(tree):
    if not isinstance(node, ast.Call):
      continue
    called = node.func
    name = getattr(called, "attr", getattr(called, "id", ""))
    of = getattr(getattr(called, "value", None), "id", None)
    texts = [x.value for x in node.args if isinstance(x, ast.Constant)]
    modes = [x for x in texts if isinstance(x, str) and len(x) <= 3]
    if name == "open" and any(set("wa+") & set(mode) for mode in modes):
      yield name
    if name == "mkdir" and any(key.arg == "exist_ok" for key in node.keywords):
      yield name
    if name in _WRITES | _OF_MODULES.get(of, set()):
      yield name


def test_every_writer_of_results_uses_this_module():
  found = {}
  for room in ("asgd", "pipeline", "launch"):
    for path in sorted((kit.ROOT / room).rglob("*.py")):
      name = path.relative_to(kit.ROOT).as_posix()
      calls = set(_writes(ast.parse(path.read_text())))
      calls -= _OWN_FOLDERS.get(name, set())
      if calls and name != "asgd/safe_files.py":
        found[name] = calls
  # A download has a name of its own, which is not there yet (mode "xb").
  assert found == {"asgd/data/download.py": {"mkdir"}}


@pytest.mark.parametrize("name", ["out.csv", "out.csv.tmp"])
def test_a_folder_in_the_place_of_a_file_is_named_with_the_remedy(
  tmp_path, name
):
  (tmp_path / name).mkdir()
  with pytest.raises(OSError, match=f"remove it: '.*/{name}'"):
    safe_files.write(tmp_path / "out.csv", "a")
