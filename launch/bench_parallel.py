"""The benchmark of synchronous parallelism: what sharing a step out costs.

All on CPU devices of one machine, which share its cores and its memory: devices
add no speed here, so 1.00 of ideal is a step that takes as long as on one
device with the same cores, and what is lost is what sharing costs.

- a data parallel step on two devices, at every stage of ZeRO, against a plain
  jitted optax step on the same batch;
- a tensor parallel MLP on two devices, forward and backward, against the same
  on one;
- gradients reduced layer by layer behind the backward, against all at the end.
  Here 1.00 is all that can be hoped for: nobody has time to hide behind, as the
  cores that add gradients up are those that compute, and XLA's CPU backend
  makes one all-reduce, at the end, of small ones;
- collectives written out, on two and on eight devices, against `jax.lax.psum`:
  with the sum in new memory, and in place (the argument is donated, which
  `psum` is copied for). These run in processes of their own:
    - one as it comes. Large arrays are given back to the system after each
      call, and the next one waits for new pages, which takes longer than to add
      the numbers up;
    - one that keeps the memory it has had, by what glibc reads from the
      environment (MALLOC_MMAP_MAX_ and others). Here times are those of
      messages, and beside them is what `asgd.parallel.costs` says, of a link
      fitted to the ring's times in place at the smallest and the largest size.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from asgd import data, models, problems
from asgd.parallel import collectives, costs, meshes, tensor, wait_free
from asgd.parallel import data as data_parallel
from launch import cli, outputs

_COLLECTIVES = flags.DEFINE_integer(
  "collectives", 0, "Measure collectives for so many rounds; see above."
)
_KEEPS = flags.DEFINE_bool(
  "keeps_memory", False, "The process keeps memory that is freed; see above."
)

_DEVICES = 2
_HIDDEN, _BATCH, _SMALL_BATCH = (512,) * 4, 2048, 256
_WIDTH, _ROWS = 512, 1024  # of the tensor parallel MLP
_SIZES = (1.0, 64.0)  # MB of each device
_CHUNKED = 10**9  # bytes of a bucket that takes all gradients
_KEPT = {  # what has glibc keep memory that is freed
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(2**40),
  "MALLOC_ARENA_MAX": "1",
}

Contestant = Callable[[], object]  # does its work once, to the end


def take_turns(
  contestants: Mapping[str, Contestant], rounds: int, calls: int = 1
) -> dict[str, np.ndarray]:
  """Has contestants work one after the other, round by round.

  Args:
    contestants: by name.
    rounds: that are counted; in one before them programs are compiled.
    calls: of a contestant in a round.

  Returns:
    float64[rounds], seconds of a call, for each.
  """
  seconds = {name: [] for name in contestants}
  for turn in range(rounds + 1):
    for name, once in contestants.items():
      start = time.perf_counter()
      for _ in range(calls):
        once()
      if turn:
        seconds[name].append((time.perf_counter() - start) / calls)
  return {name: np.array(each) for name, each in seconds.items()}


def _cells(ratio):
  return [f"{np.median(ratio):.2f}", f"{ratio.min():.2f}-{ratio.max():.2f}"]


def _compare(seconds):
  """Rows of each against the first: what slows the machine slows both."""
  base = next(iter(seconds.values()))
  return [
    [name, f"{1e3 * np.median(each):.1f}", *_cells(base / each)]
    for name, each in seconds.items()
  ]


_HEADER = ["", "ms", "of ideal", "range"]


# Steps on two devices.


def _problem(hidden, batch_size):
  """An MLP on images of noise."""
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (batch_size, 28, 28, 1), np.uint8)
  labels = rng.integers(0, 10, batch_size, np.int32)
  mean, std = np.float32([128]), np.float32([74])
  dataset = data.Dataset(
    *("random", "drawn here", images, labels, images[:64], labels[:64]),
    *(10, mean, std),
  )
  layers = models.mlp(10, hidden=hidden)
  return problems.classification(dataset, layers, batch_size=batch_size)


def _plain(problem, tx, batch, key) -> Contestant:
  """The step that a user would write for one device."""

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, batch, key):
    gradient = jax.value_and_grad(problem.loss, has_aux=True)
    (loss, _), grads = gradient(params, batch, key)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = problem.init(key)
  state = params, tx.init(params)
  batch = jax.device_put(batch)

  def once():
    nonlocal state
    *state, _ = jax.block_until_ready(step(*state, batch, key))

  return once


def _parallel(problem, tx, mesh, batch, key, zero) -> Contestant:
  made = data_parallel.make_step(problem.loss, tx, mesh, zero=zero)
  state, batch = made.init(problem.init(key)), made.place(batch)

  def once():
    nonlocal state
    state, _ = jax.block_until_ready(made.step(state, batch, key))

  return once


def data_steps(
  hidden: Sequence[int] = _HIDDEN, batch_size: int = _BATCH
) -> dict[str, Contestant]:
  """Returns the step of one device, and those of two at all stages of ZeRO."""
  problem = _problem(hidden, batch_size)
  tx = optax.adam(1e-3)
  batch, key = problem.batches(0, 1)(0, 0), jax.random.key(0)
  mesh = meshes.make({meshes.DATA: _DEVICES})
  return {"one device": _plain(problem, tx, batch, key)} | {
    f"two devices, zero={zero}": _parallel(problem, tx, mesh, batch, key, zero)
    for zero in range(4)
  }


class _Mlp(nn.Module):
  """The MLP of a transformer's block."""

  width: int
  parallel: bool

  @nn.compact
  def __call__(self, x):
    first, second = nn.Dense, nn.Dense
    if self.parallel:
      first, second = tensor.ColumnDense, tensor.RowDense
    x = nn.gelu(first(4 * self.width, name="first")(x))
    return second(self.width, name="second")(x)


