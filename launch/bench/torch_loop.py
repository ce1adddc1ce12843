"""Asynchronous SGD as a PyTorch loop: a peer for `asgd bench simulator`.

The loop that a researcher writes: one process of one or two threads, whichever
are faster at the model, and for each worker a snapshot, a state dict of the
sent parameters. An event loads the worker's snapshot into the model, computes a
gradient, changes the server's parameters, and replaces the snapshot by a copy
of them. The loop needs only torch, which may belong to another Python:

  python launch/bench/torch_loop.py

reads JSON objects, one per line. {"kind": "mlp" or "cnn", "widths", "shape",
"batch", "rate", "workers", "order": worker of each message} starts a loop, and
prints {"threads": n} when their number is chosen; {"updates": n} makes n of its
updates, and prints {"seconds": s}.
"""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_EXAMPLES, _CLASSES = 2048, 10  # as the simulator's
_THREADS = 2, 1  # numbers of threads to try
_TRIAL_UPDATES = 8  # updates with each number of threads


def _mlp(widths: list[int], shape: Sequence[int]) -> nn.Sequential:
  """Returns hidden layers of these widths, as `asgd.models.mlp` does."""
  sizes, layers = [math.prod(shape), *widths], [nn.Flatten()]
  for inputs, outputs in zip(sizes, sizes[1:], strict=False):
    layers += [nn.Linear(inputs, outputs), nn.ReLU()]
  return nn.Sequential(*layers, nn.Linear(sizes[-1], _CLASSES))


def _cnn(widths: list[int], shape: Sequence[int]) -> nn.Sequential:
  """Returns convolutions of all widths but the last, and a hidden layer of the
  last, as `asgd.models.cnn` does. Images are channels first, as in PyTorch."""
  (height, width, channels), layers = shape, []
  for features in widths[:-1]:
    layers += [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU()]
    layers.append(nn.MaxPool2d(2))
    # Pooling halves both sides.
    channels, height, width = features, height // 2, width // 2
  dense = _mlp(widths[-1:], (channels, height, width))
  return nn.Sequential(*layers, dense)


class SnapshotLoop:
  """A model, the server's parameters, and a snapshot for each worker."""

  def __init__(self, settings: Mapping[str, Any]) -> None:
    """Draws parameters and examples; `settings` are the first line."""
    torch.manual_seed(0)
    shape, self.is_cnn = settings["shape"], settings["kind"] == "cnn"
    self.model = (_cnn if self.is_cnn else _mlp)(settings["widths"], shape)
    order = [shape[-1], *shape[:-1]] if self.is_cnn else shape  # channels first
    self.images = torch.randn(_EXAMPLES, *order)
    self.labels = torch.randint(0, _CLASSES, (_EXAMPLES,))
    self.batch_size, self.rate = settings["batch"], settings["rate"]
    self.order, self.n_done = settings["order"], 0
    self.params = self._copy(self.model.state_dict())
    workers = range(settings["workers"])
    self.snapshots = [self._copy(self.params) for _ in workers]
    self.losses: list[float] = []

  def _copy(self, params: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns a copy of parameters, which later updates do not change."""
    return {name: value.clone() for name, value in params.items()}

  def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the next (images, labels) of an epoch in random order."""
    start = self.n_done * self.batch_size % _EXAMPLES
    if start == 0:
      self.shuffled = torch.randperm(_EXAMPLES)
    index = self.shuffled[start : start + self.batch_size]
    return self.images[index], self.labels[index]

  def run(self, updates: int) -> float:
    """Makes so many updates; returns the seconds."""
    start_time = time.perf_counter()
    for _ in range(updates):
      worker = self.order[self.n_done % len(self.order)]
      images, labels = self._batch()
      # [1] The worker's ticket. [2] Its gradient. [3] The server's update. [4]
      # The next ticket.
      self.model.load_state_dict(self.snapshots[worker])
      self.model.zero_grad()
      loss = nn.functional.cross_entropy(self.model(images), labels)
      loss.backward()
      with torch.no_grad():
        for name, param in self.model.named_parameters():
          self.params[name] -= self.rate * param.grad
      self.snapshots[worker] = self._copy(self.params)
      self.losses.append(loss.item())
      self.n_done += 1
    return time.perf_counter() - start_time

  def choose_threads(self) -> None:
    """Uses the fastest number of threads. Small models gain nothing from a
    second thread, and lose much while another program has its core."""
    seconds = {}
    for threads in _THREADS:
      torch.set_num_threads(threads)
      self.run(1)  # warms up
      seconds[threads] = self.run(_TRIAL_UPDATES)
    torch.set_num_threads(min(seconds, key=lambda count: seconds[count]))


def main() -> None:
  """Executes the commands of standard input, one per line, until it ends."""
  loop: Any = None  # a SnapshotLoop, after the first line
  for line in sys.stdin:
    command = json.loads(line)
    if "updates" in command:
      print(json.dumps({"seconds": loop.run(command["updates"])}), flush=True)
    else:
      loop = SnapshotLoop(command)
      loop.choose_threads()
      print(json.dumps({"threads": torch.get_num_threads()}), flush=True)


if __name__ == "__main__":
  main()
