"""Answers --help and refuses wrong flags, before any library is imported.

`dispatch` needs a tenth of a second. It prints --help, and refuses a flag that
the command does not have; the error proposes the nearest flag or key of a
config. With any other command line it returns, and the command imports JAX.
"""

import ast
import difflib
import functools
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from asgd import output

from .command_flags import COMMANDS, CONFIG_COMMANDS, OPTIONAL, Flag, Usage

USAGE_ERROR = 2  # exit status
HELP_ALL = "--help=all", "--helpfull"
HELP = "--help", "-h", "-help", "--helpshort", *HELP_ALL
_FOLDER = Path(__file__).parent
# Columns of --help: longer lines are hard to read on a wide terminal.
_MAX_COLUMNS = 100
_MIN_SIMILARITY = 0.6  # least similarity of a name that an error proposes, of 1
_MAX_DEFAULT_LENGTH = 60  # most characters of a printed default


def summary(name: str) -> str:
  """Returns the first line of a command's docstring, without importing it."""
  return _docstring(name).partition("\n")[0]


def _docstring(name: str) -> str:
  """Returns the docstring of a command's file, which is parsed, not run."""
  folder = _FOLDER / name
  path = folder / "__main__.py" if folder.is_dir() else _FOLDER / f"{name}.py"
  return ast.get_docstring(ast.parse(path.read_text())) or ""


@functools.cache
def catalogue() -> dict[str, Any]:
  """Returns the names and keys of a config, as `listing.write` stored them:
  "list", the lines of `asgd --list`, and "keys", (kind, default) of each."""
  content: dict[str, Any] = json.loads(
    (_FOLDER / "catalogue.json").read_text()
  )
  return content


def fail(text: str, status: int = USAGE_ERROR) -> NoReturn:
  """Prints an error on one line, and exits; the default is the status of wrong
  usage."""
  print(f"error: {text}", file=sys.stderr)
  sys.exit(status)


# --help.


def overview() -> str:
  """Returns the text of `asgd --help`."""
  width = max(map(len, COMMANDS))
  lines = [f"asgd {name.ljust(width)}  {summary(name)}" for name in COMMANDS]
  lines.append(
    "\nEach takes --help; in a checkout, python -m launch.NAME is the same."
    "\nasgd --list lists recipes, schedules, engines, models and datasets."
  )
  return "\n".join(lines)