def tensor_steps(
  width: int = _WIDTH, rows: int = _ROWS
) -> dict[str, Contestant]:
  """Returns forward and backward of an MLP, on one device and on two."""
  mesh = meshes.make({meshes.TENSOR: _DEVICES})
  x = jax.random.normal(jax.random.key(0), (rows, width))
  params = _Mlp(width, False).init(jax.random.key(1), x)
  column, row = P(None, meshes.TENSOR), P(meshes.TENSOR, None)
  specs = {
    "params": {
      "first": {"kernel": column, "bias": P(meshes.TENSOR)},
      "second": {"kernel": row, "bias": P()},
    }
  }

  def gradient(parallel):
    def loss(params, x):
      return jnp.mean(_Mlp(width, parallel).apply(params, x) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))

  def contestant(step, *args):
    return lambda: jax.block_until_ready(step(*args))

  shared = jax.shard_map(
    gradient(True),
    mesh=mesh,
    in_specs=(specs, P()),
    out_specs=(P(), (specs, P())),
  )
  return {
    "one device": contestant(jax.jit(gradient(False)), params, x),
    "two devices": contestant(
      jax.jit(shared), meshes.place(params, mesh, specs), meshes.place(x, mesh)
    ),
  }


def reductions(
  hidden: Sequence[int] = _HIDDEN, batch_size: int = _SMALL_BATCH
) -> dict[str, Contestant]:
  """Returns gradients that are reduced at the end, and as they are made."""
  problem = _problem(hidden, batch_size)
  mesh = meshes.make({meshes.DATA: _DEVICES})
  key = jax.random.key(0)
  params = meshes.place(problem.init(key), mesh)
  batch = meshes.place_batch(problem.batches(0, 1)(0, 0), mesh)

  def contestant(**options):
    call = wait_free.gradient(problem.pieces, meshes.DATA, **options)
    step = jax.jit(
      jax.shard_map(
        lambda *args: call(*args)[1],
        mesh=mesh,
        in_specs=(P(), P(meshes.DATA), P()),
        out_specs=P(),
        check_vma=False,
      )
    )
    return lambda: jax.block_until_ready(step(params, batch, key))

  return {
    "all at the end": contestant(bucket_bytes=_CHUNKED),
    "wait-free": contestant(),
    "wait-free, ring": contestant(reduce="ring"),
  }


# Collectives.


