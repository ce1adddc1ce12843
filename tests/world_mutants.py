"""Mutants: what a protocol does to survive a fault, taken out.

A test imports it with `import world_mutants`; `pythonpath` is in
pyproject.toml.
"""

from typing import Any

from asgd.live import store as live_store
from asgd.live.gossip import counter as job_counter
from asgd.live.gossip import files as peer_files
from asgd.live.gossip import outbox, pairs, peer, rounds
from asgd.live.gossip.cluster import PeerCluster
from asgd.live.hosts import HostExited
from asgd.live.sandblaster import batch_workers, shards, store
from asgd.live.sandblaster import driver as batch_driver
from asgd.live.sandblaster import shard as batch_shard
from asgd.live.sandblaster import worker as batch_worker
from asgd.live.shard import recovery
from asgd.live.shard.follower import Follower, Independent
from asgd.live.shard.lead import Lead
from asgd.live.shard.role import Role
from asgd.live.tables import cluster, files
from asgd.live.tables import shard as table_shard
from asgd.live.tables import worker as table_worker
from asgd.sandblaster import Image, VectorShard
from asgd.sandblaster.portions import PortionJobs
from asgd.tables import replay
from asgd.tables.shard import TableShard


class Mutant:
  """Other functions at one place; the name says what then goes wrong."""

  def __init__(self, name: str, seed: int, owner: Any, **functions: Any):
    """The run of the seed fails with it."""
    self.name, self.seed = name, seed
    self._owner, self._functions = owner, functions

  def __call__(self, patch):
    """Puts the functions there."""
    for name, function in self._functions.items():
      patch.setattr(self._owner, name, function)


def _nothing(*args, **options):
  del args, options


# The server; `test_world` has others, which need certain cases.


def _all_may_connect(role, ledger):
  """A worker that has left connects again to a recovered shard."""
  role.incarnations |= {
    worker: ledger.incarnations[worker] for worker in ledger.present
  }
  role.ended_incarnations = {}


def _reject_without_expel(self, key):
  self.dispatcher.reject(*key, self.time)


def _follow_without_messages(self, send):
  """A message whose PREPARED was lost with the lead is never received."""
  self._report_prepared = _nothing
  try:
    _follow(self, send)
  finally:
    del self._report_prepared


_follow = Follower.follow


# Tables.


def _row_before_request(self, request, data):
  self._write(self._shard.trace_row(request, self._now()))
  self._log.append(data)
  self._shard.apply(request)


def _push_without_log(self, request, data):
  if request.kind == "push":
    self._shard.apply(request)
  else:
    _execute(self, request, data)


_execute = table_shard.ShardHost._execute


def _wait_for_all(self):
  for shard, data in self._requests.items():
    if shard not in self._calls:
      self._calls[shard] = self._shards[shard].call("handle", data)
  gone = None
  for call in self._calls.values():
    try:
      call.result()
    except HostExited as error:
      gone = error
  if gone is not None:
    raise gone
  return _await_replies(self)


_await_replies = table_worker.WorkerHost._await_replies

# Sandblaster.


def _resume_from_unfit(self, *args, **options):
  _init(self, *args, **options)
  self._on_unusable = _nothing


_init = shards.LiveShards.__init__


def _begin_anew(self, evaluation, number):
  self._params = self.read("trial")
  self._slots = {}
  self.forget(number)


def _image_of_any(self, number):
  if self.number != number:
    raise ValueError(f"the shard is at command {self.number}, not {number}")
  return Image(number, dict(self._alive()))


def _hear_worker_alone(self, worker):
  self._shards.check, check = _nothing, self._shards.check
  try:
    _end_call(self, worker)
  finally:
    self._shards.check = check


_end_call = batch_driver.Driver._end_call


def _first_notes(self):
  return {**_notes(self), "answers": []}


_notes = batch_driver.Driver._notes

# Gossip.


def _confirmed_batch(self):
  first, frames = _batch(self)
  self._frames, self._first = [], first + len(frames)
  return first, frames


_batch = outbox.Outbox.batch


def _present_with_old(self, peer_index, newcomer, lend):
  peer.LivePeer.add_newcomer(self, peer_index, newcomer, lend)
  self._first_numbers[peer_index] = self._next_put


def _admit_at_once(self, newcomer):
  self._introduce(newcomer)
  self.resume()


def _restore_rounds(self, tree, notes):
  self.rounds = notes["rounds"]


def _no_jobs(*args):
  return peer_files.JobsAtExit(0, [])


def _zero(*args):
  return 0.0


def _before_all(rows):
  return float("-inf")


_SHARD, _TABLES = table_shard.ShardHost, cluster.TableCluster
_STORE, _LIVE = store.ShardStore, batch_shard.LiveShard
_COUNTER = job_counter.JobCounter

