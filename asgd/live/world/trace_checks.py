"""Checks a trace with code that is independent of the runtime.

The checks call neither a server nor a dispatcher. So they also find a fault in
code that live runs and replays share; a replay would only repeat the fault.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asgd import base
from asgd.orders.protocol import Rules
from asgd.orders.trace import STARTS, Event


class Received(NamedTuple):
  """A received message and the values that its record must have."""

  row: int  # index in the trace
  event: Event
  staleness: int
  accepted: bool
  update: int  # version of the parameters after the message


def received_messages(
  events: Iterable[Event],
  *,
  messages_per_update: int = 1,
  drops_stale: bool = False,
) -> list[Received]:
  """Returns all messages of a shard's trace, undone ones included.

  Args:
    events: rows of the shard's trace.
    messages_per_update: number of messages in one update.
    drops_stale: whether the shard drops messages of an older version.

  Raises:
    ValueError: a row has another version than the rows before it imply.
  """
  count = 0  # accepted messages in the shard's state
  counts = []  # the count before each row, to which a ROLLBACK returns
  versions: dict[tuple[int, int], int] = {}  # key of a job -> of its ticket
  latest_versions: dict[int, int] = {}  # worker -> of its latest ticket
  messages = []
  for row, event in enumerate(events):
    counts.append(count)
    version = count // messages_per_update
    if event.action in STARTS:
      if event.action == base.SEND:
        latest_versions[event.worker] = version
      elif messages_per_update == 1 and not drops_stale:
        # A kept ticket includes the update of the worker's previous job.
        latest_versions[event.worker] += 1
      versions[event.key] = version = latest_versions[event.worker]
      if event.version != version:
        raise ValueError(
          f"row {row} ({event}) should be of version {version}"
        )
    elif event.action == base.ROLLBACK:
      count = counts[event.job]  # the `job` of a ROLLBACK is a row index
    elif event.action == base.RECEIVE:
      staleness = max(version - versions.pop(event.key), 0)
      accepted = not drops_stale or staleness == 0
      count += accepted
      update = count // messages_per_update
      messages.append(Received(row, event, staleness, accepted, update))
  return messages


class _RuleChecker:
  """Follows the rows of a lead's trace and checks each job that starts."""

  def __init__(self, rules: Rules, jobs: int, owned: bool):
    self._rules, self._jobs, self._owned = rules, jobs, owned
    self._present: set[int] = set()  # workers that have joined
    self._clocks = collections.Counter[int]()  # jobs ended, by worker
    # By worker: seq of an open job -> index of the round in which it started.
    self._open: dict[int, dict[int, int]] = collections.defaultdict(dict)
    self._started: set[int] = set()  # jobs
    self._lost: set[tuple[int, int]] = set()  # (job, its owner)
    # By worker: number of jobs on the latest ticket.
    self._jobs_on_ticket = collections.Counter[int]()
    # By worker: the slowest worker's clock when the latest ticket was sent.
    self._slowest_at_send: dict[int, int] = {}
    # The present round, and the jobs received and started in it.
    self._round_index = self._received_in_round = self._started_in_round = 0

  def _owner(self, worker: int) -> int:
    """Returns the owner of the worker's jobs; -1 if no worker owns jobs."""
    return worker if self._owned else -1

  def _is_busy(self, worker: int) -> bool:
    """Whether a worker has an open job or can still get one."""
    owner = self._owner(worker)
    return bool(
      self._open[worker]
      or len(self._started) < self._jobs
      or any(owner_of_lost == owner for _, owner_of_lost in self._lost)
    )

  def _slowest(self) -> int:
    """Returns the smallest clock of the workers for which others wait."""
    clocks = [
      self._clocks[worker] for worker in self._present if self._is_busy(worker)
    ]
    return min(clocks, default=0)

  def _start(self, event: Event) -> str:
    """Applies a SEND or KEEP; returns the broken rule, "" if it is allowed."""
    rules, worker, job = self._rules, event.worker, event.job
    # [1] The bound of staleness.
    clock = self._clocks[worker] + len(self._open[worker])
    clocks_ahead = clock - self._slowest()
    if clocks_ahead > rules.bound:
      return f"worker {worker} is {clocks_ahead} ahead of the slowest"
    # [2] A ticket is used for as many jobs as the rules say, and no more.
    jobs_on_ticket = self._jobs_on_ticket[worker]
    keeps = 0 < jobs_on_ticket < rules.fetch_every
    if rules.cache and jobs_on_ticket:
      keeps = clock - self._slowest_at_send[worker] <= rules.bound
    if keeps != (event.action == base.KEEP):
      due_action = "KEEP" if keeps else "SEND"
      return f"{due_action} was due after {jobs_on_ticket} jobs on the ticket"
    # [3] A job starts once, and again only if its owner has lost it.
    owned_job = job, self._owner(worker)
    if job in self._started and owned_job not in self._lost:
      return f"job {job} is another worker's, or done"
    self._lost.discard(owned_job)
    self._started.add(job)
    if event.action == base.SEND:
      self._jobs_on_ticket[worker] = 0
      self._slowest_at_send[worker] = self._slowest()
    self._jobs_on_ticket[worker] += 1
    self._open[worker][event.seq] = self._round_index
    # [4] The size of a round.
    self._started_in_round += 1
    if rules.round and self._started_in_round > rules.round + rules.backup:
      return f"{self._started_in_round} jobs in a round"
    return ""

  def apply(self, event: Event) -> str:
    """Applies the next row; returns the broken rule, "" if it is allowed."""
    worker, action = event.worker, event.action
    if action in STARTS:
      return self._start(event)
    if action == base.JOIN:
      # The other workers do not wait for a worker that joins late.
      self._clocks[worker] = max(self._clocks[worker], self._slowest())
      self._jobs_on_ticket[worker] = 0
      self._present.add(worker)
    elif action == base.LEAVE:
      self._present.discard(worker)
    elif action == base.RECEIVE:
      self._clocks[worker] += 1
      # A backup worker's message of an earlier round does not fill this one.
      round_index = self._open[worker].pop(event.seq)
      self._received_in_round += round_index == self._round_index
      if self._received_in_round == self._rules.round:
        self._round_index += 1
        self._received_in_round = self._started_in_round = 0
    elif action in (base.LOST, base.REJECT):
      # The job is started again, in its round if that round has not ended.
      round_index = self._open[worker].pop(event.seq)
      self._started_in_round -= round_index == self._round_index
      self._lost.add((event.job, self._owner(worker)))
    return ""


def check_protocol(
  events: Sequence[Event], rules: Rules, *, jobs: int, owned: bool = False
) -> None:
  """Checks the jobs of a lead's trace against the rules of its order.

  Args:
    events: rows of the lead's trace.
    rules: the rules of the order.
    jobs: the number of jobs of the run.
    owned: whether each job belongs to one worker.

  Raises:
    ValueError: for the first job that was started
      - further ahead of the slowest worker than the bound,
      - beyond the jobs of its round,
      - on a kept ticket where a new one was due, or the reverse,
      - twice, although it was not lost, or
      - by a worker that does not own it.
  """
  checker = _RuleChecker(rules, jobs, owned)
  for row, event in enumerate(events):
    if broken_rule := checker.apply(event):
      raise ValueError(f"row {row} ({event.format()}): {broken_rule}")
