"""Errors that end a live run."""


class AllDied(RuntimeError):
  """All workers that held training state have exited."""


class NotFinite(ValueError):
  """Workers compute NaN or infinity, over and over."""


class WorkersDie(ValueError):
  """Workers exit one after the other, and no message comes."""


class ShardsDie(ValueError):
  """Shards exit one after the other, and no message comes."""


def process_failure(what: str, error: Exception) -> Exception:
  """Returns the error to raise where a process has failed: one line if the user
  can mend it, otherwise all details."""
  last = str(error).strip().splitlines()[-1]
  kind, _, text = last.partition(": ")
  if kind in ("ValueError", "OSError", "FileNotFoundError"):
    return ValueError(f"{what}: {text}")
  return RuntimeError(f"{what}: {error}")
