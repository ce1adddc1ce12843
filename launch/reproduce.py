"""Reproduces figures of papers, and prints which of their claims hold.

  asgd reproduce --list
  asgd reproduce delayed_edge --quick
  asgd reproduce dana

A figure is a file in configs/figures: an experiment, claims about it as data,
and the values that the paper published (`asgd.figures.figure_file`). It is
trained like any experiment, in a separate folder; the same command resumes it.
Each claim is printed with its effect, the interval that decides it, and PASS,
FAIL or UNDECIDED. A claim that fails is a result: it does not change the exit
status. If a cell has no valid result, no claim is judged, and the exit status
is 3. With --all the other figures are trained nevertheless, also if the data of
one are missing. --docs also copies verdicts and picture to docs/figures and
rewrites the page docs/figures.md; without a name it only rewrites the page.
"""

from pathlib import Path

from asgd.data import DataError
from asgd.experiment import folder, shipped, storage
from asgd.experiment.machine import Machine
from asgd.experiment.progress import ProgressBar
from asgd.experiment.signals import Signals
from asgd.figures import gallery, reproduce

from . import flags

# The figures of the installed configs; docs/ is that of the current folder.
_FIGURES, _DOCS = shipped.FOLDER / "figures", Path("docs")
_FLAGS = flags.define("reproduce")


def _reproduce(task: reproduce.Reproduction, signals: Signals) -> None:
  """Trains and judges one figure with the flags of this command."""
  engines = flags.ENGINES
  figure_folder = reproduce.reproduce(
    *(task, engines),
    workdir=_FLAGS["workdir"].value,
    data_dir=_FLAGS["data_dir"].value,
    machine=Machine(memory_dir=_FLAGS["memory_dir"].value),
    bar=lambda total: ProgressBar(
      total,
      describe=lambda name, row: engines[name].describe(row),
      quiet=flags.is_quiet(),
    ),
    signals=signals,
    docs=_DOCS if _FLAGS["docs"].value else None,
  )
  verdicts = figure_folder / f"{task.figure.name}.json"
  flags.append_json("figures", storage.read_json(verdicts))


def main(name: str | None = None) -> None:
  """Reproduces the named figure, or all figures."""
  all_figures, quick = _FLAGS["all"].value, _FLAGS["quick"].value
  for key in ("workdir", "data_dir"):
    if all_figures and _FLAGS[key].value:
      raise ValueError(f"--{key} is the folder of one figure: drop it or --all")
  if _FLAGS["list"].value:
    print(reproduce.listing(_FIGURES, flags.ENGINES))
    return
  failures: list[str] = []
  # --docs alone trains nothing.
  if _FLAGS["docs"].value and not (name or all_figures):
    for key in ("workdir", "data_dir", "quick"):
      if _FLAGS[key].value:
        raise ValueError(f"--{key} is for a figure: name one, or drop --{key}")
  else:
    paths = reproduce.chosen(name, every=all_figures, figures_folder=_FIGURES)
    # All files are read before the first is trained: a mistake in the last one
    # is found at once.
    tasks = [reproduce.load(p, flags.ENGINES, quick=quick) for p in paths]
    signals = Signals()
    for task in tasks:
      try:
        _reproduce(task, signals)
      except (DataError, folder.Incomplete) as error:
        if not all_figures:
          raise
        failures.append(f"{task.figure.name}: {error}")
        print(failures[-1])
  if _FLAGS["docs"].value:
    # The page of all stored figures, not only of these.
    print(f"page      {gallery.write(_DOCS)}")
  if failures:
    raise folder.Incomplete("not reproduced: " + "; ".join(failures))


if __name__ == "__main__":
  flags.run(main, "reproduce")
