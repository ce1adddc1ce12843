"""A table as instructions: what each lane does, and which weights it reads.

A lane obeys the instructions of one device. Updates are instructions of their
own, on the first of a stage's devices, where its server is: an update belongs
to the slot of the backward that it is for, and goes before what comes later.
"""

import bisect
import collections
from typing import NamedTuple

import numpy as np

from pipeline import analyze, validate
from pipeline.table import Schedule

UPDATE = "update"  # the kind of an instruction that is no row of the table

TicketKey = tuple[int, int, int]  # stage, version, replica


class Instruction(NamedTuple):
  """A row of the table, or an update."""

  slot: int
  kind: str  # an action, or UPDATE
  stage: int  # -1: none, of an action of the user's own
  microbatch: int
  replica: int
  last: bool = False  # of an update's microbatches
  group: int = 0  # the update
  also: tuple["Instruction", ...] = ()  # updates that are made with it


class Program(NamedTuple):
  """A table, taken apart."""

  schedule: Schedule
  together: bool  # as in `write`
  lanes: tuple[list[Instruction], ...]  # D, by slot
  places: list[list[int]]  # S, devices of each stage's replicas
  where: validate.TableRows
  order: np.ndarray  # int[S, M], as of `analyze.update_order`
  versions: analyze.Versions
  last_reads: dict[TicketKey, int]  # slots after which a ticket is not read
  readers: dict[tuple[int, int], list[int]]  # (stage, version) -> replicas

  def of_lane(self, lane: int, first: int, until: int) -> list[Instruction]:
    """Returns what a lane does from slot `first` on, before slot `until`."""
    start, end = (
      bisect.bisect_left(self.lanes[lane], slot, key=lambda op: op.slot)
      for slot in (first, until)
    )
    return self.lanes[lane][start:end]

  def tickets_of(self, op: Instruction) -> list[TicketKey]:
    """Returns the tickets that the forward and the backward of an instruction's
    microbatch read."""
    at = op.stage, op.microbatch
    reads = self.versions.forward, self.versions.backward
    return [(op.stage, int(version[at]), op.replica) for version in reads]


def write(
  schedule: Schedule, versions: analyze.Versions, *, together: bool = False
) -> Program:
  """Returns the program of a valid table in which all microbatches have a
  backward.

  With `together` a batch's updates of all stages are made at its end, those of
  a lane in one instruction; this raises ValueError if a stage begins a batch
  before others have ended the one before.
  """
  where, places = validate.rows(schedule), schedule.places()
  replica = [{d: i for i, d in enumerate(devices)} for devices in places]
  lanes: list[list[Instruction]] = [[] for _ in range(schedule.devices)]
  for slot, device, stage, microbatch, action in schedule.tasks:
    mine = replica[stage][device] if action in validate.KNOWN else 0
    lanes[device].append(Instruction(slot, action, stage, microbatch, mine))
  order = analyze.update_order(schedule)
  last_reads: dict[TicketKey, int] = {}
  for stage, owners in enumerate(places):
    rows = where.weight[stage]
    slots, devices = schedule.time[rows], schedule.device[rows]
    for number, microbatch in enumerate(order[stage].tolist()):
      slot = int(slots[microbatch])
      mine = replica[stage][int(devices[microbatch])]
      group, at = divmod(number, schedule.every)
      last = at + 1 == schedule.every
      lanes[owners[0]].append(
        Instruction(slot, UPDATE, stage, microbatch, mine, last, group)
      )
      for version in (versions.forward, versions.backward):
        ticket = stage, int(version[stage, microbatch]), mine
        last_reads[ticket] = max(slot, last_reads.get(ticket, slot))
  if together:
    lanes = _with_updates_together(lanes, schedule, where)
  for lane in lanes:
    lane.sort(key=lambda op: (op.slot, op.kind == UPDATE))
  readers = collections.defaultdict(list)
  for stage, version, mine in sorted(last_reads):
    readers[stage, version].append(mine)
  tables = schedule, together, tuple(lanes), places, where, order, versions
  return Program(*tables, last_reads, readers)


def _with_updates_together(lanes, schedule, where):
  """The lanes with the updates of a batch in one instruction at its end."""
  shape = schedule.stages, -1, schedule.every
  begins = schedule.time[where.forward].reshape(shape)
  ends = schedule.time[where.weight].reshape(shape).max((0, 2))
  if not schedule.flush or (begins.min((0, 2))[1:] <= ends[:-1]).any():
    raise ValueError(
      f"{schedule.name} begins a batch before the one before has ended at all"
      " stages, so their updates cannot be made together: use a table of one"
      " batch"
    )
  out = []
  for lane in lanes:
    groups = collections.defaultdict(list)
    for op in lane:
      if op.last:
        groups[op.group].append(op._replace(slot=int(ends[op.group])))
    rest = [op for op in lane if not op.last]
    for first, *others in groups.values():
      rest.append(first._replace(also=tuple(others)))
    out.append(rest)
  return out
