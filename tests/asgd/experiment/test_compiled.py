"""Programs that are kept on disk: where, which, and when not."""

import os
import subprocess
import sys

import jax
import pytest

from asgd.experiment import compiled

NAMES = "JAX_COMPILATION_CACHE_DIR", "PYTHONWARNINGS"
NAMES += ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",)


@pytest.fixture
def place(tmp_path, monkeypatch):
  """The folder of a user who has said nothing."""
  for name in NAMES:
    monkeypatch.setenv(name, "")  # to be as it was in the end
    monkeypatch.delenv(name)
  monkeypatch.setenv("ASGD_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(compiled.warnings, "filterwarnings", lambda *_: None)
  before = {n.lower(): getattr(jax.config, n.lower()) for n in NAMES[::2]}
  yield tmp_path / "cache" / "compiled"
  for name, value in before.items():
    jax.config.update(name, value)


def test_the_folder_is_the_users_alone_and_told_to_children(place):
  assert not compiled.uses_default_folder()
  compiled.keep_programs()
  assert place.stat().st_mode & 0o777 == 0o700
  assert os.environ[NAMES[0]] == str(place) and compiled.uses_default_folder()
  assert jax.config.jax_compilation_cache_dir == str(place)


@pytest.mark.parametrize("named", ["", "/elsewhere"])
def test_a_users_word_is_left_as_it_is(place, monkeypatch, named):
  monkeypatch.setenv(NAMES[0], named)
  compiled.keep_programs()
  assert os.environ[NAMES[0]] == named and not place.exists()
  assert not compiled.uses_default_folder()


def test_a_folder_that_cannot_be_made_is_done_without(place):
  place.parent.mkdir()
  place.symlink_to(place.parent)
  compiled.keep_programs()
  assert NAMES[0] not in os.environ


def test_the_oldest_programs_are_removed(place, monkeypatch):
  place.mkdir(parents=True)
  for age, name in enumerate("abc"):
    (place / name).write_bytes(bytes(10))
    os.utime(place / name, (1000 - age, 1000 - age))
  monkeypatch.setattr(compiled, "_MAX_BYTES", 25)
  compiled.keep_programs()
  assert sorted(path.name for path in place.iterdir()) == ["a", "b"]


@pytest.mark.process
def test_programs_that_another_command_removes_meanwhile(place, monkeypatch):
  place.mkdir(parents=True, mode=0o700)
  for name in ("removed", "kept"):
    (place / name).write_bytes(bytes(100))
  entries = [*os.scandir(place)]
  (place / "removed").unlink()
  monkeypatch.setattr(compiled.os, "scandir", lambda _: entries)
  compiled.keep_programs()
  assert os.environ[NAMES[0]] == str(place)


def test_the_next_process_reads_what_one_has_compiled(place):
  code = """
import jax
from asgd.experiment import compiled
compiled.keep_programs()
read = []
jax.monitoring.register_event_listener(lambda name, **_: read.append(name))
print(jax.jit(lambda x: 3 * x + 1)(2.0))
print("/jax/compilation_cache/cache_hits" in read)
"""
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  said = [
    subprocess.run(
      [sys.executable, "-c", code],
      capture_output=True,
      text=True,
      check=True,
      env=environment,
    ).stdout.split()
    for _ in range(2)
  ]
  assert said == [["7.0", "False"], ["7.0", "True"]]
