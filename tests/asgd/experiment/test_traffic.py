"""Codecs in configs and calls, and what results say of traffic."""


import coding
import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from linear import squares

import asgd
from asgd import base, compression
from asgd.experiment import cell_files, folder, replay
from asgd.experiment.engines import traffic

pytestmark = pytest.mark.usefixtures("blank_pictures")

THRESHOLD = {"name": "threshold", "tau": 0.01}


MISTAKES = (
  ({"compress": "treshold"}, r"config.compress.*did you mean 'threshold'"),
  ({"compress": 3}, "config.compress must be the name of a codec, a dict"),
  ({"compress": {"tau": 1.0}}, "config.compress must be the name of a codec"),
  ({"compress": "threshold"}, r"config.compress.*tau"),
  ({"compress": {**THRESHOLD, "tau": 0}}, r"config.compress.tau.*not 0"),
  ({"compress": "given"}, "stands for an object that a call was given"),
  ({"compress": THRESHOLD, "engine": "pipeline"},
   "config.compress: stages send activations of different examples, not sums"),
  ({"compress_down": "onebit", "engine": "mesh"},
   "config.compress_down: engine 'mesh' of config.runs.run sends nothing"),
  (
    {
      "compress_down": "onebit",
      "engine": "threads",
      "server": {"wire": "bfloat16"},
    },
    "config.compress_down: with config.server.wire 'bfloat16' workers",
  ),
  ({"server": {"wire": "bfloat16"}},
   "config.server.wire 'bfloat16' is for live servers, and for simulated"),
  ({"compress_down": "onebit", "runs": {"a": {"recipe": "dana_zero"}}},
   "config.compress_down: an algorithm that looks ahead sends parameters"),
  ({"compress": THRESHOLD, "runs": {"a": {"recipe": "d_psgd"}}},
   "config.compress: peers send models, not changes as in choco_sgd"),
  ({"compress": {"name": "onebit_adam", "warm_up": 3}},
   "config.compress.*is only for devices in step"),
  ({"compress": "onebit_adam"}, "config.compress.*devices in step"),
  (
    {
      "compress_down": "onebit",
      "engine": "threads",
      "order": {"fetch_every": 4},
    },
    "config.compress_down is not for live workers that keep tickets",
  ),
  (
    {
      "compress": {"name": "onebit_adam", "warm_up": 10**12},
      "engine": "mesh",
      "runs": {"run": {}},
    },
    "config.compress.*warm_up must be at most 2147483647",
  ),
  ({"runs": {"a": {"recipe": "threshold_sharing", "codec": "dgc"}}},
   "config.runs.a.codec: dgc needs epoch=, the messages of a worker in one"),
  ({"compress": "coding:halves"},
   "config.compress: codec 'coding:halves': what decode returns must have the"),
  ({"compress_down": "coding:halves"},
   "config.compress_down: codec 'coding:halves': what decode returns must"),
)


test_what_does_not_fit_is_one_line_that_names_the_key = kit.refuses(
  MISTAKES, lambda config: kit.tiny(**config), longest=600
)


def test_a_run_may_have_a_codec_of_its_own():
  runs = {
    "dense": {"recipe": "asgd"},
    "mine": {"recipe": "asgd", "compress": "onebit"},
    "none": {"recipe": "asgd", "compress": None},
  }
  exp = kit.tiny(runs=runs)
  codecs = [exp.plan(cell).server.codec is None for cell in exp.cells]
  assert codecs == [True, False, True]
  exp = kit.tiny(runs=runs, compress=THRESHOLD)
  names = [run.config["compress"] for run in exp.runs.values()]
  assert names == [THRESHOLD, {"name": "onebit"}, None]


def test_a_cell_that_goes_on_comes_to_the_same_in_both_directions():
  exp = kit.tiny(
    compress={"name": "qsgd", "levels": 3, "error_feedback": True},
    compress_down={"name": "top_k", "density": 0.1},
  )
  whole = kit.to_its_end(kit.simulation_of(exp))
  again = kit.resumed_simulation(lambda: exp, 11)
  kit.same(again.records(), whole.records())
  kit.same(again.snapshot().params, whole.snapshot().params)
  row = whole.columns()
  assert (row["codec"], row["codec_down"]) == ("qsgd", "top_k")
  assert row["compression_up"] > 5 and row["compression_down"] > 1.5
  part = whole.records()
  megabytes = (part.bytes_up.sum() + part.bytes_down.sum()) / 1e6
  assert whole.snapshot().clock["megabytes"] == megabytes


