"""Lines of the run log about the shards of a live run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd.live.setup import Setup


class ShardNews:
  """Turns the status of shards into lines of the run log, each once."""

  def __init__(
    self, setup: Setup, memory: Path, received_before: int, *, resumed: bool
  ):
    """Remembers the state before the first status.

    Args:
      setup: the setup of the cell.
      memory: folder of the cell's memory.
      received_before: count of messages received before this start.
      resumed: whether the journals have rows.
    """
    self._received_before = received_before
    self._rollbacks: list[Any] = [None] * setup.shards  # last reported ones
    self._resumed = resumed
    # Workers of the start; 0 if the start is over, or its line was written.
    self._expected_workers = 0 if received_before else setup.first_job_workers
    self._has_memory = (memory / "shard-0" / "messages").exists()

  def new_lines(self, statuses: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the new lines, from the status of each shard."""
    news = []
    if self._resumed:
      # This line covers the rollbacks of the resume. Each later one has a line.
      self._resumed = False
      news.append(self._resume_line(statuses))
      self._rollbacks = [shard["rollback"] for shard in statuses]
    for shard in statuses:
      news += shard["news"]
    for index, shard in enumerate(statuses):
      rollback = shard["rollback"]
      if rollback in (None, self._rollbacks[index]):  # none, or reported
        continue
      self._rollbacks[index] = rollback
      subject = f"shard {index} " if len(statuses) > 1 else ""
      news.append(
        f"{subject}rolled back {rollback.updates} updates, to message"
        f" {rollback.message}{_reason(rollback)}"
      )
    # The workers present at the first message are those that began the run.
    if self._expected_workers and statuses[0]["received"]:
      expected, present = self._expected_workers, len(statuses[0]["workers"])
      self._expected_workers = 0
      # At the end of a short run workers have left already.
      if present < expected and not statuses[0]["stopped"]:
        news.append(
          f"it began with only {present} of {expected} workers; the others"
          " may still join"
        )
    return news

  def _resume_line(self, statuses: Sequence[Mapping[str, Any]]) -> str:
    """Returns the line about the state from which a run resumes."""
    opening = f"resuming at message {self._received_before}, from"
    rollbacks = [shard["rollback"] for shard in statuses if shard["rollback"]]
    if not rollbacks:
      # The shards replayed all rows, so no update was rolled back.
      return f"{opening} {'shared memory' if self._has_memory else 'the trace'}"
    rollback = rollbacks[0]
    undone = sum(rollback_of_shard.updates for rollback_of_shard in rollbacks)
    source = f"the checkpoint of message {rollback.message}"
    if not rollback.row:  # row 0 is the beginning
      source = "the beginning, as there is no checkpoint"
    shards = f" of {len(rollbacks)} shards" if len(rollbacks) > 1 else ""
    ending = f"{undone} updates{shards} rolled back{_reason(rollback)}"
    return f"{opening} {source}: {ending}"


def _reason(rollback: Any) -> str:
  return f" ({rollback.reason})" if rollback.reason else ""
