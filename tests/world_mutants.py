"""Mutants: what a protocol does to survive a fault, taken out.

Each function takes one mending out; the docstring says what then goes wrong. A
test imports it with `import world_mutants`; see `pythonpath` in pyproject.toml.
"""

from asgd.live import store as live_store
from asgd.live.gossip import counter as job_counter
from asgd.live.gossip import files as peer_files
from asgd.live.gossip import outbox, pairs, peer, rounds
from asgd.live.gossip.cluster import PeerCluster
from asgd.live.hosts import Gone
from asgd.live.sandblaster import driver as batch_driver
from asgd.live.sandblaster import places, shards, store
from asgd.live.sandblaster import shard as batch_shard
from asgd.live.sandblaster import worker as batch_worker
from asgd.live.tables import cluster, files
from asgd.live.tables import shard as table_shard
from asgd.live.tables import worker as table_worker
from asgd.sandblaster import Image, VectorShard
from asgd.sandblaster.portions import PortionJobs
from asgd.tables import replay
from asgd.tables.shard import TableShard


def _nothing(*args, **options):
  del args, options


# Tables.


def does_a_request_twice(patch):
  """A request that is sent again is applied again."""
  patch.setattr(TableShard, "is_done", lambda self, request: False)


def writes_the_row_before_the_request(patch):
  """A shard that dies between the two has a row without its request."""

  def do(self, request, data):
    self._write(self._shard.event(request, self._now()))
    self._log.append(data)
    self._shard.obey(request)

  patch.setattr(table_shard.ShardHost, "_do", do)


def answers_before_it_logs(patch):
  """A shard that dies forgets what a worker was told is applied."""
  original = table_shard.ShardHost._do

  def do(self, request, data):
    if request.kind == "push":
      self._shard.obey(request)
    else:
      original(self, request, data)

  patch.setattr(table_shard.ShardHost, "_do", do)


def keeps_no_message(patch):
  """The message of a dead worker is with one shard and not with the other."""
  patch.setattr(files.LastMessage, "write", _nothing)


def waits_for_a_restart(patch):
  """A worker whose connection broke waits for a shard that is alive."""
  patch.setattr(cluster.TableCluster, "_call_again", _nothing)


def forgets_the_dead(patch):
  """PortionJobs that a dead worker had begun stay open in its journal."""
  patch.setattr(files, "leave", _nothing)


def wakes_nobody(patch):
  """A pull that waits for a clock is not answered when the clock ends."""
  patch.setattr(table_shard.ShardHost, "_wake", _nothing)


def keeps_the_log_beside_the_image(patch):
  """A shard does again what its image has already."""
  patch.setattr(live_store.Log, "replace", _nothing)


def keeps_the_memory_of_before(patch):
  """A shard that resumes from a checkpoint has requests of after it."""
  patch.setattr(table_shard.ShardHost, "_forget_memory", _nothing)


def never_resumes(patch):
  """Workers that were paused for a checkpoint wait for ever."""
  patch.setattr(cluster.TableCluster, "go_on", _nothing)


def leaves_a_lost_shard_for_later(patch):
  """Two workers that have to ask different shards again wait for each other at
  the shards that they did ask."""
  original = table_worker.WorkerHost._answer

  def answer(self):
    for shard, data in self._asks.items():
      if shard not in self._asked:
        self._asked[shard] = self._shards[shard].call("hear", data)
    gone = None
    for call in self._asked.values():
      try:
        call.result()
      except Gone as error:
        gone = error
    if gone is not None:
      raise gone
    return original(self)

  patch.setattr(table_worker.WorkerHost, "_answer", answer)


def forgets_the_rows_of_the_one_before(patch):
  """A replay lacks rows that a dead worker had taken before another took its
  place at a shard."""
  patch.setattr(replay, "_hand_over", _nothing)


# Sandblaster.


def obeys_a_command_twice(patch):
  """A command that is sent again is obeyed again."""

  def again(self, command):
    return self._apply(self._alive(), command)

  patch.setattr(VectorShard, "_answer_again", again)


def answers_before_it_writes(patch):
  """A shard that dies forgets commands that were answered."""
  patch.setattr(store.ShardStore, "add", _nothing)


def keeps_no_message_of_a_job(patch):
  """A shard that dies forgets what workers pushed."""
  patch.setattr(store.ShardStore, "put", _nothing)


def loses_the_job_of_the_dead(patch):
  """Nobody does what a dead worker was at."""
  patch.setattr(PortionJobs, "lose", _nothing)


def resumes_from_unfit_files(patch):
  """A run whose shard has changed files is refused again and again."""
  original = shards.LiveShards.__init__

  def init(self, *args, **options):
    original(self, *args, **options)
    self._unfit = _nothing

  patch.setattr(shards.LiveShards, "__init__", init)


def follows_a_clock_that_goes_back(patch):
  """The times of a trace go back with the clock."""
  patch.setattr(places, "last_time", lambda rows: float("-inf"))


def begins_an_evaluation_anew(patch):
  """The next driver does an evaluation on other parameters."""

  def begin(self, evaluation, number):
    self._sent = self.read("trial")
    self._slots = {}
    self.forget(number)

  patch.setattr(batch_shard.LiveShard, "begin", begin)


def takes_images_of_repeated_commands(patch):
  """A checkpoint that comes soon after a driver resumed ends the run."""

  def image_at(self, number):
    if self.number != number:
      raise ValueError(f"the shard is at command {self.number}, not {number}")
    return Image(number, dict(self._alive()))

  patch.setattr(batch_shard.LiveShard, "image_at", image_at)


def computes_again_once(patch):
  """A gradient that is damaged twice ends the run as one that is not finite."""
  patch.setattr(batch_worker, "_TRIES", 1)


