"""Files of results: atomic writes, checksums, JSON without NaN, archives."""

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np

from asgd import safe_files


def is_finite(value: float | None) -> bool:
  """Whether a number was measured and is finite."""
  return value is not None and bool(np.isfinite(value))


def read_json(path: Path) -> dict[str, Any] | None:
  """Returns the JSON object in a file; None if the file has none."""
  try:
    return json_object(path.read_bytes())
  except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
    return None  # other errors, such as a missing permission, are raised


def json_object(content: bytes) -> dict[str, Any] | None:
  """Returns the JSON object of a file's content; None if it is no object."""
  try:
    value = json.loads(content.decode("utf-8"))
  except (ValueError, RecursionError):  # a file may be damaged in any way
    return None
  return value if isinstance(value, dict) else None


def to_json(value: Any, indent: int | None = None) -> str:
  """Returns JSON with null for NaN and infinity, which JSON does not have."""
  return json.dumps(_without_nan(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
  """Writes indented JSON atomically."""
  safe_files.write(path, to_json(value, indent=2) + "\n")


_SEAL = "checksum"  # key


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a JSON object with a checksum of its values; see `unsealed`."""
  value = _without_nan(value)
  return {**value, _SEAL: _checksum(value)}


def unsealed(value: Any) -> dict[str, Any]:
  """Returns a `sealed` object without its checksum. Raises ValueError if it has
  none, or was changed since it was sealed."""
  if not isinstance(value, dict) or value.pop(_SEAL, None) != _checksum(value):
    raise ValueError("its checksum does not match its values")
  return value


def _checksum(value: Any) -> str:
  """Returns the checksum of plain data. The order of keys counts, which JSON
  files keep."""
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def read_sealed(path: Path) -> dict[str, Any] | None:
  """Returns the `sealed` object in a file without its checksum; None if the
  file has none, or was changed."""
  try:
    return unsealed(read_json(path))
  except ValueError:
    return None


def to_lines(rows: Iterable[Mapping[str, Any]]) -> str:
  """Returns JSON lines: each row's JSON and a newline."""
  return "".join(to_json(row) + "\n" for row in rows)


def _without_nan(value: Any) -> Any:
  """Returns plain data, with None for numbers that JSON does not have."""
  if isinstance(value, Mapping):
    return {k: _without_nan(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_without_nan(v) for v in value]
  if isinstance(value, np.generic):  # a scalar of NumPy
    value = value.item()
  return None if isinstance(value, float) and not np.isfinite(value) else value


def digest(tree: Any) -> str:
  """Returns a checksum of all bits of a pytree of arrays."""
  hasher = hashlib.sha256()
  for leaf in jax.tree.leaves(jax.device_get(tree)):
    leaf = np.ascontiguousarray(leaf)
    # Types and shapes count: the same bytes may be other arrays.
    hasher.update(f"{leaf.dtype}{leaf.shape}".encode())
    hasher.update(leaf.tobytes())
  return hasher.hexdigest()


def file_digest(path: Path) -> str | None:
  """Returns a checksum of a file; None if it cannot be read."""
  try:
    with path.open("rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()
  except OSError:
    return None


def params_bytes(params: Any) -> bytes:
  """Returns parameters in the format of flax.serialization. A tree with classes
  that flax does not know, such as Equinox's, becomes a dict of arrays by path.
  """
  params = params if _flax_knows(params) else _leaves_by_path(params)
  return flax.serialization.to_bytes(params)


def write_params(folder: Path, params: Any) -> Path:
  """Writes the final parameters of a cell; see `params_bytes`."""
  path = folder / "params.msgpack"
  safe_files.write(path, params_bytes(params))
  return path


def params_from_bytes(content: bytes, template: Any) -> Any:
  """Returns the parameters in bytes of `params_bytes`, in the template's tree.
  """
  if _flax_knows(template):
    return flax.serialization.from_bytes(template, content)
  arrays = flax.serialization.msgpack_restore(content)
  leaves = [arrays[name] for name in _leaves_by_path(template)]
  return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _flax_knows(tree: Any) -> bool:
  """Whether flax turns the tree into nested dicts of arrays only."""
  state = flax.serialization.to_state_dict(tree)
  leaves = jax.tree.leaves(state, is_leaf=lambda x: not isinstance(x, dict))
  return all(x is None or hasattr(x, "dtype") for x in leaves)


def _leaves_by_path(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by their paths, in the order of the tree."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def save_columns(path: Path, columns: Any) -> None:
  """Writes a NamedTuple of arrays as an .npz file, atomically."""
  with safe_files.replacing(path) as file:
    np.savez_compressed(file, **columns._asdict())


# Bytes of the comment, which ends a zip file. In an archive it is the SHA-256
# of all bytes before it, in hexadecimal digits.
_COMMENT_BYTES = 64
_CHUNK_BYTES = 2**20  # bytes of one update of a checksum


def write_archive(path: Path, members: Mapping[str, bytes]) -> None:
  """Writes files as one zip file, atomically. `read_archive` and any reader of
  zip files can open it. Equal files give equal bytes.

  Example:
    >>> path = getfixture("tmp_path") / "two.zip"
    >>> write_archive(path, {"a.txt": b"first", "b.txt": b"second"})
    >>> read_archive(path, "b.txt")
    {'b.txt': b'second'}
  """
  with safe_files.replacing(path) as file:
    # [1] The archive, with a comment of the right length.
    with zipfile.ZipFile(file, "w") as archive:
      archive.comment = b"0" * _COMMENT_BYTES
      for name, content in members.items():
        # Without a date, so that equal files give equal bytes. Parameters are
        # noise, and compression would not make them smaller.
        member = zipfile.ZipInfo(name)
        if not name.endswith(".msgpack"):
          member.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(member, content)
    # [2] The comment: the checksum of all bytes before it.
    checksum = _checksum_before_comment(file)
    file.seek(-_COMMENT_BYTES, os.SEEK_END)
    file.write(checksum)


def read_archive(path: Path, *names: str) -> dict[str, bytes] | None:
  """Returns the named files of an archive; without names, all. Returns None if
  the archive does not exist, was changed, or lacks such a file."""
  try:
    with path.open("rb") as file:
      # The checksum comes first: no code reads the members of a damaged file.
      checksum = _checksum_before_comment(file)
      if file.read() != checksum:
        return None
      with zipfile.ZipFile(file) as archive:
        return {n: archive.read(n) for n in names or archive.namelist()}
  except (OSError, KeyError, zipfile.BadZipFile, zlib.error):
    return None
  except (NotImplementedError, RuntimeError, ValueError):  # foreign zip files
    return None


def _checksum_before_comment(file: Any) -> bytes:
  """Returns the checksum of an archive up to its comment, and leaves the file's
  position there."""
  remaining = file.seek(0, os.SEEK_END) - _COMMENT_BYTES
  file.seek(0)
  hasher = hashlib.sha256()
  while remaining > 0:
    hasher.update(chunk := file.read(min(remaining, _CHUNK_BYTES)))
    remaining -= len(chunk)
  return hasher.hexdigest().encode()


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
  """Writes rows as CSV. Missing and not finite values are left empty; values of
  a list are separated by spaces."""
  # The columns of all rows, in order of first appearance.
  columns = list(dict.fromkeys(key for row in rows for key in row))
  content = io.StringIO()
  writer = csv.DictWriter(content, columns, lineterminator="\n")
  writer.writeheader()
  for row in rows:
    writer.writerow(
      {
        key: " ".join(map(str, value)) if isinstance(value, list) else value
        for key, value in _without_nan(row).items()
      }
    )
  safe_files.write(path, content.getvalue())


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
  """Locks a folder for a block. Waits while another process has the lock."""
  descriptor = safe_files.descriptor(folder / ".lock", os.O_RDWR | os.O_CREAT)
  with os.fdopen(descriptor, "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
    yield


@contextlib.contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
  """Turns the OSError of a full disk or a read-only folder into a ValueError
  with the folder and a remedy, for commands that have --out."""
  try:
    yield
  except OSError as error:
    is_full = error.errno in safe_files.FULL
    if not is_full and error.errno not in safe_files.CLOSED:
      raise
    remedy = "make room" if is_full else "make it writable"
    raise ValueError(
      f"cannot write to {folder} ({error.strerror}); {remedy} and run the same"
      " command again, or choose another folder with --out"
    ) from error
