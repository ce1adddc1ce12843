"""Reproduces figures of papers, and says which of their claims hold.

  python -m launch.reproduce --list
  python -m launch.reproduce delayed_edge --quick
  python -m launch.reproduce dana

A figure is a file in configs/figures: an experiment, claims about it as data,
and what the paper published (asgd.experiment.claims.figure_file). It is trained
like any experiment, in a folder of its own: the same command goes on after a
kill. Each claim is printed with its effect, the interval that decides it, and
PASS, FAIL or UNDECIDED. The exit status does not depend on them: a claim that
fails is a result. --docs also puts verdicts and picture into docs/figures, and
writes the page docs/figures.md anew; without a name it writes the page alone.
"""

import shutil
from pathlib import Path

from asgd.experiment.claims import gallery, reproduce
from asgd.experiment.machine import Machine
from asgd.experiment.progress import ProgressBar
from asgd.experiment.signals import Signals

from . import flags

_ROOT = Path(__file__).parent.parent
_FIGURES, _DOCS = _ROOT / "configs" / "figures", _ROOT / "docs"
_F = flags.define(
  {
    **{k: flags.TRAINING[k] for k in ("workdir", "data_dir", "memory_dir")},
    "all": (bool, False, "All figures."),
    "quick": (bool, False, "A small one of each: minutes on two cores."),
    "list": (bool, False, "List the figures."),
    "docs": (bool, False, "Keep the verdicts in docs/, and write the page."),
  }
)


def _paths(name):
  """The files of the figures that are asked for."""
  if (name is None) != _F["all"].value:
    names = ", ".join(reproduce.files(_FIGURES))
    raise ValueError(f"which figure? a NAME ({names}), a FILE.py, or --all")
  if name is not None:
    return [reproduce.find(name, _FIGURES)]
  if _F["workdir"].value:
    raise ValueError("--workdir is the folder of one figure: drop it, or --all")
  return list(reproduce.files(_FIGURES).values())


def _keep(name, place):
  """Puts verdicts and picture into docs/figures."""
  (_DOCS / "figures").mkdir(parents=True, exist_ok=True)
  for suffix in (".json", ".svg"):
    shutil.copy(place / f"{name}{suffix}", _DOCS / "figures")


def _bar(messages):
  return ProgressBar(
    messages, describe=lambda engine, row: flags.ENGINES[engine].describe(row)
  )


def main(name: str | None = None) -> None:
  """Reproduces the figure that is named."""
  if _F["list"].value:
    for known, path in reproduce.files(_FIGURES).items():
      print(f"{known:16}  {reproduce.load(path, flags.ENGINES).figure.title}")
    return
  if name is not None or not _F["docs"].value:
    tasks = [
      reproduce.load(path, flags.ENGINES, quick=_F["quick"].value)
      for path in _paths(name)
    ]
    signals = Signals()
    for task in tasks:
      place = reproduce.reproduce(
        *(task, flags.ENGINES),
        workdir=_F["workdir"].value,
        data_dir=_F["data_dir"].value,
        machine=Machine(memory_dir=_F["memory_dir"].value),
        bar=_bar,
        signals=signals,
      )
      if _F["docs"].value:
        _keep(task.figure.name, place)
  if _F["docs"].value:
    print(f"page      {gallery.write(_DOCS)}")


if __name__ == "__main__":
  flags.run(main, words=1)
