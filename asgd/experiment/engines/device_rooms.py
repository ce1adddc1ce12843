"""The section `memory` of a config: devices of workers hold only a part of the
model at a time (`asgd.layer_worker`)."""

from collections.abc import Mapping
from typing import Any

import jax

from asgd import algorithms, base, layer_worker, problems
from asgd.experiment import checks, refusals
from asgd.experiment.engines import Column, allocations
from asgd.experiment.schema import Run, Setting

SECTION: dict[str, Any] = {
  # MB of a model's blocks that a worker's device holds; None: no limit.
  "device_megabytes": Setting(None, checks.optional(checks.positive)),
}
KEY = "memory.device_megabytes"

# Columns of tables with a cell that has such workers.
COLUMNS = (
  Column("MB fetched", "worker_fetched_bytes", 1e-6),
  Column("written", "worker_written_bytes", 1e-6),
  Column("held", "worker_peak_bytes", 1e-6),
)


def of_run(run: Run) -> int | None:
  """Returns the bytes that a worker's device may hold; None: no limit."""
  megabytes = run.config["memory"]["device_megabytes"]
  return None if megabytes is None else max(round(megabytes * 1e6), 1)


def worker_of(
  run: Run, recipe: algorithms.Recipe, problem: problems.Problem
) -> base.Worker | None:
  """Returns the worker of a run with a limit of device memory; None if there is
  no limit.

  Raises:
    ValueError: for a model that cannot be cut, and for settings that need all
      parameters, or a complete message, on the device at once.
  """
  room = of_run(run)
  if room is None:
    return None
  live = run.config.get("live", {"devices": 1})
  reasons = {
    "the model or the loss is not made of layers": problem.pieces is None,
    f"the workers of {refusals.recipe_text(run)} do more than compute a"
    " gradient": recipe.worker is not None or recipe.steps > 1,
    f"{refusals.recipe_text(run)} keeps a state of all parameters at the"
    " worker": recipe.at_worker is not None,
    "config.compress codes a complete message on the device": (
      run.config["compress"] is not None
    ),
    "config.allocation.batch_size changes the bytes of a job": (
      allocations.changes_batches(run)
    ),
    f"config.live.devices {live['devices']} divide the work of a worker": (
      live["devices"] > 1
    ),
  }
  for reason, applies in reasons.items():
    if applies:
      raise ValueError(f"config.{KEY} is refused: {reason}; leave one out")
  assert problem.pieces is not None, "the first reason refuses it"
  return layer_worker.layer_worker(problem.pieces, room)


def check(plan: Any) -> None:
  """Raises ValueError if jobs of a plan keep tickets, or if one layer does not
  fit into the room."""
  if of_run(plan.run) is None:
    return
  if plan.keeps:
    raise ValueError(
      f"config.{KEY} is refused: a job on a kept ticket updates all parameters"
      " on the device; leave it out, or the order's cache and fetch_every"
    )
  with checks.prefix_errors(KEY):
    columns(plan, 0)


def describe(result: Mapping[str, Any]) -> str:
  """Returns the bytes of a cell in a few words; "" without the key."""
  if "worker_peak_bytes" not in result:
    return ""
  names = "fetched", "written", "peak"
  sizes = (result[f"worker_{name}_bytes"] / 1e6 for name in names)
  return ", {:.3g} MB fetched, {:.3g} written, {:.3g} held".format(*sizes)


def columns(plan: Any, jobs: int) -> dict[str, int]:
  """Returns the columns of a result: bytes that the jobs of all workers moved
  between host and device, and the most that a device held. They follow from
  the plan. Without the key there are none."""
  room = of_run(plan.run)
  if room is None:
    return {}
  params = jax.eval_shape(plan.problem.init, jax.random.key(0))
  job = layer_worker.plan_job(
    plan.problem.pieces, params, plan.job_batches(0)(0, 0)
  )
  traffic = job.traffic(room)
  return {
    "worker_fetched_bytes": jobs * traffic.fetched,
    "worker_written_bytes": jobs * traffic.written,
    "worker_peak_bytes": traffic.peak,
  }
