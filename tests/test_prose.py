"""Prose keeps to the field's words: one mark in 1,000 words at most."""

import pathlib

import pytest

from tests import prose

ROOT = pathlib.Path(__file__).parents[1]
MOST = 1.0  # marks in 1,000 words
ALLOWED = 2  # marks in a folder of few words


def folders() -> dict[str, list[pathlib.Path]]:
  """Returns folder -> its pages and modules."""
  roots = ["docs", "asgd", "pipeline", "launch", "configs", "examples"]
  files = list(prose.files([ROOT / root for root in roots]))
  files += sorted(ROOT.glob("*.md"))
  folders = {}
  for path in files:
    name = path.relative_to(ROOT).parent.as_posix()
    folders.setdefault(name, []).append(path)
  return folders


@pytest.mark.parametrize("folder, files", folders().items())
def test_folder_keeps_to_plain_words(folder, files):
  marks, words = prose.count(files)
  assert len(marks) <= max(ALLOWED, MOST * words / 1000), "\n".join(marks)


@pytest.mark.parametrize("folder, files", folders().items())
def test_docstrings_and_comments_name_every_actor(folder, files):
  unnamed = [
    f"{path}:{number}: {line}"
    for path in files
    for number, line, pattern in prose.prose(path)
    if pattern is prose.RELATIVE and pattern.search(line)
  ]
  assert not unnamed, "\n".join(unnamed)


def test_marks_of_a_module(tmp_path):
  path = tmp_path / "module.py"
  path.write_text('''"""What a place is.

Nobody reads `place` as prose.

>>> place = 1
"""

place = "place"  # it goes on


def fail():
  raise ValueError(f"{place}: a holder is gone")
''')
  marks, words = prose.count([path])
  found = sorted(mark.split(": ")[1].split(" in ")[0] for mark in marks)
  assert found == sorted(map(repr, [
      "what a", "What", "place", "nobody", "goes on", "holder", "gone"]))
  assert words == 17


def test_marks_of_a_page_leave_code_out(tmp_path):
  path = tmp_path / "page.md"
  path.write_text(
    "A worker is told, in place.\n\n```bash\nasgd tells\n```\n\n`tells`\n"
  )
  marks, words = prose.count([path])
  assert [mark.split(": ")[1][:9] for mark in marks] == ["'is told'"]
  assert words == 7
