"""The programs of runs on a mesh, to compile for devices that are not here.

The same programs train: the step of one model on all axes, and the rounds of
peers, with and without messages (local SGD, if peers average every few rounds).
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from asgd import problems
from asgd.experiment import schema
from asgd.experiment.engines import mesh_plan, parameter_server, peer_mesh
from asgd.experiment.engines.peers import PeerPlan
from asgd.experiment.schema import Run
from asgd.parallel import (
  ahead,
  data_parallel,
  halo,
  memory,
  meshes,
  peers,
  precision,
  transfers,
  workloads,
)
from asgd.parallel.targets import Target


def _shapes(tree: Any) -> Any:
  """Returns the shapes of arrays, in the dtypes that JAX gives them."""
  return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))


def _key_shape() -> jax.ShapeDtypeStruct:
  """Returns the shape of a key of `jax.random`."""
  return jax.eval_shape(lambda: jax.random.key(0))


def model_steps(
  experiment: Any, run: Run, workers: int, target: Target
) -> Iterator[ahead.Compilation]:
  """Yields the step of a run."""
  del workers
  section = run.config["mesh"]
  if section["form"] != "shard_map":
    raise ValueError(
      f"config.mesh.form {section['form']!r} has no program of global arrays:"
      " use form='shard_map'"
    )
  mesh = mesh_plan.mesh_on(run, target.devices)
  # Everything below is shapes: nothing is allocated on the target's devices.
  problem, step, _, _, steps = mesh_plan.build_step(experiment, run, mesh)
  # Placed, so that the compiler knows the key's sharding.
  key = meshes.place(_key_shape(), mesh)
  params = jax.eval_shape(problem.init, key)
  state = step.init(params)
  batch = step.place(_shapes(mesh_plan.job_batches(problem, steps, 0)(0, 0)))
  if isinstance(state, data_parallel.StepState):
    program_plan = _step_plan(run, problem, mesh, params, state, batch)
  else:  # islands: no formula gives their traffic
    program_plan = ahead.ProgramPlan(None)
  arguments = state, batch, key
  yield ahead.Compilation(run.label, step.step, arguments, mesh, program_plan)


def _step_plan(
  run: Run,
  problem: problems.Problem,
  mesh: jax.sharding.Mesh,
  params: Any,
  state: Any,
  batch: Any,
) -> ahead.ProgramPlan:
  """Returns the plan of a step.

  The plan does not count the bytes of compressed gradients or image tiles.
  """
  section, size = run.config["mesh"], run.config["batch_size"]
  # [1] The bytes of a number in the computation and in the reduction.
  policy = section["precision"]
  policy_dtypes = precision.POLICIES.get(policy, precision.Policy())
  default_nbytes = 8 if policy == mesh_plan.DOUBLE else 4
  sizes = (
    jnp.dtype(dtype).itemsize if dtype else default_nbytes
    for dtype in (policy_dtypes.compute, policy_dtypes.reduce)
  )
  replicas = transfers.Replicas(section["zero"], section["accumulate"], *sizes)
  # Bytes of compressed gradients or image tiles have no formula: no comparison.
  if run.config["compress"] or set(mesh.shape) & set(halo.AXES):
    return ahead.ProgramPlan(None)
  # [2] A GPT has formulas; another model's products are counted.
  pieces = problem.pieces
  # The last token of a sequence is a label only, so it is no input.
  tokens = jax.tree.leaves(batch)[0]
  gpt = pieces and workloads.find_gpt(
    pieces.layers, tokens.update(shape=(size, tokens.shape[-1] - 1))
  )
  if not gpt:
    examples = size // mesh.shape[meshes.DATA]  # of one replica
    flops = workloads.products(problem.loss, params, batch, examples)
    transfer_list = [*transfers.of_weights(state.params, mesh, replicas)]
    return ahead.ProgramPlan(transfer_list, flops)
  return _gpt_plan(run, mesh, state.params, gpt, replicas)


def _gpt_plan(
  run: Run,
  mesh: jax.sharding.Mesh,
  weights: Any,
  gpt: memory.Gpt,
  replicas: transfers.Replicas,
) -> ahead.ProgramPlan:
  """Returns the transfers, products and memory of a GPT's step."""
  section = run.config["mesh"]
  sequences = run.config["batch_size"] // mesh.shape[meshes.DATA]  # a replica's
  stream = memory.GptStream(
    *(gpt, sequences // replicas.accumulate, section["sequence"]),
    mesh_plan.count_microbatches(section, mesh.shape),
    *(section["rounds"] or 1, section["recompute"]),
  )
  split_axes = frozenset({meshes.TENSOR} if stream.sequence else ())
  turns = transfers.turns_of(stream, mesh)
  transfer_list = [
    *transfers.of_weights(
      weights, mesh, replicas, extra_axes=split_axes, turns=turns
    ),
    *transfers.of_stream(stream, mesh, replicas),
  ]
  flops = replicas.accumulate * memory.step_flops(
    *(gpt, stream.sequences, stream.microbatches, stream.rounds),
    tensor=mesh.shape.get(meshes.TENSOR, 1),
    stages=mesh.shape.get(meshes.PIPE, 1),
    recompute=stream.recompute,
  )
  temporary = memory.step_temporary(
    stream,
    parameters=transfers.parameters_here(weights, mesh),
    stages=mesh.shape.get(meshes.PIPE, 1),
    tensor=mesh.shape.get(meshes.TENSOR, 1),
    itemsize=replicas.compute,
    zero=replicas.zero,
  )
  return ahead.ProgramPlan(transfer_list, flops, temporary)


def peer_rounds(
  experiment: Any, run: Run, workers: int, target: Target
) -> Iterator[ahead.Compilation]:
  """Yields the different rounds of peers: those that send messages, and those
  that send nothing, also not between slices."""
  # A config of engine mesh has no sections of a server.
  defaults = schema.default_of(parameter_server.SECTIONS)
  run = run._replace(config={**defaults, **run.config})
  axes = peer_mesh.axes(run, workers)
  needed = peer_mesh.device_count(run, workers)
  if needed != len(target.devices):
    raise ValueError(
      f"config.workers {workers} on engine mesh need {needed} devices, and"
      f" {target.name} has {len(target.devices)}: use all of them"
    )
  plan = parameter_server.plan(experiment, run, workers, PeerPlan)
  mesh = meshes.make(axes, target.devices)
  rounds = peers.make_rounds(
    *(plan.gossip, plan.server, plan.worker, mesh), steps=plan.recipe.steps
  )
  key = _key_shape()
  params = jax.eval_shape(plan.problem.init, key)
  job_batch = _shapes(plan.job_batches(0)(0, 0))
  # A leading axis: one batch for each peer.
  batch = jax.tree.map(lambda x: x.update(shape=(workers, *x.shape)), job_batch)
  round_number = jax.ShapeDtypeStruct((), jnp.int32)
  arguments = (
    *(rounds.init(params), rounds.place(batch)),
    *meshes.place((key, round_number), mesh),
  )
  message_shape = peers.message_shapes(plan.peer, params)
  # Rounds repeat after this period, and equal phases share a program.
  exchange, compiled_phases = plan.gossip, set()
  for index in range(exchange.every * exchange.topology.period):
    phases = rounds.phases(index)
    if phases in compiled_phases:
      continue
    compiled_phases.add(phases)
    transfer_list = None
    if meshes.ISLAND not in axes:  # else no formula gives the traffic
      transfer_list = [*transfers.of_round(
        exchange, message_shape, mesh, meshes.DATA, phases
      )]
    # Phases: (put, take, messages).
    program_plan = ahead.ProgramPlan(transfer_list, crosses=phases[2])
    kind = "messages" if phases[2] else "local"
    name = f"{run.label}, round {index} ({kind})"
    yield ahead.Compilation(
      *(name, rounds.program, arguments, mesh, program_plan, (phases,))
    )
