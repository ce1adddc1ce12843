"""Schedules without a flush: a stage is updated as soon as it can be.

Their makers take the number of `microbatches` of the whole run, and of those of
an update, `every`.
"""

from collections.abc import Sequence

import numpy as np

from asgd.pipeline import analyze, discrepancy
from asgd.pipeline.schedules import layout
from asgd.pipeline.schedules.play import play
from asgd.pipeline.table import BACKWARD, FORWARD, Schedule, check_positive


@layout.traits(flush=False, partitioner="pipedream")
def pipedream(
  stages: int,
  microbatches: int,
  *,
  replicas: Sequence[int] | None = None,
  every: int = 1,
) -> Schedule:
  """PipeDream: 1F1B without a flush.

    in flight at a replica of s = ceil(devices from s on / replicas of s)
    with weights="stash", one replica, every=1, after the first microbatches:
    w^{t+1} = w^t - eta grad f(w_1^{(t-p+1)}, w_2^{(t-p+2)}, ..., w_p^{(t)})

  So stage s, counted from 0, is p - 1 - s updates late and holds p - s versions
  of its weights. For s = 0 the number in flight is the paper's NOAM. Replicas
  take microbatches in turn (1F1B-RR). Use it with weights="stash" or
  "vertical", which reads w^{(t-p+1)} at all stages.

  Args:
    stages: p.
    microbatches: the number of microbatches of the whole run.
    replicas: devices of each stage, numbered stage by stage; None is one of
      each.
    every: microbatches of an update.

  Returns:
    A valid Schedule without a flush.

  Raises:
    ValueError: for counts that do not fit each other.

  Source:
    Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN
    training", SOSP 2019.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> dream = schedules.pipedream(3, 4)
    >>> print(table.to_text(dream), end="")
    # pipedream; every 1
    0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    >>> facts = analyze.analyze(dream, weights="stash")
    >>> facts.weight_versions.tolist()
    [3, 2, 1]
    >>> facts.staleness.backward[:, -1].tolist()
    [2, 1, 0]
  """
  check_positive(stages=stages)
  layout.check_updates(microbatches, every)
  counts = [1] * stages if replicas is None else layout.listed(replicas, stages)
  if counts is None:
    raise ValueError(
      f"replicas must be {stages} numbers, one for each stage, not {replicas!r}"
    )
  for number in counts:
    check_positive(replicas=number)
  if microbatches < max(counts):
    raise ValueError(
      f"{microbatches} microbatches leave some of {max(counts)} replicas"
      f" without work; use {max(counts)} at least"
    )
  orders = []
  for stage, number in enumerate(counts):
    # In flight: one microbatch for each device from this stage on.
    depth = -(-sum(counts[stage:]) // number)
    for replica in range(number):
      microbatches_of = range(replica, microbatches, number)
      orders.append(layout.one_f_one_b_order(stage, microbatches_of, depth))
  return layout.valid("pipedream", orders, every)


@layout.traits(flush=False, weights="2bw", sums=True)
def pipedream_2bw(
  stages: int, microbatches: int, *, every: int | None = None
) -> Schedule:
  """PipeDream-2BW: sums of gradients, and two versions of the weights.

    w^{t+1} = w^t - eta grad f(w^{t-1}), at all stages

  The table is that of `pipedream`. A run with weights="2bw" reads w^{t-1}.

  Args:
    stages: p.
    microbatches: the number of microbatches of the whole run.
    every: microbatches of an update, p or more; None is p.

  Returns:
    A valid Schedule without a flush.

  Raises:
    ValueError: for counts that do not fit each other.

  Source:
    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML
    2021, arXiv:2006.09503.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> double = schedules.pipedream_2bw(2, 4)
    >>> print(table.to_text(double), end="")
    # pipedream_2bw; every 2
    0 | F0 F1 .  B0 F2 B1 F3 B2 .  B3
    1 | .  F0 B0 F1 B1 F2 B2 F3 B3 .
    >>> facts = analyze.analyze(double, weights="2bw")
    >>> facts.weight_versions.tolist(), facts.staleness.forward.tolist()
    ([2, 2], [[0, 0, 1, 1], [0, 0, 1, 1]])
  """
  every = stages if every is None else every
  check_positive(stages=stages, every=every)
  if every < stages:
    raise ValueError(
      f"2BW needs at least {stages} microbatches in an update, one for each"
      f" stage, not every={every}"
    )
  # Versions are no part of a table: a run with weights="2bw" reads them.
  table = pipedream(stages, microbatches, every=every)
  return table._replace(name="pipedream_2bw")


@layout.traits(flush=False, weights="latest")
def stale(stages: int, microbatches: int, *, every: int = 1) -> Schedule:
  """Pipelined backpropagation: a forward and a backward in each turn.

    staleness of the forward = 2 (p - 1 - s) turns at stage s, from 0

  A stage that can do both at once does so. With every=1 a turn is an update,
  and the delay is twice that of `pipedream`. Use it with weights="latest" (the
  paper's), or "stash".

  Args:
    stages, microbatches, every: as in `pipedream`.

  Returns:
    A valid Schedule without a flush.

  Raises:
    ValueError: for counts that do not fit each other.

  Source:
    Petrowski et al. 1993; Kosson et al., "Pipelined backpropagation at scale",
    MLSys 2021, arXiv:2003.11666.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> stale = schedules.stale(2, 4)
    >>> print(table.to_text(stale), end="")
    # stale; every 1
    0 | F0 F1 F2 B0 F3 B1 .  B2 .  B3
    1 | .  F0 B0 F1 B1 F2 B2 F3 B3 .
    >>> late = analyze.staleness(stale, "latest")
    >>> late.forward[:, -1].tolist(), late.backward[:, -1].tolist()
    ([2, 0], [0, 0])
  """
  check_positive(stages=stages)
  layout.check_updates(microbatches, every)
  # Stage s has 2 (p - 1 - s) + 1 forwards before its first backward.
  orders = layout.straight(range(1, 2 * stages, 2)[::-1], microbatches)
  return layout.valid("stale", orders, every)


@layout.traits(flush=False, weights="latest", corrected=True)
def pipemare(
  stages: int,
  microbatches: int,
  *,
  every: int = 1,
  anneal: int | None = None,
  decay: float = 0.135,
) -> Schedule:
  """PipeMare: the newest weights in the backward, and two cures for that.

    tau_fwd,i = (2 (P - i) + 1) / N,   tau_bkwd,i = 0
    T1: alpha_k,i = alpha_k / tau_i^p_k,   p_k = 1 - min(k / K, 1)
    T2: delta_t+1 = gamma_i delta_t + (1 - gamma_i) (w_t+1 - w_t),
        u_bkwd,t = w_t - tau_i delta_t,   gamma_i = D^(1 / tau_i)

  A stage i of 1 to P begins a forward in the slot of the backward before, so
  that tau is the mean number of updates between reading and the update. A run
  with weights="latest" has learning rates by T1. Its backwards read u_bkwd if
  the weights have changed since their forward (`discrepancy`). T1 raises no
  rate where tau is below 1. The paper's T3, a synchronous start, is left out.

  Args:
    stages: P.
    microbatches: the number of microbatches of the whole run.
    every: N, microbatches of an update.
    anneal: K, in updates; None is a quarter of the run's (this library's
      choice). The table does not depend on it.
    decay: D, in (0, 1); the default is this library's choice. The table does
      not depend on it.

  Returns:
    A valid Schedule without a flush.

  Raises:
    ValueError: for counts that do not fit each other.

  Source:
    Yang et al., "PipeMare: asynchronous pipeline parallel DNN training", MLSys
    2021, arXiv:1910.05124.

  Example:
    With N = 2 the delays are 3 / 2 and 1 / 2.

    >>> from asgd.pipeline import analyze, schedules
    >>> late = analyze.staleness(schedules.pipemare(2, 8, every=2), "latest")
    >>> late.forward[:, 4:].mean(1).tolist()
    [1.5, 0.5]
  """
  check_positive(stages=stages)
  updates = 1 if anneal is None else anneal
  discrepancy.cures(stages, every, updates, decay)  # checks the ranges
  layout.check_updates(microbatches, every)
  # Each stage has one forward more in flight than in `stale`.
  orders = layout.straight(range(2, 2 * stages + 1, 2)[::-1], microbatches)
  return layout.valid("pipemare", orders, every)


@layout.traits(
  flush=False,
  weights="latest",
  recompute="but_last",
  listed=True,
  partitioner="mixed_pipe",
)
def ftpipe(
  devices: Sequence[int],
  microbatches: int,
  *,
  stage_depth: Sequence[int] | None = None,
  supremum: int | None = None,
  every: int = 1,
  costs: analyze.Costs | None = None,
) -> Schedule:
  """FTPipe: asynchronous 1F1B with any stages on a device.

    stage s goes forward while forwards - backwards <= depth of s

  With a supremum of the staleness, the depth is min(p, supremum - 1) - 1 at the
  first stage of p, one less at each next stage, and not below 0.

  The stages of a device need not be neighbours. Among its stages with a ready
  task, a device chooses the one nearest to the end of the network, where fewer
  microbatches are in flight. With one stage on each device and no supremum this
  is the order of `pipedream`. A run stashes nothing, as in the paper: a
  backward reads the newest weights (weights="latest"), and all stages but the
  last compute their forward again with them (recompute="but_last").

  Args:
    devices: the device of each stage, such as (0, 1, 2, 0).
    microbatches: the number of microbatches of the whole run.
    stage_depth: distance of each stage s from the end; None is p - 1 - s.
    supremum: of the staleness. All depths are lowered by the same number, so
      that the first stage has at most supremum - 1 microbatches in flight; the
      released code takes the number of devices for "auto". None: no supremum.
    every: microbatches of an update.
    costs: the times of tasks, which decide the order of arrivals.

  Returns:
    A valid Schedule without a flush.

  Raises:
    ValueError: for counts, devices or depths that do not fit each other.

  Source:
    Eliad et al., "Fine-tuning giant neural networks on commodity hardware with
    automatic pipeline model parallelism", USENIX ATC 2021; `supremum` is from
    the schedule "virtual_stages_1f1b" of its released code.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> equal = analyze.costs(3, backward=1.0)  # a task takes a slot
    >>> mixed = schedules.ftpipe((0, 1, 0), 2, costs=equal)
    >>> print(table.to_text(mixed), end="")
    # ftpipe; every 1
    0 | F0@0 F1@0 F0@2 B0@2 F1@2 B1@2 B0@0 B1@0
    1 | .    F0@1 F1@1 .    B0@1 .    B1@1 .
    >>> eight = schedules.ftpipe(range(8), 12, supremum=4)
    >>> analyze.in_flight(eight).tolist()  # the depths, and 1
    [3, 2, 1, 1, 1, 1, 1, 1]
  """
  places = layout.places_of(devices, without_replicas="ftpipe")
  layout.check_updates(microbatches, every)
  count = len(places)
  depths = range(count)[::-1] if stage_depth is None else stage_depth
  depth = layout.listed(depths, count)
  if depth is None or not all(
    isinstance(d, (int, np.integer)) and d >= 0 for d in depth
  ):
    raise ValueError(
      f"stage_depth must be {count} whole numbers from 0, one for each stage,"
      f" not {stage_depth!r}"
    )
  if supremum is not None:
    check_positive(supremum=supremum)
    # At most supremum - 1 microbatches in flight at the deepest stage.
    deepest = max(depth) + 1
    reduction = deepest - min(deepest, supremum - 1)
    depth = [max(d - reduction, 0) for d in depth]
  costs = layout.costs_of(costs, count)
  stages_on = layout.stages_of(places)

  def rule(device, state):
    # Stages of a device come last stage first.
    for stage in stages_on[device]:
      if state.forward[stage] and state.in_flight[stage] <= depth[stage]:
        return FORWARD, stage, state.forward[stage][0]
      if state.backward[stage]:
        return BACKWARD, stage, state.backward[stage][0]
    return None

  orders = play(rule, places, microbatches, costs, every=every, flush=False)
  return layout.valid("ftpipe", orders, every)
