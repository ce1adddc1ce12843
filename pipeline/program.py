"""What each device of a table does, line by line, and who reads which weights.

A lane is a device's program. Updates are lines of their own, on the first of a
stage's devices, where its server is: an update belongs to the slot of the
backward that it is for, and goes before what comes later.
"""

import bisect
import collections
from typing import Any, NamedTuple

import numpy as np

from pipeline import analyze, validate
from pipeline.schedule import Schedule

UPDATE = "update"  # the kind of a line that is no row of the table

Ticket = tuple[int, int, int]  # stage, version, replica


class Line(NamedTuple):
  """A row of the table, or an update."""

  slot: int
  kind: str  # an action, or UPDATE
  stage: int  # -1: none, of an action of the user's own
  microbatch: int
  replica: int
  last: bool = False  # of an update's microbatches
  group: int = 0  # the update
  also: tuple["Line", ...] = ()  # updates that are made with it


class Program(NamedTuple):
  """A table, taken apart."""

  lanes: tuple[list[Line], ...]  # D, by slot
  slots: tuple[list[int], ...]  # D, of the lines
  places: list[list[int]]  # S, devices of each stage's replicas
  where: validate.Rows
  versions: analyze.Versions
  reads: dict[Ticket, list[int]]  # slots after which one read less is to come
  made: dict[tuple[int, int], list[int]]  # (stage, version) -> replicas

  def lines(self, lane: int, first: int, until: int) -> list[Line]:
    """Returns what a lane does from slot `first` on, before slot `until`."""
    slots = self.slots[lane]
    start = bisect.bisect_left(slots, first)
    return self.lanes[lane][start : bisect.bisect_left(slots, until)]

  def reads_left(self, ticket: Ticket, slot: int) -> int:
    """Returns how often a ticket is read from that slot on."""
    slots = self.reads[ticket]
    return len(slots) - bisect.bisect_left(slots, slot)


def write(
  schedule: Schedule, versions: analyze.Versions, *, together: bool = False
) -> Program:
  """Returns the program of a table that is valid.

  Args:
    schedule: the table; every microbatch has a backward.
    versions: of the weights that its tasks read.
    together: a batch's updates of all stages are made at its end, those of a
      lane in one line. Otherwise each is made as soon as it can be.

  Raises:
    ValueError: if a stage begins a batch before others have ended the one
      before, and updates are to be together.
  """
  where, places = validate.rows(schedule), schedule.places()
  replica = [{d: i for i, d in enumerate(held)} for held in places]
  lanes: list[list[Line]] = [[] for _ in range(schedule.devices)]
  columns = (column.tolist() for column in schedule[1:6])
  for slot, device, stage, microbatch, action in zip(*columns, strict=True):
    mine = replica[stage][device] if action in validate.KNOWN else 0
    lanes[device].append(Line(slot, action, stage, microbatch, mine))
  reads = collections.defaultdict(list)
  for stage, held in enumerate(places):
    rows = where.weight[stage]
    slots, devices = schedule.time[rows], schedule.device[rows]
    for number, microbatch in enumerate(np.lexsort((devices, slots)).tolist()):
      slot = int(slots[microbatch])
      mine = replica[stage][int(devices[microbatch])]
      lanes[held[0]].append(
        Line(
          *(slot, UPDATE, stage, microbatch, mine),
          last=(number + 1) % schedule.every == 0,
          group=number // schedule.every,
        )
      )
      for version in (versions.forward, versions.backward):
        reads[stage, int(version[stage, microbatch]), mine].append(slot)
  if together:
    lanes = _with_updates_together(lanes, schedule, where)
  for lane in lanes:
    lane.sort(key=lambda line: (line.slot, line.kind == UPDATE))
  made = collections.defaultdict(list)
  for stage, version, mine in sorted(reads):
    made[stage, version].append(mine)
  return Program(
    tuple(lanes),
    tuple([line.slot for line in lane] for lane in lanes),
    *(places, where, versions),
    {ticket: sorted(slots) for ticket, slots in reads.items()},
    made,
  )


