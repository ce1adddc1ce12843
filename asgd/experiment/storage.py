"""Files that are there whole or not at all, and JSON without NaN."""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np


def is_finite(value: float | None) -> bool:
  """Whether a number was measured and came out finite."""
  return value is not None and bool(np.isfinite(value))


def write_atomically(path: Path, content: str | bytes) -> None:
  """Writes a file that is there whole or not at all."""
  if isinstance(content, str):
    content = content.encode("utf-8", "replace")
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_bytes(content)
  os.replace(temporary, path)


def read_json(path: Path) -> dict | None:
  """Returns the JSON object in a file, None if there is none to be read."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (FileNotFoundError, ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def to_json(value: Any, indent: int | None = None) -> str:
  """JSON without NaN or infinity, which other readers do not take: null."""
  return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
  """Writes JSON for people, whole or not at all."""
  write_atomically(path, to_json(value, indent=2) + "\n")


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


def save_columns(path: Path, columns: Any) -> None:
  """Writes a NamedTuple of arrays as an .npz, whole or not at all."""
  content = io.BytesIO()
  np.savez_compressed(content, **columns._asdict())
  write_atomically(path, content.getvalue())


def write_csv(path: Path, rows: list[Mapping[str, Any]]) -> None:
  """Writes rows as CSV; what is missing or not finite is left empty."""
  keys = list(dict.fromkeys(key for row in rows for key in row))
  content = io.StringIO()
  writer = csv.DictWriter(content, keys, lineterminator="\n")
  writer.writeheader()
  writer.writerows(_finite(row) for row in rows)
  write_atomically(path, content.getvalue())


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def naming_full_disks(folder: Path) -> Iterator[None]:
  """Adds the folder and the remedy to a full disk's error without a file."""
  try:
    yield
  except OSError as error:
    if error.filename is not None or error.errno not in DISK_FULL:
      raise
    raise ValueError(
      f"cannot write to {folder} ({error.strerror}); make room and run the same"
      " command again to go on"
    ) from error
