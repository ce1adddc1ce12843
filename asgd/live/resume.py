"""What the shards of a consistent run agree on before they are resumed.

All of them obey one order, so none can go back alone. If one has lost its
memory, or the last snapshot in it, none goes on from memory: all go back to
the images of one checkpoint, which are of the same row, and the followers take
over the lead's journal.
"""

from pathlib import Path

from asgd import safe_files
from asgd.live import slots
from asgd.live.append_only import writing
from asgd.live.journal import journal_path, read_journal
from asgd.live.setup import Setup


def agree(setup: Setup, run: Path, memory: Path) -> bool:
  """Returns whether the shards of a run go on from their memory, as far as they
  have to agree on that. To be called before they are opened. Raises ValueError
  for a journal that cannot be read, or written."""
  if not setup.consistent or setup.shards == 1:
    return True
  folders = [Path(memory) / f"shard-{i}" for i in range(setup.shards)]
  paths = [journal_path(run, index) for index in range(setup.shards)]
  counts = [len(read_journal(path)) for path in paths]
  if all(map(slots.is_usable, folders, counts)):
    return True
  for folder in folders:
    slots.disown(folder)
  content = paths[0].read_bytes() if paths[0].exists() else b""
  for path in paths[1:]:
    with writing(path):
      safe_files.write(path, content)
  return False
