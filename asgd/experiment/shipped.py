"""The configs that come with the package, by name.

They are the files of configs/ in a checkout, and of asgd/configs/ where the
package is installed. Each has `get_config()`.
"""

from pathlib import Path

from asgd import names

_PACKAGE = Path(__file__).parents[1]
# In an installed package, and in a checkout.
_FOLDERS = _PACKAGE / "configs", _PACKAGE.parent / "configs"
FOLDER = next(filter(Path.is_dir, _FOLDERS), _FOLDERS[0])


def find(name: str) -> str:
  """Returns a config's file: `name` itself if that is a file, else the config
  of that name that comes with the package.

  Args:
    name: a path, or `digits`, `digits.py` or `configs/digits.py`. It may end
      with `:VARIANT`, which the result then has, too.

  Raises:
    ValueError: if there is neither; the error shows the nearest name, and all.

  Example:
    >>> Path(find("digits")).name
    'digits.py'
  """
  # VARIANT is the argument of get_config.
  path, colon, variant = name.partition(":")
  if Path(path).is_file():
    return name
  # Other spellings are accepted, such as a dash or upper case.
  files = {file.stem: file for file in FOLDER.glob("*.py")}
  stem = path.removeprefix("configs/").removesuffix(".py")
  stem = names.canonical(stem, files)
  if stem not in files:
    raise ValueError(
      f"--config={name}: there is no such file, nor a config that comes with"
      f" asgd; {names.nearest(Path(stem).name, files)}"
    )
  return f"{files[stem]}{colon}{variant}"
