"""The threads of a worker that fetches, computes and pushes at the same time.

  loop     fetch 1 | fetch 2    | fetch 3 ...
  compute          | compute 1  | compute 2 ...
  push                          | push 1 ...

They are the three weakly synchronised threads of Dean et al., "Large scale
distributed deep networks", NIPS 2012. Jobs pass the stages in their order. What
is fetched ahead is a ticket of its own (`Rules.depth`), of the version that it
was sent with, so that the staleness which this costs is counted.
"""

import collections
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Stages:
  """Two threads, through which jobs pass one after the other.

  Args:
    compute: called with each job, in the first thread.
    push: called with a job that is computed, in the second; what it returns is
      taken with the job.
    wake: called, in one of the two, when a job can be taken.

  Example:
    >>> import threading
    >>> from asgd.live.overlap import Stages
    >>> taken = threading.Event()
    >>> with Stages(lambda job: None, lambda job: 2 * job, taken.set) as stages:
    ...   stages.begin(21)
    ...   _ = taken.wait(10)
    ...   print(stages.take())
    (21, 42)
  """

  def __init__(
    self,
    compute: Callable[[Any], None],
    push: Callable[[Any], Any],
    wake: Callable[[], None],
  ):
    self._compute, self._push, self._wake = compute, push, wake
    self._threads = [
      ThreadPoolExecutor(1, thread_name_prefix=name)
      for name in ("compute", "push")
    ]
    # (job, what its push returned, what went wrong)
    self._done: collections.deque[tuple[Any, Any, BaseException | None]] = (
      collections.deque()
    )

  def begin(self, job: Any) -> None:
    """Has a job be computed after those before it."""
    self._threads[0].submit(self._first, job)

  @property
  def ready(self) -> bool:
    """Whether a job can be taken."""
    return bool(self._done)

  def take(self) -> tuple[Any, Any]:
    """Returns the next (job, what its push returned); raises what was raised in
    a thread."""
    job, pushed, error = self._done.popleft()
    if error is not None:
      raise error
    return job, pushed

  def _first(self, job):
    try:
      self._compute(job)
    except BaseException as error:  # raised again by `take`
      self._put(job, None, error)
    else:
      self._threads[1].submit(self._second, job)

  def _second(self, job):
    pushed = error = None
    try:
      pushed = self._push(job)
    except BaseException as raised:  # raised again by `take`
      error = raised
    self._put(job, pushed, error)

  def _put(self, *done):
    self._done.append(done)
    self._wake()

  def __enter__(self) -> "Stages":
    return self

  def __exit__(self, *error: object) -> None:
    """Ends the threads after what they are at."""
    for thread in self._threads:
      thread.shutdown(cancel_futures=True)
