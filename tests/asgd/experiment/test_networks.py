"""Networks of a config: the same bits without limits, sizes, and refusals."""

import itertools

import kit
import numpy as np
import pytest

from asgd import base, experiment
from asgd.experiment import predict, report
from asgd.experiment.engines import clocks, networks
from asgd.live.spans import Span
from asgd.orders import trace as trace_lib
from asgd.orders.network import Network
from asgd.orders.play import Play, fixed
from asgd.orders.protocol import Rules

NETWORK = {"latency": 0.25, "up": 9000.0, "port": 6000.0, "service": 0.125}
TOP_K = {"name": "top_k", "density": 0.1}


def test_a_network_without_limits_changes_no_bit():
  plain = kit.simulated()
  for network in (  # so wide that it adds nothing, but all lines are passed
    {"up": 1e30, "down": 1e30, "port": 1e30},
    {"port": 1e30, "incast": "share"},
  ):
    server = {"shards": 2, "consistent": True}
    run = kit.simulated(network=network, server=server)
    kit.same(run.records(), plain.records())
    kit.same(run.snapshot().params, plain.snapshot().params)
  codecs = {"compress": TOP_K, "compress_down": "onebit"}
  wide = kit.simulated(network={"up": 1e30}, **codecs)
  coded = kit.simulated(**codecs)
  kit.same(wide.records(), coded.records())
  kit.same(wide.snapshot().params, coded.snapshot().params)
  assert "throughput" not in plain.columns()


def test_one_worker_by_hand():
  durations = {"name": "constant", "mean": 1.0}
  engine = kit.simulated(network=NETWORK, durations=durations, workers=(1,))
  records = engine.records()
  nbytes = int(records.bytes_up[0])
  assert nbytes == records.bytes_down[0] == 2496  # padded leaves
  # Up and down the port is slower than the link.
  time = 1 + 2 * 0.25 + 2 * nbytes / 6000 + 0.125
  np.testing.assert_allclose(np.diff(records.time), time, rtol=1e-12)
  row = engine.columns()
  assert row["throughput"] == pytest.approx(1 / time)
  assert row["link_utilisation"] == pytest.approx(nbytes / 6000 / time)
  assert row["service_utilisation"] == pytest.approx(0.125 / time)
  assert row["queue_wait"] == 0
  load = "busy 17 % of the time, a message queued for 0"
  assert load in networks.describe(row)


def test_codes_take_the_time_of_their_own_bytes():
  durations = {"name": "constant", "mean": 1.0}
  engine = kit.simulated(
    network=NETWORK,
    durations=durations,
    workers=(1,),
    compress={"name": "qsgd", "levels": 3, "error_feedback": True},
    compress_down=TOP_K,
  )
  records = engine.records()
  assert len(set(records.bytes_up.tolist())) > 1
  assert records.bytes_up.max() < 1000
  nbytes = records.bytes_up + records.bytes_down
  times = 1 + 2 * 0.25 + nbytes / 6000 + 0.125
  np.testing.assert_allclose(records.time, np.cumsum(times), rtol=1e-12)


def test_a_cell_whose_order_is_made_as_it_goes_comes_to_the_same():
  config = {
    "network": NETWORK,
    "server": {"shards": 2, "consistent": True},
    "compress": {"name": "qsgd", "levels": 3, "error_feedback": True},
    "compress_down": TOP_K,
    "workers": (3,),
    "order": {"name": "asynchronous", "depth": 2},
  }
  whole = kit.simulated(**config)
  again = kit.resumed_simulation(lambda: kit.tiny(**config), 11)
  kit.same(again.records(), whole.records())
  kit.same(again.snapshot().params, whole.snapshot().params)
  assert again.columns() == whole.columns()


def test_a_table_has_the_columns_of_a_network():
  row = kit.simulated(network=NETWORK).columns()
  row |= {"engine": "simulate", "test_accuracy": 0.5, "accepted": 1.0}
  shown = [c.header for c in report.table_columns([row], experiment.ENGINES)]
  assert shown[-4:] == ["messages/time", "port busy %", "shard busy %"] + [
    "queued"
  ]
  del row["link_utilisation"]
  shown = [c.header for c in report.table_columns([row], experiment.ENGINES)]
  assert "queued" not in shown


