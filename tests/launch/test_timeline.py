"""A live run, drawn as a timeline."""

import json

import kit
import numpy as np
import pytest

from asgd import base
from asgd.experiment import live_files
from asgd.live.spans import Span
from launch import timeline


def records(*rows):
  """(update, worker, job, staleness) of each message."""
  update, worker, job, staleness = (
    np.array(column, np.int32)
    for column in (zip(*rows, strict=True) if rows else [()] * 4)
  )
  return kit.records(
    update=update, worker=worker, job=job, staleness=staleness
  )


RECORDS = records((1, 0, 0, 0), (2, 0, 2, 0), (3, 1, 1, 2))


def cell(journal=kit.JOURNAL, spans=kit.SPANS, seen=RECORDS):
  return live_files.LiveFiles({}, [journal], spans, [seen], journal)


def track(events, name):
  """(name, start, end) of the pieces of a track."""
  where = {held: key for key, held in kit.track_names(events).items()}[name]
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
  assert live_files.busy_periods(kit.JOURNAL, kit.SPANS) == [
    (1.0, 1.25),
    (2.0, 2.125),
    (3.0, 4.0),  # heard of at 5, but the next message came at 4
  ]
  pieces = track(timeline.events(cell()), "shard 0")
  assert pieces[1:] == [
    ("serve", 2000000, 2125000),
    ("serve", 3000000, 4000000),
  ]
  assert live_files.busy_periods(kit.JOURNAL, {}) == []


def test_every_row_is_a_moment():
  events = timeline.events(cell())
  tracks = kit.track_names(events)
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
  assert len(found) == len(kit.JOURNAL)
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
    kit.row(1.0, 0, 0, base.JOIN),
    kit.row(1.0, 0, 0, base.SEND, 0, 0),
    kit.row(2.0, 0, 0, base.REJECT, 0),
    kit.row(2.0, 0, 0, base.LEAVE),
    kit.row(3.0, 0, 1, base.ROLLBACK),
  ]
  events = timeline.events(cell(journal, {}))
  moments = {e["name"]: e for e in events if e["ph"] == "i"}
  assert moments["rollback"]["s"] == "g"  # a line through all tracks
  assert moments["rollback"]["args"] == {"row": 1}
  assert kit.track_names(events)[1, moments["reject"]["tid"]] == "worker 0"
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
  follower = [row for row in kit.JOURNAL if row.action != base.LEAVE]
  both = live_files.LiveFiles(
    {}, [kit.JOURNAL, follower], kit.SPANS, [RECORDS] * 2, kit.JOURNAL
  )
  events = timeline.events(both)
  assert {"shard 0", "shard 1"} <= set(kit.track_names(events).values())
  counters = {event["name"] for event in events if event["ph"] == "C"}
  assert counters == {
    *("version (shard 0)", "staleness (shard 0)"),
    *("version (shard 1)", "staleness (shard 1)"),
  }
  joins = [event for event in events if event["name"] == "join"]
  assert len(joins) == 2  # the lead's


def test_jobs_of_tables_are_those_that_workers_wrote_down():
  # A request of a shard has a number of its own, and is no job.
  order = [kit.row(1.0, 0, 0, base.SEND, 1, 0)]
  of_tables = live_files.LiveFiles({}, [order], {}, [records()], kit.JOURNAL)
  events = timeline.events(of_tables)
  assert track(events, "worker 0") == [
    ("job", 1000000, 2000000),
    ("job", 2000000, 3000000),
  ]
  names = set(kit.track_names(events).values())
  assert names == {"worker 0", "worker 1", "shard 0"}
  clock = [("compute", 0), ("compute", 1), ("push", 0), ("push", 1)]
  spans = [Span(x, i, i + 1, seq, seq) for i, (x, seq) in enumerate(clock)]
  events = timeline.events(of_tables._replace(spans={0: spans}))
  assert [name for name, _, _ in track(events, "worker 0")] == [
    *("compute", "compute", "push", "push")
  ]
  assert track(events, "shard 0") == []


def test_peers_have_spans_and_no_shards():
  spans = [Span("fetch", 0, 1, 0, 0), Span("push", 1, 2, 0, 0)]
  of_peers = live_files.LiveFiles({}, [], {0: spans}, [], kit.JOURNAL)
  events = timeline.events(of_peers)
  assert [name for name, *_ in track(events, "worker 0")] == ["fetch", "push"]
  assert set(kit.track_names(events).values()) == {"worker 0", "worker 1"}


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
  tracks = kit.track_names(events)
  assert len({tid for _, tid in tracks}) == len(tracks)
  used = {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"}
  assert used == set(tracks)


@pytest.mark.parametrize("out", ["missing/timeline.json", "cells"])
def test_a_place_where_no_file_can_be_is_refused(tmp_path, out):
  place = kit.write_live_cell(tmp_path, kit.JOURNAL)
  with pytest.raises(ValueError, match=f"--out=.*{out} is "):
    timeline.main(str(place), out=str(tmp_path / out))
  assert not list(tmp_path.rglob("*.tmp"))


def test_the_command_writes_json_and_says_where_to_open_it(tmp_path, capsys):
  place = kit.write_live_cell(tmp_path, kit.JOURNAL)
  timeline.main(str(tmp_path))  # which has one cell
  said = capsys.readouterr().out
  assert "https://ui.perfetto.dev" in said
  assert "--config.live.spans=True" in said  # there were none
  content = json.loads((place / "timeline.json").read_text())
  read = live_files.read(place)
  assert content["traceEvents"] == timeline.events(read)
  timeline.main(str(place), out=str(tmp_path / "other.json"))
  assert (tmp_path / "other.json").exists()


def test_a_folder_must_be_named():
  with pytest.raises(ValueError, match="no run is named"):
    timeline.main()
