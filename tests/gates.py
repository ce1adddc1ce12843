"""A problem whose batches wait at gates: what each party of a run is at is then
known. Processes of Ray import this module, and little else."""

import os
import threading
import time
from pathlib import Path

from asgd import problems
from asgd.problems import factorisation


def opened(folder: Path, gate: int) -> Path:
  """The file that says that a gate is open."""
  return folder / f"open-{gate}"


def waiting(folder: Path, gate: int) -> int:
  """Returns how many threads wait at a gate with a job, or have waited."""
  return len([*folder.glob(f"job-{gate}-*")])


def ratings(
  batch_size: int, *, folder: str = "", gates=(), driver: int | None = None
) -> problems.Problem:
  """Matrix factorisation, whose jobs from each gate on wait until a folder has
  the file that opens it. It cannot be made by another process than `driver`."""
  if driver not in (None, os.getpid()):
    raise ValueError("no such ratings")
  generate = dict(users=20, items=12, ratings=200)
  problem = factorisation.matrix_factorisation(
    batch_size, rank=2, generate=generate
  )
  place = Path(folder)

  def batches(seed, workers):
    make = problem.batches(seed, workers)

    def batch(worker, job):
      for gate in gates:
        if job >= gate and not opened(place, gate).exists():
          who = f"{os.getpid()}-{threading.get_ident()}"
          (place / f"job-{gate}-{who}").touch()
          while not opened(place, gate).exists():
            time.sleep(0.01)
      return make(worker, job)

    return batch

  return problem._replace(batches=batches, rebatch=None)