PEERS = {"a": {"recipe": "d_psgd"}}


MISTAKES = (
  ({"network": {"port": 0}}, "config.network.port must be .* above 0 .* 0;"),
  ({"network": {"up": -1.0}}, "config.network.up must be .* not -1.0"),
  ({"network": {"latency": float("nan")}},
   "config.network.latency must be a number from 0 .* not nan"),
  ({"network": {"incast": "drop"}}, "config.network.incast must be 'queue'"),
  ({"network": {"bandwidth": 1.0}}, "unknown config key 'network.bandwidth'"),
  ({"network": NETWORK, "server": {"shards": 99, "consistent": True}},
   "config.server.shards must be at most 90, .* not 99"),
  ({"network": NETWORK, "order": {"name": "fixed_delay"}},
   "config.order.name 'fixed_delay' is an order that a network cannot delay"),
  ({"network": NETWORK, "runs": PEERS},
   "config.network.port .* is not for the recipe 'd_psgd' .* no server"),
  ({"network": NETWORK, "engine": "mesh"},
   "config.network: engine 'mesh' of config.runs.run has no links"),
  ({"network": NETWORK, "engine": "pipeline"},
   "config.network: engine 'pipeline' of config.runs.run has no links"),
  ({"network": NETWORK, "engine": "ray"},
   "config.network.latency .* on engine 'ray': its live messages have real"),
  ({"network": NETWORK, "server": {"shards": 2, "delays": "gamma"}},
   "config.server.delays and config.network both say when messages arrive"),
  ({"network": NETWORK, "server": {"shards": 2}, "compress": TOP_K},
   "config.compress makes sizes depend on the values, .* 2 shards"),
  ({"network": NETWORK, "engine": "ray",
    "runs": {"a": {"recipe": "sandblaster"}}},
   "config.network.latency .* on engine 'ray': its live messages have real"),
)


test_what_does_not_fit_is_one_line_that_names_the_key = kit.refuses(
  MISTAKES, lambda config: kit.tiny(**config), longest=600
)


# Times of a file.


def test_times_of_a_file_are_played_back(tmp_path):
  path = tmp_path / "durations.csv"
  path.write_text("worker,seconds\n0,1.5\n1,4\n0,2.5\n")
  clock = clocks.build("recorded", path=str(path))
  first = list(itertools.islice(clock.stream(0), 3))
  assert first == [1.5, 2.5, 1.5]
  assert next(clock.stream(1)) == 4
  assert next(clock.stream(2)) == 1.5
  durations = {"name": "recorded", "path": str(path)}
  times = kit.simulated(durations=durations).records().time
  assert times[:2].tolist() == [1.5, 4]


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (None, "durations.path .* cannot be read as times .*No such file"),
    ("", "durations.path .*line 1 must be 'worker,seconds', not ''"),
    ("worker,seconds\n", "durations.path .* holds no time"),
    ("worker,seconds\n0,1\n0,nan\n", "line 3 must be .* not '0,nan'"),
    ("worker,seconds\n0,0\n", "line 2 must be .* not '0,0'"),
    ("worker,seconds\nx,1\n", "line 2 must be .* not 'x,1'"),
    ("worker,seconds\n0\n", "line 2 must be .* not '0'"),
    ("0" * 10**6, "cannot be read as times .*larger than field limit"),
  ],
)
def test_a_file_that_holds_no_times_is_refused(tmp_path, text, message):
  path = tmp_path / "times.csv"
  if text is not None:
    path.write_text(text)
  with pytest.raises(ValueError, match=message) as caught:
    kit.tiny(durations={"name": "recorded", "path": str(path)})
  assert "\n" not in str(caught.value)


# Predictions of live runs.

WIRE = Network(latency=0.5, up=16.0, port=8.0, service=0.25)
SIZES = fixed([8.0], [4.0])
TIMES = [[1.0, 1.25, 0.75, 1.5], [2.0, 1.75], [0.5, 3.0, 0.625]]


