"""What live cells leave, read again."""

import json
import os

import kit
import pytest

from asgd import base
from asgd.experiment import folder, live_files
from asgd.live.journal import journal_path
from asgd.live.records import FileSink, records_path
from asgd.live.spans import SpanWriter, spans_path
from asgd.orders.trace import checksum


def test_what_was_written_is_read_again(tmp_path):
  place = kit.write_live_cell(tmp_path, kit.JOURNAL)
  writer = SpanWriter(place)
  for span in kit.SPANS[0]:
    writer(0, span)
  read = live_files.read(place)
  assert read.journals == [kit.JOURNAL]
  # The last job was not handed in.
  assert read.spans == {0: kit.SPANS[0][:6]}
  assert len(read.records[0].loss) == 0
  with spans_path(place, 0).open("a") as file:
    file.write("compute,5.0,6")
  assert live_files.read(place).spans == read.spans
  # The next incarnation of a killed worker continues its file.
  writer = SpanWriter(place)
  for span in kit.SPANS[0][:3]:
    writer(0, span)
  spans = live_files.read(place).spans[0]
  assert spans == [*read.spans[0], *kit.SPANS[0][:3]]


@pytest.mark.parametrize(
  "line",
  [
    *("push,1.0,inf,1,1", "push,nan,1.0,1,1", "push,-1e308,1.0,1,1"),
    *("push,1.0,2.0,1", "push,a,2.0,1,1", "", "pull,1.0,2.0,1,1"),
  ],
)
def test_a_line_that_is_no_span_is_named(tmp_path, line):
  place = kit.write_live_cell(tmp_path, kit.JOURNAL)
  path = spans_path(place, 0)
  lines = "fetch,1.0,1.0,0,0", line, "push,1.0,2.0,0,0"
  path.write_text("".join(f"{x},{checksum(x)}\n" for x in lines))
  with pytest.raises(ValueError, match="spans-0.csv, line 2 is no span: '"):
    live_files.read(place)


def test_a_span_that_was_changed_is_named(tmp_path):
  place = kit.write_live_cell(tmp_path, kit.JOURNAL)
  writer = SpanWriter(place)
  for span in kit.SPANS[0]:
    writer(0, span)
  path = spans_path(place, 0)
  first, *rest = path.read_text().splitlines(keepends=True)
  path.write_text("".join([first.replace(",0", ",7", 1), *rest]))
  with pytest.raises(ValueError, match="spans-0.csv, line 1 is no span: '"):
    live_files.read(place)


def write_records(place, count):
  """A file of so many records, and the result of a finished run."""
  FileSink(records_path(place, 0)).append(kit.records(count))
  (place / "result.json").write_text(json.dumps({"messages": count}))


def describe(place, config):
  """Writes cell.json, with this config."""
  content = {"version": folder.VERSION, "engine": "threads", "config": config}
  (place / "cell.json").write_text(json.dumps(content))


def rewrite(place, change):
  path = journal_path(place, 0)
  path.write_text(kit.sealed(change(path.read_text())))


def replaced(old, new):
  return lambda place: rewrite(place, lambda text: text.replace(old, new))


def lines(change):
  return lambda place: rewrite(
    place, lambda text: "".join(change(text.splitlines(True)))
  )


DAMAGE = {
  "records that are cut": (
    lambda place: os.truncate(records_path(place, 0), 150),
    "records-0.bin has 2 records, and the trace beside it 3 messages",
  ),
  "no records": (
    lambda place: records_path(place, 0).unlink(),
    "records-0.bin has 0 records, and the trace beside it 3 messages",
  ),
  "another result": (
    lambda place: (place / "result.json").write_text('{"messages": 2}'),
    "records-0.bin has 3 records, result.json 2 messages",
  ),
  "a trace that is cut": (
    lambda place: rewrite(place, lambda text: text[: len(text) // 3]),
    "records-0.bin has 3 records, and the trace beside it 0 messages",
  ),
  "no time": (replaced("9.0", "nan"), "line 12 .*: time must be finite"),
  "the end of time": (replaced("9.0", "inf"), "line 12 .*: time must be fin"),
  "a job below 0": (
    replaced("1,4,", "1,-5,"), "line 11 .*: worker and job must be from 0"
  ),
  "a worker beyond all": (
    replaced("\n4.0,1,", "\n4.0,99999999999,"),
    "line 10 .*: worker 99999999999 does not fit",
  ),
  "a row that is gone": (
    lines(lambda rows: rows[:6] + rows[7:]), "line 7 .*: that job was not sent"
  ),
  "a row that is there twice": (
    lines(lambda rows: rows[:6] + rows[5:]), "line 7 .*: that job was not sent"
  ),
  "another worker": (
    replaced("\n3.0,0,", "\n3.0,1,"), "line 8 .*: that job was not sent"
  ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line_that_names_the_file(tmp_path, name):
  place = kit.write_live_cell(tmp_path, kit.JOURNAL)
  write_records(place, 3)
  assert len(live_files.read(place).records[0].loss) == 3
  change, message = DAMAGE[name]
  if message.startswith("line"):
    message = f"trace-0.csv, {message}"
  change(place)
  with pytest.raises(ValueError, match=message) as error:
    live_files.read(place)
  assert "\n" not in str(error.value)


def test_jobs_end_with_their_message_or_with_their_ticket():
  jobs = list(live_files.ended_jobs(kit.JOURNAL))
  assert all(start.key == end.key for start, end in jobs)
  assert [(*e.key, e.job, s.time, e.time, e.action) for s, e in jobs] == [
    (0, 0, 0, 1.0, 2.0, base.RECEIVE),
    (0, 1, 2, 2.0, 3.0, base.RECEIVE),
    (1, 0, 1, 1.5, 4.0, base.RECEIVE),
    (1, 1, 4, 4.0, 9.0, base.LOST),
  ]


def finished_without_rows(place):
  (place / "trace-0.csv").write_text("")
  (place / "result.json").write_text("{}")


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda place: None, None),
    (lambda place: (place / "trace-0.csv").unlink(),
     "holds no event: the run has not begun"),
    (finished_without_rows, "missing or empty, but the run has a result: put"),
    (lambda place: (place / "cell.json").unlink(),
     "is not the folder of a cell: it should be WORKDIR/cells/NAME"),
    (lambda place: (place / "cell.json").write_text("{}"),
     "cell.json is damaged or empty: restore it as the run wrote it"),
    (lambda place: (place / "cell.json").write_text(""),
     "cell.json is damaged or empty: restore it as the run wrote it"),
    (
      lambda place: (place / "cell.json").write_text(
        json.dumps({"version": folder.VERSION, "engine": "simulate"})
      ),
      "was made by engine 'simulate': only live runs",
    ),
    (
      lambda place: (place / "cell.json").write_text(
        json.dumps(
          {"version": folder.VERSION, "config": {"server": {"shards": 1}}}
        )
      ),
      "a-n2-s0/cell.json is not what a run wrote: restore it",
    ),
    (lambda place: describe(place, {}), "cell.json is not what a run wrote"),
    (lambda place: describe(place, {"server": []}), "is not what a run wrote"),
    (lambda place: describe(place, {"server": {"shards": 0}}),
     "is not what a run wrote"),
  ],
)
def test_another_folder_is_refused(tmp_path, change, message):
  place = kit.write_live_cell(tmp_path, kit.JOURNAL)
  change(place)
  if message is None:
    live_files.read(place)
    return
  with pytest.raises(ValueError, match=message):
    live_files.read(place)
