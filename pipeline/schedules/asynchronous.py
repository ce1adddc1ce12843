"""Schedules without a flush: a stage is updated as soon as it can be.

Their makers take the number of all `microbatches`; `every` so many make an
update.
"""

from collections.abc import Sequence

import numpy as np

from pipeline import analyze
from pipeline.schedules import layout
from pipeline.schedules.play import play
from pipeline.table import BACKWARD, FORWARD, Schedule, check_positive


@layout.traits(flush=False, partitioner="pipedream", placed="replicas")
def pipedream(
  stages: int,
  microbatches: int,
  *,
  replicas: Sequence[int] | None = None,
  every: int = 1,
) -> Schedule:
  """1F1B without a flush (PipeDream, Narayanan et al. 2019).

  Stage s has as many microbatches in flight on each of its replicas as keep
  those behind it busy: ceil(devices from s to the end / replicas of s); for
  s = 0 that is the paper's NOAM. `replicas` are the devices of each stage,
  numbered stage by stage, one by default, which take microbatches in turn
  (1F1B-RR). Use it with weights="stash" or "vertical".
  """
  check_positive(stages=stages)
  layout.check_updates(microbatches, every)
  given = replicas
  replicas = [1] * stages if given is None else layout.listed(given, stages)
  if replicas is None:
    raise ValueError(
      f"replicas must be {stages} numbers, one for each stage, not {given!r}"
    )
  for number in replicas:
    check_positive(replicas=number)
  if microbatches < max(replicas):
    raise ValueError(
      f"{microbatches} microbatches leave some of {max(replicas)} replicas"
      f" without work; use {max(replicas)} at least"
    )
  orders = []
  for stage, number in enumerate(replicas):
    depth = -(-sum(replicas[stage:]) // number)
    for replica in range(number):
      own = range(replica, microbatches, number)
      orders.append(layout.one_f_one_b_order(stage, own, depth))
  return layout.valid("pipedream", orders, every)


@layout.traits(flush=False, weights="2bw", sums=True)
def pipedream_2bw(
  stages: int, microbatches: int, *, every: int | None = None
) -> Schedule:
  """PipeDream with gradients summed (PipeDream-2BW, Narayanan et al. 2021).

  The table of `pipedream`; the two versions of the weights are a matter of
  weights="2bw". An update has as many microbatches as stages, or more.
  """
  every = stages if every is None else every
  check_positive(stages=stages, every=every)
  if every < stages:
    raise ValueError(
      f"2BW needs at least {stages} microbatches in an update, one for each"
      f" stage, not every={every}"
    )
  table = pipedream(stages, microbatches, every=every)
  return table._replace(name="pipedream_2bw")


@layout.traits(flush=False, weights="latest")
def stale(stages: int, microbatches: int, *, every: int = 1) -> Schedule:
  """Pipelined backpropagation (Petrowski et al. 1993; Kosson et al. 2021).

  Every stage does a forward and a backward in each turn, as stages do that can
  work on both at once. So 2 (p - 1 - s) turns lie between those of a
  microbatch, and as many updates if every=1: twice the delay of `pipedream`.
  Use it with weights="latest" (the paper's), or "stash".
  """
  check_positive(stages=stages)
  layout.check_updates(microbatches, every)
  orders = layout.straight(range(1, 2 * stages, 2)[::-1], microbatches)
  return layout.valid("stale", orders, every)


@layout.traits(flush=False, weights="latest")
def pipemare(stages: int, microbatches: int, *, every: int = 1) -> Schedule:
  """PipeMare (Yang et al. 2021): the table of `stale`.

  With every=N and stages numbered from 1, a forward is (2 (P - i) + 1) / N
  updates older than the result of its own, on average. Use it with
  weights="latest"; its learning rates and its correction of the discrepancy
  between forward and backward are transforms.
  """
  return stale(stages, microbatches, every=every)._replace(name="pipemare")


@layout.traits(
  flush=False, listed=True, partitioner="mixed_pipe", placed="devices"
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
  """Asynchronous 1F1B with several stages on a device, which need not be
  neighbours (FTPipe, Eliad et al. 2021).

  A stage goes forward while forwards - backwards <= its depth. Among its stages
  that may do something a device takes the one nearest to the end of the
  network, as there is less in flight. With one stage on each device this is
  the order of `pipedream`.

  Args:
    devices: the device of each stage, such as (0, 1, 2, 0).
    stage_depth: of each stage, from the end; None is p - 1 - s.
    supremum: microbatches in flight at a stage, at most, whatever its depth
      (FTPipe's virtual stages, where it is the number of devices).
    costs: how long tasks take, which decides what is there first.
  """
  places = layout.places_of(devices, without_replicas="ftpipe")
  layout.check_updates(microbatches, every)
  count = len(places)
  given = range(count)[::-1] if stage_depth is None else stage_depth
  depth = layout.listed(given, count)
  if depth is None or not all(
    isinstance(d, (int, np.integer)) and d >= 0 for d in depth
  ):
    raise ValueError(
      f"stage_depth must be {count} whole numbers from 0, one for each stage,"
      f" not {stage_depth!r}"
    )
  if supremum is not None:
    check_positive(supremum=supremum)
    depth = [min(d, supremum - 1) for d in depth]
  costs = layout.costs_of(costs, count)
  own = layout.stages_of(places)

  def rule(device, state):
    for stage in own[device]:
      if state.forward[stage] and state.in_flight[stage] <= depth[stage]:
        return FORWARD, stage, state.forward[stage][0]
      if state.backward[stage]:
        return BACKWARD, stage, state.backward[stage][0]
    return None

  played = play(rule, places, microbatches, costs, every=every, flush=False)
  return layout.valid("ftpipe", played.orders, every)
