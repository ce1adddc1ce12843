"""The command line of every command: values of flags, errors, exit statuses.

A command's `main` is called by `run`, which turns an error of the user into one
line and a status that is not 0.

ml_collections reads --config=FILE and --config.KEY=VALUE; `--config FILE` and
`--config.KEY VALUE` work, too. A VALUE is a Python literal, or else a string. A
KEY may be any that `asgd.experiment.schema` knows, also one that the file does
not have.
"""

import ast
import contextlib
import functools
import gc
import io
import itertools
import logging as std_logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_flags import config_flags as parsers

from asgd import names, output
from asgd.checks import shortened
from asgd.experiment import ENGINES as _ENGINES
from asgd.experiment import (
  code,
  compiled,
  folder,
  overrides,
  schema,
  shipped,
  storage,
)
from asgd.experiment.signals import Signals, Stopped
from asgd.parallel import processes
from asgd.pipeline.engine import PIPELINE

from . import command_line
from .command_flags import COMMANDS, OPTIONAL, TRAINING
from .command_line import USAGE_ERROR

INCOMPLETE = processes.INCOMPLETE  # exit status: a cell has no valid result
ENGINES = {**_ENGINES, "pipeline": PIPELINE}
# Engines with a journal.
LIVE = tuple(name for name, kind in ENGINES.items() if kind.journaled)
_MAX_ERROR_LENGTH = 600  # most characters of a printed error
# -config.KEY=VALUE or --config.KEY=VALUE, as absl reads it.
_OVERRIDE = re.compile(r"-{1,2}config\.([^=]+)")


class Failed(Exception):
  """The command did its work, and the result is a failure (exit status 1)."""


def fail(message: object, status: int = USAGE_ERROR) -> NoReturn:
  """Prints one line on stderr, shortened in its middle, and exits."""
  line = "error: " + " ".join(str(message).split())
  print(shortened(line, _MAX_ERROR_LENGTH), file=sys.stderr)
  sys.exit(status)


def _fail_with_remedy(error: flags.Error | str) -> NoReturn:
  """Fails with the remedy for an error of absl's parser."""
  unread = "ERROR:: Unable to open flagfile:"
  # absl says that the flag does not exist, which would mislead.
  if "flag 'config." in str(error) and "config" in flags.FLAGS:
    error = f"{error}: a config comes first, as --config=configs/digits.py"
  if match := re.match(r"flag (--(\w+)=.*): .*Non-boolean", str(error)):
    error = f"{match[1]}: {match[2]} is on or off; write --{match[2]}, or leave"
    error += " it out"
  # The texts of int() and float().
  not_a_number = r"flag --(\w+)=(.*): (invalid literal|could not convert)"
  if match := re.match(not_a_number, str(error)):
    kind = "a whole number" if match[3] == "invalid literal" else "a number"
    error = f"--{match[1]}={match[2]} must be {kind}, as in --{match[1]}=4"
  fail(str(error).replace(unread, "--flagfile cannot be read:"))


class _ConfigParser(parsers.ConfigFileFlagParser):  # type: ignore[misc]
  """Loads a config file, and leaves overrides, as text, to `overrides`.

  ml_collections would accept only keys of the file, in their types; here the
  valid keys depend on the engines, recipes and models that the config names."""

  def parse(self, path: str) -> ml_collections.ConfigDict:
    """Returns a config of the overridden keys, without values."""
    # A name, such as digits, stands for a shipped config.
    try:
      path = shipped.find(path)
    except ValueError as error:
      fail(error)
    try:
      # The config may import modules of its folder, such as its model.
      code.add_folder(Path(path.split(":")[0]).parent)
      self.config = super().parse(path)
      # If the file reads another one that is missing, this raises its error.
      getattr(self.config, "runs", None)
    except SystemExit as end:
      fail(
        f"--config={path}: the file called sys.exit (status {end.code!r}); its"
        " get_config() must return a config"
      )
    except Exception as error:  # a user's config file may raise anything
      fail(f"--config={path}: {_failure_text(error)}")
    placeholders = ml_collections.ConfigDict()
    # ml_collections accepts an override only for a key of the returned config,
    # so each overridden key gets a placeholder.
    for match in filter(None, map(_OVERRIDE.match, sys.argv[1:])):
      *sections, last_key = match[1].split(".")
      section = placeholders
      # A key a.b.c needs the sections a and a.b.
      for key in sections:
        if not isinstance(section.get(key), ml_collections.ConfigDict):
          section[key] = ml_collections.ConfigDict()
        section = section[key]
      if not isinstance(section.get(last_key), ml_collections.ConfigDict):
        section[last_key] = ml_collections.config_dict.placeholder(str)
    return placeholders