def test_a_kept_ticket_would_have_no_bytes_without_the_codec_either():
  exp = kit.tiny(
    compress_down={"name": "top_k", "density": 0.1}, order={"fetch_every": 2}
  )
  whole = kit.to_its_end(kit.simulation_of(exp))
  row, down = whole.columns(), whole.records().bytes_down
  dense = traffic.dense_bytes(exp.plan(exp.cells[0]))
  tickets = (down > 0).sum()
  assert tickets < 0.6 * len(down)
  assert row["compression_down"] == tickets * dense / down.sum()


def test_numbers_of_16_bits_are_what_a_codec_is_compared_with():
  exp = kit.tiny(engine="threads", compress="onebit")
  half = kit.tiny(
    engine="threads", compress="onebit", server={"wire": "bfloat16"}
  )
  one, two = (traffic.dense_bytes(e.plan(e.cells[0])) for e in (exp, half))
  assert two < 0.6 * one


def test_a_ticket_is_the_updates_since_the_last_or_the_parameters():
  updates = compression.compressed_updates(
    asgd.asgd(1.0, workers=2).algorithm, compression.named("bf16")
  )
  server = asgd.make_server(updates)
  worker = asgd.gradient_worker(coding.loss)
  trace = kit.trace(
    "0,0,0,send", "0,1,1,send", "1,0,0,receive", "1,0,2,send",
    "2,0,2,receive", "2,0,3,send", "3,0,3,receive", "3,0,4,send",
    "4,1,1,receive", "4,1,5,send", "5,1,5,receive", "6,0,4,receive",
  )
  host = asgd.simulator.make_host(server, worker)
  params = {"w": np.zeros((4, 6), np.float32)}
  _, records = asgd.simulator.run_whole(
    host, params, 2, trace, batch=coding.batch, root=coding.ROOT
  )
  dense, update = 128, 24 + 2 * 24 + 4  # header, elements, norm of residual
  # Both are new; one update each; three and one more are more than all.
  assert records.bytes_down.tolist() == [dense, update, update, dense] + [
    dense, update
  ]


def test_a_live_cell_is_compressed_and_replays(tmp_path):
  place, result, told = kit.train_live(
    tmp_path,
    stop=(40,),
    runs={"a": {"recipe": "asgd", "momentum": 0.9}},
    compress=THRESHOLD,
    compress_down="onebit",
    server={"shards": 2, "log": 4},
  )
  assert (result["codec"], result["codec_down"]) == ("threshold", "onebit")
  assert result["compression_up"] > 4 and result["compression_down"] > 2
  assert replay.replay(place).same
  records = base.Records(**cell_files.read_records(place))
  assert records.bytes_up.sum() == result["bytes_up"]
  assert records.bytes_down.sum() == result["bytes_down"]
  rows = folder.read_rows(place)
  sent = result["bytes_up"] + result["bytes_down"]
  assert rows[-1]["megabytes"] == pytest.approx(sent / 1e6)
  last = slice(rows[-2]["message"], rows[-1]["message"])
  assert rows[-1]["gap_mean"] == pytest.approx(records.gap[last].mean())
  # All workers left when it was stopped.
  assert result["residual_lost"] > 0
  assert told[0].startswith("stopped in a-n3-s0 at message")


def journal(*rows):
  return [kit.row(0.0, w, j, a) for w, j, a in rows]


def test_what_is_lost_is_that_of_workers_that_leave_too_early():
  plan = asgd.experiment.schema.Run("a", "a", "threads", "asgd", {}, {
    "compress": THRESHOLD
  })
  plan = type("Plan", (), {"run": plan})
  events = journal(
    (0, 0, base.RECEIVE), (0, 0, base.LEAVE), (1, 1, base.RECEIVE),
    (0, 2, base.RECEIVE), (1, 1, base.LEAVE), (0, 0, base.LEAVE),
  )
  records = kit.records(
    worker=np.array([0, 1, 0]),
    job=np.array([0, 1, 2]),
    residual_norm=np.array([3.0, 4.0, 5.0]),
  )
  assert traffic.lost_residual(plan, events, records) == {"residual_lost": 3.0}
  assert traffic.lost_residual(plan, events[:-1] + events[:1], records) == {
    "residual_lost": 5.0
  }


