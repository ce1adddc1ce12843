"""No test of data touches the network or what the machine has installed."""

import sys
import urllib.request

import pytest

from asgd.data import images


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
  """No network, no installed dataset, a cache of its own."""

  def refuse(url, **kwargs):
    raise AssertionError(f"a test asked the network for {url}")

  monkeypatch.setattr(urllib.request, "urlopen", refuse)
  monkeypatch.setattr(images, "_INSTALL_PREFIXES", ())
  monkeypatch.setitem(sys.modules, "mlxtend", None)
  monkeypatch.setenv("ASGD_CACHE", str(tmp_path / "cache"))
