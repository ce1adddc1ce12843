"""The order of a simulated cell, made before the simulation or during it.

Over a network an order depends on the bytes of messages and tickets. A codec
makes the bytes depend on the content. Such an order is made row by row while
the messages are computed.
"""

import functools
from typing import Any

import jax

from asgd import base, simulator
from asgd.experiment import cell_progress
from asgd.experiment.engines import networks
from asgd.orders import play
from asgd.orders.network import LinkUse
from asgd.orders.trace import from_events

Sizes = dict[str, list[list[float]]]  # "up", "down": rows (worker, seq, bytes)


class MadeOrder:
  """An order that is known before the first message."""

  def __init__(self, plan: Any, seed: int, batch: Any, root: jax.Array):
    """Makes the order of a cell; jobs use `batch` and the key `root`."""
    self._plan, self._data = plan, {"batch": batch, "root": root}
    self._order = None
    # Without a network, or with dense sizes, nothing depends on contents.
    if plan.network is None:
      self.trace: base.Trace = plan.trace(seed)
    else:
      self._order = plan.over_network(seed, networks.dense(plan))
      self._order.until(plan.messages)
      self.trace = self._order.trace()
    self._end_rows = simulator.end_of_message(self.trace)
    self.choice: simulator.Choice = plan.simulator(self.trace)
    self._row = 0  # the next one

  def begin(self, simulation: simulator.SimulationState) -> None:
    """Starts to follow the order, from a state of the simulation."""
    follow = self.choice.simulator.follow
    self.run: simulator.TraceRun = follow(simulation, self.trace, **self._data)

  def until(self, messages: int) -> base.Records:
    """Simulates until `messages` are received in all."""
    self._row = int(self._end_rows[messages - 1])
    return self.run.until(self._row)

  def work(self) -> list[cell_progress.Segment]:
    """Returns the last segments of the workers' time."""
    rows = cell_progress.rows_before(self.trace, self._row)
    # Over a network, a job ends before its message arrives.
    over_network = [self._order.compute_times] if self._order else []
    return cell_progress.segments(rows, *over_network)

  def use(self) -> LinkUse | None:
    """Returns the use of each link by the end, None without a network."""
    return self._order and self._order.links.use(self._order.now)

  def save(self) -> Sizes | None:
    """Returns None: a checkpoint need not store this order."""
    return None


class GrownOrder:
  """An order over a network that is made while it is simulated."""

  def __init__(
    self,
    plan: Any,
    seed: int,
    batch: Any,
    root: jax.Array,
    *,
    saved: Sizes | None = None,
    rows: int = 0,
  ):
    """Starts an order, or rebuilds its first `rows` from sizes `saved`."""
    self._plan, self._data = plan, {"batch": batch, "root": root}
    self._shard_bytes = networks.shares(plan, plan.network.shards)
    self._packet_bytes = {
      way: {(w, seq): size for w, seq, size in (saved or {}).get(way, ())}
      for way in ("up", "down")
    }
    self.choice = f"{simulator.HOST}: bytes of codes decide the order"
    self._next = 0  # index of the next row to simulate
    # `_size` is called when a packet enters the network.
    ways = (functools.partial(self._size, way) for way in ("up", "down"))
    sizes = play.Sizes(*ways)
    self._order = plan.over_network(seed, sizes)
    # Saved sizes are in `_packet_bytes`, so `_size` needs no content here.
    # The order repeats the rows that a checkpoint has simulated.
    while len(self._order.rows) < rows:
      self._order.advance()
    self._next = rows
    rows_made = self._order.rows[:rows]
    self._received = sum(row.action == base.RECEIVE for row in rows_made)

  @property
  def trace(self) -> base.Trace:
    """The rows that were simulated."""
    return from_events(self._order.rows[: self._next])

  def begin(self, simulation: simulator.SimulationState) -> None:
    """Starts to follow the order, from a state of the simulation."""
    plan = self._plan
    begin = simulator.begin_host(plan.server, plan.coded_worker())
    self.run: simulator.StepwiseRun = begin(simulation, **self._data)

  def until(self, messages: int) -> base.Records:
    """Simulates until `messages` are received in all."""
    while self._received < messages:
      # All rows are simulated: the order makes the next ones.
      if self._next == len(self._order.rows):
        self._order.advance()
        continue
      self._run_row()
    return self.run.records()

  def work(self) -> list[cell_progress.Segment]:
    """Returns the last segments of the workers' time."""
    rows = cell_progress.rows_before(self._order.rows, self._next)
    return cell_progress.segments(rows, self._order.compute_times)

  def _run_row(self) -> None:
    """Simulates the next row."""
    event = self._order.rows[self._next]
    self.run.apply(event)
    self._next += 1
    self._received += event.action == base.RECEIVE

  def _size(self, way: str, worker: int, seq: int) -> Any:
    """Returns the bytes of a message or a ticket at each shard.

    The content must exist before it has a size. So all rows that are made
    already are simulated first.
    """
    way_bytes = self._packet_bytes[way]
    if (worker, seq) not in way_bytes:
      while self._next < len(self._order.rows):
        self._run_row()
      if way == "down":
        nbytes = self.run.bytes_down(worker, seq)
      else:
        job = self._order.job(worker, seq)
        nbytes = self.run.bytes_up(worker, seq, job)
      way_bytes[worker, seq] = nbytes
    # Each shard gets its part of the packet.
    return networks.divided(way_bytes[worker, seq], self._shard_bytes)

  def use(self) -> LinkUse:
    """Returns the use of each link by the last message."""
    time = self._order.rows[self._next - 1].time
    return self._order.links.use(time)

  def save(self) -> Sizes:
    """Returns the sizes of all messages and tickets so far, as plain data."""
    return {
      way: [[*key, size] for key, size in way_bytes.items()]
      for way, way_bytes in self._packet_bytes.items()
    }


def order_of(
  plan: Any, seed: int, batch: Any, root: jax.Array, **saved: Any
) -> MadeOrder | GrownOrder:
  """Returns the order of a cell; `saved` as `GrownOrder` takes it."""
  if plan.network is not None and networks.coded(plan):
    return GrownOrder(plan, seed, batch, root, **saved)
  return MadeOrder(plan, seed, batch, root)