def define_config() -> Any:
  """Defines --config=FILE.py, only once if several commands are imported."""
  if "config" in flags.FLAGS:
    return flags.FLAGS["config"]
  try:  # absl reads a --flagfile at once, and can fail
    holder = config_flags.DEFINE_config_file(
      "config",
      None,
      "Python file with get_config(); --config.KEY=VALUE overrides its keys.",
      lock_config=False,
    )
  except flags.Error as error:
    _fail_with_remedy(error)
  # absl has no other way to give the parser of a config file.
  flags.FLAGS["config"].parser = _ConfigParser("config", lock_config=False)
  return holder


def _literal(text: str) -> Any:
  """Returns the value of a Python literal, or else the text."""
  try:
    # "0.1", "(1, 2)" and "None" are values; "digits" stays a text.
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    # The spellings of JSON and of shells.
    return {"true": True, "false": False}.get(text, text)


def _overrides() -> dict[str, str]:
  """Returns KEY -> VALUE, as text, of each --config.KEY=VALUE in order."""
  return config_flags.get_override_values(flags.FLAGS["config"])


def config_name() -> str:
  """Returns the config file's name, without folder and suffix."""
  filename = config_flags.get_config_filename(flags.FLAGS["config"])
  # --config=FILE:ARG passes ARG to get_config.
  return Path(filename.split(":")[0]).stem


def load_config(example: str, engine: str | None = None) -> schema.Resolved:
  """Returns the resolved config of the flags; `engine`, if not None, replaces
  that of all runs. Raises ValueError for a wrong key, and without a config; the
  error then names an `example`."""
  if not has_config():
    raise ValueError(f"no --config; try --config={example}")
  # The config that the parser stored: the flag itself has placeholders only.
  parser: Any = flags.FLAGS["config"].parser  # a `_ConfigParser`
  config = parser.config
  # The engine first: which keys are valid depends on it.
  if engine is not None:
    config = overrides.use_engine(config, engine, ENGINES)
  values = {key: _literal(text) for key, text in _overrides().items()}
  config = overrides.override(config, values, ENGINES)
  return schema.resolve(config, ENGINES)


def has_config() -> bool:
  """Whether --config was given."""
  return flags.FLAGS["config"].value is not None


def config_words() -> list[str]:
  """Returns --config and its overrides, as they were given; [] without."""
  if not has_config():
    return []
  filename = config_flags.get_config_filename(flags.FLAGS["config"])
  overrides = _overrides().items()
  return [
    f"--config={filename}",
    *(f"--config.{key}={text}" for key, text in overrides),
  ]


def training_command(suffix: str) -> tuple[Path, list[str]]:
  """Returns (folder, command line of asgd train with this command's flags).

  The folder is --workdir, or the next free runs/CONFIG-SUFFIX-NNN."""
  command = [sys.executable, "-m", f"{__package__}.train", *config_words()]
  # Defaults and given values alike, as one or several words of a command line.
  for name in TRAINING:
    if name != "workdir" and flags.FLAGS[name].value is not None:
      command += flags.FLAGS[name].serialize().splitlines()
  default_folder = next_free_folder(Path("runs"), f"{config_name()}-{suffix}")
  folder = Path(flags.FLAGS["workdir"].value or default_folder)
  # The output of training would mix with the JSON object.
  command += ["--quiet"] * (is_quiet() or _prints_json())
  return folder, [*command, f"--workdir={folder}"]


