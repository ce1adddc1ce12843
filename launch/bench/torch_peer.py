"""The same pipeline in PyTorch: a peer for `asgd bench pipeline`.

Two stages of torch.distributed.pipelining over Gloo, each in a process with one
core and one thread, and the same microbatches in one process with one core. It
needs nothing but torch (2.5 or newer), which may belong to another Python:

  python launch/bench/torch_peer.py '{"rounds": 5, "depth": 4, "width": 256,
    "heads": 4, "length": 64, "batch": 8, "microbatches": 8}'

prints a JSON object: a list of seconds for each of `one_core`, `GPipe`, `1F1B`.
"""

import json
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

STAGES = 2


class TorchBlock(nn.Module):  # type: ignore[misc]
  """The block of `asgd.models.transformer.Block`: [B, T, C] -> the same."""

  def __init__(self, width: int, heads: int) -> None:
    """Makes the layers of a block, with normalisation before each part."""
    super().__init__()
    self.heads = heads
    self.norm_attention = nn.LayerNorm(width)
    self.queries = nn.Linear(width, 3 * width)
    self.out = nn.Linear(width, width)
    self.norm_mlp = nn.LayerNorm(width)
    self.up = nn.Linear(width, 4 * width)
    self.down = nn.Linear(4 * width, width)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Applies the block."""
    batch, length, width = x.shape
    shape = batch, length, self.heads, width // self.heads
    # One product for queries, keys and values: [B, T, 3 C] -> 3 of [B, H, T,
    # D].
    q, k, v = (
      part.view(shape).transpose(1, 2)
      for part in self.queries(self.norm_attention(x)).chunk(3, -1)
    )
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
    h = nn.functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
    return x + self.down(h)


def _blocks(sizes: types.SimpleNamespace, depth: int) -> nn.Sequential:
  """Returns the blocks of a stage, or of the whole model."""
  torch.manual_seed(0)
  blocks = (TorchBlock(sizes.width, sizes.heads) for _ in range(depth))
  return nn.Sequential(*blocks)


def _loss(y: torch.Tensor, target: Any) -> torch.Tensor:
  """Returns the mean square of the output, as our pipeline's benchmark does."""
  del target
  return (y**2).mean()


def _take_core(rank: int) -> None:
  """Keeps this process on one core, with one thread."""
  torch.set_num_threads(1)
  if hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _times(once: Callable[[], None], rounds: int) -> list[float]:
  """Returns the seconds of each round; an earlier one is not counted."""
  times = []
  for _ in range(rounds + 1):
    start = time.perf_counter()
    once()
    times.append(time.perf_counter() - start)
  return times[1:]


def _one_core(sizes: types.SimpleNamespace) -> list[float]:
  """Returns the seconds of a batch in one process, by microbatches."""
  _take_core(0)
  model = _blocks(sizes, sizes.depth)
  x = torch.randn(sizes.batch, sizes.length, sizes.width)

  def once() -> None:
    model.zero_grad()
    for _ in range(sizes.microbatches):
      (_loss(model(x), None) / sizes.microbatches).backward()

  return _times(once, sizes.rounds)


def _stage(sizes: types.SimpleNamespace) -> dict[str, list[float]]:
  """Runs one of the two stages; returns schedule -> seconds of each round."""
  _take_core(sizes.rank)
  os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sizes.port)}
  torch.distributed.init_process_group(
    "gloo", rank=sizes.rank, world_size=STAGES
  )
  module = _blocks(sizes, sizes.depth // STAGES)
  examples, device = sizes.microbatches * sizes.batch, torch.device("cpu")
  # Every process draws the batch; only the first stage reads it.
  batch = torch.randn(examples, sizes.length, sizes.width)
  times_by_schedule = {}
  for name, kind in (
    ("GPipe", pipelining.ScheduleGPipe),
    ("1F1B", pipelining.Schedule1F1B),
  ):
    stage = pipelining.PipelineStage(module, sizes.rank, STAGES, device)
    schedule = kind(stage, sizes.microbatches, loss_fn=_loss)

    def once(schedule: Any = schedule) -> None:
      """Runs a batch; a default argument binds this loop's schedule."""
      module.zero_grad()
      # Both barriers: the time is that of the slower stage.
      torch.distributed.barrier()
      if sizes.rank == 0:
        schedule.step(batch)
      else:
        schedule.step(target=batch)
      torch.distributed.barrier()

    times_by_schedule[name] = _times(once, sizes.rounds)
  torch.distributed.destroy_process_group()
  return times_by_schedule


def _free_port() -> int:
  """Returns a port that no program uses now."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return int(free.getsockname()[1])


def main() -> None:
  """Measures one core and two stages; with "rank", runs that stage."""
  arguments = json.loads(sys.argv[1])
  sizes = types.SimpleNamespace(**arguments)
  if "rank" in arguments:
    seconds = _stage(sizes)
    if sizes.rank == 0:
      print(json.dumps(seconds))
    return
  # Before the stages start: they would use its core.
  has_affinity = hasattr(os, "sched_getaffinity")
  cores = os.sched_getaffinity(0) if has_affinity else set()
  one_core = _one_core(sizes)
  if cores:  # the stages need them all again
    os.sched_setaffinity(0, cores)
  arguments["port"], stages = _free_port(), []
  for rank in range(STAGES):
    rank_arguments = json.dumps({**arguments, "rank": rank})
    command = [sys.executable, __file__, rank_arguments]
    output = subprocess.PIPE if rank == 0 else None
    stages.append(subprocess.Popen(command, stdout=output, text=True))
  line, _ = stages[0].communicate()
  if any(stage.wait() for stage in stages):
    sys.exit("a stage has failed")
  print(json.dumps({"one_core": one_core, **json.loads(line)}))


if __name__ == "__main__":
  main()
