"""Timelines in Chrome's trace format, for https://ui.perfetto.dev."""

from collections.abc import Iterable, Mapping
from typing import Any

Event = dict[str, Any]

_FIRST_TID = 11  # 0 is the idle task, and smaller ids may equal a pid


def event(phase: str, name: str, pid: int, tid: int, **fields: Any) -> Event:
  """Returns an event; phase: "X" span, "i" instant, "C" counter or "M" name."""
  return {"name": name, "ph": phase, "pid": pid, "tid": tid, **fields}


def microseconds(seconds: float) -> int:
  """Returns a time in the integer unit of the format."""
  return round(1e6 * seconds)


def span(
  name: str, pid: int, tid: int, start: float, end: float, **fields: Any
) -> Event:
  """Returns a span of time; `start` and `end` are seconds."""
  time = microseconds(start)
  length = microseconds(end) - time
  return event("X", name, pid, tid, ts=time, dur=length, **fields)


class Lanes:
  """Lanes for spans that may overlap; spans of the same lane do not."""

  def __init__(self) -> None:
    self._free: list[float] = []  # by lane: the end of its last span

  def take(self, start: float, end: float) -> int:
    """Returns a lane that is free from `start`, which must not decrease."""
    for lane, last_end in enumerate(self._free):
      if last_end <= start:
        self._free[lane] = end
        return lane
    self._free.append(end)
    return len(self._free) - 1


class Tracks:
  """Tracks in groups; each is named at its first use."""

  def __init__(self, groups: Mapping[int, str]):
    """Starts with no track; `groups` are pid -> name."""
    self._tids: dict[tuple[int, str], int] = {}
    self.names: list[Event] = [
      event("M", "process_name", pid, 0, args={"name": name})
      for pid, name in groups.items()
    ]

  def tid(self, pid: int, name: str, position: int) -> int:
    """Returns the id of a track; `position` is its position in its group."""
    key = pid, name
    if key not in self._tids:
      self._tids[key] = tid = _FIRST_TID + len(self._tids)
      self.names += [
        event("M", "thread_name", pid, tid, args={"name": name}),
        event(
          "M", "thread_sort_index", pid, tid, args={"sort_index": position}
        ),
      ]
    return self._tids[key]

  def ordered(self, events: Iterable[Event]) -> list[Event]:
    """Returns the names of all tracks, then the events by time."""
    return self.names + sorted(events, key=lambda event: event["ts"])


def document(events: list[Event]) -> dict[str, Any]:
  """Returns the JSON document of a timeline."""
  return {"displayTimeUnit": "ms", "traceEvents": events}
