"""Files and folders that a symbolic link cannot lead elsewhere.

Writing through a link changes its target, and emptying a linked folder empties
the target. So a write replaces the file by a new one, a file that grows is
opened without following links, and a folder is opened only if it is no link.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_NO_LINK = (errno.ELOOP, errno.ENOTDIR)  # errors of O_NOFOLLOW and O_DIRECTORY


def _link(path: Path) -> ValueError:
  """Returns the error for a path that is a symbolic link."""
  return ValueError(
    f"{path} is a symbolic link, and results are not written through one:"
    " remove it"
  )


@contextlib.contextmanager
def _naming_folders(path: Path) -> Iterator[None]:
  """Adds the folder's name and the remedy if a folder replaces a file."""
  try:
    yield
  except IsADirectoryError as error:
    reason = "a folder is in the place of a file: remove it"
    raise IsADirectoryError(errno.EISDIR, reason, str(path)) from error


@contextlib.contextmanager
def replacing(path: Path, disk: Any = os) -> Iterator[IO[bytes]]:
  """Opens a new file that replaces `path` at the end of the block.

  If the block fails, the new file is removed. If `path` is a link, its target
  stays unchanged. `disk` has a `replace` like that of `os`."""
  temporary = path.with_name(path.name + ".tmp")
  with _naming_folders(temporary), contextlib.suppress(FileNotFoundError):
    temporary.unlink()  # left by a process that was killed
  with contextlib.ExitStack() as stack:
    file = stack.enter_context(temporary.open("x+b"))
    try:
      yield file
      file.close()
      with _naming_folders(path):
        disk.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):
        temporary.unlink()
      raise


def write(path: Path, content: str | bytes | bytearray, disk: Any = os) -> None:
  """Writes a file atomically: complete or not at all, see `replacing`.

  Args:
    path: of the file.
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
    return os.open(path, flags | os.O_NOFOLLOW, mode)
  except OSError as error:
    if error.errno == errno.ELOOP:
      raise _link(Path(path)) from error
    raise


def appending(path: Path, buffering: int = -1) -> IO[bytes]:
  """Opens a file for appending, and creates it if it is missing. `buffering` is
  that of `open`. ValueError if the path is a symbolic link."""
  flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
  return os.fdopen(descriptor(path, flags), "ab", buffering=buffering)


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
      raise _link(path) from error
    raise ValueError(
      f"{path} is a file, but a folder is needed at this path: remove it"
    ) from error


def make_folder(path: Path) -> None:
  """Makes a folder and its parents, unless they exist. ValueError if the path
  is a file or a symbolic link; links among the parents are followed."""
  path.parent.mkdir(parents=True, exist_ok=True)
  try:
    path.mkdir()
  except FileExistsError:
    # Opening it checks that it is a folder and no link.
    os.close(_open_folder(path))


def hold_folder(path: Path) -> int:
  """Opens a folder that only this user can open. It and its parents are made if
  they are missing.

  Args:
    path: of the folder; those above it may be links.

  Returns:
    A descriptor of the folder. `/proc/self/fd/DESCRIPTOR` names this folder
    even if another one replaces it at `path` later.

  Raises:
    ValueError: if the path is a link, a file or a folder of another user.
  """
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
