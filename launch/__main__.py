"""The command `asgd`: lists the commands, or runs the named one.

In a checkout, `python -m launch.train ...` is the same as `asgd train ...`.
`asgd train digits` means --config=digits, for commands that take a config.
"""

import ast
import runpy
import sys
from pathlib import Path

import asgd
from asgd import output

COMMANDS = (  # in the order of the list that --help prints
  *("train", "replay", "chaos", "compare", "reproduce", "timeline"),
  *("plan", "draw_schedule", "bench"),
)
_OF_CONFIG = "train", "chaos", "plan"  # their first word is --config
_USAGE_ERROR = 2  # exit status


def summary(name: str) -> str:
  """Returns the first line of a command's docstring, without importing it."""
  here = Path(__file__).parent
  folder = here / name
  path = folder / "__main__.py" if folder.is_dir() else here / f"{name}.py"
  docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
  return docstring.partition("\n")[0]


def _help() -> str:
  """Returns the text of `asgd --help`."""
  width = max(map(len, COMMANDS))
  lines = [f"asgd {name.ljust(width)}  {summary(name)}" for name in COMMANDS]
  lines.append(
    "\nEach takes --help; in a checkout, python -m launch.NAME is the same."
    "\nasgd --list lists recipes, schedules, engines, models and datasets."
  )
  return "\n".join(lines)


def _check(name: str) -> None:
  """Raises ValueError for an unknown command."""
  if name not in COMMANDS:
    from asgd import names  # imports JAX, which --help does not need

    names.check("command", name, COMMANDS)


@output.ends_with_its_reader()
def main() -> None:
  """Runs the named command with the other words as its command line."""
  name, *words = sys.argv[1:] or ["--help"]
  if name in ("--help", "-h", "--helpfull", "help"):
    print(_help())
    return
  if name == "--version":
    print(f"asgd {asgd.__version__}")
    return
  if name == "--list":
    name, words = "train", ["--list", *words]
  try:
    _check(name)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(_USAGE_ERROR)
  if name in _OF_CONFIG and words and not words[0].startswith("-"):
    words[0] = f"--config={words[0]}"
  sys.argv[1:] = words
  runpy.run_module(f"{__package__}.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
