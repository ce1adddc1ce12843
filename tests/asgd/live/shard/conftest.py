"""What the tests of a shard share."""

import functools

import pytest

from asgd.simulator import steps as host


@pytest.fixture(autouse=True, scope="module")
def compile_once():
  """Replays by hundreds, of a few servers."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(host, "compile_steps", functools.cache(host.compile_steps))
    yield
