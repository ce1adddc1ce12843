"""A live server shard: the pure Server on its slice, fed with frames.

Everything that a shard decides becomes an Entry of its journal before anybody
hears of it, and everything that it does is done by obeying entries. So a shard
that was killed comes back by reading its last snapshot and obeying the entries
since; the messages that it needs for that still lie in their slots. That log
costs no copy (a message has to be written somewhere to get here) but the slots
it lies in, and one snapshot in so many messages. Without it, a shard comes back
as it was at its last snapshot, and says so in its trace (ROLLBACK): updates
since are lost, though they were acknowledged.

Nothing here waits or looks at a clock: `now` comes with each call, and calls
come from one thread.
"""

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, dispatch, sharding, simulator
from asgd.runtimes import deadlines, protocol
from asgd.runtimes.deadlines import Deadlines, Ladder
from asgd.runtimes.memory import MESSAGES, PARAMS, Damaged, Sizes
from asgd.runtimes.protocol import Entry, Frame

Say = Callable[[Frame], None]  # to one peer; never raises, never blocks long


class Setup(NamedTuple):
  """What all shards of a run agree on."""

  rules: dispatch.Rules
  workers: int  # places
  jobs: int  # each to be received once
  shards: int = 1
  consistent: bool = False  # all shards obey the lead's order
  totals: bool = False  # the algorithm needs totals; consistent only
  log: int = 16  # messages kept until a snapshot; 0: none
  snapshot_seconds: float = 30.0  # between two, where there is no log
  owned: bool = False  # jobs belong to places (sharded data)
  ladder: Ladder = Ladder()
  keep_params_at: tuple[int, ...] = ()  # received counts, for evaluations
  together: bool = False  # the first job waits until every place is held


def check(setup: Setup) -> Setup:
  """Returns a setup that can be run.

  Raises:
    ValueError: for a number that is out of range, and as `dispatch.check_rules`
      and `deadlines.check`.
  """
  least = {"workers": 1, "jobs": 1, "shards": 1, "log": 0}
  for name, at_least in least.items():
    value = getattr(setup, name)
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < at_least:
      raise ValueError(
        f"{name} must be a whole number from {at_least} on, not {value!r}"
      )
  dispatch.check_rules(setup.rules)
  deadlines.check(setup.ladder)
  return setup


def sizes(setup: Setup) -> Sizes:
  """Slots that a shard needs: for tickets that are open now, were open at the
  last snapshot or are kept, and for messages on their way and in the log."""
  rules = setup.rules
  tickets = setup.workers * (rules.depth + 1) + rules.round + rules.backup
  return Sizes(2 * tickets + 2, tickets + setup.log)


class Journal(Protocol):
  """Where entries are written, and read after a crash."""

  name: str  # for messages

  def append(self, entry: Entry) -> None:
    """Writes an entry; when this returns, a kill does not lose it."""

  def entries(self) -> list[Entry]:
    """Returns what was written."""

  def sync(self) -> None:
    """When this returns, a loss of power does not lose it either."""


class Sink(Protocol):
  """Where records are kept."""

  name: str  # for messages
  count: int  # how many there are

  def append(self, records: base.Records) -> None:
    """Adds records."""

  def truncate(self, count: int) -> None:
    """Drops all but the first `count`: they will be made again."""

  def sync(self) -> None:
    """When this returns, a loss of power does not lose them."""


class Rollback(NamedTuple):
  """Where a shard went back to."""

  row: int  # of its journal
  message: int  # how many had been received
  updates: int  # that were undone
  why: str = ""  # if it could have been otherwise


class Held(NamedTuple):
  """A ticket that is open."""

  ticket: base.Ticket
  job: int
  params: int  # slot
  message: int  # slot


