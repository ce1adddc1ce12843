"""The worker and the server of the compression benchmark, in one process."""

import sys
import types

import pytest

from launch.bench import compression


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
