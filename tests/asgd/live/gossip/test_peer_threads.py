"""Live peers in threads: a replay of its journals equals each run, to the
bit."""

import itertools
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from kit import bits

import asgd
from asgd import base, problems, simulator, stacking
from asgd.live.deadlines import Ladder
from asgd.live.failures import AllDied, NotFinite
from asgd.live.faults import Fault
from asgd.live.gossip import files, frames
from asgd.live.gossip.arrivals import PeerArrivals
from asgd.live.gossip.cluster import PeerCluster, PeerMaker
from asgd.live.gossip.outbox import Neighbour
from asgd.live.gossip.peer import ALONE, PeerStatus
from asgd.live.gossip.peer_rows import PeerSpec
from asgd.live.gossip.rounds import Rounds
from asgd.live.hosts.base import PEER, Inside
from asgd.live.hosts.threads import ThreadHosts
from asgd.orders.trace import Event

PEERS = 4
ROOT = jax.random.key(0)
INSIDE = Inside(lambda: None, lambda seconds: None, time.monotonic)
PROBLEM = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)


_compiled = {}


def compiled(name, **options):
  """A recipe with its peer and worker, compiled once."""
  key = repr((name, options))
  if key not in _compiled:
    _compiled[key] = _compile(name, **options)
  return _compiled[key]


def _compile(name, **options):
  recipe = getattr(asgd, name)(0.05, PEERS, **options)
  return recipe, recipe.peer(), recipe.make_worker(PROBLEM.loss)


class Run:
  """A live run of peers, and its replay."""

  def __init__(self, folder, name="d_psgd", rounds=6, **options):
    self.recipe, peer, worker = compiled(name, **options)
    self.folder, self.messages = folder, rounds * PEERS
    self.batch = stacking.job_batches(
      PROBLEM.batches(0, PEERS), self.recipe.steps
    )
    self.spec = PeerSpec(
      self.recipe.gossip,
      peer,
      worker,
      jax.device_get(PROBLEM.init(ROOT)),
      self.batch,
      ROOT,
      frames.array_wire(copies=False)
      if not self.recipe.gossip.compressed
      else frames.packed_wire(peer, PROBLEM.init(ROOT)),
      frozenset([2, rounds]),
    )
    self.news = []

  def cluster(self, faults=(), span=None, refill=True, hosts=None):
    self.spec.warm_up_all()
    return PeerCluster(
      self.spec.gossip,
      hosts or ThreadHosts(began=time.monotonic()),
      PeerMaker(lambda: self.spec, self.folder, 0, tuple(faults), span),
      messages=self.messages,
      ladder=Ladder(),
      refill=refill,
    )

  def watch(self, cluster):
    """Checks a cluster until all jobs are done."""
    while not cluster.finished:
      self.news += cluster.check(len(self.records().loss))
      time.sleep(0.001)

  def run(self, **options):
    cluster = self.cluster(**options)
    cluster.start()
    try:
      self.watch(cluster)
      self.views = cluster.views()
    finally:
      cluster.close()
    return self.views

  def records(self):
    return files.FILES.read_all(self.folder, PEERS)

  def trace(self):
    return files.read_trace(self.folder, PEERS)

  def replayed(self):
    peers = simulator.Peers(
      self.recipe.gossip,
      self.spec.peer,
      self.spec.worker,
      self.spec.params,
      self.trace(),
      batch=self.batch,
      root=ROOT,
    )
    self.replayed_records = peers.run(len(peers.trace.time))
    return peers

  def check(self):
    """Asserts that a replay gives the bits of the run."""
    peers = self.replayed()
    assert sorted(self.views) == peers.present
    for i, view in self.views.items():
      assert bits(view.params) == bits(peers.states[i].server.params)
      assert view.version == int(peers.states[i].server.version)
    records = self.records()
    for name, column in self.replayed_records._asdict().items():
      assert bits(column) == bits(getattr(records, name)), name
    return peers