class Shard:
  """One shard. The lead (index 0) also decides who starts what."""

  def __init__(
    self,
    index: int,
    setup: Setup,
    steps: simulator.Steps,
    state: base.ServerState,
    memory: Any,
    journal: Journal,
    sink: Sink,
    *,
    now: float,
    image: tuple[Any, Any] | None = None,
    resumed: bool = False,
  ):
    """Starts, or comes back to where the journal ends.

    Args:
      index: which shard.
      setup: the same for all shards of the run.
      steps: compiled functions; `work` is not used.
      state: of the server before the first entry.
      memory: with slots as `sizes` says.
      journal: what this shard did before, and will do.
      sink: for the records of the messages it receives.
      now: seconds since the run began.
      image: (state, meta) of a checkpoint, for when the memory is lost.
      resumed: everybody else has died, too.
    """
    self.index, self.setup = index, setup
    self._steps, self._memory = steps, memory
    self._journal, self._sink = journal, sink
    self._numbers = [jnp.int32(w) for w in range(setup.workers)]
    self._state = state
    self._tickets: dict[tuple[int, int], Held] = {}
    self._kept: dict[int, Held] = {}
    self._params_use: collections.Counter[int] = collections.Counter()
    self._published: tuple[Any, int] | None = None  # (params, their slot)
    self._pinned: list[int] = []  # params slots that the snapshot refers to
    self._logged: list[int] = []  # message slots since the snapshot
    made = sizes(setup)
    self._free_params = list(range(made.params))[::-1]
    self._free_messages = list(range(made.messages))[::-1]
    # Message slots of tickets that died, by worker: whoever held them may not
    # know yet, and write. They are free when the place is held by another.
    self._dead_messages: dict[int, list[int]] = {}
    self._peers: dict[int, Say] = {}
    self._followers: dict[int, Say] = {}
    self._holder: dict[int, int] = {}  # worker -> number of its holder
    self._seqs: dict[int, int] = {}  # worker -> jobs it started, ever
    self._pushed: dict[tuple[int, int], Frame] = {}
    self._prepared: dict[tuple[int, int], set[int]] = {}
    self._ordered: collections.deque[Entry] = collections.deque()
    self._queue: list[tuple[int, int]] = []  # messages that all shards have
    self._asking: _Asking | None = None  # of the lead
    self._asked: Frame | None = None  # of a follower: not answered yet
    self._totals: dict[tuple[int, int], dict[int, float]] = {}
    self._known: list[tuple[float, int, int]] = []
    self._seen: list[simulator.Row] = []
    self.stopped = False  # every job is received
    self._time = now
    self._saved = now
    self._deadlines = Deadlines(setup.ladder)
    self._awake = now  # nobody could hand in anything before, or join
    self._missing: dict[int, float] = {}  # held places without a peer, since
    self._heard: dict[int, float] = {}  # worker -> its last sign of life
    self.late: set[int] = set()  # workers that are slower than they should be
    self.received = 0
    self.rows = 0
    self.expelled: list[int] = []  # workers that the supervisor is to replace
    self.refused = 0  # messages that were not finite, in a row
    self.kept_params: dict[int, Any] = {}  # received count -> parameters
    self.dispatcher = None
    if index == 0:
      self.dispatcher = dispatch.Dispatcher(
        *(setup.rules,), jobs=setup.jobs, owned=setup.owned, log=self._decided
      )
    self.rollback: Rollback | None = None  # at its start
    self._why = ""
    restarted = self._recover(now, image, resumed)
    if resumed:
      for worker in self.workers:
        self._leave(worker)
    if restarted:  # what the memory held is of no use to the next one
      self.snapshot()
    # Workers that were told to stop will not say anything any more.
    self.stopped = bool(self.dispatcher and self.dispatcher.finished)

  # Peers.

  def handle(self, frame: Frame, say: Say, now: float) -> None:
    """Takes one frame of a peer whose answers go to `say`."""
    self._time = max(now, self._time)
    worker = frame.worker
    if self._peers.get(worker) == say:
      waits = frame.kind == protocol.HELLO and frame.flag
      if waits or frame.kind == protocol.PUSH:
        self._heard[worker] = self._time
    if frame.kind == protocol.FOLLOW:
      self._followers[worker] = say
      for row, entry in enumerate(self._journal.entries()):
        if row >= frame.version:
          for said in _row(row, entry):
            say(said)
      if self._asking:
        self._say_ask(say)
    elif frame.kind == protocol.PREPARED:
      self._prepared.setdefault((worker_of(frame), frame.seq), set()).add(
        frame.job
      )
      self._consider(worker_of(frame), frame.seq)
    elif frame.kind == protocol.ROW:
      # Who asks twice is told twice.
      if frame.version == self.rows + len(self._ordered):
        self._ordered.append(
          Entry(
            *(frame.value, worker, frame.job, frame.flag),
            seq=frame.seq,
            loss=frame.loss,
          )
        )
      self._follow()
    elif frame.kind == protocol.TOTAL:
      totals = self._totals.setdefault((worker, frame.seq), {})
      totals[frame.version] = frame.value
    elif frame.kind == protocol.ASK:
      self._asked = frame
      self._follow()
    elif frame.kind == protocol.ASKED:
      self._add_up(frame)
    elif frame.kind == protocol.HELLO:
      self._hello(frame, say)
    elif self._peers.get(worker) != say:
      say(Frame(protocol.EXPEL, worker, flag=int(worker in self._peers)))
    elif frame.kind == protocol.FETCH:
      self._fetch(frame)
    elif frame.kind == protocol.PUSH:
      self._push(frame)
    elif frame.kind == protocol.DRAIN:
      if self.dispatcher:
        self.dispatcher.pause(worker)
    elif frame.kind == protocol.BYE:
      self.gone(worker, now)
    self._advance()

  def gone(self, worker: int, now: float) -> None:
    """A worker's connection broke, or it left: its tickets die."""
    self._time = max(now, self._time)
    self._peers.pop(worker, None)
    self._leave(worker)
    self._advance()

  def pause(self) -> None:
    """Starts nothing new, at any worker."""
    if self.dispatcher:
      for worker in self.dispatcher.workers:
        self.dispatcher.pause(worker)

  def tick(self, now: float) -> None:
    """Looks at the deadlines; to be called now and then."""
    self.flush()
    if not self.setup.log and now - self._saved > self.setup.snapshot_seconds:
      self.snapshot()
      self._saved = now
    if not self.dispatcher or self.stopped:
      return
    if not self._seqs:
      self._time = max(now, self._time)
      self._advance()  # who waits for others may have waited long enough
    late, dead = self._deadlines.late, self._deadlines.dead
    self.late.clear()
    for worker in self.dispatcher.workers:
      times = [
        ticket.time
        for seq, ticket in self.dispatcher.open(worker).items()
        if (worker, seq) not in self._pushed
      ]
      # Of several tickets, one is worked on at a time.
      heard = self._heard.get(worker, self._awake)
      began = max(min(times, default=now), heard)
      age = (now - began) / max(len(times), 1)
      if worker not in self._peers:
        age = max(age, now - self._missing.setdefault(worker, now))
      else:
        self._missing.pop(worker, None)
      if age > dead:
        self._missing.pop(worker, None)
        self.expel(worker, now)
      elif age > late:
        self.late.add(worker)

  def peer(self, worker: int) -> Say | None:
    """Returns the way to a worker, None if it is not there."""
    return self._peers.get(worker)

  def expel(self, worker: int, now: float) -> None:
    """Takes a worker for dead: it took too long."""
    say = self._peers.get(worker)
    self.gone(worker, now)
    self.expelled.append(worker)
    if say:
      say(Frame(protocol.EXPEL, worker))

  def _hello(self, frame, say):
    worker = frame.worker
    if not 0 <= worker < self.setup.workers:
      say(Frame(protocol.EXPEL, worker))
      return
    held = self._holder.get(worker, -1)
    again = held >= 0 and frame.job == held
    if frame.job < 0 and self._peers.get(worker) == say:
      again = True  # it said so before, and did not wait for the answer
    if not again:
      before = frame.job < held if frame.job >= 0 else False
      if before or (frame.job >= 0 and self.dispatcher):
        # A holder from before, whose tickets have died since.
        say(Frame(protocol.EXPEL, worker, flag=int(worker in self._peers)))
        return
      old = self._peers.pop(worker, None)
      if old:
        old(Frame(protocol.EXPEL, worker, flag=1))
      self._leave(worker)
    self._peers[worker] = say
    if not again:
      self._heard[worker] = self._time
      if self.dispatcher:
        self._holder[worker] = self.dispatcher.join(worker, self._time)
      else:
        self._holder[worker] = frame.job
        if not self.setup.consistent:
          self._do(Entry(self._time, worker, frame.job, base.JOIN))
    say(Frame(protocol.WELCOME, worker, job=self._holder[worker]))
    for (holder, seq), held in self._tickets.items():
      if holder == worker and (worker, seq) not in self._pushed:
        say(self._ticket_frame(worker, seq, held))
    if self.stopped:
      say(Frame(protocol.STOP, worker))

  def _leave(self, worker):
    number = self._holder.pop(worker, None)
    if self.dispatcher:
      self.dispatcher.leave(worker, self._time)
    elif not self.setup.consistent:
      mine = [key for key in self._tickets if key[0] == worker]
      for key in mine:
        job = self._tickets[key].job
        slot = self._dead_slot(key)
        self._do(
          Entry(self._time, worker, job, base.LOST, key[1], message=slot)
        )
      if mine or number is not None:
        self._do(Entry(self._time, worker, number or 0, base.LEAVE))
    for key in [key for key in self._pushed if key[0] == worker]:
      if key not in self._tickets:
        del self._pushed[key]

  def _fetch(self, frame):
    """A follower of its own mind sends its part when it is asked."""
    key = frame.worker, frame.seq
    if self.setup.consistent or self.dispatcher:
      return
    if key not in self._tickets:
      action = base.KEEP if frame.flag else base.SEND
      self._do(Entry(self._time, frame.worker, frame.job, action, frame.seq))
    else:
      self._say(frame.worker, self._ticket_frame(*key, self._tickets[key]))

  def _push(self, frame):
    key = frame.worker, frame.seq
    if key not in self._tickets or key in self._pushed:
      # Sent again: what is committed is acknowledged again.
      if key not in self._pushed:
        self._say(frame.worker, Frame(protocol.ACK, *key))
      return
    if self.dispatcher:
      if not frame.flag:
        self.refused += 1
        self.dispatcher.reject(*key, self._time)
        self._expel_quietly(frame.worker)
        return
      self.refused = 0
      self._pushed[key] = frame
      started = self.dispatcher.open(frame.worker)[frame.seq].time
      self._deadlines.ended(self._time - max(started, self._awake))
      self._consider(*key)
    elif self.setup.consistent:
      self._pushed[key] = frame
      self._tell_prepared(*key)
      self._follow()
    else:
      action = base.RECEIVE if frame.flag else base.REJECT
      held = self._tickets[key]
      self._pushed[key] = frame
      self._do(
        Entry(
          *(self._time, frame.worker, held.job, action, frame.seq),
          message=held.message if frame.flag else -1,
          loss=frame.value,
        )
      )
      if action == base.REJECT:
        self._leave(frame.worker)
        self._expel_quietly(frame.worker)

  def _expel_quietly(self, worker):
    say = self._peers.pop(worker, None)
    self._holder.pop(worker, None)
    if say:
      say(Frame(protocol.EXPEL, worker))

  # The lead.

  def _consider(self, worker, seq):
    """Lets a message count as arrived when every shard has its part of it."""
    if (worker, seq) not in self._pushed or not self.dispatcher:
      return
    others = self.setup.shards - 1 if self.setup.consistent else 0
    if len(self._prepared.get((worker, seq), ())) < others:
      return
    if not self.setup.totals:
      self.dispatcher.arrive(worker, seq)
    elif (worker, seq) not in self._queue:
      self._queue.append((worker, seq))
      self._propose()

  def _propose(self):
    """Begins with the totals of the next message, one message at a time."""
    if self._asking and self._asking.key not in self._pushed:
      self._asking = None  # its worker died
    self._queue = [key for key in self._queue if key in self._pushed]
    for worker, seq in self._queue:
      first = next(iter(self.dispatcher.open(worker)))
      if self._asking is None and seq == first:
        self._asking = _Asking((worker, seq), [], {})
        self._next_stage()
        return

  def _next_stage(self):
    """Goes as far as the totals that are known allow."""
    asking = self._asking
    out = self._stage(asking.key, asking.totals)
    if isinstance(out, sharding.Ask):
      asking.operands[0] = out.operand
      for say in self._followers.values():
        self._say_ask(say)
      return
    self._asking = None
    self._queue.remove(asking.key)
    self._totals[asking.key] = dict(enumerate(asking.totals))
    self.dispatcher.arrive(*asking.key)

  def _say_ask(self, say):
    worker, seq = self._asking.key
    for said in _totals(worker, seq, self._asking.totals):
      say(said)
    count = len(self._asking.totals)
    say(Frame(protocol.ASK, worker, seq, version=count))

  def _add_up(self, frame):
    asking = self._asking
    if not asking or asking.key != (frame.worker, frame.seq):
      return
    if frame.version != len(asking.totals):
      return
    mine = np.asarray(asking.operands[0])
    asking.operands[frame.job] = mine.dtype.type(frame.value)
    if len(asking.operands) < self.setup.shards:
      return
    operands = [asking.operands[i] for i in range(self.setup.shards)]
    asking.totals.append(float(sharding.add_up(operands)))
    asking.operands.clear()
    self._next_stage()

  def _stage(self, key, totals):
    held = self._tickets[key]
    return self._steps.stage(
      simulator.as_totals(totals),
      *(self._state, held.ticket, self._memory.read(MESSAGES, held.message)),
      np.float32(self._pushed[key].value),
    )

  def _advance(self):
    if not self.dispatcher or self.stopped:
      return
    while self.dispatcher.deliver(self._time) and self._queue:
      self._propose()
    if self._queue:
      self._propose()
    if not self._waits_for_others():
      self.dispatcher.grants(self._time)
    if self.dispatcher.finished:
      self.stopped = True
      for worker, say in list(self._peers.items()):
        say(Frame(protocol.STOP, worker))

  def _waits_for_others(self):
    """Whether the run has not begun, because some are still to come; not longer
    than the ladder gives them."""
    return (
      self.setup.together
      and not self._seqs
      and len(self.dispatcher.workers) < self.setup.workers
      and self._time - self._awake < self.setup.ladder.start
    )

  def _decided(self, event):
    """The dispatcher's log: carries out what it has decided."""
    time, worker, job, action = event
    seq, message, loss, totals = -1, -1, 0.0, ()
    if action in (base.SEND, base.KEEP):
      seq = self._seqs.get(worker, 0)
    elif action in (base.RECEIVE, base.LOST, base.REJECT):
      seq = next(
        s
        for (w, s), held in self._tickets.items()
        if w == worker and held.job == job
      )
      if action == base.RECEIVE:
        frame = self._pushed[worker, seq]
        message, loss = self._tickets[worker, seq].message, frame.value
        totals = self._known_totals((worker, seq))
      else:
        message = self._dead_slot((worker, seq))
    self._do(
      Entry(
        *(time, worker, job, action, seq),
        message=message,
        loss=loss,
        totals=totals,
      )
    )

  def _dead_slot(self, key):
    """The slot of a ticket that dies, if its message may still be written."""
    return -1 if key in self._pushed else self._tickets[key].message

  def _known_totals(self, key):
    held = self._totals.pop(key, {})
    return tuple(held[i] for i in sorted(held))

  # A follower in a consistent run.

  def _tell_prepared(self, worker, seq):
    lead = self._followers.get(0)
    if lead:
      lead(Frame(protocol.PREPARED, worker, seq, job=self.index))

  def follow(self, say: Say) -> None:
    """The way to the lead is open (again): asks for what it has decided."""
    self._followers[0] = say
    self._ordered.clear()
    say(Frame(protocol.FOLLOW, self.index, version=self.rows))
    for worker, seq in self._pushed:
      self._tell_prepared(worker, seq)

  def _follow(self):
    """Obeys the lead's rows."""
    while self._ordered:
      entry = self._ordered[0]
      key = entry.worker, entry.seq
      if entry.action in (base.LOST, base.REJECT):
        entry = entry._replace(message=self._dead_slot(key))
      elif entry.action == base.RECEIVE:
        # What the lead has received was prepared here. It lies in its slot even
        # if this shard was killed since, and does not know.
        entry = entry._replace(
          message=self._tickets[key].message, totals=self._known_totals(key)
        )
      self._ordered.popleft()
      self._do(entry)
    if self._asked:
      self._answer(self._asked)

  def _answer(self, frame):
    """Says this shard's part of a total, if it is where the lead is."""
    key, lead = (frame.worker, frame.seq), self._followers.get(0)
    if key not in self._pushed or key not in self._tickets or not lead:
      return
    known = self._totals.get(key, {})
    out = self._stage(key, [known[i] for i in range(frame.version)])
    self._asked = None
    lead(
      Frame(
        *(protocol.ASKED, frame.worker, frame.seq, self.index, frame.version),
        value=float(out.operand),
      )
    )

  # Obeying entries.

  def _do(self, entry: Entry) -> None:
    """Obeys a new entry; it is in the journal before anybody hears of it."""
    if entry.action in (base.SEND, base.KEEP):
      self._make_room()
    answer = self._obey(entry)
    if entry.action in (base.SEND, base.KEEP):
      held = self._tickets[entry.worker, entry.seq]
      entry = entry._replace(
        version=int(held.ticket.version),
        params=held.params,
        message=held.message,
      )
    self._journal.append(entry)
    for say in self._followers.values() if self.dispatcher else ():
      for said in _row(self.rows - 1, entry):
        say(said)
    if answer:
      self._say(entry.worker, answer())

  def _obey(self, entry: Entry) -> Callable[[], Frame] | None:
    """Changes the state as an entry says. Returns what to tell its worker."""
    time, worker, job, action, seq, *_ = entry
    key = worker, seq
    self.rows += 1
    answer = None
    if action == base.SEND:
      self._send(entry)
      answer = lambda: self._ticket_frame(*key, self._tickets[key])  # noqa: E731
    elif action == base.KEEP:
      kept = self._kept[worker]
      slot = self._take_message_slot(entry)
      self._params_use[kept.params] += 1
      self._tickets[key] = kept._replace(job=job, message=slot)
      self._seqs[worker] = seq + 1
      answer = lambda: self._ticket_frame(*key, self._tickets[key])  # noqa: E731
    elif action == base.RECEIVE:
      self._receive(entry)
      answer = lambda: Frame(protocol.ACK, *key)  # noqa: E731
    elif action in (base.LOST, base.REJECT):
      held = self._tickets.pop(key)
      self._release(held.params)
      if entry.message < 0:  # it had come: nobody writes there any more
        self._free_messages.append(held.message)
      else:
        self._dead_messages.setdefault(worker, []).append(held.message)
      self._forget(key)
    elif action in (base.JOIN, base.LEAVE):
      if action == base.JOIN:
        self._free_messages += self._dead_messages.pop(worker, [])
      kept = self._kept.pop(worker, None)
      if kept:
        self._release(kept.params)
    elif action == base.ROLLBACK:
      pass  # its effect is the snapshot that was read
    return answer

  def _forget(self, key):
    self._pushed.pop(key, None)
    self._prepared.pop(key, None)
    self._totals.pop(key, None)

  def _send(self, entry):
    worker, seq = entry.worker, entry.seq
    ticket = self._steps.send(self._state, self._numbers[worker])
    slot = self._publish(ticket.params, entry.params)
    message = self._take_message_slot(entry)
    held = Held(ticket, entry.job, slot, message)
    self._tickets[worker, seq] = held
    self._seqs[worker] = seq + 1
    if self._keeps():
      kept = self._kept.pop(worker, None)
      if kept:
        self._release(kept.params)
      self._params_use[slot] += 1
      self._kept[worker] = held._replace(
        ticket=ticket._replace(fresh=np.False_)
      )

  def _publish(self, params, slot):
    """Puts parameters where workers can read them; once for each version."""
    if self._published and self._published[0] is params:
      slot = self._published[1]
      self._params_use[slot] += 1
      return slot
    if slot < 0:
      slot = self._free_params.pop()
      self._memory.write(PARAMS, slot, params)
    else:
      # A recovery: it was written then. Somebody may be reading what the slot
      # was used for since.
      self._free_params.remove(slot)
    self._unpublish()
    self._published = params, slot
    self._params_use[slot] += 2  # the ticket, and `_published`
    return slot

  def _unpublish(self):
    if self._published:
      slot = self._published[1]
      self._published = None
      self._release(slot)

  def _release(self, slot):
    self._params_use[slot] -= 1
    if self._params_use[slot] == 0:
      self._free_params.append(slot)

  def _take_message_slot(self, entry):
    if entry.message < 0:
      return self._free_messages.pop()
    self._free_messages.remove(entry.message)
    return entry.message

  def _receive(self, entry):
    key = entry.worker, entry.seq
    held = self._tickets.pop(key)
    message = self._memory.read(MESSAGES, held.message)
    args = self._state, held.ticket, message, np.float32(entry.loss)
    if self.setup.totals:
      known = simulator.as_totals(entry.totals)
      self._state, row = self._steps.stage(known, *args).result
    else:
      self._state, row = self._steps.receive(*args)
    self._release(held.params)
    if self.setup.log:
      self._logged.append(held.message)
    else:
      jax.block_until_ready(row)
      self._free_messages.append(held.message)
    self._forget(key)
    self._known.append((entry.time, entry.worker, entry.job))
    self._seen.append(row)
    self.received += 1
    if self.received in self.setup.keep_params_at:
      self.kept_params[self.received] = self._state.params

  # Snapshots.

  def _make_room(self):
    if not self._free_messages or len(self._logged) >= max(self.setup.log, 1):
      self.snapshot()

  def snapshot(self) -> None:
    """Saves the state; the log before it is no longer needed."""
    self.flush()
    meta = self._meta()
    self._memory.save(self._state, meta)
    self._free_messages += self._logged
    self._logged = []
    pinned = [Entry(*fields).params for _, *fields in meta["tickets"]]
    for slot in pinned:
      self._params_use[slot] += 1
    for slot in self._pinned:
      self._release(slot)
    self._pinned = pinned

  def image(self) -> tuple[Any, Any]:
    """Returns (state, meta), all that a checkpoint needs, as plain data. What
    it builds on is on the disk then, and does not go with the power."""
    self.flush()
    self._journal.sync()
    self._sink.sync()
    return jax.tree.map(np.array, self._state), self._meta()

  def _meta(self):
    held = [_describe(*key, held) for key, held in self._tickets.items()]
    held += [_describe(w, -1, held) for w, held in self._kept.items()]
    return {
      "rows": self.rows,
      "received": self.received,
      "records": self._sink.count,
      "tickets": held,
      "seqs": sorted(self._seqs.items()),
      "dead": sorted(self._dead_messages.items()),
      "published": self._published[1] if self._published else -1,
      "current": bool(
        self._published and self._published[0] is self._state.params
      ),
    }

  def flush(self) -> None:
    """Hands the records so far to the sink."""
    if self._known:
      self._sink.append(simulator.records(self._known, self._seen))
      self._known, self._seen = [], []

  def _recover(self, now, image, resumed):
    """Comes back to where the journal ends.

    Returns:
      Whether a checkpoint took the place of what the memory held.

    Raises:
      ValueError: if what is there does not fit together.
    """
    entries = self._journal.entries()
    if not entries:
      return False
    try:
      image, intact, logged, back = self._choose(entries, image, resumed)
      if image:
        self._check_fit(entries, image[1], "checkpoint" if back else "snapshot")
      if self.dispatcher:
        self.dispatcher.obey(entry.event for entry in entries)
      rows = self._restore(*image, intact) if image else 0
      if logged:
        self._sink.truncate(image[1]["records"] if image else 0)
        for entry in entries[rows:]:
          self._obey(entry)
        changed = False
      else:
        changed = self._reopen(entries[rows:], intact)
        self._sink.truncate(self.received)  # if it is the trace that was cut
    except _Unfit as error:
      raise ValueError(str(error)) from error
    except (LookupError, StopIteration, TypeError, ValueError) as error:
      raise ValueError(
        f"{self._journal.name} cannot be obeyed (after row {self.rows},"
        f" {type(error).__name__}: {error}): it, or the shared memory in"
        f" {self._memory.name}, was changed. Put them back as they were, or"
        f" remove {self._memory.name}; --resume then goes back to the last"
        " checkpoint"
      ) from error
    if changed:
      row = Entry(max(now, entries[-1].time), 0, rows, base.ROLLBACK)
      before, after = (
        protocol.rolled_back(held)[1] for held in (entries, [*entries, row])
      )
      message = image[1]["received"] if image else 0
      self.rollback = Rollback(rows, message, after - before, self._why)
      self._do(row)
    self._time = max(now, self._time)
    ended = set()  # workers that lost a ticket: a kill came before they left
    for entry in entries:  # who may come back to which place
      if entry.action == base.JOIN:
        self._holder[entry.worker] = entry.job
      elif entry.action == base.LEAVE:
        self._holder.pop(entry.worker, None)
      if entry.action in (base.LOST, base.REJECT):
        ended.add(entry.worker)
      elif entry.action in (base.JOIN, base.LEAVE):
        ended.discard(entry.worker)
    for worker in () if self.index and self.setup.consistent else ended:
      self._leave(worker)
    return back

  def _choose(self, entries, image, resumed):
    """Chooses what to begin with.

    Returns:
      (image, whether the memory is that of the journal, whether it holds the
      messages since the image, whether the image is the checkpoint's).

    Raises:
      ValueError: if there is nothing that fits.
    """
    intact, saved, useful = not self._memory.fresh, None, False
    if intact:
      try:
        saved = self._memory.load(self._state)
        rows = saved[1]["rows"] if saved else 0
        # If it went back since, it was killed before it saved that.
        late = self.setup.log or not saved
        useful = rows <= len(entries) and not (
          late and any(e.action == base.ROLLBACK for e in entries[rows:])
        )
        if rows > len(entries):
          self._why = self._too_short(entries, "snapshot", rows)
          if not resumed:
            raise _Unfit(self._why)
          intact = False
      except Damaged as error:  # what workers hold is elsewhere
        self._why = str(error)
    if useful:
      return saved, True, bool(self.setup.log), False
    self._memory.forget()
    if image and image[1]["rows"] > len(entries):
      raise _Unfit(self._too_short(entries, "checkpoint", image[1]["rows"]))
    return image, intact, False, True

  def _too_short(self, entries, what, rows):
    return (
      f"{self._journal.name} has {len(entries)} rows, the {what} is of row"
      f" {rows}: the trace was cut short. Put it back as the run wrote it, or"
      " start anew in another folder (--out)"
    )

  def _check_fit(self, entries, meta, what):
    """Checks that an image is of this journal, and that its records are there.

    Raises:
      _Unfit: if not.
    """
    opened, received = {}, 0
    for entry in entries[: meta["rows"]]:
      if entry.action in (base.SEND, base.KEEP):
        opened[entry.worker, entry.seq] = entry.job
      elif entry.action in (base.RECEIVE, base.LOST, base.REJECT):
        opened.pop((entry.worker, entry.seq), None)
        received += entry.action == base.RECEIVE
    tickets = [Entry(*fields) for _, *fields in meta["tickets"]]
    held = {(t.worker, t.seq): t.job for t in tickets if t.seq >= 0}
    if held != opened or received != meta["received"]:
      if what == "snapshot":
        what = f"snapshot in {self._memory.name}"
      raise _Unfit(
        f"{self._journal.name} is not the trace that the {what} was made of"
        f" (at row {meta['rows']}): one of the two was changed. Put it back as"
        " the run wrote it, or start anew in another folder (--out)"
      )
    if self._sink.count < meta["records"]:
      raise _Unfit(
        f"{self._sink.name} has {self._sink.count} records where the run had"
        f" written {meta['records']}: it was removed or cut short. Put it back,"
        " or start anew in another folder (--out); launch.simulate --trace"
        " makes the parameters so far from the trace"
      )

  def _restore(self, tree, meta, intact):
    """Takes over a snapshot; returns the rows before it."""
    self._state = jax.tree.map(jnp.array, tree)
    self.rows, self.received = meta["rows"], meta["received"]
    self._seqs = dict(meta["seqs"])
    for worker, slots in meta["dead"]:
      self._dead_messages[worker] = list(slots)
      for slot in slots:
        self._free_messages.remove(slot)
    for fresh, *fields in meta["tickets"]:
      entry = Entry(*fields)
      held = self._read_held(entry, fresh, intact)
      if entry.seq < 0:
        self._kept[entry.worker] = held
      else:
        self._tickets[entry.worker, entry.seq] = held
        self._free_messages.remove(entry.message)
      self._use(held.params)
      self._use(held.params)  # the snapshot's
      self._pinned.append(held.params)
    slot = meta["published"]
    if slot >= 0:
      current = self._state.params if meta["current"] else None
      self._published = current, slot
      self._use(slot)
    return self.rows

  def _use(self, slot):
    if not self._params_use[slot]:
      self._free_params.remove(slot)
    self._params_use[slot] += 1

  def _reopen(self, entries, intact):
    """Takes over the tickets that are open, but not what became of others.

    Returns:
      Whether anything became of others: whether updates are lost.
    """
    changed = False
    opened, kept = {}, {}
    for entry in entries:
      key = entry.worker, entry.seq
      self.rows += 1
      if entry.action in (base.SEND, base.KEEP):
        self._seqs[entry.worker] = entry.seq + 1
        opened[key] = entry
        if entry.action == base.SEND and self._keeps():
          kept[entry.worker] = entry
      elif entry.action in (base.RECEIVE, base.LOST, base.REJECT):
        opened.pop(key, None)
        self._tickets.pop(key, None)
        self.received += entry.action == base.RECEIVE
        changed |= entry.action == base.RECEIVE
        if entry.action != base.RECEIVE and entry.message >= 0:
          self._dead_messages.setdefault(entry.worker, []).append(entry.message)
      elif entry.action in (base.JOIN, base.LEAVE):
        if entry.action == base.JOIN:
          self._dead_messages.pop(entry.worker, None)
        kept.pop(entry.worker, None)
        self._kept.pop(entry.worker, None)
    for key, entry in opened.items():
      self._tickets[key] = self._read_held(
        entry, entry.action == base.SEND, intact
      )
    for worker, entry in kept.items():
      self._kept[worker] = self._read_held(entry, False, intact)
    # Slots: those of the snapshot stay pinned, the others are counted anew.
    self._params_use.clear()
    for held in (*self._tickets.values(), *self._kept.values()):
      self._params_use[held.params] += 1
    self._published = None
    for slot in self._pinned:
      self._params_use[slot] += 1
    made = sizes(self.setup)
    self._free_params = [
      slot for slot in range(made.params) if not self._params_use[slot]
    ]
    taken = {held.message for held in self._tickets.values()}
    taken.update(*self._dead_messages.values())
    self._free_messages = [
      slot for slot in range(made.messages) if slot not in taken
    ]
    return changed

  def _keeps(self):
    return self.setup.rules.cache or self.setup.rules.fetch_every > 1

  def _read_held(self, entry, fresh, intact):
    # What was sent is lost with the memory, and so is who it was sent to.
    params = self._memory.read_copy(PARAMS, entry.params) if intact else None
    ticket = base.Ticket(
      self._numbers[entry.worker],
      jnp.int32(entry.version),
      params,
      np.bool_(fresh),
    )
    return Held(ticket, entry.job, entry.params, entry.message)

  # What is said.

  def _say(self, worker, frame):
    say = self._peers.get(worker)
    if say:
      say(frame)

  def _ticket_frame(self, worker, seq, held):
    return Frame(
      *(protocol.TICKET, worker, seq, held.job, int(held.ticket.version)),
      flag=int(not held.ticket.fresh),
      params=held.params,
      message=held.message,
    )

  def status(self) -> dict[str, Any]:
    """Returns how it goes, as plain data. What is told of workers that were
    expelled is told once."""
    self.flush()
    expelled, self.expelled = self.expelled, []
    return {
      "received": self.received,
      "rows": self.rows,
      "stopped": self.stopped,
      "busy": self.busy,
      "workers": list(self.workers),
      "late": sorted(self.late),
      "expelled": expelled,
      "refused": self.refused,
      "rollback": self.rollback,
      "kept_params": sorted(self.kept_params),
    }

  def accepts(self, frame: Frame) -> bool:
    """Whether a PUSH is for a ticket that is open, and in its slot: a message
    that comes with it may be written there."""
    held = self._tickets.get((frame.worker, frame.seq))
    return (
      held is not None
      and held.message == frame.message
      and (frame.worker, frame.seq) not in self._pushed
    )

  @property
  def memory(self) -> Any:
    """Its slots."""
    return self._memory

  @property
  def busy(self) -> bool:
    """Whether tickets are open."""
    return bool(self._tickets)

  @property
  def params(self) -> Any:
    """The parameters as they are."""
    return self._state.params

  @property
  def state(self) -> base.ServerState:
    """All of the state; not to be donated."""
    return self._state

  @property
  def workers(self) -> Sequence[int]:
    """The places that are held, as far as this shard knows."""
    return sorted(self._holder)


