"""Processes that train as one: how they take part, start and end.

That two of them train as one process does is in test_mesh_engine.
"""

import os
import signal
import subprocess
import sys

import kit
import pytest

from asgd.parallel import processes, supervisor


@pytest.fixture
def supervise(monkeypatch):
  """Supervises a program instead of this one."""
  handlers = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  }

  def run(*lines):
    program = "import os, signal, sys\nme = sys.argv[1][-1]\n"
    monkeypatch.setattr(
      *(sys, "orig_argv", ["python", "-c", program + "\n".join(lines)])
    )
    supervisor.supervise(2)

  yield run
  for number, handler in handlers.items():
    signal.signal(number, handler)


@pytest.mark.process
def test_all_end_when_one_dies_and_its_last_line_is_told(supervise, capfd):
  wait = "print(os.getpid(), flush=True); signal.pause()"
  for death, message in (
    (
      "print('error: no data', file=sys.stderr); sys.exit(2)",
      "process 1 of 2 failed with status 2: no data",
    ),
    (
      "os.kill(os.getpid(), signal.SIGKILL)",
      "process 1 of 2 was killed by SIGKILL: it said nothing; the same",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      supervise("if me == '1':", "  " + death, wait)
    out = capfd.readouterr().out
    if out:  # it may have been ended before
      with pytest.raises(ProcessLookupError):
        os.kill(int(out), 0)


@pytest.mark.process
def test_that_cells_are_missing_is_passed_on(supervise, capfd):
  said = "error: only 1 of the 2 cells"
  with pytest.raises(SystemExit) as ended:
    supervise(f"print({said!r}, file=sys.stderr); sys.exit(3)")
  assert ended.value.code == 3
  assert capfd.readouterr().err == f"{said}\n"


@pytest.mark.process
def test_signals_are_passed_on(supervise, capfd):
  with pytest.raises(SystemExit) as end:
    supervise(
      "def told(*_):",
      "  print('told', me, flush=True)",
      "  sys.exit(143)",
      "signal.signal(signal.SIGTERM, told)",
      "if me == '0':",
      "  os.kill(os.getppid(), signal.SIGTERM)",
      "signal.pause()",
    )
  assert end.value.code == 143
  assert capfd.readouterr().out == "told 0\n"


@pytest.mark.process
def test_no_trace_of_a_process_that_is_interrupted_before_it_listens(
  supervise, capfd
):
  with pytest.raises(SystemExit) as end:
    supervise(
      "if me == '0':",
      "  os.kill(os.getppid(), signal.SIGINT)",
      "signal.pause()",
    )
  assert end.value.code == 130
  assert capfd.readouterr().err == ""


@pytest.mark.process
def test_a_process_that_does_not_stop_is_killed(supervise, capfd, monkeypatch):
  monkeypatch.setattr(supervisor, "_SAVE_SECONDS", 0.1)
  with pytest.raises(SystemExit) as end:
    supervise(
      "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
      "if me == '0':",
      "  os.kill(os.getppid(), signal.SIGTERM)",
      "signal.pause()",
    )
  assert end.value.code == 143
  assert "did not stop in 0.1 s and was killed" in capfd.readouterr().err


@pytest.mark.process
def test_processes_end_when_all_have(supervise, capfd):
  supervise("print('Rank', me)", "print('a word', file=sys.stderr)")
  found = capfd.readouterr()
  assert (found.out, found.err) == ("Rank 0\n", "a word\n")


@pytest.mark.process
def test_a_process_ends_with_its_supervisor():
  ours, theirs = os.pipe()
  process = subprocess.Popen(
    [
      *(sys.executable, "-c"),
      "import signal\nfrom asgd.parallel import processes\n"
      "assert processes._watch_supervisor()\nsignal.pause()\n",
    ],
    cwd=kit.ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu", "ASGD_LIFELINE": str(ours)},
    pass_fds=(ours,),
  )
  os.close(ours)
  os.close(theirs)
  assert process.wait(kit.DEADLINE) == -signal.SIGTERM


MISTAKES = {
  "none": (dict(count=0), "must be 1 or more, not 0"),
  "alone": (dict(count=2, process_id=0), "go together"),
  "number": (
    dict(count=2, process_id=2, coordinator="a:1"),
    "must be from 0 to 1 with --num_processes=2, not 2",
  ),
  "place": (
    dict(count=2, process_id=1, coordinator="a"),
    "--coordinator must be HOST:PORT, not 'a'",
  ),
  "auto": (dict(count=1, process_id=1, coordinator="auto"), "drop it"),
  "patience": (
    dict(count=1, start_seconds=0.0),
    "--start_seconds must be positive",
  ),
}


test_arguments_that_do_not_go_together = kit.refuses(
  MISTAKES, lambda arguments: processes.role(**arguments)
)


def test_which_process_supervises():
  assert not processes.role(1).supervises
  assert processes.role(2).supervises
  auto = processes.role(2, coordinator="auto")
  assert auto.auto and not auto.supervises
  assert auto[:2] == (2, None)
  assert processes.role(1, coordinator="auto").count is None
  assert not processes.role(2, 1, "a:1").supervises


def test_devices_are_divided_among_processes():
  assert processes.devices_of_each(8, 2) == 4
  with pytest.raises(ValueError, match="the 3 devices .* cannot be divided"):
    processes.devices_of_each(3, 2)
  with pytest.raises(ValueError, match="4,096 for each .* at most 2,048"):
    processes.devices_of_each(8192, 2)
