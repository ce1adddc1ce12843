"""From a live run to the simulation that predicts it."""

import itertools

import kit
import numpy as np
import pytest

from asgd import base, orders
from asgd.experiment import comparison, predict
from asgd.live.spans import Span
from asgd.orders import durations, protocol
from asgd.orders import trace as trace_lib

# Multiples of a power of two: sums of them are exact.
TIMES = [[1.0, 1.25, 0.75, 1.5], [2.0, 1.75], [0.5, 3.0, 0.625]]
PROTOCOLS = {
  "asynchronous": protocol.Rules(),
  "stale synchronous": protocol.Rules(bound=1),
  "with a cache": protocol.Rules(bound=2, cache=True),
  "two tickets": protocol.Rules(depth=2),
  "two jobs on a ticket": protocol.Rules(fetch_every=2),
  "synchronous": protocol.Rules(round=3),
  "backup workers": protocol.Rules(round=2, backup=1),
}


def streams(rows):
  return [itertools.cycle(row) for row in rows]


def journal_of(trace):
  """A trace as a journal, and the spans that tell when a job was pushed: when
  its worker had done all before it, and it."""
  at, out, spans = {}, [], {}
  times, free = streams(TIMES), {}
  for event in trace_lib.events(trace):
    time, worker, seq, job, action = event[:5]
    if action in (base.SEND, base.KEEP):
      end = max(time, free.get(worker, 0)) + next(times[worker])
      free[worker] = at[worker, seq] = end
    elif action == base.RECEIVE:
      end = at[worker, seq]
      spans.setdefault(worker, []).append(Span("push", end, end, seq, job))
    out.append(kit.row(time, worker, job, action, seq))
  return out, spans


@pytest.mark.parametrize("comes", [[0.0, 0.0, 0.0], [0.0, 2.5, 1.0]])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_measured_times_play_the_run_again(name, comes):
  rules = PROTOCOLS[name]
  trace = predict.play(rules, streams(TIMES), comes, 24)
  assert (trace.action == base.RECEIVE).sum() == 24
  orders.check(trace, depth=24)  # a message may wait for its round
  journal, spans = journal_of(trace)
  assert predict.join_times(journal, 3) == comes
  rows = predict.durations_by_worker(predict.measure_jobs(journal, spans), 3)
  for row, expected in zip(rows, streams(TIMES), strict=True):
    assert row == [next(expected) for _ in row]
  again = predict.play(rules, streams(rows), comes, 24)
  for column, expected in zip(again, trace, strict=True):
    np.testing.assert_array_equal(column, expected)


def test_what_is_played_is_the_order_that_is_simulated():
  """But for JOIN rows, and what is begun and not received."""
  trace = predict.play(protocol.Rules(), streams(TIMES), [0.0] * 3, 12)
  joined = trace.action == base.JOIN
  expected = orders.asynchronous(
    durations.measured(TIMES), workers=3, messages=12
  )
  sent = expected.job < 12
  for column, other in zip(trace, expected, strict=True):
    np.testing.assert_array_equal(column[~joined], other[sent])


def receive(time, *keys):
  return [kit.row(time, worker, seq, base.RECEIVE, seq) for worker, seq in keys]


def send(time, *keys):
  return [kit.row(time, worker, seq, base.SEND, seq, 0) for worker, seq in keys]


def join(time, *workers):
  return [kit.row(time, worker, 0, base.JOIN) for worker in workers]


# Two rounds of two workers; worker 1 takes twice the time. What it pushes is
# received a quarter of a second later.
ROUNDS = [
  *(*join(0.0, 0, 1), *send(0.0, (0, 0), (1, 0))),
  *(*receive(3.0, (0, 0), (1, 0)), *send(3.0, (0, 1), (1, 1))),
  *receive(5.25, (0, 1), (1, 1)),
]
PUSHES = {
  0: [Span("push", 1.0, 1.25, 0, 0), Span("push", 3.75, 4.0, 1, 1)],
  1: [Span("push", 2.5, 2.75, 0, 0), Span("push", 4.75, 5.0, 1, 1)],
}


def test_waiting_for_others_of_a_round_is_no_work():
  found = predict.measure_jobs(ROUNDS, PUSHES)
  assert [(job.worker, job.start, job.end) for job in found] == [
    (0, 0.0, 1.5),
    (1, 0.0, 3.0),
    (0, 3.0, 4.25),
    (1, 3.0, 5.25),
  ]
  assert [job.received for job in found] == [3.0, 3.0, 5.25, 5.25]
  assert predict.durations_by_worker(found, 2) == [[1.5, 1.25], [3.0, 2.25]]


def test_without_spans_a_round_is_all_work():
  found = predict.measure_jobs(ROUNDS, {})
  assert predict.durations_by_worker(found, 2) == [[3.0, 2.25], [3.0, 2.25]]


def test_a_message_of_its_own_ends_when_it_is_received():
  journal = [*join(0.0, 0), *send(0.0, (0, 0)), *receive(2.0, (0, 0))]
  pushed = {0: [Span("push", 1.0, 1.25, 0, 0)]}
  ((_, start, end, _, first),) = predict.measure_jobs(journal, pushed)
  assert (start, end, first) == (0.0, 2.0, True)


