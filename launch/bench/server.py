"""The live parameter server against Ray's own, and against memory copies."""

import os
from collections.abc import Sequence

import numpy as np

from asgd.experiment import ray_runtime

from . import message_speed, server_speed, turns

_MOST = 1e5  # MB
_TURNS = 2  # of each contestant


def run(sizes: Sequence[str], seconds: float = 3.0) -> None:
  """Prints updates/s and MB/s by MB of parameters, and the ratios, with so many
  seconds for each contestant and size. ValueError for what is no size."""
  try:
    megabytes = [float(size) for size in sizes]
  except ValueError as error:
    raise ValueError(f"--sizes must be numbers of MB: {error}") from error
  wrong = [size for size in megabytes if not 0 < size <= _MOST]
  if wrong:
    raise ValueError(f"--sizes must be above 0 to {_MOST:g} MB, not {wrong[0]}")
  print(
    f"{server_speed.WORKERS} workers, {os.cpu_count()} cores; floor: message"
    " in, update and parameters out in one thread of NumPy\n",
    flush=True,
  )
  ray_runtime.start(None, memory=4 * 2**30)  # the Ray loop needs it
  try:
    header = ["MB", "copies/s", "floor/s", "Ray loop/s", "ours/s", "MB/s"]
    header += ["of Ray loop", "time of floor", "of 2 copies", "no log/s"]
    table = turns.TimingTable([*header, "of Ray loop"], first=6)
    for size in megabytes:
      table.row(*_cells(message_speed.message(size), seconds / _TURNS))
  finally:
    ray_runtime.stop()


def _cells(params: dict[str, np.ndarray], seconds: float) -> list[str]:
  """Has the contestants take turns; returns a row of the table."""
  megabytes = sum(x.nbytes for x in params.values()) / 1e6
  log = 128 if megabytes < 5 else 16 if megabytes < 50 else 4
  target, floor_once = (
    {k: x.copy() for k, x in params.items()},
    server_speed.unavoidable(params),
  )

  def copy_all():
    for name, x in params.items():
      np.copyto(target[name], x)

  contestants = (
    lambda: server_speed.rate(copy_all, seconds / 4),
    lambda: server_speed.rate(floor_once, seconds / 4),
    lambda: server_speed.canonical(params, seconds),
    lambda: server_speed.ours(params, seconds, log),
    lambda: server_speed.ours(params, seconds, 0),
  )
  rates = [[rate() for rate in contestants] for _ in range(_TURNS)]
  copy, floor, theirs, ours, fast = np.median(rates, axis=0)
  row = [megabytes, copy, floor, theirs, ours, 2 * megabytes * ours]
  row += [ours / theirs, floor / ours, copy / 2 / ours, fast, fast / theirs]
  digits = (1, 0, 0, 1, 1, 0, 1, 2, 2, 1, 1)
  return [f"{value:.{n}f}" for value, n in zip(row, digits, strict=True)]
