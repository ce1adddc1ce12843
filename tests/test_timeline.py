"""What live cells leave, read again, and drawn as a timeline."""

import json
import os

import numpy as np
import pytest

from asgd import base
from asgd.runtimes import files
from asgd.runtimes.protocol import Entry
from asgd.runtimes.worker_loop import Span
from launch import live_cell, timeline

HELD = {"config": {"server": {"shards": 1}}, "runtime": "threads"}


def entry(time, worker, job, action, seq=-1, version=-1):
  return Entry(time, worker, job, action, seq, version)


# Two workers, three messages; the second one is then taken for dead.
JOURNAL = [
  entry(1.0, 0, 0, base.JOIN),
  entry(1.0, 0, 0, base.SEND, 0, 0),
  entry(1.5, 1, 0, base.JOIN),
  entry(1.5, 1, 1, base.SEND, 0, 0),
  entry(2.0, 0, 0, base.RECEIVE, 0),
  entry(2.0, 0, 2, base.SEND, 1, 1),
  entry(3.0, 0, 2, base.RECEIVE, 1),
  entry(3.0, 0, 3, base.SEND, 2, 2),
  entry(4.0, 1, 1, base.RECEIVE, 0),
  entry(4.0, 1, 4, base.SEND, 1, 3),
  entry(9.0, 1, 4, base.LOST, 1),
  entry(9.0, 1, 0, base.LEAVE),
]
SPANS = {
  0: [
    Span("fetch", 1.25, 1.25, 0, 0),
    Span("compute", 1.25, 1.75, 0, 0),
    Span("push", 1.75, 1.875, 0, 0),
    Span("fetch", 2.125, 2.25, 1, 2),
    Span("compute", 2.25, 2.75, 1, 2),
    Span("push", 2.75, 3.0, 1, 2),
    Span("fetch", 5.0, 5.0, 2, 3),  # it heard of it late
  ],
}


def records(*rows):
  """(update, worker, job, staleness) of each message."""
  update, worker, job, staleness = (
    np.array(column, np.int32) for column in zip(*rows, strict=True)
  )
  return base.Records(update, *(None,), worker, job, staleness, *[None] * 5)


RECORDS = records((1, 0, 0, 0), (2, 0, 2, 0), (3, 1, 1, 2))


def cell(journal=JOURNAL, spans=SPANS, seen=RECORDS):
  return live_cell.Cell(HELD, [journal], spans, [seen])


def names(events):
  """Tracks and groups by their numbers."""
  return {
    (event["pid"], event["tid"]): event["args"]["name"]
    for event in events
    if event["name"] == "thread_name"
  }


def track(events, name):
  """(name, start, end) of the pieces of a track."""
  where = {held: key for key, held in names(events).items()}[name]
  return [
    (event["name"], event["ts"], event["ts"] + event["dur"])
    for event in events
    if event["ph"] == "X" and (event["pid"], event["tid"]) == where
  ]


def assert_no_overlap(pieces):
  for (_, _, end), (_, start, _) in zip(pieces, pieces[1:], strict=False):
    assert start >= end


def test_a_worker_has_its_spans_in_microseconds():
  pieces = track(timeline.events(cell()), "worker 0")
  assert pieces == [
    ("fetch", 1250000, 1250000),
    ("compute", 1250000, 1750000),
    ("push", 1750000, 1875000),
    ("fetch", 2125000, 2250000),
    ("compute", 2250000, 2750000),
    ("push", 2750000, 3000000),
    ("fetch", 5000000, 5000000),
  ]
  assert_no_overlap(pieces)


def test_without_spans_a_job_is_one_piece():
  events = timeline.events(cell())
  assert track(events, "worker 1") == [
    ("job", 1500000, 4000000),
    ("job, lost", 4000000, 9000000),
  ]
  events = timeline.events(cell(spans={}))
  assert track(events, "worker 0") == [
    ("job", 1000000, 2000000),
    ("job", 2000000, 3000000),
  ]
  # The shard has none, then.
  assert all(e["pid"] == 1 for e in events if e["ph"] == "X")


