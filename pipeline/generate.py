"""Makes the tables of the literature, each from the rule that a device obeys.

Most are orders written down per device: 1F1B is so many forwards and then one
backward and one forward in turn. Where the best order depends on how long
things take, a rule is asked in simulated time what a device does next; what it
answers becomes the order. Rules of one's own go the same way (`custom`).

  # gpipe, 3 stages, 3 microbatches      # one_f_one_b
  0 | F0 F1 F2 .  .  .  .  B0 B1 B2      0 | F0 F1 F2 .  .  B0 .  B1 .  B2
  1 | .  F0 F1 F2 .  .  B0 B1 B2 .       1 | .  F0 F1 .  B0 F2 B1 .  B2 .
  2 | .  .  F0 F1 F2 B0 B1 B2 .  .       2 | .  .  F0 B0 F1 B1 F2 B2 .  .

Each is a function of this module and an entry of `SCHEDULES`. Synchronous ones
take `batches`, of `microbatches` each, with a flush between them.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from asgd import names
from pipeline import analyze, validate
from pipeline import schedule as schedule_lib
from pipeline.schedule import (
  BACKWARD,
  FORWARD,
  INPUT,
  KNOWN,
  WEIGHT,
  Schedule,
  ScheduleError,
  Step,
)

_MOST = 10**7  # forwards of a table that `build` makes
_NOT_THERE = -1  # a microbatch
Orders = list[list[Step | tuple[Step, Step]]]  # of each device


def _check_positive(name: str, value: int) -> None:
  integral = isinstance(value, (int, np.integer))
  if isinstance(value, bool) or not integral or value < 1:
    raise ValueError(f"{name} must be a positive whole number, not {value!r}")


def _check_bool(name: str, value: bool) -> None:
  if not isinstance(value, (bool, np.bool_)):
    raise ValueError(f"{name} must be True or False, not {value!r}")


def _list(value) -> list | None:
  """A list of what is one thing after the other, and no text; else None."""
  try:
    return None if isinstance(value, (str, bytes)) else list(value)
  except TypeError:
    return None


def _check_even(name: str, value: int) -> None:
  if value % 2:
    raise ValueError(
      f"{name} must be even, because half of them go each way, not {value};"
      f" use {value + 1}"
    )


def _check_updates(microbatches: int, every: int) -> None:
  _check_positive("microbatches", microbatches)
  _check_positive("every", every)
  if microbatches % every:
    below = microbatches - microbatches % every
    remedy = f"{below} or {below + every}" if below else str(every)
    raise ValueError(
      f"{microbatches} microbatches are not a whole number of updates of"
      f" {every}; use {remedy}"
    )


def _synchronous(
  name: str, orders: Orders, microbatches: int, batches: int, limit=None
) -> Schedule:
  """The table of a batch's orders, done once for each batch."""
  _check_positive("batches", batches)

  def later(block, by):
    if not isinstance(block[0], str):
      return tuple(later(step, by) for step in block)
    return block[0], block[1], block[2] + by

  if batches > 1:
    starts = range(0, batches * microbatches, microbatches)
    orders = [
      [later(block, start) for start in starts for block in order]
      for order in orders
    ]
  table = schedule_lib.lay_out(name, orders, every=microbatches, flush=True)
  return validate.validate(table, max_in_flight=limit)


# Synchronous schedules.


def gpipe(
  stages: int, microbatches: int, *, batches: int = 1, reverse: bool = False
) -> Schedule:
  """All forwards, then all backwards (GPipe, Huang et al. 2019).

  Args:
    stages: one on each device.
    microbatches: of a batch.
    batches: how many.
    reverse: backwards start with the last microbatch, as in the paper's figure
      2c and as autograd does; it takes as long.
  """
  _check_positive("stages", stages)
  _check_positive("microbatches", microbatches)
  _check_bool("reverse", reverse)
  step = -1 if reverse else 1
  orders = [
    [(FORWARD, stage, i) for i in range(microbatches)]
    + [(BACKWARD, stage, i) for i in range(microbatches)[::step]]
    for stage in range(stages)
  ]
  return _synchronous("gpipe", orders, microbatches, batches)


def _alternate(
  forwards: Sequence[Step], backwards: Sequence[Step], depth: int
) -> list[Step]:
  """Forwards until `depth` are in flight, then one backward, one forward."""
  first = min(depth - 1, len(forwards))
  pairs = zip(forwards[first:], backwards, strict=False)
  return [
    *forwards[:first],
    *itertools.chain.from_iterable(pairs),
    *backwards[len(forwards) - first :],
  ]


def _one_f_one_b(stage, microbatches, depth, backward=BACKWARD):
  return _alternate(
    [(FORWARD, stage, i) for i in microbatches],
    [(backward, stage, i) for i in microbatches],
    depth,
  )


def one_f_one_b(
  stages: int, microbatches: int, *, batches: int = 1
) -> Schedule:
  """One forward, one backward, then a flush (DAPPLE, Fan et al. 2021;
  PipeDream-Flush, Narayanan et al. 2021).

  As long as `gpipe`, but stage s holds p - s microbatches at most.
  """
  _check_positive("stages", stages)
  _check_positive("microbatches", microbatches)
  orders = [
    _one_f_one_b(stage, range(microbatches), stages - stage)
    for stage in range(stages)
  ]
  return _synchronous("one_f_one_b", orders, microbatches, batches)


