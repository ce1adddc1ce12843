"""The same pipeline in PyTorch: a peer for `asgd bench pipeline`.

Two stages of torch.distributed.pipelining over Gloo, in a process each with one
core and one thread, and the same microbatches in one process with one core. It
needs nothing but torch (2.5 or newer), which may be of another Python:

  python launch/bench/torch_peer.py '{"rounds": 5, "depth": 4, "width": 256,
    "heads": 4, "length": 64, "batch": 8, "microbatches": 8}'

prints a JSON object: seconds of `one_core`, `GPipe` and `1F1B`, a list each.
"""

import json
import os
import socket
import subprocess
import sys
import time
import types

import torch
from torch import nn
from torch.distributed import pipelining

STAGES = 2


class TorchBlock(nn.Module):
  """As `asgd.models.transformer.Block`: [B, T, C] -> the same."""

  def __init__(self, width, heads):
    super().__init__()
    self.heads = heads
    self.norm_attention = nn.LayerNorm(width)
    self.queries = nn.Linear(width, 3 * width)
    self.out = nn.Linear(width, width)
    self.norm_mlp = nn.LayerNorm(width)
    self.up = nn.Linear(width, 4 * width)
    self.down = nn.Linear(4 * width, width)

  def forward(self, x):
    """Applies the block."""
    batch, length, width = x.shape
    shape = batch, length, self.heads, width // self.heads
    q, k, v = (
      part.view(shape).transpose(1, 2)
      for part in self.queries(self.norm_attention(x)).chunk(3, -1)
    )
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
    h = nn.functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
    return x + self.down(h)


def _blocks(sizes, depth):
  torch.manual_seed(0)
  blocks = (TorchBlock(sizes.width, sizes.heads) for _ in range(depth))
  return nn.Sequential(*blocks)


def _loss(y, target):
  del target
  return (y**2).mean()


def _take_core(rank):
  torch.set_num_threads(1)
  if hasattr(os, "sched_setaffinity"):
    here = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {here[rank % len(here)]})


def _times(once, rounds):
  """Seconds of each round; the first is not counted."""
  out = []
  for _ in range(rounds + 1):
    start = time.perf_counter()
    once()
    out.append(time.perf_counter() - start)
  return out[1:]


def _one_core(sizes):
  """Gradients of the microbatches, one after the other."""
  _take_core(0)
  model = _blocks(sizes, sizes.depth)
  x = torch.randn(sizes.batch, sizes.length, sizes.width)

  def once():
    model.zero_grad()
    for _ in range(sizes.microbatches):
      (_loss(model(x), None) / sizes.microbatches).backward()

  return _times(once, sizes.rounds)


def _stage(sizes):
  """One of the two processes; the first one prints."""
  _take_core(sizes.rank)
  os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sizes.port)}
  torch.distributed.init_process_group(
    "gloo", rank=sizes.rank, world_size=STAGES
  )
  module = _blocks(sizes, sizes.depth // STAGES)
  examples, device = sizes.microbatches * sizes.batch, torch.device("cpu")
  whole = torch.randn(examples, sizes.length, sizes.width)
  out = {}
  for name, kind in (
    ("GPipe", pipelining.ScheduleGPipe),
    ("1F1B", pipelining.Schedule1F1B),
  ):
    stage = pipelining.PipelineStage(module, sizes.rank, STAGES, device)
    schedule = kind(stage, sizes.microbatches, loss_fn=_loss)

    def once(schedule=schedule):
      module.zero_grad()
      torch.distributed.barrier()
      if sizes.rank == 0:
        schedule.step(whole)
      else:
        schedule.step(target=whole)
      torch.distributed.barrier()

    out[name] = _times(once, sizes.rounds)
  torch.distributed.destroy_process_group()
  return out


def _free_port():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def main() -> None:
  """Runs both, or is one of the processes."""
  given = json.loads(sys.argv[1])
  sizes = types.SimpleNamespace(**given)
  if "rank" in given:
    seconds = _stage(sizes)
    if sizes.rank == 0:
      print(json.dumps(seconds))
    return
  alone = _one_core(sizes)
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, range(os.cpu_count()))
  given["port"], stages = _free_port(), []
  for rank in range(STAGES):
    command = [sys.executable, __file__, json.dumps({**given, "rank": rank})]
    out = subprocess.PIPE if rank == 0 else None
    stages.append(subprocess.Popen(command, stdout=out, text=True))
  line, _ = stages[0].communicate()
  if any(stage.wait() for stage in stages):
    sys.exit("a stage has failed")
  print(json.dumps({"one_core": alone, **json.loads(line)}))


if __name__ == "__main__":
  main()
