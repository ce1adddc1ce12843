"""The processes of PyTorch's pipeline, without torch."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from unittest import mock

import kit


def test_stages_have_the_cores_that_the_program_may_use(monkeypatch):
  """After one of them alone; the machine has more."""
  for name in ("torch", "torch.distributed"):
    monkeypatch.setitem(sys.modules, name, mock.MagicMock())
  path = kit.ROOT / "launch" / "bench" / "torch_peer.py"
  spec = importlib.util.spec_from_file_location("torch_peer", path)
  peer = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(peer)
  cores = [{2, 3}]
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores[-1]))
  monkeypatch.setattr(
    os, "sched_setaffinity", lambda pid, some: cores.append(set(some))
  )
  monkeypatch.setattr(peer, "_one_core", lambda sizes: peer._take_core(0))
  stage = types.SimpleNamespace(communicate=lambda: ("{}", ""), wait=lambda: 0)
  monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: stage)
  monkeypatch.setattr(sys, "argv", ["torch_peer.py", json.dumps({"rounds": 1})])
  peer.main()
  assert cores == [{2, 3}, {2}, {2, 3}]
