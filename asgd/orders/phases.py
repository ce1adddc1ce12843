"""The time of one step of a model that is divided among machines.

A step has phases, one for each layer, forward and then backward. In each phase
a machine computes its part of the layer, and then sends to the other machines
the values that they need:

  compute --> up --> latency --> port of the receiver --> service

A machine begins the next phase once it has computed this one and has received
all messages of this phase. Messages pass the lines of `asgd.orders.network`.
Each machine has a link for sending and a port for receiving, and processes one
message after the other.

Index letters:
  K  phases of a step
  P  machines
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import checks
from asgd.orders.durations import Durations
from asgd.orders.network import Links, MessagePart, Network


class Phase(NamedTuple):
  """The computation and the messages of P machines between two waits."""

  flops: Sequence[float]  # [P], floating point operations of each machine
  sends: Sequence[Mapping[int, float]]  # [P], receiver -> bytes, by sender


def check(phases: Sequence[Phase], flops: float) -> int:
  """Checks K phases and the operations per second of a machine; returns P.

  Raises ValueError if there is no phase or no machine, if phases have different
  numbers of machines, if operations or bytes are negative, if a receiver is not
  another machine, or if `flops` is not positive.

  Example:
    >>> from asgd.orders import phases
    >>> phases.check([phases.Phase([2.0, 2.0], [{1: 8.0}, {0: 8.0}])], 1e9)
    2
  """
  checks.positive("flops", flops)
  n_machines = len(phases[0].flops) if phases else 0
  if not n_machines:
    raise ValueError("a step needs at least one phase and one machine")
  for index, phase in enumerate(phases):
    sizes = {len(phase.flops), len(phase.sends)}
    if sizes != {n_machines}:
      raise ValueError(
        f"phase {index} must have operations and messages of {n_machines}"
        f" machines, as the first has, not of {len(phase.flops)} and"
        f" {len(phase.sends)}"
      )
    for machine, messages in enumerate(phase.sends):
      checks.nonnegative(f"flops of phase {index}", phase.flops[machine])
      for receiver, nbytes in messages.items():
        checks.nonnegative(f"bytes of phase {index}", nbytes)
        if receiver == machine or receiver not in range(n_machines):
          raise ValueError(
            f"phase {index}: machine {machine} of {n_machines} cannot send to"
            f" {receiver!r}; name another machine, from 0"
          )
  return n_machines


class _Step:
  """Plays a step, message by message."""

  def __init__(
    self,
    phases: Sequence[Phase],
    durations: Sequence[Sequence[float]],
    network: Network,
  ):
    """`durations` are the seconds of computing, by [phase][machine]."""
    n_machines = len(phases[0].flops)
    self._phases, self._durations = phases, durations
    self._links = Links(network._replace(shards=n_machines), n_machines)
    # By machine: the index of its present phase, and the time at which it has
    # computed its part of the phase (infinity before).
    self._phase_of = [0] * n_machines
    self._computed = [math.inf] * n_machines
    # [phase][machine]: number of messages that have not arrived, and the time
    # of the last arrival.
    self._missing = [[0] * n_machines for _ in phases]
    self._last_arrival = [[0.0] * n_machines for _ in phases]
    for n_missing, phase in zip(self._missing, phases, strict=True):
      for messages in phase.sends:
        for receiver in messages:
          n_missing[receiver] += 1
    # Heap of (time, rank of entry, None, machine that has computed) and of
    # (time, rank, part, line), the events of `Links`.
    self._heap: list[tuple[float, int, Any, Any]] = []
    self._count, self._end = 0, 0.0

  def run(self) -> float:
    """Returns the time at which the last machine has ended the step."""
    for machine in range(len(self._phase_of)):
      self._begin(machine, 0.0)
    while self._heap:
      now, _, part, machine_or_line = heapq.heappop(self._heap)
      if part is None:
        self._send_messages(machine_or_line, now)
      else:
        self._move(now, part, machine_or_line)
    return self._end

  def _begin(self, machine: int, now: float) -> None:
    """Starts the present phase of a machine."""
    duration = self._durations[self._phase_of[machine]][machine]
    self._put(now + duration, None, machine)

  def _put(self, time, part, machine_or_line):
    self._count += 1
    heapq.heappush(self._heap, (time, self._count, part, machine_or_line))

  def _send_messages(self, machine: int, now: float) -> None:
    """Sends the messages of a machine that has computed its part of a phase."""
    phase_index, n_machines = self._phase_of[machine], len(self._phase_of)
    messages = self._phases[phase_index].sends[machine]
    # Each machine sends first to the machine with the next higher index.
    # Otherwise all messages would meet at the port of the first machine.
    receivers = sorted(messages, key=lambda to: (to - machine) % n_machines)
    for receiver in receivers:
      nbytes = messages[receiver]
      key = phase_index, receiver
      part = self._links.message_part(key, machine, receiver, nbytes)
      self._move(now, part, None)
    self._computed[machine] = now
    self._end_phase(machine)

  def _move(self, now: float, part: MessagePart, line: Any) -> None:
    """Moves a message's part, and ends the phase of its receiver if the message
    was the last that the receiver needed."""
    for time, next_part, next_line in self._links.advance(now, part, line):
      if next_part.has_arrived and next_line is None:
        phase_index, machine = next_part.key
        self._missing[phase_index][machine] -= 1
        arrivals = self._last_arrival[phase_index]
        arrivals[machine] = max(arrivals[machine], time)
        self._end_phase(machine)
      else:
        self._put(time, next_part, next_line)

  def _end_phase(self, machine: int) -> None:
    """Starts a machine's next phase if it has computed and has all messages."""
    phase_index, computed = self._phase_of[machine], self._computed[machine]
    if computed == math.inf or self._missing[phase_index][machine]:
      return
    self._computed[machine] = math.inf
    self._phase_of[machine] += 1
    now = max(computed, self._last_arrival[phase_index][machine])
    if self._phase_of[machine] < len(self._phases):
      self._begin(machine, now)
    else:
      self._end = max(self._end, now)


