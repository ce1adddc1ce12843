"""Benchmarks: ratios against a baseline in the same run.

  asgd bench                          lists them
  asgd bench NAME [--json[=FILE]]     runs one
  asgd bench --all [--json=FILE]      runs each, in a separate process
  asgd bench --table FILE...          joins FILEs of several runs in one table

Machines are noisy, so each contestant takes turns with its baseline in short
blocks. A row has the ratio of the contestant's speed to the baseline's: the
median over rounds, and the range. A row is printed as soon as it is measured.
Each benchmark says what share of the cores other programs used before it and
after it, and ends within 4 minutes on two free cores.
"""

import contextlib
import importlib
import inspect
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from asgd import names, safe_files
from asgd.experiment import provenance

from .. import command_line, flags
from ..command_flags import WITHOUT_TEXT
from . import report, summary

# Modules with a function run(report, ...). Its other parameters are the flags
# of the command that the benchmark takes.
BENCHMARKS = (
  *("simulator", "server", "pipeline", "parallel", "compression", "tables"),
  *("network", "orders", "hogwild"),
)
_FLAGS = flags.define("bench")
_PASSED_FLAGS = "rounds", "block", "sizes", "seconds", "links", "peer", "large"
_BUSY = 0.1  # share of the cores that other programs may use without a warning
_TIME_LIMIT = 240  # seconds of one benchmark, on two free cores
_MAX_MEGABYTES = 1e5  # MB


def _runner(name: str) -> Any:
  """Returns the `run` of a benchmark; imports its module only now."""
  return importlib.import_module(f"{__package__}.{name}").run


def _given_options(name: str) -> dict[str, Any]:
  """Returns the flags that the user gives and the benchmark takes."""
  parameters = inspect.signature(_runner(name)).parameters
  values = {key: _FLAGS[key].value for key in _PASSED_FLAGS}
  options = {key: value for key, value in values.items() if value is not None}
  if "sizes" in options:
    options["sizes"] = list(map(float, options["sizes"]))  # MB
  return {k: value for k, value in options.items() if k in parameters}


def _check_taken(name: str) -> None:
  """Raises ValueError for a flag that the named benchmark does not take. With
  --all, each benchmark takes its own."""
  parameters = inspect.signature(_runner(name)).parameters
  for key in _PASSED_FLAGS:
    if _FLAGS[key].value is not None and key not in parameters:
      taken = ", ".join(f"--{k}" for k in _PASSED_FLAGS if k in parameters)
      raise ValueError(
        f"--{key}: the benchmark {name} does not have it, it has {taken}"
      )


def _measure_busy_share(when: str) -> float:
  """Returns the share of the cores that others use; warns of a large one."""
  share = report.busy_share()
  if share > _BUSY:
    print(
      f"warning: {when} other programs use {share:.0%} of the cores: expect"
      " noise, or wait until they are done",
      file=sys.stderr,
    )
  return round(share, 3)


def _measure(name: str) -> dict[str, Any]:
  """Runs a benchmark; returns its results as the object that --json prints."""
  options, cores = _given_options(name), provenance.cores()
  rows = report.BenchReport()
  start_time = time.monotonic()
  busy_shares = [_measure_busy_share("at the start")]
  # Rows are printed as soon as they are measured.
  _runner(name)(rows, **options)
  seconds = time.monotonic() - start_time
  busy_shares.append(_measure_busy_share("at the end"))
  if seconds > _TIME_LIMIT:
    print(f"warning: it took over {_TIME_LIMIT} s", file=sys.stderr)
  words = ["asgd", "bench", name]
  # Without the folder, which may contain a user's name.
  if "peer" in options:
    options["peer"] = Path(options["peer"]).name
  words += [f"--{key}={_text(value)}" for key, value in options.items()]
  result = {
    "name": name,
    "command": shlex.join(words),
    "device": jax.devices()[0].device_kind,
    "cores": cores,
    "busy": busy_shares,
    "seconds": round(seconds, 1),
  }
  print(
    f"\n{seconds:.0f} s on {cores} cores, of which other programs used"
    f" {busy_shares[0]:.0%} before and {busy_shares[1]:.0%} after"
  )
  return {**result, "rows": rows.rows}


def _text(value: Any) -> str:
  """Returns the value of a flag as text of a command line."""
  return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _measure_all() -> list[dict[str, Any]]:
  """Runs each benchmark in a process; returns their results. The result of one
  that failed has its exit status instead of rows."""
  results = []
  with tempfile.TemporaryDirectory() as folder:
    # A process for each: some set JAX's number of devices, once and for all.
    for name in BENCHMARKS:
      path = Path(folder) / f"{name}.json"
      command = [sys.executable, "-m", __package__, name, f"--json={path}"]
      command += [f"--{k}={_text(v)}" for k, v in _given_options(name).items()]
      print(f"\n== {name}", flush=True)
      process = subprocess.run(command, stdout=sys.stdout)
      if path.exists():
        results += report.read(path)
      else:
        # --all continues after a benchmark that fails.
        results.append({"name": name, "failed": process.returncode, "rows": []})
  return results


def _list() -> None:
  """Prints the benchmarks with the first line of their docstrings."""
  for name in BENCHMARKS:
    print(f"asgd bench {name:<12} {command_line.summary(f'bench/{name}')}")


def _check() -> None:
  """Raises ValueError for flags out of range, before anything is printed."""
  flag_values = {k: _FLAGS[k].value for k in ("rounds", "block", "seconds")}
  if not all(value is None or value > 0 for value in flag_values.values()):
    raise ValueError("--rounds, --block and --seconds must be positive")
  # `which` also accepts a path.
  peer = _FLAGS["peer"].value
  if peer is not None and shutil.which(peer) is None:
    raise ValueError(f"--peer={peer}: there is no such program")
  try:
    sizes = list(map(float, _FLAGS["sizes"].value or []))
  except ValueError as error:
    raise ValueError(f"--sizes must be numbers of MB: {error}") from error
  if wrong_sizes := [size for size in sizes if not 0 < size <= _MAX_MEGABYTES]:
    raise ValueError(
      f"--sizes must be above 0 to {_MAX_MEGABYTES:g} MB, not {wrong_sizes[0]}"
    )


def main(name: str = "", *files: str) -> None:
  """Runs one benchmark or all, lists them, or joins their results."""
  _check()
  if _FLAGS["table"].value:
    paths = [Path(file) for file in (name, *files) if file]
    summary.show(paths, _FLAGS["page"].value)
    return
  if name or not _FLAGS["all"].value:
    if not name:
      _list()
      return
    names.check("benchmark", name, BENCHMARKS)
    _check_taken(name)
  # --json alone prints the object, so all other output moves to stderr.
  json_target = _FLAGS["json"].value
  output_stream = sys.stderr if json_target == WITHOUT_TEXT else sys.stdout
  with contextlib.redirect_stdout(output_stream):
    results = [_measure(name)] if name else _measure_all()
  if json_target == WITHOUT_TEXT:
    print(report.to_json(results), end="")
  elif json_target is not None:
    safe_files.write(Path(json_target), report.to_json(results))
  if failed_names := [
    result["name"] for result in results if "failed" in result
  ]:
    raise flags.Failed(f"no results of: {', '.join(failed_names)}")


if __name__ == "__main__":
  flags.run(main, "bench")
