"""What every command does with its command line: parse it, and end with one
clear line and a status that is not 0 when something is wrong.

--config=FILE and --config.KEY=VALUE are read by ml_collections, as
`--config FILE` and `--config.KEY VALUE` are. A value is a Python literal, or
else a string. A KEY may be any that `asgd.experiment.schema` knows, whether the
file has it or not.
"""

import ast
import gc
import itertools
import logging as std_logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_flags import config_flags as parsers

from asgd import output
from asgd.checks import shortened
from asgd.experiment import ENGINES as _OWN
from asgd.experiment import (
  code,
  compiled,
  folder,
  overrides,
  schema,
  shipped,
)
from asgd.experiment.signals import Signals, Stopped
from asgd.parallel import processes
from pipeline.engine import PIPELINE

USAGE_ERROR = 2  # exit status
GIVEN = "true"  # value of an optional text that is not given, as absl has it
INCOMPLETE = processes.INCOMPLETE  # the same: cells without a valid result
ENGINES = {**_OWN, "pipeline": PIPELINE}
LIVE = tuple(name for name, kind in ENGINES.items() if kind.journaled)
_LONGEST = 600  # characters of an error
_OVERRIDE = re.compile(r"-{1,2}config\.([^=]+)")


class Failed(Exception):
  """What was asked for was done, and the answer is no."""


def fail(message: object, status: int = USAGE_ERROR) -> NoReturn:
  """Prints one line on stderr, without the middle of a long one, and exits."""
  line = "error: " + " ".join(str(message).split())
  print(shortened(line, _LONGEST), file=sys.stderr)
  sys.exit(status)


def _fail_of_flags(error: flags.Error | str) -> NoReturn:
  unread = "ERROR:: Unable to open flagfile:"
  if "flag 'config." in str(error) and "config" in flags.FLAGS:
    error = f"{error}: a config comes first, as --config=configs/digits.py"
  fail(str(error).replace(unread, "--flagfile cannot be read:"))


class _ConfigParser(parsers.ConfigFileFlagParser):
  """Loads a config file, and leaves overrides, as text, to `overrides`:
  ml_collections would take only keys that the file has, in their types, and
  here keys depend on engines, recipes and models by name."""

  def parse(self, path: str) -> ml_collections.ConfigDict:
    """Returns a config of the keys that are overridden, without values."""
    try:
      path = shipped.find(path)
    except ValueError as error:
      fail(error)
    try:
      code.add_folder(Path(path.split(":")[0]).parent)
      self.config = super().parse(path)
      getattr(self.config, "runs", None)  # tells of a file that the file lacks
    except SystemExit as end:
      fail(
        f"--config={path}: the file ended the program (status {end.code!r});"
        " get_config() returns a config"
      )
    except Exception as error:  # whatever a user's config file raises
      fail(f"--config={path}: {_what_failed(error)}")
    texts = ml_collections.ConfigDict()
    for match in filter(None, map(_OVERRIDE.match, sys.argv[1:])):
      *above, last = match[1].split(".")
      place = texts
      for key in above:
        if not isinstance(place.get(key), ml_collections.ConfigDict):
          place[key] = ml_collections.ConfigDict()
        place = place[key]
      if not isinstance(place.get(last), ml_collections.ConfigDict):
        place[last] = ml_collections.config_dict.placeholder(str)
    return texts


def define_config() -> flags.FlagHolder:
  """Defines --config=FILE.py, once however many commands are imported."""
  if "config" in flags.FLAGS:
    return flags.FLAGS["config"]
  try:  # a --flagfile is read at once
    holder = config_flags.DEFINE_config_file(
      "config",
      None,
      "Python file with get_config(); --config.KEY=VALUE overrides its keys.",
      lock_config=False,
    )
  except flags.Error as error:
    _fail_of_flags(error)
  flags.FLAGS["config"].parser = _ConfigParser("config", lock_config=False)
  return holder


def _literal(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return {"true": True, "false": False}.get(text, text)


def _overrides() -> dict[str, str]:
  """KEY -> VALUE of each --config.KEY=VALUE, in their order, as text."""
  return config_flags.get_override_values(flags.FLAGS["config"])


def config_name() -> str:
  """Returns the config file's name, without folder and ending."""
  filename = config_flags.get_config_filename(flags.FLAGS["config"])
  return Path(filename.split(":")[0]).stem


def load_config(example: str, engine: str | None = None) -> schema.Resolved:
  """Returns the resolved config of the flags, with all runs on `engine` unless
  None. ValueError for a wrong key, or without a config, naming an `example`."""
  if not has_config():
    raise ValueError(f"no --config; try --config={example}")
  config = flags.FLAGS["config"].parser.config
  if engine is not None:
    config = overrides.retarget(config, engine, ENGINES)
  values = {key: _literal(text) for key, text in _overrides().items()}
  config = overrides.override(config, values, ENGINES)
  return schema.resolve(config, ENGINES)


def has_config() -> bool:
  """Whether --config was given."""
  return flags.FLAGS["config"].value is not None


def training_command(suffix: str) -> tuple[Path, list[str]]:
  """Returns a folder, and the command line of asgd train with the flags of
  TRAINING for it: --workdir, or the next free runs/CONFIG-SUFFIX-NNN."""
  filename = config_flags.get_config_filename(flags.FLAGS["config"])
  command = [sys.executable, "-m", f"{__package__}.train"]
  command += [f"--config={filename}"]
  command += [f"--config.{key}={text}" for key, text in _overrides().items()]
  for name in TRAINING:
    if name != "workdir" and flags.FLAGS[name].value is not None:
      command += flags.FLAGS[name].serialize().splitlines()
  free = next_free(Path("runs"), f"{config_name()}-{suffix}")
  folder = Path(flags.FLAGS["workdir"].value or free)
  return folder, [*command, f"--workdir={folder}"]


def next_free(above: Path, name: str) -> Path:
  """Returns the first of ABOVE/NAME-001, -002, ... that is not there."""
  numbered = (above / f"{name}-{n:03d}" for n in itertools.count(1))
  return next(folder for folder in numbered if not folder.exists())


def define(
  table: Mapping[str, tuple[type | Sequence[str], Any, str]],
) -> dict[str, flags.FlagHolder]:
  """Defines flags from a table: name -> (kind, default, help). A kind is str,
  int, float, bool, list, the names of an enum, or "optional": a text, GIVEN if
  the flag has none."""
  makers = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    list: flags.DEFINE_list,
    "optional": _define_optional,
  }
  holders = {}
  for name, (kind, default, text) in table.items():
    if name in flags.FLAGS:  # another command is imported beside this one
      holders[name] = flags.FLAGS[name]
    elif kind in makers:
      holders[name] = makers[kind](name, default, text)
    else:
      holders[name] = flags.DEFINE_enum(name, default, list(kind), text)
  return holders


