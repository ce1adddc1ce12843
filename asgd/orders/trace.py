"""The trace: an order as a table, its file format and the meaning of its rows.

  time    worker  seq  job  action
  0       0       0    0    send       two tickets of version 0
  0       1       0    1    send
  1       0       0    0    receive    staleness 0 -> version 1
  1       0       1    2    send
  1.5     1       0    1    receive    staleness 1 -> version 2
  1.5     1       1    3    send
  2       0       1    2    receive    staleness 1 -> version 3

A job is a piece of data; `seq` counts the jobs of a worker index, so (worker,
seq) names a message. An `Event` is a row, a `base.Trace` the columns. A file is
CSV with one line for each row. The journal of a live shard is such a file with
more columns; the last column is a checksum of the others. `Ledger` defines what
the actions mean: every engine, check and figure that follows a trace asks a
Ledger which tickets are open.
"""

import collections
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from asgd import base

T = TypeVar("T")
STARTS = base.SEND, base.KEEP
ENDS = base.RECEIVE, base.LOST, base.REJECT, base.DROP, base.STOP
PUTS = base.PUT, base.LEND  # rows of a peer that makes a message
TAKES = base.TAKE, base.ADOPT  # rows of a peer that takes a message
NO_SEQ = -1  # seq of rows without a message
LATEST = 1e15  # the largest time in a file

COLUMNS = ("time", "worker", "seq", "job", "action")
JOURNAL_COLUMNS = (
  *(*COLUMNS, "version", "params", "message", "loss", "totals", "crc32"),
)
DTYPES = (np.float64, np.int32, np.int32, np.int32, np.int8)
HEADER = ",".join(COLUMNS)
JOURNAL_HEADER = ",".join(JOURNAL_COLUMNS)
_ACTION_NAMES = ", ".join(base.ACTIONS)
BEGUN = "the worker has begun that number (seq) before"
_INT32 = np.iinfo(np.int32)
_MIN_INT, _MAX_INT = int(_INT32.min), int(_INT32.max)


class Event(NamedTuple):
  """A row of a trace; the fields after `action` are in journals only."""

  time: float  # seconds, or the unit of the durations
  worker: int
  seq: int  # index of the job among those of the worker index, or NO_SEQ
  # The piece of data. JOIN, LEAVE: the incarnation. ROLLBACK: the first row
  # that is undone. Rows between peers: the round or the other peer (base.PUT).
  job: int
  action: int  # one of base.ACTIONS
  version: int = -1  # SEND: version of the ticket
  params: int = -1  # SEND: slot of the parameters
  message: int = -1  # slot of the message; TAKE, ADOPT: its bytes
  loss: float = 0.0  # RECEIVE: loss on the message's batch
  totals: tuple[float, ...] = ()  # RECEIVE: sums over all shards, or ()

  @property
  def key(self) -> tuple[int, int]:
    """(worker, seq), which names the message."""
    return self.worker, self.seq

  def format(self, *, journal: bool = False) -> str:
    """Returns the row as a line of a trace or of a journal, without newline."""
    has_name = 0 <= self.action < len(base.ACTIONS)
    name = base.ACTIONS[self.action] if has_name else int(self.action)
    line = f"{float(self.time)!r},{self.worker},{self.seq},{self.job},{name}"
    if not journal:
      return line
    slots = f"{self.version},{self.params},{self.message}"
    totals = ";".join(map(repr, self.totals))
    line = f"{line},{slots},{float(self.loss)!r},{totals}"
    return f"{line},{checksum(line)}"

  @classmethod
  def parse(cls, line: str) -> "Event":
    """Returns the Event of a line of a trace or journal; raises ValueError."""
    line = line.strip()
    cells = line.split(",")
    if len(cells) not in (len(COLUMNS), len(JOURNAL_COLUMNS)):
      raise ValueError(
        f"it has {len(cells)} values, where a trace has {len(COLUMNS)} and a"
        f" journal {len(JOURNAL_COLUMNS)}"
      )
    if len(cells) == len(JOURNAL_COLUMNS):
      crc32 = checksum(line.rpartition(",")[0])
      if cells.pop() != crc32:
        raise ValueError(f"it was changed: its crc32 is {crc32}")
    row: list[Any] = [
      reader(name, cell)
      for (name, reader), cell in zip(_READERS, cells, strict=False)
    ]
    return cls(*row)


def checksum(line: str) -> str:
  """Returns the crc32 of a line as 8 hexadecimal digits."""
  return f"{zlib.crc32(line.encode()):08x}"


