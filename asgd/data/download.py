"""Downloads published files, and uses only those with the right checksum."""

import contextlib
import functools
import hashlib
import http.client
import logging
import os
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)

_TIMEOUT = 30.0  # seconds to connect, and for each read
_md5 = functools.partial(hashlib.md5, usedforsecurity=False)


class DataError(ValueError):
  """Data is missing or cannot be trusted; the message names file and remedy."""


def damaged(what: str) -> DataError:
  """Returns the error of a file that differs from the published one."""
  return DataError(f"{what}; replace it by a complete copy")


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
  """Opens a file that becomes `path` at the end, or is removed on an error."""
  path.parent.mkdir(parents=True, exist_ok=True)
  # A unique name: several processes may download the same file.
  temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
  try:
    with open(temporary, "xb") as file:
      yield file
    # Atomic: readers see the old file or the new one.
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def fetch(
  url: str, path: Path, md5: str, *, remedy: str, download: bool = True
) -> Path:
  """Returns `path` once it holds the file of `url` with the md5 sum `md5`.

  A cached file with another checksum is downloaded again. Readers never see a
  partial file: the download has a temporary name until its checksum is right.
  Each error ends with the remedy: what else a user may do.
  """
  if path.is_file():
    with open(path, "rb") as file:
      actual = hashlib.file_digest(file, _md5).hexdigest()
    if actual == md5:
      return path
    if not download:
      raise DataError(
        f"{path} has md5 {actual}, expected {md5}; delete it and allow the "
        f"download, or {remedy}"
      )
    _log.warning("%s has md5 %s, not %s: fetching it again", path, actual, md5)
    # Only here: another process may complete a file that was missing.
    with contextlib.suppress(OSError):
      path.unlink()
  if not download:
    raise DataError(
      f"{path.name} is neither installed nor in the cache {path.parent}, and "
      f"download is off; {remedy}"
    )
  digest = _md5()
  try:
    with (
      written_whole(path) as file,
      urllib.request.urlopen(url, timeout=_TIMEOUT) as response,
    ):
      while chunk := response.read(1 << 20):
        digest.update(chunk)
        file.write(chunk)
      if digest.hexdigest() != md5:
        raise DataError(
          f"{url} arrived with md5 {digest.hexdigest()}, expected {md5}, and "
          f"was deleted; try again later, or {remedy}"
        )
  except (OSError, http.client.HTTPException) as error:
    raise DataError(f"cannot download {url}: {error}; {remedy}") from error
  return path
