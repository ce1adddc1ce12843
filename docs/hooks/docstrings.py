"""Reads docstrings as they are written here, for mkdocstrings.

A block that is indented without being a section is shown as it stands; an
`Example:` holds a doctest; and what comments say of the fields of a class
becomes its list of attributes.
"""

import re

import griffe

_SECTIONS = {"Args:", "Returns:", "Raises:", "Yields:", "Example:"}
_PROSE = {"References:", "Source:"}
_NO_COMMENT = "&nbsp;"


def as_markdown(text: str) -> str:
  """Returns the docstring with its indented blocks in Markdown."""
  out, kind, before = [], "text", ""
  for line in text.splitlines():
    if line and not line.startswith(" "):
      kind = "section" if line in _SECTIONS else "text"
      kind = "prose" if line in _PROSE else kind
      line = f"**{line}**" if line in _PROSE else line
      out.append("Examples:" if line == "Example:" else line)
    elif line and kind == "prose":
      out += ["", line.strip()] if before.startswith("**") else [line.strip()]
    elif line and kind in ("text", "block"):
      if kind == "text" and before:
        out.append("")
      kind = "block"
      out.append(f"    {line}")
    else:
      out.append(line)
    before = line
  return "\n".join(out)


def fields(cls: griffe.Class) -> list[str]:
  """Returns a line for each field of a class, with its comment; none if no
  field has one."""
  lines, found = cls.lines_collection[cls.filepath], []
  for name, member in cls.members.items():
    if name.startswith("_") or member.is_alias or not member.is_attribute:
      continue
    if "property" in member.labels:
      continue
    _, mark, comment = lines[member.lineno - 1].partition("  # ")
    number = member.lineno
    while mark and number < len(lines) and re.match(r"  +# ", lines[number]):
      comment += " " + lines[number].strip("# ")
      number += 1
    found.append(f"    {name}: {comment or _NO_COMMENT}")
  return found if any(_NO_COMMENT not in line for line in found) else []


class Docstrings(griffe.Extension):
  """Rewrites every docstring that is loaded."""

  def on_object(self, *, obj, **_):
    """Rewrites one."""
    if obj.docstring:
      obj.docstring.value = as_markdown(obj.docstring.value)
      if obj.is_class and (lines := fields(obj)):
        text = "\n".join(["", "", "Attributes:", *lines])
        obj.docstring.value += text