STARTING = [  # worker 1 comes when worker 0 has done two jobs
  *(*join(1.0, 0), *send(1.0, (0, 0))),
  *(*receive(5.0, (0, 0)), *send(5.0, (0, 1))),
  *(*receive(6.0, (0, 1)), *send(6.0, (0, 2))),
  *(*join(6.5, 1), *send(6.5, (1, 0))),
  *(*receive(7.0, (0, 2)), *send(7.0, (0, 3))),
  *(*receive(7.5, (1, 0)), *send(7.5, (1, 1))),
  *(*receive(8.5, (0, 3)), *send(8.5, (0, 4))),
  *(*receive(9.0, (1, 1)), *send(9.0, (1, 2))),
  *receive(11.0, (0, 4)),
]


def test_in_order_all_jobs_are_there():
  found = predict.measure_jobs(STARTING, {})
  rows = predict.durations_by_worker(found, 2)
  assert rows == [[4, 1, 1, 1.5, 2.5], [1, 1.5]]
  assert predict.join_times(STARTING, 3) == [0, 5.5, 5.5]


def test_who_waits_for_the_others_has_come_when_the_first_ticket_is_sent():
  journal = [*join(1.0, 0), *join(4.0, 1), *send(4.0, (0, 0), (1, 0))]
  assert predict.join_times(journal, 2) == [0.0, 0.0]
  late = [*journal, *join(6.0, 2), *send(6.0, (2, 0))]
  assert predict.join_times(late, 3) == [0.0, 0.0, 2.0]
  # With two tickets each: all get their first before any gets a second.
  rules = protocol.Rules(depth=2)
  trace = predict.play(rules, streams(TIMES), [0.0] * 3, 12)
  assert trace.worker[:9].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_settled_times_begin_when_all_are_there():
  found = predict.measure_jobs(STARTING, {})
  senders = np.array([job.worker for job in found])
  assert predict.count_until_all_sent(senders, 2) == 4
  # At 7.5, so that the job from 7 to 8.5 is left out.
  assert predict.settled_durations(found, 2) == [[2.5], [1.5]]


def test_the_first_job_of_a_worker_that_came_again_is_left_out():
  journal = [
    *(*join(0.0, 0), *send(0.0, (0, 0)), *receive(1.0, (0, 0))),
    *(*send(1.0, (0, 1)), *receive(3.0, (0, 1)), *send(3.0, (0, 2))),
    kit.row(8.0, 0, 2, base.LOST, 2),
    kit.row(8.0, 0, 0, base.LEAVE),
    *(*join(9.0, 0), *send(9.0, (0, 3)), *receive(13.0, (0, 3))),
    *(*send(13.0, (0, 4)), *receive(16.0, (0, 4))),
  ]
  found = predict.measure_jobs(journal, {})
  assert [job.is_first for job in found] == [True, False, True, False]
  assert predict.settled_durations(found, 1) == [[2.0, 3.0]]


def test_who_did_nothing_cannot_be_measured():
  found = predict.measure_jobs(STARTING, {})
  with pytest.raises(ValueError, match="worker 2 sent no message"):
    predict.settled_durations(found, 3)
  with pytest.raises(ValueError, match="worker 0 ended no job after all 2"):
    predict.settled_durations(found[:5], 2)


def test_losses_are_smoothed_over_a_fortieth_of_the_run():
  bumpy = kit.outcome(np.arange(1.0, 81), np.tile([1.0, 3.0, 5.0, 1.0], 20))
  np.testing.assert_array_equal(predict.curve(bumpy, 0).loss[:3], [2, 4, 3])
  run = kit.outcome(np.arange(1.0, 82), np.arange(82.0, 1, -1))
  curve = predict.curve(run, 1)  # 80 messages, two at a time
  assert (curve.time[0], curve.loss[0]) == (2.0, 80.5)
  assert (curve.time[-1], curve.loss[-1]) == (80.0, 2.5)
  whole = predict.curve(run._replace(start_time=0.5), 0)
  assert (whole.time[0], whole.loss[0]) == (1.5, 81.5)


def test_when_a_loss_is_reached():
  curve = predict.Curve(np.array([1.0, 2.0, 3.0]), np.array([5.0, 1.0, 2.0]))
  assert curve.loss_after_share(0.5) == 3.0
  assert curve.reaches(3.0) == 2.0
  assert np.isnan(curve.reaches(0.5))


def test_the_rate_is_that_after_the_start():
  run = kit.outcome([1.0, 10.0, 10.5, 11.0], [1] * 4)
  assert predict.rate(run, 2) == 2.0
  assert np.isnan(predict.rate(run, 4))


def test_where_the_time_of_a_job_goes():
  spans = {
    0: [
      *(Span("fetch", 0.25, 0.25, 0, 0), Span("compute", 0.25, 1.0, 0, 0)),
      Span("push", 1.0, 1.25, 0, 0),
      *(Span("fetch", 2.5, 2.75, 1, 1), Span("compute", 2.75, 3.0, 1, 1)),
      Span("push", 3.0, 3.25, 1, 1),
    ]
  }
  journal = [
    *(*join(0.0, 0), *send(0.0, (0, 0))),
    *(*receive(2.0, (0, 0)), *send(2.0, (0, 1)), *receive(4.0, (0, 1))),
  ]
  parts = predict.where_time_goes(journal, spans, 0.0)
  assert list(parts.values()) == [
    *(0.375, 0.125, 0.5, 0.25, 0.75),
    (0.25 + 0.5) / 4,  # the server: until it was heard of
  ]
  text = comparison.parts_text(parts)
  assert "computing 500.00" in text
  assert "busy 19 % of the time" in text
  later = predict.where_time_goes(journal, spans, 2.0)
  assert later["computing"] == 0.25
  assert predict.where_time_goes(journal, {}, 0.0) is None
  assert "--config.live.spans=True" in comparison.parts_text(None)
