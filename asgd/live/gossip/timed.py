"""The times of peers' jobs, measured before a run divides its work by speed."""

import functools
from collections.abc import Callable

from asgd.live.cluster import Cluster
from asgd.live.deadlines import DEAD_FACTOR, Ladder
from asgd.live.gossip.peer_rows import PeerSpec
from asgd.live.hosts import Hosts, Inside
from asgd.live.hosts.base import PEER
from asgd.live.supervisor import Supervisor
from asgd.live.worker_spec import WorkerSpec


class TimedPeer:
  """A peer's jobs in the peer's host; their results are dropped."""

  def __init__(
    self, index: int, make_spec: Callable[[], PeerSpec], inside: Inside
  ):
    self._index, self._inside = index, inside
    spec = make_spec()
    self._spec = WorkerSpec(
      *(spec.steps.work, spec.worker.init, spec.batch, spec.root),
      *(spec.params, None),
      slowdown=spec.slowdown,
    )
    self._spec.warm_up(index)

  def measure(self, jobs: int) -> float:
    """Returns the seconds that a job takes; see `WorkerSpec.measure`."""
    return self._spec.measure(self._index, jobs, self._inside.wait)


def measure(
  hosts: Hosts,
  make_spec: Callable[[], PeerSpec],
  peers: int,
  ladder: Ladder,
  jobs: int,
) -> list[float]:
  """Returns the seconds that a job takes each peer. All peers do `jobs` equal
  jobs at the same time, and their hosts then end.

  Raises:
    ValueError: if a peer exits or takes too long.
  """
  supervisor = Supervisor(hosts, {PEER: peers}, ladder)
  parties = [
    supervisor.start(PEER, peer, functools.partial(TimedPeer, peer, make_spec))
    for peer in range(peers)
  ]
  # Objects compile when they are made; the limit of the calls excludes that.
  supervisor.await_made(parties)
  cluster = Cluster(supervisor)
  seconds = cluster.ask_all_timed(
    PEER, "measure", jobs, limit=DEAD_FACTOR * ladder.start
  )
  for party in parties:
    supervisor.drop(party)
  return seconds
