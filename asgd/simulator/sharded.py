"""The engine for a server in shards: replays one trace a shard.

The work ties the shards together: a job starts when all of them have sent their
part of the ticket, and none can receive its part of the message before that.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, compression, own_writes, sharding
from asgd.orders import trace as trace_lib
from asgd.orders.trace import Event
from asgd.simulator import steps as steps_lib
from asgd.simulator.records import fetch
from asgd.simulator.simulation import needs_of
from asgd.simulator.stepwise import ServerReplay
from asgd.simulator.traffic import Sent

_Key = tuple[int, int]  # (worker, seq), which names a message


class ShardedRun(NamedTuple):
  """The result of a run."""

  states: tuple[base.ServerState, ...]  # S
  records: tuple[base.Records, ...]  # S


class _Shard(ServerReplay):
  """One shard, its trace and its position in it."""

  def __init__(self, state, steps, trace, worker_indices):
    super().__init__(state, steps, worker_indices, **needs_of(trace))
    self.events = list(trace_lib.events(trace))
    # Kept until the job has ended at all shards: the lead may close a ticket
    # whose message another shard receives.
    self.tickets: dict[_Key, base.Ticket] = {}

  def go_to(self, rows: int, tickets: Sequence[Any]) -> None:
    """Goes to a row, with tickets (worker, seq, version, fresh, params), where
    seq is None for a worker's latest."""
    past, ledger = trace_lib.follow(self.events[:rows]), self.ledger
    copied = "rows", "time", "next_seq", "incarnations", "present", "ended"
    for name in copied:
      setattr(ledger, name, getattr(past, name))
    ledger.received = past.received
    for worker, seq, version, fresh, params in tickets:
      worker_and_version = jnp.int32(worker), jnp.int32(version)
      ticket = base.Ticket(*worker_and_version, params, np.bool_(fresh))
      if seq is None:
        ledger.latest[worker] = ticket
        continue
      self.tickets[worker, seq] = ticket
      if seq in past.open[worker]:
        ledger.open[worker][seq] = ticket

  @property
  def next(self) -> Event | None:
    """The next row, None after the last."""
    row = self.ledger.rows
    return self.events[row] if row < len(self.events) else None


class ShardOptions(NamedTuple):
  """How shards and workers of a run compute."""

  # As in `compile_steps`.
  wire: str | None = None
  group: steps_lib.WorkerDevices = steps_lib.ALONE
  # [shard][row]: sums over all shards that the row's message needs; None if
  # the algorithm needs none.
  totals: Sequence[Sequence[tuple[float, ...]]] | None = None
  # The division of the parameters; None is `sharding.make_plan`. With a
  # pipeline's stages as shards, and their traces (`analyze.traces` of
  # `asgd.pipeline`), the delays are those of the pipeline.
  plan: sharding.ShardPlan | None = None


