"""Checkpoints of a cell, with orbax: named arrays and JSON.

A checkpoint holds the state that does not follow from config, seed, worker and
job: a tree of arrays, each under its path, and JSON. Orbax writes a step under
a temporary name and renames it, so a killed save leaves no step. A checksum
over all arrays and the JSON detects later damage.
"""

import asyncio
import contextlib
import functools
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from asgd import safe_files
from asgd.checks import line_of
from asgd.experiment import storage

# Checkpoints of a cell: one more than needed, for the case of a damaged one.
_MAX_TO_KEEP = 2
# Bytes up to which arrays share one array of bytes: orbax takes milliseconds
# for each array, and a pipeline's state has thousands of small ones. Orbax
# cannot store an array without elements at all.
_MAX_PACKED_BYTES = 1 << 16
_PACKED = "packed"  # the name of that array
# How errors of TensorStore begin that say nothing about the contents of a file.
_STATUSES = (
  *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN"),
  *("DEADLINE_EXCEEDED", "CANCELLED", "ABORTED"),
)


class Restored(NamedTuple):
  """The contents of a checkpoint."""

  arrays: dict[str, np.ndarray]  # by path in the tree
  notes: dict[str, Any]  # JSON

  def tree(self, template: Any) -> Any:
    """Returns the saved tree with NumPy arrays. Raises ValueError if its
    structure or shapes differ from the template's; a leaf ANY has any shape."""
    leaves, structure = _leaves_by_name(template)
    # [1] The same leaves, by name.
    if leaves.keys() != self.arrays.keys():
      differing_names = sorted(leaves.keys() ^ self.arrays.keys())[:3]
      raise ValueError(
        "it is of another model, algorithm or schedule"
        f" ({', '.join(differing_names)})"
      )
    # [2] The same shapes.
    for name, leaf in leaves.items():
      shape = self.arrays[name].shape
      if leaf is not ANY and np.shape(leaf) != shape:
        reason = f"{name} has shape {shape}, not {np.shape(leaf)}"
        raise ValueError(f"{reason}: it is of another model")
    # `leaves` has the template's order.
    return jax.tree.unflatten(structure, [self.arrays[n] for n in leaves])


ANY = object()  # a leaf of a template that may have any shape


def any_shapes(tree: Any) -> Any:
  """Returns a template of the same structure, with shapes not checked."""
  return jax.tree.map(lambda leaf: ANY, tree)


def _leaves_by_name(tree: Any) -> tuple[dict[str, Any], Any]:
  """Returns (name -> leaf, structure) of a tree."""
  paths, structure = jax.tree_util.tree_flatten_with_path(tree)
  leaves = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
  if len(leaves) != len(paths):
    raise ValueError("two leaves of a checkpoint have the same name")
  return leaves, structure


def _digest(arrays: Iterable[np.ndarray], text: str) -> str:
  """Returns the checksum of a checkpoint's arrays and JSON text."""
  return storage.digest([*arrays, np.frombuffer(text.encode(), np.uint8)])


class _PatientLoop(asyncio.SelectorEventLoop):
  """An event loop that waits for its tasks before it closes. Orbax closes its
  loop at the first failed write; each unfinished write then prints a
  traceback."""

  def close(self) -> None:
    if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
      self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    super().close()


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
  """Makes orbax raise its errors without printing them."""
  logger = logging.getLogger("absl")
  level = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    with mock.patch.object(asyncio, "new_event_loop", _PatientLoop):
      yield
  finally:
    logger.setLevel(level)


def _is_of_contents(error: Exception) -> bool:
  """Whether an error of a read says that a file is damaged or missing. Others
  are of the process or the machine: too many open files, no permission."""
  if isinstance(error, OSError):
    missing = FileNotFoundError, NotADirectoryError, IsADirectoryError
    return isinstance(error, missing)
  # For a damaged file orbax may raise any other type.
  is_of_machine = isinstance(error, MemoryError)
  return not is_of_machine and not str(error).startswith(_STATUSES)


