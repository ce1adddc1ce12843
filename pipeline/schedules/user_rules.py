"""Tables by a user's rule, and a user's actions in existing tables."""

from collections.abc import Mapping, Sequence

from asgd import checks
from asgd.pipeline import analyze, validate
from asgd.pipeline import table as table_lib
from asgd.pipeline.schedules import layout
from asgd.pipeline.schedules.play import Rule, RuleState, play
from asgd.pipeline.table import BACKWARD, FORWARD, KNOWN, Schedule, Step


@layout.traits(listed=True, partitioner="mixed_pipe")
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
  """A schedule that a user's rule decides, step by step.

  The rule is asked when a device is idle and something has changed, until the
  last step of a stage has begun, with the device's number and its `RuleState`.
  It answers with one of these:

  - a step (action, stage, microbatch) that is ready; for a backward B it may
    answer I instead, and W is ready later;
  - a pair of a forward and a backward that overlap;
  - None, to wait;
  - an action of the user, (name, -1, -1), which takes the time in `costs.own`.

  Args:
    rule: what to do next.
    devices: of each stage its device, or those of its replicas, which take
      microbatches in turn.
    microbatches: the number of all microbatches.
    costs: the times of tasks; None is as in `analyze.analyze`, and 1 for every
      action of the user.
    every: microbatches of one update; None is all.
    flush: whether forwards of a batch wait for the previous batch's update.
    name: the name of the table.

  Returns:
    A valid Schedule.

  Raises:
    ScheduleError: if the rule names a task that is not ready, or all devices
      wait forever; with the table so far.
    ValueError: for counts or devices that do not fit each other.

  Source:
    none: the rule is the user's. That a schedule is a local rule is an idea of
    FTPipe's code (Eliad et al. 2021).

  Example:
    1F1B that does some optimizer work, K, whenever it would wait:

    >>> from asgd.pipeline import analyze, schedules, table
    >>> def rule(device, state):
    ...   step = state.first("B")
    ...   if step is None and state.in_flight[device] < 2 - device:
    ...     step = state.first("F")
    ...   return step or ("K", -1, -1)
    >>> costs = analyze.costs(2, backward=1.0, own={"K": 1.0})
    >>> own = schedules.custom(
    ...   rule, devices=[0, 1], microbatches=2, costs=costs
    ... )
    >>> print(table.to_text(own), end="")
    # custom; every 2; flush
    0 | F0 F1 K  B0 K  B1
    1 | K  F0 B0 F1 B1 .
  """
  places = layout.places_of(devices)
  every = microbatches if every is None else every
  layout.check_updates(microbatches, every)
  checks.flag("flush", flush)
  if costs is None:
    costs = analyze.costs(len(places))._replace(own=None)
  costs = layout.costs_of(costs, len(places))
  orders = play(rule, places, microbatches, costs, every=every, flush=flush)
  return layout.valid(name, orders, every, flush=flush)


def forwards_first(device: int, state: RuleState) -> Step | None:
  """A rule for `custom`: a device does a backward when no forward is ready.

  With a flush it is GPipe on devices that may hold several stages, which need
  not be neighbours. There a backward may come before the last forwards, while
  these are on other devices.

  Args:
    device: its number.
    state: the state of the device.

  Returns:
    The next step, or None to wait.

  Source:
    none: it extends GPipe (Huang et al. 2019) to any devices.

  Example:
    >>> from asgd.pipeline import analyze, schedules, table
    >>> from asgd.pipeline.schedules import user_rules
    >>> mixed = schedules.custom(
    ...   user_rules.forwards_first,
    ...   devices=[0, 1, 0],
    ...   microbatches=2,
    ...   costs=analyze.costs(3, backward=1.0),
    ... )
    >>> print(table.to_text(mixed), end="")
    # custom; every 2; flush
    0 | F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0
    1 | .    F0@1 F1@1 .    .    B0@1 B1@1 .
  """
  del device
  return state.first(FORWARD) or state.first(BACKWARD)


def fill(schedule: Schedule, actions: Mapping[int, Sequence[str]]) -> Schedule:
  """Returns a table with user's actions in slots in which devices are idle.

  No other task moves.

  Args:
    schedule: the table.
    actions: the actions of each device, in their order.

  Returns:
    A valid Schedule.

  Raises:
    ValueError: if there are more actions than idle slots, no such device, or an
      action is F, B, I or W.

  Source:
    none: the actions are the user's.

  Example:
    >>> from asgd.pipeline import schedules, table
    >>> filled = schedules.fill(schedules.gpipe(2, 1), {0: ["K", "K"]})
    >>> print(table.to_text(filled), end="")
    # gpipe; every 1; flush
    0 | F0 K  K  B0
    1 | .  F0 B0 .
  """
  rows = schedule.tasks
  for device, user_actions in actions.items():
    if device not in range(schedule.devices):
      raise ValueError(
        f"there is no device {device!r}; they are 0 to {schedule.devices - 1}"
      )
    of_stages = [action for action in user_actions if action in KNOWN]
    if of_stages:
      raise ValueError(
        f"{of_stages[0]!r} is not an own action: fill moves no work of stages"
      )
    busy = schedule.time[schedule.device == device].tolist()
    idle = sorted(set(range(schedule.slots)).difference(busy))
    if len(user_actions) > len(idle):
      count = len(user_actions)
      raise ValueError(
        f"device {device} has {len(idle)} idle slots for {count} actions;"
        f" leave out {count - len(idle)}"
      )
    # The earliest idle slots; stage and microbatch -1 mark an own action.
    slots = zip(idle, user_actions, strict=False)
    rows += [(slot, device, -1, -1, action) for slot, action in slots]
  every, flush = schedule.every, schedule.flush
  table = table_lib.make(schedule.name, rows, every=every, flush=flush)
  return validate.validate(table)
