"""Batches as pure functions of (seed, worker, job), and one augmentation.

No state from earlier draws enters a batch. So a recorded order replays to the
bit, a worker that restarts resumes at the same batch, and processes send no
random generators.

Index letters used in shape comments:
  n  examples
  B  examples of a batch
  H, W, C  height, width, channels of an image
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import checks
from asgd.data import partitions

_CACHED_BYTES = 2**24  # memory for the permutations of one data set


class ExampleBatches(NamedTuple):
  """Batches of examples of an array, for one job or for many at once."""

  rows: Callable[[int, int], np.ndarray]  # (worker, job) -> int64[B]
  take: Callable[[np.ndarray], Any]  # row numbers of any shape -> examples

  def __call__(self, worker: int, job: int) -> Any:
    """Returns the batch of a job, its leaves [B, ...]."""
    return self.take(self.rows(worker, job))

  def of_jobs(self, workers: Sequence[int], jobs: Sequence[int]) -> Any:
    """Returns the batches of J jobs, their leaves [J, B, ...]."""
    pairs = zip(workers, jobs, strict=True)
    return self.take(np.stack([self.rows(*pair) for pair in pairs]))


@functools.lru_cache(maxsize=4)
def _permutations(n: int) -> Callable[[int, int], np.ndarray]:
  """Returns (seed, epoch) -> the order in which an epoch visits n examples,
  int64[n]. It caches the orders of several epochs, because slow workers may
  still read an earlier epoch than fast ones."""

  @functools.lru_cache(max(4, _CACHED_BYTES // (8 * n)))
  def permutation(seed, epoch):
    order = np.random.default_rng((seed, epoch)).permutation(n)
    order.setflags(write=False)
    return order

  return permutation


def make_batches(
  images: np.ndarray,
  labels: np.ndarray,
  *,
  batch_size: int,
  seed: int,
  partition: partitions.Partition = partitions.SHARED,
  workers: int = 1,
) -> ExampleBatches:
  """Makes the function that returns the batch of a job.

  "shared": workers take turns on one stream, as in the DANA papers. The job is
  a global counter. An epoch is n // batch_size jobs and visits the examples in
  a new random order, so jobs of one epoch share no example. Examples at the end
  of an epoch that do not fill a batch are dropped. The worker is ignored. If
  the number of jobs of an epoch is a multiple of N workers, the jobs r*N to
  r*N+N-1 together have the examples of one batch of N * batch_size: round r of
  a synchronous run.

  Other partitions give each worker its own examples (`asgd.data.partitions`).
  Each of its jobs draws a batch from them without replacement.

  Args:
    images: uint8[n, H, W, C], or any other array [n, ...].
    labels: [n] or [n, ...], integers, or floats of a regression.
    batch_size: B, examples of a batch.
    seed: at least 0; two seeds give unrelated streams.
    partition: "shared", or another one of `asgd.data.partitions`.
    workers: number of shards; ignored if shared.

  Returns:
    A pure function (worker, job) -> (uint8[B, H, W, C], int32[B]), or
    float32[B] labels: calls in any order, in any process, return the same bits.
    It raises ValueError for a negative job or a worker without a shard.

  Raises:
    ValueError: if the data (or the smallest shard) does not fill a batch.

  Example:
    >>> images = np.zeros((10, 8, 8, 1), np.uint8)
    >>> batches = make_batches(images, np.arange(10), batch_size=5, seed=0)
    >>> epoch = [batches(worker, job)[1] for worker, job in ((0, 0), (1, 1))]
    >>> sorted(np.concatenate(epoch).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
  """
  batch_size = checks.integer("batch_size", batch_size, 1)
  seed = checks.integer("seed", seed, 0)
  workers = checks.integer("workers", workers, 1)
  images, labels = np.asarray(images), np.asarray(labels)
  are_integers = labels.dtype.kind in "biu"
  labels = labels.astype(np.int32 if are_integers else np.float32, copy=False)
  n = len(images)
  if labels.shape[:1] != (n,):
    raise ValueError(
      f"labels must have shape ({n}, ...), one per image, not {labels.shape}"
    )
  is_shared = not partitions.divides(partition)
  # The largest batch: all examples, or those of the smallest shard.
  largest_batch, largest_batch_text = n, ""
  if not is_shared:
    if workers > n:
      raise ValueError(
        f"workers {workers} is more than the {n} training examples to divide;"
        f" use at most {n}"
      )
    largest_batch, largest_batch_text = (
      n // workers,
      f" of a shard ({n} over {workers} workers)",
    )
  if batch_size > largest_batch:
    raise ValueError(
      f"batch_size {batch_size} is larger than the {largest_batch} training"
      f" examples{largest_batch_text}; use at most {largest_batch}"
    )

  permutation = _permutations(n)
  # The examples of each worker, int64[n // N] or one more.
  rows_of_workers: list[np.ndarray] = (
    [] if is_shared else partitions.shards(partition, labels, workers, seed)
  )

  def rows_of(worker, job):
    worker, job = int(worker), int(job)
    if job < 0:
      raise ValueError(f"job must be at least 0, not {job}")
    if is_shared:
      epoch, position = divmod(job, n // batch_size)
      start = position * batch_size
      return permutation(seed, epoch)[start : start + batch_size]
    if 0 <= worker < workers:
      # The generator depends only on its arguments, so a replay draws the same.
      rng = np.random.default_rng((seed, worker, job))
      rows = rows_of_workers[worker]
      return rows[rng.choice(len(rows), batch_size, replace=False)]
    raise ValueError(f"worker must be in 0..{workers - 1}, not {worker}")

  return ExampleBatches(rows_of, lambda rows: (images[rows], labels[rows]))


@functools.partial(jax.jit, static_argnames="pad")
def augment(images: jax.Array, key: jax.Array, *, pad: int = 4) -> jax.Array:
  """Shifts and mirrors every image at random, the CIFAR-10 recipe.

  Each image is padded with zeros, cropped back to its size at a random offset,
  which is drawn for each image, and mirrored left to right with probability
  1/2. Zero is the mean colour only after normalisation, so raw pixels are
  refused.

  Args:
    images: float[B, H, W, C], normalised.
    key: consumed here; derive one per batch, with `fold_in` of the job.
    pad: pixels of shift in each direction, at least 0; static.

  Returns:
    float[B, H, W, C], a function of (images, key, pad).
  """
  if images.ndim != 4 or not jnp.issubdtype(images.dtype, jnp.floating):
    raise ValueError(
      "images must be normalised floats [B, H, W, C], got "
      f"{images.dtype}{images.shape}; augment (x - mean) / std"
    )
  pad = checks.integer("pad", pad, 0)
  count, *size = images.shape
  offset_key, flip_key = jax.random.split(key)
  # int[B, 2]: the corner of each crop in the padded image.
  offsets = jax.random.randint(offset_key, (count, 2), 0, 2 * pad + 1)
  flips = jax.random.bernoulli(flip_key, 0.5, (count, 1, 1, 1))
  padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  mirrored = jnp.where(flips, padded[:, :, ::-1], padded)

  def crop(image, offset):
    return jax.lax.dynamic_slice(image, (*offset, 0), size)

  return jax.vmap(crop)(mirrored, offsets)
