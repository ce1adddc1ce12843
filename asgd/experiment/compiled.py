"""Programs that XLA has compiled, kept on disk for the next command.

Compilation takes half of the time of a sweep of small models. The processes of
a command, and a command that is repeated, compile the same programs. JAX can
keep programs in a folder: a command calls `keep`, which sets one. A call from a
script uses a folder only if JAX_COMPILATION_CACHE_DIR names one.
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
# The warning of JAX for half a program, which a process leaves that is killed
# while it writes. JAX then compiles the program again.
_HALF = "Error reading persistent compilation cache entry"


def folder() -> Path:
  """Returns the folder of this user, in that of downloads: of $ASGD_CACHE, else
  of ~/.cache/asgd."""
  above = os.environ.get("ASGD_CACHE") or "~/.cache/asgd"
  return Path(above).expanduser() / "compiled"


def is_own() -> bool:
  """Whether programs are kept in `folder`, rather than in a user's choice."""
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
    cache = folder()
    # A program is code: only this user may write to the folder.
    safe_files.make_private(cache)
    _trim(cache)
  except (OSError, RuntimeError, ValueError):
    return  # programs are compiled, and not kept
  # Variables for the processes that this one starts; `update` for this process,
  # in which JAX has read its variables already.
  os.environ[_FOLDER] = str(cache)
  jax.config.update(_FOLDER.lower(), str(cache))
  if _SMALL not in os.environ:
    # By default JAX keeps only programs that take a second to compile.
    os.environ[_SMALL] = "0"
    jax.config.update(_SMALL.lower(), 0.0)
  warnings.filterwarnings("ignore", _HALF)
  filters = os.environ.get("PYTHONWARNINGS")
  ignored = f"ignore:{_HALF}"
  os.environ["PYTHONWARNINGS"] = f"{filters},{ignored}" if filters else ignored


def _trim(cache: Path) -> None:
  """Removes the oldest programs if there are too many. JAX's own limit would
  look at each file whenever a program is added."""
  files = [entry for entry in os.scandir(cache) if entry.is_file()]
  stats = sorted((e.stat().st_mtime, e.stat().st_size, e.path) for e in files)
  total = sum(size for _, size, _ in stats)
  for _, size, path in stats:  # the oldest first
    if total <= _MOST:
      return
    Path(path).unlink(missing_ok=True)  # another command may trim, too
    total -= size
