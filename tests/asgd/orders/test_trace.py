"""The trace: printed, cut off and read again, checked, and followed by the one
ledger of its actions."""

import io

import kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import base, orders
from asgd.orders import durations
from asgd.orders import trace as trace_lib
from asgd.orders.trace import Event, Ledger, TraceError

quick = settings(deadline=None, derandomize=True, max_examples=50)


# Checking.


def test_check_counts_the_workers():
  assert orders.check(kit.trace("0,0,0,send")) == 1
  assert orders.check(kit.trace("0,4,0,send", "1,4,0,receive")) == 5
  empty = base.Trace(*(column[:0] for column in kit.trace("0,0,0,send")))
  assert orders.check(empty) == 0


TIME = "time must be finite, 0 or more and at most 1e+15"


@pytest.mark.parametrize(
  ("row", "why"),
  [
    ("1.0,-1,2,send", "worker and job must be from 0 to 2147483647"),
    ("1.0,0,-2,receive", "worker and job must be from 0 to 2147483647"),
    ("0.5,0,0,receive", "time is before that of the last row, 1.0"),
    ("nan,0,0,receive", TIME),
    ("inf,0,0,receive", TIME),
    ("1e16,0,0,receive", TIME),
    ("-1.0,0,0,receive", TIME),
    ("1.0,0,2,send", "the worker holds a ticket already"),
    ("1.0,1,0,2,send", "the worker has begun that number (seq) before"),
    ("1.0,0,0,2,receive", "that job was not sent to the worker"),
    ("1.0,1,1,receive", "that job was not sent to the worker"),
    ("1.0,0,1,receive", "that job was not sent to the worker"),
    ("1.0,7,0,receive", "that job was not sent to the worker"),
  ],
)
def test_check_names_the_first_wrong_row_and_why(row, why):
  # Worker 1 has handed in its only ticket; worker 0 still holds job 0.
  good = ["0.0,0,0,send", "0.0,1,1,send", "1.0,1,1,receive"]
  assert orders.check(kit.trace(*good)) == 2
  trace = kit.trace(*good, row, "0.0,0,0,send")
  with pytest.raises(ValueError) as error:
    orders.check(trace)
  line = list(trace_lib.events(trace))[3].format()
  assert str(error.value) == f"trace row 3 ({line}): {why}"
  with pytest.raises(TraceError) as error:
    orders.check(trace, path="trace.csv")
  assert str(error.value) == f"trace.csv, line 5 ({line}): {why}"


def test_check_names_an_unknown_action():
  trace = kit.trace("0.0,0,0,send", "1.0,0,0,receive")
  trace.action[1] = 99
  words = r"trace row 1 \(1.0,0,0,0,99\): action must be one of send, receive"
  with pytest.raises(ValueError, match=words):
    orders.check(trace)


# Printing and reading.

WHOLE = st.integers(0, 2**31 - 1)
REAL = st.floats(allow_nan=False)
EVENTS = st.builds(
  Event,
  *(REAL, WHOLE, WHOLE, WHOLE, st.sampled_from(range(len(base.ACTIONS)))),
  *(WHOLE, WHOLE, WHOLE, REAL, st.lists(REAL, max_size=3).map(tuple)),
)


@quick
@given(st.lists(EVENTS, min_size=1, max_size=10))
def test_dump_and_load_keep_every_bit(events):
  trace = trace_lib.from_events(events)
  again = orders.load(orders.dump(trace).splitlines(keepends=True))
  kit.same(again, trace)
  for column, other in zip(trace, again, strict=True):
    assert other.tobytes() == column.tobytes()
  five = [event[:5] for event in events]
  assert [event[:5] for event in trace_lib.events(trace)] == five


@quick
@given(st.lists(EVENTS, min_size=1, max_size=10))
def test_a_journal_is_a_trace_with_more_columns(events):
  lines = [f"{event.format(journal=True)}\n" for event in events]
  lines.insert(0, f"{trace_lib.JOURNAL_HEADER}\n")
  assert trace_lib.read(lines) == events
  kit.same(orders.load(lines), trace_lib.from_events(events))
  assert trace_lib.read(lines[:1]) == trace_lib.read([]) == []


def test_load_reads_a_file(tmp_path):
  trace = orders.asynchronous(durations.homogeneous(), workers=3, messages=30)
  path = tmp_path / "trace.csv"
  path.write_text(orders.dump(trace))
  with path.open() as file:
    kit.same(orders.load(file), trace)


