"""Asynchronous SGD as a PyTorch loop: a peer for `asgd bench simulator`.

The loop that a researcher writes: one process of one or two threads, whichever
are faster at the model, and a list with a state dict of the sent parameters for
each worker. An event loads the worker's snapshot into the model, computes a
gradient, changes the server's parameters, and replaces the snapshot by a copy
of them. It needs nothing but torch, which may be of another Python:

  python launch/bench/torch_loop.py

reads JSON objects, one a line. {"kind": "mlp" or "cnn", "widths", "shape",
"batch", "rate", "workers", "order": worker of each message} starts a loop;
{"updates": n} makes so many of its updates, which {"seconds": s} answers.
"""

import json
import math
import sys
import time

import torch
from torch import nn

_EXAMPLES, _CLASSES = 2048, 10
_THREADS, _TRIED = (2, 1), 8  # threads, and updates that each is tried with


def _mlp(widths, shape):
  """As `asgd.models.mlp`: hidden layers of these widths."""
  sizes, layers = [math.prod(shape), *widths], [nn.Flatten()]
  for before, after in zip(sizes, sizes[1:], strict=False):
    layers += [nn.Linear(before, after), nn.ReLU()]
  return nn.Sequential(*layers, nn.Linear(sizes[-1], _CLASSES))


def _cnn(widths, shape):
  """As `asgd.models.cnn`: convolutions of all widths but the last, which is of
  the hidden layer; images are channels first, as PyTorch has them."""
  (height, width, before), layers = shape, []
  for features in widths[:-1]:
    layers += [nn.Conv2d(before, features, 3, padding=1), nn.ReLU()]
    layers.append(nn.MaxPool2d(2))
    before, height, width = features, height // 2, width // 2
  dense = _mlp(widths[-1:], (before, height, width))
  return nn.Sequential(*layers, dense)


class SnapshotLoop:
  """A model, the server's parameters, and a snapshot for each worker."""

  def __init__(self, given):
    """Draws parameters and examples; `given` is the first line."""
    torch.manual_seed(0)
    shape, self.is_cnn = given["shape"], given["kind"] == "cnn"
    self.model = (_cnn if self.is_cnn else _mlp)(given["widths"], shape)
    order = [shape[-1], *shape[:-1]] if self.is_cnn else shape
    self.images = torch.randn(_EXAMPLES, *order)
    self.labels = torch.randint(0, _CLASSES, (_EXAMPLES,))
    self.batch_size, self.rate = given["batch"], given["rate"]
    self.order, self.done = given["order"], 0
    self.params = self._copy(self.model.state_dict())
    self.snapshots = [self._copy(self.params) for _ in range(given["workers"])]
    self.losses = []

  def _copy(self, params):
    return {name: value.clone() for name, value in params.items()}

  def _batch(self):
    """The next examples of an epoch in random order."""
    start = self.done * self.batch_size % _EXAMPLES
    if start == 0:
      self.shuffled = torch.randperm(_EXAMPLES)
    index = self.shuffled[start : start + self.batch_size]
    return self.images[index], self.labels[index]

  def run(self, updates):
    """Receives so many messages; returns the seconds."""
    began = time.perf_counter()
    for _ in range(updates):
      worker = self.order[self.done % len(self.order)]
      images, labels = self._batch()
      self.model.load_state_dict(self.snapshots[worker])
      self.model.zero_grad()
      loss = nn.functional.cross_entropy(self.model(images), labels)
      loss.backward()
      with torch.no_grad():
        for name, param in self.model.named_parameters():
          self.params[name] -= self.rate * param.grad
      self.snapshots[worker] = self._copy(self.params)
      self.losses.append(loss.item())
      self.done += 1
    return time.perf_counter() - began

  def choose_threads(self):
    """Uses as many threads as are fastest: small models gain none by a second,
    and lose much while another program has its core."""
    seconds = {}
    for threads in _THREADS:
      torch.set_num_threads(threads)
      self.run(1)
      seconds[threads] = self.run(_TRIED)
    torch.set_num_threads(min(seconds, key=seconds.get))


def main() -> None:
  """Executes the commands of standard input, one a line, until it ends."""
  loop = None
  for line in sys.stdin:
    given = json.loads(line)
    if "updates" in given:
      print(json.dumps({"seconds": loop.run(given["updates"])}), flush=True)
    else:
      loop = SnapshotLoop(given)
      loop.choose_threads()


if __name__ == "__main__":
  main()
