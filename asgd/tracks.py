"""Pieces of time in tracks, in Chrome's format: see https://ui.perfetto.dev."""

from collections.abc import Iterable, Mapping
from typing import Any

Event = dict[str, Any]

_FIRST_TID = 11  # 0 is the idle task, and the others are left for pids


def event(phase: str, name: str, pid: int, tid: int, **fields) -> Event:
  """Returns an event: "X" a piece, "i" a moment, "C" a counter, "M" a name."""
  return {"name": name, "ph": phase, "pid": pid, "tid": tid, **fields}


def microseconds(seconds: float) -> int:
  """Returns the time of an event."""
  return round(1e6 * seconds)


def piece(
  name: str, pid: int, tid: int, start: float, end: float, **fields
) -> Event:
  """Returns a piece of time; `start` and `end` are seconds."""
  time = microseconds(start)
  length = microseconds(end) - time
  return event("X", name, pid, tid, ts=time, dur=length, **fields)


class Lanes:
  """Lanes for pieces that may overlap; those of a lane do not."""

  def __init__(self):
    self._free: list[float] = []

  def take(self, start: float, end: float) -> int:
    """Returns a lane that is free from `start`, which must not decrease."""
    for lane, free in enumerate(self._free):
      if free <= start:
        self._free[lane] = end
        return lane
    self._free.append(end)
    return len(self._free) - 1


class Tracks:
  """Tracks in groups, named when they are met."""

  def __init__(self, groups: Mapping[int, str]):
    """Starts with no track; `groups` are pid -> name."""
    self._tids: dict[tuple[int, str], int] = {}
    self.names: list[Event] = [
      event("M", "process_name", pid, 0, args={"name": name})
      for pid, name in groups.items()
    ]

  def tid(self, pid: int, name: str, place: int) -> int:
    """Returns the number of a track, to be shown at a place in its group."""
    key = pid, name
    if key not in self._tids:
      self._tids[key] = tid = _FIRST_TID + len(self._tids)
      self.names += [
        event("M", "thread_name", pid, tid, args={"name": name}),
        event("M", "thread_sort_index", pid, tid, args={"sort_index": place}),
      ]
    return self._tids[key]

  def ordered(self, events: Iterable[Event]) -> list[Event]:
    """Returns the names of all tracks, then the events by time."""
    return self.names + sorted(events, key=lambda event: event["ts"])


def document(events: list[Event]) -> dict[str, Any]:
  """Returns what is to be written, as JSON."""
  return {"displayTimeUnit": "ms", "traceEvents": events}
