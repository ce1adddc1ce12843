"""Waiting for Ray's answers, and for Ray itself.

A call of an actor that has died ends with an error. If Ray's own processes are
killed, however, its calls wait for a minute, and then end this process with
paragraphs. So all waits for Ray are here, where every second a look finds out
whether its processes are alive.
"""

from collections.abc import Sequence
from typing import Any

from asgd.live import processes, ray_internals

_LOOK = 1.0  # seconds between two looks
_KINDS = {"raylet": "raylet", "gcs_server": "GCS"}  # Ray does nothing without


class RayDied(ValueError):
  """Ray itself has died, with all processes that it had started."""


def dead_processes() -> list[str]:
  """Returns those of Ray's processes, started by this one, that have died."""
  node = ray_internals.node()
  if node is None:
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
  """Waits for `count` of refs, None all of them, as `ray.wait` does, but not
  for longer than a second by default. Raises RayDied."""
  import ray

  check()
  if not refs:
    return [], []
  count = len(refs) if count is None else count
  done, left = ray.wait(list(refs), num_returns=count, timeout=timeout)
  check()  # before the caller reads errors that this caused
  return done, left