def worker_of(frame: Frame) -> int:
  """Returns the worker that a PREPARED frame tells of."""
  return frame.worker


class _Unfit(Exception):
  """What a shard has written does not fit together."""


class _Asking(NamedTuple):
  """A message whose totals are being added up."""

  key: tuple[int, int]  # worker, seq
  totals: list[float]  # known so far
  operands: dict[int, Any]  # of the next one, by shard


def _totals(worker, seq, totals):
  """Frames that tell of totals."""
  return [
    Frame(protocol.TOTAL, worker, seq, version=i, value=value)
    for i, value in enumerate(totals)
  ]


def _row(number, entry):
  """Frames that tell of a row."""
  row = Frame(
    *(protocol.ROW, entry.worker, entry.seq, entry.job, number, entry.action),
    value=entry.time,
    loss=entry.loss,
  )
  return [*_totals(entry.worker, entry.seq, entry.totals), row]


def _describe(worker, seq, held):
  """A held ticket as JSON: whether it is fresh, and an Entry's fields."""
  ticket = held.ticket
  entry = Entry(
    *(0.0, worker, held.job, base.SEND, seq, int(ticket.version)),
    *(held.params, held.message),
  )
  return [bool(ticket.fresh), *entry]


def entries_to_trace(entries: Iterable[Entry]) -> base.Trace:
  """Returns the trace that a journal holds."""
  columns = list(zip(*(entry.event for entry in entries), strict=True))
  time, worker, job, action = columns or ((),) * 4
  return base.Trace(
    np.array(time, np.float64),
    np.array(worker, np.int32),
    np.array(job, np.int32),
    np.array(action, np.int8),
  )