RECIPES = {
  "d_psgd": {},
  "sgp": {"overlap": 2},
  "choco_sgd": {"gamma": 0.5, "codec": "qsgd"},
  "threshold_sharing": {"codec": "top_k"},
  "local_d_psgd": {"steps": 2},
  "ad_psgd": {},
  "async_threshold_sharing": {"codec": "top_k"},
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_replays_to_the_same_bits(tmp_path, name):
  run = Run(tmp_path, name, **RECIPES[name])
  run.run()
  peers = run.check()
  assert len(run.records().loss) == run.messages
  assert sorted(run.records().job) == list(range(run.messages))
  records = run.records()
  assert records.bytes_down.sum() <= peers.traffic.nbytes.sum()
  kept = records.residual_norm > 0  # all but what has put nothing yet
  compressed = run.recipe.gossip.compressed
  assert kept.sum() == (run.messages - PEERS if compressed else 0)


def test_drawn_matchings_replay_to_the_same_bits(tmp_path):
  topology = {"name": "matcha", "rounds": 6}
  run = Run(tmp_path, "d_psgd", topology=topology)
  run.run()
  peers = run.check()
  # Half of the messages of a ring of 4 in 6 rounds.
  assert peers.traffic.messages.sum() == 24


def test_a_peer_that_is_killed_leaves_and_joins_again(tmp_path):
  run = Run(tmp_path, "choco_sgd", rounds=16, codec="qsgd", gamma=0.5)
  run.run(faults=[Fault(1, 2, "kill"), Fault(3, 5, "kill")])
  run.check()
  actions = run.trace().action.tolist()
  assert actions.count(base.LOST) == actions.count(base.LEAVE) == 2
  one = files.FILES.read(tmp_path, 1)
  lost = one.residual_norm[one.job.tolist().index(1 + PEERS)]
  assert lost > 0
  assert (
    "peer 1 died; it is replaced, the others continue; the update that its"
    f" codec kept is lost (RMS {lost:.3g})"
  ) in run.news


def test_a_peer_of_arrivals_joins_with_all_that_the_others_have_added(tmp_path):
  run = Run(tmp_path, "async_threshold_sharing", rounds=10, codec="top_k")
  run.run(faults=[Fault(1, 2, "kill")])
  peers = run.check()
  assert run.trace().action.tolist().count(base.JOIN) == 1
  assert sorted(run.records().job) == list(range(run.messages))
  first, *others = (peers.states[i].server.params for i in range(PEERS))
  for params in others:  # in another order of additions
    np.testing.assert_allclose(params, first, rtol=0, atol=1e-6)


def test_the_others_go_on_without_one_that_is_not_replaced(tmp_path):
  run = Run(tmp_path, rounds=8)
  run.run(faults=[Fault(2, 3, "kill")], refill=False)
  peers = run.check()
  assert peers.present == [0, 1, 3]
  assert np.bincount(run.records().worker).tolist() == [8, 8, 3, 8]


def test_what_a_peer_keeps_for_evaluations_is_of_its_round(tmp_path):
  run = Run(tmp_path, rounds=4)
  cluster = run.cluster()
  cluster.start()
  run.watch(cluster)
  kept = cluster.views(2)
  run.views = cluster.views()
  cluster.close()
  peers = run.replayed()
  trace = peers.trace
  half = simulator.Peers(
    run.recipe.gossip,
    run.spec.peer,
    run.spec.worker,
    run.spec.params,
    trace,
    batch=run.batch,
    root=ROOT,
  )
  mixes = np.zeros(PEERS, int)
  for row, (peer, action) in enumerate(
    zip(trace.worker, trace.action, strict=True)
  ):
    half.run(row + 1)
    if action == base.MIX:
      mixes[peer] += 1
      if mixes[peer] == 2:
        params = half.states[peer].server.params
        assert bits(params) == bits(kept[peer].params)


def test_messages_of_the_lost_that_a_newcomer_lacks_come_to_nobody():
  """A newcomer's loans include messages of earlier rounds. It lacks messages
  for rounds to come, which its neighbours must drop, too."""
  how = asgd.threshold_sharing(0.05, PEERS, codec="top_k").gossip
  rows = SimpleNamespace(index=0, spec=SimpleNamespace(gossip=how))
  rows.join = lambda: None
  old, newcomer = (Rounds(INSIDE, rows, faults=None) for _ in range(2))
  old.rounds = 2
  old.set_peers({3: Neighbour(0, None)})
  for sender in (2, 3):  # peer 2 has exited
    old.store_message(frames.PeerFrame(frames.MESSAGE, sender, 0, round=2))
  old.add_newcomer(1, Neighbour(1, None), False)
  assert old.find_message(2, 2) is None
  assert old.find_message(3, 2) is not None
  newcomer.join({3: Neighbour(0, None)}, 2, [3])
  for round in (1, 2):
    newcomer.store_message(frames.PeerFrame(frames.MESSAGE, 2, 0, round=round))
  assert newcomer.find_message(2, 1) is None
  assert newcomer.find_message(2, 2) is not None


def test_the_last_messages_of_the_lost_are_added_once_by_all():
  how = asgd.async_threshold_sharing(0.05, PEERS, codec="top_k").gossip
  mixed = {0: [], 1: []}
  rows = [
    SimpleNamespace(
      index=i,
      spec=SimpleNamespace(gossip=how),
      mix=lambda number, taken, i=i: mixed[i].extend(f.seq for f in taken),
    )
    for i in mixed
  ]
  options = {"faults": None, "counter": None}
  one, other = (PeerArrivals(INSIDE, each, **options) for each in rows)
  messages = [
    frames.PeerFrame(frames.MESSAGE, 2, 0, seq=seq, round=seq)
    for seq in range(7)
  ]
  for peer, count in ((one, 6), (other, 4)):
    peer.set_peers({2: Neighbour(0, None)})
    peer.ask("deliver", 2, 0, 0, messages[:count])
  assert mixed == {0: [0, 1, 2, 3, 4, 5], 1: [0, 1, 2, 3]}
  # A peer sends no fifth message before the first was acknowledged by all.
  peers = {0: one, 1: other}

  def ask(name, *args, among=(0, 1)):
    return {peer: peers[peer].ask(name, *args) for peer in among}

  assert ask("numbers_received_from", 2) == {0: [2, 3, 4, 5], 1: [0, 1, 2, 3]}
  # The driver forwards 4 and 5 to one peer, and 0 and 1, which the other peer
  # has mixed and dropped, to that peer.
  PeerCluster._complete_broadcast(SimpleNamespace(gossip=how, _ask=ask), 2)
  assert mixed == {0: [0, 1, 2, 3, 4, 5], 1: [0, 1, 2, 3, 4, 5]}
  # What arrives now would reach this peer alone.
  one.ask("deliver", 2, 0, 6, messages[6:])
  assert mixed[0] == [0, 1, 2, 3, 4, 5]
  # A newcomer's loan has all of them.
  one.ask("add_newcomer", 3, Neighbour(1, None), False)
  assert one.find_message(2, 5) is None


def test_a_peer_starts_no_job_while_four_messages_are_on_their_way():
  how = asgd.async_threshold_sharing(0.05, PEERS).gossip
  rows = SimpleNamespace(index=0, spec=SimpleNamespace(gossip=how))
  peer = PeerArrivals(INSIDE, rows, faults=None, counter=None)
  peer.set_peers({1: Neighbour(0, None)})
  (outbox,) = peer._outboxes.values()
  started = []
  peer._start_job = lambda: started.append(outbox.n_unacknowledged) or False
  for _ in range(6):
    assert not peer._step()
    outbox.put(frames.PeerFrame(frames.MESSAGE, 0, 0))
  assert started == [0, 1, 2, 3] and not peer.is_quiet
  outbox.confirm(6)
  assert not peer._step() and started[-1] == 0 and peer.is_quiet


def test_a_newcomer_whose_lenders_have_exited_does_no_job():
  """A newcomer without a lender would train from the first parameters."""
  how = asgd.d_psgd(0.05, PEERS).gossip
  rows = SimpleNamespace(index=1, spec=SimpleNamespace(gossip=how))
  rows.join = lambda: None
  newcomer = Rounds(INSIDE, rows, faults=None)
  others = {peer: Neighbour(0, None) for peer in (0, 2)}
  newcomer.ask("join", others, 2, [0, 2])
  newcomer.ask("peer_exited", 0)
  assert not newcomer.run().done()
  newcomer.ask("peer_exited", 2)
  assert newcomer.run().result() == ALONE


def test_a_pair_is_atomic_and_keeps_the_mean(tmp_path):
  run = Run(tmp_path, "ad_psgd", rounds=10)
  run.run()
  trace = run.trace()
  for peer in range(PEERS):
    mine = trace.action[trace.worker == peer].tolist()
    for row, action in enumerate(mine):
      if action == base.PUT:
        assert mine[row + 1 : row + 3] == [base.TAKE, base.MIX]
  puts = (trace.action == base.PUT).sum()
  assert puts == 2 * run.messages  # each peer met another


@pytest.mark.parametrize(
  ("kind", "error"), [("kill", AllDied), ("nan", NotFinite)]
)
def test_what_ends_all_peers_ends_the_run(tmp_path, kind, error):
  faults = [Fault(i, 2, kind) for i in range(PEERS)]
  with pytest.raises(error, match="all peers"):
    Run(tmp_path, rounds=4).run(faults=faults, refill=False)


def test_what_goes_wrong_in_a_peer_is_raised(tmp_path):
  run = Run(tmp_path, rounds=4)

  def broken(worker, job):
    if job >= PEERS:  # the first are tried before the run
      raise ValueError(f"no batch for job {job}")
    return run.batch(worker, job)

  run.spec = run.spec._replace(batch=broken)
  with pytest.raises(ValueError, match="no batch for job"):
    run.run()


def test_who_leaves_is_written_once(tmp_path):
  journal, _ = files.open_files(tmp_path, 0)
  journal.append(Event(1.0, 0, 0, 7, base.SEND))
  assert files.write_leave(tmp_path, 0, 0, now=0.5) == (1, [7])
  assert files.write_leave(tmp_path, 0, 0, now=2.0) == (1, [7])
  # The next incarnation had not joined.
  assert files.write_leave(tmp_path, 0, 1, now=3.0) == (0, [])
  rows = [event.format() for event in files.read_journal(
    files.journal_path(tmp_path, 0))]
  assert rows == ["1.0,0,0,7,send", "1.0,0,0,7,lost", "1.0,0,-1,0,leave"]


def test_spans_of_peers_follow_each_other(tmp_path):
  run, told = Run(tmp_path, "ad_psgd", rounds=5), []
  run.run(span=lambda peer, span: told.append((peer, span)))
  for peer in range(PEERS):
    mine = [span for i, span in told if i == peer]
    names = [span.name for span in mine]
    assert names == ["fetch", "compute", "push"] * (len(mine) // 3)
    for before, after in itertools.pairwise(mine):
      assert before.start <= before.end <= after.start


def test_a_driver_that_waited_for_one_peer_takes_no_other_for_hung(tmp_path):
  """Each peer measures the time of its job: the driver itself may have been
  delayed by minutes."""
  run = Run(tmp_path)
  hosts = ThreadHosts(began=time.monotonic())
  peers = run.cluster(hosts=hosts)
  supervisor = peers._supervisor
  for peer in range(PEERS):
    supervisor.start(PEER, peer, lambda inside: None).has_done_job = True
  hosts.clock = lambda: 1e6
  dead = supervisor.deadlines.dead_after
  busy = {0: 0.1, 1: None, 2: dead + 1, 3: dead - 1}
  peers._ask = lambda name: {
    peer: PeerStatus(False, 3, seconds) for peer, seconds in busy.items()
  }
  peers._are_all_quiet()
  assert hosts.exited() == [(PEER, 2)]
  peers.close()
