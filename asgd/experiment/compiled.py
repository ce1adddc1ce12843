"""Programs that XLA has compiled, kept on disk for the next command.

To compile is half of the time of a sweep of small models, and the processes of
a command, or a command that is given again, compile the same programs. JAX
keeps them in a folder; a command gives it one. A call from a script uses a
folder only if JAX_COMPILATION_CACHE_DIR names one.
"""

import contextlib
import os
import warnings
from pathlib import Path

import jax

from asgd import safe_files

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_SMALL = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_MOST = 2**29  # bytes that are kept
# A process that is killed as it writes leaves half a program, which JAX
# compiles again, with a warning.
_HALF = "Error reading persistent compilation cache entry"


def folder() -> Path:
  """Returns the folder of this user, in that of downloads: of $ASGD_CACHE, else
  of ~/.cache/asgd."""
  above = os.environ.get("ASGD_CACHE") or "~/.cache/asgd"
  return Path(above).expanduser() / "compiled"


def is_own() -> bool:
  """Whether programs are kept in `folder`, and not where a user said."""
  with contextlib.suppress(RuntimeError):  # a user without a home
    return os.environ.get(_FOLDER) == str(folder())
  return False


def keep() -> None:
  """Keeps programs that this process, and those that it starts, compile. Does
  nothing if JAX_COMPILATION_CACHE_DIR is set, "" among others, or the folder
  cannot be made, belongs to another user, or is a link."""
  if _FOLDER in os.environ:
    return
  try:
    place = folder()
    safe_files.make_private(place)
    _trim(place)
  except (OSError, RuntimeError, ValueError):
    return  # they are compiled again
  os.environ[_FOLDER] = str(place)
  jax.config.update(_FOLDER.lower(), str(place))
  if _SMALL not in os.environ:
    os.environ[_SMALL] = "0"
    jax.config.update(_SMALL.lower(), 0.0)
  warnings.filterwarnings("ignore", _HALF)
  told = os.environ.get("PYTHONWARNINGS")  # to processes that are started
  ignored = f"ignore:{_HALF}"
  os.environ["PYTHONWARNINGS"] = f"{told},{ignored}" if told else ignored


def _trim(place: Path) -> None:
  """Removes the oldest programs if there are too many. JAX would look at each
  whenever it adds one."""
  files = [entry for entry in os.scandir(place) if entry.is_file()]
  stats = sorted((e.stat().st_mtime, e.stat().st_size, e.path) for e in files)
  total = sum(size for _, size, _ in stats)
  for _, size, path in stats:
    if total <= _MOST:
      return
    Path(path).unlink(missing_ok=True)
    total -= size
