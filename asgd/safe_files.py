"""Files and folders that a symbolic link cannot lead elsewhere.

Writing through a link changes its target, and emptying a linked folder empties
the target. So a write replaces the file by a new one, a file that grows is
opened without following links, and a folder is opened only if it is no link.

A full disk raises `DiskFull`; its text names the file and the remedy.
"""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_NO_LINK = (errno.ELOOP, errno.ENOTDIR)  # errors of O_NOFOLLOW and O_DIRECTORY
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EDQUOT: a user's quota
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)  # permission is missing
_BELOW_FILE = (errno.ENOTDIR, errno.EEXIST)  # errors of `mkdir` below a file


class DiskFull(OSError):
  """A file was not written, because its disk or the user's part of it is full.

  Example:
    >>> print(DiskFull(errno.ENOSPC, "No space left on device", "a/b.csv"))
    cannot write a/b.csv (No space left on device): make room, and run this \
again; a training with a folder resumes from its last save
  """

  def __str__(self) -> str:
    return (
      f"cannot write {self.filename} ({self.strerror}): make room, and run this"
      " again; a training with a folder resumes from its last save"
    )


def _link_error(path: Path) -> ValueError:
  """Returns the error for a path that is a symbolic link."""
  return ValueError(
    f"{path} is a symbolic link, and results are not written through one:"
    " remove it"
  )


@contextlib.contextmanager
def _explain_errors(path: Path | str) -> Iterator[None]:
  """Adds the path and the remedy to two errors: the disk is full, or a folder
  has the name of the file."""
  try:
    yield
  except DiskFull:
    raise
  except IsADirectoryError as error:
    reason = "a folder is in the place of a file: remove it"
    raise IsADirectoryError(errno.EISDIR, reason, str(path)) from error
  except OSError as error:
    if error.errno not in FULL:
      raise
    raise DiskFull(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def replacing(path: Path, disk: Any = os) -> Iterator[IO[bytes]]:
  """Opens a new file that replaces `path` at the end of the block.

  If the block fails, the new file is removed. If `path` is a link, its target
  stays unchanged. `disk` has a `replace` like that of `os`."""
  temporary = path.with_name(path.name + ".tmp")
  with _explain_errors(temporary), contextlib.suppress(FileNotFoundError):
    temporary.unlink()  # left by a process that was killed
  with _explain_errors(path), contextlib.ExitStack() as stack:
    try:
      file = stack.enter_context(temporary.open("x+b"))
    except FileNotFoundError as error:
      reason = "the folder of this file does not exist: make it"
      raise FileNotFoundError(error.errno, reason, str(path)) from error
    try:
      yield file
      file.close()
      disk.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):
        temporary.unlink()
      raise


def write(path: Path, content: str | bytes | bytearray, disk: Any = os) -> None:
  """Writes a file atomically: complete or not at all, see `replacing`.

  Args:
    path: the path of the file.
    content: all of it; a str is encoded as UTF-8.
    disk: has `write` and `replace` like those of `os`; a simulation passes its
      own.

  Example:
    >>> folder = getfixture("tmp_path")
    >>> (folder / "mine").write_text("years of work")
    13
    >>> (folder / "out.csv").symlink_to(folder / "mine")
    >>> write(folder / "out.csv", "a,b")
    >>> (folder / "out.csv").read_text(), (folder / "mine").read_text()
    ('a,b', 'years of work')
  """
  if isinstance(content, str):
    content = content.encode("utf-8", "replace")
  unwritten = memoryview(content)
  with replacing(path, disk) as file:
    while unwritten:
      # A write may be partial.
      unwritten = unwritten[disk.write(file.fileno(), unwritten) :]


def save_figure(figure: Any, path: Path, **options: Any) -> None:
  """Writes a matplotlib figure atomically, in the format of the path's suffix;
  options are those of `savefig`."""
  with replacing(path) as file:
    figure.savefig(file, format=path.suffix[1:], **options)


def descriptor(path: Path | str, flags: int, mode: int = 0o666) -> int:
  """Opens a file as `os.open` does; ValueError if it is a symbolic link."""
  try:
    with _explain_errors(path):
      return os.open(path, flags | os.O_NOFOLLOW, mode)
  except OSError as error:
    if error.errno == errno.ELOOP:
      raise _link_error(Path(path)) from error
    raise


