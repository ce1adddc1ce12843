"""Tables of which job j adds 2^j to each row that it reads: the sum says which
jobs are in it."""

import numpy as np

ROWS, WORKERS, JOBS = 7, 3, 6


def first():
  """Returns tables of zeros."""
  return {"v": np.zeros((ROWS, 2)), "w": np.zeros((2, 1))}


def keys(job, hot=ROWS):
  """Returns the rows that a job reads: none of `v` from `hot` on."""
  return {"v": np.arange(job % 3, hot, 2), "w": np.array([job % 2])}


def gradient(rows, job):
  """Returns the loss of a job, and its gradient at a rate of 1."""
  ones = {name: np.full_like(x, -(2.0**job)) for name, x in rows.items()}
  return float(job), ones


def whole(jobs=range(WORKERS * JOBS), hot=ROWS):
  """Returns the tables after all of some jobs, each once."""
  out = first()
  for job in jobs:
    for name, mine in keys(job, hot).items():
      out[name][mine] += 2.0**job
  return out
