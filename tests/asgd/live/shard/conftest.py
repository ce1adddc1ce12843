"""What the tests of a shard share."""

import functools

import pytest

from asgd import own_writes
from asgd.simulator import steps as host


@pytest.fixture(autouse=True, scope="module")
def compile_once():
  """Replays by hundreds, of a few servers and their workers."""
  with pytest.MonkeyPatch.context() as patch:
    for module, name in ((host, "compile_steps"), (own_writes, "own_writes")):
      patch.setattr(module, name, functools.cache(getattr(module, name)))
    yield
