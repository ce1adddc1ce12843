"""Faults on purpose, and when a worker is taken for dead."""

import math
import statistics
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd.live import faults, frames
from asgd.live.deadlines import Deadlines, Ladder
from asgd.live.faults import Fault, Killed, Script
from asgd.live.frames import Frame

quick = settings(deadline=None, derandomize=True, max_examples=100)


# Reading.


def test_faults_are_read():
  assert faults.parse("kill:2:7") == Fault(2, 7, "kill")
  assert faults.parse("slow:0:3:0.25") == Fault(0, 3, "slow", 0.25)
  for kind in faults.KINDS:
    text = f"{kind}:1:2" + ":3" * (kind == "slow")
    seconds = 3.0 if kind == "slow" else 0.0
    assert faults.parse(text) == Fault(1, 2, kind, seconds)


@pytest.mark.parametrize(
  "text",
  [
    *("", "kill", "kill:1", "kill:1:2:3", "slow:1:2", "slow:1:2:3:4"),
    *("kil:1:2", "KILL:1:2", "kill:one:2", "kill:1:2.5", "slow:1:2:soon"),
    *("kill:1:", "1:2:kill", "kill 1 2"),
  ],
)
def test_what_is_no_fault_is_named(text):
  with pytest.raises(ValueError) as error:
    faults.parse(text)
  assert str(error.value) == (
    f"no fault: {text!r}; write KIND:WORKER:SEQ with a kind of kill, hang,"
    " slow, nan, lose, double, reorder, or slow:WORKER:SEQ:SECONDS"
  )


@pytest.mark.parametrize(
  ("text", "why"),
  [
    ("kill:-1:2", "worker must be 0 or more, not -1"),
    ("kill:1:-2", "seq must be 0 or more, not -2"),
    ("slow:1:2:-3", "seconds must be from 0 to 1,000,000, not -3"),
    ("slow:1:2:nan", "seconds must be from 0 to 1,000,000, not nan"),
    ("slow:1:2:inf", "seconds must be from 0 to 1,000,000, not inf"),
    ("slow:1:2:1e30", "seconds must be from 0 to 1,000,000, not 1e+30"),
  ],
)
def test_numbers_that_no_fault_has_are_named(text, why):
  with pytest.raises(ValueError) as error:
    faults.parse(text)
  assert str(error.value) == f"fault {text!r}: {why}"


def test_faults_that_cannot_happen_in_a_run_are_named():
  some = [Fault(1, 5, "kill"), Fault(1, 5, "slow", 0.5), Fault(0, 9, "kill")]
  faults.check(some, 2, jobs=10)
  with pytest.raises(ValueError, match="'kill:1:5': there is no worker 1; the"):
    faults.check(some, 1)
  with pytest.raises(ValueError, match="'kill:0:9': the run has 9 jobs in all"):
    faults.check(some, 2, jobs=9)
  with pytest.raises(ValueError, match="'slow:1:5:0.5' is given twice"):
    faults.check([*some, Fault(1, 5, "slow", 0.5)], 2)
  with pytest.raises(ValueError, match="'slow:0:0:nan': seconds must be"):
    faults.check([Fault(0, 0, "slow", math.nan)], 2)


# Injecting.


class Ended(Exception):
  """What a test's `kill` raises, and its `wait` when it was called enough."""


class Stage:
  """A script whose kills and waits are written down."""

  def __init__(self, *script):
    self.calls = []
    self.it = Script(script, kill=self._kill, wait=self._wait)

  def _kill(self):
    self.calls.append("kill")
    raise Ended

  def _wait(self, seconds):
    self.calls.append(seconds)
    if len(self.calls) == 3:
      raise Ended


def frame(seq, worker=0):
  return Frame(frames.PUSH, worker, seq)


def test_what_is_not_in_the_script_does_not_happen():
  stage = Stage(*(Fault(1, 2, kind, 9.0) for kind in faults.KINDS))
  message = {"w": np.ones(3)}
  for worker, seq in ((0, 2), (1, 1), (2, 1), (1, 3)):
    stage.it.apply_to_job(worker, seq)
    assert stage.it.apply_to_message(worker, seq, message) is message
    sent = frame(seq, worker)
    assert stage.it.apply_to_frame(worker, sent) == [sent]
  assert stage.calls == stage.it.injected == []


def test_a_kill_happens_once():
  fault = Fault(1, 2, "kill")
  stage = Stage(fault)
  with pytest.raises(Ended):
    stage.it.apply_to_job(1, 2)
  stage.it.apply_to_job(1, 2)  # of the place's next holder
  assert stage.calls == ["kill"]
  assert stage.it.injected == [fault]


def test_a_kill_in_threads_goes_through_handlers_of_errors():
  assert not issubclass(Killed, Exception)


def test_who_hangs_does_not_come_back():
  stage = Stage(Fault(0, 0, "hang"))
  with pytest.raises(Ended):
    stage.it.apply_to_job(0, 0)
  assert stage.calls == [3600.0] * 3


def test_who_is_slow_comes_back():
  fault = Fault(0, 1, "slow", 0.25)
  stage = Stage(fault)
  stage.it.apply_to_job(0, 1)
  stage.it.apply_to_job(0, 1)
  assert stage.calls == [0.25]
  assert stage.it.injected == [fault]


def test_a_spoilt_message_is_nan_throughout():
  stage = Stage(Fault(0, 1, "nan"))
  message = {"w": np.ones((2, 3), np.float32), "b": (np.zeros(4, np.float16),)}
  spoilt = stage.it.apply_to_message(0, 1, message)
  assert spoilt["w"].shape == (2, 3)
  assert spoilt["w"].dtype == np.float32
  assert spoilt["b"][0].dtype == np.float16
  assert np.isnan(spoilt["w"]).all()
  assert np.isnan(spoilt["b"][0]).all()
  assert (message["w"] == 1).all()
  assert stage.it.apply_to_message(0, 1, message) is message


