"""Reads docstrings as they are written here, for mkdocstrings.

A block indented by two spaces, after an empty line, is shown as it stands; and
an `Example:` holds a doctest.
"""

import re

import griffe

_SECTION = re.compile(r"^\w[\w ]*:$")


def as_markdown(text: str) -> str:
  """Returns a docstring whose indented blocks are Markdown's."""
  lines, inside, before = [], False, "text"
  for line in text.splitlines():
    indented = line.startswith("  ")
    if line and not indented:
      inside = False
    elif indented and not before and not _in_section(lines):
      inside = True
    if line == "Example:":
      line = "Examples:"
    lines.append(f"    {line}" if inside and line else line)
    before = line
  return "\n".join(lines)


def _in_section(lines) -> bool:
  """Whether the last line that is not indented begins a section."""
  for number in range(len(lines) - 1, -1, -1):
    line = lines[number]
    if line and not line.startswith(" "):
      below = lines[number + 1 : number + 2]
      return bool(_SECTION.match(line) and below and below[0].startswith(" "))
  return False


class Docstrings(griffe.Extension):
  """Rewrites every docstring that is loaded."""

  def on_object(self, *, obj, **_):
    """Rewrites one."""
    if obj.docstring:
      obj.docstring.value = as_markdown(obj.docstring.value)