@pytest.mark.parametrize("codec", ["onebit", THRESHOLD, coding.CODECS["int8"]])
def test_a_call_takes_a_name_a_dict_or_a_codec(codec):
  x = np.eye(4, dtype=np.float32)
  result = asgd.simulate(
    *(squares, jnp.zeros(4), (x, x.sum(1)), asgd.asgd(0.5, workers=2)),
    **dict(messages=4, batch_size=4, progress=False, compress=codec),
  )
  assert (result.records.bytes_up < 64).all()


def test_a_codec_that_was_given_is_given_to_the_replay(tmp_path):
  x = np.eye(4, dtype=np.float32)
  given = squares, jnp.zeros(4), (x, x.sum(1)), asgd.asgd(0.5, workers=2)
  codec = coding.CODECS["terngrad"]
  asgd.train_live(
    *given, messages=8, batch_size=4, progress=False, compress=codec,
    folder=tmp_path,
  )
  assert asgd.replay(tmp_path, *given, compress=codec).same
  message = "compress 'given' stands for an object that a call"
  with pytest.raises(ValueError, match=message):
    asgd.replay(tmp_path, *given)


DGC = {"name": "dgc", "density": 0.01, "clip_norm": 0.1, "warm_up": 0.2}


def compressed(**codecs):
  exp = kit.tiny(**codecs)
  plan = exp.plan(exp.cells[0])
  return plan, plan.server.codec, plan.codec_down


def decoded(codec, count):
  """Of as many equal messages."""
  x = {"w": kit.normal(40, 50), "b": kit.normal(3)}
  state, sent, encode = codec.init(x), [], jax.jit(codec.encode)
  for _ in range(count):
    code, state = encode(state, x, coding.ROOT)
    sent.append(codec.decode(code))
  return sent


@pytest.mark.usefixtures("float64")
def test_dgc_has_the_workers_and_the_epoch_of_its_run():
  """The server sends updates alone, of a message each."""
  plan, up, down = compressed(compress=DGC, compress_down=DGC)
  batches = plan.problem.batches_per_epoch
  assert (plan.workers, batches) == (2, 89)
  for codec, *size in (up, 2, 44.5), (down, 1, 89):
    options = {**DGC, **dict(zip(("workers", "epoch"), size, strict=True))}
    count = int(0.2 * size[1]) + 2
    kit.same(
      decoded(codec, count), decoded(compression.named(**options), count)
    )


@pytest.mark.parametrize("named", [True, False])
def test_dgc_in_a_call_has_the_size_of_its_run(named):
  x = np.float32(kit.normal(32, 4))
  given = squares, jnp.zeros((4, 4)), (x, x), asgd.asgd(0.1, workers=2)

  def params(**size):
    options = {**DGC, "warm_up": 1, **size}
    codec = options if named else compression.dgc(
      **{k: v for k, v in options.items() if k != "name"}
    )
    return asgd.simulate(
      *given, messages=12, batch_size=4, progress=False, compress=codec
    ).params

  kit.same(params(), params(workers=2, epoch=4))
  if named:  # else it would be the same
    assert (params() != params(workers=1, epoch=4)).any()
    assert (params() != params(workers=2, epoch=40)).any()


def test_dgc_on_data_without_an_end_needs_an_epoch():
  def batch(worker, job):
    return np.ones((4, 4), np.float32), np.ones((4, 4), np.float32)

  given = squares, jnp.zeros((4, 4)), batch, asgd.asgd(0.1, workers=2)
  options = dict(messages=4, progress=False)
  with pytest.raises(ValueError, match="compress: dgc needs epoch=, the mess"):
    asgd.simulate(*given, **options, compress="dgc")
  asgd.simulate(*given, **options, compress={"name": "dgc", "epoch": 3})
