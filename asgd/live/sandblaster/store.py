"""The files of a shard, from which it is rebuilt after a kill.

  commands    a log of commands and their answers
  image       the number of a command, and the vectors just before it: their
              names and files; also the evaluation and its parameters
  vector-N    a vector; the file is never changed
  message-E-J the message of job J in the present evaluation E

After a kill the shard loads the image and executes the commands of the log from
the image's number on. The log keeps earlier commands for their answers: the
driver may ask for an answer again.

The files are in the run's folder in /dev/shm, so they outlive a killed process.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asgd import wire
from asgd.live import store
from asgd.sandblaster import Command

_VECTOR, _MESSAGE = "vector-", "message-"
Rows = Any  # a tree of arrays: a shard's part of a vector
Entry = tuple[Command, float | None]  # of the log: a command, and its answer


class Stored(NamedTuple):
  """The contents of the files."""

  number: int  # of the first command after the image
  vectors: dict[str, Rows]
  evaluation: int
  params: Rows  # "sent" in the image's file; None before the first evaluation
  commands: list[Entry]  # of the log
  messages: dict[tuple[int, int], Rows]  # (evaluation, job) -> rows


class ShardStore:
  """The files of one shard."""

  def __init__(
    self, folder: Path, rows_like: Rows, disk: Any = os, *, clear: bool = False
  ):
    """Opens the files in an existing folder.

    Args:
      folder: the folder of the files.
      rows_like: arrays with the shapes and dtypes of rows.
      disk: has the methods `write` and `replace` of `os`.
      clear: whether to remove all files first.

    Raises:
      store.Changed: if the log of commands was changed.
    """
    if clear:  # first of all: opening a damaged log would raise an error
      for path in folder.iterdir():
        path.unlink()
    self._disk = disk
    self._folder, self._layout = folder, wire.layout(rows_like)
    # (vector, number of its file), for the vectors of the last image. The list
    # keeps the vectors alive, so that Python does not use their ids again.
    self._image_files: list[tuple[Rows, int]] = []
    self._next_file = 0  # number of the next vector file
    self._commands = store.Log(self._folder / "commands", disk)

  def close(self) -> None:
    """Closes the log of commands."""
    self._commands.close()

  # Writing.

  def append_command(self, command: Command, answer: float | None) -> None:
    """Adds an executed command and its answer to the log."""
    self._commands.append(_encode(command, answer))

  def replace_commands(self, entries: Iterable[Entry]) -> None:
    """Replaces all commands of the log."""
    self._commands.replace(_encode(*entry) for entry in entries)

  def write_message(self, evaluation: int, job: int, rows: Rows) -> None:
    """Writes the message of a job."""
    self._write(f"{_MESSAGE}{evaluation}-{job}", rows)

  def remove_message(self, evaluation: int, job: int) -> None:
    """Removes the message of a job."""
    path = self._folder / f"{_MESSAGE}{evaluation}-{job}"
    path.unlink(missing_ok=True)

  def keep_messages_of(self, evaluation: int) -> None:
    """Removes the messages of all evaluations but one."""
    for path in self._folder.glob(f"{_MESSAGE}*"):
      if not path.name.startswith(f"{_MESSAGE}{evaluation}-"):
        path.unlink()

  def write_image(
    self,
    number: int,
    vectors: Mapping[str, Rows],
    evaluation: int,
    params: Rows,
  ) -> None:
    """Writes an image. Vectors that the last image had are not written again.

    Arguments are fields of `Stored`.
    """
    # Commands replace vectors and never write into them. So the same object has
    # the same values, and its file is still right.
    files = {id(rows): file for rows, file in self._image_files}
    image_files = []

    def write_once(rows: Rows) -> int:
      if id(rows) not in files:
        files[id(rows)] = self._next_file
        self._write(f"{_VECTOR}{self._next_file}", rows)
        self._next_file += 1
      image_files.append((rows, files[id(rows)]))
      return files[id(rows)]

    image = {
      "number": number,
      "evaluation": evaluation,
      "vectors": {name: write_once(rows) for name, rows in vectors.items()},
      "sent": None if params is None else write_once(params),
    }
    path = self._folder / "image"
    store.write_body(path, json.dumps(image).encode(), self._disk)
    # Old vectors are removed only after the image that drops them is written.
    used_files = {file for _, file in image_files}
    for _, file in self._image_files:
      if file not in used_files:
        (self._folder / f"{_VECTOR}{file}").unlink(missing_ok=True)
    self._image_files = image_files

  def _write(self, name: str, rows: Rows) -> None:
    """Writes rows to a file, with a checksum."""
    data = bytearray(self._layout.nbytes)
    wire.write(self._layout, rows, data)
    store.write_body(self._folder / name, data, self._disk)

  # Reading.

  def load(self) -> Stored | None:
    """Returns the contents of the files; None if there is no image. Raises
    store.Changed, with the file's name, for a file that was changed."""
    path = self._folder / "image"
    if not path.exists():
      return None
    image = json.loads(store.read_body(path))
    file_numbers = {*image["vectors"].values()}
    if image["sent"] is not None:
      file_numbers.add(image["sent"])
    trees = {file: self._read(f"{_VECTOR}{file}") for file in file_numbers}
    for path in self._folder.glob(f"{_VECTOR}*"):
      if path.suffix or int(path.name.removeprefix(_VECTOR)) not in trees:
        path.unlink()  # a kill came before the image with this vector
    self._image_files = [(rows, file) for file, rows in trees.items()]
    self._next_file = max(trees, default=-1) + 1
    return Stored(
      number=image["number"],
      vectors={name: trees[file] for name, file in image["vectors"].items()},
      evaluation=image["evaluation"],
      params=trees.get(image["sent"]),
      commands=list(map(_decode, self._commands.bodies)),
      messages=dict(self._read_messages(image["evaluation"])),
    )

  def _read(self, name: str) -> Rows:
    """Reads rows from a file."""
    body = store.read_body(self._folder / name)
    if len(body) != self._layout.nbytes:  # a run with other settings wrote it
      raise store.Changed(self._folder / name)
    return wire.read(self._layout, body)

  def _read_messages(
    self, evaluation: int
  ) -> Iterator[tuple[tuple[int, int], Rows]]:
    """Yields ((evaluation, job), rows) of an evaluation's messages, and removes
    all other message files."""
    for path in self._folder.glob(f"{_MESSAGE}*"):
      if path.suffix:  # a file that a kill left half written
        path.unlink()
        continue
      fields = path.name.removeprefix(_MESSAGE).split("-")
      message_evaluation, job = map(int, fields)
      if message_evaluation == evaluation:
        yield (evaluation, job), self._read(path.name)
      else:
        path.unlink()


def _encode(command: Command, answer: float | None) -> bytes:
  """Returns an entry of the log as bytes: a command and its answer."""
  return f"{command.format()};{json.dumps(answer)}".encode()


def _decode(body: bytes) -> Entry:
  """Returns the entry of the log that `_encode` made into `body`."""
  command, _, answer = body.decode().partition(";")
  return Command.parse(command), json.loads(answer)