def _integer(name: str, value: str) -> int:
  """Returns the integer of a cell of the column `name`, an int32."""
  try:
    number = int(value)
  except ValueError:
    raise ValueError(f"{name} {value!r} is no whole number") from None
  if not _MIN_INT <= number <= _MAX_INT:
    raise ValueError(f"{name} {value} does not fit into 32 bits")
  return number


def _real(name: str, value: str) -> float:
  try:
    return float(value)
  except ValueError:
    raise ValueError(f"{name} {value!r} is no number") from None


def _reals(name: str, value: str) -> tuple[float, ...]:
  return tuple(_real(name, x) for x in value.split(";")) if value else ()


def _action(name: str, value: str) -> int:
  if value not in base.ACTIONS:
    raise ValueError(f"{name} {value!r} is none of {_ACTION_NAMES}")
  return base.ACTIONS.index(value)


_READER_OF: dict[str, Callable[[str, str], Any]] = {
  "time": _real,
  "action": _action,
  "loss": _real,
  "totals": _reals,
}
_READERS = [(name, _READER_OF.get(name, _integer)) for name in JOURNAL_COLUMNS]


def from_events(events: Iterable[Event]) -> base.Trace:
  """Returns E rows as columns, without the fields of journals."""
  columns = list(zip(*(event[: len(COLUMNS)] for event in events), strict=True))
  return base.Trace(*map(np.array, columns or [()] * len(COLUMNS), DTYPES))


def events(
  trace: base.Trace, start: int = 0, end: int | None = None
) -> Iterator[Event]:
  """Yields the rows [start, end) of a trace."""
  columns = (column[start:end].tolist() for column in trace)
  return (Event(*row) for row in zip(*columns, strict=True))


def dump(trace: base.Trace) -> str:
  """Returns the trace as CSV, one line for each row; times keep all their bits.

  Example:
    >>> from asgd import orders
    >>> trace = orders.fixed_delay(delay=0, messages=1)
    >>> print(orders.dump(trace), end="")
    time,worker,seq,job,action
    0.0,0,0,0,send
    1.0,0,0,0,receive
  """
  return "\n".join([HEADER, *(event.format() for event in events(trace)), ""])


def read(lines: Iterable[str]) -> list[Event]:
  """Reads the rows of a trace or of a journal.

  Args:
    lines: a file opened with newline="\\n", or the lines of a text with their
      ends. A last line without its newline was cut off while it was written,
      and is dropped.

  Raises:
    ValueError: for a line that cannot be read, naming it.
  """
  rows: list[Event] = []
  for number, line in enumerate(lines, 1):
    if not line.endswith("\n"):
      if _is_row(line[:-1]):
        end = f"{line[-1]!r}, not in a newline"
        raise ValueError(f"line {number} ends in {end}")
      break
    if number == 1:
      if line.endswith("\r\n"):
        raise ValueError(
          "line 1 ends in CRLF, as on Windows; the lines of a trace end in LF"
        )
      if line.rstrip("\n") not in (HEADER, JOURNAL_HEADER):
        raise ValueError(f"line 1 is {line.strip()!r}; a trace has {HEADER!r}")
      continue
    try:
      rows.append(Event.parse(line))
    except ValueError as error:
      description = f"line {number} is no event: {line!r}"
      raise ValueError(f"{description}: {error}") from None
  return rows


def _is_row(text: str) -> bool:
  """Whether a text is a complete row of a journal with a correct checksum."""
  cells = text.split(",")
  row_text = text.rpartition(",")[0]
  return len(cells) == len(JOURNAL_COLUMNS) and cells[-1] == checksum(row_text)


def load(lines: Iterable[str]) -> base.Trace:
  """Reads a trace like `read`, as columns; ValueError if it has no row.

  Example:
    >>> from asgd import orders
    >>> trace = orders.fixed_delay(delay=1, messages=3)
    >>> again = orders.load(orders.dump(trace).splitlines(keepends=True))
    >>> again.time.tolist() == trace.time.tolist()
    True
  """
  rows = read(lines)
  if not rows:
    raise ValueError("the trace holds no event")
  return from_events(rows)


class TraceError(ValueError):
  """A row cannot be replayed."""

  def __init__(
    self, row: int, event: Event, why: str, path: object = None
  ):
    location = f"{path}, line {row + 2}" if path else f"trace row {row}"
    super().__init__(f"{location} ({event.format()}): {why}")
    self.row, self.why = row, why