class _GrowingFile(io.FileIO):
  """A file that is appended to: a write is complete, or raises `DiskFull`."""

  def __init__(self, path: Path):
    """Opens the file, or creates it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    super().__init__(descriptor(path, flags), "ab")
    self._path = path

  def write(self, data: Any) -> int:
    """Writes all of `data`."""
    content = unwritten = memoryview(data).cast("B")
    with _explain_errors(self._path):
      while unwritten:
        # A write may be partial.
        unwritten = unwritten[super().write(unwritten) :]
    return len(content)


def appending(path: Path, *, buffered: bool = True) -> IO[bytes]:
  """Opens a file for appending, and creates it if it is missing. If `buffered`,
  data may be written only when the file is flushed. Raises ValueError if the
  path is a symbolic link."""
  file = _GrowingFile(path)
  if buffered:
    return io.BufferedWriter(file)
  return file


def truncate(path: Path, size: int) -> None:
  """Cuts a file to `size` bytes; ValueError if it is a symbolic link."""
  with os.fdopen(descriptor(path, os.O_WRONLY), "wb") as file:
    file.truncate(size)


def _open_folder(path: Path) -> int:
  """Returns a descriptor of a folder; ValueError if it is a link or a file."""
  try:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
  except OSError as error:
    if error.errno not in _NO_LINK:
      raise
    if path.is_symlink():
      raise _link_error(path) from error
    raise ValueError(
      f"{path} is a file, but a folder is needed at this path: remove it"
    ) from error


@contextlib.contextmanager
def opening(folder: Path | str) -> Iterator[None]:
  """Turns the OSError of a folder that cannot be opened or made into a
  ValueError with the reason and the remedy.

  Example:
    >>> with opening("runs/mine"):
    ...   raise PermissionError(errno.EACCES, "Permission denied", "runs")
    Traceback (most recent call last):
    ValueError: runs/mine cannot be opened (Permission denied: runs): change \
its permissions, or name another folder
  """
  try:
    yield
  except OSError as error:
    reason, is_refused = error.strerror, error.errno in CLOSED
    if error.errno in _BELOW_FILE:
      reason = "it is below a file"
    elif not is_refused and error.errno != errno.ENAMETOOLONG:
      raise
    remedy = "change its permissions, or " * is_refused + "name another folder"
    raise ValueError(
      f"{folder} cannot be opened ({reason}: {error.filename or folder}):"
      f" {remedy}"
    ) from error


def make_folder(path: Path) -> None:
  """Makes a folder and its parents, unless they exist. ValueError if the path
  is a file or a symbolic link; links among the parents are followed."""
  with _explain_errors(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      path.mkdir()
    except FileExistsError:
      # Opening it checks that it is a folder and no link.
      os.close(_open_folder(path))


def hold_folder(path: Path, *, create: bool = True) -> int:
  """Opens a folder that only this user can open.

  Args:
    path: the path of the folder; those above it may be links.
    create: whether the folder and its parents are made if they are missing.

  Returns:
    A descriptor of the folder. `/proc/self/fd/DESCRIPTOR` names this folder
    even if another one replaces it at `path` later.

  Raises:
    FileNotFoundError: the folder is missing, and `create` is False.
    ValueError: if the path is a link, a file or a folder of another user.
  """
  if create:
    with _explain_errors(path):
      path.parent.mkdir(parents=True, exist_ok=True)
      with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
  # The descriptor keeps the folder that was checked, whatever happens at the
  # path.
  handle = _open_folder(path)
  if os.fstat(handle).st_uid != os.geteuid():
    os.close(handle)
    raise ValueError(f"{path} is a folder of another user: remove it")
  return handle


def make_private(path: Path) -> None:
  """Makes or opens a folder as `hold_folder` does, and removes the access of
  other users; raises the same errors."""
  handle = hold_folder(path)
  try:
    os.fchmod(handle, stat.S_IRWXU)
  finally:
    os.close(handle)


def is_writable(folder: Path) -> bool:
  """Whether this user can create files in a folder."""
  access = os.W_OK | os.X_OK
  return os.access(folder, access, effective_ids=True)
