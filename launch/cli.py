"""How every command starts and fails: one clear line, and a status not 0."""

import os
import signal
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import config_flags

USAGE_ERROR = 2  # exit status


class Stopped(Exception):
  """A signal asked the run to stop, and it has been saved."""

  def __init__(self, message: str, signal_number: int):
    super().__init__(message)
    self.status = 128 + signal_number


def fail(message: object) -> None:
  """Prints one line on stderr and exits."""
  print("error: " + " ".join(str(message).split()), file=sys.stderr)
  sys.exit(USAGE_ERROR)


def define_config(default: str | None = None) -> flags.FlagHolder:
  """Defines --config=FILE.py and the --config.KEY=VALUE overrides."""
  return config_flags.DEFINE_config_file(
    "config", default, "Python file with get_config().", lock_config=True
  )


def _parse(argv: Sequence[str]) -> Sequence[str]:
  for argument in argv[1:]:
    name, _, path = argument.lstrip("-").partition("=")
    if name == "config" and not os.path.isfile(path.split(":")[0]):
      fail(f"--config={path}: there is no such file")
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    return fail(error)
  except (AttributeError, KeyError) as error:
    # A key that the config does not have; the text names the nearest.
    text = str(error).strip("\"'").replace("\\n", " ").replace("\\'", "'")
    return fail(f"--config: no such key: {text}")
  except Exception as error:
    return fail(f"--config: {type(error).__name__}: {error}")


def run(main: Callable[..., None], *, words: int = 0) -> None:
  """Parses flags and runs main; user errors become one line, not a trace.

  A ValueError or OSError is the user's; anything else is ours and keeps its
  traceback.

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
    except KeyboardInterrupt:
      print("interrupted", file=sys.stderr)
      sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError) as error:
      if os.environ.get("ASGD_TRACEBACK"):
        raise
      fail(error)

  logging.set_verbosity(logging.ERROR)
  app.run(guarded, flags_parser=_parse)
