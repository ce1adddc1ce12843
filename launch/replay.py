"""Recomputes a live cell from its trace: the same parameters, to the bit.

  asgd replay WORKDIR/cells/NAME

WORKDIR alone is enough if it has one cell. The exit status is 1 if the
parameters differ. --restore rewrites a lost or damaged params.msgpack.

A replay runs the functions that the run's config names (MODULE:FUNCTION, a
model, a recipe, a dataset). If another user made the folder, it requires
--trust.
"""

from asgd.experiment import replay

from . import flags


def main(
  folder: str | None = None,
  *,
  data_dir: str | None = None,
  trust: bool = False,
  restore: bool = False,
) -> None:
  """Replays a cell and prints the result. `restore` rewrites its parameters."""
  if folder is None:
    raise ValueError(
      "no run is named: write asgd replay WORKDIR/cells/NAME, a folder that"
      " asgd train made with engine threads or ray"
    )
  replayed = replay.replay(folder, data_dir=data_dir, trust=trust)
  print(replay.describe(replayed))
  # The description is printed first, also of a replay that differs.
  if not replayed.same:
    raise flags.Failed("the replay differs from the run")
  if restore:
    # `restore` refuses parameters that are not those of the trace.
    print(f"wrote {replay.restore(folder, replayed)}")


if __name__ == "__main__":
  _FLAGS = flags.define("replay")
  flags.run(
    lambda *words: main(
      *words,
      data_dir=_FLAGS["data_dir"].value,
      trust=_FLAGS["trust"].value,
      restore=_FLAGS["restore"].value,
    ),
    "replay",
  )