def next_free_folder(parent: Path, name: str) -> Path:
  """Returns the first of PARENT/NAME-001, -002, ... that does not exist."""
  numbered = (parent / f"{name}-{n:03d}" for n in itertools.count(1))
  return next(folder for folder in numbered if not folder.exists())


# A name of an enum may be written in other spellings, such as dana-zero.
class _NameParser(flags.EnumParser):
  """A parser of one of several names, also in other spellings."""

  def parse(self, argument: str) -> str:
    """Returns the exact name; ValueError for an unknown one."""
    return super().parse(names.canonical(argument, self.enum_values))


def define(name: str) -> dict[str, Any]:
  """Defines the flags of a command, and --config if it takes one."""
  command = COMMANDS[name]
  if command.config:
    define_config()
  makers: dict[Any, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    list: flags.DEFINE_list,
    OPTIONAL: _define_optional,
  }
  holders: dict[str, Any] = {}
  for key, (kind, default, text) in command.flags.items():
    if key in flags.FLAGS:  # defined by another command of this process
      holders[key] = flags.FLAGS[key]
    elif kind in makers:
      holders[key] = makers[kind](key, default, text)
    # Any other kind has the names of an enum.
    else:
      holders[key] = flags.DEFINE_enum(key, default, list(kind), text)
      flags.FLAGS[key].parser = _NameParser(list(kind))
  return holders


def in_range(
  name: str, value: Any, least: Any, most: Any, *, or_zero: bool = False
) -> Any:
  """Returns the value of a flag; ValueError, with the range, if it is not in
  it. A NaN is in no range."""
  if least <= value <= most or (or_zero and value == 0):
    return value
  limit_texts = (
    f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in (least, most)
  )
  limits = f"{'0, or ' * or_zero}from {' to '.join(limit_texts)}"
  raise ValueError(f"--{name} must be {limits}, not {value!r}")


def _define_optional(
  name: str, default: str | None, text: str
) -> flags.FlagHolder[Any]:
  """Defines a text flag that may stand alone: an OPTIONAL one."""
  # With boolean=True absl accepts the flag alone; its value is then "true".
  parser: flags.ArgumentParser[str] = flags.ArgumentParser()
  serializer: flags.ArgumentSerializer[str] = flags.ArgumentSerializer()
  flag = flags.Flag(parser, serializer, name, default, text, boolean=True)
  return flags.DEFINE_flag(flag)


def _failure_text(error: Exception) -> str:
  """Returns an error's type and message; of a traceback, its last line."""
  text, error_type = str(error).strip(), type(error).__name__
  # An error of a user's config file, which ran while absl parsed the flags.
  if "Traceback (most recent call last)" in text:
    return text.splitlines()[-1]
  return f"{error_type}: {text}" if text else error_type


def _check_config(argv: Sequence[str]) -> None:
  """Fails for a second --config, and for --config.KEY without a full key."""
  # ml_collections would take the last one in silence.
  files = [text for text in argv if re.fullmatch(r"--?config(=.*)?", text)]
  if len(files) > 1:
    fail(f"--config is given {len(files)} times: give one file")
  for text in argv:
    match = re.match(r"--?(no)?config\.[^=]*", text)
    # It would fail later, with an error about its own placeholders.
    if match and not re.fullmatch(r"--?config(\.[^.\[\]]+)+", match[0]):
      fail(f"{text} has no valid key; write --config.KEY=VALUE")


