"""Files that are there whole or not at all, checksums, JSON without NaN,
archives of several files in one."""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np

from asgd import safe_files


def is_finite(value: float | None) -> bool:
  """Whether a number was measured and came out finite."""
  return value is not None and bool(np.isfinite(value))


def read_json(path: Path) -> dict | None:
  """Returns the JSON object in a file, None if there is none to be read."""
  try:
    return json_object(path.read_bytes())
  except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
    return None


def json_object(content: bytes) -> dict | None:
  """Returns the JSON object that a file's content is, None if it is none."""
  try:
    value = json.loads(content.decode("utf-8"))
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def to_json(value: Any, indent: int | None = None) -> str:
  """JSON without NaN or infinity, which other readers do not take: null."""
  return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
  """Writes JSON for people, whole or not at all."""
  safe_files.write(path, to_json(value, indent=2) + "\n")


_SEAL = "checksum"  # key


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a JSON object with a checksum of what it holds; see `unsealed`."""
  value = _finite(value)
  return {**value, _SEAL: _checksum(value)}


def unsealed(value: Any) -> dict[str, Any]:
  """Returns a `sealed` object without its checksum; ValueError if it has none,
  or holds something else than when it was sealed."""
  if not isinstance(value, dict) or value.pop(_SEAL, None) != _checksum(value):
    raise ValueError("its checksum is that of something else")
  return value


def _checksum(value):
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def read_sealed(path: Path) -> dict | None:
  """Returns the `sealed` object in a file without its checksum, None if there
  is none, or any of it was changed."""
  try:
    return unsealed(read_json(path))
  except ValueError:
    return None


def to_lines(rows: Iterable[Mapping]) -> str:
  """JSON lines: each row's JSON, ended by a newline."""
  return "".join(to_json(row) + "\n" for row in rows)


def _finite(value):
  if isinstance(value, Mapping):
    return {k: _finite(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(v) for v in value]
  if isinstance(value, np.generic):
    value = value.item()
  return None if isinstance(value, float) and not np.isfinite(value) else value


def digest(tree: Any) -> str:
  """Returns a checksum of all bits of a pytree of arrays."""
  total = hashlib.sha256()
  for leaf in jax.tree.leaves(jax.device_get(tree)):
    leaf = np.ascontiguousarray(leaf)
    total.update(f"{leaf.dtype}{leaf.shape}".encode())
    total.update(leaf.tobytes())
  return total.hexdigest()


def file_digest(path: Path) -> str | None:
  """Returns a checksum of a file, None if it cannot be read."""
  try:
    with path.open("rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()
  except OSError:
    return None


def params_bytes(params: Any) -> bytes:
  """Returns parameters as flax.serialization has them; a tree with unknown
  classes, as of Equinox, as a dict of its arrays by their paths."""
  params = params if _is_known(params) else _by_path(params)
  return flax.serialization.to_bytes(params)


def write_params(folder: Path, params: Any) -> Path:
  """Writes the final parameters of a cell; see `params_bytes`."""
  path = folder / "params.msgpack"
  safe_files.write(path, params_bytes(params))
  return path


def params_of(content: bytes, like: Any) -> Any:
  """Returns parameters that `params_bytes` made, in a tree like another."""
  if _is_known(like):
    return flax.serialization.from_bytes(like, content)
  arrays = flax.serialization.msgpack_restore(content)
  leaves = [arrays[name] for name in _by_path(like)]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _is_known(tree: Any) -> bool:
  """Whether flax makes dicts of arrays of a tree, and of nothing else."""
  state = flax.serialization.to_state_dict(tree)
  leaves = jax.tree.leaves(state, is_leaf=lambda x: not isinstance(x, dict))
  return all(x is None or hasattr(x, "dtype") for x in leaves)


def _by_path(tree: Any) -> dict[str, Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def save_columns(path: Path, columns: Any) -> None:
  """Writes a NamedTuple of arrays as an .npz, whole or not at all."""
  with safe_files.replacing(path) as file:
    np.savez_compressed(file, **columns._asdict())


_COMMENT = 64  # bytes at the end of an archive: SHA-256 of all before them
_PIECE = 2**20  # bytes that a checksum is updated with


def write_archive(path: Path, members: Mapping[str, bytes]) -> None:
  """Writes files as one zip file, whole or not at all, which `read_archive` and
  any other reader of zip files opens; of equal files it has equal bytes.

  Example:
    >>> place = getfixture("tmp_path") / "two.zip"
    >>> write_archive(place, {"a.txt": b"first", "b.txt": b"second"})
    >>> read_archive(place, "b.txt")
    {'b.txt': b'second'}
  """
  with safe_files.replacing(path) as file:
    with zipfile.ZipFile(file, "w") as archive:
      archive.comment = b"0" * _COMMENT
      for name, content in members.items():
        # Without a date, and parameters, which are noise, as they are.
        member = zipfile.ZipInfo(name)
        if not name.endswith(".msgpack"):
          member.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(member, content)
    checksum = _before_comment(file)
    file.seek(-_COMMENT, os.SEEK_END)
    file.write(checksum)


def read_archive(path: Path, *names: str) -> dict[str, bytes] | None:
  """Returns the named files of an archive, all if none is named; None if it is
  not there, any byte of it was changed, or it has no such file."""
  try:
    with path.open("rb") as file:
      checksum = _before_comment(file)
      if file.read() != checksum:
        return None
      with zipfile.ZipFile(file) as archive:
        return {n: archive.read(n) for n in names or archive.namelist()}
  except (OSError, KeyError, zipfile.BadZipFile, zlib.error):
    return None
  except (NotImplementedError, RuntimeError, ValueError):  # not our zip files
    return None


def _before_comment(file) -> bytes:
  """The checksum of an archive up to its comment, where the file is then."""
  left = file.seek(0, os.SEEK_END) - _COMMENT
  file.seek(0)
  total = hashlib.sha256()
  while left > 0:
    total.update(piece := file.read(min(left, _PIECE)))
    left -= len(piece)
  return total.hexdigest().encode()


def write_csv(path: Path, rows: list[Mapping[str, Any]]) -> None:
  """Writes rows as CSV; what is missing or not finite is left empty, and a list
  is its values with spaces between."""
  keys = list(dict.fromkeys(key for row in rows for key in row))
  content = io.StringIO()
  writer = csv.DictWriter(content, keys, lineterminator="\n")
  writer.writeheader()
  for row in rows:
    writer.writerow(
      {
        key: " ".join(map(str, value)) if isinstance(value, list) else value
        for key, value in _finite(row).items()
      }
    )
  safe_files.write(path, content.getvalue())


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def naming_folder(folder: Path, *, trains: bool = False) -> Iterator[None]:
  """Adds folder and remedy to the error of a full disk or a read-only folder,
  for a command with --out; for one that `trains`, to that of a full disk."""
  try:
    yield
  except OSError as error:
    full = error.errno in DISK_FULL
    passes = error.filename is not None or not full
    if passes if trains else not full and error.errno not in _NOT_OURS:
      raise
    remedy = "make room" if full else "make it writable"
    then = " to go on" if trains else ", or choose another folder with --out"
    raise ValueError(
      f"cannot write to {folder} ({error.strerror}); {remedy} and run the same"
      f" command again{then}"
    ) from error
