"""`trace_checks` compared with the dispatcher and with `orders.staleness`."""

import numpy as np
import pytest

from asgd import base, orders
from asgd.live.world import trace_checks
from asgd.orders import protocol, trace
from asgd.orders.protocol import Rules
from asgd.orders.trace import Event

# Worker 0 is slow.
ROWS = """\
0,0,-1,0,join
0,1,-1,0,join
0,0,0,0,send
0,1,0,1,send
1,1,0,1,receive
1,1,1,2,send
2,1,1,2,receive
"""
THIRD = "2,1,2,3,send\n"
SUCCESSOR_JOINS = "2,0,0,0,lost\n2,0,-1,0,leave\n2,0,-1,1,join\n"


def _check(text, rules, jobs=5, **options):
  events = [Event.parse(line) for line in text.splitlines()]
  trace_checks.check_protocol(events, rules, jobs=jobs, **options)


def test_a_worker_is_not_further_ahead_than_the_bound():
  _check(ROWS + THIRD, Rules(bound=2))
  with pytest.raises(ValueError, match=r"row 7 .*: worker 1 is 2 ahead"):
    _check(ROWS + THIRD, Rules(bound=1))
  # A worker that joins starts at the slowest worker's clock.
  _check(ROWS + SUCCESSOR_JOINS + THIRD, Rules(bound=1))


def test_a_lost_job_is_redone_by_an_allowed_worker():
  _check(ROWS + SUCCESSOR_JOINS + "2,1,2,0,send\n", Rules())
  with pytest.raises(ValueError, match="another worker's, or done"):
    _check(ROWS + SUCCESSOR_JOINS + "2,1,2,0,send\n", Rules(), owned=True)
  with pytest.raises(ValueError, match="another worker's, or done"):
    _check(ROWS + "2,1,2,1,send\n", Rules())


def test_a_round_has_no_more_jobs_than_its_size():
  _check(ROWS, Rules(round=2, backup=1))
  with pytest.raises(ValueError, match="3 jobs in a round"):
    _check(ROWS, Rules(round=2))


def test_a_ticket_is_kept_as_long_as_it_may_be():
  kept = ROWS.replace("2,send", "2,keep")
  _check(kept, Rules(fetch_every=2))
  with pytest.raises(ValueError, match="SEND was due after 1 jobs"):
    _check(kept, Rules())
  with pytest.raises(ValueError, match="KEEP was due after 1 jobs"):
    _check(ROWS, Rules(fetch_every=2))


@pytest.mark.parametrize(
  "rules",
  [
    Rules(bound=2),
    Rules(bound=3, cache=True, depth=2),
    Rules(fetch_every=3),
    Rules(round=2, backup=1),
  ],
)
def test_a_dispatcher_follows_the_rules(rules):
  rows, rng = [], np.random.default_rng(0)
  dispatcher = protocol.Dispatcher(rules, jobs=40, log=rows.append)
  for worker in range(3):
    dispatcher.join(worker, 0.0)
  while not dispatcher.finished:
    dispatcher.grants(0.0)
    open_jobs = [(w, seq) for w in range(3) for seq in dispatcher.open(w)]
    worker, seq = open_jobs[rng.integers(len(open_jobs))]
    if rng.random() < 0.1:
      dispatcher.leave(worker, 0.0)
      dispatcher.join(worker, 0.0)
    else:
      dispatcher.arrive(worker, seq)
      dispatcher.deliver(0.0)
  trace_checks.check_protocol(rows, rules, jobs=40)
  _compare_staleness(rows)


def _compare_staleness(rows):
  versions, count = {}, 0
  for number, event in enumerate(rows):
    if event.action == base.SEND:
      versions[event.worker] = count
    elif event.action == base.KEEP:  # the worker has its own update
      versions[event.worker] += 1
    if event.action in trace.STARTS:
      rows[number] = event._replace(version=versions[event.worker])
    count += event.action == base.RECEIVE
  messages = trace_checks.received_messages(rows)
  counted = orders.staleness(trace.from_events(rows))
  assert [m.staleness for m in messages] == counted.tolist()
  assert [m.update for m in messages] == list(range(1, 41))


def test_staleness_after_a_rollback():
  rows = [Event.parse(line) for line in ROWS.splitlines()]
  rows = [
    row._replace(version=version)
    for row, version in zip(rows, (-1, -1, 0, 0, -1, 1, -1), strict=True)
  ]
  back = Event(3.0, 0, trace.NO_SEQ, 4, base.ROLLBACK)
  last = Event(3.0, 0, 0, 0, base.RECEIVE)
  one, two, three = trace_checks.received_messages([*rows, back, last])
  assert (one.staleness, two.staleness, three.staleness) == (0, 0, 0)
  assert (two.update, three.update) == (2, 1)
  with pytest.raises(ValueError, match="should be of version 1"):
    trace_checks.received_messages([*rows[:5], rows[5]._replace(version=2)])
