"""What the benchmark of codecs does over and over."""

import sys
import types

import jax
import numpy as np
import pytest

from asgd.compression import packing
from launch.bench import compression, turns


@pytest.mark.parametrize("label", ["threshold, 0.1 %", "top_k, 1 %", "int8"])
def test_every_code_is_like_the_first(label):
  like = compression.message(0.2)
  stages = compression.MessageStages(compression._CODECS[label], like)
  first = packing.unpack(stages.layout, stages.pack().copy())
  for _ in range(3):
    stages.encode()
    code = packing.unpack(stages.layout, stages.pack())
    for x, y in zip(*map(jax.tree.leaves, (first, code)), strict=True):
      # An element at the border may stay away.
      assert np.count_nonzero(x != 0) == pytest.approx(
        np.count_nonzero(y != 0), abs=2
      )


def test_all_stages_are_contestants():
  like = compression.message(0.01)
  stages = compression.MessageStages({"name": "sign"}, like)
  both = {"copy": compression.copy(like), **stages.contestants()}
  seconds = turns.take_turns(both, 1, clock=lambda: 0.0)
  assert list(seconds) == ["copy", "encode", "pack", "unpack", "decode"]


def test_the_coder_is_that_of_the_packed_wire():
  both, bits = compression.coder(0.01, 1000)
  assert bits * 1000 == 8 * sum(x.size for x in both["encode"]())
  assert both["decode"]().size == 1000


def test_a_server_makes_an_update_of_what_it_is_told(monkeypatch):
  monkeypatch.setattr(compression, "take_core", lambda number: set())
  like = compression.message(0.01)
  for options in (None, {"name": "identity"}):
    server = compression._Server(like, options)
    sent = like
    if options is not None:
      sent = compression.MessageStages(options, like).pack()
    server.receive(sent)
    for x, y in zip(
      jax.tree.leaves(server._params), jax.tree.leaves(like), strict=True
    ):
      np.testing.assert_array_equal(x, np.float32(-0.01) * y)


class Handle:
  """Calls an object's methods as a handle of Ray does."""

  def __init__(self, actor):
    self._actor = actor

  def __getattr__(self, name):
    method = getattr(self._actor, name)  # an unknown method fails, as with Ray
    return types.SimpleNamespace(remote=method)


@pytest.mark.parametrize("options", [None, {"name": "int8"}])
def test_a_worker_measures_messages_to_a_server(options, monkeypatch):
  ray = types.SimpleNamespace(get=lambda reply: reply)
  monkeypatch.setitem(sys.modules, "ray", ray)
  monkeypatch.setattr(compression, "take_core", lambda number: set())
  like = compression.message(0.01)
  server = Handle(compression._Server(like, options))
  rate = compression._Worker().rate(server, like, options, 0.01)
  assert rate.per_second > 0 and rate.cpu > 0
