"""Asynchronous tasks with dependencies: pushes and pulls that the caller does
not wait for.

A task is started when the tasks that it comes after have finished, which their
answers say. Which these are, beside those that the caller names, is the
consistency of the calls: none (eventual), the one before (sequential), or all
but the last tau (bounded delay).
"""

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from asgd import checks

EVENTUAL, SEQUENTIAL = None, 0  # delays


class Answer(Protocol):
  """What a call has come to, as a `concurrent.futures.Future` says it."""

  def done(self) -> bool:
    """Whether it has ended."""

  def result(self) -> Any:
    """Returns what it answers, once it is there, or raises what it raised."""


def at_once(target: Any) -> Callable[..., Answer]:
  """Returns (method, *args) -> Answer of an object of this process, whose
  methods are called as tasks start."""

  def call(method: str, *args: Any) -> Answer:
    answer: Future[Any] = Future()
    try:
      answer.set_result(getattr(target, method)(*args))
    except Exception as error:
      answer.set_exception(error)
    return answer

  return call


class Tasks:
  """Tasks of one caller, numbered in the order in which they are issued.

  What can be started is started as tasks are issued and waited for; `look` does
  so in between. A task that fails has finished: its error is raised by
  `result`.

  Example:
    >>> import numpy as np
    >>> from asgd import tables
    >>> table = tables.Table(np.zeros((4, 1)))
    >>> tasks = tables.Tasks(tables.tasks.at_once(table), delay=2)
    >>> first = tasks.push([1, 3], np.ones((2, 1)))
    >>> rows = tasks.pull([0, 1], after=[first])
    >>> tasks.result(rows).tolist()
    [[0.0], [1.0]]
  """

  def __init__(
    self, call: Callable[..., Answer], *, delay: int | None = EVENTUAL
  ):
    """Starts without tasks.

    Args:
      call: (method, *args) -> Answer, of a table or what has its methods:
        `call` of a host (`asgd.live.hosts`), or `at_once` of a table.
      delay: tau, 0 or more: a task starts when all but the tau tasks right
        before it have finished. 0 is sequential, None eventual: all may run at
        once.

    Raises:
      ValueError: for a delay below 0.

    Source:
      Li et al., "Scaling distributed machine learning with the parameter
      server", OSDI 2014, sections 3.4 and 3.5.
    """
    self._call = call
    self._delay = delay if delay is None else checks.whole("delay", delay, 0)
    # number -> (method, args, tasks that it comes after), not started
    self._waiting: dict[int, tuple[str, tuple[Any, ...], set[int]]] = {}
    self._running: dict[int, Answer] = {}
    self._ended: dict[int, Answer] = {}  # whose results were not asked for
    self._count = 0

  def __len__(self) -> int:
    """Tasks that were issued."""
    return self._count

  @property
  def unfinished(self) -> list[int]:
    """Tasks that have not finished, as the last look says."""
    return sorted([*self._waiting, *self._running])

  def issue(self, method: str, *args: Any, after: Iterable[int] = ()) -> int:
    """Issues a task, which calls a method; returns its number.

    Raises:
      ValueError: for a task in `after` that was not issued.
    """
    number, after = self._count, set(after)
    strange = [task for task in after if not 0 <= task < number]
    if strange:
      raise ValueError(
        f"task {number} cannot come after {strange[0]}: {number} tasks were"
        " issued, from 0 on"
      )
    self._count += 1
    self._waiting[number] = method, args, after
    self.look()
    return number

  def push(self, keys: Any, values: Any, *, after: Iterable[int] = ()) -> int:
    """Issues `Table.push`."""
    return self.issue("push", keys, values, after=after)

  def pull(self, keys: Any, *, after: Iterable[int] = ()) -> int:
    """Issues `Table.pull`."""
    return self.issue("pull", keys, after=after)

  def look(self) -> None:
    """Takes note of what has finished, and starts what may start."""
    moved = True
    while moved:
      for number in [n for n, each in self._running.items() if each.done()]:
        self._ended[number] = self._running.pop(number)
      may = [n for n in self._waiting if self._may_start(n)]
      for number in may:
        method, args, _ = self._waiting.pop(number)
        self._running[number] = self._call(method, *args)
      moved = bool(may)

  def _may_start(self, number):
    *_, after = self._waiting[number]
    first = None if self._delay is None else number - self._delay
    return not any(
      task in after or (first is not None and task < first)
      for task in (*self._waiting, *self._running)
    )

  def result(self, number: int) -> Any:
    """Returns what a task answers, once it has finished; it is asked for once.

    Raises:
      ValueError: for a task that was not issued, or was asked for before.
      Exception: what the call raised.
    """
    while number in self._waiting or number in self._running:
      self._wait(number)
    if number not in self._ended:
      raise ValueError(
        f"task {number} was not issued, or its result was asked for before"
      )
    return self._ended.pop(number).result()

  def _wait(self, number):
    """Waits until a task has finished that this one needs, or it itself."""
    self.look()
    if number in self._running:
      task = number
    elif self._running:
      task = min(self._running)
    else:
      return
    with contextlib.suppress(Exception):  # which its own `result` raises
      self._running[task].result()
    self._ended[task] = self._running.pop(task)
    self.look()

  def finish(self) -> None:
    """Waits for all tasks; results may be asked for then."""
    while left := self.unfinished:
      self._wait(left[0])
