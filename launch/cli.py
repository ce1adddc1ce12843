"""How every command starts and fails: one clear line, and a status not 0."""

import logging as std_logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import config_flags

USAGE_ERROR = 2  # exit status


class Failed(Exception):
  """What was asked for was done, and the answer is no."""


class Stopped(Exception):
  """A signal asked the run to stop, and it has been saved."""

  def __init__(self, message: str, signal_number: int):
    super().__init__(message)
    self.status = 128 + signal_number


def fail(message: object) -> None:
  """Prints one line on stderr and exits."""
  print("error: " + " ".join(str(message).split()), file=sys.stderr)
  sys.exit(USAGE_ERROR)


_overrides: list[tuple[str, str]] = []  # (KEY, VALUE) of --config.KEY=VALUE


def define_config() -> flags.FlagHolder:
  """Defines --config=FILE.py; overrides are read by `overrides`."""
  return config_flags.DEFINE_config_file(
    "config",
    None,
    "Python file with get_config(); --config.KEY=VALUE overrides its keys.",
  )


def overrides() -> list[tuple[str, str]]:
  """Returns the (KEY, VALUE) of each --config.KEY=VALUE, in their order.

  config_flags takes overrides of keys that a file spells out, in the type that
  it has there. Here a key may also be one that the file leaves at its default,
  such as any argument of a model or a recipe; `experiment.override` checks it.
  """
  return list(_overrides)


def _parse(argv: Sequence[str]) -> Sequence[str]:
  rest = []
  _overrides.clear()
  for argument in argv:
    name, equals, value = argument.lstrip("-").partition("=")
    if argument.startswith("-") and name.startswith("config."):
      if not equals:
        fail(f"write --{name}=VALUE")
      _overrides.append((name.removeprefix("config."), value))
      continue
    if argument in ("--config", "-config"):
      fail("write --config=FILE.py, with an equals sign")
    if name == "config" and not os.path.isfile(value.split(":")[0]):
      fail(f"--config={value}: there is no such file")
    rest.append(argument)
  sys.argv[1:] = rest[1:]  # where config_flags looks for overrides itself
  try:
    return flags.FLAGS(rest)
  except flags.Error as error:
    return fail(_last_line(error))
  except Exception as error:  # whatever a user's config file raises
    if "has no attribute 'get_config'" in str(error):
      return fail("--config: the file defines no get_config()")
    return fail(f"--config: {_last_line(error)}")


def _last_line(error: Exception) -> str:
  """What an error says, without the traceback it may quote."""
  text = str(error).strip()
  if "Traceback (most recent call last)" in text:
    return text.splitlines()[-1]
  return text


def run(main: Callable[..., None], *, words: int = 0) -> None:
  """Parses flags and runs main; user errors become one line, not a trace.

  A ValueError or OSError is the user's; anything else is ours and keeps its
  traceback. With ASGD_TRACEBACK set in the environment, so do the user's.

  Args:
    main: called with the words.
    words: how many arguments that are no flags the command takes at most.
  """

  def guarded(argv):
    if argv[words + 1 :]:
      fail(f"unexpected argument {argv[words + 1]!r}; flags start with --")
    try:
      main(*argv[1:])
    except Stopped as stop:
      print(stop, file=sys.stderr)
      sys.exit(stop.status)
    except Failed as failed:
      print(failed, file=sys.stderr)
      sys.exit(1)
    except KeyboardInterrupt:
      print("interrupted", file=sys.stderr)
      sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # whoever read what is printed has had enough
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
      if os.environ.get("ASGD_TRACEBACK"):
        raise
      fail(error)

  # Libraries' own words about a failure come before our one line about it.
  logging.set_verbosity(logging.FATAL)
  std_logging.getLogger("asyncio").setLevel(std_logging.CRITICAL)
  for stream in (sys.stdout, sys.stderr):
    if stream is not None:
      stream.reconfigure(errors="replace")
  app.run(guarded, flags_parser=_parse)