def test_frames_are_lost_or_doubled():
  stage = Stage(Fault(0, 1, "lose"), Fault(0, 2, "double"))
  assert stage.it.apply_to_frame(0, frame(1)) == []
  assert stage.it.apply_to_frame(0, frame(1)) == [frame(1)]  # said again
  assert stage.it.apply_to_frame(0, frame(2)) == [frame(2), frame(2)]
  assert stage.it.apply_to_frame(0, frame(2)) == [frame(2)]
  assert stage.it.injected == [Fault(0, 1, "lose"), Fault(0, 2, "double")]


def test_a_frame_is_overtaken_by_the_next():
  stage = Stage(Fault(0, 1, "reorder"), Fault(1, 1, "reorder"))
  assert stage.it.apply_to_frame(0, frame(1)) == []
  assert stage.it.apply_to_frame(1, frame(1, worker=1)) == []
  assert stage.it.apply_to_frame(2, frame(1, worker=2)) == [frame(1, worker=2)]
  assert stage.it.apply_to_frame(0, frame(2)) == [frame(2), frame(1)]
  assert stage.it.apply_to_frame(0, frame(3)) == [frame(3)]
  assert stage.it.apply_to_frame(1, frame(2, worker=1)) == [
    *(frame(2, worker=1), frame(1, worker=1)),
  ]


def test_several_things_may_happen_to_one_job():
  stage = Stage(Fault(0, 1, "slow", 0.5), Fault(0, 1, "nan"))
  stage.it.apply_to_job(0, 1)
  assert np.isnan(stage.it.apply_to_message(0, 1, np.ones(2))).all()
  assert stage.calls == [0.5]
  assert [fault.kind for fault in stage.it.injected] == ["slow", "nan"]


def test_a_fault_happens_once_whoever_asks():
  """Two threads may hold one place, for a moment."""
  script = Script(
    [Fault(0, seq, "lose") for seq in range(200)],
    **dict(kill=lambda: None, wait=lambda seconds: None),
  )
  lost = []
  start = threading.Barrier(4)

  def run():
    start.wait(30)
    for seq in range(200):
      if not script.apply_to_frame(0, frame(seq)):
        lost.append(seq)

  threads = [threading.Thread(target=run) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  assert sorted(lost) == list(range(200))
  assert len(script.injected) == 200


# The ladder.


def after(times, **settings):
  deadlines = Deadlines(Ladder(**settings))
  for seconds in times:
    deadlines.add_job(seconds)
  return deadlines


@pytest.mark.parametrize(
  ("times", "settings", "late"),
  [
    *(([0.001] * count, dict(start=50.0), 50.0) for count in range(5)),
    ([10.0] * 5, dict(start=50.0), 30.0),
    # Median 3, absolute deviations 2 1 0 1 2, MAD 1.
    ([1.0, 2.0, 3.0, 4.0, 5.0], dict(floor=2.0), 3 + 10 * 1.4826),
    # Median 2.5, deviations 1.5 0.5 0.5 1.5 97.5 1.5, MAD 1.5.
    ([1.0, 2.0, 3.0, 4.0, 100.0, 1.0], dict(k=4.0), 2.5 + 6 * 1.4826),
    ([4.0] * 8, {}, 12.0),  # equal times vary: three medians
    ([0.01] * 8, dict(floor=2.0), 2.0),  # jobs of no time
    ([0.01] * 8, dict(floor=0.02), 0.03),
    ([100.0] * 20 + [1.0] * 8, dict(window=8, floor=0.5), 3.0),
    ([100.0] * 20 + [1.0] * 8, dict(window=40, floor=0.5), 300.0),
  ],
)
def test_the_ladder_by_hand(times, settings, late):
  deadlines = after(times, **settings)
  assert deadlines.late_after == pytest.approx(late)
  assert deadlines.dead_after == pytest.approx(3 * late)


def test_the_ladder_moves_on_when_it_was_looked_at():
  deadlines = after([1.0] * 5, floor=0.5)
  assert deadlines.late_after == 3.0
  for _ in range(20):
    deadlines.add_job(2.0)
  assert deadlines.late_after == 6.0


@quick
@given(
  st.lists(st.floats(0.001, 1e3), min_size=5, max_size=40),
  st.floats(0.1, 20.0),
  st.floats(0.01, 10.0),
)
def test_the_ladder_is_its_definition(times, k, floor):
  deadlines = after(times, k=k, floor=floor, window=16)
  seen = times[-16:]
  median = statistics.median(seen)
  mad = statistics.median([abs(x - median) for x in seen])
  expected = max(median + k * 1.4826 * mad, 3 * median, floor)
  assert deadlines.late_after == pytest.approx(expected)
  assert deadlines.dead_after == 3 * deadlines.late_after
  # What is usual is neither late nor dead.
  assert median < deadlines.late_after < deadlines.dead_after


@pytest.mark.parametrize("name", Ladder._fields)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 1e30, "x", None])
def test_settings_must_be_positive(name, value):
  key = {
    "k": r" \(live.late_mads\)",
    "floor": r" \(live.late_seconds\)",
    "start": r" \(live.start_seconds\)",
    "window": "",
  }[name]
  with pytest.raises(
    ValueError, match=f"^{name}{key} must be a positive number, at most 1e.09"
  ):
    Deadlines(Ladder()._replace(**{name: value}))