def _define_optional(name, default, text) -> flags.FlagHolder:
  parser, serializer = flags.ArgumentParser(), flags.ArgumentSerializer()
  flag = flags.Flag(parser, serializer, name, default, text, boolean=True)
  return flags.DEFINE_flag(flag)


_WORKDIR = (
  "Folder of results. Default: runs/CONFIG-NNN, the one that holds this very"
  " experiment or the next that is free."
)
TRAINING = {  # of every command that trains
  "workdir": (str, None, _WORKDIR),
  "data_dir": (str, None, "Folder or file of the data. Default: look for it."),
  "engine": (tuple(ENGINES), None, "For all runs, whatever the config says."),
  "memory_dir": (str, "/dev/shm", "Where live runs make shared memory."),
  "grace_seconds": (float, 20.0, "Seconds that live workers get to finish."),
  "address": (str, None, "Ray cluster to join. Default: one on this machine."),
  "allow_network": (
    bool,
    False,
    "Let Ray listen beyond this machine (docs/howto/security.md).",
  ),
}


TRUST = (bool, False, "Run code that the folder of another user names.")


def _what_failed(error: Exception) -> str:
  """The kind of an error and what it says, of a traceback its last line."""
  text, kind = str(error).strip(), type(error).__name__
  if "Traceback (most recent call last)" in text:
    return text.splitlines()[-1]
  return f"{kind}: {text}" if text else kind


def _check_config(argv):
  """Refuses a second --config, and --config.KEY=VALUE without a whole key."""
  files = [text for text in argv if re.fullmatch(r"--?config(=.*)?", text)]
  if len(files) > 1:
    fail(f"--config is given {len(files)} times: choose one file")
  for text in argv:
    match = re.match(r"--?(no)?config\.[^=]*", text)
    if match and not re.fullmatch(r"--?config(\.[^.\[\]]+)+", match[0]):
      fail(f"{text} names no key; write --config.KEY=VALUE")


def _parse(argv: Sequence[str]) -> Sequence[str]:
  _check_config(argv)
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    _fail_of_flags(error)
  except BrokenPipeError:
    raise  # --help, see `output`
  except Exception as error:  # of ml_collections, about a key
    fail(f"--config: {_what_failed(error)}")


@output.ends_with_its_reader()
def run(main: Callable[..., None], *, words: int = 0) -> None:
  """Parses flags and runs main with the arguments that are no flags, at most
  `words`. A ValueError or OSError is the user's and becomes one line, unless
  ASGD_TRACEBACK is set in the environment; others keep their traceback."""

  def guarded(argv):
    if argv[words + 1 :]:
      word, known = argv[words + 1], "config" in flags.FLAGS
      meant = f", a config is --config={word}" if known else ""
      fail(f"unexpected argument {word!r}; flags start with --{meant}")
    compiled.keep()
    try:
      main(*argv[1:])
    except (Stopped, Failed) as end:
      Signals.ending = True
      print(end, file=sys.stderr)
      sys.exit(128 + end.signal_number if isinstance(end, Stopped) else 1)
    except folder.Incomplete as end:
      Signals.ending = True
      fail(end, INCOMPLETE)
    except KeyboardInterrupt:
      print(
        "interrupted; run the same command again to go on from what was saved",
        file=sys.stderr,
      )
      sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
      raise  # see `output`
    except (ValueError, OSError) as error:
      if os.environ.get("ASGD_TRACEBACK"):
        raise
      fail(error)

  for flag in flags.FLAGS.flags_by_module_dict().get(__name__, ()):
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)  # for --help
  # Libraries' own words about a failure come before our one line about it.
  logging.set_verbosity(logging.FATAL)
  std_logging.getLogger("asyncio").setLevel(std_logging.CRITICAL)
  for stream in (sys.stdout, sys.stderr):
    if stream is not None:
      # Lines of both are in order where both go to one place.
      stream.reconfigure(errors="replace", line_buffering=True)
  signal.signal(signal.SIGINT, signal.default_int_handler)  # see __init__
  if not gc.isenabled():
    gc.freeze()
    gc.enable()
  app.run(guarded, flags_parser=_parse)