def test_what_was_written_before_a_cut_is_kept():
  lines = kit.TRACE.splitlines(keepends=True)
  for cut in range(len(kit.TRACE) + 1):
    text = kit.TRACE[:cut]
    whole = text.count("\n")
    if whole < 2:
      with pytest.raises(ValueError, match="the trace holds no event"):
        orders.load(io.StringIO(text))
    else:
      kept = orders.load(io.StringIO(text))
      assert orders.dump(kept) == "".join(lines[:whole])


@pytest.mark.parametrize(
  ("line", "why"),
  [
    ("soon,0,0,2,send", "time 'soon' is no number"),
    ("1.0,0.5,0,2,send", "worker '0.5' is no whole number"),
    ("1.0,0,one,2,send", "seq 'one' is no whole number"),
    ("1.0,0,0,two,send", "job 'two' is no whole number"),
    ("1.0,0,0,2,sent", "action 'sent' is none of send, receive"),
    ("1.0,0,0,2", "it has 4 values, where a trace has 5 and a journal 11"),
    ("1.0,0,0,2,send,3", "it has 6 values"),
    ("1.0,0,0,99999999999,send", "job 99999999999 does not fit into 32 bits"),
    ("", "it has 1 values"),
    ("1,0,0,0,receive,1,2,3,x,,e4adde5d", "loss 'x' is no number"),
    ("1,0,0,0,receive,1,2,3,0,1;x,03bfd9c8", "totals 'x' is no number"),
    ("1,0,0,0,receive,1,2,4,0,,dc0d1b50", "it was changed: its crc32 is"),
  ],
)
def test_load_names_a_line_that_is_no_event(line, why):
  lines = [orders.HEADER, "0.0,0,0,0,send", "1.0,0,0,0,receive", line]
  message = rf"^line 4 is no event: '{line}\\n': {why}"
  with pytest.raises(ValueError, match=message):
    orders.load([f"{line}\n" for line in lines])


def test_load_names_a_first_line_that_is_no_header():
  words = "^line 1 is '0.0,0,0,0,send'; a trace has "
  words += "'time,worker,seq,job,action'$"
  with pytest.raises(ValueError, match=words):
    orders.load(["0.0,0,0,0,send\n"])
  with pytest.raises(ValueError, match="line 1 ends in CRLF, as on Windows"):
    orders.load([f"{orders.HEADER}\r\n"])


# Checking and printing who comes and goes.


GOOD = (
  "0.0,0,0,join",
  "0.0,1,0,join",
  "0.0,0,0,send",
  "0.0,1,1,send",
  "1.0,1,1,receive",
  "1.0,1,2,keep",
  "2.0,1,2,lost",
  "2.0,1,0,leave",
  "3.0,1,1,join",
  "3.0,1,2,send",
  "4.0,1,2,reject",
  "4.0,1,1,leave",
)


def test_check_accepts_all_actions():
  assert orders.check(kit.trace(*GOOD)) == 2
  assert orders.check(kit.trace(*GOOD, "5.0,0,6,rollback")) == 2
  assert orders.check(kit.trace(*GOOD, "5.0,0,12,rollback")) == 2


@pytest.mark.parametrize(
  ("row", "why"),
  [
    ("5.0,1,3,send", "the worker has left and did not join again"),
    ("5.0,1,3,keep", "the worker has left and did not join again"),
    ("5.0,0,3,keep", "the worker holds a ticket already"),
    ("5.0,2,3,keep", "the worker was sent no ticket to keep"),
    ("5.0,1,2,lost", "that job was not sent to the worker"),
    ("5.0,0,3,reject", "that job was not sent to the worker"),
    ("5.0,0,1,leave", "the worker still holds a ticket"),
    ("5.0,0,1,join", "the worker still holds a ticket"),
    ("5.0,0,13,rollback", "that row is later than this one"),
  ],
)
def test_check_names_what_is_wrong_with_who_comes_and_goes(row, why):
  trace = kit.trace(*GOOD, row)
  with pytest.raises(TraceError) as error:
    orders.check(trace)
  line = list(trace_lib.events(trace))[12].format()
  assert str(error.value) == f"trace row 12 ({line}): {why}"
  assert (error.value.row, error.value.why) == (12, why)


def test_a_new_holder_has_no_ticket_to_keep():
  rows = *GOOD, "5.0,1,2,join", "5.0,1,2,keep"
  with pytest.raises(ValueError, match="row 13 .* sent no ticket to keep"):
    orders.check(kit.trace(*rows))


