"""Tables as plain text."""

from collections.abc import Iterable


def format_table(header: list[str], rows: list[list[str]]) -> str:
  """Returns a plain text table; the first column is left-aligned.

  Example:
    >>> print(format_table(["name", "n"], [["a", "10"], ["longer", "3"]]))
    name     n
    ----------
    a       10
    longer   3
    <BLANKLINE>
  """
  table = [header, *rows]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines = []
  for row in table:
    cells = list(map(str.rjust, row, widths))
    cells[0] = row[0].ljust(widths[0])
    lines.append("  ".join(cells).rstrip())
  lines.insert(1, "-" * max(map(len, lines)))
  return "\n".join(lines) + "\n"


def format_markdown(
  header: Iterable[str], rows: Iterable[Iterable[object]]
) -> str:
  """Returns a table of Markdown.

  Example:
    >>> print(format_markdown(["name", "n"], [["a|b", 10]]))
    | name | n |
    | --- | --- |
    | a\\|b | 10 |
  """
  lines = [list(header), *map(list, rows)]
  lines.insert(1, ["---"] * len(lines[0]))
  escaped = ([str(x).replace("|", "\\|") for x in line] for line in lines)
  return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
