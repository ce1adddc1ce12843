"""Waiting for Ray's answers.

A call of an actor that has exited ends with an error. If Ray's own processes
were killed, however, calls of Ray wait for a minute, and then end this process
with pages of text. So others wait for Ray by this module, which checks every
second whether Ray's processes are alive.
"""

from collections.abc import Sequence
from typing import Any

from asgd.live import processes, ray_internals

_CHECK_SECONDS = 1.0  # seconds between two checks of Ray's processes
# Kind of a process without which Ray answers no call -> its name in errors.
_NAMES_BY_KIND = {"raylet": "raylet", "gcs_server": "GCS"}


class RayDied(ValueError):
  """Ray itself has exited, and with it all processes that it had started."""


def dead_processes() -> list[str]:
  """Returns the names of Ray's processes that this process started and that
  have exited."""
  node = ray_internals.node()
  if node is None:  # another process started the cluster
    return []
  dead_kinds = [kind for kind, _ in node.dead_processes()]
  return [name for kind, name in _NAMES_BY_KIND.items() if kind in dead_kinds]


def end_processes() -> None:
  """Kills the processes of Ray that this process started and that still
  run."""
  for _, process in ray_internals.node().live_processes():
    processes.kill_descendants(process.pid)
    process.kill()


def check() -> None:
  """Raises RayDied if one of Ray's own processes has exited."""
  if names := dead_processes():
    raise RayDied(
      f"Ray's own process ({', '.join(names)}) has died: it was killed, or the"
      " machine is out of memory; run the same command again to resume"
    )


def wait(
  refs: Sequence[Any],
  *,
  count: int | None = None,
  timeout: float = _CHECK_SECONDS,
) -> tuple[list[Any], list[Any]]:
  """Waits for `count` of `refs` (None: all), for `timeout` seconds at most.
  Returns (ended, pending) references, as `ray.wait` does. Raises RayDied."""
  import ray

  check()
  if not refs:
    return [], []
  count = len(refs) if count is None else count
  ended, pending = ray.wait(list(refs), num_returns=count, timeout=timeout)
  check()  # before the caller reads the errors that an exit of Ray caused
  return ended, pending
