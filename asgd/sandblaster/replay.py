"""Recomputes the result of a run from the jobs that were received."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from asgd import base
from asgd.orders.trace import STARTS
from asgd.sandblaster.commands import Command
from asgd.sandblaster.coordinator import Begin, Coordinator, State, message_name
from asgd.sandblaster.portions import Work, make_sums
from asgd.sandblaster.settings import Settings
from asgd.sandblaster.shard import Shards


class RecomputedState(NamedTuple):
  """The result of `recompute`."""

  state: State  # of the coordinator
  params: base.Params  # the last iterate


def count_jobs(
  rows: Iterable[tuple[int, int]], accepted: Iterable[bool]
) -> tuple[set[int], int]:
  """Finds the jobs with a message that counts.

  A checkpoint holds only messages that the coordinator has requested. After a
  resume, the jobs of other messages are sent again, and their earlier messages
  no longer count.

  Args:
    rows: (action, job) of the rows of a trace.
    accepted: of each RECEIVE row, whether its message was accepted.

  Returns:
    The jobs, and the number of surplus messages: if k messages of a job count,
    k - 1. It is 0 in a correct run.

  Example:
    >>> from asgd import base
    >>> jobs = [(base.SEND, 3), (base.RECEIVE, 3), (base.SEND, 3)]
    >>> count_jobs(jobs, [True]), count_jobs(jobs[:2], [True])
    ((set(), 0), ({3}, 0))
  """
  jobs: set[int] = set()
  surplus, verdicts = 0, iter(accepted)
  for action, job in rows:
    if action in STARTS:  # sent again: an earlier message was lost
      jobs.discard(job)
    elif action == base.RECEIVE and next(verdicts, False):
      surplus += job in jobs
      jobs.add(job)
  return jobs, surplus


def recompute(
  settings: Settings, params: base.Params, work: Work, jobs: Collection[int]
) -> RecomputedState:
  """Runs L-BFGS in this process, as far as the given jobs allow.

  Args:
    settings: the settings of the run.
    params: before the first step, of NumPy.
    work: the loss and the gradient of a portion, a mean.
    jobs: the jobs that were received, numbered as in a trace: evaluation times
      the jobs of an evaluation, plus the job.

  Example:
    >>> import jax
    >>> import numpy as np
    >>> from asgd.sandblaster import Settings
    >>> work = jax.value_and_grad(lambda x, p: (p + 1) * (x**2).sum())
    >>> settings = Settings(portions=2)
    >>> result = recompute(settings, np.float32([3.0, 4.0]), work, range(4))
    >>> print(result.state.iteration, f"{result.state.loss:.4f}")
    1 24.0000
  """
  sum_portions, sent_params = make_sums(work), params
  shards = Shards(params, settings.shards, start={"point": params})
  coordinator = Coordinator(settings)
  while (request := coordinator.request) is not None:
    answer = None
    if isinstance(request, Command):
      answer = shards.execute(request)
    elif isinstance(request, Begin):
      shards.forget(shards.number)
      sent_params = jax.tree.map(jnp.asarray, shards.read("trial"))
    else:
      if request.evaluation * settings.jobs + request.job not in jobs:
        break
      answer, message = sum_portions(
        sent_params, settings.portions_of(request.job)
      )
      shards.put(message_name(*request), message)
    coordinator.answer(answer)
  return RecomputedState(coordinator.state, shards.read("point"))
