"""Lists the commands: python -m launch."""

import ast
from pathlib import Path

_COMMANDS = (
  *("train", "replay", "chaos", "compare", "reproduce", "timeline"),
  *("plan", "draw_schedule", "bench"),
)


def _summary(name: str) -> str:
  """The first line of a command's docstring."""
  here = Path(__file__).parent
  folder = here / name
  path = folder / "__main__.py" if folder.is_dir() else here / f"{name}.py"
  docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
  return docstring.partition("\n")[0]


def main() -> None:
  """Prints each command with what it does."""
  width = max(map(len, _COMMANDS))
  for name in _COMMANDS:
    print(f"python -m launch.{name.ljust(width)}  {_summary(name)}")
  print(
    "\nEach takes --help. python -m launch.train --list lists recipes,"
    " schedules,\nengines, models and datasets."
  )


if __name__ == "__main__":
  main()
