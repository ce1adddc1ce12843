"""A shard that holds its rows of named vectors, and all shards together.

A vector is a tree of NumPy or JAX arrays, and each shard has a part of its
rows. Arrays are never changed: an operation makes new ones. So an image of a
shard is a dict of references.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, sharding
from asgd.sandblaster.commands import Command, check

Rows = Any  # a tree of arrays: a shard's part of a vector
_IMAGE_EVERY = 64  # commands between two images of a shard


def dot(x: Rows, y: Rows) -> float:
  """Returns the dot product of two trees of arrays.

  NumPy arrays are multiplied and summed (pairwise) in float64, whatever their
  dtype, and without BLAS, as its bits depend on its threads. JAX arrays are
  summed in float64 if `jax_enable_x64` is set, else in float32.

  Example:
    >>> import numpy as np
    >>> x = {"b": np.float32([1, 2]), "w": np.float32([[3]])}
    >>> dot(x, x)
    14.0
  """
  return sum(map(_leaf_dot, jax.tree.leaves(x), jax.tree.leaves(y)), 0.0)


def _leaf_dot(x: Any, y: Any) -> float:
  """Returns the dot product of two arrays of one shape; see `dot`."""
  if isinstance(x, jax.Array) or isinstance(y, jax.Array):
    dtype = np.float64 if jax.config.jax_enable_x64 else np.float32
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, y.dtype), dtype)
    return float(jnp.sum(x.astype(dtype) * y.astype(dtype)))
  return float(np.multiply(x, y, dtype=np.float64).sum())


def _zeros(x: Any) -> Any:
  xp = jnp if isinstance(x, jax.Array) else np
  return xp.zeros(np.shape(x), x.dtype)


def _scaled(x: Any, factor: float) -> Any:
  return x * x.dtype.type(factor)


# operation -> function (factor, target array[, source array]) -> new array
_WRITE: dict[str, Callable[..., Any]] = {
  "scale": lambda factor, x: _scaled(x, factor),
  "axpy": lambda factor, x, y: x + _scaled(y, factor),
  "multiply": lambda factor, x, y: x * y,
}


class Image(NamedTuple):
  """A shard's vectors before a command. A shard is rebuilt from its image, the
  commands from this one on, and the messages in its slots."""

  number: int  # of the next command
  vectors: dict[str, Rows]


class VectorShard:
  """One shard: vectors by name, a journal of commands, and slots for messages.

  Commands are idempotent: a repeated command returns the stored answer. So a
  restarted coordinator can repeat commands to get their answers again.

  Example:
    >>> import numpy as np
    >>> from asgd.sandblaster import Command, VectorShard
    >>> shard = VectorShard({"w": np.zeros(2)})
    >>> shard.put("gradient", {"w": np.array([3.0, 4.0])})
    >>> shard.execute(Command(0, "copy", "direction", "gradient"))
    >>> shard.execute(Command(1, "scale", "direction", factor=-1.0))
    >>> shard.execute(Command(2, "dot", "direction", "gradient"))
    -25.0
    >>> # A repeated command is executed once only.
    >>> shard.execute(Command(1, "scale", "direction", factor=-1.0))
    >>> shard.read("direction")["w"].tolist()
    [-3.0, -4.0]
  """

  def __init__(self, like: Rows, image: Image | None = None):
    """Starts without vectors, or from an image; `like` has the shapes and
    dtypes of the shard's rows."""
    self._zeros = jax.tree.map(_zeros, like)
    # State that outlives the process: image, journal and slots.
    self._image = image or Image(0, {})
    self._journal: list[tuple[Command, float | None]] = []
    self._first_number = self._image.number  # first command in the journal
    self._slots: dict[str, Rows] = {}  # messages by vector name
    # State that is lost with the process; `_vectors` is None after a loss.
    self._vectors: dict[str, Rows] | None = dict(self._image.vectors)
    self._discarded: set[str] = set()  # slots that a command has discarded
    self.recoveries = 0

  @property
  def number(self) -> int:
    """Number of the next command."""
    return self._first_number + len(self._journal)

  def put(self, name: str, rows: Rows) -> None:
    """Stores a message as a vector. A later message of the same name is
    dropped."""
    self._slots.setdefault(name, rows)

  def read(self, name: str) -> Rows:
    """Returns the shard's rows of a vector; ValueError if there is no such
    vector."""
    vectors = self._alive()
    rows = vectors.get(name)
    if rows is None and name not in self._discarded:
      rows = self._slots.get(name)
    if rows is None:
      names = {*vectors, *self._slots} - self._discarded.difference(vectors)
      known_names = ", ".join(sorted(names)) or "none"
      raise ValueError(
        f"there is no vector {name!r}; the vectors: {known_names}"
      )
    return rows

  def execute(self, command: Command) -> float | None:
    """Executes a command, and returns its answer.

    Raises:
      ValueError: for an invalid command, a number that is not the next one,
        another command than the one executed under that number, and a command
        that the journal has dropped.
    """
    check(command)
    if command.number < self.number:
      return self._answer_again(command)
    if command.number > self.number:
      raise ValueError(
        f"command {command.format()!r} comes too early: the next number is"
        f" {self.number}"
      )
    answer = self._apply(self._alive(), command)
    self._add_to_journal(command, answer)
    if self.number - self._image.number >= _IMAGE_EVERY:
      self.image()
    return answer

  def _add_to_journal(self, command: Command, answer: float | None) -> None:
    self._journal.append((command, answer))

  def _answer_again(self, command: Command) -> float | None:
    """Returns the stored answer of an executed command."""
    number, line = command.number, command.format()
    if number < self._first_number:
      raise ValueError(
        f"command {line!r} was dropped: the journal starts at"
        f" {self._first_number}"
      )
    executed_command, answer = self._journal[number - self._first_number]
    if executed_command != command:
      raise ValueError(
        f"command {line!r} differs from {executed_command.format()!r}, which"
        " was executed under its number"
      )
    return answer

  def _apply(
    self, vectors: dict[str, Rows], command: Command
  ) -> float | None:
    """Executes a command on vectors; returns its answer."""
    operation, target = command.operation, command.target
    if operation == "dot":
      return dot(self.read(target), self.read(command.source))
    if operation == "allocate":
      vectors[target] = self._zeros
    elif operation == "discard":
      self.read(target)
      if vectors.pop(target, None) is None:
        self._discarded.add(target)
    elif operation == "copy":
      vectors[target] = self.read(command.source)
    else:
      write = functools.partial(_WRITE[operation], command.factor)
      names = [target, command.source] if command.source else [target]
      vectors[target] = jax.tree.map(write, *map(self.read, names))
    return None

  def image(self) -> Image:
    """Saves and returns an image, and frees the discarded slots."""
    self._image = Image(self.number, dict(self._alive()))
    self._slots = {
      name: rows
      for name, rows in self._slots.items()
      if name not in self._discarded
    }
    self._discarded.clear()
    return self._image

  def forget(self, next_number: int) -> None:
    """Drops the stored answers of commands below a number, which no coordinator
    will repeat."""
    self.image()
    if next_number > self._first_number:
      del self._journal[: next_number - self._first_number]
      self._first_number = min(next_number, self._image.number)

  def lose(self) -> None:
    """Loses the vectors, as if the process was killed."""
    self._vectors, self._discarded = None, set()

  def _alive(self) -> dict[str, Rows]:
    """Returns the vectors; rebuilds them after a loss from the image and the
    commands since then."""
    if self._vectors is None:
      self._vectors = dict(self._image.vectors)
      self.recoveries += 1
      for command, _ in self._journal[
        self._image.number - self._first_number :
      ]:
        self._apply(self._vectors, command)
    return self._vectors


