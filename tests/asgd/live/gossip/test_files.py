"""The files of peers: what is missing or cut is named."""

import pytest

from asgd import gossip, orders
from asgd.gossip import topologies
from asgd.live.gossip import files
from asgd.live.journal import FileJournal, journal_path
from asgd.orders import trace as trace_lib


@pytest.fixture
def run(tmp_path):
  """The journals of three peers on a ring."""
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
    f"{path} is gone or empty, and the run has a result: put it back as the run"
    " wrote it"
  )


def test_a_journal_that_was_cut_is_found_by_the_message_that_lacks(run):
  path = journal_path(run, 2)
  lines = path.read_text().splitlines(keepends=True)
  puts = [i for i, line in enumerate(lines) if "put" in line]
  path.write_text("".join(lines[: puts[-1]]))
  text = refused(run)
  assert text.startswith(f"{run}: the traces of peers do not belong together")
  assert "of peer 2, which that one did not put" in text
  assert "trace-K.csv of one of these two peers was cut" in text
