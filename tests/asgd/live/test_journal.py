"""Journals and records: whole rows, all of them, or an error that says why."""

import os

import kit
import numpy as np
import pytest

from asgd import base
from asgd.live.journal import FileJournal, check_journal, read_journal
from asgd.live.records import RECORD, FileSink, check_records, read_records
from asgd.orders.trace import Event


def event(time, worker, job, action, seq=-1, message=-1):
  return Event(time, worker, seq, job, action, message=message)


EVENTS = [
  event(0.5, 0, 0, base.JOIN),
  event(0.5, 0, 0, base.SEND, 0),
  event(0.75, 1, 0, base.JOIN),
  event(0.75, 1, 1, base.SEND, 0),
  event(1.0, 0, 0, base.RECEIVE, 0),
  event(1.0, 0, 2, base.SEND, 1),
  event(2.0, 1, 1, base.LOST, 0, 3),
  event(2.0, 1, 0, base.LEAVE),
]


def journal(folder):
  out = FileJournal(folder / "trace-0.csv")
  for row in EVENTS:
    out.append(row)
  return out


def sink(folder, count=3):
  out = FileSink(folder / "records-0.bin")
  out.append(kit.records(count, job=np.arange(count)))
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
  assert read_journal(tmp_path / "trace-0.csv") == EVENTS
  read = read_records(tmp_path / "records-0.bin")
  assert read.job.tolist() == [0, 1, 2]


@pytest.mark.parametrize("left", [0, 1, 31])
def test_what_does_not_fit_is_taken_back_and_the_file_named(
  tmp_path, monkeypatch, left
):
  trace, seen = journal(tmp_path), sink(tmp_path)
  disk = Disk(monkeypatch, left, at_once=20)
  more = event(3.0, 0, 2, base.RECEIVE, 1)
  with pytest.raises(ValueError, match=r"cannot write \S+/trace-0.csv \(No"):
    trace.append(more)
  disk.room = left
  with pytest.raises(ValueError, match="make room and run the same command"):
    seen.append(kit.records(2, job=np.array([3, 4])))
  assert trace.events() == EVENTS
  assert read_journal(tmp_path / "trace-0.csv") == EVENTS
  assert (tmp_path / "records-0.bin").stat().st_size == (3 * RECORD.itemsize)
  disk.room = 10**6  # there is room again
  trace.append(more)
  seen.append(kit.records(1, job=np.array([3])))
  assert read_journal(tmp_path / "trace-0.csv") == [*EVENTS, more]
  read = read_records(tmp_path / "records-0.bin")
  assert read.job.tolist() == [0, 1, 2, 3]


def test_a_file_that_is_deleted_meanwhile_is_noticed(tmp_path):
  trace, seen = journal(tmp_path), sink(tmp_path)
  for path in tmp_path.iterdir():
    path.unlink()
  with pytest.raises(ValueError, match=r"trace-0.csv is gone: it was deleted"):
    trace.append(EVENTS[0])
  with pytest.raises(ValueError, match=r"records-0.bin is gone"):
    seen.append(kit.records(1, job=np.arange(1)))


def test_a_file_that_is_changed_meanwhile_is_noticed(tmp_path):
  seen = sink(tmp_path)
  os.truncate(tmp_path / "records-0.bin", RECORD.itemsize)
  with pytest.raises(ValueError, match="this run wrote 195: another process"):
    seen.append(kit.records(1, job=np.arange(1)))


def test_a_last_row_whose_newline_was_changed_is_no_row_that_was_cut(tmp_path):
  journal(tmp_path)
  path = tmp_path / "trace-0.csv"
  whole = path.read_bytes()
  for cut in range(1, 9):
    path.write_bytes(whole[:-cut])
    assert read_journal(path) == EVENTS[:-1]
  path.write_bytes(whole[:-1] + b"\x0b")
  with pytest.raises(ValueError, match=r"line 9 ends in '\\x0b', not in a new"):
    read_journal(path)


def test_a_sink_counts_and_is_cut(tmp_path):
  seen = sink(tmp_path, 5)
  seen.truncate(9)
  assert seen.count == 5
  seen.truncate(2)
  seen.append(kit.records(1, job=np.array([7])))
  seen.sync()
  assert seen.count == 3
  read = read_records(tmp_path / "records-0.bin")
  assert read.job.tolist() == [0, 1, 7]
  with (tmp_path / "records-0.bin").open("ab") as file:
    file.write(b"half")
  assert FileSink(tmp_path / "records-0.bin").count == 3


