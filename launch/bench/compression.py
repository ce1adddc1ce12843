"""What codecs and the packed wire cost, against memory copies."""

import os
import time

import numpy as np

from asgd.experiment import ray_runtime
from asgd.live import ray_internals

from . import message_speed, turns

_CODECS = {  # label -> options; normal numbers, of which 3.29 leaves 0.1 %
  "threshold, 0.1 %": dict(name="threshold", tau=3.29),
  "top_k, 0.1 %": dict(name="top_k", density=0.001),
  "top_k, 1 %": dict(name="top_k", density=0.01),
  "dgc, 0.1 %": dict(name="dgc", density=0.001, warm_up=0),
  "random_k, 0.1 %": dict(name="random_k", density=0.001),
  "onebit": dict(name="onebit"),
  "sign": dict(name="sign"),
  "terngrad": dict(name="terngrad"),
  "qsgd": dict(name="qsgd"),
  "e3m0": dict(name="e3m0"),
  "int8": dict(name="int8"),
  "bf16": dict(name="bf16"),
  "powersgd": dict(name="powersgd"),
  "identity": dict(name="identity"),
}
_SENT = "threshold, 0.1 %", "top_k, 0.1 %", "onebit", "int8"
_MEGABYTES = 10
_DENSITIES = 0.0001, 0.001, 0.01, 0.1
_POSITIONS = 200_000
_TURNS = 3  # of each contestant on the way


def _stages(like, rounds):
  """Speeds of each codec's stages, over that of a copy."""
  once = message_speed.copy(like)
  size = sum(x.nbytes for x in like.values())
  header = ["codec", "bytes", "times less", "encode", "pack", "unpack"]
  header += ["decode", "MB/s up", "MB/s down"]
  table = turns.TimingTable(header, first=16)
  for label, options in _CODECS.items():
    stages = message_speed.MessageStages(options, like)
    both = {"copy": once, **stages.contestants()}
    copy, *parts = turns.take_turns(both, rounds, 3, time.process_time).values()
    shares = [f"{np.median(copy / part):.2f}" for part in parts]
    length = stages.pack().size
    up, down = parts[0] + parts[1], parts[2] + parts[3]
    speeds = [f"{size / 1e6 / np.median(way):.0f}" for way in (up, down)]
    table.row(label, str(length), f"{size / length:.1f}", *shares, *speeds)
  print(f"\nof a copy, that is {size / 1e6 / np.median(copy):.0f} MB/s\n")


def _coder(rounds):
  """Positions per second, and what one takes."""
  table = turns.TimingTable(
    ["density", "bits", "entropy", "M/s encoded", "M/s decoded"], first=8
  )
  for p in _DENSITIES:
    both, bits = message_speed.coder(p, _POSITIONS)
    entropy = -np.log2(p) - (1 - p) / p * np.log2(1 - p)
    taken = turns.take_turns(both, rounds, 3, time.process_time).values()
    speeds = [f"{_POSITIONS / 1e6 / np.median(way):.0f}" for way in taken]
    table.row(f"{p:g}", f"{bits:.2f}", f"{entropy:.2f}", *speeds)
  print()


def _way(like, seconds):
  """Messages per second, of codecs and of the dense wire."""
  sent = {"dense": None, **{label: _CODECS[label] for label in _SENT}}
  rates = {label: [] for label in sent}
  for _ in range(_TURNS):
    for label, options in sent.items():
      rate = message_speed.rate(like, options, seconds / _TURNS)
      rates[label].append((rate.per_second, 1e3 * rate.cpu))
  header = ["sent", "messages/s", "of dense", "range", "CPU ms", "of dense"]
  table = turns.TimingTable(header, first=16)
  dense = np.transpose(rates["dense"])
  for label, each in rates.items():
    mine = np.transpose(each)
    speed, cpu = np.median(mine, axis=1)
    share = turns.ratio_cells(mine[0] / dense[0])
    of_dense = f"{np.median(mine[1] / dense[1]):.2f}"
    table.row(label, f"{speed:.1f}", *share, f"{cpu:.1f}", of_dense)


def run(seconds: float = 3.0, rounds: int = 9) -> None:
  """Prints speeds of codecs, of packing and of the coder of positions, on one
  core by its CPU time; then with so many seconds for each contestant messages
  per second to a server, and what CPU time they take."""
  like = message_speed.message(_MEGABYTES)
  print(f"{_MEGABYTES} MB of float32 in 4 leaves, one core\n", flush=True)
  cores = message_speed.take_core(0)
  _stages(like, rounds)
  _coder(rounds)
  if cores:
    os.sched_setaffinity(0, cores)
  print("from a worker to a server, each on a node of Ray, on one machine\n")
  memory = 2**29
  ray_runtime.start(None, memory=memory)
  try:
    with ray_internals.second_node(message_speed.FAR, memory):
      _way(like, seconds)
  finally:
    ray_runtime.stop()
