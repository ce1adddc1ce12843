"""Programs that XLA has compiled, kept on disk for the next command.

Compilation takes half of the time of a sweep of small models. The processes of
a command, and a command that is repeated, compile the same programs. JAX can
store programs in a folder, which `keep_programs` sets for commands. A call from
a script uses a folder only if JAX_COMPILATION_CACHE_DIR names one.
"""

import contextlib
import os
import warnings
from pathlib import Path

import jax

from asgd import safe_files

_FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_MIN_SECONDS_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_MAX_BYTES = 2**29  # of all stored programs
# JAX's warning about an incomplete program: a process was killed while it wrote
# the file. JAX then compiles the program again.
_HALF_WARNING = "Error reading persistent compilation cache entry"


def folder() -> Path:
  """Returns this user's folder of programs: below $ASGD_CACHE, the folder of
  downloads, else below ~/.cache/asgd."""
  downloads = os.environ.get("ASGD_CACHE") or "~/.cache/asgd"
  return Path(downloads).expanduser() / "compiled"


def uses_default_folder() -> bool:
  """Whether programs are kept in `folder`, rather than in a user's choice."""
  with contextlib.suppress(RuntimeError):  # a user without a home
    return os.environ.get(_FOLDER_VARIABLE) == str(folder())
  return False


def keep_programs() -> None:
  """Stores programs that this process and its child processes compile. Does
  nothing if JAX_COMPILATION_CACHE_DIR is set, even to "", or if the folder
  cannot be made, belongs to another user, or is a link."""
  if _FOLDER_VARIABLE in os.environ:
    return
  try:
    cache = folder()
    # A program is code: only this user may write to the folder.
    safe_files.make_private(cache)
    _trim(cache)
  except (OSError, RuntimeError, ValueError):
    return  # programs are compiled, but not stored
  # The variables are for child processes; `update` is for this process, in
  # which JAX has read the variables already.
  os.environ[_FOLDER_VARIABLE] = str(cache)
  jax.config.update(_FOLDER_VARIABLE.lower(), str(cache))
  if _MIN_SECONDS_VARIABLE not in os.environ:
    # By default JAX keeps only programs that take a second to compile.
    os.environ[_MIN_SECONDS_VARIABLE] = "0"
    jax.config.update(_MIN_SECONDS_VARIABLE.lower(), 0.0)
  warnings.filterwarnings("ignore", _HALF_WARNING)
  filters = os.environ.get("PYTHONWARNINGS")
  ignore_filter = f"ignore:{_HALF_WARNING}"
  os.environ["PYTHONWARNINGS"] = (
    f"{filters},{ignore_filter}" if filters else ignore_filter
  )


def _trim(cache: Path) -> None:
  """Removes the oldest programs if there are too many. JAX's own limit would
  look at each file whenever a program is added."""
  stats = []
  for file in filter(os.DirEntry.is_file, os.scandir(cache)):
    with contextlib.suppress(FileNotFoundError):  # another command trims, too
      stats.append((file.stat().st_mtime, file.stat().st_size, file.path))
  total_bytes = sum(size for _, size, _ in stats)
  for _, size, path in sorted(stats):  # the oldest first
    if total_bytes <= _MAX_BYTES:
      return
    Path(path).unlink(missing_ok=True)
    total_bytes -= size