def _two_columns(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
  """Yields the lines of (name, text) rows in two columns."""
  columns = min(shutil.get_terminal_size().columns, _MAX_COLUMNS)
  rows = list(rows)
  # 32: one long name does not push all texts to the right.
  width = min(max((len(name) for name, _ in rows), default=0), 32) + 4
  for name, text in rows:
    head = f"  {name}".ljust(width)
    # [""]: a name without a text
    wrapped = textwrap.wrap(text, max(columns - width, 24)) or [""]
    # A name wider than its column has a line for itself.
    if len(head) > width:
      yield head
      head = " " * width
    yield (head + wrapped[0]).rstrip()
    yield from (" " * width + line for line in wrapped[1:])


def _flag_help(name: str, flag: Flag) -> tuple[str, str]:
  """Returns (flag with its kind of value, help with the default)."""
  kind, default, text = flag
  if kind is bool:
    return f"--{name}", text
  if kind == OPTIONAL:
    return f"--{name}[=TEXT]", text
  values = {str: "TEXT", int: "N", float: "NUMBER", list: "A,B,..."}
  if kind not in values:  # an enum: its names
    text = f"{text} One of {', '.join(kind)}."
  # An empty list and None say nothing to a reader.
  if default not in (None, []) and f"{default}" not in text:
    default_text = (
      ",".join(default) if isinstance(default, list) else f"{default}"
    )
    text += f" Default: {default_text}."
  return f"--{name}={values.get(kind, 'NAME')}", text


def _key_text(kind: str, default: Any) -> str:
  """Returns the kind and the default of a key of a config."""
  shown = repr(default)
  if len(shown) > _MAX_DEFAULT_LENGTH:
    shown = shown[: _MAX_DEFAULT_LENGTH - 3] + "..."
  return f"{kind}; default {shown}"


def help_text(name: str, *, everything: bool = True) -> str:
  """Returns the text of `asgd NAME --help=all`: usage, description, flags, and
  the keys of a config if the command takes one. Without `everything` the text
  has only the flags and keys of `command.first_screen`, if there are some."""
  command = COMMANDS[name]
  first_screen = () if everything else command.first_screen
  head, _, rest = _docstring(name).partition("\n")
  if first_screen:  # the examples alone
    rest = "\n" + rest.strip("\n").partition("\n\n")[0]
  usage = f"usage: asgd {name} {command.arguments}"
  lines = [usage + " [--FLAG=VALUE ...]" * bool(command.flags), ""]
  lines += [head, rest.rstrip()]
  if command.flags:
    lines += ["", "flags:"]
  if command.config:
    text = "A file with get_config(), or the name of a config of asgd."
    if name in CONFIG_COMMANDS:
      text += f" asgd {name} CONFIG is the same."
    config_help = {
      "--config=FILE": text,
      "--config.KEY=VALUE": "Set a key.",
    }
    lines += _two_columns(config_help.items())
  flags = sorted(
    (flag, row)
    for flag, row in command.flags.items()
    if not first_screen or flag in first_screen
  )
  lines += _two_columns(_flag_help(*item) for item in flags)
  if command.config:
    keys = catalogue()["keys"].items()
    keys = [row for row in keys if not first_screen or row[0] in first_screen]
    lines += ["", f"keys of a config (asgd {name} {command.config} ...):"]
    lines += _two_columns((key, _key_text(*row)) for key, row in keys)
    lines += ["", "asgd --list has the names of recipes, models and data."]
  if first_screen:
    n_more_flags = len(command.flags) - len(flags)
    n_more_keys = len(catalogue()["keys"]) - len(keys)
    lines.append(
      f"asgd {name} --help=all has {n_more_flags} more flags and {n_more_keys}"
      " more keys."
    )
  return "\n".join(lines)


# Mistakes.


def _given_flags(
  words: Sequence[str], command: Usage
) -> Iterator[tuple[str, str]]:
  """Yields (name, word) of each flag on a command line."""
  remaining = iter(words)
  for word in remaining:
    if word == "--":  # the words that follow are no flags
      return
    if not word.startswith("-") or word == "-":  # an argument, such as a folder
      continue
    name, equals, _ = word.lstrip("-").partition("=")
    yield name, word
    kind = command.flags[name][0] if name in command.flags else None
    # --config itself, and each --config.KEY, take a value.
    is_key = command.config and name.partition(".")[0] == "config"
    # "--workers 4": without "=", a flag other than a switch takes the next
    # word. An unknown flag has no kind, and is then reported anyway.
    if not equals and (is_key or kind not in (None, bool, OPTIONAL)):
      next(remaining, None)  # the next word is the value


def _is_known(name: str, command: Usage) -> bool:
  """Whether a command, or absl, has a flag."""
  # absl accepts --noNAME for a switch.
  switch = name.removeprefix("no")
  if name in command.flags or command.flags.get(switch, (None,))[0] is bool:
    return True
  # absl explains an error in --noconfig.x better.
  if "config" in (name.partition(".")[0], switch.partition(".")[0]):
    return True
  if name in ("flagfile", "undefok"):  # absl defines them when it parses
    return True
  # Imported last: absl takes longer than all of this module.
  from absl import app, flags  # --verbosity and others

  app.define_help_flags()
  return name in flags.FLAGS or switch in flags.FLAGS


def closest(name: str, command: Usage) -> str | None:
  """Returns the flag, or the key of a config, that a wrong flag resembles.

  Example:
    >>> closest("wrokers", COMMANDS["train"])
    '--config.workers'
  """
  # The first of two equal spellings stays (`setdefault`), so the command's own
  # flags precede keys of the config.
  spellings = {key: f"--{key}" for key in reversed([*command.flags])}
  if command.config:
    spellings["config"] = "--config"
    # Keys of a config are found by their last part, and by initials: --lr is
    # learning_rate, --bs is batch_size.
    for key in reversed(catalogue()["keys"]):
      last_part = key.rpartition(".")[2]
      initials = "".join(
        part[:1] for part in last_part.split("_") if "_" in last_part
      )
      for spelling in filter(None, (last_part, initials, key)):
        spellings.setdefault(spelling, f"--config.{key}")
  canonical = name.replace("-", "_").lower()
  if canonical in spellings:
    return spellings[canonical]
  similar = difflib.get_close_matches(
    canonical, spellings, n=1, cutoff=_MIN_SIMILARITY
  )
  return spellings[similar[0]] if similar else None


def mistake(name: str, words: Sequence[str]) -> str | None:
  """Returns an error for the first flag that a command does not have."""
  command = COMMANDS[name]
  # Only the first: a later one may be the value of the first.
  for flag, word in _given_flags(words, command):
    if _is_known(flag, command):
      continue
    similar, (_, equals, value) = closest(flag, command), word.partition("=")
    hint = f"did you mean {similar}{equals}{value}? " if similar else ""
    return f"unknown flag {word}; {hint}asgd {name} --help lists all"
  return None


@output.exit_on_broken_pipe()
def dispatch(name: str, words: Sequence[str]) -> None:
  """Ends the process for --help, for --list and for an unknown flag."""
  # After "--" even --help is an argument.
  words_before_dashes = words[: words.index("--")] if "--" in words else words
  if any(word in HELP for word in words_before_dashes):
    print(
      help_text(
        name, everything=any(w in HELP_ALL for w in words_before_dashes)
      )
    )
    sys.exit(0)
  if name == "train" and "--list" in words_before_dashes:
    print("\n".join(catalogue()["list"]))
    sys.exit(0)
  if error := mistake(name, words):
    fail(error)


@output.exit_on_broken_pipe()
def run(main: Callable[..., None], name: str) -> None:
  """Runs a command that has no flags: calls `main` with the words of the
  command line. Such a command needs neither absl nor JAX."""
  words = sys.argv[1:]
  dispatch(name, words)
  if "--" in words:  # the words that follow are no flags
    words.remove("--")
  main(*words)


def dispatch_module(package: str) -> None:
  """Calls `dispatch` if Python was started as `python -m PACKAGE.COMMAND`."""
  # sys.argv does not have the module's name yet; Python's own command line
  # has.
  before, _, words = " ".join(sys.orig_argv).partition(f" -m {package}.")
  name = words.partition(" ")[0]
  if before and name in COMMANDS:
    dispatch(name, sys.argv[1:])
