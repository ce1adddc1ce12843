"""What the driver of a live run tells: news of its shards, in lines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd.live.setup import Setup


class ShardNews:
  """Turns what shards say of themselves into lines, each once."""

  def __init__(
    self, setup: Setup, memory: Path, message: int, *, resumed: bool
  ):
    """Starts with nothing told of a cell that had received so many messages;
    `resumed` if its journals held something."""
    self._message = message
    self._rollbacks: list[Any] = [None] * setup.shards  # that were told
    self._resumed = resumed
    self._gathers = 0 if message else setup.gathered
    self._in_memory = (memory / "shard-0" / "messages").exists()

  def of(self, status: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines that are new, from the status of each shard."""
    news = []
    if self._resumed:
      self._resumed = False
      news.append(self._going_on(status))
      self._rollbacks = [shard["rollback"] for shard in status]
    for shard in status:
      news += shard["news"]
    for index, shard in enumerate(status):
      back = shard["rollback"]
      if back in (None, self._rollbacks[index]):
        continue
      self._rollbacks[index] = back
      of = f"shard {index} " if len(status) > 1 else ""
      news.append(
        f"{of}rolled back {back.updates} updates, to message"
        f" {back.message}{_why(back)}"
      )
    if self._gathers and status[0]["received"]:
      wanted, there = self._gathers, len(status[0]["workers"])
      self._gathers = 0
      # At the end of a short run they have left already.
      if there < wanted and not status[0]["stopped"]:
        news.append(
          f"it began with only {there} of {wanted} workers; the others"
          " may still come"
        )
    return news

  def _going_on(self, status):
    at = f"going on at message {self._message}, from"
    back = [shard["rollback"] for shard in status if shard["rollback"]]
    if not back:
      # Everything since the checkpoint, if there is one, was without effect.
      return f"{at} {'shared memory' if self._in_memory else 'the trace'}"
    undone = sum(rollback.updates for rollback in back)
    source = f"the checkpoint of message {back[0].message}"
    if not back[0].row:
      source = "the beginning, as there is no checkpoint"
    of = f" of {len(back)} shards" if len(back) > 1 else ""
    return f"{at} {source}: {undone} updates{of} rolled back{_why(back[0])}"


def _why(rollback):
  return f" ({rollback.why})" if rollback.why else ""
