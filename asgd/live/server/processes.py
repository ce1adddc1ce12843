"""What makes shards and workers in processes, which Ray starts.

What is sent for every message goes through sockets and shared memory of the
machine (`links.sockets`, `slots`): a call of Ray takes half a millisecond, a
frame a twentieth of that. Shards are on the driver's machine. Workers on
another one call the actors of shards (`links.remote`), and the lead writes what
they did (`links.notes`).
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, compression, safe_files, simulator
from asgd.live import faults as faults_lib
from asgd.live import slot_formats, spans
from asgd.live.duty import Duty
from asgd.live.hosts import Inside, Make
from asgd.live.hosts.site import Site, node_id
from asgd.live.links.notes import FarNotes
from asgd.live.links.remote import RayLink
from asgd.live.links.sockets import ShardServer, SocketLink
from asgd.live.profile import Profile
from asgd.live.server.hosted_worker import HostedWorker
from asgd.live.server.reachable_shard import ReachableShard
from asgd.live.shard import Shard, ShardStorage
from asgd.live.worker import Reach


class ShardMaker(NamedTuple):
  """Makes a shard; it travels to the process of the shard."""

  site: Site
  make_server: Callable[[], base.Server]
  index: int
  params: Any  # the shard's part, before the first message
  image: tuple[Any, Any] | None  # of a checkpoint, for when memory is lost
  resumed: bool

  def __call__(self, inside: Inside) -> ReachableShard:
    """Compiles, opens the files, and listens."""
    site, index, setup = self.site, self.index, self.site.setup
    safe_files.make_private(Path(site.memory) / f"shard-{index}")
    server = self.make_server()
    steps = simulator.compile_steps(
      server, None, wire=site.compress, keeps_messages=True
    )
    if not setup.totals:  # compiles before the first message comes
      state = simulator.start(server, self.params)
      ticket = steps.send(state, jnp.int32(0))
      message = compression.blank(server.codec, self.params)
      received = steps.receive(state, ticket, message, np.float32(0.0))
      jax.block_until_ready(received)
    state = simulator.start(server, self.params)
    updates = compression.last_update(state.opt_state) is not None
    like = slot_formats.contents(server.codec, self.params, updates=updates)
    memory = site.open_memory(index, *like, state)
    store = ShardStorage.open(Path(site.run), index, memory, self.image)
    shard = Shard(
      *(index, setup, steps, state, store),
      now=inside.clock(),
      resumed=self.resumed,
    )
    lead = site.socket(0) if index and setup.consistent else None
    served = ShardServer(
      shard, site.socket(index), clock=inside.clock, lead=lead
    )
    return ReachableShard(inside, served, Path(site.run))


class WorkerMaker(NamedTuple):
  """Makes a worker; it travels to the process of the worker."""

  site: Site
  worker: int
  life: int
  faults: Sequence[faults_lib.Fault]

  def __call__(self, inside: Inside) -> HostedWorker:
    """Prepares."""
    return HostedWorker(
      inside, self.worker, self.life, self._reach, warm_up=True
    )

  def _reach(self, worker, life, duty: Duty, inside: Inside):
    site = self.site
    near = site.sockets and node_id() == site.machine
    reach = self._near(duty, inside) if near else self._far(duty, inside)
    first = worker == 0 == life
    profile = Profile(site.profile if first else None)
    write_span, close = reach.span, reach.close
    assert write_span is not None

    def span(span):
      if site.spans:
        write_span(span)
      if span.name == "push":
        profile.worked()

    def close_all():
      profile.close()
      close()

    return reach._replace(span=span, close=close_all)

  def _script(self, inside, tell):
    return faults_lib.Script(
      self.faults, kill=inside.kill, wait=inside.wait, tell=tell
    )

  def _near(self, duty, inside):
    """On the driver's machine: by sockets, shared memory and files."""
    site, shares, run = self.site, duty.shares(), Path(self.site.run)
    link = SocketLink([site.socket(index) for index in range(len(shares))])

    def memories():
      # Opened by a worker first, a shard would take new memory for its own.
      return [site.open_memory(i, *like, None) for i, like in enumerate(shares)]

    return Reach(
      link,
      memories,
      inside.clock,
      inside.wait,
      self._script(inside, functools.partial(faults_lib.append_fault, run)),
      functools.partial(spans.SpanWriter(run), self.worker),
      link.close,  # shards notice at once that it has left
    )

  def _far(self, duty, inside):
    """On another machine, by calls of Ray."""
    messages = [message for _, message, *_ in duty.shares()]
    link = RayLink(self.site, self.worker, self.life, messages)
    clock = time.monotonic  # the lead's is another
    notes = FarNotes(self.worker, link.find_lead, clock=clock)
    return Reach(
      link,
      lambda: link.memories,
      clock,
      inside.wait,
      self._script(inside, notes.fault),
      notes.span,
      notes.close,
    )


class ProcessMakers:
  """Makes the parties of a run in processes; see `cluster.Makers`."""

  def __init__(
    self,
    site: Site,
    make_server: Callable[[], base.Server],
    parts: Sequence[Any],
    *,
    faults: Sequence[faults_lib.Fault] = (),
    images: Sequence[tuple[Any, Any]] | None = None,
  ):
    """Prepares.

    Args:
      site: of the hosts.
      make_server: called in the processes of shards.
      parts: parameters of each shard, before the first message.
      faults: to inject into the first incarnations of workers.
      images: checkpoints of each shard, for when the memory is lost.
    """
    self._site, self._make_server, self._parts = site, make_server, parts
    self._faults = faults
    self._images = images or [None] * len(parts)

  def shard(self, index: int, resumed: bool) -> Make:
    """Returns what makes a shard."""
    part, image = self._parts[index], self._images[index]
    return ShardMaker(
      self._site, self._make_server, index, part, image, resumed
    )

  def worker(self, worker: int, life: int) -> Make:
    """Returns what makes a worker."""
    faults = [] if life else [f for f in self._faults if f.worker == worker]
    return WorkerMaker(self._site, worker, life, faults)

  def close(self) -> None:
    """Nothing is left to be ended."""
