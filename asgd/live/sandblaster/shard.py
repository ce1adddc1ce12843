"""A shard of Sandblaster in a host: it obeys commands, and is asked by workers.

All that it was told is in files before it answers, so its process may be killed
at any time: the next one has the same vectors, to the bit, and gives the same
answers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asgd import safe_files
from asgd.live import store
from asgd.live.hosts import Inside
from asgd.live.sandblaster.store import ShardStore
from asgd.sandblaster import Command, Image, VectorShard, message_name

Rows = Any  # a tree of arrays: a shard's part of a vector


class LiveShard(VectorShard):
  """One shard."""

  def __init__(
    self,
    inside: Inside,
    folder: Path,
    image: Image,
    evaluation: int = -1,
    *,
    anew: bool,
  ):
    """Resumes from the files in its folder, or starts from an image, in an
    evaluation, if it begins `anew`. Raises ValueError for files that were
    changed or are gone."""
    safe_files.make_private(folder)
    like = image.vectors["point"]
    self._store = ShardStore(folder, like, inside.disk, anew=anew)
    stored = self._store.load()
    self._evaluation = evaluation
    self._sent = image.vectors.get("trial")  # what workers fetch
    self._dropped: set[int] = set()  # jobs whose messages are used
    if stored is None and not anew:
      raise store.Changed(folder)
    if stored is None:
      super().__init__(like, image)
      self.image()
      return
    super().__init__(like, Image(stored.number, stored.vectors))
    self._evaluation, self._sent = stored.evaluation, stored.sent
    self._journal = stored.journal
    self._first = self.number - len(self._journal)
    if self._journal:
      self._first = self._journal[0][0].number
    self._slots = {message_name(*k): v for k, v in stored.messages.items()}
    for command, _ in self._journal:
      self._mind(command)
    self._vectors = None  # comes back from the image and the commands since

  # Told by the driver.

  def obey_all(self, commands: Sequence[Command]) -> list[float | None]:
    """Obeys some commands, one after the other; returns their answers."""
    return [self.obey(command) for command in commands]

  def begin(self, evaluation: int, number: int) -> None:
    """An evaluation begins, at `trial` as it is; nobody will ask again for the
    answers to commands below a number."""
    if evaluation <= self._evaluation:
      return
    sent = self.read("trial")
    self._evaluation, self._sent, self._slots = evaluation, sent, {}
    self._dropped.clear()
    self.forget(number)
    self._store.start_journal(self._journal)
    self._store.keep(evaluation)

  def image_at(self, number: int) -> Image | None:
    """Returns its vectors as of a command that it has obeyed all commands
    before; None if it has obeyed that one, too, of a driver before this one."""
    if self.number < number:
      raise ValueError(f"the shard is at command {self.number}, not {number}")
    if self.number > number:
      return None
    return Image(number, dict(self._alive()))

  # Told by workers.

  def fetch(self, evaluation: int) -> Rows | None:
    """Returns its rows of the parameters of an evaluation; None if that is
    over."""
    return self._sent if evaluation == self._evaluation else None

  def push(self, evaluation: int, job: int, rows: Rows) -> None:
    """Takes a message. The first one of a job counts, and those of evaluations
    that are over are dropped."""
    name = message_name(evaluation, job)
    if evaluation != self._evaluation or job in self._dropped:
      return
    if name in self._slots:
      return
    self._store.put(evaluation, job, rows)
    # Copied: they may lie in memory that is needed for other messages.
    self.put(name, jax.tree.map(np.array, rows))

  # What it writes down.

  def _note(self, command, answer):
    super()._note(command, answer)
    self._store.add(command, answer)
    self._mind(command)

  def _mind(self, command):
    """A message that is discarded is not taken again."""
    if command.operation == "discard":
      evaluation, job = _of_message(command.target)
      if evaluation == self._evaluation:
        self._dropped.add(job)

  def image(self) -> Image:
    """Takes its image, and frees the slots that are discarded."""
    self._alive()
    used = set(self._used)
    image = super().image()
    self._store.image(*image, self._evaluation, self._sent)
    for name in used:
      self._store.drop(*_of_message(name))
    return image

  def close(self) -> None:
    """Lets go of its files."""
    self._store.close()


def _of_message(name: str) -> tuple[int, int]:
  """Returns (evaluation, job) of a `message_name`."""
  _, evaluation, job = name.split("/")
  return int(evaluation), int(job)
