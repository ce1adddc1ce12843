"""Errors that end a live run. The driver raises them, not a participant."""


class AllDied(RuntimeError):
  """All workers that held training state have exited."""


class NotFinite(ValueError):
  """Workers compute NaN or infinity, over and over."""


class WorkersDie(ValueError):
  """Workers exit one after the other, and no message is received."""


class ShardsDie(ValueError):
  """Shards exit one after the other, and no message is received."""


def process_failure(failure: str, error: Exception) -> Exception:
  """Returns the error to raise for the failure of a process: one line if the
  user can mend it, otherwise the traceback. `error` has the traceback as its
  text; `failure` is, for example, "worker 0 failed"."""
  # The last line of a traceback: "ValueError: the message".
  last_line = str(error).strip().splitlines()[-1]
  error_name, _, message = last_line.partition(": ")
  if error_name in ("ValueError", "OSError", "FileNotFoundError"):
    return ValueError(f"{failure}: {message}")
  return RuntimeError(f"{failure}: {error}")
