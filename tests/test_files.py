"""What a shard writes to disk: whole rows, all of them, or a clear word."""

import mmap
import os
import shutil

import numpy as np
import pytest

from asgd import base
from asgd.runtimes import files, memory, protocol
from asgd.runtimes.protocol import Entry


def entry(time, worker, job, action, seq=-1, message=-1):
  return Entry(time, worker, job, action, seq, message=message)


ENTRIES = [
  entry(0.5, 0, 0, base.JOIN),
  entry(0.5, 0, 0, base.SEND, 0),
  entry(0.75, 1, 0, base.JOIN),
  entry(0.75, 1, 1, base.SEND, 0),
  entry(1.0, 0, 0, base.RECEIVE, 0),
  entry(1.0, 0, 2, base.SEND, 1),
  entry(2.0, 1, 1, base.LOST, 0, 3),
  entry(2.0, 1, 0, base.LEAVE),
]


def records(count, first=0):
  columns = {name: np.zeros(count) for name in base.Records._fields}
  columns["job"] = np.arange(first, first + count)
  return base.Records(**columns)


def journal(folder):
  out = files.FileJournal(folder / "trace-0.csv")
  for row in ENTRIES:
    out.append(row)
  return out


def sink(folder, count=3):
  out = files.FileSink(folder / "records-0.bin")
  out.append(records(count))
  return out


class Disk:
  """Takes so many bytes in all, and at most so many at a time."""

  def __init__(self, monkeypatch, room, at_once=10**6):
    self._write, self.room, self._at_once = os.write, room, at_once
    monkeypatch.setattr(os, "write", self)

  def __call__(self, file, data):
    part = bytes(data)[: min(self.room, self._at_once)]
    if not part:
      raise OSError(28, "No space left on device")
    self.room -= len(part)
    return self._write(file, part)


def test_what_is_written_in_pieces_is_whole(tmp_path, monkeypatch):
  Disk(monkeypatch, 10**6, at_once=7)
  journal(tmp_path)
  sink(tmp_path)
  assert files.read_journal(tmp_path / "trace-0.csv") == ENTRIES
  read = files.read_records(tmp_path / "records-0.bin")
  assert read.job.tolist() == [0, 1, 2]


@pytest.mark.parametrize("left", [0, 1, 31])
def test_what_does_not_fit_is_taken_back_and_the_file_named(
  tmp_path, monkeypatch, left
):
  trace, seen = journal(tmp_path), sink(tmp_path)
  disk = Disk(monkeypatch, left, at_once=20)
  more = entry(3.0, 0, 2, base.RECEIVE, 1)
  with pytest.raises(ValueError, match=r"cannot write \S+/trace-0.csv \(No"):
    trace.append(more)
  disk.room = left
  with pytest.raises(ValueError, match="make room and go on with --resume"):
    seen.append(records(2, 3))
  assert trace.entries() == ENTRIES
  assert files.read_journal(tmp_path / "trace-0.csv") == ENTRIES
  assert (tmp_path / "records-0.bin").stat().st_size == (
    3 * files.RECORD.itemsize
  )
  disk.room = 10**6  # somebody has made room
  trace.append(more)
  seen.append(records(1, 3))
  assert files.read_journal(tmp_path / "trace-0.csv") == [*ENTRIES, more]
  read = files.read_records(tmp_path / "records-0.bin")
  assert read.job.tolist() == [0, 1, 2, 3]


def test_a_file_that_is_deleted_meanwhile_is_noticed(tmp_path):
  trace, seen = journal(tmp_path), sink(tmp_path)
  for path in tmp_path.iterdir():
    path.unlink()
  with pytest.raises(ValueError, match=r"trace-0.csv is gone: it was deleted"):
    trace.append(ENTRIES[0])
  with pytest.raises(ValueError, match=r"records-0.bin is gone"):
    seen.append(records(1))


def test_a_file_that_is_changed_meanwhile_is_noticed(tmp_path):
  seen = sink(tmp_path)
  os.truncate(tmp_path / "records-0.bin", files.RECORD.itemsize)
  with pytest.raises(ValueError, match="where this run wrote 123: somebody"):
    seen.append(records(1))


def test_a_sink_counts_and_is_cut(tmp_path):
  seen = sink(tmp_path, 5)
  seen.truncate(9)
  assert seen.count == 5
  seen.truncate(2)
  seen.append(records(1, 7))
  seen.sync()
  assert seen.count == 3
  read = files.read_records(tmp_path / "records-0.bin")
  assert read.job.tolist() == [0, 1, 7]
  with (tmp_path / "records-0.bin").open("ab") as file:
    file.write(b"half")
  assert files.FileSink(tmp_path / "records-0.bin").count == 3


def test_a_journal_goes_on_after_its_last_whole_line(tmp_path):
  journal(tmp_path)
  path = tmp_path / "trace-0.csv"
  text = path.read_text().replace("0.75,", "0.7500,")  # of another length
  path.write_text(text + "3.0,0,2,rece")
  again = files.FileJournal(path)
  assert again.entries() == ENTRIES
  again.append(ENTRIES[4])
  assert path.read_text() == text + protocol.format_entry(ENTRIES[4])


