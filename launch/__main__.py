"""The command `asgd`: lists the commands, or runs the named one.

In a checkout, `python -m launch.train ...` is the same as `asgd train ...`.
`asgd train digits` means --config=digits, for commands that take a config.
"""

import runpy
import sys

import asgd
from asgd import output

from . import command_line
from .command_flags import COMMANDS, CONFIG_COMMANDS


def _exact_name(name: str) -> str:
  """Returns the name of a command; fails for an unknown one."""
  from asgd import names  # NumPy below it takes time

  # Other spellings, such as draw-schedule, are accepted.
  name = names.canonical(name, COMMANDS)
  try:
    names.check("command", name, COMMANDS)
  except ValueError as error:
    command_line.fail(str(error))
  return name


@output.exit_on_broken_pipe()
def main() -> None:
  """Runs the named command with the other words as its command line."""
  name, *words = sys.argv[1:] or ["--help"]
  # asgd help train is asgd train --help.
  if name == "help" and words:
    name, words = words[0], ["--help"]
  if name in (*command_line.HELP, "help"):
    print(command_line.overview())
    return
  if name == "--version":
    print(f"asgd {asgd.__version__}")
    return
  # `asgd --list` is a flag of train, which answers it from the catalogue.
  if name == "--list":
    name, words = "train", ["--list", *words]
  name = name if name in COMMANDS else _exact_name(name)
  # The first word after a command of CONFIG_COMMANDS is its config.
  if name in CONFIG_COMMANDS and words and not words[0].startswith("-"):
    words[0] = f"--config={words[0]}"
  # Ends here for --help and for wrong flags, before JAX is imported.
  command_line.dispatch(name, words)
  # The module runs as if `python -m launch.NAME` had started it.
  sys.argv[1:] = words
  runpy.run_module(f"{__package__}.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
