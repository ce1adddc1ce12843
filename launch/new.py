"""Makes a folder with a config, a model and a README, which trains at once.

  asgd new DIR
  asgd train --config=DIR/config.py --workdir=DIR/results

The model is a flax module of your own, and the data are handwritten digits.
Change them there; the README of the folder names the next steps.
"""

import shlex
from pathlib import Path

from asgd import safe_files

from . import command_line

# The three files. `write` replaces {name} by the folder's name, and {path} by
# this name in the quotes that a shell needs.
_CONFIG = '''"""Trains the model of model.py with several algorithms.

  asgd train --config={path}/config.py --workdir={path}/results
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="model:make", hidden=32)  # MODULE:FUNCTION
  config.runs = dict(
    asgd=dict(recipe="asgd"),
    dana_zero=dict(recipe="dana_zero"),
  )
  config.workers = (8,)
  config.seeds = (0, 1)
  config.batch_size = 16
  config.epochs = 5.0
  config.learning_rate = 0.005
  config.learning_rate_schedule = dict(warmup_epochs=0.5)
  config.evaluations = 5
  if arg == "tiny":  # a test of a second
    config.workers, config.seeds, config.epochs = (2,), (0,), 0.1
    config.evaluations, config.learning_rate_schedule = 1, dict()
  return config.lock()
'''
_MODEL = '''"""The model."""

import flax.linen as nn


class Mlp(nn.Module):
  """Two hidden layers on the pixels of an image."""

  classes: int
  hidden: int

  @nn.compact
  def __call__(self, images):
    x = images.reshape(images.shape[0], -1)
    for _ in range(2):
      x = nn.relu(nn.Dense(self.hidden)(x))
    return nn.Dense(self.classes)(x)


def make(classes, hidden=32):
  """Returns the model; `hidden` is a key of config.model."""
  return Mlp(classes, hidden)
'''
_README = """# {name}

These commands print the planned runs, train them in simulated time (a few
seconds), show the results, and train the same runs in real time:

    asgd train --config={path}/config.py --dry_run
    asgd train --config={path}/config.py --workdir={path}/results
    asgd show {path}/results
    asgd train --config={path}/config.py --workdir={path}/live --engine=threads

- `config.py` has the runs, the number of workers and the learning rate.
  `asgd train --help=all` lists all keys, and `asgd --list` all recipes.
- `model.py` has the model. For your own data write a function there, and set
  `config.data = dict(name="model:FUNCTION")`.
"""
_FILES = {"config.py": _CONFIG, "model.py": _MODEL, "README.md": _README}


def write(folder: Path) -> str:
  """Writes the files of a new experiment; returns the next commands. Raises
  ValueError if the folder is not empty."""
  # The name is written into docstrings and shell commands of the files.
  if not str(folder).isprintable() or set(str(folder)) & set("\\\"'{}"):
    raise ValueError(
      f"the folder's name {str(folder)!r} has quotes, braces, backslashes or"
      " control characters, which its files could not quote: use another name"
    )
  if folder.is_symlink() and not folder.exists():
    raise ValueError(
      f"{folder} is a symbolic link to {folder.readlink()}, which does not"
      " exist: make that folder, or choose another one"
    )
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(f"{folder} is not empty: choose another folder")
  safe_files.make_folder(folder.resolve())
  path = shlex.quote(str(folder))
  for name, text in _FILES.items():
    # `replace`, not `format`: the files have other braces.
    text = text.replace("{name}", str(folder)).replace("{path}", path)
    safe_files.write(folder / name, text)
  return (
    f"wrote {folder}/ with {', '.join(_FILES)}; train it with\n"
    f"  asgd train --config={path}/config.py --workdir={path}/results"
  )


def main(*words: str) -> None:
  """Writes the named folder."""
  if len(words) != 1:
    count = len(words)
    command_line.fail(f"asgd new takes one folder, not {count}: asgd new DIR")
  try:
    with safe_files.opening(words[0]):
      print(write(Path(words[0])))
  except (ValueError, OSError, RuntimeError) as error:
    command_line.fail(str(error))


if __name__ == "__main__":
  command_line.run(main, "new")