@pytest.mark.parametrize(
  "old, new, message",
  [
    ("\n", "\r\n", r"trace-0.csv, line 1: .*Windows"),
    ("2.0,1,1", "nan,1,1", "line 8: the time nan is no number of seconds"),
    ("2.0,1,1", "inf,1,1", "line 8: the time inf is no"),
    ("2.0,1,1", "-2.0,1,1", "line 8: the time -2.0 is no"),
    ("2.0,1,1", "2.0,99999999999,1", "line 8: the worker 99999999999 is not"),
    ("2.0,1,1", "2.0,1,-5", "line 8: the job -5 is not from 0 to"),
    ("lost", "last", "line 8: no row of a journal"),
  ],
)
def test_a_line_that_is_none_is_named(tmp_path, old, new, message):
  journal(tmp_path)
  path = tmp_path / "trace-0.csv"
  path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))
  with pytest.raises(ValueError, match=message):
    files.read_journal(path)


def changed(row, **fields):
  return [
    *ENTRIES[:row],
    ENTRIES[row]._replace(**fields),
    *ENTRIES[row + 1 :],
  ]


@pytest.mark.parametrize(
  "entries, message",
  [
    (changed(4, worker=1), r"line 6 .*: the worker was not sent that job"),
    (changed(4, seq=999), r"line 6 .*: the worker was not sent that job"),
    (changed(4, job=1), r"line 6 .*: the worker was not sent that job"),
    (changed(5, seq=0), r"line 7 .*: the worker has begun that number"),
    ([*ENTRIES[:5], *ENTRIES[4:]], r"line 7 .*: the worker was not sent"),
    ([*ENTRIES[:4], *ENTRIES[3:]], r"line 6 .*: the worker has begun"),
    (ENTRIES[:1] + ENTRIES[2:], r"line 5 .*: the worker was not sent"),
    (changed(4, time=0.25), "trace row 4 .*: time goes back"),
    ([*ENTRIES, entry(2.0, 0, 99, base.ROLLBACK)], "still to come"),
  ],
)
def test_a_journal_that_no_shard_wrote_is_refused(entries, message):
  files.check_entries("trace-0.csv", ENTRIES)
  with pytest.raises(ValueError, match=f"^trace-0.csv.*{message}"):
    files.check_entries("trace-0.csv", entries)


def test_records_are_as_many_as_messages():
  def check(count, rows=(), **kwargs):
    files.check_records("records-0.bin", count, [*ENTRIES, *rows], **kwargs)

  check(1, whole=True)
  check(0, whole=False)
  for count, whole in ((0, True), (2, True), (2, False)):
    with pytest.raises(ValueError, match=f"records-0.bin has {count} records"):
      check(count, whole=whole)
  # What was seen of messages may be lost with what they had changed.
  back = entry(2.0, 0, 2, base.ROLLBACK)
  check(0, [back], whole=True)
  check(1, [back], whole=True)


# Shared memory.

PART = {"w": np.arange(6, dtype=np.float32)}


def shared(folder, log=4):
  like = PART, PART, PART
  return memory.SharedMemory(folder / "shard-0", memory.Sizes(3, log), like)


def test_memory_that_does_not_fit_is_refused_before_it_is_taken(
  tmp_path, monkeypatch
):
  with pytest.raises(ValueError, match=r"no room for \d+ MB of shared memory"):
    shared(tmp_path, log=10**14)
  assert not (tmp_path / "shard-0" / "messages").exists()
  nbytes = memory.needed(memory.Sizes(3, 10**30), PART)
  assert nbytes == (3 + 10**30) * mmap.PAGESIZE
  with pytest.raises(ValueError, match="a smaller log .--config.server.log"):
    memory.check_room(tmp_path, nbytes)
  memory.check_room(tmp_path, 1)

  def full(*args):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "posix_fallocate", full)
  with pytest.raises(ValueError, match="no room .*No space left on device"):
    shared(tmp_path / "other")
  assert not (tmp_path / "other" / "shard-0" / "params").exists()


def test_memory_of_other_settings_is_named_with_the_remedy(tmp_path):
  shared(tmp_path)
  with pytest.raises(ValueError, match="--resume then goes back to the last"):
    shared(tmp_path, log=5)


@pytest.mark.parametrize("text", ["{}", "[]", "", "\0what", '{"image": 7}'])
def test_a_snapshot_that_cannot_be_read_is_told_apart_from_none(tmp_path, text):
  held = shared(tmp_path)
  assert held.load(PART) is None
  held.save(PART, {"rows": 1})
  tree, meta = shared(tmp_path).load(PART)
  np.testing.assert_array_equal(tree["w"], PART["w"])
  assert meta == {"rows": 1}
  (tmp_path / "shard-0" / "snapshot.json").write_text(text)
  again = shared(tmp_path)
  with pytest.raises(memory.Damaged, match=r"snapshot.json is damaged and is"):
    again.load(PART)
  again.save(PART, {"rows": 2})
  assert again.load(PART)[1] == {"rows": 2}
  again.forget()
  assert again.load(PART) is None


def test_memory_that_is_removed_meanwhile_says_how_to_go_on(tmp_path):
  held = shared(tmp_path)
  held.save(PART, {})
  shutil.rmtree(tmp_path / "shard-0")
  with pytest.raises(ValueError, match="is gone: somebody .*--resume goes on"):
    held.save(PART, {})
