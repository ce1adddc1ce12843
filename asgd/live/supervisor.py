"""One supervisor for the parties of a run: shards, workers, peers.

It starts each party in a host, asks all of them at once, ends those that are
silent or hang, counts exits, and raises when exits follow each other without a
message in between. A protocol's cluster has a supervisor, and decides what
follows from a lost party: which one to replace, which one to admit, and when
all are at rest.

The supervisor reads time from its hosts alone. In a simulated world it meets
the same faults as the parties do.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from asgd.live.deadlines import DEAD, Deadlines, Ladder
from asgd.live.failures import NotFinite, ShardsDie, WorkersDie
from asgd.live.hosts import Call, Host, HostExited, Hosts, Make
from asgd.live.hosts.base import LOCAL

_LOOK = 0.01  # seconds between two looks whether all are at rest
_ANSWER_LOOK = 0.5  # seconds between two looks at calls
_SOON = 2.0  # seconds after which a line names the party that is waited for
TRIES = 3  # refused messages, for each party, before a run ends
_DEATHS = 5  # exits, for each party of a kind, before another message comes
_PATIENCE = 60.0  # seconds after which a silent party is ended, at least
_REASON = 5.0  # seconds for a party that has failed to report why
_POLL = 0.5  # seconds to wait for the answers to a poll


class Party:
  """One incarnation of a shard, a worker or a peer, as the driver sees it."""

  def __init__(self, kind: str, index: int, host: Host, made: Call):
    self.kind, self.index, self.host, self.made = kind, index, host, made
    self.run: Call | None = None  # its long call, until it ends or rests
    self.proven = False  # it has done a job, for which it had to compile
    self.hung = False  # the supervisor ended it, as it took too long
    self.done = 0  # jobs, as the supervisor saw last
    self.since: float | None = None  # when it saw that; None: it was idle
    self.poll: Call | None = None  # that is not answered; see `poll`
    self.polled = 0.0  # when that call was made

  @property
  def ready(self) -> bool:
    """Whether its object is made, and it has not exited. Raises what kept it
    from that."""
    return self.made.done() and answer_of(self.made) is not None


class Supervisor:
  """The parties of a run, by kind and index."""

  def __init__(
    self,
    hosts: Hosts,
    counts: Mapping[str, int],
    ladder: Ladder,
    *,
    patience: float = _PATIENCE,
  ):
    """Prepares.

    Args:
      hosts: which run the parties.
      counts: kind -> how many indices it has.
      ladder: when a job takes too long.
      patience: seconds, at least 0, after which a party that does not answer
        is ended.
    """
    self.hosts, self._counts = hosts, dict(counts)
    self.deadlines, self._start_seconds = Deadlines(ladder), ladder.start
    self._patience = patience
    self.parties: dict[str, dict[int, Party]] = {kind: {} for kind in counts}
    self.replaced = dict.fromkeys(counts, 0)
    self._started: set[tuple[str, int]] = set()
    self._received = self._refused = 0
    self._deaths = dict.fromkeys(counts, 0)
    self.news: list[str] = []  # lines for the user

  # Starting and ending.

  def start(self, kind: str, index: int, make: Make) -> Party:
    """Begins to make a party, which takes the index of the one before."""
    self.replaced[kind] += (kind, index) in self._started
    self._started.add((kind, index))
    host = self.hosts.start(kind, index, make)
    made = self.hosts.made(kind, index)
    party = Party(kind, index, host, made)
    self.parties[kind][index] = party
    return party

  def await_made(self, parties: Sequence[Party]) -> list[Party]:
    """Waits until the objects of some parties are made; ends those that take
    too long. Returns those that have exited. Raises what kept one from being
    made."""
    calls = {(party.kind, party.index): party.made for party in parties}
    self._await(calls, max(DEAD * self._start_seconds, self._patience))
    return [party for party in parties if answer_of(party.made) is None]

  def end(self, party: Party) -> None:
    """Ends a party, whatever it does; `lost` then reports it."""
    self.hosts.kill(party.kind, party.index)

  def drop(self, party: Party) -> None:
    """Forgets a party that has exited, or has lost its connection: it writes
    no more."""
    if self.parties[party.kind].get(party.index) is party:
      del self.parties[party.kind][party.index]
    self.hosts.kill(party.kind, party.index)

  def lost(self, kind: str) -> list[Party]:
    """Returns the parties of a kind that have exited and were not dropped."""
    mine = self.parties[kind]
    exited = [index for kind_, index in self.hosts.exited() if kind_ == kind]
    return [mine[index] for index in exited if index in mine]

  def take_ended(self, kind: str) -> Iterator[tuple[Party, str]]:
    """Drops the parties of a kind that have exited or have ended their `run`.

    Yields each with "died", "hung", or the result of its `run`. Raises the
    error that kept a party from being made, or that ended its `run`.
    """
    ended = {party.index: party for party in self.lost(kind)}
    for index, party in self.parties[kind].items():
      if party.run is not None and party.run.done():
        ended[index] = party
    for _, party in sorted(ended.items()):
      answer_of(party.made)
      over = party.run is not None and party.run.done()
      how = answer_of(party.run) if over else None
      self.drop(party)
      yield party, "hung" if party.hung else how[0] if how else "died"

  # Asking.

  def ask(
    self, kind: str, method: str, *args: Any, among: Iterable[int] | None = None
  ) -> dict[int, Any]:
    """Calls a method of several parties of a kind, all at once. A party that
    does not answer is ended: it may have missed the call.

    Args:
      kind: of the parties.
      method: of their objects.
      *args: of the method.
      among: indices; None asks all of the kind.

    Returns:
      What each of them answers, but for those that have exited, are silent for
      too long, or have lost their connection.
    """
    mine = self.parties[kind]
    indices = list(mine) if among is None else [i for i in among if i in mine]
    calls = {
      (kind, index): mine[index].host.call(method, *args) for index in indices
    }
    limit = self._patience
    if kind not in LOCAL:  # it may be at a job
      limit = max(limit, self.deadlines.dead)
    silent = self._await(calls, limit)
    found = {index: answer_of(call) for (_, index), call in calls.items()}
    lost = [mine[index] for index, answer in found.items() if answer is None]
    # A party that has failed reports the reason as the error of its `run`, if
    # it is not ended before.
    runs = {(kind, party.index): party.run for party in lost if party.run}
    for key in silent:
      runs.pop(key, None)
    self.silent(runs, min(_REASON, self._patience))
    for party in lost:
      self.end(party)
    return {index: value[0] for index, value in found.items() if value}

  def poll(
    self, kind: str, method: str, *args: Any, among: Iterable[int]
  ) -> dict[int, Any]:
    """Calls a method of several parties of a kind, and waits half a second.

    A party that has not answered by then is left out, so that the caller need
    not wait for it; the next poll looks for the same answer. A party that is
    silent for longer than `patience` is ended. Returns index -> answer of the
    other parties."""
    mine, now = self.parties[kind], self.hosts.clock()
    asked = [mine[index] for index in among]
    for party in asked:
      if party.poll is None:
        party.poll, party.polled = party.host.call(method, *args), now
    calls = {(kind, party.index): party.poll for party in asked}
    silent, found = self.silent(calls, _POLL), {}
    for party in asked:
      answer = None
      if (kind, party.index) in silent:
        if self.hosts.clock() - party.polled <= self._patience:
          continue
      else:
        answer, party.poll = answer_of(party.poll), None
      if answer is None:
        self.end(party)
      else:
        found[party.index] = answer[0]
    return found

  def ask_until_answered(
    self,
    kind: str,
    method: str,
    *args: Any,
    among: Iterable[int] | None = None,
    restart: Callable[[int], None],
  ) -> list[Any]:
    """Calls a method of several parties of a kind, all at once. A party that
    does not answer is replaced, and the next one is called.

    Args:
      kind: of the parties.
      method: of their objects; it may be called twice.
      *args: of the method.
      among: indices; None asks all of the kind.
      restart: starts the party of an index again, or raises.

    Returns:
      What each of them answers, in the order of the indices.
    """
    indices = list(self.parties[kind] if among is None else among)
    found: dict[int, Any] = {}
    while left := [index for index in indices if index not in found]:
      found.update(self.ask(kind, method, *args, among=left))
      for index in left:
        if index not in found:
          restart(index)
    return [found[index] for index in indices]

  def silent(
    self,
    calls: Mapping[tuple[str, int], Call],
    limit: float,
    *,
    show: Callable[[str], None] = lambda text: None,
  ) -> list[tuple[str, int]]:
    """Waits for calls, all at once: a silent party takes no time from others.

    Args:
      calls: (kind, index) of a party -> what was asked of it.
      limit: seconds to wait, at most.
      show: is given a line after 2 seconds, which names who is waited for.

    Returns:
      The keys of the calls that have not ended by then.
    """
    clock = self.hosts.clock
    began, told, left = clock(), False, dict(calls)
    while left:
      ended = self.hosts.wait(list(left.values()), _ANSWER_LOOK)
      left = {key: call for key, call in left.items() if call not in ended}
      passed = clock() - began
      if left and passed > _SOON and not told:
        told = True
        names = ", ".join(f"{kind} {index}" for kind, index in left)
        show(f"waiting for {names}, which has not answered for {passed:.0f} s")
      if passed > limit:
        break
    return list(left)

  def _await(self, calls, limit):
    """Waits for calls, by (kind, index), and ends the silent parties; returns
    their keys."""
    silent = self.silent(calls, limit, show=self.hosts.show)
    for kind, index in silent:
      self.hosts.kill(kind, index)
    return silent

  # Exits.

  def progressed(self, received: int) -> None:
    """Messages were received in all: exits before the last one do not count
    together with those after it."""
    if received > self._received:
      self._received, self._refused = received, 0
      self._deaths = dict.fromkeys(self._deaths, 0)

  def count_exit(self, kind: str, index: int, how: str) -> None:
    """Counts a party that has exited. Raises WorkersDie or ShardsDie when one
    after the other does."""
    self._deaths[kind] += 1
    deaths = self._deaths[kind]
    if deaths <= _DEATHS * self._counts[kind]:
      return
    if kind in LOCAL:
      raise ShardsDie(
        f"{kind}s ended {deaths} times before a message was received, the last"
        f" was {kind} {index}: look for what ends them in the memory of the"
        " machine"
      )
    raise WorkersDie(
      f"{deaths} {kind}s ended, one after the other, before a message was"
      f" received (the last: {kind} {index} {how}): look for what ends them in"
      " the data, in the loss, and in the memory of the machine"
    )

  def count_refusal(self, kind: str, index: int) -> None:
    """Counts a message that was not finite. Raises NotFinite when there are too
    many in a row."""
    self._refused += 1
    if self._refused > TRIES * self._counts[kind]:
      raise NotFinite(
        f"{self._refused} messages in a row were not finite, the last of"
        f" {kind} {index}"
      )

  # Jobs that take too long.

  def job_ended(self, party: Party, seconds: float) -> None:
    """A party has done a job in so many seconds."""
    self.deadlines.ended(seconds)
    party.proven = True

  def watch(
    self, party: Party, done: int | None, *, busy: float | None = None
  ) -> None:
    """Learns how long jobs take, and ends a party that is at one for too long.

    Args:
      party: which is watched.
      done: jobs or clocks that it has done; None: it is idle.
      busy: seconds that it says it is at its job; None: since the supervisor
        saw that it had done another.
    """
    now = self.hosts.clock()
    if done is None:
      party.since = None
      return
    if party.since is None:
      party.done, party.since = done, now
    elif done > party.done:
      self.job_ended(party, now - party.since)
      party.done, party.since = done, now
    self.end_overdue(party, busy)

  def excuse(self, kind: str) -> None:
    """Counts no time of the parties of a kind until they are watched again:
    they have waited for a lost party."""
    for party in self.parties[kind].values():
      party.since = None

  def end_overdue(self, party: Party, seconds: float | None = None) -> None:
    """Ends a party that is at a job for longer than jobs take. A party that has
    not done one has to start and to compile.

    Args:
      party: which is at a job.
      seconds: that it has taken; None: since `party.since`, or from now on if
        that is None, too.
    """
    now = self.hosts.clock()
    if party.since is None:
      party.since = now
    if seconds is None:
      seconds = now - party.since
    limit = self.deadlines.dead
    if not party.proven:
      limit = max(limit, self._start_seconds)
    if seconds > limit:
      party.hung, party.since = True, None
      self.end(party)

  # Rest.

  def rest(
    self, at_rest: Callable[[], bool], seconds: float = math.inf
  ) -> bool:
    """Looks again and again whether all parties are at rest, so many seconds
    at most; returns whether they are."""
    end = self.hosts.clock() + seconds
    while not at_rest():
      if self.hosts.clock() > end:
        return False
      self.hosts.sleep(_LOOK)
    return True

  def take_news(self) -> list[str]:
    """Returns the lines for the user since the last time."""
    news, self.news = self.news, []
    return news

  def close(self) -> None:
    """Ends all parties; the files that they wrote stay."""
    self.hosts.close()


def answer_of(call: Call) -> tuple[Any] | None:
  """Returns (answer,) of a call that has ended; None if its party has exited.
  Raises what the method raised."""
  try:
    return (call.result(),)
  except HostExited:
    return None
