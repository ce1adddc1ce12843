"""Computes facts of a table: time, bubbles, memory, versions, staleness, bytes.

A table has the order of tasks, and `Costs` has their times. From both follow
the start and the end of every task, if each begins as soon as its inputs are
ready. Facts about weights (`versions`, `staleness`) need the order only.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asgd import base, checks
from asgd.pipeline import by_slot
from asgd.pipeline import spans as spans_lib
from asgd.pipeline import table as table_lib
from asgd.pipeline import validate as validate_lib
from asgd.pipeline.table import BACKWARD, FORWARD, KNOWN, WEIGHT, Schedule

WEIGHTS = ("latest", "stash", "2bw", "vertical")
_MAX_TIME = 1e30  # the largest time of a task


class Costs(NamedTuple):
  """Times of tasks, in seconds or any other unit."""

  forward: np.ndarray  # float[S]
  backward: np.ndarray  # float[S], of inputs and weights
  input: np.ndarray  # float[S]
  weight: np.ndarray  # float[S]
  transfer: np.ndarray  # float[S - 1], activations from stage s to s + 1
  transfer_back: np.ndarray  # float[S - 1], gradients from stage s + 1 to s
  overlap: float | None  # a block of forward and backward; None: their sum
  own: Mapping[str, float]  # action of the user -> time


Times = float | Sequence[float] | np.ndarray  # one, or one for each stage
COST_OF = dict(zip(KNOWN, Costs._fields[:4], strict=True))  # action -> field


def costs(
  stages: int,
  *,
  forward: Times = 1.0,
  backward: Times | None = None,
  input: Times = 1.0,  # noqa: A002 - the name of the action
  weight: Times = 1.0,
  transfer: Times = 0.0,
  transfer_back: Times | None = None,
  overlap: float | None = None,
  own: Mapping[str, float] | None = None,
) -> Costs:
  """Returns costs; a single number is the time of each stage.

  Args:
    stages: S.
    forward, input, weight: float or float[S].
    backward: float or float[S]; None: input + weight.
    transfer: float or float[S - 1], between stages on different devices.
    transfer_back: the same for gradients; None is `transfer`.
    overlap: time of a block of a forward and a backward; None: the sum of both.
    own: user's action -> time; user's actions without an entry take no time.

  Raises:
    ValueError: for times that are negative, not finite or of a wrong length.
  """

  def column(name, value, length):
    array = np.asarray(value, np.float64)
    if array.ndim > 1 or array.ndim == 1 and len(array) != length:
      raise ValueError(
        f"{name} must be a number or {length} of them, not of shape"
        f" {array.shape}"
      )
    if not (np.isfinite(array) & (array >= 0)).all():
      raise ValueError(f"{name} must be finite and not negative, not {value!r}")
    # Larger times could overflow in sums.
    if (array > _MAX_TIME).any():
      raise ValueError(f"{name} must be at most {_MAX_TIME:g}, not {value!r}")
    return np.broadcast_to(array, (length,))

  own = dict(own or {})
  for name, value in {"overlap": overlap, **own}.items():
    if name in KNOWN:
      raise ValueError(
        f"own={name!r} is no action of the user's own: give forward, backward,"
        " input or weight"
      )
    if value is not None:
      column(name, value, 0)
  if backward is None:
    backward = column("input", input, stages) + column("weight", weight, stages)
  gradient_transfer = transfer if transfer_back is None else transfer_back
  field_values = forward, backward, input, weight, transfer, gradient_transfer
  lengths = [stages] * 4 + [max(stages - 1, 0)] * 2
  return Costs(*map(column, Costs._fields, field_values, lengths), overlap, own)


def check_costs(cost: Costs, stages: int) -> None:
  """Raises ValueError for costs of another number of stages."""
  if len(cost.forward) != stages:
    raise ValueError(
      f"costs are of {len(cost.forward)} stages, and there are {stages}: make"
      f" them with analyze.costs({stages}, ...)"
    )


def measured_costs(
  schedule: Schedule, spans: Iterable[spans_lib.TaskSpan]
) -> Costs:
  """Returns costs: the median measured time of each action, for each stage and
  for the user's actions. Transfers take no time, and a block takes the sum of
  its tasks."""
  run = spans_lib.measured(schedule, spans)
  durations = run.end - run.start

  def median(mask):
    return float(np.median(durations[mask])) if mask.any() else 0.0

  def column(action):
    is_action = run.action == action
    return [
      median(is_action & (run.stage == s)) for s in range(schedule.stages)
    ]

  user_actions = sorted(set(run.action.tolist()) - set(KNOWN))
  return costs(
    schedule.stages,
    **{name: column(action) for action, name in COST_OF.items()},
    own={action: median(run.action == action) for action in user_actions},
  )


def times(schedule: Schedule, cost: Costs) -> spans_lib.Timing:
  """Returns when each task of a valid table runs, if each begins when it can.

  A transfer between devices takes time, but neither device is busy then. In a
  synchronous schedule a forward waits for the update of the batch before, at
  all replicas of its stage; the update itself takes no time.

  Raises:
    ValueError: for costs of another number of stages.
  """
  check_costs(cost, schedule.stages)
  durations = np.zeros(len(schedule.time))  # of tasks by themselves
  for action, name in COST_OF.items():
    is_action = schedule.action == action
    durations[is_action] = getattr(cost, name)[schedule.stage[is_action]]
  for action, value in cost.own.items():
    durations[schedule.action == action] = value
  inputs = _input_rows(schedule, cost)
  flush = schedule.flush and schedule.microbatches > schedule.every
  timing = by_slot.times(
    (schedule.time, schedule.device),
    durations,
    cost.overlap,
    inputs,
    _update_indices(schedule) if flush else None,
  )
  if timing is not None:
    return spans_lib.Timing(*timing)
  seconds = durations.tolist()
  return _times_by_row(schedule, cost.overlap, seconds, inputs, flush=flush)


def _update_indices(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
  """Returns two columns, int[T]: the update that a forward waits for, and the
  update that a backward counts for; -1 for none."""
  batch = schedule.microbatch // schedule.every
  update = schedule.stage * (batch.max() + 1) + batch
  waits_for_update = (schedule.action == FORWARD) & (batch > 0)
  is_gradient = np.isin(schedule.action, (BACKWARD, WEIGHT))
  awaited_update = np.where(waits_for_update, update - 1, -1)
  return awaited_update, np.where(is_gradient, update, -1)


def _times_by_row(
  schedule: Schedule,
  overlap: float | None,
  durations: Sequence[float],
  inputs: Sequence[np.ndarray],
  *,
  flush: bool,
) -> spans_lib.Timing:
  """Does what `times` does, row by row: faster for tables of few devices."""
  count, every = len(durations), schedule.every
  local_inputs, remote_inputs, transfers = inputs
  update_times: dict[tuple[int, int], float] = collections.defaultdict(float)
  columns = (
    c.tolist() for c in (*schedule[1:6], local_inputs, remote_inputs, transfers)
  )
  free_at = [0.0] * schedule.devices
  start, end = [0.0] * count, [0.0] * count
  previous_cell = (-1, -1)
  # A task waits for its device, its inputs and, with flushes, an update.
  for row, task in enumerate(zip(*columns, strict=True)):
    slot, device, stage, batch, action, local_input, remote_input, transfer = (
      task
    )
    is_second = previous_cell == (device, slot)
    previous_cell = device, slot
    task_start = start[row - 1] if is_second else free_at[device]
    if local_input >= 0 and end[local_input] > task_start:
      task_start = end[local_input]
    if remote_input >= 0 and end[remote_input] + transfer > task_start:
      task_start = end[remote_input] + transfer
    if flush and action == FORWARD and batch >= every:
      task_start = max(task_start, update_times[stage, batch // every - 1])
    start[row] = task_start
    end[row] = free_at[device] = task_start + durations[row]
    # The second task of a block sets the end of both, as they overlap.
    if is_second:
      duration = durations[row - 1] + durations[row]
      finish = task_start + (duration if overlap is None else overlap)
      start[row - 1] = task_start
      end[row] = end[row - 1] = free_at[device] = finish
    if flush and action in (BACKWARD, WEIGHT):
      key = stage, batch // every
      update_times[key] = max(update_times[key], end[row])
  return spans_lib.Timing(np.array(start), np.array(end))


def _input_rows(schedule: Schedule, cost: Costs) -> tuple[np.ndarray, ...]:
  """Returns three columns. Two, int[T], have the rows that each row needs, -1
  for none: one on the same device, and one perhaps on another device. The third
  column, float[T], has the time of the transfer from that other device."""
  table_rows, device = validate_lib.rows(schedule), schedule.device
  local_inputs, remote_inputs = np.full((2, len(device)), -1, np.int64)
  delay = np.zeros(len(device))

  def add_inputs(column, reader_rows, input_rows, transfer=0.0):
    transfer = np.broadcast_to(transfer, reader_rows.shape)
    exists = (reader_rows >= 0) & (input_rows >= 0)
    reader_rows, input_rows = reader_rows[exists], input_rows[exists]
    column[reader_rows] = input_rows
    is_remote = device[reader_rows] != device[input_rows]
    delay[reader_rows[is_remote]] = transfer[exists][is_remote]

  forward, backward, weight = table_rows
  add_inputs(remote_inputs, forward[1:], forward[:-1], cost.transfer[:, None])
  add_inputs(local_inputs, backward, forward)
  add_inputs(
    remote_inputs, backward[:-1], backward[1:], cost.transfer_back[:, None]
  )
  add_inputs(local_inputs, np.where(weight == backward, -1, weight), backward)
  return local_inputs, remote_inputs, delay


def update_order(schedule: Schedule) -> np.ndarray:
  """Returns int[S, M]: the microbatches of each stage in the order in which it
  learns from them. In one slot, the replica on the first device comes first."""
  rows = validate_lib.rows(schedule).weight
  return np.lexsort((schedule.device[rows], schedule.time[rows]))


def updates_done(schedule: Schedule) -> np.ndarray:
  """Returns int[S, U]: the slot in which a stage makes each of its updates."""
  slots = np.sort(schedule.time[validate_lib.rows(schedule).weight], axis=1)
  return slots[:, schedule.every - 1 :: schedule.every]


class Versions(NamedTuple):
  """The versions of weights in a run; a version is a number of updates."""

  forward: np.ndarray  # int[S, M], those that the forward reads
  backward: np.ndarray  # int[S, M], those that the backward reads
  update: np.ndarray  # int[S, M], those that the gradient is added to


class Staleness(NamedTuple):
  """Updates between reading weights and adding a gradient to them."""

  forward: np.ndarray  # int[S, M]
  backward: np.ndarray  # int[S, M]


def versions(schedule: Schedule, weights: str = "stash") -> Versions:
  """Returns the versions that a valid table's tasks read.

  A stage is updated when `schedule.every` of its microbatches are done.

  Args:
    schedule: the table.
    weights: "latest" reads the newest, in the forward and in the backward;
      "stash" reads the forward's in the backward, too (PipeDream); "2bw" reads
      the version before the last, the same for all of a batch (PipeDream-2BW);
      "vertical" reads at all stages the version of the first stage's forward
      (PipeDream's vertical sync).

  Raises:
    ValueError: for other weights.
    ScheduleError: if a version is read before it is made: 2BW needs at least as
      many microbatches in an update as there are stages.
  """
  checks.one_of("weights", weights, WEIGHTS)
  table_rows = validate_lib.rows(schedule)
  shape = schedule.stages, schedule.microbatches
  if (table_rows.weight < 0).any():
    return Versions(*np.zeros((3, *shape), np.int64))
  forward, backward, update = np.empty((3, *shape), np.int64)
  # The version at a slot: the stage's gradients before it, over `every`.
  gradient_slots = np.sort(schedule.time[table_rows.weight], axis=1)
  update_index = np.broadcast_to(np.arange(shape[1]) // schedule.every, shape)
  np.put_along_axis(update, update_order(schedule), update_index, 1)
  forwards, backwards, _ = table_rows
  for rows, version_of in ((forwards, forward), (backwards, backward)):
    for stage, slots in enumerate(schedule.time[rows]):
      gradients = np.searchsorted(gradient_slots[stage], slots)
      version_of[stage] = gradients // schedule.every
  latest = forward
  if weights == "stash":
    backward = forward
  elif weights == "2bw":
    forward = backward = np.maximum(update - 1, 0)
  elif weights == "vertical":
    forward = backward = np.broadcast_to(latest[:1], shape)
  for stage, microbatch in np.argwhere(forward > latest):
    raise table_lib.ScheduleError(
      f"{schedule.name}: stage {stage} needs version"
      f" {forward[stage, microbatch]} for microbatch {microbatch} and has made"
      f" {latest[stage, microbatch]}: weights={weights!r} needs more"
      f" microbatches in an update (every={schedule.every}, {shape[0]} stages)"
    )
  return Versions(forward, backward, update)


def staleness(schedule: Schedule, weights: str = "stash") -> Staleness:
  """Returns the age of the weights read, in updates, when their gradient is
  added."""
  versions_read = versions(schedule, weights)
  return Staleness(
    versions_read.update - versions_read.forward,
    versions_read.update - versions_read.backward,
  )


def in_flight(schedule: Schedule, weights: str = "stash") -> np.ndarray:
  """Returns int[S]: the most updates that are in flight at each stage at once,
  from the reading of weights to the update itself.

  A stage's server treats them as workers: DANA's N.

  Raises:
    ValueError: as `versions`.

  Example:
    >>> from asgd.pipeline import analyze, schedules
    >>> analyze.in_flight(schedules.pipedream(3, 8)).tolist()
    [3, 2, 1]
  """
  return staleness(schedule, weights).forward.max(1) + 1


def weight_versions(schedule: Schedule, weights: str = "stash") -> np.ndarray:
  """Returns int[S]: the most versions of its weights that a stage holds at
  once, the newest included."""
  versions_read = versions(schedule, weights)
  table_rows = validate_lib.rows(schedule)
  version_counts = np.ones(schedule.stages, np.int64)
  if weights == "latest" or (table_rows.weight < 0).any():
    return version_counts
  update_slots = updates_done(schedule)  # when a version is replaced
  for stage, gradient_slots in enumerate(schedule.time[table_rows.weight]):
    # A version that is read after its replacement is stored until that read.
    last_reads = np.zeros(update_slots.shape[1] + 1, np.int64)
    np.maximum.at(last_reads, versions_read.forward[stage], gradient_slots)
    is_stashed = last_reads[:-1] > update_slots[stage]
    change = np.zeros(schedule.slots + 1, np.int64)
    np.add.at(change, update_slots[stage, is_stashed] + 1, 1)
    np.add.at(change, last_reads[:-1][is_stashed] + 1, -1)
    version_counts[stage] += change.cumsum().max()
  return version_counts


def traces(schedule: Schedule, weights: str = "stash") -> list[base.Trace]:
  """Returns the order of sends and receives at each stage, for the simulator.

  `asgd.simulator.run_sharded` replays them on the complete model, with the
  stages as the shards of its server. The result is that of a pipeline that
  stashes weights. A microbatch is a job of one worker, and the microbatch's
  index names its message at every stage.

  Raises:
    ValueError: as `versions`; for a table without backward; for weights that
      change between forward and backward, as the result is not a gradient.
  """
  if weights == "latest" and not schedule.flush:
    raise ValueError(
      "weights='latest' differ between forward and backward: no ticket holds"
      " both; use 'stash', '2bw' or 'vertical'"
    )
  versions_read = versions(schedule, weights)
  table_rows = validate_lib.rows(schedule)
  if (table_rows.weight < 0).any():
    raise ValueError(
      f"{schedule.name} has no backward, so servers receive nothing: add"
      " backwards"
    )
  stage_traces = []
  for stage, order in enumerate(update_order(schedule).tolist()):
    sends = collections.defaultdict(list)
    # A worker is sent version v right before the first gradient of update v.
    for job, version in enumerate(versions_read.forward[stage].tolist()):
      sends[version].append(job)
    events = []
    for gradient_index, job in enumerate(order):
      if gradient_index % schedule.every == 0:
        events += [
          (j, base.SEND) for j in sends[gradient_index // schedule.every]
        ]
      events.append((job, base.RECEIVE))
    jobs, actions = np.array(events, np.int32).T
    time, worker = np.arange(len(jobs), dtype=np.float64), np.zeros_like(jobs)
    actions = actions.astype(np.int8)
    stage_traces.append(base.Trace(time, worker, jobs, jobs, actions))
  return stage_traces


class Analysis(NamedTuple):
  """Costs of a table; p are devices and m are microbatches."""

  makespan: float
  busy: np.ndarray  # float[D]
  bubble_of_total: float  # idle / (D x makespan): (p - 1) / (m + p - 1)
  bubble_of_ideal: float  # idle / busy: (p - 1) / m
  idle: np.ndarray  # float[D], makespan - busy
  peak_activations: np.ndarray  # float[D], in stage-microbatches or bytes
  weight_versions: np.ndarray  # int[S]
  staleness: Staleness
  sent: np.ndarray  # float[D], transfers by the device, or bytes
  timing: spans_lib.Timing


def analyze(
  schedule: Schedule,
  cost: Costs | None = None,
  *,
  weights: str | None = None,
  activation: Times = 1.0,
  boundary: Times = 1.0,
) -> Analysis:
  """Returns the costs of a valid table.

  Args:
    schedule: the table.
    cost: None is 1 for F, I and W, 2 for B, and 0 for transfers.
    weights: as in `versions`; None is "latest" for a synchronous schedule and
      "stash" for another.
    activation: float or float[S], the size of a stage's activations for one
      microbatch, from its forward to the end of its weights' gradient.
    boundary: float or float[S - 1], the size of a transfer from stage s to
      s + 1, and back.

  Raises:
    ValueError: as `versions` and `times`.
  """
  cost = costs(schedule.stages) if cost is None else cost
  weights = weights or ("latest" if schedule.flush else "stash")
  timing = times(schedule, cost)
  run = spans_lib.planned(schedule, timing)
  bubbles = spans_lib.idle(run, schedule.devices)
  sent_sizes = np.zeros(schedule.devices)
  # Transfers are charged to the device that sends.
  size = np.broadcast_to(np.asarray(boundary, float), (schedule.stages - 1,))
  pairs = validate_lib.transfers(schedule, validate_lib.rows(schedule))
  pair_stage = schedule.stage[pairs].min(1)
  np.add.at(sent_sizes, schedule.device[pairs[:, 0]], size[pair_stage])
  return Analysis(
    makespan=bubbles.makespan,
    busy=bubbles.busy,
    bubble_of_total=bubbles.of_total,
    bubble_of_ideal=bubbles.of_ideal,
    idle=bubbles.idle,
    peak_activations=_peaks(schedule, timing, activation),
    weight_versions=weight_versions(schedule, weights),
    staleness=staleness(schedule, weights),
    sent=sent_sizes,
    timing=timing,
  )


def _peaks(
  schedule: Schedule, timing: spans_lib.Timing, activation: Times
) -> np.ndarray:
  """Returns float[D]: the largest sum of activations on each device."""
  is_forward = schedule.action == FORWARD
  is_freed = np.isin(schedule.action, (BACKWARD, WEIGHT))
  peaks = np.zeros(schedule.devices)
  if not is_freed.any():
    return peaks
  size = np.asarray(activation, float)
  size = np.broadcast_to(size, (schedule.stages,))[schedule.stage]
  change = size * (1.0 * is_forward - is_freed)
  change_time = np.where(is_forward, timing.start, timing.end)
  # At the same time, memory is freed first.
  order = np.lexsort((change, change_time, schedule.device))
  for d, device_rows in enumerate(schedule.rows_of_devices(order)):
    peaks[d] = np.cumsum(change[device_rows]).max(initial=0.0)
  return peaks
