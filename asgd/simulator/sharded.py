"""The engine for a server in shards: replays one trace for each shard.

The jobs connect the shards: a job starts when all shards have sent their parts
of its ticket, and no shard can receive its part of the message before that.
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
from asgd.simulator.simulation import replay_options
from asgd.simulator.stepwise import ServerReplay
from asgd.simulator.traffic import Sent

_Key = tuple[int, int]  # (worker, seq), which names a message


class ShardedRun(NamedTuple):
  """The result of a run with S shards."""

  states: tuple[base.ServerState, ...]  # S, the last state of each shard
  records: tuple[base.Records, ...]  # S, the messages of each shard


class _Shard(ServerReplay):
  """One shard, its trace and its position in it."""

  def __init__(self, state, steps, trace, worker_indices):
    super().__init__(state, steps, worker_indices, **replay_options(trace))
    self.events = list(trace_lib.events(trace))
    # A ticket stays here until its job has ended at all shards: the lead may
    # close the ticket before another shard receives the message.
    self.tickets: dict[_Key, base.Ticket] = {}

  def go_to(self, rows: int, tickets: Sequence[Any]) -> None:
    """Restores the position after `rows` rows. Each of `tickets` is (worker,
    seq, version, fresh, params); seq is None for the latest ticket of a worker.
    """
    earlier, ledger = trace_lib.follow(self.events[:rows]), self.ledger
    fields = "rows", "time", "next_seq", "incarnations", "present", "ended"
    for field in (*fields, "received"):
      setattr(ledger, field, getattr(earlier, field))
    for worker, seq, version, is_fresh, params in tickets:
      worker_and_version = jnp.int32(worker), jnp.int32(version)
      ticket = base.Ticket(*worker_and_version, params, np.bool_(is_fresh))
      if seq is None:
        ledger.latest[worker] = ticket
        continue
      self.tickets[worker, seq] = ticket
      if seq in earlier.open[worker]:
        ledger.open[worker][seq] = ticket

  @property
  def next_row(self) -> Event | None:
    """The next row of the trace; None after the last row."""
    row = self.ledger.rows
    return self.events[row] if row < len(self.events) else None


class ShardOptions(NamedTuple):
  """Options of a run with a server in shards."""

  # As in `compile_steps`.
  wire: str | None = None
  group: steps_lib.WorkerDevices = steps_lib.ALONE
  # [shard][row]: sums over all shards that the row's message needs; None if
  # the algorithm needs none.
  totals: Sequence[Sequence[tuple[float, ...]]] | None = None
  # The division of the parameters; None is `sharding.make_plan`. If the shards
  # are the stages of a pipeline, and the traces come from `analyze.traces` of
  # `asgd.pipeline`, the run has the delays of the pipeline.
  plan: sharding.ShardPlan | None = None


class Sharded:
  """A run of a server in shards; `until` replays it step by step.

  Args:
    server: the pure server that each shard runs on its part of the parameters.
    worker: as in `compile_steps`.
    params: the parameters before the first message.
    traces: S traces, at least two, one for each shard. (worker, seq) names the
      same message in all traces.
    workers: N.
    batch: (worker, job) -> NumPy arrays.
    root: key of the run.
    options: the options of shards and workers.

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
    if any(replay_options(trace)["keeps"] for trace in traces):
      worker = own_writes.own_writes(worker, server, plan)
    steps = steps_lib.compile_steps(
      server, worker, wire=wire, group=group, keeps_messages=True
    )
    worker_indices = steps_lib.worker_indices(workers)
    shards = [
      _Shard(steps_lib.start(server, part), steps, trace, worker_indices)
      for part, trace in zip(sharding.split(plan, params), traces, strict=True)
    ]
    self.plan, self._shards, self._totals = plan, shards, totals
    self._first_worker_state = lambda: worker.init(params)
    self._steps, self._batch, self._root = steps, batch, root
    self._workers: dict[_Key, Any] = {}  # (worker, incarnation) -> its state
    self._incarnations: dict[_Key, int] = {}  # message -> incarnation
    self._messages: dict[_Key, tuple[Any, ...]] = {}  # -> (S parts, loss)
    # message -> number of shards at which its job has ended
    self._ended_shards: dict[_Key, int] = {}

  def until(self, messages: int | None = None) -> None:
    """Replays rows, the earliest first, until the lead has received `messages`
    messages in all and the other shards have replayed all earlier rows; None
    replays all rows. Raises ValueError if no shard can replay its next row."""
    while next_rows := sorted(self._next_rows(messages)):
      # The earliest row may wait for a later one of another shard: apply the
      # first row that can be applied, then sort again.
      if any(self._apply(index) for _, index in next_rows):
        continue
      rows = {i: self._shards[i].next_row.format() for _, i in next_rows}
      raise ValueError(
        f"the shards' traces do not belong together: no row of {rows}"
        f" ({trace_lib.HEADER}) can be replayed"
      )

  def _next_rows(self, messages: int | None) -> Iterator[tuple[float, int]]:
    """Yields (time, shard) of the next row of each shard. If the lead has
    received `messages` messages, yields only rows before the time of the lead,
    and rows at that time of shards that have received fewer messages."""
    lead = self._shards[0].ledger
    is_lead_done = messages is not None and len(lead.received) >= messages
    for index, shard in enumerate(self._shards):
      event = shard.next_row
      if event is None:
        continue
      if is_lead_done:
        is_behind = index and len(shard.ledger.received) < messages
        if event.time > lead.time or (
          event.time == lead.time and not is_behind
        ):
          continue
      yield event.time, index

  def _apply(self, index: int) -> bool:
    """Replays the next row of a shard. Returns False if the row has to wait for
    other shards, or there is none."""
    shard = self._shards[index]
    event = shard.next_row
    if event is None:
      return False
    key, row, message = event.key, shard.ledger.rows, None
    # A dropped message also changes the worker's state.
    is_computed = event.action in (base.RECEIVE, base.DROP)
    if is_computed and key in shard.tickets:
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
    """Returns (parts, loss) of a message, and computes it if needed. Returns
    None if a shard has not sent its part of the ticket."""
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
      self._workers[incarnation] = self._first_worker_state()
    self._workers[incarnation], message, metrics = self._steps.work(
      *(self._workers[incarnation], ticket, self._batch(worker, job)),
      *(self._root, np.int32(job)),
    )
    message, loss = fetch((message, metrics.loss))
    self._messages[key] = compression.split(self.plan, message), loss
    return self._messages[key]

  def _end(self, key: _Key) -> None:
    """Counts a shard at which a job has ended; drops the job once it has ended
    at all shards."""
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
    """Returns the position of the run, without records, for `unpack` of a run
    with the same arguments: a tree of arrays, and JSON."""
    sent_params: list[Any] = []
    tree: dict[str, Any] = {"servers": list(self.states), "sent": sent_params}
    notes: dict[str, Any] = {"shards": []}
    for index, shard in enumerate(self._shards):
      latest = {(w, None): t for w, t in shard.ledger.latest.items()}
      tickets = []
      for (worker, seq), ticket in (shard.tickets | latest).items():
        version, is_fresh = int(ticket.version), bool(ticket.fresh)
        tickets.append((worker, seq, version, is_fresh))
        sent_params.append((index, ticket.params))
      total, version, total_at_ticket, ticket_bytes = shard.traffic.sent
      codes = [total, version, list(total_at_ticket.items())]
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

  def pack_template(self, notes: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree with the shapes of the tree that `pack` returned with
    `notes`."""
    parts = [state.params for state in self.states]
    codec = self._steps.codec
    count = len(notes["messages"])
    return {
      "servers": list(self.states),
      "sent": [parts[index] for index in notes["parts"]],
      "workers": [self._first_worker_state() for _ in notes["states"]],
      "messages": [[compression.blank(codec, p) for p in parts]] * count,
      "losses": np.zeros(count),
    }

  def unpack(self, tree: dict[str, Any], notes: dict[str, Any]) -> None:
    """Restores a packed position; the run may then overwrite the arrays."""
    sent_params = iter(tree["sent"])
    for shard, state, shard_notes in zip(
      self._shards, tree["servers"], notes["shards"], strict=True
    ):
      rows, tickets, codes = shard_notes
      total, version, totals, ticket_bytes = codes
      shard.state = state
      shard.traffic.sent = Sent(
        *(total, version, dict(totals)),
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
    """Returns the records of the messages of each of the S shards, from index
    `start` on."""
    return tuple(shard.records(start) for shard in self._shards)


def run_sharded(*args: Any, **options: Any) -> ShardedRun:
  """Replays a complete run with a server in shards. It takes the arguments of
  `Sharded`, with the fields of `ShardOptions` by name, and raises its errors.
  """
  option_names = ShardOptions._fields
  shard_options = {
    key: options.pop(key) for key in option_names if key in options
  }
  run = Sharded(*args, **options, options=ShardOptions(**shard_options))
  run.until()
  return ShardedRun(run.states, run.records())