class Checkpoints:
  """The last few checkpoints of one cell, in one folder."""

  def __init__(self, folder: Path):
    safe_files.make_folder(folder)
    self._folder = folder

  @functools.cached_property
  def _manager(self) -> Any:
    """Orbax's manager of the folder, made at the first save or restore."""
    # The import of orbax takes a sixth of a command's start, and some commands
    # neither save nor restore.
    import orbax.checkpoint as ocp

    process_index = jax.process_index()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=_MAX_TO_KEEP,
      enable_async_checkpointing=False,
      create=False,
      # Only this process writes; orbax does not wait for others.
      multiprocessing_options=ocp.options.MultiprocessingOptions(
        primary_host=process_index, active_processes={process_index}
      ),
    )
    return ocp.CheckpointManager(self._folder.absolute(), options=options)

  def save(self, step: int, tree: Any, notes: dict[str, Any]) -> None:
    """Writes a tree of arrays and JSON to disk, before it returns. Raises
    ValueError if that fails; earlier checkpoints remain."""
    from orbax.checkpoint import args

    if step == self._manager.latest_step():
      return  # this step was restored or saved already
    # [1] To the host: orbax gets NumPy arrays only, in the order of `leaves`.
    leaves, _ = _leaves_by_name(jax.device_get(tree))
    arrays = list(map(np.asarray, leaves.values()))
    # [2] The JSON, as text: the checksum is over the bytes of this text.
    text = json.dumps(
      {
        "notes": notes,
        # Names are here, and arrays under numbers, because orbax gives slashes
        # and dots in names a meaning.
        "names": list(leaves),
        _PACKED: {
          name: [x.dtype.name, x.shape]
          for name, x in zip(leaves, arrays, strict=True)
          if x.nbytes <= _MAX_PACKED_BYTES
        },
      }
    )
    meta = {"text": text, "digest": _digest(arrays, text)}
    packed_bytes = b"".join(
      x.tobytes() for x in arrays if x.nbytes <= _MAX_PACKED_BYTES
    )
    arrays_by_number = {
      f"{i:05d}": x
      for i, x in enumerate(arrays)
      if x.nbytes > _MAX_PACKED_BYTES
    }
    if packed_bytes:
      arrays_by_number[_PACKED] = np.frombuffer(packed_bytes, np.uint8)
    items = args.Composite(
      arrays=args.StandardSave(arrays_by_number), meta=args.JsonSave(meta)
    )
    # [3] The files. Orbax renames the step's folder when all are written.
    try:
      with _quiet_orbax():
        self._manager.save(step, args=items, force=True)
    except Exception as error:  # on a full disk orbax may raise any type
      raise ValueError(
        f"cannot write a checkpoint to {self._folder} ({line_of(error, 200)});"
        " make room and run the same command again to resume"
      ) from error

  def restore(self, rebuild: Callable[[Restored], Any]) -> Any:
    """Returns `rebuild(restored)` of the newest checkpoint that is complete and
    that `rebuild` accepts; None if there is none. Renames newer ones, which
    are damaged or of another model, with a warning on stderr. Raises OSError if
    a checkpoint cannot be read for another reason, and errors of `rebuild` but
    ValueError and LookupError, which say that it is of another model."""
    if not any(self._folder.iterdir()):
      return None
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        # `rebuild` raises, too, if shapes differ from the model's.
        return rebuild(self._read(step))
      except (ValueError, LookupError) as error:
        damaged_path = self._folder.parent / f"damaged-{step}"
        while damaged_path.exists():
          damaged_path = damaged_path.with_name(f"{damaged_path.name}-again")
        path = self._folder / str(step)
        path.rename(damaged_path)
        self._manager.reload()
        print(
          f"warning: checkpoint {path} is damaged or of another model, and is"
          f" not used ({line_of(error, 200)}); it is kept as {damaged_path}."
          " The cell resumes from the checkpoint before it, or starts again",
          file=sys.stderr,
        )
    return None

  def _read(self, step: int) -> Restored:
    """Reads a checkpoint. Raises ValueError if it is damaged, and OSError if it
    cannot be read."""
    try:
      return self._decode(step)
    except Exception as error:
      if _is_of_contents(error):
        raise ValueError(line_of(error, 200)) from error
      raise OSError(
        f"cannot read the checkpoint {self._folder / str(step)}"
        f" ({line_of(error, 200)}); run the same command again when it can be"
        " read"
      ) from error

  def _decode(self, step: int) -> Restored:
    """Reads a checkpoint; raises ValueError if its checksum does not match."""
    from orbax.checkpoint import args

    items = args.Composite(
      arrays=args.StandardRestore(), meta=args.JsonRestore()
    )
    with _quiet_orbax():
      saved = self._manager.restore(step, args=items)
    # The reverse of `save`: names, and shapes of small arrays, are in the JSON.
    text, arrays, start = saved["meta"]["text"], {}, 0
    meta = json.loads(text)
    # Earlier releases had only arrays without elements in the JSON, as "empty".
    packed = meta[_PACKED] if _PACKED in meta else meta["empty"]
    packed_bytes = np.asarray(
      saved["arrays"].get(_PACKED, np.empty(0, np.uint8))
    )
    for i, name in enumerate(meta["names"]):
      if name in packed:
        dtype, shape = packed[name]
        end = start + np.dtype(dtype).itemsize * math.prod(shape)
        arrays[name] = packed_bytes[start:end].copy().view(dtype).reshape(shape)
        start = end
      else:
        arrays[name] = np.asarray(saved["arrays"][f"{i:05d}"])
    if _digest(arrays.values(), text) != saved["meta"]["digest"]:
      raise ValueError("the checksum does not match")
    return Restored(arrays, meta["notes"])

  def close(self) -> None:
    """Releases the folder."""
    # Do not make the manager only to close it.
    if "_manager" in vars(self):
      self._manager.close()