def _shapes(devices: int) -> dict[str, dict[str, int]]:
  """The mesh of each collective that fits so many devices."""
  shapes = dict.fromkeys(collectives.COLLECTIVES, {"all": devices})
  del shapes["hierarchical"]
  if devices % 2 == 0 and devices > 2:
    shapes["hierarchical"] = {"inside": 2, "between": devices // 2}
  return shapes


def _reductions_of(devices, size) -> dict[tuple[str, bool], Contestant]:
  """Collectives of so many MB a device, by name and whether it is in place."""
  contestants, held = {}, {}
  zeros = np.zeros((devices, max(round(size * 1e6 / 4), 1)), np.float32)

  def contestant(reduce, mesh, in_place):
    spec = P(tuple(mesh.axis_names))
    axis = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]
    call = jax.jit(
      jax.shard_map(
        lambda x: reduce(x[0], axis)[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
      ),
      donate_argnums=0 if in_place else (),
    )
    key = mesh.axis_names, in_place
    if key not in held:
      held[key] = meshes.place(zeros, mesh, spec)

    def once():
      out = jax.block_until_ready(call(held[key]))
      if in_place:  # of zeros, the sum is zeros
        held[key] = out

    return once

  for name, shape in _shapes(devices).items():
    mesh, reduce = meshes.make(shape), collectives.COLLECTIVES[name]
    for in_place in (False, True):
      contestants[name, in_place] = contestant(reduce, mesh, in_place)
  return contestants


def cost(name: str, size: float, devices: int) -> costs.Cost:
  """Returns what a collective costs for so many MB of float32, on one link."""
  bytes_, grain = 4 * round(size * 1e6 / 4), 4
  if name != "hierarchical":
    return costs.COSTS[name](bytes_, devices, grain=grain)
  shape = _shapes(devices)[name]
  return costs.add(*costs.hierarchical(bytes_, *shape.values(), grain=grain))


def fit(
  small: tuple[costs.Cost, float], large: tuple[costs.Cost, float]
) -> costs.Link:
  """Returns the link on which two costs take these seconds.

  Where a larger one takes longer than its share, no latency fits: it is 0 then,
  and the larger one alone is right.
  """
  rounds = [[c.steps, c.bytes] for c, _ in (small, large)]
  latency, inverse = np.linalg.solve(rounds, [t for _, t in (small, large)])
  if latency < 0:
    latency, inverse = 0.0, large[1] / large[0].bytes
  return costs.link(1 / inverse, latency)


class Measured(NamedTuple):
  """A collective's times, one for each round."""

  new: np.ndarray  # float64[rounds], seconds; the sum is in new memory
  in_place: np.ndarray  # float64[rounds], seconds


def measure(
  devices: int, sizes: Sequence[float], rounds: int
) -> dict[tuple[str, float], Measured]:
  """Measures all collectives, by name and MB of a device."""
  found = {}
  for size in sizes:
    contestants = _reductions_of(devices, size)
    # A small one is over before a clock is sure of it.
    calls = 8 if size < 8 else 1
    seconds = take_turns(contestants, rounds, calls)
    for name in _shapes(devices):
      found[name, size] = Measured(seconds[name, False], seconds[name, True])
  return found


def tabulate(
  found: Mapping[tuple[str, float], Measured],
  devices: int,
  link: costs.Link | None = None,
) -> str:
  """Returns a table of what `measure` has found, and what a link would do."""
  header = ["devices", "MB", "collective", "ms", "x psum", "range"]
  header += ["in place", "x psum", "range"]
  header += ["model", "of measured"] if link is not None else []
  rows = []
  for (name, size), times in found.items():
    row = [str(devices), f"{size:g}", name]
    for each, base in zip(times, found["psum", size], strict=True):
      row += [f"{1e3 * np.median(each):.2f}", *_cells(each / base)]
    if link is not None and name == "psum":
      row += ["", ""]
    elif link is not None:
      said = costs.seconds(cost(name, size, devices), link)
      row.append(f"{1e3 * said:.2f}")
      row.append(f"{said / np.median(times.in_place):.2f}")
    rows.append(row)
  return outputs.format_table(header, rows)


def _measure_collectives(rounds, keeps_memory):
  """All of it in this process."""
  for devices in (2, 8):
    sizes = _SIZES if keeps_memory else _SIZES[-1:]
    found = measure(devices, sizes, rounds)
    if not keeps_memory:
      print(tabulate(found, devices), flush=True)
      continue
    ring = [
      (cost("ring", x, devices), float(np.median(found["ring", x].in_place)))
      for x in sizes
    ]
    link = fit(ring[0], ring[-1])
    print(tabulate(found, devices, link), end="")
    print(
      f"model: {link.bandwidth / 1e9:.2f} GB/s each way, and"
      f" {1e6 * link.latency:.0f} us a message\n",
      flush=True,
    )


def run(rounds: int) -> None:
  """Runs all of it.

  Raises:
    ValueError: for rounds that are not positive.
  """
  if rounds < 1:
    raise ValueError(f"--rounds must be positive, not {rounds}")
  jax.config.update("jax_num_cpu_devices", _DEVICES)
  load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
  print(f"{os.cpu_count()} cores, load {load:.1f} before it begins\n")
  parts = (
    (f"data parallel: MLP of {_HIDDEN}, Adam, batch {_BATCH}", data_steps),
    (f"tensor parallel: MLP {_WIDTH}-{4 * _WIDTH}, {_ROWS} rows", tensor_steps),
    (f"reducing gradients: MLP of {_HIDDEN}, batch {_SMALL_BATCH}", reductions),
  )
  for title, make in parts:
    print(title)
    rows = _compare(take_turns(make(), rounds, calls=3))
    print(outputs.format_table(_HEADER, rows), flush=True)
  command = [sys.executable, "-m", "launch.bench_parallel"]
  command.append(f"--collectives={rounds}")
  print("collectives", flush=True)
  subprocess.run(command, check=True)
  print("collectives, in a process that keeps its memory", flush=True)
  command.append("--keeps_memory")
  subprocess.run(command, env={**os.environ, **_KEPT}, check=True)


def main() -> None:
  """Is the process that measures collectives."""
  if _COLLECTIVES.value < 1:
    raise ValueError("use `python -m launch.bench parallel`")
  jax.config.update("jax_num_cpu_devices", 8)
  _measure_collectives(_COLLECTIVES.value, _KEEPS.value)


if __name__ == "__main__":
  cli.run(main)