def _parse(name: str, argv: Sequence[str]) -> Sequence[str]:
  """Returns the arguments that are no flags; fails with one line."""
  command_line.dispatch(name, argv[1:])
  _check_config(argv)
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    _fail_with_remedy(error)
  except BrokenPipeError:
    raise  # the reader of --help closed the output, see `asgd.output`
  except Exception as error:  # ml_collections raises several for a wrong key
    fail(f"--config: {_failure_text(error)}")


# The object that --json prints. One command runs in a process, so it is global.
_results: dict[str, Any] = {}


def add_json(**results: Any) -> None:
  """Adds results to the object that --json prints when the command ends."""
  _results.update(results)


def append_json(key: str, result: Any) -> None:
  """Adds a result to a list of the object that --json prints."""
  _results.setdefault(key, []).append(result)


def is_quiet() -> bool:
  """Whether --quiet was given to a command that has it."""
  return "quiet" in flags.FLAGS and bool(flags.FLAGS["quiet"].value)


def _prints_json() -> bool:
  """Whether --json was given. That of `bench` is a file, which it writes."""
  return "json" in flags.FLAGS and flags.FLAGS["json"].value is True


@contextlib.contextmanager
def _stdout() -> Iterator[None]:
  """With --json, redirects the block's output to stderr, and prints the
  published results at its end, also after an error. --quiet drops the
  output."""
  as_json = _prints_json()
  if not as_json and not is_quiet():
    yield
    return
  # A test may run several commands in one process.
  _results.clear()
  # --quiet discards even what --json would move to stderr.
  redirected = io.StringIO() if is_quiet() else sys.stderr
  try:
    with contextlib.redirect_stdout(redirected):
      yield
  finally:
    if as_json and _results:
      print(storage.to_json(_results))


@output.exit_on_broken_pipe()
def run(main: Callable[..., None], name: str) -> None:
  """Parses the flags of a command and runs main with its other arguments.

  A ValueError or OSError is the user's error and becomes one line, unless
  ASGD_TRACEBACK is set in the environment. Other exceptions keep their
  traceback.
  """
  max_words = COMMANDS[name].max_words

  def run_main(argv: Sequence[str]) -> None:
    """Runs `main`; each kind of end has its message and its exit status."""
    if argv[max_words + 1 :]:
      word, takes_config = argv[max_words + 1], "config" in flags.FLAGS
      hint = f"; for a config write --config={word}" if takes_config else ""
      fail(f"unexpected argument {word!r}; flags start with --{hint}")
    compiled.keep_programs()  # the cache of compiled programs
    try:
      with _stdout():
        main(*argv[1:])
    except (Stopped, Failed) as end:
      Signals.ending = True  # workers that end now do not report it
      print(end, file=sys.stderr)
      # 128 + the signal's number, as a shell reports it; 1 for a failed check.
      sys.exit(128 + end.signal_number if isinstance(end, Stopped) else 1)
    except folder.Incomplete as end:
      Signals.ending = True
      fail(end, INCOMPLETE)
    except KeyboardInterrupt:
      print(
        "interrupted; run the same command again to resume from the last save",
        file=sys.stderr,
      )
      sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
      raise  # see `asgd.output`
    except (ValueError, OSError) as error:
      if os.environ.get("ASGD_TRACEBACK"):  # for developers of asgd
        raise
      fail(error)

  # Libraries would log a failure before our one line about it.
  logging.set_verbosity(logging.FATAL)
  std_logging.getLogger("asyncio").setLevel(std_logging.CRITICAL)
  streams: tuple[Any, ...] = sys.stdout, sys.stderr  # None: it is closed
  for stream in streams:
    if stream is not None:
      # Line buffering keeps the order of lines if both go to one file.
      stream.reconfigure(errors="replace", line_buffering=True)
  # Imports are done: Ctrl-C is a KeyboardInterrupt again.
  signal.signal(signal.SIGINT, signal.default_int_handler)  # see __init__
  if not gc.isenabled():
    # The modules are never freed: exempt them from every later collection.
    gc.freeze()
    gc.enable()
  app.run(run_main, flags_parser=functools.partial(_parse, name))