class Shards:
  """All shards of a server, which execute the same commands.

  Example:
    >>> import numpy as np
    >>> from asgd.sandblaster import Command, Shards
    >>> shards = Shards({"w": np.zeros(3)}, 2)
    >>> shards.put("x", {"w": np.array([1.0, 2.0, 3.0])})
    >>> shards.execute(Command(0, "dot", "x", "x"))
    14.0
  """

  def __init__(
    self,
    like: base.Params,
    count: int,
    images: Sequence[Image] | None = None,
    *,
    start: Mapping[str, base.Params] | None = None,
  ):
    """Starts `count` shards with the vectors `start`, or resumes from their
    images; of the parameters `like` only shapes, dtypes and kinds are read."""
    self.plan = sharding.make_plan(like, count)
    if images is None:
      vectors = (start or {}).items()
      split = {
        name: sharding.split(self.plan, vector) for name, vector in vectors
      }
      images = [
        Image(0, {name: rows[shard] for name, rows in split.items()})
        for shard in range(count)
      ]
    parts = sharding.split(self.plan, like)
    self._shards = [
      VectorShard(part, image)
      for part, image in zip(parts, images, strict=True)
    ]

  @property
  def number(self) -> int:
    """Number of the next command."""
    return self._shards[0].number

  def execute(self, command: Command) -> float | None:
    """Executes a command on every shard. Returns the sum of their answers, in
    the order of the shards, for `dot`; else None."""
    answers = [shard.execute(command) for shard in self._shards]
    if command.operation != "dot":
      return None
    return float(sharding.add_up(answers))

  def put(self, name: str, tree: base.Params) -> None:
    """Stores each shard's rows of a message."""
    parts = sharding.split(self.plan, tree)
    for shard, rows in zip(self._shards, parts, strict=True):
      shard.put(name, rows)

  def read(self, name: str) -> base.Params:
    """Returns a complete vector."""
    return sharding.join(
      self.plan, [shard.read(name) for shard in self._shards]
    )

  def images(self) -> list[Image]:
    """Returns an image of each shard."""
    return [shard.image() for shard in self._shards]

  def forget(self, next_number: int) -> None:
    """Makes every shard drop the answers of commands below a number."""
    for shard in self._shards:
      shard.forget(next_number)

  def lose(self, shard: int) -> None:
    """Loses the vectors of one shard, which rebuilds them at its next
    command."""
    self._shards[shard].lose()

  @property
  def recoveries(self) -> int:
    """Count of rebuilds of shards."""
    return sum(shard.recoveries for shard in self._shards)