def ends_with_a_worker_that_does_not_come_up(patch):
  """A worker that is stopped while it starts ends the run."""
  patch.setattr(places, "_STARTS", 1)


def asks_no_shard_why_a_job_failed(patch):
  """A worker reports that the files of a shard are unfit, and the next driver
  resumes from them."""
  original = batch_driver.Driver._hear

  def hear(self, worker):
    self._shards.check, check = _nothing, self._shards.check
    try:
      original(self, worker)
    finally:
      self._shards.check = check

  patch.setattr(batch_driver.Driver, "_hear", hear)


def replaces_nobody(patch):
  """A worker that died is not replaced, and its job not given away."""
  patch.setattr(batch_driver.Driver, "_bury", _nothing)


def restarts_a_shard_anew(patch):
  """A shard that died comes back without its files."""
  patch.setattr(store.ShardStore, "load", lambda self: None)


def forgets_the_evaluation(patch):
  """A driver resumes from the first evaluation's notes."""
  original = batch_driver.Driver._notes

  def notes(self):
    return {**original(self), "answers": []}

  patch.setattr(batch_driver.Driver, "_notes", notes)


# Gossip.


def takes_a_frame_twice(patch):
  """A call that is made again brings its frames again."""
  patch.setattr(
    outbox.Inbox, "new", lambda self, sender, life, first, frames: frames
  )


def sends_no_frame_again(patch):
  """Frames of a call whose connection broke are taken for confirmed."""

  def batch(self):
    first, frames = whole(self)
    self._frames, self._first = [], first + len(frames)
    return first, frames

  whole = outbox.Outbox.batch
  patch.setattr(outbox.Outbox, "batch", batch)


def passes_nothing_on(patch):
  """A lost peer's last message has come to some of its neighbours."""
  patch.setattr(PeerCluster, "_pass_on", _nothing)


def keeps_what_a_predecessor_put(patch):
  """Codes of a lost peer are mixed for those of its successor."""

  def present(self, peer, newcomer, lend):
    peer_class.present(self, peer, newcomer, lend)
    self._first[peer] = self._next_put

  peer_class = peer.LivePeer
  patch.setattr(rounds.Rounds, "present", present)


def knows_what_was_received_from_records(patch):
  """A job whose record was not written is given again."""
  patch.setattr(peer_files, "numbers_of", lambda events: [])


def loses_the_number_of_the_dead(patch):
  """A job that a lost peer had is given to nobody."""
  patch.setattr(job_counter.JobCounter, "left", _nothing)


def gives_two_numbers_for_one_question(patch):
  """A question that is asked again is answered with another number."""
  patch.setattr(
    job_counter.JobCounter, "take", lambda self, peer, life, ask: self._new()
  )


def waits_for_the_dead_partner(patch):
  """A peer that granted an exchange to one that exited stays locked."""
  patch.setattr(pairs.Pairs, "gone", peer.LivePeer.gone)


def forgets_the_dead_peer(patch):
  """A peer that exited has no row that says so, and its successor joins."""
  left = peer_files.Left(0, [])
  patch.setattr(peer_files, "leave", lambda *args: left)
  patch.setattr(peer_files, "last_residual_lost", lambda *args: 0.0)


def admits_without_a_pause(patch):
  """A newcomer joins while its neighbours are in different rounds."""

  def admit(self, newcomer):
    self._introduce(newcomer)
    self.go_on()

  patch.setattr(PeerCluster, "_admit", admit)


def resumes_without_images(patch):
  """Peers of a run that resumes have the first parameters."""

  def restore(self, tree, notes):
    self.rounds = notes["rounds"]

  patch.setattr(peer.LivePeer, "restore", restore)


def cuts_nothing_back(patch):
  """A run resumes from a checkpoint with the rows of after it."""
  patch.setattr(peer_files, "cut_back", _nothing)


# Kinds of faults from which the scenarios of these seeds are drawn.
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
# Protocol -> mutant -> a seed whose run fails with it.
FOUND = {
  "tables": {
    keeps_the_log_beside_the_image: 14,
    keeps_the_memory_of_before: 35,
    never_resumes: 9,
    does_a_request_twice: 10,
    writes_the_row_before_the_request: 221,
    answers_before_it_logs: 0,
    keeps_no_message: 1,
    waits_for_a_restart: 14,
    forgets_the_dead: 1,
    wakes_nobody: 2,
    leaves_a_lost_shard_for_later: 9049,
    forgets_the_rows_of_the_one_before: 4698,
  },
  "sandblaster": {
    obeys_a_command_twice: 18,
    answers_before_it_writes: 15,
    keeps_no_message_of_a_job: 1,
    loses_the_job_of_the_dead: 1,
    resumes_from_unfit_files: 2,
    follows_a_clock_that_goes_back: 13,
    begins_an_evaluation_anew: 0,
    takes_images_of_repeated_commands: 1101,
    computes_again_once: 1811,
    asks_no_shard_why_a_job_failed: 2,
    ends_with_a_worker_that_does_not_come_up: 1804,
    replaces_nobody: 10,
    restarts_a_shard_anew: 1,
    forgets_the_evaluation: 17,
  },
  "gossip": {
    passes_nothing_on: 302,
    takes_a_frame_twice: 1,
    sends_no_frame_again: 2,
    keeps_what_a_predecessor_put: 602,
    admits_without_a_pause: 29,
    forgets_the_dead_peer: 10,
    knows_what_was_received_from_records: 20,
    loses_the_number_of_the_dead: 42,
    gives_two_numbers_for_one_question: 179,
    waits_for_the_dead_partner: 42,
    cuts_nothing_back: 0,
    resumes_without_images: 5,
  },
}
