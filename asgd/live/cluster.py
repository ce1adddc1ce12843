"""The base class of clusters: the participants of a run, as its driver sees
them.

Each protocol has a subclass. After `start` the driver calls `check` repeatedly
until the cluster is `finished`. `check` replaces lost parties and returns lines
for the user. It raises the error of a party if a successor would raise it, too.
For a checkpoint the driver calls `pause`, which returns whether all parties
were at rest in time, and then `resume`.
"""

import math
from collections.abc import Callable
from typing import Any

from asgd.live.supervisor import Supervisor, answer_of

_REST_CHECK_SECONDS = 0.01  # between two checks whether parties are at rest


class Cluster:
  """The parties of a run, under one supervisor."""

  finished: Any  # bool: all jobs are done, by the last `check`

  def __init__(self, supervisor: Supervisor):
    self._supervisor = supervisor

  @property
  def replaced(self) -> dict[str, int]:
    """Kind of party -> count of replacements."""
    return self._supervisor.replaced

  def ask_all_timed(
    self, kind: str, method: str, *args: Any, limit: float
  ) -> list[Any]:
    """Calls a method that times jobs, at all parties of a kind, and returns
    the answers. Raises the error of a party, and ValueError if a party exits or
    takes more than `limit` seconds."""
    calls = {
      (kind, index): party.host.call(method, *args)
      for index, party in sorted(self._supervisor.parties[kind].items())
    }
    # A call may take as long as a job, so no line names a silent party before
    # the limit.
    silent_keys = self._supervisor.wait_for_calls(calls, limit)
    if silent_keys:
      raise ValueError(
        f"{len(silent_keys)} {kind}s took more than {limit:g} seconds to"
        " compile or to do the jobs that are timed: give them more with"
        " config.live.start_seconds, or fewer with config.allocation.jobs"
      )
    answers = []
    for (_, index), call in calls.items():
      answer = answer_of(call)
      if answer is None:
        raise ValueError(
          f"{kind} {index} died while it was measured; run the same command"
          " again, or give sizes instead (config.allocation)"
        )
      answers.append(answer[0])
    return answers

  def wait_for_rest(
    self, are_at_rest: Callable[[], bool], seconds: float = math.inf
  ) -> bool:
    """Waits until `are_at_rest` returns True, for `seconds` at most. Returns
    whether it did."""
    deadline = self._supervisor.hosts.clock() + seconds
    while not are_at_rest():
      if self._supervisor.hosts.clock() > deadline:
        return False
      self._supervisor.hosts.sleep(_REST_CHECK_SECONDS)
    return True

  def close(self) -> None:
    """Ends all parties; the files that they wrote stay."""
    self._supervisor.close()
