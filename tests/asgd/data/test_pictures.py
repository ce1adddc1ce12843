"""Pictures, one file each, in folders and in archives."""

import hashlib
import io
import shutil
import sys
import tarfile

import jax
import kit
import numpy as np
import pytest
from PIL import Image

from asgd import data
from asgd.data import formats

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
  with pytest.raises(data.DataError, match=r"pip install 'asgd\[images\]'"):
    data.load("cifar10", data_dir=tmp_path)


def cut(folder):
  path = folder / "test" / "bee" / "0001.png"
  path.write_bytes(path.read_bytes()[:40])


def resize(folder):
  Image.new("RGB", (7, 4)).save(folder / "train" / "cow" / "0003.png")


def rename(folder):
  (folder / "test" / "ant").rename(folder / "test" / "asp")


def empty(folder):
  shutil.rmtree(folder / "test")
  (folder / "test").mkdir()


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (cut, "test/bee/0001.png cannot be"),
    (resize, r"cow/0003.png .*\(7, 4\)"),
    (rename, "asp"),  # a class that was never trained
    (empty, "test/ holds 0 pictures"),
  ],
)
def test_a_damaged_folder_is_an_error(tmp_path, damage, message):
  write_pictures(tmp_path)
  damage(tmp_path)
  with pytest.raises(data.DataError, match=message):
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

  monkeypatch.setattr(formats, "_decode_pictures", refuse)


def test_an_archive_is_decoded_once(picture_archive, tmp_path, monkeypatch):
  folder, truth = picture_archive
  first = data.load("cifar10", data_dir=folder)
  assert first.name == "cifar10_jpeg"
  assert first.source == f"file {folder / 'cifar10_jpeg.tar.xz'}"
  assert_are_pictures(first, truth, tolerance=4)
  digest = hashlib.sha256((folder / "cifar10_jpeg.tar.xz").read_bytes())
  assert kit.cached_files(tmp_path / "cache") == [f"{digest.hexdigest()}.npz"]
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
    malice = np.array([kit.Malice(tmp_path / "executed")])
    fields = dict.fromkeys(formats.Arrays._fields, malice)
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
  assert not kit.cached_files(tmp_path / "cache")
