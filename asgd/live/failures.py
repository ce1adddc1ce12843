"""Why a live run cannot go on."""


class AllDied(RuntimeError):
  """Nobody is left who knows anything."""


class NotFinite(ValueError):
  """What workers compute is NaN or infinite, over and over."""


class WorkersDie(ValueError):
  """Workers die one after the other, and no message comes."""


class ShardsDie(ValueError):
  """Shards die one after the other, and no message comes."""


def process_failure(what: str, error: Exception) -> Exception:
  """What to raise where a process has failed: one line if it is the user's to
  mend, all that is known if it is ours."""
  last = str(error).strip().splitlines()[-1]
  kind, _, text = last.partition(": ")
  if kind in ("ValueError", "OSError", "FileNotFoundError"):
    return ValueError(f"{what}: {text}")
  return RuntimeError(f"{what}: {error}")
