"""Errors that end a live run. The driver raises them; `process_failure` returns
the error that a participant in another process reports to it."""

import traceback

from asgd.live.hosts.base import HostExited


class AllDied(RuntimeError):
  """All workers that held training state have exited."""


class NotFinite(ValueError):
  """Workers compute NaN or infinity, over and over."""


class WorkersDie(ValueError):
  """Workers exit one after the other, and no message is received."""


class ShardsDie(ValueError):
  """Shards exit one after the other, and no message is received."""


def process_failure(failure: str, error: Exception) -> Exception:
  """Returns the error by which a host reports the failure of its object to
  another process: one line if the user can mend it, otherwise the traceback.

  Not the error itself: an exception with a custom constructor often cannot be
  unpickled. `failure` is, for example, "worker 0 failed".
  """
  if isinstance(error, HostExited):
    return error
  if isinstance(error, ValueError | OSError):
    return ValueError(f"{failure}: {error}")
  text = "".join(traceback.format_exception(error))
  return RuntimeError(f"{failure}: {text}")
