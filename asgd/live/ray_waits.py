"""Waiting for Ray's answers.

A call of an actor that has exited ends with an error. If Ray's own processes
are killed, however, its calls wait for a minute, and then end this process with
pages of text. So this module has all waits for Ray: it checks every second
whether Ray's processes are alive.
"""

from collections.abc import Sequence
from typing import Any

from asgd.live import processes, ray_internals

_LOOK = 1.0  # seconds between two looks
# Processes that Ray needs to answer any call -> their names in errors.
_KINDS = {"raylet": "raylet", "gcs_server": "GCS"}


class RayDied(ValueError):
  """Ray itself has exited, with all processes that it had started."""


def dead_processes() -> list[str]:
  """Returns the names of Ray's processes that this process started and that
  have exited."""
  node = ray_internals.node()
  if node is None:  # a cluster that others started
    return []
  ended = [kind for kind, _ in node.dead_processes()]
  return [name for kind, name in _KINDS.items() if kind in ended]


def end_processes() -> None:
  """Kills the rest of the Ray that this process has started."""
  for _, process in ray_internals.node().live_processes():
    processes.end_children(process.pid)
    process.kill()


def check() -> None:
  """Raises RayDied if Ray has."""
  if dead := dead_processes():
    raise RayDied(
      f"Ray's own process ({', '.join(dead)}) has died: it was killed, or the"
      " machine is out of memory; run the same command again to resume"
    )


def wait(
  refs: Sequence[Any], *, count: int | None = None, timeout: float = _LOOK
) -> tuple[list[Any], list[Any]]:
  """Waits for `count` of `refs` (None: all), for `timeout` seconds at most.
  Returns (ended, open), as `ray.wait` does. Raises RayDied."""
  import ray

  check()
  if not refs:
    return [], []
  count = len(refs) if count is None else count
  ended, pending = ray.wait(list(refs), num_returns=count, timeout=timeout)
  check()  # before the caller reads the errors that an exit of Ray caused
  return ended, pending
