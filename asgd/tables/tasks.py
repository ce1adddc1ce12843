"""Asynchronous tasks with dependencies: pushes and pulls that the caller does
not wait for.

A task starts once all tasks that it depends on have finished. It depends on the
tasks that the caller names, and on earlier tasks according to the delay: on
none (eventual), on all (sequential), or on all but the last tau (bounded).
"""

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from asgd import checks

EVENTUAL, SEQUENTIAL = None, 0  # values of `delay`


class Answer(Protocol):
  """The pending result of a call, such as a `concurrent.futures.Future`."""

  def done(self) -> bool:
    """Whether the call has finished."""

  def result(self) -> Any:
    """Waits for the call; returns its result, or raises its exception."""


def at_once(target: Any) -> Callable[..., Answer]:
  """Returns a function (method, *args) -> Answer that calls a method of
  `target` in this process at once."""

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

  A task starts when another is issued or waited for, or by `look`. A task that
  fails counts as finished: `result` raises its error.

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
      call: (method, *args) -> Answer, of a table or an object with its methods:
        `call` of a host (`asgd.live.hosts`), or `at_once` of a table.
      delay: tau, 0 or more: a task starts when all tasks but the tau right
        before it have finished. 0 is sequential; None is eventual: all may run
        at once.

    Raises:
      ValueError: for a delay below 0.

    Source:
      Li et al., "Scaling distributed machine learning with the parameter
      server", OSDI 2014, sections 3.4 and 3.5.
    """
    self._call = call
    self._delay = delay if delay is None else checks.integer("delay", delay, 0)
    # Not started: task -> (method, args, tasks that must finish before it).
    self._waiting: dict[int, tuple[str, tuple[Any, ...], set[int]]] = {}
    self._running: dict[int, Answer] = {}
    self._ended: dict[int, Answer] = {}  # until `result` is called
    self._count = 0

  def __len__(self) -> int:
    """Count of issued tasks."""
    return self._count

  @property
  def unfinished(self) -> list[int]:
    """Tasks that had not finished at the last `look`."""
    return sorted([*self._waiting, *self._running])

  def issue(self, method: str, *args: Any, after: Iterable[int] = ()) -> int:
    """Issues a task that calls a method; returns its number.

    Args:
      method: name of the method.
      *args: of the call.
      after: tasks that must finish first.

    Raises:
      ValueError: for a task in `after` that was not issued.
    """
    number, after = self._count, set(after)
    unknown = [task for task in after if not 0 <= task < number]
    if unknown:
      raise ValueError(
        f"task {number} cannot come after {unknown[0]}: {number} tasks were"
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
    """Records which tasks have finished, and starts those that may start."""
    has_started = True
    while has_started:  # a started task may have finished at once (`at_once`)
      for number in [
        task for task, answer in self._running.items() if answer.done()
      ]:
        self._ended[number] = self._running.pop(number)
      ready = [task for task in self._waiting if self._may_start(task)]
      for number in ready:
        method, args, _ = self._waiting.pop(number)
        self._running[number] = self._call(method, *args)
      has_started = bool(ready)

  def _may_start(self, number: int) -> bool:
    """Whether all tasks that a waiting task depends on have finished."""
    *_, after = self._waiting[number]
    # With delay tau, all tasks before number - tau must have finished.
    first_allowed = None if self._delay is None else number - self._delay
    return not any(
      task in after or (first_allowed is not None and task < first_allowed)
      for task in (*self._waiting, *self._running)
    )

  def result(self, number: int) -> Any:
    """Waits for a task and returns its result; may be called once for a task.

    Raises:
      ValueError: for a task that was not issued, or if its result was returned
        before.
      Exception: the exception of the task.
    """
    while number in self._waiting or number in self._running:
      self._wait(number)
    if number not in self._ended:
      raise ValueError(
        f"task {number} was not issued, or its result was returned before"
      )
    return self._ended.pop(number).result()

  def _wait(self, number: int) -> None:
    """Waits until the task, or a task that it may depend on, has finished."""
    self.look()
    # A task that has not started may depend on any running task.
    if number in self._running:
      task = number
    elif self._running:
      task = min(self._running)
    else:
      return
    with contextlib.suppress(Exception):  # `result` of that task raises it
      self._running[task].result()
    self._ended[task] = self._running.pop(task)
    self.look()

  def finish(self) -> None:
    """Waits for all tasks; their results can be read afterwards."""
    while tasks := self.unfinished:
      self._wait(tasks[0])
