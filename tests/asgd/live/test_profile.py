"""When a process is traced."""

import jax
import pytest

from asgd.live.profile import Profile


@pytest.fixture
def profiler(monkeypatch):
  """What JAX's profiler is asked for."""
  calls = []
  monkeypatch.setattr(jax.profiler, "start_trace", calls.append)
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
  return calls


def test_a_trace_ends_after_its_seconds_and_is_not_made_again(profiler):
  now = 7.0
  profile = Profile("folder", seconds=2.0, clock=lambda: now)
  assert profiler == []
  profile.after_job()
  now = 8.9
  profile.after_job()
  assert profiler == ["folder"]
  now = 9.0
  profile.after_job()
  profile.close()
  profile.after_job()
  assert profiler == ["folder", "stop"]


def test_a_trace_ends_with_its_work(profiler):
  profile = Profile("folder")
  profile.after_job()
  profile.close()
  profile.close()
  assert profiler == ["folder", "stop"]


def test_the_trace_of_another_goes_on(profiler, monkeypatch):
  def refuse(folder):
    raise RuntimeError("a profile has been started")

  monkeypatch.setattr(jax.profiler, "start_trace", refuse)
  profile = Profile("folder")
  with pytest.raises(RuntimeError):
    profile.after_job()
  profile.close()
  assert profiler == []


@pytest.mark.parametrize("folder", [None, "folder"])
def test_without_a_folder_or_work_there_is_no_trace(profiler, folder):
  profile = Profile(folder)
  if folder is None:
    profile.after_job()
  profile.close()
  assert profiler == []