def interleaved(
  devices: int,
  chunks: int,
  microbatches: int,
  *,
  group: int | None = None,
  batches: int = 1,
) -> Schedule:
  """1F1B with several stages on a device (Narayanan et al. 2021, Megatron-LM).

  Stage s is on device s % devices. A device takes `group` microbatches through
  its first stage, then through its second, and so on. Groups smaller than
  `devices`, also a last one, can be run, but wait.

  Args:
    devices: p.
    chunks: stages on each device, v.
    microbatches: of a batch; the last group is smaller if they do not divide.
    group: microbatches of a group; None is as many as devices.
    batches: how many.
  """
  _check_positive("devices", devices)
  _check_positive("chunks", chunks)
  _check_positive("microbatches", microbatches)
  group = devices if group is None else group
  _check_positive("group", group)
  # Short groups can deadlock, and Megatron-LM refuses them. So they are filled
  # up to `devices` with microbatches that are left out at last: orders that can
  # be run can be run with fewer microbatches.
  turns, widths = [], []
  for start in range(0, microbatches, group):
    count = min(group, microbatches - start)
    widths.append(count if chunks == 1 else max(count, devices))
    own = [start + i if i < count else _NOT_THERE for i in range(widths[-1])]
    turns += itertools.product(range(chunks), own)
  orders = []
  for device in range(devices):
    forwards = [(FORWARD, c * devices + device, i) for c, i in turns]
    backwards = [
      (BACKWARD, (chunks - 1 - c) * devices + device, i) for c, i in turns
    ]
    # The last device begins to alternate when the group is at its last stage;
    # each device before it is one step earlier on the way there and back.
    depth = 1 + (chunks - 1) * widths[0]
    depth += (1 if chunks == 1 else 2) * (devices - 1 - device)
    steps = _alternate(forwards, backwards, depth)
    orders.append([step for step in steps if step[2] != _NOT_THERE])
  return _synchronous("interleaved", orders, microbatches, batches)


def breadth_first(
  devices: int, chunks: int, microbatches: int, *, batches: int = 1
) -> Schedule:
  """All microbatches through a stage before the next one of the device, forward
  and back (Lamy-Poirier 2022).

  Stage s is on device s % devices: `gpipe` in loops.
  """
  _check_positive("devices", devices)
  _check_positive("chunks", chunks)
  _check_positive("microbatches", microbatches)
  orders = []
  for device in range(devices):
    own = range(device, devices * chunks, devices)
    forwards = itertools.product([FORWARD], own, range(microbatches))
    backwards = itertools.product([BACKWARD], own[::-1], range(microbatches))
    orders.append([*forwards, *backwards])
  return _synchronous("breadth_first", orders, microbatches, batches)


