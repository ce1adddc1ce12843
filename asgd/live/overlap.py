"""The threads of a worker that fetches, computes and pushes at the same time.

  loop     fetch 1 | fetch 2    | fetch 3 ...
  compute          | compute 1  | compute 2 ...
  push                          | push 1 ...

These are the three weakly synchronised threads of Dean et al., "Large scale
distributed deep networks", NIPS 2012. Each stage processes jobs in the order in
which they began. With `Rules.depth` above 1, a worker fetches parameters before
its earlier jobs end, so a job's staleness counts the updates made meanwhile.
"""

import collections
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Stages:
  """Two threads, through which jobs pass one after the other.

  Args:
    compute: called with each job, in the first thread.
    push: called with a computed job, in the second; `take` returns its result.
    wake: called, in one of the two threads, when a job can be taken.

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
    # (job, Future of its push), in the order in which the jobs began.
    self._jobs: collections.deque[tuple[Any, Future[Any]]] = collections.deque()

  def begin(self, job: Any) -> None:
    """Queues a job to be computed and pushed after the earlier jobs."""
    compute_thread, push_thread = self._threads
    computation = compute_thread.submit(self._compute, job)

    def push() -> Any:
      computation.result()  # raises the error of `compute`
      return self._push(job)

    future = push_thread.submit(push)
    self._jobs.append((job, future))
    # Added after the append, so that `is_ready` is True when `wake` is called.
    future.add_done_callback(lambda future: self._wake())

  @property
  def is_ready(self) -> bool:
    """Whether a job can be taken."""
    return bool(self._jobs) and self._jobs[0][1].done()

  def take(self) -> tuple[Any, Any]:
    """Returns the next (job, result of its push). Raises the error of its
    `compute` or `push`."""
    job, push_future = self._jobs.popleft()
    return job, push_future.result()

  def __enter__(self) -> "Stages":
    return self

  def __exit__(self, *error: object) -> None:
    """Ends the threads after their current jobs."""
    for thread in self._threads:
      thread.shutdown(cancel_futures=True)
