"""The files of a shard, from which it comes back when it is killed.

  commands    each command since the evaluation began, and its answer: a log
  image       which vectors there were at some command, and in which files
  vector-N    a vector, which is never changed
  message-E-J the message of a job, of the evaluation that is under way

They lie in the memory of the run (/dev/shm), which the kernel keeps when a
process dies.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asgd import wire
from asgd.live import store
from asgd.sandblaster import Command

_VECTOR, _MESSAGE = "vector-", "message-"
Rows = Any
Entry = tuple[Command, float | None]  # a command, and its answer


class Stored(NamedTuple):
  """What is in the files."""

  number: int  # of the next command, when the image was taken
  vectors: dict[str, Rows]
  evaluation: int
  sent: Rows  # what workers fetch
  journal: list[Entry]
  messages: dict[tuple[int, int], Rows]  # (evaluation, job) -> rows


class ShardStore:
  """The files of one shard."""

  def __init__(
    self, folder: Path, like: Rows, disk: Any = os, *, anew: bool = False
  ):
    """Opens the files in an existing folder; `anew` removes what it has first.
    `like` has shapes and dtypes of rows; `disk` writes as `os` does. Raises
    store.Changed."""
    if anew:  # before they are read: they may be damaged
      for path in folder.iterdir():
        path.unlink()
    self._disk = disk
    self._folder, self._layout = folder, wire.layout(like)
    self._known: list[tuple[Rows, int]] = []  # vectors in files, of the image
    self._next = 0  # vector file
    self._commands = store.Log(self._folder / "commands", disk)

  def close(self) -> None:
    """Closes them."""
    self._commands.close()

  # Writing.

  def add(self, command: Command, answer: float | None) -> None:
    """Adds a command that the shard has done."""
    self._commands.append(_body(command, answer))

  def start_journal(self, entries: Iterable[Entry]) -> None:
    """Puts others in the place of all commands."""
    self._commands.replace(_body(*entry) for entry in entries)

  def put(self, evaluation: int, job: int, rows: Rows) -> None:
    """Writes a message."""
    self._write(f"{_MESSAGE}{evaluation}-{job}", rows)

  def drop(self, evaluation: int, job: int) -> None:
    """Removes a message."""
    path = self._folder / f"{_MESSAGE}{evaluation}-{job}"
    path.unlink(missing_ok=True)

  def keep(self, evaluation: int) -> None:
    """Removes the messages of all other evaluations."""
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
    """Writes an image; vectors that the last one had are not written again."""
    files = {id(rows): file for rows, file in self._known}
    known = []

    def file_of(rows):
      if id(rows) not in files:
        files[id(rows)] = self._next
        self._write(f"{_VECTOR}{self._next}", rows)
        self._next += 1
      known.append((rows, files[id(rows)]))
      return files[id(rows)]

    image = {
      "number": number,
      "evaluation": evaluation,
      "vectors": {name: file_of(rows) for name, rows in vectors.items()},
      "sent": None if sent is None else file_of(sent),
    }
    path = self._folder / "image"
    store.write_body(path, json.dumps(image).encode(), self._disk)
    there = {file for _, file in known}
    for _, file in self._known:
      if file not in there:
        (self._folder / f"{_VECTOR}{file}").unlink(missing_ok=True)
    self._known = known

  def _write(self, name, rows):
    data = bytearray(self._layout.nbytes)
    wire.write(self._layout, rows, data)
    store.write_body(self._folder / name, data, self._disk)

  # Reading.

  def load(self) -> Stored | None:
    """Returns what is there, None without an image. Raises ValueError, which
    names the file, for what no shard wrote."""
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
        path.unlink()  # a kill left it
    self._known = [(rows, n) for n, rows in trees.items()]
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

  def _read_messages(self, evaluation):
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
