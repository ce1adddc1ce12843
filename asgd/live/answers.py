"""Waiting for the answers of several parties at once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

_LOOK = 0.5  # seconds between two looks
_SOON = 2.0  # seconds after which the user is told who is waited for
_Key = TypeVar("_Key")
_Call = TypeVar("_Call")


def await_all(
  calls: Mapping[_Key, _Call],
  *,
  wait: Callable[[Sequence[_Call], float], Collection[_Call]],
  clock: Callable[[], float],
  limit: float,
  name: Callable[[_Key], str],
  say: Callable[[str], None],
) -> list[_Key]:
  """Waits until all calls have ended, or a limit has passed.

  All parties were called before, so the time of each counts from the same
  moment: a silent one takes no time from the others.

  Args:
    calls: by party.
    wait: (calls, seconds) -> ended calls, once there is one or time is over.
    clock: in seconds.
    limit: seconds after which a party counts as silent.
    name: of a party, for the user.
    say: is called with a line for the user, after 2 seconds.

  Returns:
    The silent parties.

  Example:
    >>> from asgd.live import answers
    >>> times = iter([0.0, 3.0, 9.0])
    >>> answers.await_all(
    ...   {0: "answered", 1: "silent"},
    ...   wait=lambda calls, seconds: [x for x in calls if x == "answered"],
    ...   clock=lambda: next(times),
    ...   limit=8.0,
    ...   name="shard {}".format,
    ...   say=print,
    ... )
    waiting for shard 1, which has not answered for 3 s
    [1]
  """
  began, told, left = clock(), False, dict(calls)
  while left:
    ended = wait(list(left.values()), _LOOK)
    left = {key: call for key, call in left.items() if call not in ended}
    if not left:
      break
    passed = clock() - began
    if passed > _SOON and not told:
      told = True
      names = ", ".join(map(name, left))
      say(f"waiting for {names}, which has not answered for {passed:.0f} s")
    if passed > limit:
      break
  return list(left)
