"""The order of a simulated cell, computed before the simulation or during it.

Over a network an order depends on the bytes of messages and tickets. A codec
makes the bytes depend on the content. Such an order is computed row by row
while the messages are computed.
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

# For "up" and "down": rows (worker, seq, bytes).
PacketSizes = dict[str, list[list[float]]]


class FixedOrder:
  """An order that is known before the first message."""

  def __init__(self, plan: Any, seed: int, batch: Any, root: jax.Array):
    """Computes the order of a cell; jobs use `batch` and the key `root`."""
    self._plan, self._data = plan, {"batch": batch, "root": root}
    self._order = None
    # Without a network, or with dense sizes, the order needs no contents.
    if plan.network is None:
      self.trace: base.Trace = plan.trace(seed)
    else:
      self._order = plan.over_network(seed, networks.dense_sizes(plan))
      self._order.until(plan.messages)
      self.trace = self._order.trace()
    self._end_rows = simulator.end_of_message(self.trace)
    self.choice: simulator.Choice = plan.simulator(self.trace)
    self._next_row = 0  # index of the next row to simulate

  def begin(self, simulation: simulator.SimulationState) -> None:
    """Starts to follow the order, from a state of the simulation."""
    follow = self.choice.simulator.follow
    self.run: simulator.TraceRun = follow(simulation, self.trace, **self._data)

  def until(self, messages: int) -> base.Records:
    """Simulates until `messages` are received in all."""
    self._next_row = int(self._end_rows[messages - 1])
    return self.run.until(self._next_row)

  def work(self) -> list[cell_progress.Segment]:
    """Returns the last segments of the workers' time."""
    rows = cell_progress.rows_before(self.trace, self._next_row)
    # Over a network, a job ends before its message arrives.
    compute_times = [self._order.compute_times] if self._order else []
    return cell_progress.segments(rows, *compute_times)

  def use(self) -> LinkUse | None:
    """Returns the use of the links until the end; None without a network."""
    return self._order and self._order.links.use(self._order.now)

  def save(self) -> PacketSizes | None:
    """Returns None: a checkpoint need not store this order."""
    return None


class GrownOrder:
  """An order over a network that is computed during the simulation."""

  def __init__(
    self,
    plan: Any,
    seed: int,
    batch: Any,
    root: jax.Array,
    *,
    saved: PacketSizes | None = None,
    rows: int = 0,
  ):
    """Starts an order, or rebuilds its first `rows` from sizes `saved`."""
    self._plan, self._data = plan, {"batch": batch, "root": root}
    self._shard_bytes = networks.shard_bytes(plan, plan.network.shards)
    self._packet_bytes = {
      direction: {
        (w, seq): size for w, seq, size in (saved or {}).get(direction, ())
      }
      for direction in ("up", "down")
    }
    self.choice = f"{simulator.HOST}: bytes of codes decide the order"
    self._next_row = 0  # index of the next row to simulate
    # `_packet_size` is called when a packet enters the network.
    size_functions = (
      functools.partial(self._packet_size, direction)
      for direction in ("up", "down")
    )
    sizes = play.Sizes(*size_functions)
    self._order = plan.over_network(seed, sizes)
    # The order repeats the rows that a checkpoint has simulated. Their sizes
    # are in `_packet_bytes`, so `_packet_size` needs no content here.
    while len(self._order.rows) < rows:
      self._order.advance()
    self._next_row = rows
    rows_made = self._order.rows[:rows]
    self._received = sum(row.action == base.RECEIVE for row in rows_made)

  @property
  def trace(self) -> base.Trace:
    """The rows that were simulated."""
    return from_events(self._order.rows[: self._next_row])

  def begin(self, simulation: simulator.SimulationState) -> None:
    """Starts to follow the order, from a state of the simulation."""
    plan = self._plan
    begin = simulator.begin_host(plan.server, plan.coded_worker())
    self.run: simulator.StepwiseRun = begin(simulation, **self._data)

  def until(self, messages: int) -> base.Records:
    """Simulates until `messages` are received in all."""
    while self._received < messages:
      # If all rows so far are simulated, the order has to add the next ones.
      if self._next_row == len(self._order.rows):
        self._order.advance()
        continue
      self._run_row()
    return self.run.records()

  def work(self) -> list[cell_progress.Segment]:
    """Returns the last segments of the workers' time."""
    rows = cell_progress.rows_before(self._order.rows, self._next_row)
    return cell_progress.segments(rows, self._order.compute_times)

  def _run_row(self) -> None:
    """Simulates the next row."""
    event = self._order.rows[self._next_row]
    self.run.apply(event)
    self._next_row += 1
    self._received += event.action == base.RECEIVE

  def _packet_size(self, direction: str, worker: int, seq: int) -> Any:
    """Returns the bytes of a message or a ticket at each shard.

    The size is known when the content exists. So this method first simulates
    all rows that the order has.
    """
    bytes_by_packet = self._packet_bytes[direction]
    if (worker, seq) not in bytes_by_packet:
      while self._next_row < len(self._order.rows):
        self._run_row()
      if direction == "down":
        nbytes = self.run.bytes_down(worker, seq)
      else:
        job = self._order.job(worker, seq)
        nbytes = self.run.bytes_up(worker, seq, job)
      bytes_by_packet[worker, seq] = nbytes
    # Each shard gets a part of the packet.
    return networks.divide_bytes(
      bytes_by_packet[worker, seq], self._shard_bytes
    )

  def use(self) -> LinkUse:
    """Returns the use of the links until the last row."""
    time = self._order.rows[self._next_row - 1].time
    return self._order.links.use(time)

  def save(self) -> PacketSizes:
    """Returns the sizes of all messages and tickets so far, as plain data."""
    return {
      direction: [[*key, size] for key, size in bytes_by_packet.items()]
      for direction, bytes_by_packet in self._packet_bytes.items()
    }


def make_order(
  plan: Any, seed: int, batch: Any, root: jax.Array, **saved: Any
) -> FixedOrder | GrownOrder:
  """Returns the order of a cell; `saved` are arguments of `GrownOrder`."""
  if plan.network is not None and networks.has_coded_sizes(plan):
    return GrownOrder(plan, seed, batch, root, **saved)
  return FixedOrder(plan, seed, batch, root)