# Mutants that fail at seeds of fewer kinds of faults, KINDS: among all kinds no
# seed is known at which they do.
SELDOM = {
  *("an image has its log", "a lost shard is left for later"),
  *("rows of a predecessor", "checkpoint in a repeat", "damaged twice"),
  *("does not come up", "nothing passed on", "codes of a predecessor"),
  "two numbers",
}
_KILLS = "kill worker", "kill shard", "kill all"
_COMMON = *_KILLS, "stop worker", "stop shard", "stop driver", "cut", "double"
_FILES = "tear", "fill", "jump", "flip"
KINDS = {
  "tables": (*_COMMON, *_FILES, "nan"),
  "sandblaster": (*_COMMON, *_FILES, "remove memory", "nan"),
  "gossip": (
    *("kill peer", "kill counter", "kill all", "stop peer", "stop driver"),
    *("cut", "double", *_FILES, "nan", "term"),
  ),
}
NO_MESSAGE = Mutant("no last message", 59, files.LastMessage, write=_nothing)
FOUND = {
  "server": [
    Mutant(
      *("those that left connect", 12, recovery),
      _restore_incarnations=_all_may_connect,
    ),
    Mutant("an ended ticket", 204, Independent, is_outdated=Role.is_outdated),
    Mutant("refused and kept", 141, Lead, _refuse=_reject_without_expel),
    Mutant("not prepared", 223, Follower, follow=_follow_without_messages),
  ],
  "tables": [
    Mutant("an image has its log", 14, live_store.Log, replace=_nothing),
    Mutant("memory of later", 5, _SHARD, _remove_memory=_nothing),
    Mutant("a pause has no end", 0, _TABLES, resume=_nothing),
    Mutant(
      *("a request is done twice", 10, TableShard),
      is_done=lambda self, request: False,
    ),
    Mutant("row before request", 49, _SHARD, _execute=_row_before_request),
    Mutant("answered, not logged", 0, _SHARD, _execute=_push_without_log),
    NO_MESSAGE,
    Mutant("waits for a restart", 7, _TABLES, _retry_run=_nothing),
    Mutant("jobs of the dead are open", 1, files, write_leave=_nothing),
    Mutant("nobody is woken", 1, _SHARD, _answer_waiting=_nothing),
    Mutant(
      *("a lost shard is left for later", 9049, table_worker.WorkerHost),
      _await_replies=_wait_for_all,
    ),
    Mutant("rows of a predecessor", 4698, replay, _deliver_rows=_nothing),
  ],
  "sandblaster": [
    Mutant(
      *("a command is obeyed twice", 13, VectorShard),
      _answer_again=lambda self, command: self._apply(self._alive(), command),
    ),
    Mutant("answered, not written", 13, _STORE, append_command=_nothing),
    Mutant("pushed, not written", 7, _STORE, write_message=_nothing),
    Mutant("jobs of the dead", 9, PortionJobs, lose=_nothing),
    Mutant("unfit files", 1, shards.LiveShards, __init__=_resume_from_unfit),
    Mutant("times go back", 6, batch_workers, last_time=_before_all),
    Mutant("evaluated anew", 0, _LIVE, begin=_begin_anew),
    Mutant("checkpoint in a repeat", 1101, _LIVE, image_at=_image_of_any),
    Mutant("damaged twice", 1811, batch_worker, _MAX_RETRIES=1),
    Mutant("does not come up", 1804, batch_workers, _MAX_LATE_STARTS=1),
    Mutant(
      *("nobody asks why a job failed", 1, batch_driver.Driver),
      _end_call=_hear_worker_alone,
    ),
    Mutant(
      *("dead and not replaced", 13, batch_driver.Driver),
      _handle_exit=_nothing,
    ),
    Mutant("restarted without files", 3, _STORE, load=lambda self: None),
    Mutant("notes of no answers", 3, batch_driver.Driver, _notes=_first_notes),
  ],
  "gossip": [
    Mutant("nothing passed on", 302, PeerCluster, _complete_broadcast=_nothing),
    Mutant(
      *("a frame is taken twice", 0, outbox.Inbox),
      take_new=lambda self, sender, life, first, frames: frames,
    ),
    Mutant("no frame again", 2, outbox.Outbox, batch=_confirmed_batch),
    Mutant(
      *("codes of a predecessor", 602, rounds.Rounds),
      add_newcomer=_present_with_old,
    ),
    Mutant("no pause to join", 12, PeerCluster, _admit=_admit_at_once),
    Mutant(
      *("no LEAVE", 10, peer_files),
      write_leave=_no_jobs,
      last_residual_lost=_zero,
    ),
    Mutant(
      *("jobs by records", 37, peer_files),
      kept_job_numbers=lambda events: [],
    ),
    Mutant("a lost number", 19, _COUNTER, release=_nothing),
    Mutant(
      *("two numbers", 196, _COUNTER),
      take=lambda self, peer, life, begun: self._next_number(),
    ),
    Mutant(
      *("a dead partner", 26, pairs.Pairs),
      peer_exited=peer.LivePeer.peer_exited,
    ),
    Mutant("nothing cut back", 3, peer_files, cut_back=_nothing),
    Mutant("resumes first params", 7, peer.LivePeer, restore=_restore_rounds),
  ],
}
