"""Describes a command's environment: versions, commits, cores and devices.

Measured times depend on all of these, the bits of a result on some.
"""

import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

_PACKAGES = "asgd", "jax", "jaxlib", "optax", "flax", "numpy"
_IF_IMPORTED = ("ray",)  # packages that are listed only if imported
_GIT_SECONDS = 5.0  # timeout of git


def describe() -> dict[str, Any]:
  """Returns the command line, versions, commits and the machine, as JSON."""
  return {
    "command": command(sys.orig_argv),
    "versions": versions(),
    "git": commits(),
    "machine": machine(),
  }


def command(argv: Sequence[str]) -> str:
  """Returns a command line without the path of Python.

  Example:
    >>> command(["/env/bin/python", "/env/bin/asgd", "train", "my config"])
    "asgd train 'my config'"
    >>> command(["/env/bin/python3.12", "-m", "launch.train"])
    'python -m launch.train'
  """
  _, *arguments = argv
  if arguments and Path(arguments[0]).name == "asgd":  # an installed command
    return shlex.join(["asgd", *arguments[1:]])
  return shlex.join(["python", *arguments])


def versions() -> dict[str, str]:
  """Returns the versions of Python and of packages that affect results."""
  imported = [name for name in _IF_IMPORTED if name in sys.modules]
  packages = {name: _version(name) for name in (*_PACKAGES, *imported)}
  return {"python": platform.python_version(), **packages}


@functools.cache  # because each call parses a file
def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"  # run from a checkout


def _git(folder: Path, *argv: str) -> str | None:
  """Returns the output of git in a folder; None if it fails or is missing."""
  # Without the option, git status writes the index of the user's checkout, and
  # a kill or a full disk leaves its lock there.
  command = ["git", "--no-optional-locks", "-C", str(folder), *argv]
  try:
    process = subprocess.run(
      command, capture_output=True, text=True, timeout=_GIT_SECONDS
    )
  except (OSError, subprocess.SubprocessError):
    return None  # a slow file system must not delay a command
  return None if process.returncode else process.stdout.strip()


def commit(folder: Path) -> str | None:
  """Returns the commit of the checkout that a folder is in, with "modified" if
  tracked files differ from it; None if the folder is in no checkout."""
  commit_hash = _git(folder, "rev-parse", "HEAD")
  if commit_hash is None:
    return None
  changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
  return f"{commit_hash}, modified" if changes else commit_hash


@functools.cache  # because each call starts git several times
def commits() -> dict[str, str]:
  """Returns the commit of this package, if it is run from its checkout, and of
  the working directory's checkout if that is another."""
  package, working_directory = Path(__file__).resolve().parents[1], Path.cwd()
  # An installed package may lie below a user's checkout, which does not track
  # its files.
  tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
  folders = {"asgd": package} if tracked is not None else {}
  top_level = "rev-parse", "--show-toplevel"
  if not folders or _git(working_directory, *top_level) != _git(
    package, *top_level
  ):
    folders["working directory"] = working_directory
  commit_by_folder = {name: commit(folder) for name, folder in folders.items()}
  return {name: value for name, value in commit_by_folder.items() if value}


def cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):  # Linux; other systems count all cores
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def machine() -> dict[str, Any]:
  """Returns the system, cores and devices, on which measured times depend."""
  kinds = [device.device_kind for device in jax.devices()]
  devices = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
  return {
    "system": platform.platform(),
    "cores": f"{cores()} of {os.cpu_count()}",
    "devices": ", ".join(devices),
  }
