"""What an experiment leaves behind: a folder, tables, curves and pictures.

OUT/
  config.json            the resolved config and what the data was
  cells/LABEL-nN-sSEED/  one training run
    checkpoints/         see launch/checkpoints.py
    params.msgpack       final parameters, for flax.serialization
    metrics.jsonl        one row per evaluation
    records.npz          one row per received message
    result.json          written last: the cell is finished
  tensorboard/           the same rows as metrics.jsonl
  metrics.jsonl          all cells' rows
  results.csv, table.txt one row per algorithm and number of workers
  figure.png, .svg, .csv the figure and the numbers in it
"""

import contextlib
import csv
import fcntl
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from asgd import base

_FREE = "choose another folder with --out=FOLDER"


def is_known(value: float | None) -> bool:
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
  except (FileNotFoundError, ValueError):
    return None
  return value if isinstance(value, dict) else None


def to_json(value: Any, indent: int | None = None) -> str:
  """JSON without NaN or infinity, which other readers do not take: null."""
  return json.dumps(_finite(value), indent=indent, allow_nan=False)


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
  if isinstance(value, float) and not np.isfinite(value):
    return None
  return value


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
  """Names the leaves in which two trees of plain data differ."""
  if isinstance(old, Mapping) and isinstance(new, Mapping):
    keys = [*old, *(key for key in new if key not in old)]
    return [
      line
      for key in keys
      for line in _differences(
        old.get(key), new.get(key), f"{path}.{key}" if path else key
      )
    ]
  return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def _read_identity(folder: Path) -> dict | None:
  path = folder / "config.json"
  if not path.exists():
    return None
  held = read_json(path)
  if held is None:
    raise ValueError(f"{path} cannot be read: it is no JSON object; {_FREE}")
  return held


def open_folder(
  out: str | None, name: str, identity: Mapping[str, Any], *, resume: bool
) -> Path:
  """Finds or makes the folder of an experiment; never takes over another's.

  Args:
    out: the folder asked for, or None: runs/NAME-001, -002, ...; the newest of
      them that holds this experiment when resuming.
    name: of the experiment.
    identity: JSON that says what is run; a folder holds one identity for good.
      Its "free" section may differ.
    resume: go on with what is there.

  Returns:
    The folder, holding config.json.

  Raises:
    ValueError: if the folder holds something else, or this and not `resume`.
  """
  identity = json.loads(to_json(identity))
  if out is None:
    folder = _numbered(Path("runs"), name, identity, resume)
  else:
    folder = Path(out)
    _check_folder(folder, identity, resume)
    folder.mkdir(parents=True, exist_ok=True)
  _lock(folder)
  write_atomically(folder / "config.json", to_json(identity, indent=2) + "\n")
  return folder


def _check_folder(folder, identity, resume):
  """Raises ValueError unless the folder is free, or holds `identity`."""
  if not folder.exists():
    return
  if not folder.is_dir():
    raise ValueError(f"--out={folder} is a file; {_FREE}")
  held = _read_identity(folder)
  if held is None:
    # A run killed at its start leaves a lock and nothing else.
    if any(path.name not in _STARTED for path in folder.iterdir()):
      raise ValueError(
        f"--out={folder} is not empty and holds no experiment; {_FREE}"
      )
    return
  differences = _differences(_fixed(held), _fixed(identity))
  if differences:
    raise ValueError(
      f"--out={folder} holds another experiment"
      f" ({'; '.join(differences[:3])}); {_FREE}"
    )
  if not resume:
    raise ValueError(
      f"--out={folder} holds this experiment already; add --resume to go on"
      f" with it, or {_FREE}"
    )


_LOCK = ".lock"
_STARTED = (_LOCK, "config.json.tmp")
_locks: list[IO] = []  # held until the process ends, however it ends


def _lock(folder):
  """Keeps a second process from writing to the same folder."""
  file = (folder / _LOCK).open("w")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    file.close()
    raise ValueError(
      f"{folder} is in use by another process; wait for it, or {_FREE}"
    ) from error
  _locks.append(file)


def release() -> None:
  """Lets go of the folders that this process holds."""
  while _locks:
    _locks.pop().close()


def _fixed(identity):
  return {key: value for key, value in identity.items() if key != "free"}


def _numbered(root, name, identity, resume):
  """Finds the newest folder of this experiment, or makes the next free one."""
  pattern = re.compile(re.escape(name) + r"-(\d+)$")
  numbers = sorted(
    int(match[1])
    for path in (root.iterdir() if root.is_dir() else ())
    if (match := pattern.match(path.name))
  )
  if resume and numbers:
    differences = []
    for number in reversed(numbers):
      folder = root / f"{name}-{number:03d}"
      held = _read_identity(folder)
      if held is not None and _fixed(held) == _fixed(identity):
        return folder
      if held is not None and not differences:
        differences = _differences(_fixed(held), _fixed(identity))[:3]
        differences = [f"in {folder}, {'; '.join(differences)}"]
    raise ValueError(
      f"nothing to resume: no {root}/{name}-* holds this experiment"
      f" ({''.join(differences) or 'they are empty'}); use the command it was"
      " started with, or start a new one without --resume"
    )
  number = max(numbers, default=0) + 1
  while True:
    folder = root / f"{name}-{number:03d}"
    try:
      folder.mkdir(parents=True)
    except FileExistsError:  # another process was faster
      number += 1
    else:
      return folder


def save_records(path: Path, records: base.Records) -> None:
  """Writes records as an .npz of columns, whole or not at all."""
  content = io.BytesIO()
  np.savez_compressed(content, **records._asdict())
  write_atomically(path, content.getvalue())


class CellLog:
  """metrics.jsonl and TensorBoard of one cell."""

  def __init__(
    self, folder: Path, board: Path | None, rows: Iterable[Mapping] = ()
  ):
    """Starts the log with the rows that a checkpoint kept; later ones, written
    before a kill, are dropped."""
    rows = list(rows)
    write_atomically(folder / "metrics.jsonl", to_lines(rows))
    self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
    self._board = None
    if board is not None:
      with contextlib.suppress(ImportError):
        from tensorboardX import SummaryWriter

        step = rows[-1]["message"] + 1 if rows else 0
        self._board = SummaryWriter(str(board), purge_step=step)

  def write(self, row: Mapping[str, Any]) -> None:
    """Adds one evaluation."""
    self._file.write(to_lines([row]))
    self._file.flush()
    if self._board is None:
      return
    for key, value in row.items():
      if key in ("workers", "seed", "message"):
        continue  # they say which curve and where, and are none
      if isinstance(value, (int, float)) and np.isfinite(value):
        self._board.add_scalar(key, value, row["message"])

  def close(self) -> None:
    """Closes the files."""
    self._file.close()
    if self._board is not None:
      self._board.close()


def write_csv(path: Path, rows: list[Mapping[str, Any]]) -> None:
  """Writes rows of the same keys as CSV; what is not finite is left empty."""
  text = io.StringIO()
  writer = csv.DictWriter(text, rows[0] if rows else (), lineterminator="\n")
  writer.writeheader()
  writer.writerows(_finite(row) for row in rows)
  write_atomically(path, text.getvalue())


def format_table(header: list[str], rows: list[list[str]]) -> str:
  """Returns a plain text table; the first column is left-aligned."""
  table = [header, *rows]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines = []
  for row in table:
    first, *others = (
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    lines.append("  ".join([first, *others]).rstrip())
  lines.insert(1, "-" * max(map(len, lines)))
  return "\n".join(lines) + "\n"
