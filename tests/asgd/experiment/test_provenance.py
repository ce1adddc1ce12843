"""What a command was run with."""

import json
import os
import subprocess

from asgd.experiment import provenance


def git(folder, *words):
  settings = "-c", "user.name=n", "-c", "user.email=e@example.com"
  command = ["git", "-C", str(folder), *settings, *words]
  subprocess.run(command, check=True, capture_output=True)


def test_a_commit_says_whether_files_were_modified(tmp_path):
  assert provenance.commit(tmp_path) is None
  git(tmp_path, "init")
  (tmp_path / "file").write_text("one")
  git(tmp_path, "add", "file")
  git(tmp_path, "commit", "-m", "first")
  name = provenance.commit(tmp_path)
  assert len(name) == 40
  (tmp_path / "new").write_text("not known to git")
  assert provenance.commit(tmp_path) == name
  (tmp_path / "file").write_text("two")
  assert provenance.commit(tmp_path) == f"{name}, modified"


def test_the_index_of_a_checkout_is_read_only(tmp_path):
  git(tmp_path, "init")
  (tmp_path / "file").write_text("one")
  git(tmp_path, "add", "file")
  git(tmp_path, "commit", "-m", "first")
  index = tmp_path / ".git" / "index"
  before = index.read_bytes()
  os.utime(tmp_path / "file", (0, 0))  # git status would note the new time
  assert len(provenance.commit(tmp_path)) == 40
  assert index.read_bytes() == before


def test_what_is_known_is_plain():
  said = provenance.describe()
  assert json.loads(json.dumps(said)) == said
  assert said["versions"].keys() >= {"python", "jax", "numpy", "asgd"}
  assert " of " in said["machine"]["cores"]
  assert said["command"].startswith("python ")
