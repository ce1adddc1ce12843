"""The files of a shard, from which it is rebuilt after a kill.

  commands    each command since the evaluation began, and its answer: a log
  image       names of the vectors at some command, and their files
  vector-N    a vector, which is never changed
  message-E-J the message of job J in the present evaluation E

The files are in the memory of the run (/dev/shm), which the kernel keeps when a
process dies.
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
Rows = Any
Entry = tuple[Command, float | None]  # a command, and its answer


class Stored(NamedTuple):
  """The contents of the files."""

  number: int  # of the next command, when the image was taken
  vectors: dict[str, Rows]
  evaluation: int
  sent: Rows  # parameters that workers fetch
  journal: list[Entry]
  messages: dict[tuple[int, int], Rows]  # (evaluation, job) -> rows


class ShardStore:
  """The files of one shard."""

  def __init__(
    self, folder: Path, like: Rows, disk: Any = os, *, clear: bool = False
  ):
    """Opens the files in an existing folder.

    Args:
      folder: of the files.
      like: with the shapes and dtypes of rows.
      disk: writes as `os` does.
      clear: whether to remove all files first.

    Raises:
      store.Changed: if the log of commands was changed.
    """
    if clear:  # before the log is opened: an old one may be damaged
      for path in folder.iterdir():
        path.unlink()
    self._disk = disk
    self._folder, self._layout = folder, wire.layout(like)
    self._in_image: list[tuple[Rows, int]] = []  # (vector, number of its file)
    self._next = 0  # number of the next vector file
    self._commands = store.Log(self._folder / "commands", disk)

  def close(self) -> None:
    """Closes the log of commands."""
    self._commands.close()

  # Writing.

  def add(self, command: Command, answer: float | None) -> None:
    """Adds an executed command and its answer."""
    self._commands.append(_body(command, answer))

  def start_journal(self, entries: Iterable[Entry]) -> None:
    """Replaces all commands of the log."""
    self._commands.replace(_body(*entry) for entry in entries)

  def put(self, evaluation: int, job: int, rows: Rows) -> None:
    """Writes a message."""
    self._write(f"{_MESSAGE}{evaluation}-{job}", rows)

  def drop(self, evaluation: int, job: int) -> None:
    """Removes a message."""
    path = self._folder / f"{_MESSAGE}{evaluation}-{job}"
    path.unlink(missing_ok=True)

  def keep(self, evaluation: int) -> None:
    """Removes the messages of all evaluations but one."""
    for path in self._folder.glob(f"{_MESSAGE}*"):
      if not path.name.startswith(f"{_MESSAGE}{evaluation}-"):
        path.unlink()

  def image(
    self,
    number: int,
    vectors: Mapping[str, Rows],
    evaluation: int,
    sent: Rows,
  ) -> None:
    """Writes an image; vectors that the last image had are not written
    again."""
    files = {id(rows): file for rows, file in self._in_image}
    in_image = []

    def file_of(rows):
      if id(rows) not in files:
        files[id(rows)] = self._next
        self._write(f"{_VECTOR}{self._next}", rows)
        self._next += 1
      in_image.append((rows, files[id(rows)]))
      return files[id(rows)]

    image = {
      "number": number,
      "evaluation": evaluation,
      "vectors": {name: file_of(rows) for name, rows in vectors.items()},
      "sent": None if sent is None else file_of(sent),
    }
    path = self._folder / "image"
    store.write_body(path, json.dumps(image).encode(), self._disk)
    # Old vectors are removed only after the image that drops them is written.
    used = {file for _, file in in_image}
    for _, file in self._in_image:
      if file not in used:
        (self._folder / f"{_VECTOR}{file}").unlink(missing_ok=True)
    self._in_image = in_image

  def _write(self, name, rows):
    data = bytearray(self._layout.nbytes)
    wire.write(self._layout, rows, data)
    store.write_body(self._folder / name, data, self._disk)

  # Reading.

  def load(self) -> Stored | None:
    """Returns the contents of the files; None if there is no image. Raises
    ValueError, which names the file, for a file that no shard wrote."""
    path = self._folder / "image"
    if not path.exists():
      return None
    image = json.loads(store.read_body(path))
    numbers = {*image["vectors"].values()}
    if image["sent"] is not None:
      numbers.add(image["sent"])
    trees = {n: self._read(f"{_VECTOR}{n}") for n in numbers}
    for path in self._folder.glob(f"{_VECTOR}*"):
      if path.suffix or int(path.name.removeprefix(_VECTOR)) not in trees:
        path.unlink()  # of an image that a kill kept from being written
    self._in_image = [(rows, n) for n, rows in trees.items()]
    self._next = max(trees, default=-1) + 1
    return Stored(
      image["number"],
      {name: trees[n] for name, n in image["vectors"].items()},
      image["evaluation"],
      trees.get(image["sent"]),
      list(map(_entry, self._commands.bodies)),
      dict(self._read_messages(image["evaluation"])),
    )

  def _read(self, name):
    body = store.read_body(self._folder / name)
    if len(body) != self._layout.nbytes:  # of a run with other settings
      raise store.Changed(self._folder / name)
    return wire.read(self._layout, body)

  def _read_messages(
    self, evaluation: int
  ) -> Iterator[tuple[tuple[int, int], Rows]]:
    """Yields ((evaluation, job), rows) of an evaluation's messages, and removes
    all other message files."""
    for path in self._folder.glob(f"{_MESSAGE}*"):
      if path.suffix:
        path.unlink()
        continue
      number, job = map(int, path.name.removeprefix(_MESSAGE).split("-"))
      if number == evaluation:
        yield (number, job), self._read(path.name)
      else:
        path.unlink()


def _body(command: Command, answer: float | None) -> bytes:
  return f"{command.format()};{json.dumps(answer)}".encode()


def _entry(body: bytes) -> Entry:
  command, _, answer = body.decode().partition(";")
  return Command.parse(command), json.loads(answer)
