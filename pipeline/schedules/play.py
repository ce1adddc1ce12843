"""Simulates devices that choose their next tasks by a local rule.

The choices become the orders of the devices. `analyze.Costs` has the seconds of
each task. `play` asks the rule; `_Clock` keeps the simulated time.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from asgd.pipeline import analyze
from asgd.pipeline import table as table_lib
from asgd.pipeline.schedules.layout import Orders, stages_of
from asgd.pipeline.table import BACKWARD, FORWARD, INPUT, KNOWN, WEIGHT, Step

_MAX_USER_ACTIONS = 1000  # in a row on each device; more count as endless


class RuleState:
  """The state of a device, for its rule; read only.

  Attributes:
    time: now.
    forward: stage -> its microbatches that may start the forward, in the order
      of their arrival.
    backward: the same for the backward, of inputs or of both.
    weight: the same for the backward of weights.
    in_flight: stage -> its forwards without an ended backward (of weights).
    soon: time at which the next known step of this device is ready; infinity if
      none is known.
  """

  __slots__ = ("time", "forward", "backward", "weight", "in_flight", "soon")

  def __init__(self, stages: Iterable[int]):
    self.time = 0.0
    self.in_flight = dict.fromkeys(stages, 0)
    self.forward, self.backward, self.weight = (
      {stage: collections.deque() for stage in self.in_flight} for _ in range(3)
    )
    self.soon = math.inf

  def first(self, action: str) -> Step | None:
    """Returns a ready step of the action F, B, I or W, or None. The lowest
    microbatch goes first, then the highest stage."""
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


Rule = Callable[[int, RuleState], Step | tuple[Step, Step] | None]


def play(
  rule: Rule,
  places: Sequence[Sequence[int]],
  microbatches: int,
  cost: analyze.Costs,
  *,
  every: int,
  flush: bool,
) -> Orders:
  """Returns the orders of a rule, which is asked for the next task of each idle
  device after each event of that device.

  Arguments and errors are those of `custom`; `places` has the devices of each
  stage.
  """
  clock = _Clock(places, microbatches, cost, every, flush)
  # All microbatches are ready at stage 0 at the beginning.
  for microbatch in range(microbatches):
    clock.arrive(0.0, 0, microbatch)
  event_devices = set(clock.idle)
  while clock.remaining or clock.events:
    event_devices |= clock.advance()
    # Devices are asked in order: the same rule then leads to the same table.
    for device in sorted(event_devices & clock.idle):
      if clock.remaining:
        clock.start_next(device, rule)
    event_devices.clear()
  return clock.orders


class _Clock:
  """Simulated time in which devices do what their rule says."""

  def __init__(self, places, microbatches, cost, every, flush):
    self.states = [RuleState(stages) for stages in stages_of(places)]
    self.idle = set(range(len(self.states)))
    self.orders: Orders = [[] for _ in self.states]
    # Forwards and backwards of weights that have not begun.
    self.remaining = 2 * len(places) * microbatches
    # A heap of (time, serial number, device, kind, stage, microbatch). A kind
    # is "idle", "done", or the action that becomes ready.
    self.events = []
    self._places, self._cost = places, cost
    self._batches = {"every": every, "flush": flush}
    columns = cost.forward, cost.backward, cost.input, cost.weight
    self._durations: dict[str, list[float]] = {
      a: c.tolist() for a, c in zip(KNOWN, columns, strict=True)
    }
    self._transfer = cost.transfer.tolist(), cost.transfer_back.tolist()
    self._gates = _Gates(every) if flush and every < microbatches else None
    self._serial = itertools.count()
    self._arrival_times = [[] for _ in self.states]  # heaps of times
    self._user_actions = 0  # user's actions since the last step of a stage
    self._time = 0.0

  def advance(self) -> set[int]:
    """Advances to the next events; returns the devices that they concern."""
    events = self.events
    if not events or self._user_actions > _MAX_USER_ACTIONS * len(self.states):
      reason = "no rule names a step" if not events else "own actions never end"
      raise self._error_with_table(
        f"{reason}, and {self.remaining} tasks are left"
      )
    devices = set()
    # Events are simultaneous if their times differ only by rounding.
    end = events[0][0] + 1e-9 * max(1.0, events[0][0])
    while events and events[0][0] <= end:
      self._time, _, device, kind, stage, microbatch = heapq.heappop(events)
      devices.add(device)
      if kind == "idle":
        self.idle.add(device)
      elif kind == "done":
        self.states[device].in_flight[stage] -= 1
      else:
        heapq.heappop(self._arrival_times[device])
        self.states[device].queues(kind)[stage].append(microbatch)
    return devices

  def start_next(self, device, rule):
    """Asks the rule for a device's next step, and begins the step."""
    state, start_time = self.states[device], self._time
    arrivals = self._arrival_times[device]
    state.time, state.soon = start_time, arrivals[0] if arrivals else math.inf
    answer = rule(device, state)
    if answer is None:
      return
    steps = (answer,) if isinstance(answer[0], str) else tuple(answer)
    duration = sum(self._remove_ready(device, *step) for step in steps)
    if len(steps) > 1 and self._cost.overlap is not None:
      duration = self._cost.overlap
    end = start_time + duration
    self.orders[device].append(answer)
    self.idle.remove(device)
    self._schedule(end, device, "idle", 0, 0)
    for action, stage, microbatch in steps:
      if action in KNOWN:
        self._schedule_results(device, end, action, stage, microbatch)

  def _remove_ready(
    self, device: int, action: str, stage: int, microbatch: int
  ) -> float:
    """Removes a step from the ready steps; returns its duration."""
    if action not in KNOWN:
      self._user_actions += 1
      user_costs = self._cost.own  # None: every action takes 1
      duration = 1.0 if user_costs is None else user_costs.get(action, 0.0)
      if duration <= 0:
        raise ValueError(
          f"costs have no time for the action {action!r}: pass it, such as"
          f" own={{{action!r}: 1}}"
        )
      return duration
    self._user_actions = 0
    try:
      self.states[device].queues(action)[stage].remove(microbatch)
    except (KeyError, ValueError):
      raise self._error_with_table(
        f"device {device} does {(action, stage, microbatch)} at {self._time:g},"
        " which is not ready"
      ) from None
    return self._durations[action][stage]

  def _schedule_results(
    self, device: int, end: float, action: str, stage: int, microbatch: int
  ) -> None:
    """Schedules the events that follow from a step that ends at `end`."""
    if action == FORWARD:
      # The forward is in flight until its backward of weights ends.
      self.remaining -= 1
      self.states[device].in_flight[stage] += 1
      if stage + 1 == len(self._places):
        self._send(end, device, BACKWARD, stage, microbatch)
      else:
        if self._device(stage + 1, microbatch) != device:
          end += self._transfer[0][stage]
        self.arrive(end, stage + 1, microbatch)
      return
    if action != WEIGHT and stage:
      neighbour = self._device(stage - 1, microbatch)
      arrival_time = (
        end + self._transfer[1][stage - 1] if neighbour != device else end
      )
      self._send(arrival_time, neighbour, BACKWARD, stage - 1, microbatch)
    if action == INPUT:
      self._send(end, device, WEIGHT, stage, microbatch)
      return
    self.remaining -= 1
    self._schedule(end, device, "done", stage, microbatch)
    # The update of a full batch releases the forwards that wait for it.
    if self._gates is not None:
      released_forwards = self._gates.count_backward(end, stage, microbatch)
      for arrival_time, released_microbatch in released_forwards:
        self.arrive(arrival_time, stage, released_microbatch)

  def arrive(self, ready_time, stage, microbatch):
    """Makes a forward ready at `ready_time`, or when its batch may start."""
    if self._gates is not None:
      ready_time = self._gates.enter(ready_time, stage, microbatch)
    if ready_time is not None:
      device = self._device(stage, microbatch)
      self._send(ready_time, device, FORWARD, stage, microbatch)

  def _device(self, stage, microbatch):
    replicas = self._places[stage]
    return replicas[microbatch % len(replicas)]

  def _send(self, ready_time, device, action, stage, microbatch):
    self._schedule(ready_time, device, action, stage, microbatch)
    heapq.heappush(self._arrival_times[device], ready_time)

  def _schedule(self, event_time, *event):
    heapq.heappush(self.events, (event_time, next(self._serial), *event))

  def _error_with_table(self, why) -> table_lib.ScheduleError:
    table = table_lib.lay_out("so far", self.orders, **self._batches)
    return table_lib.ScheduleError(f"{why}\n{table_lib.to_text(table)}")


class _Gates:
  """Holds forwards that wait for the update of the previous batch."""

  def __init__(self, every):
    self._every = every
    self._backward_counts = collections.Counter()  # of (stage, batch)
    self._update_times = collections.defaultdict(float)
    self._waiting_forwards = collections.defaultdict(list)

  def enter(self, inputs_time, stage, microbatch):
    """Returns the start of a forward with inputs at `inputs_time`; None if it
    is not known yet."""
    batch = microbatch // self._every
    previous = stage, batch - 1
    if batch == 0 or self._backward_counts[previous] == self._every:
      return max(inputs_time, self._update_times[previous])
    self._waiting_forwards[previous].append((inputs_time, microbatch))
    return None

  def count_backward(self, end, stage, microbatch):
    """Counts a backward; returns the (time, microbatch) it releases."""
    key = stage, microbatch // self._every
    self._backward_counts[key] += 1
    self._update_times[key] = max(self._update_times[key], end)
    if self._backward_counts[key] < self._every:
      return ()
    return self._waiting_forwards.pop(key, ())