def chimera(stages: int, microbatches: int, *, batches: int = 1) -> Schedule:
  """Two pipelines in opposite directions (Li and Hoefler 2021).

  Stage s is on device s for the first half of a batch's microbatches, and on
  device p - 1 - s for the second. Units of p microbatches follow each other
  ("direct concatenation"): the forwards of a unit fill what the backwards of
  the one before leave idle. Forward doubling and backward halving need tasks of
  two or half a microbatch, which no table has.

  Args:
    stages: p, even.
    microbatches: of a batch; of an odd number, one more goes down than up.
    batches: how many.

  Raises:
    ValueError: for an odd number of stages.
  """
  _check_positive("stages", stages)
  _check_even("stages", stages)
  _check_positive("microbatches", microbatches)
  down = (microbatches + 1) // 2
  half = stages // 2
  orders = []
  for device in range(stages):
    tasks = []
    for i in range(microbatches):
      number = i if i < down else i - down
      stage = device if i < down else stages - 1 - device
      # Slots if all tasks take one: those of the two directions never meet.
      start = 2 * stages * (number // half) + 2 * (number % half)
      tasks.append((start + stage, FORWARD, stage, i))
      tasks.append((start + 2 * stages - 1 - stage, BACKWARD, stage, i))
    orders.append([task[1:] for task in sorted(tasks)])
  return _synchronous("chimera", orders, microbatches, batches)


def _dualpipe(own, rank, ranks, microbatches):
  """The order of a device in DualPipe's eight steps.

  Args:
    own: its two stages, in the order of the directions.
    rank: its distance from the nearer end, where its first direction starts.
    ranks: how many distances there are.
    microbatches: of each direction.
  """
  order, waiting = [], collections.deque()
  forwards = [iter(microbatches[0]), iter(microbatches[1])]
  backwards = [iter(microbatches[0]), iter(microbatches[1])]

  def forward(way):
    return FORWARD, own[way], next(forwards[way])

  def backward(way, split=False):
    microbatch = next(backwards[way])
    if split:
      waiting.append((WEIGHT, own[way], microbatch))
    return INPUT if split else BACKWARD, own[way], microbatch

  ahead = ranks - 1 - rank
  for _ in range(2 * ahead):
    order.append(forward(0))
  for _ in range(rank + 1):
    order += [forward(0), forward(1)]
  for _ in range(ahead):
    order += [backward(1, split=True), waiting.popleft(), forward(1)]
  for turn in range(len(microbatches[0]) - 2 * ranks + rank + 1):
    pair = forward(0), backward(1)
    # DeepSeek does not overlap the first ones in the middle: each is wanted
    # next door as soon as can be.
    order += pair if turn == 0 and ahead == 0 else [pair]
    order.append((forward(1), backward(0)))
  for _ in range(ahead):
    order += [backward(1), (forward(1), backward(0))]
  for turn in range(2 * (rank + 1)):
    order.append(backward(1 - turn % 2, split=turn > rank))
  for _ in range(ahead):
    order += [waiting.popleft(), backward(0, split=True)]
  return order + list(waiting)


def dualpipe(stages: int, microbatches: int, *, batches: int = 1) -> Schedule:
  """Two directions whose forwards and backwards overlap (DeepSeek-V3, 2024).

  Stage s is on device s for the first half of a batch's microbatches, and on
  device p - 1 - s for the second. A forward of one direction and a backward of
  the other are one block; where there is nothing to overlap with, backwards are
  split and their weights done later.

  Args:
    stages: p, even.
    microbatches: of a batch, even, and 2 p at least.
    batches: how many.

  Raises:
    ValueError: for other numbers.
  """
  _check_positive("stages", stages)
  _check_even("stages", stages)
  _check_positive("microbatches", microbatches)
  _check_even("microbatches", microbatches)
  if microbatches < 2 * stages:
    raise ValueError(
      f"dualpipe needs {2 * stages} microbatches for {stages} stages, not"
      f" {microbatches}; use more, or chimera"
    )
  half = range(microbatches // 2), range(microbatches // 2, microbatches)
  orders = []
  for device in range(stages):
    other = stages - 1 - device
    near = device < other  # to the end where the first direction starts
    own = (device, other) if near else (other, device)
    ways = half if near else half[::-1]
    rank = min(device, other)
    orders.append(_dualpipe(own, rank, stages // 2, ways))
  return _synchronous("dualpipe", orders, microbatches, batches)


def dualpipe_v(
  devices: int, microbatches: int, *, batches: int = 1
) -> Schedule:
  """DualPipe cut in half (DeepSeek 2025): stages s and 2 p - 1 - s are on
  device s, and all microbatches go down and come up again.

  The order of device s is that of `dualpipe` with 2 p stages; nothing is
  replicated.

  Raises:
    ValueError: for fewer than 2 p microbatches.
  """
  _check_positive("devices", devices)
  _check_positive("microbatches", microbatches)
  if microbatches < 2 * devices:
    raise ValueError(
      f"dualpipe_v needs {2 * devices} microbatches for {devices} devices, not"
      f" {microbatches}; use more, or zb_v"
    )
  both = range(microbatches), range(microbatches)
  orders = [
    _dualpipe((device, 2 * devices - 1 - device), device, devices, both)
    for device in range(devices)
  ]
  return _synchronous("dualpipe_v", orders, microbatches, batches)


# Asynchronous schedules.


def _asynchronous(name, orders, every) -> Schedule:
  table = schedule_lib.lay_out(name, orders, every=every, flush=False)
  return validate.validate(table)


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
  s = 0 that is the paper's NOAM. Replicas take microbatches in turn (1F1B-RR).
  Use it with weights="stash" or "vertical".

  Args:
    stages: p.
    microbatches: in all.
    replicas: devices of each stage, which are numbered stage by stage; None is
      one.
    every: microbatches of one update.

  Raises:
    ValueError: for replicas that are not one number for each stage, or more of
      them than microbatches.
  """
  _check_positive("stages", stages)
  _check_updates(microbatches, every)
  given = replicas
  replicas = [1] * stages if replicas is None else _list(replicas)
  if replicas is None or len(replicas) != stages:
    raise ValueError(
      f"replicas must be {stages} numbers, one for each stage, not {given!r}"
    )
  for number in replicas:
    _check_positive("replicas", number)
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
      orders.append(_one_f_one_b(stage, own, depth))
  return _asynchronous("pipedream", orders, every)


def pipedream_2bw(
  stages: int, microbatches: int, *, every: int | None = None
) -> Schedule:
  """PipeDream with gradients summed (PipeDream-2BW, Narayanan et al. 2021).

  The table of `pipedream`; the two versions of the weights are a matter of
  weights="2bw", which needs as many microbatches in an update as stages.

  Args:
    stages: p.
    microbatches: in all, a multiple of `every`.
    every: microbatches of one update, p at least; None is p.

  Raises:
    ValueError: for a smaller `every`.
  """
  _check_positive("stages", stages)
  every = stages if every is None else every
  _check_positive("every", every)
  if every < stages:
    raise ValueError(
      f"2BW needs at least {stages} microbatches in an update, one for each"
      f" stage, not every={every}"
    )
  table = pipedream(stages, microbatches, every=every)
  return table._replace(name="pipedream_2bw")


def stale(stages: int, microbatches: int, *, every: int = 1) -> Schedule:
  """Pipelined backpropagation (Petrowski et al. 1993; Kosson et al. 2021).

  Every stage does a forward and a backward in each turn, as stages do that can
  work on both at once. So 2 (p - 1 - s) turns lie between those of a
  microbatch, and as many updates if every=1: twice the delay of `pipedream`.
  Use it with weights="latest" (the paper's), or "stash".
  """
  _check_positive("stages", stages)
  _check_updates(microbatches, every)
  orders = [
    _one_f_one_b(stage, range(microbatches), 2 * (stages - 1 - stage) + 1)
    for stage in range(stages)
  ]
  return _asynchronous("stale", orders, every)


def pipemare(stages: int, microbatches: int, *, every: int = 1) -> Schedule:
  """PipeMare (Yang et al. 2021): the table of `stale`.

  With every=N and stages numbered from 1, a forward is (2 (P - i) + 1) / N
  updates older than the result of its own, on average. Use it with
  weights="latest"; its learning rates and its correction of the discrepancy
  between forward and backward are transforms.
  """
  return stale(stages, microbatches, every=every)._replace(name="pipemare")


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
    microbatches: in all.
    stage_depth: of each stage, from the end; None is p - 1 - s.
    supremum: microbatches in flight at a stage, at most, whatever its depth
      (FTPipe's virtual stages, where it is the number of devices); None is no
      bound.
    every: microbatches of one update.
    costs: how long tasks take, which decides what is there first; None is as in
      `analyze.analyze`.

  Raises:
    ValueError: for devices, depths or a supremum that are not such.
  """
  places = _places(devices)
  if any(len(place) > 1 for place in places):
    raise ValueError(f"ftpipe has no replicas: devices={devices!r}")
  _check_updates(microbatches, every)
  count = len(places)
  depth = range(count)[::-1] if stage_depth is None else _list(stage_depth)
  if (
    depth is None
    or len(depth) != count
    or not all(isinstance(d, (int, np.integer)) and d >= 0 for d in depth)
  ):
    raise ValueError(
      f"stage_depth must be {count} whole numbers from 0, one for each stage,"
      f" not {stage_depth!r}"
    )
  if supremum is not None:
    _check_positive("supremum", supremum)
    depth = [min(d, supremum - 1) for d in depth]
  costs = _costs(costs, count)
  own = _stages_of(places)

  def rule(device, state):
    for stage in own[device]:
      if state.forward[stage] and state.held[stage] <= depth[stage]:
        return FORWARD, stage, state.forward[stage][0]
      if state.backward[stage]:
        return BACKWARD, stage, state.backward[stage][0]
    return None

  orders = _play(
    rule, places, microbatches, costs, every=every, flush=False
  ).orders
  return _asynchronous("ftpipe", orders, every)


# Rules, asked in simulated time.


class State:
  """What a device knows when its rule is asked; not to be changed.

  Attributes:
    time: now.
    forward: stage -> its microbatches whose forward may start, in the order in
      which they came.
    backward: the same of the backward, of inputs or of both.
    weight: the same of the backward of weights.
    held: stage -> its forwards whose backward (of weights) has not ended.
    soon: when the next of those above is known to come; infinity if it is not.
  """

  __slots__ = ("time", "forward", "backward", "weight", "held", "soon")

  def __init__(self, stages: Iterable[int]):
    stages = list(stages)
    self.time = 0.0
    self.forward = {stage: collections.deque() for stage in stages}
    self.backward = {stage: collections.deque() for stage in stages}
    self.weight = {stage: collections.deque() for stage in stages}
    self.held = dict.fromkeys(stages, 0)
    self.soon = math.inf

  def first(self, action: str) -> Step | None:
    """Returns the ready step of the lowest microbatch; of those of one
    microbatch, that of the highest stage. None if there is none.

    Args:
      action: F, B, I or W.
    """
    queues = self.queues(action)
    ready = [(queue[0], -stage) for stage, queue in queues.items() if queue]
    if not ready:
      return None
    microbatch, stage = min(ready)
    return action, -stage, microbatch

  def queues(self, action: str) -> dict[int, collections.deque[int]]:
    """Returns `forward`, `backward` or `weight`, by action."""
    if action == FORWARD:
      return self.forward
    return self.weight if action == WEIGHT else self.backward


Rule = Callable[[int, State], Step | tuple[Step, Step] | None]


class _Played:
  """What devices did, and when they began and ended."""

  def __init__(self, devices):
    self.orders: Orders = [[] for _ in range(devices)]
    self.begin = [math.inf] * devices
    self.end = [0.0] * devices

  def score(self):
    """The longest time that a device is engaged, then the time of all.

    The first is what a batch costs if devices need not wait for each other
    between batches (the zero bubble papers' cost).
    """
    spans = zip(self.begin, self.end, strict=True)
    longest = max(end - begin for begin, end in spans)
    # Sums of the same numbers in another order are the same time.
    return float(f"{longest:.9g}"), float(f"{max(self.end):.9g}")


def _places(devices) -> list[tuple[int, ...]]:
  """The devices of each stage, checked."""
  whole = int, np.integer
  try:
    places = [
      (int(place),) if isinstance(place, whole) else tuple(place)
      for place in devices
    ]
    found = {device for place in places for device in place}
    if not all(isinstance(device, whole) for device in found):
      found = None
  except TypeError:
    found = None
  if not found or not all(places) or found != set(range(len(found))):
    raise ValueError(
      "devices must be the device of each stage, or those of its replicas, and"
      f" name all from 0, not {devices!r}"
    )
  return places


def _stages_of(places) -> list[list[int]]:
  """The stages of each device, the last one first."""
  out = [[] for _ in range(1 + max(map(max, places)))]
  for stage in reversed(range(len(places))):
    for device in sorted(set(places[stage])):
      out[device].append(stage)
  return out


_MANY = 1000  # own actions in a row while nothing else goes on, for each device


def _play(rule, places, microbatches, cost, *, every, flush) -> _Played:
  """Asks the rule of every idle device, whenever something changes.

  Raises:
    ScheduleError: if nobody goes on, or a rule names what is not ready.
  """
  play = _Play(rule, places, microbatches, cost, every, flush)
  for microbatch in range(microbatches):
    play.come(0.0, 0, microbatch)
  touched = set(range(len(play.states)))
  while play.left or play.events:
    touched |= play.advance()
    for device in sorted(touched):
      if play.idle[device] and play.left:
        play.ask(device)
    touched.clear()
  return play.played


class _Play:
  """Simulated time in which devices do what their rule says."""

  def __init__(self, rule, places, microbatches, cost, every, flush):
    owned = _stages_of(places)
    self.states = [State(own) for own in owned]
    self.idle = [True] * len(owned)
    self.played = _Played(len(owned))
    # Forwards and backwards of weights that have not begun.
    self.left = 2 * len(places) * microbatches
    # A heap of (time, number, device, what, stage, microbatch).
    self.events = []
    self._rule, self._places = rule, places
    self._cost, self._batches = cost, (every, flush)
    columns = cost.forward, cost.backward, cost.input, cost.weight
    columns = (column.tolist() for column in columns)
    self._length = dict(zip("FBIW", columns, strict=True))
    self._there = cost.transfer.tolist()
    self._back = cost.transfer_back.tolist()
    self._gates = _Gates(every) if flush and every < microbatches else None
    self._coming = [[] for _ in owned]  # heaps of times
    self._number = itertools.count()
    self._others = 0  # own actions since the last step of a stage
    self._now = 0.0

  def advance(self) -> set[int]:
    """Goes on to the next event; returns the devices that it is about."""
    events = self.events
    if not events or self._others > _MANY * len(self.states):
      why = "no rule goes on" if not events else "own actions never end"
      raise self._stopped(f"{why}, and {self.left} tasks are left")
    touched = set()
    # What differs by rounding only happens at the same time.
    until = events[0][0] + 1e-9 * max(1.0, events[0][0])
    while events and events[0][0] <= until:
      self._now, _, device, what, stage, microbatch = heapq.heappop(events)
      touched.add(device)
      if what == "idle":
        self.idle[device] = True
      elif what == "done":
        self.states[device].held[stage] -= 1
      else:
        heapq.heappop(self._coming[device])
        self.states[device].queues(what)[stage].append(microbatch)
    return touched

  def ask(self, device):
    """Lets a device do what its rule says."""
    state, now, coming = self.states[device], self._now, self._coming[device]
    state.time, state.soon = now, coming[0] if coming else math.inf
    answer = self._rule(device, state)
    if answer is None:
      return
    steps = (answer,) if isinstance(answer[0], str) else tuple(answer)
    length = 0.0
    for step in steps:
      length += self._take(device, *step)
    if len(steps) > 1 and self._cost.overlap is not None:
      length = self._cost.overlap
    end = now + length
    played = self.played
    played.orders[device].append(answer)
    played.begin[device] = min(played.begin[device], now)
    played.end[device] = end
    self.idle[device] = False
    self._at(end, device, "idle", 0, 0)
    for action, stage, microbatch in steps:
      if action in KNOWN:
        self._begin(device, end, action, stage, microbatch)

  def _take(self, device, action, stage, microbatch):
    """Removes a step from those that are ready; returns how long it takes."""
    if action not in KNOWN:
      self._others += 1
      length = self._cost.own.get(action, 0.0)
      if length <= 0:
        raise ValueError(
          f"costs must say how long {action!r} takes, such as"
          f" own={{{action!r}: 1}}"
        )
      return length
    self._others = 0
    queue = self.states[device].queues(action).get(stage)
    if queue and queue[0] == microbatch:
      queue.popleft()
    elif queue and microbatch in queue:
      queue.remove(microbatch)
    else:
      raise self._stopped(
        f"device {device} does {(action, stage, microbatch)} at {self._now:g},"
        " which is not ready"
      )
    return self._length[action][stage]

  def _begin(self, device, end, action, stage, microbatch):
    """What comes of a step that ends at `end`."""
    if action == FORWARD:
      self.left -= 1
      self.states[device].held[stage] += 1
      if stage + 1 == len(self._places):
        self._send(end, device, BACKWARD, stage, microbatch)
      else:
        if self._place(stage + 1, microbatch) != device:
          end += self._there[stage]
        self.come(end, stage + 1, microbatch)
      return
    if action != WEIGHT and stage:
      other = self._place(stage - 1, microbatch)
      when = end + self._back[stage - 1] if other != device else end
      self._send(when, other, BACKWARD, stage - 1, microbatch)
    if action == INPUT:
      self._send(end, device, WEIGHT, stage, microbatch)
      return
    self.left -= 1
    self._at(end, device, "done", stage, microbatch)
    if self._gates is not None:
      for when, waiting in self._gates.done(end, stage, microbatch):
        self.come(when, stage, waiting)

  def come(self, when, stage, microbatch):
    """Lets a forward be ready at `when`, or when its batch may start."""
    if self._gates is not None:
      when = self._gates.enter(when, stage, microbatch)
    if when is not None:
      device = self._place(stage, microbatch)
      self._send(when, device, FORWARD, stage, microbatch)

  def _place(self, stage, microbatch):
    place = self._places[stage]
    return place[microbatch % len(place)]

  def _send(self, when, device, action, stage, microbatch):
    self._at(when, device, action, stage, microbatch)
    heapq.heappush(self._coming[device], when)

  def _at(self, when, *event):
    heapq.heappush(self.events, (when, next(self._number), *event))

  def _stopped(self, why) -> ScheduleError:
    every, flush = self._batches
    table = schedule_lib.lay_out(
      "so far", self.played.orders, every=every, flush=flush
    )
    return ScheduleError(f"{why}\n{schedule_lib.to_text(table)}")


class _Gates:
  """Forwards that wait for the update of the batch before."""

  def __init__(self, every):
    self._every = every
    self._done = collections.Counter()  # of (stage, batch)
    self._end = collections.defaultdict(float)
    self._waiting = collections.defaultdict(list)

  def enter(self, when, stage, microbatch):
    """When a forward may start that is there at `when`; None: not known."""
    batch = microbatch // self._every
    before = stage, batch - 1
    if batch == 0 or self._done[before] == self._every:
      return max(when, self._end[before])
    self._waiting[before].append((when, microbatch))
    return None

  def done(self, end, stage, microbatch):
    """Counts a backward; returns the forwards that may come now."""
    key = stage, microbatch // self._every
    self._done[key] += 1
    self._end[key] = max(self._end[key], end)
    return self._waiting.pop(key, ()) if self._done[key] == self._every else ()


def _costs(costs, stages) -> analyze.Costs:
  if costs is None:
    return analyze.costs(stages)
  if len(costs.forward) != stages:
    raise ValueError(
      f"costs are of {len(costs.forward)} stages, and there are {stages}"
    )
  return costs


def custom(
  rule: Rule,
  *,
  devices: Sequence[int | Sequence[int]],
  microbatches: int,
  costs: analyze.Costs | None = None,
  every: int | None = None,
  flush: bool = True,
  name: str = "custom",
) -> Schedule:
  """Returns the table that a rule of one's own leads to.

  The rule is asked when a device is idle and something has changed, until the
  last step of a stage has begun, with the number of the device and its `State`.
  It answers with a step (action, stage, microbatch) that is ready, with a pair
  of a forward and a backward that overlap, or with None to wait. For a backward
  that is ready it may answer B, or I; then W is ready later. An action that is
  not F, B, I or W is its own business, has stage and microbatch -1, and takes
  what `costs.own` says.

  Here is 1F1B that does some optimizer work, K, whenever it would wait:

    >>> from pipeline import schedule
    >>> def rule(device, state):
    ...   step = state.first("B")
    ...   if step is None and state.held[device] < 2 - device:
    ...     step = state.first("F")
    ...   return step or ("K", -1, -1)
    >>> table = custom(
    ...   rule,
    ...   devices=[0, 1],
    ...   microbatches=2,
    ...   costs=analyze.costs(2, backward=1.0, own={"K": 1.0}),
    ... )
    >>> print(schedule.to_text(table), end="")
    # custom; every 2; flush
    0 | F0 F1 K  B0 K  B1
    1 | K  F0 B0 F1 B1 .

  Args:
    rule: what to do next.
    devices: of each stage its device, or those of its replicas, which take
      microbatches in turn.
    microbatches: in all.
    costs: how long things take; None is as in `analyze.analyze`, and 1 for
      every own action.
    every: microbatches of one update; None is all.
    flush: whether forwards of a batch wait for the update of the one before.
    name: of the table.

  Raises:
    ScheduleError: if the rule names what is not ready, or all wait forever,
      with the table so far.
    ValueError: for arguments that are not such.
  """
  places = _places(devices)
  every = microbatches if every is None else every
  _check_updates(microbatches, every)
  _check_bool("flush", flush)
  if costs is None:
    costs = analyze.costs(len(places))._replace(own=_Ones())
  costs = _costs(costs, len(places))
  played = _play(rule, places, microbatches, costs, every=every, flush=flush)
  table = schedule_lib.lay_out(name, played.orders, every=every, flush=flush)
  return validate.validate(table)


class _Ones(dict):
  """1 for every action."""

  def get(self, action, default=None):
    del action, default
    return 1.0


def fill(schedule: Schedule, actions: Mapping[int, Sequence[str]]) -> Schedule:
  """Returns a table with own actions in slots where devices are idle.

  Nothing else moves, and the table gets no longer.

  Args:
    schedule: a table.
    actions: device -> names, which go into its idle slots in their order.

  Raises:
    ValueError: if there are more actions than idle slots, no such device, or an
      action is F, B, I or W.
  """
  rows = schedule.tasks
  for device, own in actions.items():
    if device not in range(schedule.devices):
      raise ValueError(
        f"there is no device {device!r}; they are 0 to {schedule.devices - 1}"
      )
    known = [action for action in own if action in KNOWN]
    if known:
      raise ValueError(
        f"{known[0]!r} is not an own action: fill moves no work of stages"
      )
    busy = set(schedule.time[schedule.device == device].tolist())
    idle = [slot for slot in range(schedule.slots) if slot not in busy]
    if len(own) > len(idle):
      raise ValueError(
        f"device {device} has {len(idle)} idle slots for {len(own)} actions;"
        f" leave out {len(own) - len(idle)}"
      )
    rows += [
      (slot, device, -1, -1, action)
      for slot, action in zip(idle, own, strict=False)
    ]
  table = schedule_lib.make(
    schedule.name, rows, every=schedule.every, flush=schedule.flush
  )
  return validate.validate(table)


# Zero bubble: backwards of inputs at once, of weights where there is time.

_TRIED = 20_000  # tasks of a table, up to which all ways are tried
_PATIENCE = (1.0, 0.5, 0.0)  # the part of a W that must fit before what comes


def _fits(state, costs, stage, patience):
  """Whether a W may be done before the next thing is known to come."""
  wait = state.soon - state.time
  return wait >= (patience - 1e-9) * costs.weight[stage]


def _follow(orders, limits, costs, patience) -> Rule:
  """Does what `orders` say; weights that they do not name, in between."""
  at = [0] * len(orders)
  named = [any(step[0] == WEIGHT for step in order) for order in orders]

  def rule(device, state):
    order, full = orders[device], False
    if at[device] < len(order):
      action, stage, microbatch = step = order[at[device]]
      queue = state.queues(action)[stage]
      if queue and queue[0] == microbatch:
        full = action == FORWARD and sum(state.held.values()) >= limits[device]
        if not full:
          at[device] += 1
          return step
    if named[device]:
      return None
    weight = state.first(WEIGHT)
    if weight and (full or _fits(state, costs, weight[1], patience)):
      return weight
    return None

  return rule


def _greedy(owned, limits, costs, patience) -> Rule:
  """Backwards of inputs, then forwards that memory allows, then weights.

  A forward leaves room for one microbatch at every later stage of the device
  that has none. So the oldest microbatch can always go on, and nobody waits
  forever.
  """

  def rule(device, state):
    step = state.first(INPUT)
    if step:
      return step
    room, full = limits[device] - sum(state.held.values()), False
    for stage in owned[device]:  # the last one first
      if state.forward[stage]:
        if room > 0:
          return FORWARD, stage, state.forward[stage][0]
        full = True
      room -= not state.held[stage]
    step = state.first(WEIGHT)
    if step and (full or _fits(state, costs, step[1], patience)):
      return step
    return None

  return rule


def _zero_bubble(
  name, places, microbatches, costs, limits, ways, batches
) -> Schedule:
  """The best of orders to follow and of greedy ones, within the limits."""
  _check_positive("microbatches", microbatches)
  costs = _costs(costs, len(places))
  owned = _stages_of(places)
  few = 3 * len(places) * microbatches <= _TRIED
  rules = [
    _follow(orders, limits, costs, patience)
    for orders in ways
    for patience in _PATIENCE
  ]
  rules += [_greedy(owned, limits, costs, patience) for patience in _PATIENCE]
  best = None
  for rule in rules if few else rules[:1]:
    played = _play(
      rule, places, microbatches, costs, every=microbatches, flush=True
    )
    if best is None or played.score() < best.score():
      best = played
  return _synchronous(name, best.orders, microbatches, batches, max(limits))


def zero_bubble(
  devices: Sequence[int],
  microbatches: int,
  *,
  max_activations: int | Sequence[int],
  costs: analyze.Costs | None = None,
  batches: int = 1,
) -> Schedule:
  """A schedule with split backwards for any stages on any devices, that holds
  no more than it may.

  A device does a backward of inputs as soon as it can, a forward if memory
  allows, and weights when it would wait or needs the memory. Ways that differ
  in how long a wait must be for that are tried, and the best is taken: the one
  that engages its busiest device for the shortest time, as in Qi et al. 2024.
  (Of a table of more than 20,000 tasks, the first.)

  Args:
    devices: the device of each stage.
    microbatches: of a batch.
    max_activations: forwards whose backward of weights is still to come, on
      each device, at most; as many as it has stages, at least.
    costs: measured times of F, I and W and of transfers; None is 1, 1, 1 and 0.
    batches: how many.

  Raises:
    ValueError: for too little memory, or other arguments that are not such.
  """
  places = _places(devices)
  if any(len(place) > 1 for place in places):
    raise ValueError(f"zero_bubble has no replicas: devices={devices!r}")
  owned = _stages_of(places)
  if isinstance(max_activations, (int, np.integer)):
    max_activations = [max_activations] * len(owned)
  _check_positive("microbatches", microbatches)
  limits = _list(max_activations)
  if limits is None or len(limits) != len(owned):
    raise ValueError(
      f"max_activations must be one number, or {len(owned)}, one for each"
      f" device, not {max_activations!r}"
    )
  for device, (limit, own) in enumerate(zip(limits, owned, strict=True)):
    _check_positive("max_activations", limit)
    if limit < len(own):
      raise ValueError(
        f"device {device} has {len(own)} stages and cannot do with"
        f" max_activations={limit}; it needs {len(own)}"
      )
  ways = []
  if list(places) == [(stage,) for stage in range(len(places))]:
    ways = _straight(len(places), microbatches, limits)
  return _zero_bubble(
    "zero_bubble", places, microbatches, costs, limits, ways, batches
  )


def _straight(stages, microbatches, limits):
  """1F1B orders of a straight pipeline: as deep as 1F1B, and twice as deep."""
  return [
    [
      _one_f_one_b(
        *(stage, range(microbatches)),
        *(min(limits[stage], times * (stages - stage) - times + 1), INPUT),
      )
      for stage in range(stages)
    ]
    for times in (1, 2)
  ]


def zb_h1(
  stages: int,
  microbatches: int,
  *,
  costs: analyze.Costs | None = None,
  batches: int = 1,
) -> Schedule:
  """Zero bubble with the memory of 1F1B (ZB-H1, Qi et al. ICLR 2024; also
  called ZB1P).

  1F1B, with weights where it waits: a bubble of (p - 1)(F + I - W).

  Args:
    stages: p, one on each device.
    microbatches: of a batch.
    costs: as in `zero_bubble`.
    batches: how many.
  """
  _check_positive("stages", stages)
  _check_positive("microbatches", microbatches)
  limits = [stages] * stages
  ways = _straight(stages, microbatches, limits)[:1]
  places = [(stage,) for stage in range(stages)]
  return _zero_bubble(
    "zb_h1", places, microbatches, costs, limits, ways, batches
  )


def zb_h2(
  stages: int,
  microbatches: int,
  *,
  costs: analyze.Costs | None = None,
  batches: int = 1,
) -> Schedule:
  """Zero bubble with twice the memory (ZB-H2, Qi et al. ICLR 2024; also called
  ZB2P).

  A device is engaged for (p - 1)(F + I - 2 W) longer than it is busy, which is
  nothing if all take the same. Device s begins s F later than the first, so
  batches follow each other without a gap only if updates need not wait for all
  stages; the paper checks them afterwards.

  Args:
    stages: p, one on each device, with 2 p - 1 microbatches in flight.
    microbatches: of a batch.
    costs: as in `zero_bubble`.
    batches: how many.
  """
  _check_positive("stages", stages)
  _check_positive("microbatches", microbatches)
  limits = [2 * stages - 1] * stages
  ways = _straight(stages, microbatches, limits)[1:]
  places = [(stage,) for stage in range(stages)]
  return _zero_bubble(
    "zb_h2", places, microbatches, costs, limits, ways, batches
  )


def _vee(devices):
  _check_positive("devices", devices)
  down = range(devices)
  return [(device,) for device in (*down, *down[::-1])]


def zb_v(
  devices: int,
  microbatches: int,
  *,
  costs: analyze.Costs | None = None,
  batches: int = 1,
) -> Schedule:
  """Zero bubble with the memory of 1F1B, in a V (ZB-V, Qi et al. NeurIPS 2024).

  Stages s and 2 p - 1 - s are on device s. At most 2 p forwards of such half
  stages are in flight on a device, and if F, I and W take the same it is never
  idle from its first task to its last.

  Args:
    devices: p.
    microbatches: of a batch; with fewer than 2 p - 1 there are bubbles.
    costs: as in `zero_bubble`, of 2 p stages.
    batches: how many.
  """
  places = _vee(devices)
  _check_positive("microbatches", microbatches)
  even = (
    costs is None or np.ptp([costs.forward, costs.input, costs.weight]) == 0
  )
  ways = []
  if even and microbatches >= 2 * devices - 1:
    ways = [[_zb_v(d, devices, microbatches) for d in range(devices)]]
  limits = [2 * devices] * devices
  return _zero_bubble(
    "zb_v", places, microbatches, costs, limits, ways, batches
  )


def _zb_v(device, devices, microbatches):
  """The order of a device if F, I and W take the same."""
  stages = device, 2 * devices - 1 - device
  counts = collections.Counter()
  order = []

  def add(actions, chunk):
    for action in actions:
      order.append((action, stages[chunk], counts[action, chunk]))
      counts[action, chunk] += 1

  for _ in range(2 * (devices - device) - 1):
    add("F", 0)
  for _ in range(device):
    add("F", 1)
    add("F", 0)
  for _ in range(devices - device):
    add("FIW", 1)
  while counts["F", 1] < microbatches:
    add("FIW" if counts["F", 0] < microbatches else "IW", 0)
    add("FIW", 1)
  for _ in range(device):
    add("I", 0)
    add("I", 1)
  for _ in range(devices - device):
    add("IW", 0)
  for chunk in (1, 0):
    while counts["W", chunk] < microbatches:
      add("W", chunk)
  return order


def _pattern(times, microbatches):
  """Forwards and backwards of a V, as they repeat every 6 slots.

  Args:
    times: device -> slots of F and F, I and I, on the way down and up.
    microbatches: how often.
  """
  devices = len(times)
  orders = []
  for device, slots in enumerate(times):
    down, up = device, 2 * devices - 1 - device
    tasks = [
      (slot + 6 * i, action, stage, i)
      for i in range(microbatches)
      for slot, action, stage in zip(
        slots, "FFII", (down, up, up, down), strict=True
      )
    ]
    orders.append([task[1:] for task in sorted(tasks)])
  return orders


def v_half(
  devices: int,
  microbatches: int,
  *,
  costs: analyze.Costs | None = None,
  batches: int = 1,
) -> Schedule:
  """Half the memory of 1F1B, in a V (V-Half, Qi et al. NeurIPS 2024).

  Stages s and 2 p - 1 - s are on device s. At most p + 2 forwards of such half
  stages are in flight on a device; 1F1B has 2 p. It has about half the bubble
  of 1F1B.

  Args:
    devices: p.
    microbatches: of a batch.
    costs: as in `zero_bubble`, of 2 p stages.
    batches: how many.
  """
  places = _vee(devices)
  _check_positive("microbatches", microbatches)
  p, more = devices, 0 if devices % 2 else 3
  times = [
    (2 * d, 3 * p - d - 2, 3 * p + more + 2 * d - 1, 6 * p + more - d - 2)
    for d in range(p)
  ]
  ways = [_pattern(times, microbatches)]
  limits = [p + 2] * p
  return _zero_bubble(
    "v_half", places, microbatches, costs, limits, ways, batches
  )


def v_min(
  devices: int,
  microbatches: int,
  *,
  costs: analyze.Costs | None = None,
  batches: int = 1,
) -> Schedule:
  """A third of the memory of 1F1B, in a V (V-Min, Qi et al. NeurIPS 2024).

  Stages s and 2 p - 1 - s are on device s. At most 2 ceil(p / 3) + 2 forwards
  of such half stages are in flight on a device; 1F1B has 2 p. It has about two
  thirds of the bubble of 1F1B, if F, I and W take the same; if not, a bubble
  that grows with the number of microbatches.

  Args:
    devices: p.
    microbatches: of a batch.
    costs: as in `zero_bubble`, of 2 p stages.
    batches: how many.
  """
  places = _vee(devices)
  _check_positive("microbatches", microbatches)
  p, more = devices, 0 if devices % 3 else 2
  times = [
    (d, 2 * p - d - 1, 2 * p + more + d, 4 * p + more - d - 1) for d in range(p)
  ]
  ways = [_pattern(times, microbatches)]
  limits = [2 * -(-p // 3) + 2] * p
  return _zero_bubble(
    "v_min", places, microbatches, costs, limits, ways, batches
  )


SCHEDULES: dict[str, Callable[..., Schedule]] = {
  maker.__name__: maker
  for maker in (
    *(gpipe, one_f_one_b, interleaved, breadth_first, chimera),
    *(dualpipe, dualpipe_v, zero_bubble, zb_h1, zb_h2, zb_v, v_half, v_min),
    *(pipedream, pipedream_2bw, stale, pipemare, ftpipe, custom),
  )
}


def build(name: str, **options) -> Schedule:
  """Builds a table by the name of its schedule.

  Raises:
    ValueError: for an unknown name or option, naming the nearest known one, and
      for a table of more than 10 million forwards.
  """
  maker = names.lookup("schedule", name, SCHEDULES)
  count = forwards(options)
  if count > _MOST:
    raise ValueError(
      f"{name} would have {count:,} forwards (stages x microbatches x batches),"
      f" and {_MOST:,} are the most: is there a misprint?"
    )
  return names.call("schedule", name, maker, options)


def forwards(options: Mapping[str, object]) -> int:
  """Returns how many forwards a table of these options has, or fewer. What is
  no number counts as 1: whoever makes the table says what is wrong with it."""

  def number(value):
    whole = isinstance(value, (int, np.integer))
    return max(int(value), 1) if whole else 1

  devices = options.get("devices")
  listed = devices is not None and _list(devices)
  keys = ("stages", "chunks", "microbatches", "batches")
  counts = [number(options.get(key)) for key in keys]
  return math.prod([len(listed) if listed else number(devices), *counts])