def test_a_shard_serves_until_it_is_heard_of_or_until_the_next_message():
  assert live_cell.served(JOURNAL, SPANS) == [
    (1.0, 1.25),
    (2.0, 2.125),
    (3.0, 4.0),  # heard of at 5, but the next message came at 4
  ]
  pieces = track(timeline.events(cell()), "shard 0")
  assert pieces[1:] == [
    ("serve", 2000000, 2125000),
    ("serve", 3000000, 4000000),
  ]
  assert live_cell.served(JOURNAL, {}) == []


def test_every_row_is_a_moment():
  events = timeline.events(cell())
  tracks = names(events)
  found = [
    (event["name"], event["ts"] / 1e6, tracks[event["pid"], event["tid"]])
    for event in events
    if event["ph"] == "i"
  ]
  assert found[:5] == [
    ("join", 1, "worker 0"),
    ("send", 1, "shard 0"),
    ("join", 1.5, "worker 1"),
    ("send", 1.5, "shard 0"),
    ("receive", 2, "shard 0"),
  ]
  assert found[-2:] == [("lost", 9, "worker 1"), ("leave", 9, "worker 1")]
  assert len(found) == len(JOURNAL)
  sends = [e["args"] for e in events if e["name"] == "send"]
  assert sends[2] == {"worker": 0, "job": 2, "seq": 1, "version": 1}


def test_counters_are_version_and_staleness():
  events = timeline.events(cell())
  found = [
    (event["ts"], event["args"]) for event in events if event["ph"] == "C"
  ]
  assert found == [
    (2000000, {"version": 1}),
    (2000000, {"staleness": 0}),
    (3000000, {"version": 2}),
    (3000000, {"staleness": 0}),
    (4000000, {"version": 3}),
    (4000000, {"staleness": 2}),
  ]


def test_a_rejection_and_a_rollback_are_moments():
  journal = [
    entry(1.0, 0, 0, base.JOIN),
    entry(1.0, 0, 0, base.SEND, 0, 0),
    entry(2.0, 0, 0, base.REJECT, 0),
    entry(2.0, 0, 0, base.LEAVE),
    entry(3.0, 0, 1, base.ROLLBACK),
  ]
  events = timeline.events(cell(journal, {}))
  moments = {e["name"]: e for e in events if e["ph"] == "i"}
  assert moments["rollback"]["s"] == "g"  # a line through all tracks
  assert moments["rollback"]["args"] == {"row": 1}
  assert names(events)[1, moments["reject"]["tid"]] == "worker 0"
  assert track(events, "worker 0") == [("job, rejected", 1000000, 2000000)]


def test_jobs_that_overlap_get_a_track_each():
  spans = {
    0: [
      Span("fetch", 1.0, 1.0, 0, 0),
      Span("fetch", 1.0, 2.0, 1, 1),
      Span("compute", 1.0, 3.0, 0, 0),
      Span("push", 3.0, 3.5, 0, 0),
      Span("compute", 2.0, 4.0, 1, 1),
      Span("push", 4.0, 4.5, 1, 1),
      Span("fetch", 3.5, 3.5, 2, 2),
      Span("compute", 3.5, 5.0, 2, 2),
    ]
  }
  events = timeline.events(cell(spans=spans))
  first = track(events, "worker 0")
  second = track(events, "worker 0, ticket 2")
  assert [(name, start) for name, start, _ in first] == [
    ("fetch", 1000000),
    ("compute", 1000000),
    ("push", 3000000),
    ("fetch", 3500000),
    ("compute", 3500000),
  ]
  assert [name for name, _, _ in second] == ["fetch", "compute", "push"]
  assert_no_overlap(first)
  assert_no_overlap(second)