class Ledger(Generic[T]):
  """Follows a trace row by row and keeps the open tickets.

  The caller chooses the type of tickets: the parameters in a simulator, the
  SEND row in an analysis. The ledger stores a ticket until the row that ends
  its job. It accepts every row that can be replayed; `orders.check` finds the
  rows that protocols forbid.

  Args:
    start: (SEND or KEEP row, the kept ticket) -> the ticket of the job. It is
      called before the ticket is open. None: the row is the ticket.
    keeps: whether to keep the latest ticket of each worker for a KEEP row.
    path: file of the rows, for errors.
  """

  def __init__(
    self,
    start: Callable[[Event, T | None], T] | None = None,
    *,
    keeps: bool = True,
    path: object = None,
  ):
    self._start: Callable[[Event, Any], Any] = start or (lambda row, _: row)
    self._keeps, self._path = keeps, path
    self.rows = 0
    self.time = -math.inf  # time of the last row
    # worker -> seq -> ticket, in the order in which they were started
    self.open: dict[int, dict[int, T]] = collections.defaultdict(dict)
    self.latest: dict[int, T] = {}  # worker -> the ticket of its latest job
    self.next_seq: dict[int, int] = {}  # worker -> jobs that it has started
    self.incarnations: dict[int, int] = {}  # worker -> its latest incarnation
    self.present: set[int] = set()  # workers that joined, or were sent a ticket
    self.ended: set[int] = set()  # workers that lost a ticket or left
    # RECEIVE rows, without those that a rollback undid
    self.received: list[int] = []
    self._undone_counts: list[int] = []  # messages that each rollback undid
    self.puts: dict[int, int] = {}  # peer -> messages that it put or lent
    # (receiver, sender) -> seq of the last message that was taken
    self.taken: dict[tuple[int, int], int] = {}

  def apply(self, event: Event) -> T | None:
    """Applies the next row; returns the ticket that it opens or closes, if any.
    Raises TraceError if the row cannot follow the rows before it."""
    _, worker, seq, job, action, *_ = event
    ticket: T | None = None
    if action in STARTS:
      ticket = self._open(event)
    elif action in ENDS:
      ticket = self.open[worker].pop(seq, None)
      if ticket is None:
        self.refuse(event, "that job was not sent to the worker")
      if action == base.RECEIVE:
        self.received.append(self.rows)
      elif action not in (base.DROP, base.STOP):
        self.ended.add(worker)
    elif action == base.JOIN:
      self.incarnations[worker] = job
      self.present.add(worker)
      self.ended.discard(worker)
      self.latest.pop(worker, None)
    elif action == base.LEAVE:
      self.present.discard(worker)
      self.ended.add(worker)
      self.latest.pop(worker, None)
    elif action == base.ROLLBACK:
      if job > self.rows:
        self.refuse(event, "that row is later than this one")
      # Messages at or after row `job` are no longer in the state.
      received_count = len(self.received)
      self.received = [row for row in self.received if row < job]
      self._undone_counts.append(received_count - len(self.received))
    elif action in PUTS:
      if seq != self.puts.get(worker, 0):
        self.refuse(event, f"its next message is {self.puts.get(worker, 0)}")
      self.puts[worker] = seq + 1
    elif action in TAKES:
      if not 0 <= seq < self.puts.get(job, 0):
        self.refuse(event, f"peer {job} has put no message {seq} yet")
      self.taken[worker, job] = seq
    elif action == base.MIX:
      pass
    elif action == base.MOVE:
      self.refuse(event, "it is a row of a shard of tables")
    else:
      self.refuse(event, f"action must be one of {_ACTION_NAMES}")
    self.time = event.time
    self.rows += 1
    return ticket

  def _open(self, event: Event) -> T:
    """Opens the ticket of a SEND or KEEP row, and returns it."""
    worker, kept_ticket = event.worker, None
    if event.seq in self.open[worker]:
      self.refuse(event, BEGUN)
    if event.action == base.KEEP:
      kept_ticket = self.latest.get(worker)
      if kept_ticket is None:
        self.refuse(event, "the worker was sent no ticket to keep")
    self.present.add(worker)
    ticket: T = self._start(event, kept_ticket)
    if self._keeps:
      self.latest[worker] = ticket
    self.open[worker][event.seq] = ticket
    self.next_seq[worker] = max(event.seq + 1, self.next_seq.get(worker, 0))
    return ticket

  @property
  def rollbacks(self) -> int:
    """The number of ROLLBACK rows."""
    return len(self._undone_counts)

  @property
  def undone(self) -> int:
    """The number of messages that rollbacks undid."""
    return sum(self._undone_counts)

  def refuse(self, event: Event, why: str) -> NoReturn:
    """Raises TraceError for the next row."""
    raise TraceError(self.rows, event, why, self._path)