@pytest.mark.parametrize("incast", ["queue", "share"])
@pytest.mark.parametrize("rules", [Rules(), Rules(bound=1), Rules(round=3)])
def test_what_a_network_takes_is_no_part_of_a_job(rules, incast):
  """Of a run that is simulated over a network, what is measured of its jobs is
  what they were given, and plays the run again."""
  network = WIRE._replace(incast=incast)

  def played(rows):
    streams = [itertools.cycle(row) for row in rows]
    over = {"network": network, "sizes": SIZES}
    return Play(rules, streams, [0.0] * 3, jobs=24, **over)

  order, spans = played(TIMES), {0: [], 1: [], 2: []}
  put, end_job = order._put, order._end_job

  def fetched(time, place, call, job):
    if call is pushed:  # the job begins
      span = Span("fetch", order.now, order.now, job.seq, job.number)
      spans[job.worker].append(span)
    put(time, place, call, job)

  def pushed(job):
    span = Span("push", order.now, order.now, job.seq, job.number)
    spans[job.worker].append(span)
    end_job(job)

  order._put, order._end_job = fetched, pushed
  order.until(24)
  journal = [
    kit.row(row.time, row.worker, row.job, row.action, row.seq)
    for row in order.rows
  ]
  jobs = predict.measure_work(journal, spans, network, SIZES, 3)
  assert len(jobs) == 24
  rows = predict.durations_by_worker(jobs, 3)
  for row, given in zip(rows, TIMES, strict=True):
    expected = list(itertools.islice(itertools.cycle(given), len(row)))
    np.testing.assert_allclose(row, expected, rtol=1e-9)
  again = played([[*row, 1.0] for row in rows])
  again.until(24)
  times = trace_lib.from_events(again.rows).time
  np.testing.assert_allclose(times, order.trace().time, rtol=1e-9)


def test_a_live_run_over_a_network_needs_its_spans():
  journal = [kit.row(0.0, 0, 0, base.SEND), kit.row(1.0, 0, 0, base.RECEIVE)]
  with pytest.raises(ValueError, match="--config.live.spans=True"):
    predict.measure_work(journal, {}, WIRE, SIZES, 1)


def test_sizes_are_those_that_were_counted():
  columns = {"worker": np.array([0, 1, 0]), "bytes_up": np.array([4, 5, 9])}
  sizes = predict.job_sizes([kit.records(3, **columns)], 2)
  assert [sizes.up(0, 0), sizes.up(0, 1), sizes.up(1, 0)] == [[4], [9], [5]]
  assert sizes.up(1, 1) == [6]  # the mean


# Times of replicas that are divided among machines.

# Of 4 hidden units and 2 logits each machine has half: see the example of
# `asgd.parallel.partitions.phases`.
DIVIDED = {
  "name": "partitioned",
  "model": {"name": "mlp", "hidden": (4,)},
  "inputs": (3,),
  "classes": 2,
  "machines": 2,
  "batch_size": 1,
  "flops": 2.0,
  "bandwidth": 4.0,
  "variation": 0.0,
}


def test_jobs_take_the_time_of_a_divided_model():
  # 12, 8, 16 and 12 operations of each machine, and thrice 8 bytes.
  alone, time = 96 / 2, 48 / 2 + 3 * 8 / 4
  records = kit.simulated(durations=DIVIDED, workers=(1,)).records()
  np.testing.assert_allclose(records.time[:2], [time / alone, 2 * time / alone])


NOT_DIVIDED = (
  ({"machines": 0}, "config.durations.machines must be a pos"),
  # A step of so many is played message by message, and has no end.
  ({"machines": 4000}, "config.durations.machines must be .* 256, not 4000"),
  ({"name": {"gamma": 1}}, "config.durations.name must be a text, such as"),
  ({"bandwidth": 0.0}, "config.durations.bandwidth must be a positive"),
  ({"model": {"hidden": (4,)}}, "config.durations.model needs a name"),
  ({"model": {"name": "cnn"}, "inputs": (8, 8, 3)}, "layer ConvPool cannot"),
  ({"inputs": (3, 0)}, "config.durations.inputs must be a positive"),
  ({"machine": 2}, "did you mean 'machines'"),
  ({"bandwidth": 1e-40}, "a job may take at most 1e"),
)


test_a_model_that_cannot_be_divided_is_refused = kit.refuses(
  NOT_DIVIDED,
  lambda change: kit.tiny(durations={**DIVIDED, **change}), longest=600,
)