def _with_updates_together(lanes, schedule, where):
  every = schedule.every
  ends = schedule.time[where.weight].reshape(schedule.stages, -1, every)
  ends = ends.max((0, 2))
  begins = schedule.time[where.forward].reshape(schedule.stages, -1, every)
  if schedule.flush is False or (begins.min((0, 2))[1:] <= ends[:-1]).any():
    raise ValueError(
      f"{schedule.name} begins a batch before the one before has ended at all"
      " stages, so their updates cannot be made together: use a table of one"
      " batch"
    )
  out = []
  for lane in lanes:
    rest = [line for line in lane if not line.last]
    groups = collections.defaultdict(list)
    for line in lane:
      if line.last:
        groups[line.group].append(line._replace(slot=int(ends[line.group])))
    for first, *others in groups.values():
      rest.append(first._replace(also=tuple(others)))
    out.append(rest)
  return out


def held(
  program: Program, schedule: Schedule, slot: int, *, together: bool
) -> dict[str, set]:
  """Returns the keys that an `executor.State` of the whole table has before a
  slot: field -> keys; of tickets, those that will be read.

  Args:
    program: of the table.
    schedule: the table.
    slot: from 0 to its end.
    together: as in `write`.
  """
  where, versions = program.where, program.versions
  forward, backward, weight = (schedule.time[rows] for rows in where)

  def keys(mask, *prefix):
    return {(*prefix, *at) for at in map(tuple, np.argwhere(mask).tolist())}

  def between(first, last):
    return (first < slot) & (slot <= last)

  sent = np.zeros((schedule.stages, schedule.microbatches), bool)
  came = sent.copy()
  sent[1:] = between(forward[:-1], forward[1:])
  came[:-1] = between(backward[1:], backward[:-1])
  # When the version after each update is made.
  every = schedule.every
  made = np.sort(weight, axis=1)[:, every - 1 :: every]
  if together:
    made = np.broadcast_to(made.max(0), made.shape)
  tickets, sums, last = set(), set(), set()
  for stage, places in enumerate(program.places):
    later = np.flatnonzero(weight[stage] >= slot)
    replica = np.searchsorted(
      places, schedule.device[where.weight[stage, later]]
    )
    before = int(np.searchsorted(made[stage], slot, "left"))  # versions made
    done = len(weight[stage]) - len(later) - before * every
    if every > 1 and done:
      sums.add(stage)
    if done == every:  # the last one waits for the other stages
      rows = where.weight[stage]
      order = np.lexsort((schedule.device[rows], schedule.time[rows]))
      last.add(("m", stage, int(order[(before + 1) * every - 1])))
    for read in (versions.forward, versions.backward):
      version = read[stage, later]
      there = version <= before
      pairs = zip(version[there].tolist(), replica[there].tolist(), strict=True)
      tickets.update((stage, *pair) for pair in pairs)
  return {
    "tickets": tickets,
    "kept": keys(between(forward, weight)),
    "halves": keys(between(backward, weight) & (weight != backward)),
    "on_their_way": keys(sent, "x") | keys(came, "g") | last,
    "sums": sums,
  }


def lane_of(program: Program, schedule: Schedule, field: str, key: Any) -> int:
  """Returns the lane that keeps something.

  Args:
    program: of the table.
    schedule: the table.
    field: of `executor.State`.
    key: in this field; of `servers` and `sums`, the stage.
  """
  if field in ("servers", "sums"):
    return program.places[key][0]
  if field == "messages":
    return program.places[key[0]][0]
  if field == "tickets":
    return program.places[key[0]][key[2]]
  if field in ("kept", "halves"):
    return int(schedule.device[program.where.forward[key]])
  kind, *at = key  # on its way to that lane
  if kind == "m":
    return program.places[at[0]][0]
  row = program.where.forward if kind == "x" else program.where.backward
  return int(schedule.device[row[tuple(at)]])