class Sharded:
  """A run of a server in shards, replayed as far as is asked for.

  Args:
    server: the pure server that each shard runs on its part.
    worker: as in `compile_steps`.
    params: before the first message.
    traces: of each shard; S of them, at least two. (worker, seq) names the same
      message in all of them; ValueError is raised if they do not fit.
    workers: N.
    batch: (worker, job) -> NumPy arrays.
    root: key of the run.
    options: how they compute.

  Attributes:
    plan: the rows of each shard.
  """

  def __init__(
    self,
    server: base.Server,
    worker: base.Worker,
    params: Any,
    traces: Sequence[base.Trace],
    *,
    workers: int,
    batch: Callable[[int, int], base.Batch],
    root: jax.Array,
    options: ShardOptions = ShardOptions(),  # noqa: B008  it is a constant
  ):
    wire, group, totals, plan = options
    plan = sharding.make_plan(params, len(traces)) if plan is None else plan
    if any(needs_of(trace)["keeps"] for trace in traces):
      worker = own_writes.own_writes(worker, server, plan)
    steps = steps_lib.compile_steps(
      server, worker, wire=wire, group=group, keeps_messages=True
    )
    worker_indices = [jnp.int32(w) for w in range(workers)]
    shards = [
      _Shard(steps_lib.start(server, part), steps, trace, worker_indices)
      for part, trace in zip(sharding.split(plan, params), traces, strict=True)
    ]
    self.plan, self._shards, self._totals = plan, shards, totals
    self._new_worker = lambda: worker.init(params)
    self._steps, self._batch, self._root = steps, batch, root
    self._workers: dict[_Key, Any] = {}  # (worker, incarnation) -> its state
    self._incarnations: dict[_Key, int] = {}  # message -> incarnation
    self._messages: dict[_Key, tuple[Any, ...]] = {}  # S parts, and the loss
    # message -> number of shards at which its job has ended
    self._ended_shards: dict[_Key, int] = {}

  def until(self, messages: int | None = None) -> None:
    """Replays rows, the earliest first, until the lead has received `messages`
    messages in all and the other shards have replayed all earlier rows; None
    replays all rows."""
    while following := sorted(self._following(messages)):
      # The earliest row may wait for a later one of another shard: apply the
      # first row that can be applied, then sort again.
      if any(self._apply(index) for _, index in following):
        continue
      rows = {i: self._shards[i].next.format() for _, i in following}
      raise ValueError(
        f"the shards' traces do not belong together: no row of {rows}"
        f" ({trace_lib.HEADER}) can be replayed"
      )

  def _following(self, messages: int | None) -> Iterator[tuple[float, int]]:
    """Yields (time, shard) of the next rows. Once the lead has received
    `messages`, only rows before its time, and at its time those of shards that
    have received fewer."""
    lead = self._shards[0].ledger
    lead_is_done = messages is not None and len(lead.received) >= messages
    for index, shard in enumerate(self._shards):
      event = shard.next
      if event is None:
        continue
      if lead_is_done:
        is_behind = index and len(shard.ledger.received) < messages
        if event.time > lead.time or (
          event.time == lead.time and not is_behind
        ):
          continue
      yield event.time, index

  def _apply(self, index: int) -> bool:
    """Replays a shard's next row; False if it has to wait for other shards."""
    shard = self._shards[index]
    event = shard.next
    if event is None:
      return False
    key, row, message = event.key, shard.ledger.rows, None
    with_message = base.RECEIVE, base.DROP  # both change the worker's state
    if event.action in with_message and key in shard.tickets:
      message = self._message(key, event.job)
      if message is None:
        return False
    ticket = shard.apply(event)
    if message is not None and event.action == base.RECEIVE:
      parts, loss = message
      sums = None if self._totals is None else self._totals[index][row]
      shard.receive(event, (ticket, parts[index], loss), sums)
    if event.action in trace_lib.ENDS:
      self._end(key)
    elif event.action in trace_lib.STARTS:
      shard.tickets[key] = ticket
      if index == 0:
        self._incarnations[key] = shard.ledger.incarnations.get(event.worker, 0)
    return True

  def _message(self, key: _Key, job: int) -> tuple[Any, ...] | None:
    """Returns a message, computing it if all shards have sent; else None."""
    if key in self._messages:
      return self._messages[key]
    tickets = [shard.tickets.get(key) for shard in self._shards]
    if any(ticket is None for ticket in tickets):
      return None
    # The worker computes on parts of different versions, as in a live run.
    params = sharding.join(self.plan, [ticket.params for ticket in tickets])
    ticket, worker = tickets[0]._replace(params=params), key[0]
    incarnation = worker, self._incarnations[key]
    if incarnation not in self._workers:
      self._workers[incarnation] = self._new_worker()
    self._workers[incarnation], message, metrics = self._steps.work(
      *(self._workers[incarnation], ticket, self._batch(worker, job)),
      *(self._root, np.int32(job)),
    )
    message, loss = fetch((message, metrics.loss))
    self._messages[key] = compression.split(self.plan, message), loss
    return self._messages[key]

  def _end(self, key: _Key) -> None:
    """Counts a job that has ended at a shard; drops it once all have ended it.
    """
    self._ended_shards[key] = self._ended_shards.get(key, 0) + 1
    if self._ended_shards[key] == len(self._shards):
      for shard in self._shards:
        shard.tickets.pop(key, None)
      for table in (self._messages, self._ended_shards, self._incarnations):
        table.pop(key, None)

  @property
  def states(self) -> tuple[base.ServerState, ...]:
    """The shards' states, S."""
    return tuple(shard.state for shard in self._shards)

  @property
  def params(self) -> Any:
    """The parameters of all shards, as NumPy arrays."""
    parts = [fetch(state.params) for state in self.states]
    return sharding.join(self.plan, parts)

  @property
  def _tables(self):
    return {"incarnation": self._incarnations, "ends": self._ended_shards}

  def pack(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the position of the run, without records: a tree of arrays and
    JSON, for `unpack` of a run of the same arguments."""
    sent_params: list[Any] = []
    tree: dict[str, Any] = {"servers": list(self.states), "sent": sent_params}
    notes: dict[str, Any] = {"shards": []}
    for index, shard in enumerate(self._shards):
      latest = {(w, None): t for w, t in shard.ledger.latest.items()}
      tickets = []
      for (worker, seq), ticket in (shard.tickets | latest).items():
        version, fresh = int(ticket.version), bool(ticket.fresh)
        tickets.append((worker, seq, version, fresh))
        sent_params.append((index, ticket.params))
      total, version, seen, ticket_bytes = shard.traffic.sent
      codes = [total, version, list(seen.items())]
      codes.append([(*key, number) for key, number in ticket_bytes.items()])
      notes["shards"].append([shard.ledger.rows, tickets, codes])
    notes["parts"] = [index for index, _ in sent_params]
    sent_params[:] = [params for _, params in sent_params]
    tree["workers"] = list(self._workers.values())
    tree["messages"] = [list(parts) for parts, _ in self._messages.values()]
    losses = [loss for _, loss in self._messages.values()]
    tree["losses"] = np.array(losses, np.float64)
    notes |= {"states": list(self._workers), "messages": list(self._messages)}
    for name, table in self._tables.items():
      notes[name] = [(*key, number) for key, number in table.items()]
    return tree, notes

  def like(self, notes: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree with the shapes of the one that `pack` returned with
    `notes`."""
    parts = [state.params for state in self.states]
    codec = self._steps.codec
    count = len(notes["messages"])
    return {
      "servers": list(self.states),
      "sent": [parts[index] for index in notes["parts"]],
      "workers": [self._new_worker() for _ in notes["states"]],
      "messages": [[compression.blank(codec, p) for p in parts]] * count,
      "losses": np.zeros(count),
    }

  def unpack(self, tree: dict[str, Any], notes: dict[str, Any]) -> None:
    """Goes to a packed position; the run may then overwrite the arrays."""
    sent_params = iter(tree["sent"])
    for shard, state, shard_notes in zip(
      self._shards, tree["servers"], notes["shards"], strict=True
    ):
      rows, tickets, (total, version, seen, ticket_bytes) = shard_notes
      shard.state = state
      shard.traffic.sent = Sent(
        *(total, version, dict(seen)),
        {(w, seq): n for w, seq, n in ticket_bytes},
      )
      shard.go_to(rows, [(*ticket, next(sent_params)) for ticket in tickets])
    keys = [tuple(key) for key in notes["states"]]
    self._workers.update(zip(keys, tree["workers"], strict=True))
    keys = [tuple(key) for key in notes["messages"]]
    losses = tree["losses"].astype(np.float32)
    results = zip(tree["messages"], losses, strict=True)
    self._messages.update(zip(keys, results, strict=True))
    for name, table in self._tables.items():
      table.update(((w, seq), number) for w, seq, number in notes[name])

  def records(self, start: int = 0) -> tuple[base.Records, ...]:
    """Returns the records of each shard's messages, from index `start` on; S.
    """
    return tuple(shard.records(start) for shard in self._shards)


def run_sharded(*args: Any, **options: Any) -> ShardedRun:
  """Replays a complete run with a server in shards. Arguments and errors are
  those of `Sharded`, with the fields of `ShardOptions` by name."""
  option_names = ShardOptions._fields
  shard_options = {
    key: options.pop(key) for key in option_names if key in options
  }
  run = Sharded(*args, **options, options=ShardOptions(**shard_options))
  run.until()
  return ShardedRun(run.states, run.records())
