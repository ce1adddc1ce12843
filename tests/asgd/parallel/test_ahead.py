"""Programs that train, compiled for TPUs that are not here: memory, operations
and collectives are as planned. Needs libtpu (`asgd[tpu]`), and no TPU."""

import functools
import os
import types

import kit
import pytest

from asgd import experiment
from asgd.experiment import cells, schema
from asgd.parallel import ahead, targets, transfers

pytestmark = pytest.mark.tpu_compile

GPT = {
  "data": {"name": "pydoc", "context": 64},
  "model": {"name": "gpt", "depth": 2, "width": 128, "heads": 4},
  "engine": "mesh",
  "optimizer": {"name": "sgd", "momentum": 0.9},
  "clip_norm": 1.0,
  "batch_size": 16,
  "examples": 64,
  "runs": {"gpt": {}},
}
PEERS = {
  "data": {"name": "digits"},
  "model": {"name": "mlp"},
  "engine": "mesh",
  "batch_size": 16,
  "workers": [8],
  "runs": {
    "local": {"recipe": "local_d_psgd", "steps": 3},
    "sgp": {"recipe": "sgp", "overlap": 2, "topology": "ring"},
  },
}
KINDS = "messages", "local", "messages"  # of rounds
GPTS = {
  "v5e:2x2": {
    "mesh": {"axes": "data:2,tensor:2", "sequence": True, "zero": 1}
  },
  "v5e:4x4": {
    "mesh": {
      "axes": "data:2,pipe:2,tensor:4",
      "microbatches": 4,
      "zero": 3,
      "precision": "bfloat16",
    },
    "optimizer": {"name": "adamw"},
  },
}


@functools.cache
def compiled(topology):
  """(target, programs) of the config for a topology."""
  target = targets.find(topology)
  config = PEERS if "*" in topology else {**GPT, **GPTS[topology]}
  resolved = schema.resolve(config, experiment.ENGINES)
  jobs = cells.programs(resolved, target, engines=experiment.ENGINES)
  return target, [ahead.compile_program(job, {}) for job in jobs]


def compare(one, target):
  return ahead.compare(one, ahead.traffic(one, target.slices))


@pytest.mark.parametrize("topology", GPTS)
def test_the_step_of_a_gpt_is_as_planned(topology):
  target, (one,) = compiled(topology)
  assert compare(one, target) == []
  kinds = {transfer.kind for transfer, _, _ in ahead.traffic(one).rows}
  assert {transfers.GATHER, transfers.SCATTER, transfers.REDUCE} <= kinds
  assert (transfers.PERMUTE in kinds) == ("pipe" in one.job.mesh.shape)
  sent, hidden = ahead.hidden_bytes(one.program)
  assert 0 < hidden < sent
  assert one.program.flops == one.job.plan.flops  # padded or not: exactly


def test_a_plan_that_is_wrong_is_found():
  target, (one,) = compiled("v5e:2x2")
  plan = one.job.plan

  def differences(**changes):
    job = one.job._replace(plan=plan._replace(**changes))
    return compare(one._replace(job=job), target)

  assert differences(flops=plan.flops * 1.019) == []
  assert "flops of products" in differences(flops=plan.flops * 1.03)[0]
  assert "temporary bytes" in differences(temporary=2.0**30)[0]
  (blocks,) = (
    want for want in plan.transfers
    if want.kind == transfers.GATHER and want.label == "blocks"
  )
  fewer = [want for want in plan.transfers if want is not blocks]
  assert "not in the plan: all-gather" in differences(transfers=fewer)[0]
  more = [*plan.transfers, blocks]
  assert "not in the program: all-gather" in differences(transfers=more)[0]
  wrong = [
    want._replace(itemsize=1) if want is blocks else want
    for want in plan.transfers
  ]
  assert differences(transfers=wrong)
  arguments, results = one.shapes
  assert compare(one._replace(shapes=(arguments[1:], results)), target)
  assert compare(one._replace(arguments=one.arguments + 512), target)


def test_local_steps_of_peers_send_nothing_between_slices():
  target, programs = compiled("v5e:2x2*2")
  steps, local, messages = programs
  for one, kind in zip(programs, KINDS, strict=True):
    assert f"({kind})" in one.job.name
    assert compare(one, target) == []
  # Local steps are a loop: what is sent is sent once, after it.
  assert {one.times for one in steps.program.collectives} == {1}
  assert steps.program.flops > 2.9 * local.program.flops
  assert ahead.crossing(local.program) == []
  assert local.program.collectives == []
  between = ahead.crossing(messages.program)
  assert between
  # The same program, where a step may not send: each message is reported.
  job = messages.job._replace(plan=messages.job.plan._replace(crosses=False))
  found = compare(messages._replace(job=job), target)
  assert len(found) == len(between)


test_other_topologies_are_refused = kit.refuses(
  [
    ("v5e", "cannot read the topology 'v5e'"),
    ("v9:2x2", "unknown kind of device 'v9'"),
    ("v5e:3x5", "the topology 'v5e:3x5'"),
    ("h100:2x4", "GPUs have no grid"),
    ("v5e:2x2*0", "slices of"),
  ],
  targets.find,
)


def test_gpus_need_no_cuda_driver(monkeypatch):
  name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
  monkeypatch.setenv(name, "")  # restored after the test
  monkeypatch.delenv(name)

  def describe(kind, platform, *, target_config, topology):
    assert os.environ[name] == "1"
    assert (kind, platform, topology) == ("h100", "cuda", "1x2x4")
    assert "core_count: 132" in target_config
    return types.SimpleNamespace(devices=range(8))

  monkeypatch.setattr(targets.topologies, "get_topology_desc", describe)
  target = targets.find("h100:4*2")
  assert len(target.devices) == 8
  assert target.memory == targets.GPUS["h100"].memory


def test_a_mesh_has_all_devices_of_a_topology():
  config = {**GPT, "mesh": {"axes": "data:2"}}
  resolved = schema.resolve(config, experiment.ENGINES)
  target = targets.find("v5e:2x2")
  with pytest.raises(ValueError, match="has 2 devices, and .* all 4"):
    [*cells.programs(resolved, target, engines=experiment.ENGINES)]
  simulated = schema.resolve(
    {**PEERS, "engine": "simulate"}, experiment.ENGINES
  )
  with pytest.raises(ValueError, match="use engine=mesh"):
    [*cells.programs(simulated, target, engines=experiment.ENGINES)]
