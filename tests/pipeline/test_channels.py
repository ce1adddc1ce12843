"""Entries reach another process whole and in order, and free their memory."""

import contextlib
import os
import threading

import jax
import numpy as np
import pytest
from kit import same

from asgd.pipeline import channels

ENTRIES = [
  (0, ("x", 1, 0), np.arange(6.0).reshape(2, 3)),
  (2, ("g", 0, 1), [np.ones((), np.float32), np.zeros((0, 3), np.int8)]),
  (0, ("m", 1, 2), {"a": (np.arange(5000)[::2], None), "b": np.int32(4)}),
  (1, ("x", 1, 3), np.full((300, 40), 2.5)),  # more than a segment so far
  (1, ("x", 1, 4), np.full((300, 40), 3.5)),
]


def channel(take):
  receivers = channels.Receivers(take)
  accepting = receivers.accept(1)
  sender = channels.Sender(receivers.path)
  accepting.join()
  return receivers, sender


def test_entries_come_as_they_were_sent_and_segments_are_used_again():
  taken = []

  def take(lane, key, value):
    taken.append((lane, key, jax.tree.map(np.array, value)))

  receivers, sender = channel(take)
  assert not os.path.exists(receivers.path)  # nobody else can connect
  for _ in range(3):
    for entry in ENTRIES:
      sender.put(*entry)
      sender.flush()
  assert len(taken) == 3 * len(ENTRIES)
  for found, wanted in zip(taken, 3 * ENTRIES, strict=True):
    assert found[:2] == wanted[:2]
    same(found[2], wanted[2])
  assert len(sender._segments) == 2  # of a page, and a large one


def test_a_sender_does_not_wait_for_the_receiver():
  may_go_on, taken = threading.Event(), []

  def take(lane, key, value):
    assert may_go_on.wait(60)
    taken.append(float(value.sum()))

  _, sender = channel(take)
  for number in range(20):  # each in a segment of its own
    sender.put(0, ("x", 1, number), np.full(100, float(number)))
  assert not taken
  may_go_on.set()
  sender.flush()
  assert taken == [100.0 * number for number in range(20)]


def test_what_is_sent_to_a_process_that_is_gone_is_named_by_flush():
  receivers = channels.Receivers(print)
  sender = channels.Sender(receivers.path)
  with contextlib.closing(receivers._listener.accept()):
    pass
  receivers.close()
  sender.put(*ENTRIES[0])
  with pytest.raises(ConnectionError, match="cannot be reached"):
    sender.flush()
