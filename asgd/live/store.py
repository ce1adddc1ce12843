"""Bodies of a run in checksummed files, from which a lost process is restored.

A *body* is bytes that only their writer understands: a request, a command, an
image, a message. There are two kinds of files:

  a file of one body, which is replaced as a whole   body, CRC-32
  a log, to which bodies are added one by one        length, CRC-32 of the body,
                                                     CRC-32 of these two, body

A kill leaves the old body or the new one. In a log it leaves complete bodies
and at most one that is cut short, which is dropped. Any other content raises
`Changed`. Other modules store rows (`journal`, `records`), and bodies of one
size that are read while they are written (`slots`).
"""

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asgd import safe_files
from asgd.checks import RERUN
from asgd.live.append_only import AppendOnlyFile, writing

_CRC = struct.Struct("<I")
# Length, CRC-32 of the body, CRC-32 of these two. If the last CRC is right and
# the file ends before the body does, a kill cut the body short.
_HEAD = struct.Struct("<III")


class Changed(ValueError):
  """A file was changed or removed since the run wrote it."""

  def __init__(self, path: Path | str):
    super().__init__(
      f"{path} is not what the run wrote: it was removed or changed while the"
      f" run used it; {RERUN} from the last checkpoint"
    )


def write_body(path: Path, body: bytes | bytearray, disk: Any = os) -> None:
  """Writes a file of one body; it replaces an earlier file.

  Args:
    path: the path of the file.
    body: its content.
    disk: has the methods `write` and `replace` of `os`.

  Raises:
    Changed: if the folder was removed.
    ValueError: if the body cannot be written.

  Example:
    >>> path = getfixture("tmp_path") / "image"
    >>> write_body(path, b"rows")
    >>> read_body(path)
    b'rows'
    >>> _ = path.write_bytes(b"other")
    >>> read_body(path)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    asgd.live.store.Changed: ...image is not what the run wrote: ...
  """
  data = bytearray(body)
  data += _CRC.pack(zlib.crc32(body))
  with writing(path):
    try:
      safe_files.write(path, data, disk)
    except FileNotFoundError:
      raise Changed(path) from None


def read_body(path: Path) -> bytes:
  """Returns the body of a file. Raises Changed if it is missing or changed."""
  try:
    data = path.read_bytes()
  except OSError:
    raise Changed(path) from None
  body = data[: -_CRC.size]
  if _CRC.pack(zlib.crc32(body)) != data[-_CRC.size :]:
    raise Changed(path)
  return body


class Log(AppendOnlyFile):
  """A log of bodies, with one writer.

  Example:
    >>> path = getfixture("tmp_path") / "log"
    >>> log = Log(path)
    >>> log.append(b"one")
    >>> log.append(b"two")
    >>> Log(path).bodies
    [b'one', b'two']
  """

  def __init__(self, path: Path, disk: Any = os):
    """Opens or creates the file; see `AppendOnlyFile`. Raises Changed."""
    data = Path(path).read_bytes() if Path(path).exists() else b""
    # Bodies of the file when it was opened; `append` does not add to them.
    self.bodies, size = _split(path, data)
    super().__init__(path, disk)
    self._cut(size)

  @property
  def size(self) -> int:
    """The size of the file in bytes."""
    return self._size

  def append(self, body: bytes) -> None:
    """Adds a body, which a later kill does not lose. Raises ValueError if it
    cannot be written."""
    self._add(_with_head(body))

  def replace(self, bodies: Iterable[bytes] = ()) -> None:
    """Replaces all bodies in one step: a kill leaves the old or the new ones.
    """
    self.bodies = []
    data = b"".join(map(_with_head, bodies))
    if not data:
      self._cut(0)
      return
    with writing(self.name):
      safe_files.write(Path(self.name), data, self._disk)
    # The open descriptor refers to the old file.
    self.close()
    super().__init__(Path(self.name), self._disk)


def _with_head(body: bytes) -> bytes:
  """Returns a body with its head."""
  fields = len(body), zlib.crc32(body)
  head_crc = zlib.crc32(_HEAD.pack(*fields, 0))
  return _HEAD.pack(*fields, head_crc) + body


def _split(path: Path, data: bytes) -> tuple[list[bytes], int]:
  """Returns (bodies of a log, their size in bytes with heads). Raises Changed.
  """
  bodies, start = [], 0
  while start + _HEAD.size <= len(data):
    length, body_crc, head_crc = _HEAD.unpack_from(data, start)
    if zlib.crc32(_HEAD.pack(length, body_crc, 0)) != head_crc:
      raise Changed(path)
    end = start + _HEAD.size + length
    if end > len(data):  # a kill cut the last body short
      break
    body = data[start + _HEAD.size : end]
    if zlib.crc32(body) != body_crc:
      raise Changed(path)
    bodies.append(body)
    start = end
  return bodies, start
