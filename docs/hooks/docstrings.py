"""Converts this project's docstrings for mkdocstrings.

An indented block that is not a section becomes a code block, `Example:` becomes
a section of examples, and the comments behind the fields of a class become its
list of attributes.
"""

import re

import griffe

_SECTIONS = {"Args:", "Returns:", "Raises:", "Yields:", "Example:"}
_PROSE = {"References:", "Source:"}
_NO_COMMENT = "&nbsp;"


def as_markdown(text: str) -> str:
  """Returns a docstring as Markdown that mkdocstrings reads."""
  out, kind, previous = [], "text", ""  # kind: of the block of the last line
  for line in text.splitlines():
    if line and not line.startswith(" "):
      kind = "section" if line in _SECTIONS else "text"
      kind = "prose" if line in _PROSE else kind
      line = f"**{line}**" if line in _PROSE else line
      out.append("Examples:" if line == "Example:" else line)
    elif line and kind == "prose":
      out += ["", line.strip()] if previous.startswith("**") else [line.strip()]
    elif line and kind in ("text", "block"):
      if kind == "text" and previous:
        out.append("")
      kind = "block"
      out.append(f"    {line}")
    else:
      out.append(line)
    previous = line
  return "\n".join(out)


def fields(cls: griffe.Class) -> list[str]:
  """Returns a line "name: comment" for each public field of a class; [] if no
  field has a comment."""
  lines, descriptions = cls.lines_collection[cls.filepath], []
  for name, member in cls.members.items():
    if name.startswith("_") or member.is_alias or not member.is_attribute:
      continue
    if "property" in member.labels:
      continue
    _, mark, comment = lines[member.lineno - 1].partition("  # ")
    index = member.lineno  # of the next line: a comment may have several
    while mark and index < len(lines) and re.match(r"  +# ", lines[index]):
      comment += " " + lines[index].strip("# ")
      index += 1
    descriptions.append(f"    {name}: {comment or _NO_COMMENT}")
  has_comment = any(_NO_COMMENT not in line for line in descriptions)
  return descriptions if has_comment else []


class Docstrings(griffe.Extension):
  """The extension of griffe that converts every loaded docstring."""

  def on_object(self, *, obj, **_):
    """Converts the docstring of an object, and adds a class's attributes."""
    if obj.docstring:
      obj.docstring.value = as_markdown(obj.docstring.value)
      if obj.is_class and (lines := fields(obj)):
        text = "\n".join(["", "", "Attributes:", *lines])
        obj.docstring.value += text
