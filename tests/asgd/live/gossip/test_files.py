"""The files of peers: errors name a file that is missing or was cut."""

import pytest

from asgd import base, gossip, orders
from asgd.gossip import topologies
from asgd.live.gossip import files
from asgd.live.journal import FileJournal, journal_path, read_journal
from asgd.orders import trace as trace_lib
from asgd.orders.trace import Event


@pytest.fixture
def run(tmp_path):
  """Returns the journals of three peers on a ring."""
  trace = gossip.orders.rounds(
    orders.durations.constant(), topologies.ring(3), messages=9
  )
  for event in trace_lib.events(trace):
    FileJournal(journal_path(tmp_path, event.worker)).append(event)
  return tmp_path


def refused(run):
  with pytest.raises(ValueError) as error:
    files.read_trace(run, 3)
  text = str(error.value)
  assert "\n" not in text and len(text) < 600
  return text


def test_a_journal_that_is_gone_is_named(run):
  assert len(files.read_trace(run, 3).time) > 9
  path = journal_path(run, 2)
  path.rename(run / "kept")
  assert refused(run) == (
    f"{path} holds no event: the run has not begun (yet)"
  )
  (run / "result.json").touch()
  assert refused(run) == (
    f"{path} is missing or empty, but the run has a result: put the file back"
    " as the run wrote it"
  )


def test_a_journal_that_was_cut_is_found_by_the_message_that_lacks(run):
  path = journal_path(run, 2)
  lines = path.read_text().splitlines(keepends=True)
  puts = [i for i, line in enumerate(lines) if "put" in line]
  path.write_text("".join(lines[: puts[-1]]))
  text = refused(run)
  assert text.startswith(f"{run}: the traces of peers do not belong together")
  assert "of peer 2, which peer 2 did not put" in text
  assert "trace-K.csv of one of these two peers was cut" in text


def journal(folder, *rows):
  out = FileJournal(journal_path(folder, 0))
  for time, (action, seq, job) in enumerate(rows):
    out.append(Event(float(time), 0, seq, job, action))
  return out


def test_a_refused_job_is_for_others_once_its_peer_has_left(tmp_path):
  """Otherwise a counter that starts in between would assign the number twice:
  once from the journal, and once when the driver releases it."""
  out = journal(
    tmp_path,
    *((base.SEND, 0, 4), (base.RECEIVE, 0, 4)),
    *((base.SEND, 1, 7), (base.REJECT, 1, 7)),
  )
  assert files.kept_job_numbers(out.events()) == [4, 7]
  assert files.write_leave(tmp_path, 0, 0, now=9.0) == (2, [7])
  events = read_journal(journal_path(tmp_path, 0))
  assert events[-1].action == base.LEAVE  # it was not lost as well
  assert len(events) == 5
  assert files.kept_job_numbers(events) == [4]


def test_files_are_cut_back_to_a_checkpoint_or_refused(tmp_path):
  out = journal(tmp_path, (base.SEND, 0, 4), (base.RECEIVE, 0, 4))
  images = {0: (None, {"rows": 1, "records": 0})}
  assert files.checkpoint_counts(tmp_path, 2, images) == [(1, 0), (0, 0)]
  assert files.cut_back(tmp_path, [(1, 0), (0, 0)]) == 1
  assert read_journal(journal_path(tmp_path, 0)) == out.events()[:1]
  with pytest.raises(ValueError, match="has 1 rows where the run resumes from"):
    files.cut_back(tmp_path, [(2, 0)])
