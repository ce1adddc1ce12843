"""What makes shards and workers in threads of this process.

XLA runs without Python's lock, so workers really run at the same time. Faults
are tried here without killing anything.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from asgd import base, simulator
from asgd.live import faults as faults_lib
from asgd.live import frames, slots, spans
from asgd.live.duty import Duty
from asgd.live.hosts import Inside, Make
from asgd.live.links.local import ShardQueue, ThreadLink
from asgd.live.links.throttled import Throttle
from asgd.live.server.hosted_shard import HostedShard
from asgd.live.server.hosted_worker import HostedWorker
from asgd.live.setup import Setup
from asgd.live.shard import Shard, ShardStorage
from asgd.live.worker import Reach
from asgd.orders.network import Network


class ThreadMakers:
  """Makes the parties of a run in threads; see `cluster.Makers`."""

  def __init__(
    self,
    setup: Setup,
    steps: simulator.Steps,
    states: Sequence[base.ServerState],
    stores: Sequence[ShardStorage],
    *,
    faults: Sequence[faults_lib.Fault] = (),
    patience: float = 5.0,
    span: Callable[[int, spans.Span], None] | None = None,
    network: Network | None = None,
  ):
    """Prepares.

    Args:
      setup: of the run.
      steps: compiled for its server.
      states: of each shard, before the first message.
      stores: of each shard.
      faults: to inject, each once.
      patience: seconds after which a worker repeats what is not answered.
      span: takes (worker, stretch of time).
      network: frames take the time of it, in seconds.

    Raises:
      ValueError: for faults that cannot happen.
    """
    faults_lib.check(faults, setup.workers, setup.jobs)
    self._setup, self._steps, self._states = setup, steps, states
    self.stores, self._patience, self._span = stores, patience, span
    self.script = faults_lib.Script(
      faults, kill=lambda: None, wait=lambda seconds: None
    )
    # That of each shard as it is now.
    self.queues: list[ShardQueue | None] = [None] * setup.shards
    self._throttle = network and Throttle(network, setup.workers)
    if self._throttle:
      self._throttle.start()

  def shard(self, index: int, resumed: bool) -> Make:
    """Returns what makes a shard; workers may connect before it is made."""
    if (before := self.queues[index]) is not None:
      before.end()
    self.queues[index] = ShardQueue(index, self.queues)
    return functools.partial(
      self._make_shard, index, resumed, self.queues[index]
    )

  def _make_shard(self, index, resumed, queue, inside: Inside):
    # Copied, for the next one: a shard consumes its state.
    state = jax.tree.map(jnp.array, self._states[index])
    shard = Shard(
      *(index, self._setup, self._steps, state, self.stores[index]),
      now=inside.clock(),
      resumed=resumed,
    )
    queue.open(shard, inside.clock)
    return HostedShard(inside, queue)

  def worker(self, worker: int, life: int) -> Make:
    """Returns what makes a worker."""

    def make(inside):
      return HostedWorker(
        *(inside, worker, life, self._reach),
        patience=self._patience,
      )

    return make

  def _reach(self, worker, life, duty: Duty, inside: Inside):
    del life, duty
    link = ThreadLink(worker, self.queues, **self._ways())
    span = self._span and functools.partial(self._span, worker)
    return Reach(
      link,
      lambda: [store.memory for store in self.stores],
      inside.clock,
      inside.wait,
      self.script.within(inside.kill, inside.wait),
      span,
      link.close,
    )

  def _ways(self):
    """How frames are carried, over a network."""
    throttle, stores = self._throttle, self.stores
    if throttle is None:
      return {}

    def up(worker, shard, frame, deliver):
      nbytes = 0
      if frame.kind == frames.PUSH:
        nbytes = stores[shard].memory.length(slots.MESSAGES, frame.message)
      throttle.up(worker, shard, nbytes, deliver)

    def down(worker, shard, frame, deliver):
      nbytes = 0
      if frame.kind == frames.TICKET and not frame.flag:
        nbytes = stores[shard].memory.length(slots.PARAMS, frame.params)
      throttle.down(worker, shard, nbytes, deliver)

    return {"up": up, "down": down}

  def close(self) -> None:
    """Carries no frame any more."""
    if self._throttle:
      self._throttle.close()