def step_seconds(
  phases: Sequence[Phase],
  network: Network,
  *,
  flops: float,
  factors: np.ndarray | None = None,
) -> float:
  """Returns the seconds of a step, until its last machine has ended it.

  A machine computes for factor x operations / flops.

  Args:
    phases: K phases of P machines.
    network: in seconds and bytes. `up` is the bandwidth of a machine's sending
      link, `port` that of its receiving port, `service` the time in which it
      processes a message. `shards` and `down` are ignored.
    flops: operations per second of a machine.
    factors: float[K, P], slowdown of each machine in each phase; None is 1.

  Raises:
    ValueError: the errors of `check`, and those of `network.check`.

  Source:
    Dean et al., "Large scale distributed deep networks", NIPS 2012, section 3,
    for this division of a model. The model of time is ours.

  Example:
    Two machines compute for 3 s and swap 8 bytes at 4 bytes per second.

    >>> from asgd.orders import network, phases
    >>> swap = phases.Phase([6.0, 6.0], [{1: 8.0}, {0: 8.0}])
    >>> wire = network.Network(latency=0.5, up=4.0, port=4.0)
    >>> phases.step_seconds([swap], wire, flops=2.0)
    5.5
  """
  check(phases, flops)
  durations = np.array([phase.flops for phase in phases], float) / flops
  if factors is not None:
    durations = durations * factors
  return _Step(phases, durations.tolist(), network).run()


def most_seconds(
  phases: Sequence[Phase], network: Network, *, flops: float
) -> float:
  """Returns the seconds of a step without any overlap: an upper bound of
  `step_seconds` with the same arguments.

  Example:
    >>> from asgd.orders import network, phases
    >>> swap = phases.Phase([6.0, 6.0], [{1: 8.0}, {0: 8.0}])
    >>> wire = network.Network(latency=0.5, up=4.0)
    >>> phases.most_seconds([swap], wire, flops=2.0)
    11.0
  """
  check(phases, flops)
  sizes = [n for p in phases for sends in p.sends for n in sends.values()]
  fixed_seconds = network.latency + network.service
  message_seconds = [
    fixed_seconds + n / network.up + n / network.port for n in sizes
  ]
  compute_seconds = math.fsum(sum(phase.flops) for phase in phases) / flops
  return math.fsum([compute_seconds, *message_seconds])


def partitioned(
  phases: Sequence[Phase], network: Network, *, flops: float, mean: float = 1.0,
  variation: float = 0.1, seed: int = 0,
) -> Durations:
  """Durations of jobs that are steps of a model divided among machines.

    time = mean T_P / T_1,   T_1 = sum of all operations / flops

  The time of each machine in each phase is drawn. A machine waits for the
  slowest of the machines that send to it.

  Args:
    phases, network, flops: as in `step_seconds`.
    mean: time of a step on one machine, positive, in any unit.
    variation: V of the time of a machine in a phase, 0 or more (`gamma`).
    seed: 0 or more. The times of a worker depend only on the seed and its
      index.

  Raises:
    ValueError: for a value out of its range, or no operations at all.

  Example:
    Two machines compute for half the time of one machine, and send for the
    other half: a step takes as long as on one machine.

    >>> from asgd.orders import network, phases
    >>> swap = phases.Phase([6.0, 6.0], [{1: 6.0}, {0: 6.0}])
    >>> clock = phases.partitioned(
    ...   [swap], network.Network(up=2.0), flops=2.0, variation=0.0
    ... )
    >>> next(clock.stream(0))
    1.0
  """
  checks.positive("mean", mean)
  checks.nonnegative("variation", variation)
  checks.integer("seed", seed, 0)
  shape = len(phases), check(phases, flops)
  one_machine_seconds = sum(sum(phase.flops) for phase in phases) / flops
  if not one_machine_seconds:
    raise ValueError("the phases have no operations, so nothing takes time")

  def stream(worker: int) -> Iterator[float]:
    rng, factors = np.random.default_rng((seed, worker)), np.ones(shape)
    while True:
      if variation:
        factors = rng.gamma(1 / variation**2, variation**2, shape)
      seconds = step_seconds(phases, network, flops=flops, factors=factors)
      yield mean * seconds / one_machine_seconds

  return Durations(stream)