def test_a_journal_goes_on_after_its_last_whole_line(tmp_path):
  journal(tmp_path)
  path = tmp_path / "trace-0.csv"
  text = kit.sealed(path.read_text().replace("0.75,", "0.7500,"))  # longer
  path.write_text(text + "3.0,0,2,rece")
  again = FileJournal(path)
  assert again.events() == EVENTS
  again.append(EVENTS[4])
  assert path.read_text() == text + EVENTS[4].format(journal=True) + "\n"


@pytest.mark.parametrize(
  "old, new, message",
  [
    ("\n", "\r\n", "line 1 .*Windows"),
    ("2.0,1,0,1", "nan,1,0,1", "line 8 .*: time must be finite, 0 or more"),
    ("2.0,1,0,1", "inf,1,0,1", "line 8 .*: time must be finite"),
    ("2.0,1,0,1", "-2.0,1,0,1", "line 8 .*: time must be finite"),
    ("2.0,1,0,1", "2.0,99999999999,0,1", "line 8 .*: worker 99999999999 does"),
    ("2.0,1,0,1", "2.0,1,0,-5", "line 8 .*: worker and job must be from 0 to"),
    ("lost", "last", "line 8 .*: action 'last' is none of send"),
  ],
)
def test_a_line_that_is_none_is_named(tmp_path, old, new, message):
  journal(tmp_path)
  path = tmp_path / "trace-0.csv"
  path.write_bytes(kit.sealed(path.read_text().replace(old, new)).encode())
  with pytest.raises(ValueError, match=f"^{path}, {message}"):
    check_journal(path, read_journal(path))


def test_a_digit_that_changed_is_refused_and_the_line_named(tmp_path):
  journal(tmp_path)
  path = tmp_path / "trace-0.csv"
  text = path.read_text()
  path.write_text(text.replace("1.0,0,0,0,receive", "1.5,0,0,0,receive"))
  message = f"{path}, line 6 is no event: .* it was changed: its crc32 is"
  with pytest.raises(ValueError, match=f"{message} .* Put the file back"):
    read_journal(path)


def test_a_record_that_changed_is_refused_and_named(tmp_path):
  sink(tmp_path)
  path = tmp_path / "records-0.bin"
  content = bytearray(path.read_bytes())
  content[RECORD.itemsize + 20] ^= 1
  path.write_bytes(content)
  assert (
    len(read_records(path, 0, 1).job) == len(read_records(path, 2).job) == 1
  )
  for start in (0, 1):
    message = f"{path}, record 1 was changed.* Put the file back"
    with pytest.raises(ValueError, match=message):
      read_records(path, start)


def changed(row, **fields):
  return [
    *EVENTS[:row],
    EVENTS[row]._replace(**fields),
    *EVENTS[row + 1 :],
  ]


@pytest.mark.parametrize(
  "events, message",
  [
    (changed(4, worker=1), r"line 6 .*: that job was not sent to the worker"),
    (changed(4, seq=999), r"line 6 .*: that job was not sent to the worker"),
    (changed(4, job=1), r"line 6 .*: that job was not sent to the worker"),
    (changed(5, seq=0), r"line 7 .*: the worker has begun that number"),
    ([*EVENTS[:5], *EVENTS[4:]], r"line 7 .*: that job was not sent"),
    ([*EVENTS[:4], *EVENTS[3:]], r"line 6 .*: the worker has begun"),
    (EVENTS[:1] + EVENTS[2:], r"line 5 .*: that job was not sent"),
    (changed(4, time=0.25), "line 6 .*: time is before that of the last row"),
    ([*EVENTS, event(2.0, 0, 99, base.ROLLBACK)], "later than this one"),
  ],
)
def test_a_journal_that_no_shard_wrote_is_refused(events, message):
  check_journal("trace-0.csv", EVENTS)
  with pytest.raises(ValueError, match=f"^trace-0.csv.*{message}"):
    check_journal("trace-0.csv", events)


def test_records_are_as_many_as_messages():
  def check(count, rows=(), **kwargs):
    check_records("records-0.bin", count, [*EVENTS, *rows], **kwargs)

  check(1, run_has_ended=True)
  check(0, run_has_ended=False)
  for count, has_ended in ((0, True), (2, True), (2, False)):
    with pytest.raises(ValueError, match=f"records-0.bin has {count} records"):
      check(count, run_has_ended=has_ended)
  # What was seen of messages may be lost with what they had changed.
  back = event(2.0, 0, 2, base.ROLLBACK)
  check(0, [back], run_has_ended=True)
  check(1, [back], run_has_ended=True)
