"""What the tests of live runs share."""

import threading
import time

import pytest

from asgd.live.hosts.threads import ThreadHosts


@pytest.fixture
def hosts():
  """Hosts that are threads; none of a shard is left at the end."""
  hosts = ThreadHosts(began=time.monotonic())
  yield hosts
  hosts.close()
  assert not [t for t in threading.enumerate() if t.name == "shard-0"]
