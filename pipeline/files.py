"""Tables of schedules in files."""

from pathlib import Path

from pipeline import table as table_lib
from pipeline.table import Schedule

_FORMS = {
  ".txt": table_lib.from_text,
  ".csv": table_lib.from_csv,
  ".json": table_lib.from_json,
}


def is_file(name: object) -> bool:
  """Whether a schedule's name is that of a file."""
  return isinstance(name, str) and Path(name).suffix.lower() in _FORMS


def read(path: Path) -> Schedule:
  """Reads a table, in the form that the file's name says; else it is text.

  Raises:
    ValueError: if it is none, or cannot be run.
    OSError: if there is no such file.
  """
  form = _FORMS.get(path.suffix.lower(), table_lib.from_text)
  return form(read_text(path))


def read_text(path: Path) -> str:
  """Reads a file that is text.

  Raises:
    ValueError: if it is not.
    OSError: if there is no such file.
  """
  try:
    return path.read_text(encoding="utf-8-sig")  # as some editors write it
  except UnicodeDecodeError:
    raise ValueError(f"{path} is no text: not UTF-8") from None
