"""One supervisor for the parties of a run: shards, workers, peers.

It starts each party in a host, calls all parties at once, ends parties that are
silent or hang, counts exits, and raises an error if parties exit over and over
while no message is received. A protocol's cluster has a supervisor, and decides
the rest: which parties to replace, which to admit, and when all are at rest.

The supervisor reads the time only from its hosts. So a simulated world can give
it the same times and faults as the parties.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from asgd.live.deadlines import DEAD_FACTOR, Deadlines, Ladder
from asgd.live.failures import NotFinite, ShardsDie, WorkersDie
from asgd.live.hosts import Call, Host, HostExited, Hosts, Make
from asgd.live.hosts.base import LOCAL

_CALL_CHECK_SECONDS = 0.5  # between two checks of open calls
_SHOW_AFTER = 2.0  # seconds of waiting after which a line names the party
# The next two limits are per party: n parties of a kind may have n times as
# many, even if one party has all of them.
MOST_REFUSALS = 3  # refused messages in a row before a run ends
MOST_EXITS = 5  # exits between two received messages before a run ends
_PATIENCE = 60.0  # default seconds after which a silent party is ended
_REASON_SECONDS = 5.0  # to wait until a failed party reports the reason
_POLL_SECONDS = 0.5  # to wait for the answers to a poll


class Party:
  """One start of a shard, a worker or a peer, as the driver sees it."""

  def __init__(self, kind: str, index: int, host: Host, make_call: Call):
    self.kind, self.index, self.host = kind, index, host
    self.make_call = make_call  # creates the party's object
    self.run: Call | None = None  # the party's long call, while it is open
    self.has_done_job = False  # so the party has compiled
    self.hung = False  # the supervisor ended the party: it took too long
    self.jobs_done = 0  # count of the party's jobs at the last `watch`
    # Time of the first `watch` with that count; None: the party was idle.
    self.job_start: float | None = None
    self.poll: Call | None = None  # the open call of `Supervisor.poll`
    self.polled_at = 0.0  # time of that call

  @property
  def is_ready(self) -> bool:
    """Whether the party's object exists, and the party has not exited. Raises
    the error of `make_call`."""
    return self.make_call.done() and answer_of(self.make_call) is not None


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
    """Stores the settings; `start` starts a party.

    Args:
      hosts: the hosts in which the parties run.
      counts: kind -> how many indices it has.
      ladder: settings of the deadlines of jobs.
      patience: seconds, at least 0, after which a party that does not answer
        is ended.
    """
    self.hosts, self._counts = hosts, dict(counts)
    self.deadlines, self._start_seconds = Deadlines(ladder), ladder.start
    self._patience = patience
    # Seconds after which a party that has no object yet is ended.
    self._start_limit = max(DEAD_FACTOR * ladder.start, patience)
    self.parties: dict[str, dict[int, Party]] = {kind: {} for kind in counts}
    self.replaced = dict.fromkeys(counts, 0)  # kind -> count of replacements
    # (kind, index) of every party that was ever started
    self._started: set[tuple[str, int]] = set()
    self._received = 0  # count of messages at the last `count_received`
    self._refused = 0  # count of refused messages since then
    self._exits = dict.fromkeys(counts, 0)  # kind -> count of exits since then
    self.news: list[str] = []  # lines for the user

  # Starting and ending.

  def start(self, kind: str, index: int, make: Make) -> Party:
    """Starts a party, without waiting for its object. The party replaces an
    earlier one of its kind and index."""
    self.replaced[kind] += (kind, index) in self._started
    self._started.add((kind, index))
    host = self.hosts.start(kind, index, make)
    party = Party(kind, index, host, self.hosts.make_call(kind, index))
    self.parties[kind][index] = party
    return party

  def await_made(self, parties: Sequence[Party]) -> list[Party]:
    """Waits until parties have their objects, and ends the parties that take
    too long. Returns the parties that exited. Raises the error of a
    `make_call`."""
    calls = {(party.kind, party.index): party.make_call for party in parties}
    self._end_unanswered(calls, self._start_limit)
    return [party for party in parties if answer_of(party.make_call) is None]

  def end(self, party: Party) -> None:
    """Ends a party, even in a call; `exited_parties` then returns it."""
    self.hosts.kill(party.kind, party.index)

  def drop(self, party: Party) -> None:
    """Forgets a party that has exited or has lost its connection, and ends its
    host."""
    if self.parties[party.kind].get(party.index) is party:
      del self.parties[party.kind][party.index]
    # A party that only lost its connection would write beside its successor.
    self.hosts.kill(party.kind, party.index)

  def exited_parties(self, kind: str) -> list[Party]:
    """Returns the parties of a kind that have exited and were not dropped."""
    parties, exits = self.parties[kind], self.hosts.exited()
    return [parties[i] for k, i in exits if k == kind and i in parties]

  def take_ended(self, kind: str) -> Iterator[tuple[Party, str]]:
    """Drops the parties of a kind that have exited or have ended their `run`.

    Yields (party, "died", "hung" or the result of its `run`). Raises the error
    of a party if its object could not be created, or its `run` failed.
    """
    ended_parties = {party.index: party for party in self.exited_parties(kind)}
    for index, party in self.parties[kind].items():
      if party.run is not None and party.run.done():
        ended_parties[index] = party
    for _, party in sorted(ended_parties.items()):
      answer_of(party.make_call)  # raises the error of `make_call`
      result = None
      if party.run is not None and party.run.done():
        result = answer_of(party.run)
      self.drop(party)
      # A party without a result exited, or was ended by the supervisor.
      yield party, "hung" if party.hung else result[0] if result else "died"

  # Asking.

  def ask(
    self, kind: str, method: str, *args: Any, among: Iterable[int] | None = None
  ) -> dict[int, Any]:
    """Calls a method of several parties of a kind, all at once. A party that
    does not answer is ended: it may have missed the call.

    Args:
      kind: the kind of the parties.
      method: the method of their objects.
      *args: arguments of the method.
      among: indices of the parties; None: all of the kind.

    Returns:
      index -> answer, without the parties that have exited, are silent for too
      long, or have lost their connection.
    """
    parties = self.parties[kind]
    indices = parties if among is None else [i for i in among if i in parties]
    # [1] Call all, and wait for the answers.
    calls = {(kind, i): parties[i].host.call(method, *args) for i in indices}
    limit = self._patience
    if kind not in LOCAL:  # the party may be computing a job
      limit = max(limit, self.deadlines.dead_after)
    # A party answers only when it has its object. Its imports, programs and
    # files may take longer than an answer.
    if not all(parties[index].make_call.done() for index in indices):
      limit = max(limit, self._start_limit)
    silent_keys = self._end_unanswered(calls, limit)
    answers = {index: answer_of(call) for (_, index), call in calls.items()}
    failed_parties = [parties[i] for i, answer in answers.items() if not answer]
    # [2] If a party has failed, the error of its `run` has the reason. Wait for
    # that error before ending the party.
    runs = {(kind, p.index): p.run for p in failed_parties if p.run}
    for key in silent_keys:
      runs.pop(key, None)
    self.wait_for_calls(runs, min(_REASON_SECONDS, self._patience))
    # [3] End the parties without an answer.
    for party in failed_parties:
      self.end(party)
    return {index: answer[0] for index, answer in answers.items() if answer}

  def poll(
    self, kind: str, method: str, *args: Any, among: Iterable[int]
  ) -> dict[int, Any]:
    """Calls a method of several parties of a kind, and waits half a second.

    A party that has not answered by then is left out, so that the caller need
    not wait for it; the next poll looks for the same answer. A party that is
    silent for longer than `patience` is ended. Returns index -> answer of the
    other parties."""
    now, answers = self.hosts.clock(), {}
    calls: dict[tuple[str, int], Call] = {}
    for index in among:
      party = self.parties[kind][index]
      if party.poll is None:
        party.poll, party.polled_at = party.host.call(method, *args), now
      calls[kind, index] = party.poll
    silent_keys = self.wait_for_calls(calls, _POLL_SECONDS)
    for key, call in calls.items():
      party, answer = self.parties[kind][key[1]], None
      if key in silent_keys:
        if self.hosts.clock() - party.polled_at <= self._patience:
          continue  # the next poll looks for this answer
      else:
        answer, party.poll = answer_of(call), None
      if answer is None:  # it has exited, or was silent for too long
        self.end(party)
      else:
        answers[party.index] = answer[0]
    return answers

  def ask_until_answered(
    self,
    kind: str,
    method: str,
    *args: Any,
    among: Iterable[int] | None = None,
    restart: Callable[[int], None],
  ) -> list[Any]:
    """Calls a method of several parties of a kind, all at once. A party that
    does not answer is replaced, and its successor is called. The wait does not
    count as time of the jobs of other kinds: they may wait for the same party.

    Args:
      kind: the kind of the parties.
      method: the method of their objects; it may be called twice.
      *args: arguments of the method.
      among: indices of the parties; None: all of the kind.
      restart: starts the party of an index again, or raises an error.

    Returns:
      The answers, in the order of the indices.
    """
    indices = list(self.parties[kind] if among is None else among)
    answers: dict[int, Any] = {}
    start = self.hosts.clock()
    # `restart` ends the loop by an error if parties exit over and over.
    while missing := [index for index in indices if index not in answers]:
      answers.update(self.ask(kind, method, *args, among=missing))
      for index in missing:
        if index not in answers:
          restart(index)
    waited_seconds = self.hosts.clock() - start
    for other_kind in self.parties.keys() - {kind}:
      for party in self.parties[other_kind].values():
        if party.job_start is not None:
          party.job_start += waited_seconds
    return [answers[index] for index in indices]

  def wait_for_calls(
    self,
    calls: Mapping[tuple[str, int], Call],
    limit: float,
    *,
    show: Callable[[str], None] = lambda text: None,
  ) -> list[tuple[str, int]]:
    """Waits for calls, all at once, so that one limit holds for all of them.

    Args:
      calls: (kind, index) of a party -> a call of the party.
      limit: seconds to wait, at most.
      show: called after 2 seconds, with a line that names the silent parties.

    Returns:
      The keys of the calls that have not ended by then.
    """
    clock = self.hosts.clock
    start, is_shown, open_calls = clock(), False, dict(calls)
    while open_calls:
      calls_left = list(open_calls.values())
      ended_calls = self.hosts.wait(calls_left, _CALL_CHECK_SECONDS)
      open_calls = {
        key: call for key, call in open_calls.items() if call not in ended_calls
      }
      elapsed = clock() - start
      if open_calls and elapsed > _SHOW_AFTER and not is_shown:
        is_shown = True
        names = ", ".join(f"{kind} {index}" for kind, index in open_calls)
        show(f"waiting {elapsed:.0f} s for an answer of {names}")
      if elapsed > limit:
        break
    return list(open_calls)

  def _end_unanswered(
    self, calls: Mapping[tuple[str, int], Call], limit: float
  ) -> list[tuple[str, int]]:
    """Waits for calls, and ends the silent parties; returns their keys."""
    silent_keys = self.wait_for_calls(calls, limit, show=self.hosts.show)
    for kind, index in silent_keys:
      self.hosts.kill(kind, index)
    return silent_keys

  # Exits.

  def count_received(self, received: int) -> None:
    """Stores the number of messages received so far. If it has grown, resets
    the counts of exits and refused messages to 0."""
    if received > self._received:
      self._received, self._refused = received, 0
      self._exits = dict.fromkeys(self._exits, 0)

  def count_exit(self, kind: str, index: int, how: str) -> None:
    """Counts a party that has exited. Raises WorkersDie or ShardsDie if parties
    exit over and over."""
    self._exits[kind] += 1
    exits = self._exits[kind]
    if exits <= MOST_EXITS * self._counts[kind]:
      return
    if kind in LOCAL:
      raise ShardsDie(
        f"{kind}s ended {exits} times before a message was received, the last"
        f" was {kind} {index}: check whether the machine has run out of memory"
      )
    raise WorkersDie(
      f"{exits} {kind}s ended, one after the other, before a message was"
      f" received (the last: {kind} {index} {how}): check the data, the loss,"
      " and whether the machine has run out of memory"
    )

  def count_refusal(self, kind: str, index: int) -> None:
    """Counts a message that was not finite. Raises NotFinite for too many of
    them in a row."""
    self._refused += 1
    if self._refused > MOST_REFUSALS * self._counts[kind]:
      raise NotFinite(
        f"{self._refused} messages in a row were not finite, the last of"
        f" {kind} {index}"
      )

  # Jobs that take too long.

  def add_job(self, party: Party, seconds: float) -> None:
    """Adds the seconds of a party's finished job, for the deadlines."""
    self.deadlines.add_job(seconds)
    party.has_done_job = True

  def watch(
    self, party: Party, jobs_done: int | None, *, busy: float | None = None
  ) -> None:
    """Measures the jobs of a party, and ends it if a job takes too long.

    Args:
      party: the party.
      jobs_done: number of jobs or clocks that the party has done; None: it is
        idle.
      busy: seconds since the start of the party's job, as the party reports
        them; None: the supervisor measures them.
    """
    now = self.hosts.clock()
    if jobs_done is None:
      party.job_start = None
      return
    if party.job_start is None:
      party.jobs_done, party.job_start = jobs_done, now
    elif jobs_done > party.jobs_done:
      self.add_job(party, now - party.job_start)
      party.jobs_done, party.job_start = jobs_done, now
    self.end_overdue(party, busy)

  def stop_job_times(self, kind: str) -> None:
    """Stops measuring the jobs of the parties of a kind until `watch` is called
    again, because these parties have waited for a lost party."""
    for party in self.parties[kind].values():
      party.job_start = None

  def end_overdue(self, party: Party, seconds: float | None = None) -> None:
    """Ends a party if its job takes too long. The first job of a party may take
    `ladder.start` seconds, in which it starts and compiles.

    Args:
      party: a party at a job.
      seconds: since the start of the job; None: since `party.job_start`, or 0
        if that is None, too.
    """
    now = self.hosts.clock()
    if party.job_start is None:
      party.job_start = now
    if seconds is None:
      seconds = now - party.job_start
    limit = self.deadlines.dead_after
    if not party.has_done_job:
      limit = max(limit, self._start_seconds)
    if seconds > limit:
      party.hung, party.job_start = True, None
      self.end(party)

  def take_news(self) -> list[str]:
    """Returns the lines for the user since the last call."""
    news, self.news = self.news, []
    return news

  def close(self) -> None:
    """Ends all parties; the files that they wrote stay."""
    self.hosts.close()


def answer_of(call: Call) -> tuple[Any] | None:
  """Returns (answer,) of a call that has ended; None if its party has exited.
  Raises the error of the method."""
  try:
    return (call.result(),)
  except HostExited:
    return None
