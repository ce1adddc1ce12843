"""A shard of Sandblaster in a host: it executes commands, and serves workers.

The shard writes each command and message to files before it answers. So its
process may be killed at any time: the next process has the same vectors, to the
bit, and gives the same answers.
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
  """A VectorShard with its image, journal and messages in files."""

  def __init__(
    self,
    inside: Inside,
    folder: Path,
    image: Image,
    evaluation: int = -1,
    *,
    from_image: bool,
  ):
    """Resumes from the files of the folder, or starts from an image.

    Args:
      inside: the functions of the host.
      folder: the folder of the shard's files.
      image: the image to start from. Its `point` is needed without `from_image`
        too: it has the shapes and dtypes of the shard's rows.
      evaluation: the evaluation of the image.
      from_image: whether to remove the files and start from the image.

    Raises:
      ValueError: if files were changed, or are missing without `from_image`.
    """
    safe_files.make_private(folder)
    rows_like = image.vectors["point"]
    self._store = ShardStore(folder, rows_like, inside.disk, clear=from_image)
    stored = self._store.load()
    self._evaluation = evaluation
    # The shard's rows of the evaluation's parameters, which workers fetch. A
    # separate reference: commands replace `trial` before the next evaluation
    # begins.
    self._params = image.vectors.get("trial")
    # Jobs of this evaluation of which the shard has discarded the messages.
    self._discarded_jobs: set[int] = set()
    if stored is None and not from_image:
      raise store.Changed(folder)
    # [1] Start from the given image.
    if stored is None:
      super().__init__(rows_like, image)
      self.image()
      return
    # [2] Or resume from the stored image, the later commands and the messages.
    super().__init__(rows_like, Image(stored.number, stored.vectors))
    self._evaluation, self._params = stored.evaluation, stored.params
    self._journal = stored.commands
    # With an empty journal, the next command is the first after the image.
    self._first_number = self.number - len(self._journal)
    if self._journal:
      self._first_number = self._journal[0][0].number
    self._slots = {
      message_name(*key): rows for key, rows in stored.messages.items()
    }
    for command, _ in self._journal:
      self._mark_discarded(command)
    self._vectors = None  # `_alive` rebuilds them by executing the journal

  # Methods that the driver calls.

  def execute_all(self, commands: Sequence[Command]) -> list[float | None]:
    """Executes commands one after the other; returns their answers."""
    return [self.execute(command) for command in commands]

  def begin(self, evaluation: int, number: int) -> None:
    """Begins an evaluation at the present `trial`, unless it has begun. Drops
    the answers of commands below `number`, which no driver will repeat."""
    if evaluation <= self._evaluation:
      return
    params = self.read("trial")
    self._evaluation, self._params, self._slots = evaluation, params, {}
    self._discarded_jobs.clear()
    self.forget(number)  # also saves an image, so the log may be replaced
    self._store.replace_commands(self._journal)
    self._store.keep_messages_of(evaluation)

  def image_at(self, number: int) -> Image | None:
    """Returns the vectors as they were just before command `number`; None if
    the shard has executed this command already, for an earlier driver."""
    if self.number < number:
      raise ValueError(f"the shard is at command {self.number}, not {number}")
    if self.number > number:
      return None
    return Image(number, dict(self._alive()))

  # Methods that workers call.

  def fetch(self, evaluation: int) -> Rows | None:
    """Returns the shard's rows of an evaluation's parameters; None if the
    evaluation has ended."""
    return self._params if evaluation == self._evaluation else None

  def push(self, evaluation: int, job: int, rows: Rows) -> None:
    """Stores the first message of a job. Drops later messages of the job, and
    messages of ended evaluations."""
    name = message_name(evaluation, job)
    if evaluation != self._evaluation or job in self._discarded_jobs:
      return
    if name in self._slots:  # a repeated push, or a copy of the job
      return
    self._store.write_message(evaluation, job, rows)
    # Copied: the host may reuse the memory of the call's arguments.
    self.put(name, jax.tree.map(np.array, rows))

  # Files.

  def _add_to_journal(self, command: Command, answer: float | None) -> None:
    """Adds a command and its answer to the journal, in memory and in its
    file."""
    super()._add_to_journal(command, answer)
    self._store.append_command(command, answer)
    self._mark_discarded(command)

  def _mark_discarded(self, command: Command) -> None:
    """Records that a command discarded a message, so that a repeated push of
    the message does not store it again."""
    if command.operation == "discard":
      evaluation, job = _parse_message_name(command.target)
      if evaluation == self._evaluation:
        self._discarded_jobs.add(job)

  def image(self) -> Image:
    """Saves and returns an image, and frees the discarded slots."""
    self._alive()  # after a restart this executes the journal
    discarded_names = set(self._discarded)  # the call of `super` clears it
    image = super().image()
    self._store.write_image(
      image.number, image.vectors, self._evaluation, self._params
    )
    # Remove the messages after the image is written: a restart from the
    # previous image would need them.
    for name in discarded_names:
      self._store.remove_message(*_parse_message_name(name))
    return image

  def close(self) -> None:
    """Closes the files."""
    self._store.close()


def _parse_message_name(name: str) -> tuple[int, int]:
  """Returns (evaluation, job) of a `message_name`."""
  _, evaluation, job = name.split("/")
  return int(evaluation), int(job)
