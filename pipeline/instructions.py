"""A table as instructions: the tasks of each lane, and the weights they read.

A lane executes the instructions of one device. Updates are instructions, too:
they run on the first device of a stage, where its server is. An update belongs
to the slot of its last backward, and precedes the instructions of later slots.
"""

import bisect
import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asgd.pipeline import analyze, validate
from asgd.pipeline.table import BACKWARD, FORWARD, INPUT, Schedule

UPDATE = "update"  # the kind of an instruction that is no row of the table
TICKET = "w"
# TICKET, stage, version, replica, worker
TicketKey = tuple[str, int, int, int, int]
OF_NOW = -1  # worker of a backward that reads other weights than its forward


class Instruction(NamedTuple):
  """A row of the table, or an update."""

  slot: int
  kind: str  # an action, or UPDATE
  stage: int  # -1 for a user's action
  microbatch: int
  replica: int
  worker: int = 0  # gradient stream of the microbatch's update, at the stage
  last: bool = False  # whether this is the last microbatch of an update
  group: int = 0  # index of the update
  also: tuple["Instruction", ...] = ()  # updates to make together with it
  # Tickets that the forward and the backward of its microbatch read.
  tickets: tuple[TicketKey, ...] = ()
  needs: tuple[tuple, ...] = ()  # keys of entries that the instruction needs


class Program(NamedTuple):
  """A table as lists of instructions, with the tickets that they read."""

  schedule: Schedule
  together: bool  # as in `write`
  lanes: tuple[list[Instruction], ...]  # D lists, each sorted by slot
  places: list[list[int]]  # stage -> devices of its replicas
  table_rows: validate.TableRows
  order: np.ndarray  # int[S, M], result of `analyze.update_order`
  # For forwards and backwards: versions and workers of their tickets, each
  # int[S, M].
  reads: tuple[tuple[np.ndarray, np.ndarray], ...]
  last_reads: dict[TicketKey, int]  # ticket -> slot of its last read
  readers: dict[tuple[int, int], list[TicketKey]]  # by (stage, version)

  def of_lane(self, lane: int, first: int, until: int) -> list[Instruction]:
    """Returns a lane's instructions from slot `first` on, before `until`."""
    start, end = (
      bisect.bisect_left(self.lanes[lane], slot, key=lambda op: op.slot)
      for slot in (first, until)
    )
    return self.lanes[lane][start:end]


def write(
  schedule: Schedule,
  versions: analyze.Versions,
  *,
  streams: Sequence[int] | None = None,
  together: bool = False,
) -> Program:
  """Returns the program of a valid table in which all microbatches have a
  backward.

  The N workers of a stage, its entry of `streams`, take turns: update u is a
  message of worker u mod N, and the microbatches of the update read tickets of
  this worker. With N of `analyze.in_flight`, a worker gets a ticket only after
  its last message was received. None: one worker at each stage.

  With `together` a batch's updates of all stages are made at its end, those of
  a lane in one instruction. Then ValueError is raised if a stage begins a batch
  before others have ended the previous one.
  """
  table_rows, places = validate.rows(schedule), schedule.places()
  streams = [1] * schedule.stages if streams is None else streams
  workers = versions.update % np.array(streams)[:, None]
  same_version = versions.backward == versions.forward
  reads = (
    (versions.forward, workers),
    (versions.backward, np.where(same_version, workers, OF_NOW)),
  )
  order, last_reads = analyze.update_order(schedule), {}
  lanes: list[list[Instruction]] = [[] for _ in range(schedule.devices)]
  readers = collections.defaultdict(list)
  program = Program(
    schedule, together, tuple(lanes), places, table_rows, order, reads,
    last_reads, readers,
  )
  read_lists = [(v.tolist(), w.tolist()) for v, w in reads]

  def tickets_of(stage, microbatch, replica):
    pairs = [
      (v[stage][microbatch], w[stage][microbatch]) for v, w in read_lists
    ]
    return tuple((TICKET, stage, v, replica, w) for v, w in pairs)

  replica_of = [{d: i for i, d in enumerate(devices)} for devices in places]
  # [1] One instruction for each task, with the ticket and the entry it needs.
  for slot, device, stage, microbatch, action in schedule.tasks:
    op = Instruction(slot, action, stage, microbatch, 0)
    if action in validate.KNOWN:
      replica = replica_of[stage][device]
      tickets = tickets_of(stage, microbatch, replica)
      needs = [tickets[action != FORWARD]]
      if action == FORWARD and stage:
        needs.append(("x", stage, microbatch))
      elif action in (BACKWARD, INPUT) and stage + 1 < schedule.stages:
        needs.append(("g", stage, microbatch))
      op = op._replace(replica=replica, tickets=tickets, needs=tuple(needs))
    lanes[device].append(op)
  # [2] One update instruction for each gradient, on the stage's first device.
  for stage, stage_devices in enumerate(places):
    for number, microbatch in enumerate(order[stage].tolist()):
      row = table_rows.weight[stage, microbatch]
      slot, device = int(schedule.time[row]), int(schedule.device[row])
      group, position = divmod(number, schedule.every)
      op = Instruction(
        slot, UPDATE, stage, microbatch, replica_of[stage][device],
        int(workers[stage, microbatch]), position + 1 == schedule.every, group,
        needs=(("m", stage, microbatch),),
      )
      lanes[stage_devices[0]].append(op)
      for ticket in tickets_of(stage, microbatch, op.replica):
        last_reads[ticket] = max(slot, last_reads.get(ticket, slot))
  # [3] Order the lanes: in a slot, updates follow the backward that they need.
  if together:
    lanes = _merge_updates(lanes, schedule, table_rows)
  for lane in lanes:
    lane.sort(key=lambda op: (op.slot, op.kind == UPDATE))
  for ticket in sorted(last_reads):
    readers[ticket[1:3]].append(ticket)
  return program._replace(lanes=tuple(lanes))


def _merge_updates(
  lanes: Sequence[Sequence[Instruction]],
  schedule: Schedule,
  table_rows: validate.TableRows,
) -> list[list[Instruction]]:
  """Returns the lanes with a batch's updates in one instruction at its end."""
  shape = schedule.stages, -1, schedule.every
  batch_starts = schedule.time[table_rows.forward].reshape(shape)
  batch_ends = schedule.time[table_rows.weight].reshape(shape).max((0, 2))
  starts_early = (batch_starts.min((0, 2))[1:] <= batch_ends[:-1]).any()
  if not schedule.flush or starts_early:
    raise ValueError(
      f"{schedule.name} begins a batch before the one before has ended at all"
      " stages, so their updates cannot be made together: use a table of one"
      " batch"
    )
  merged_lanes = []
  for lane in lanes:
    groups = collections.defaultdict(list)
    for op in lane:
      if op.last:
        groups[op.group].append(op._replace(slot=int(batch_ends[op.group])))
    ops = [op for op in lane if not op.last]
    for first_op, *later_ops in groups.values():
      needs = sum((op.needs for op in (first_op, *later_ops)), ())
      ops.append(first_op._replace(also=tuple(later_ops), needs=needs))
    merged_lanes.append(ops)
  return merged_lanes
