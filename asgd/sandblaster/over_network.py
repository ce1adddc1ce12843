"""Simulation of Sandblaster with messages that take time on a network.

  job      coordinator --> worker     the latency
  fetch    worker --> shards          unless it has the parameters; no bytes
  params   worker <-- shards          each shard's part of the parameters
  push     worker --> shards          each shard's part of the sum of gradients
  done     coordinator <-- shards     the latency

The links between workers and shards are those of `asgd.orders.network`. A `dot`
takes the latency twice, from the coordinator to the shards and back. A command
without an answer takes no time: it is sent together with the next `dot`. While
the coordinator waits for a `dot` it handles no message, as in a live run.
"""

import math
from typing import Any

import jax

from asgd import sharding
from asgd.orders.network import LinkUse, Network
from asgd.orders.network_events import (
  DOWN,
  IN_TRANSIT,
  MESSAGE,
  UP,
  Message,
  NetworkEvents,
)
from asgd.sandblaster.commands import Command
from asgd.sandblaster.simulation import (
  PortionTicket,
  SandblasterSimulation,
  Saved,
)

_FETCH, _PARAMS, _LATE, _PUSH = "fetch", "params", "late", "push"  # messages
# Kinds of events of a job; their subject is (worker, seq).
_JOB, _COMPUTED, _DONE = "job", "computed", "done"


class SandblasterOverNetwork(SandblasterSimulation):
  """A run of Sandblaster L-BFGS over a network.

  Example:
    A portion takes 1, and each of the five arrows 0.5. The first iterate has
    its loss, and the norm of its gradient one `dot` later.

    >>> import jax
    >>> import numpy as np
    >>> from asgd import orders
    >>> from asgd.sandblaster import SandblasterOverNetwork, Settings
    >>> work = jax.value_and_grad(lambda x, p: (p + 1) * (x**2).sum())
    >>> run = SandblasterOverNetwork(
    ...   Settings(portions=1), np.float32([3.0, 4.0]), work,
    ...   orders.durations.constant(), workers=1,
    ...   network=orders.network.Network(latency=0.5),
    ... )
    >>> run.advance(until=1)
    1
    >>> run.run_log.records().time.tolist(), run.run_log.iterates[0].time
    ([3.5], 4.5)
  """

  def __init__(
    self, *args: Any, network: Network, workers: int, **options: Any
  ):
    """Takes the arguments of `SandblasterSimulation` and a network. The network
    gets the number of shards of the settings."""
    settings, params, *_ = args
    self._network = network._replace(shards=settings.shards)
    # Events before `now`, of links and workers, may follow: the coordinator is
    # ahead of them while it waits for a `dot`.
    self._events = NetworkEvents(self._network, workers)
    parts = sharding.split(sharding.make_plan(params, settings.shards), params)
    self._sizes = {
      shard: float(sum(leaf.nbytes for leaf in jax.tree.leaves(part)))
      for shard, part in enumerate(parts)
    }
    self._queued = [0.0] * workers  # time of each worker's job in queues
    super().__init__(*args, workers=workers, **options)

  def use(self) -> LinkUse:
    """Returns the use of the links until now."""
    return self._events.links.use(max(self.now, self._events.now))

  # Running.

  def _answer(self, value: float | None) -> None:
    """See the base. A `dot` takes the latency twice."""
    if isinstance(self.request, Command) and value is not None:
      self.now += 2 * self._network.latency
    super()._answer(value)

  def _schedule(self, time: float, kind: str, index: Any) -> None:
    self._events.put(time, IN_TRANSIT, kind, index)

  def _ticket(self, worker: int, job: int, fresh: bool) -> PortionTicket:
    seq, self._queued[worker] = self._workers[worker].seq, 0.0
    self._schedule(self.now + self._network.latency, _JOB, (worker, seq))
    return PortionTicket(self._evaluation, job, seq, math.nan, fresh)

  def _step(self) -> bool:
    """Handles the next event; there always is one."""
    kind, subject = self._events.pop()
    queue_time = 0.0
    if kind == MESSAGE:
      worker, seq, kind = subject.worker, subject.number, subject.kind
      queue_time = subject.waited
    elif kind in (_JOB, _COMPUTED, _DONE):
      worker, seq = subject
    else:  # of a process that exits or restarts
      self._handle(self._events.now, kind, subject)
      return True
    ticket = self._workers[worker].ticket
    # Ignore the event of a job that was lost with its worker.
    if ticket is not None and ticket.seq == seq:
      self._queued[worker] += queue_time
      self._follow(kind, worker, ticket)
    return True

  def _follow(self, kind: str, worker: int, ticket: PortionTicket) -> None:
    """Takes the next step of a job, after an event `kind`."""
    time = self._events.now
    if kind == _JOB and ticket.fresh:
      self._send(_FETCH, UP, worker, dict.fromkeys(self._sizes, 0.0))
    elif kind == _FETCH and ticket.evaluation != self._evaluation:
      # The shards no longer have the parameters of a late copy of a job.
      self._send(_LATE, DOWN, worker, dict.fromkeys(self._sizes, 0.0))
    elif kind == _FETCH:
      self._send(_PARAMS, DOWN, worker, self._sizes)
    elif kind in (_JOB, _PARAMS):
      end = self._end_of(worker, ticket.job, time)
      self._schedule(end, _COMPUTED, (worker, ticket.seq))
    elif kind == _COMPUTED:
      self._send(_PUSH, UP, worker, self._sizes)
    elif kind in (_PUSH, _LATE):
      done_time = time + self._network.latency
      self._schedule(done_time, _DONE, (worker, ticket.seq))
    else:
      self._events.links.count_received(self._queued[worker])
      self.now = max(time, self.now)
      self._finish(worker, ticket)

  def _send(
    self, kind: str, direction: str, worker: int, sizes: dict[int, float]
  ) -> None:
    seq = self._workers[worker].ticket.seq
    self._events.send(Message(kind, direction, worker, sizes, number=seq))

  # Checkpoints.

  def _pack(self):
    packed = super()._pack()
    events = {"events": self._events.pack(), "queued": [*self._queued]}
    self._evaluation_notes = {**self._evaluation_notes, **events}
    return packed

  def _unpack(self, saved: Saved) -> None:
    super()._unpack(saved)
    self._events.unpack(saved.notes["events"])
    self._queued = list(saved.notes["queued"])