def test_two_shards_have_a_track_and_counters_each():
  follower = [row for row in JOURNAL if row.action != base.LEAVE]
  both = live_cell.Cell(HELD, [JOURNAL, follower], SPANS, [RECORDS] * 2)
  events = timeline.events(both)
  assert {"shard 0", "shard 1"} <= set(names(events).values())
  counters = {event["name"] for event in events if event["ph"] == "C"}
  assert counters == {
    *("version (shard 0)", "staleness (shard 0)"),
    *("version (shard 1)", "staleness (shard 1)"),
  }
  joins = [event for event in events if event["name"] == "join"]
  assert len(joins) == 2  # the lead's


def test_every_event_is_one_that_viewers_know():
  events = timeline.events(cell())
  assert json.loads(json.dumps(events)) == events
  times = []
  for event in events:
    assert set(event) >= {"name", "ph", "pid", "tid"}
    assert type(event["pid"]) is type(event["tid"]) is int
    if event["ph"] == "M":
      continue
    times.append(event["ts"])
    assert type(event["ts"]) is int
    assert event["ph"] in "XiC"
    assert (event["ph"] == "X") == ("dur" in event)
    assert (event["ph"] == "i") == ("s" in event)
  assert times == sorted(times)
  tracks = names(events)
  assert len({tid for _, tid in tracks}) == len(tracks)
  used = {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"}
  assert used == set(tracks)


def write(folder, journal, held=HELD):
  """A live run's files."""
  place = folder / "cells" / "a-n2-s0"
  place.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(held))
  file = files.FileJournal(files.journal_path(place, 0))
  for row in journal:
    file.append(row)
  return place


def test_what_was_written_is_read_again(tmp_path):
  place = write(tmp_path, JOURNAL)
  writer = live_cell.SpanWriter(place)
  for span in SPANS[0]:
    writer(0, span)
  read = live_cell.read(place)
  assert read.journals == [JOURNAL]
  # The last job was not handed in.
  assert read.spans == {0: SPANS[0][:6]}
  assert len(read.records[0].loss) == 0
  with live_cell.spans_path(place, 0).open("a") as file:
    file.write("compute,5.0,6")
  assert live_cell.read(place).spans == read.spans


def write_records(place, count):
  """A file of so many records, and the result of a finished run."""
  rows = np.zeros(count, files.RECORD)
  files.records_path(place, 0).write_bytes(rows.tobytes())
  (place / "result.json").write_text(json.dumps({"messages": count}))


def rewrite(place, change):
  path = files.journal_path(place, 0)
  path.write_text(change(path.read_text()))


def without(text, number):
  lines = text.splitlines(True)
  return "".join(lines[:number] + lines[number + 1 :])


def twice(text, number):
  lines = text.splitlines(True)
  return "".join(lines[: number + 1] + lines[number:])