def follow(
  rows: Iterable[Event], ledger: Ledger[Any] | None = None
) -> Ledger[Any]:
  """Returns `ledger`, or a new one, after applying `rows`."""
  ledger = ledger or Ledger()
  for event in rows:
    ledger.apply(event)
  return ledger


class TicketRows(NamedTuple):
  """Rows of the S tickets and the U messages of a trace, by worker."""

  starts: npt.NDArray[np.intp]  # S, rows of SEND and KEEP, by worker and time
  ends: npt.NDArray[np.intp]  # U, rows of RECEIVE, by worker and time
  started: npt.NDArray[np.intp]  # U, index into `starts` of each end's ticket


def pair(trace: base.Trace) -> TicketRows | None:
  """Finds the ticket of each message of a trace, without a loop over rows.

  Returns:
    TicketRows. None for a trace that has to be read row by row: a trace with
    other rows than SEND, KEEP and RECEIVE, or a trace in which the jobs of a
    worker begin with a KEEP, do not have rising `seq` or do not end in order.
  """
  _, worker, seq, job, action = trace
  is_end = action == base.RECEIVE
  if not (is_end | (action == base.SEND) | (action == base.KEEP)).all():
    return None
  starts, ends = np.flatnonzero(~is_end), np.flatnonzero(is_end)
  starts = starts[np.argsort(worker[starts], kind="stable")]
  ends = ends[np.argsort(worker[ends], kind="stable")]
  # Rows are sorted by worker now. If a worker's jobs end in their order, its
  # n-th RECEIVE ends its n-th start.
  start_worker, end_worker = worker[starts], worker[ends]
  same_worker = start_worker[1:] == start_worker[:-1]
  if not (~same_worker | (np.diff(seq[starts]) > 0)).all():
    return None
  first_starts = (
    starts[~np.append(False, same_worker)] if len(starts) else starts
  )
  if (action[first_starts] == base.KEEP).any():
    return None
  message_index = np.arange(len(ends)) - np.searchsorted(end_worker, end_worker)
  started = np.searchsorted(start_worker, end_worker) + message_index
  if len(ends) and started.max() >= len(starts):
    return None
  # The n-th start may be of another job: compare the rows of each pair.
  rows = starts[started]
  is_equal = [column[rows] == column[ends] for column in (worker, seq, job)]
  if not np.all([*is_equal, rows < ends]):
    return None
  return TicketRows(starts, ends, started)


def staleness(
  trace: base.Trace, every: int = 1
) -> npt.NDArray[np.int32]:
  """Counts the staleness of each received message, without a model.

    staleness = floor(received now / every) - floor(received at send / every)

  A worker that computes a job on a kept ticket has applied its own updates to
  its copy, if each message is an update. These updates are not counted.

  Args:
    trace: a trace without rollbacks, in which all messages are accepted.
    every: messages that are averaged into one parameter change.

  Returns:
    int32[U], in updates.

  Example:
    >>> from asgd import orders
    >>> trace = orders.fixed_delay(delay=2, messages=6)
    >>> orders.staleness(trace).tolist()
    [0, 1, 2, 2, 2, 2]
    >>> orders.staleness(trace, every=3).tolist()
    [0, 0, 0, 1, 1, 0]
  """
  pairs = pair(trace)
  if pairs is None:
    return _staleness_by_rows(trace, every)
  starts, ends, started = pairs
  received = np.cumsum(trace.action == base.RECEIVE)  # messages up to each row
  start_number = np.arange(len(starts))
  is_kept = trace.action[starts] == base.KEEP
  # The SEND of each start: the last start that is not a KEEP.
  send_of_start = np.maximum.accumulate(np.where(is_kept, 0, start_number))
  versions = received[starts[send_of_start]] // every + (
    start_number - send_of_start
  ) * (every == 1)
  # `ends` are sorted by worker; the result is in the order of receipt.
  message_number = received[ends] - 1
  counts = np.empty(len(ends), np.int32)
  counts[message_number] = message_number // every - versions[started]
  return counts


def _staleness_by_rows(
  trace: base.Trace, every: int
) -> npt.NDArray[np.int32]:
  """Counts the staleness of each message, row by row."""

  def version(event: Event, kept_version: int | None) -> int:
    del event
    if kept_version is None:
      return len(ledger.received) // every
    return kept_version + (every == 1)

  ledger: Ledger[int] = Ledger(version)
  counts = []
  for event in events(trace):
    version_now = len(ledger.received) // every
    ticket_version: Any = ledger.apply(event)
    if event.action == base.RECEIVE:
      counts.append(version_now - ticket_version)
  return np.array(counts, np.int32)
