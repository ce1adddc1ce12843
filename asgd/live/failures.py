"""Why a live run cannot go on."""


class AllDied(RuntimeError):
  """Nobody is left who knows anything."""


class NotFinite(ValueError):
  """What workers compute is NaN or infinite, over and over."""


class WorkersDie(ValueError):
  """Workers die one after the other, and no message comes."""


class ShardsDie(ValueError):
  """Shards die one after the other, and no message comes."""
