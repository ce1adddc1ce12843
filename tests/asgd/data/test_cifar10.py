"""CIFAR-10 in the forms in which it is published, whole and damaged."""

import gzip
import pickle
import shutil
import tarfile

import kit
import numpy as np
import pytest

from asgd import data
from asgd.data import formats
from asgd.data import images as images_lib

RECORDS = 4  # of a batch, where a test makes small ones


@pytest.fixture
def small_batches(monkeypatch):
  monkeypatch.setattr(formats, "_CIFAR_RECORDS", RECORDS)


def cifar_batches():
  """Returns six (planes uint8[r, 3072], labels uint8[r]); test is last."""
  return [
    (kit.pixels(RECORDS, 3072, seed=i), kit.pixels(RECORDS, seed=9 + i) % 10)
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
    formats._CIFAR_BATCHES, batches, strict=True
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
  for name, batch in zip(formats._CIFAR_BATCHES, batches, strict=True):
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


def test_files_of_the_published_size_are_read(tmp_path, monkeypatch):
  two = "data_batch_1", "test_batch"  # of six
  monkeypatch.setattr(formats, "_CIFAR_BATCHES", two)
  for name in two:
    with open(tmp_path / f"{name}.bin", "wb") as file:
      file.truncate(30_730_000)  # sparse
  dataset = data.load("cifar10", data_dir=tmp_path)
  assert dataset.train_images.shape == (10_000, 32, 32, 3)
  assert dataset.test_images.shape == (10_000, 32, 32, 3)


def test_cifar10_is_downloaded_once(tmp_path, monkeypatch, small_batches):
  batches = cifar_batches()
  write_binary(tmp_path / "cifar-10-batches-bin", batches)
  pack(tmp_path / "cifar-10-batches-bin", tmp_path / "archive.tar.gz")
  content = (tmp_path / "archive.tar.gz").read_bytes()
  monkeypatch.setattr(images_lib, "_CIFAR10_MD5", kit.md5(content))
  asked = kit.serve(monkeypatch, {images_lib._CIFAR10_URL: content})
  for _ in range(2):
    dataset = data.load("cifar10")
    assert dataset.source == f"download {images_lib._CIFAR10_URL}"
    assert_is_cifar(dataset, batches)
  assert asked == [images_lib._CIFAR10_URL]


@pytest.mark.parametrize("form", FORMS)
def test_missing_and_truncated_batches_are_errors(
  tmp_path, small_batches, form
):
  write, folder, _ = FORMS[form]
  write(tmp_path / folder, cifar_batches())
  path = next((tmp_path / folder).glob("test_batch*"))
  # A whole number of binary records: only the count gives it away.
  path.write_bytes(path.read_bytes()[: 3 * 3073])
  with pytest.raises(data.DataError, match=f"{folder}/test_batch"):
    data.load("cifar10", data_dir=tmp_path)
  next((tmp_path / folder).glob("data_batch_3*")).unlink()
  with pytest.raises(data.DataError, match="lacks data_batch_3"):
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


def test_a_malicious_pickle_is_refused(tmp_path, small_batches):
  write_python(tmp_path, cifar_batches())
  trace = tmp_path / "executed"
  (tmp_path / "data_batch_2").write_bytes(pickle.dumps(kit.Malice(trace)))
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
