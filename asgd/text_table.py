"""Tables as plain text."""


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
    first, *others = (
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    lines.append("  ".join([first, *others]).rstrip())
  lines.insert(1, "-" * max(map(len, lines)))
  return "\n".join(lines) + "\n"