DAMAGE = {
  "records that are cut": (
    lambda place: os.truncate(files.records_path(place, 0), 100),
    "records-0.bin has 2 records, and the trace beside it 3 messages",
  ),
  "no records": (
    lambda place: files.records_path(place, 0).unlink(),
    "records-0.bin has 0 records, and the trace beside it 3 messages",
  ),
  "another result": (
    lambda place: (place / "result.json").write_text('{"messages": 2}'),
    "records-0.bin has 3 records, result.json 2 messages",
  ),
  "a trace that is cut": (
    lambda place: rewrite(place, lambda text: text[: len(text) // 2]),
    "records-0.bin has 3 records, and the trace beside it 0 messages",
  ),
  "no time": (
    lambda place: rewrite(place, lambda text: text.replace("9.0", "nan")),
    "trace-0.csv, line 12: the time nan is no number of seconds",
  ),
  "the end of time": (
    lambda place: rewrite(place, lambda text: text.replace("9.0", "inf")),
    "trace-0.csv, line 12: the time inf",
  ),
  "a job below 0": (
    lambda place: rewrite(place, lambda text: text.replace("1,4,", "1,-5,")),
    "trace-0.csv, line 11: the job -5",
  ),
  "a worker beyond all": (
    lambda place: rewrite(
      place, lambda text: text.replace(",1,4,", ",99999999999,4,")
    ),
    "trace-0.csv, line 11: the worker 99999999999",
  ),
  "a row that is gone": (
    lambda place: rewrite(place, lambda text: without(text, 6)),
    "trace-0.csv, line 7 .* was not sent that job",
  ),
  "a row that is there twice": (
    lambda place: rewrite(place, lambda text: twice(text, 5)),
    "trace-0.csv, line 7 .* was not sent that job",
  ),
  "another worker": (
    lambda place: rewrite(
      place, lambda text: text.replace("3.0,0,2,rec", "3.0,1,2,rec")
    ),
    "trace-0.csv, line 8 .* was not sent that job",
  ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line_that_names_the_file(tmp_path, name):
  place = write(tmp_path, JOURNAL)
  write_records(place, 3)
  assert len(live_cell.read(place).records[0].loss) == 3
  change, message = DAMAGE[name]
  change(place)
  with pytest.raises(ValueError, match=message) as error:
    live_cell.read(place)
  assert "\n" not in str(error.value)


def test_results_of_one_run_are_as_good_as_the_run(tmp_path, capsys):
  place = write(tmp_path, JOURNAL)
  timeline.main(str(tmp_path))
  assert (place / "timeline.json").exists()
  assert live_cell.read(tmp_path).journals == [JOURNAL]
  (tmp_path / "cells" / "b-n2-s0").mkdir()
  with pytest.raises(ValueError, match="has 2 runs: name one .*a-n2-s0, b-n2"):
    timeline.main(str(tmp_path))


@pytest.mark.parametrize("out", ["missing/timeline.json", "cells"])
def test_a_place_where_no_file_can_be_is_refused(tmp_path, out):
  place = write(tmp_path, JOURNAL)
  with pytest.raises(ValueError, match=f"--out=.*{out} is "):
    timeline.main(str(place), out=str(tmp_path / out))
  assert not list(tmp_path.rglob("*.tmp"))


def test_jobs_end_with_their_message_or_with_their_ticket():
  assert live_cell.jobs(JOURNAL) == [
    (0, 0, 0, 1.0, 2.0, base.RECEIVE),
    (0, 1, 2, 2.0, 3.0, base.RECEIVE),
    (1, 0, 1, 1.5, 4.0, base.RECEIVE),
    (1, 1, 4, 4.0, 9.0, base.LOST),
  ]


def test_the_command_writes_json_and_says_where_to_open_it(tmp_path, capsys):
  place = write(tmp_path, JOURNAL)
  timeline.main(str(place))
  said = capsys.readouterr().out
  assert "https://ui.perfetto.dev" in said
  assert "--config.live.spans=True" in said  # there were none
  content = json.loads((place / "timeline.json").read_text())
  read = live_cell.read(place)
  assert content["traceEvents"] == timeline.events(read)
  timeline.main(str(place), out=str(tmp_path / "other.json"))
  assert (tmp_path / "other.json").exists()


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda place: None, None),
    (
      lambda place: (place / "trace-0.csv").unlink(),
      "holds no event: the run has not begun",
    ),
    (
      lambda place: (place.parent.parent / "config.json").unlink(),
      "is no folder of a live run: it should be RESULTS/cells/NAME",
    ),
    (
      lambda place: (place.parent.parent / "config.json").write_text("{}"),
      "is no folder of a live run",
    ),
  ],
)
def test_another_folder_is_refused(tmp_path, change, message):
  place = write(tmp_path, JOURNAL)
  change(place)
  if message is None:
    live_cell.read(place)
    return
  with pytest.raises(ValueError, match=message):
    live_cell.read(place)


def test_a_folder_must_be_named():
  with pytest.raises(ValueError, match="which run"):
    timeline.main()
