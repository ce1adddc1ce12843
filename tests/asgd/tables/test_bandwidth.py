"""A budget of bytes a second for a worker's messages."""

import kit
import numpy as np
import pytest
from table_kit import MESSAGES, finished, resumed, run_of, same

from asgd import orders, tables
from asgd.orders.network import Network

FEW = (dict(name="largest_change", nbytes=16),)  # one row, with its key
OPTIONS = dict(
  consistency="managed", bound=2, budget=6, bandwidth=150.0, filters=FEW
)


def test_two_workers_and_three_messages_by_hand():
  """Each job adds 1 to rows of 8 and 1. Worker 0 takes 1, worker 1 takes 2.5.

  A message within a clock has one row, of 16 + 8 + 8 + 8 = 40 bytes, and the
  link sends 20 bytes in a unit of time.
  """
  work = tables.Work(
    lambda worker, job: job,
    lambda job: {"w": np.arange(2)},
    lambda rows, job, keys, worker, number: (0.0, {"w": -np.ones((2, 1))}),
  )
  reads = []
  run = tables.Simulation(
    tables.table(
      *(1.0, 2), consistency="asynchronous", clock_every=4,
      bandwidth=20.0, filters=FEW,
    ),
    {"w": np.array([[8.0], [1.0]])},
    work,
    orders.durations.constant(slowdown=[1, 2.5]),
    workers=2,
    messages=8,
    observe=lambda read: reads.append((read.worker, *read.values["w"].ravel())),
  )
  run.advance(5)
  records = run.records()
  # The jobs of worker 0 that begin at 0 and 2 send, as its link is free until 0
  # and from 2 on. That of 1 sends nothing. Each job first requests two keys.
  requests = np.array([32] * 5)
  sent = (records.bytes_up - requests).tolist()
  assert list(zip(records.time, records.worker, sent, strict=True)) == [
    (1.0, 0, 40), (2.0, 0, 0), (2.5, 1, 40), (3.0, 0, 32), (4.0, 0, 56)
  ]
  # The relative change of row 1 is the larger one: 1 / 1, then 2 / 2. Worker 1
  # reads it at 2.5, and adds its own row 0, which it has not sent.
  assert [row for row in reads if row[0] == 1][1] == (1, 9.0, 3.0)
  # At the end of its clock worker 0 has sent all, worker 1 its row 1.
  assert run.tables()["w"].ravel().tolist() == [12.0, 6.0]


def test_without_a_limit_only_the_clock_decides():
  few = dict(OPTIONS, filters=())
  same(finished(**few | dict(bandwidth=1e12)), finished(**few | ONE_JOB))


ONE_JOB = dict(bandwidth=None, push_every=1)


def test_a_smaller_budget_sends_fewer_bytes_within_a_clock():
  counts = []
  for bandwidth in (1e-3, 150.0, 1e9):
    run = finished(**OPTIONS | dict(bandwidth=bandwidth))
    counts.append(sum(client.flushes for client in run._clients))
    for client in run._clients:  # the end of a clock sends all
      assert client.residual() == 0
  # At the end of each clock of two jobs, and after the first job of each of
  # three workers, whose links are free; or after each job.
  assert counts[::2] == [MESSAGES // 2 + 3, MESSAGES]
  assert counts[0] < counts[1] < MESSAGES


@pytest.mark.parametrize("network", [None, Network(latency=0.1)])
def test_a_run_is_resumed_to_the_bit(network):
  run, first = (run_of(network, **OPTIONS) for _ in range(2))
  run.advance(MESSAGES)
  first.advance(MESSAGES // 2)
  same(resumed(first, network, **OPTIONS), run)


def test_a_replay_decides_by_the_times_of_the_trace():
  run = finished(**OPTIONS)
  # The replay draws no durations: those of its clock would be others.
  again = run_of(**OPTIONS, clock=orders.durations.constant())
  again.replay(orders.trace.from_events(run.rows))
  same(run, again)
  other = finished(**OPTIONS, clock=orders.durations.constant())
  messages = [[c.flushes for c in x._clients] for x in (run, other)]
  assert messages[0] != messages[1]


test_what_a_budget_cannot_do_is_refused = kit.refuses(
  [
    (dict(bandwidth=0), "^bandwidth must be a positive"),
    (dict(bandwidth=np.inf), "^bandwidth must be a positive"),
    (dict(bandwidth=9, consistency="bulk_synchronous"),
     "bandwidth 9.0 is for a server that applies updates as they arrive"),
    (dict(bandwidth=9, filters=(dict(name="random_skip", probability=0.5),)),
     "use largest_change alone, or leave bandwidth out"),
  ],
  lambda options: tables.table(0.1, 2, **options),
)