def test_jobs_end_in_their_order():
  rows = "0.0,0,0,send", "0.0,0,1,send", "1.0,0,1,receive"
  with pytest.raises(ValueError, match="row 2 .* jobs end in their order"):
    orders.check(kit.trace(*rows), depth=2)
  # After one of them was lost, the other is too.
  rows = "0.0,0,0,send", "0.0,0,1,send", "1.0,0,1,lost"
  assert orders.check(kit.trace(*rows, "1.0,0,0,lost"), depth=2) == 1
  with pytest.raises(ValueError, match="row 3 .* jobs end in their order"):
    orders.check(kit.trace(*rows, "1.0,0,0,receive"), depth=2)


def test_actions_have_names():
  named = (base.SEND, base.RECEIVE, base.KEEP, base.LOST)
  named += (base.REJECT, base.JOIN, base.LEAVE, base.ROLLBACK)
  assert [base.ACTIONS[code] for code in named] == [
    *("send", "receive", "keep", "lost", "reject", "join", "leave"),
    "rollback",
  ]
  rows = "0.0,0,-1,0,join", "0.0,0,0,0,send", "1.0,0,-1,0,rollback"
  text = orders.dump(kit.trace("0.0,0,0,join", rows[1], "1.0,0,0,rollback"))
  assert text.splitlines()[1:] == list(rows)


def test_staleness_on_a_kept_ticket_is_of_the_messages_of_others():
  trace = kit.trace(
    *("0.0,0,0,send", "0.0,1,1,send", "1.0,1,1,receive"),
    *("1.0,1,2,keep", "2.0,0,0,receive", "3.0,1,2,receive"),
  )
  assert orders.staleness(trace).tolist() == [0, 1, 1]


# The ledger.


def test_a_ledger_returns_the_ticket_that_a_row_opens_or_closes():
  ledger = Ledger()
  events = list(trace_lib.events(kit.trace(*GOOD)))
  tickets = [ledger.apply(event) for event in events]
  starts = [event for event in events if event.action in trace_lib.STARTS]
  opened = {(event.worker, event.seq): event for event in starts}
  for event, ticket in zip(events, tickets, strict=True):
    if event.action in (base.JOIN, base.LEAVE):
      assert ticket is None
    elif event.action in trace_lib.ENDS:
      assert ticket is opened[event.worker, event.seq]
    else:  # the kept one is the row of the KEEP, not of the SEND
      assert ticket is event
  assert ledger.open == {0: {0: events[2]}, 1: {}}
  assert (ledger.rows, ledger.time) == (12, 4.0)
  assert ledger.next_seq == {0: 1, 1: 3}
  assert ledger.incarnations == {0: 0, 1: 1}
  assert (ledger.present, ledger.ended) == ({0}, {1})
  assert ledger.latest == {0: events[2]}
  assert ledger.received == [4]


def test_a_ledger_keeps_what_it_is_given_for_a_ticket():
  made = []

  def start(event, kept):
    made.append((event.job, kept))
    return event.job if kept is None else kept

  ledger = Ledger(start)
  rows = "0,0,5,send", "1,0,5,receive", "1,0,6,keep", "2,0,6,receive"
  tickets = [ledger.apply(e) for e in trace_lib.events(kit.trace(*rows))]
  assert made == [(5, None), (6, 5)]
  assert tickets == [5, 5, 5, 5]


def test_a_ledger_counts_what_rollbacks_undo():
  rows = [*("0,0,0,send", "1,0,0,receive", "1,0,1,send", "2,0,1,receive")]
  rows += ["3,0,3,rollback", "3,0,2,send", "4,0,2,receive", "5,0,1,rollback"]
  ledger, received = Ledger(), []
  for event in trace_lib.events(kit.trace(*rows)):
    assert (ledger.apply(event) is None) == (event.action == base.ROLLBACK)
    received.append(list(ledger.received))
  assert received[3:] == [[1, 3], [1], [1], [1, 6], []]
  assert (ledger.rollbacks, ledger.undone) == (2, 3)


@pytest.mark.parametrize(
  ("event", "why"),
  [
    (Event(1.0, 0, 0, 0, base.SEND), "has begun that number (seq) before"),
    (Event(1.0, 1, 0, 0, base.KEEP), "was sent no ticket to keep"),
    (Event(1.0, 0, 1, 0, base.RECEIVE), "was not sent to the worker"),
    (Event(1.0, 0, -1, 2, base.ROLLBACK), "that row is later than this one"),
    (Event(1.0, 0, 0, 0, 99), "action must be one of send"),
  ],
)
def test_a_ledger_refuses_a_row_without_a_meaning(event, why):
  ledger = Ledger()
  ledger.apply(Event(0.0, 0, 0, 0, base.SEND))
  with pytest.raises(TraceError, match="^trace row 1 ") as error:
    ledger.apply(event)
  assert why in error.value.why
  assert ledger.rows == 1
