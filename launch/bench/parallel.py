"""The benchmark of synchronous parallelism: the cost of dividing a step.

All devices are CPU devices of one machine, which share its cores and its
memory. So devices add no speed here. A ratio of 1.00 is a step that takes as
long as on one device with the same cores; a step that takes longer shows the
cost of dividing it.

- a data parallel step on two devices, at every stage of ZeRO, against a plain
  jitted optax step on the same batch;
- a tensor parallel MLP on two devices, forward and backward, against the same
  MLP on one;
- gradients reduced layer by layer during the backward, against all at the end.
  Here 1.00 is the best possible: the same cores compute and add gradients up,
  so no time can be hidden. XLA's CPU backend also combines small all-reduces
  into one at the end;
- explicit collectives, on two and on eight devices, against `jax.lax.psum`:
  with the sum in new memory, and in place (the argument is donated; XLA copies
  it for `psum`). Two processes measure them:
    - one measures only the ring, with default settings. glibc then returns the
      memory of large arrays to the system after each call, and the next call
      waits for new pages, which takes longer than the addition;
    - one measures all, and keeps freed memory by variables that glibc reads
      (MALLOC_MMAP_MAX_ and others). Its times are those of messages. Beside
      them are the times by `asgd.parallel.costs`, for a link fitted to the
      ring's times in place at the smallest and the largest size.
"""

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from asgd import models, problems
from asgd.parallel import collectives, costs, data_parallel, meshes, wait_free
from asgd.parallel.tensor import column_dense, row_dense

from . import turns
from .report import BenchReport, Measured
from .turns import Contestant

_DEVICES = 2  # as many as cores
# Hidden layers, batch of the data parallel steps, batch of the reductions.
_HIDDEN, _BATCH, _SMALL_BATCH = (512,) * 4, 2048, 256
_WIDTH, _ROWS = 512, 1024  # of the tensor parallel MLP
_SMALL_MB, _LARGE_MB = 1.0, 64.0  # MB of each device
_TARGETS = "<= 1.3", "<= 1.1"  # ring's time over psum's: new memory, in place
_ALL_IN_ONE_BUCKET = 10**9  # bytes of a bucket that takes all gradients
# glibc then keeps freed memory: no mmap, no trimming, and one arena.
_KEEP_MEMORY = {
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(2**40),
  "MALLOC_ARENA_MAX": "1",
}


def _image_mlp(batch_size: int) -> problems.Problem:
  """Returns the MLP on images."""
  layers = models.mlp(10, hidden=_HIDDEN)
  return turns.image_problem(layers, batch_size, batch_size)


def data_steps() -> dict[str, Contestant]:
  """Returns the step on one device, and on two at each stage of ZeRO."""
  problem = _image_mlp(_BATCH)
  tx = optax.adam(1e-3)
  batch, key = problem.batches(0, 1)(0, 0), jax.random.key(0)
  mesh = meshes.make({meshes.DATA: _DEVICES})
  # Copied to the device once; a step reads them from there.
  params, batch_on_device = problem.init(key), jax.device_put(batch)
  plain = turns.plain_step(problem, tx)

  def make_shared_step(zero: int) -> Contestant:
    """Returns the step of two devices at a stage of ZeRO."""
    step = data_parallel.make_step(problem.loss, tx, mesh, zero=zero)
    # Each device has half of the batch.
    placed_batch = step.place(batch)
    return turns.repeated(
      lambda state: step.step(state, placed_batch, key)[0], step.init(params)
    )

  one_device_step = turns.repeated(
    lambda state: plain(*state, batch_on_device, key)[:2],
    (params, tx.init(params)),
  )
  steps = {
    f"two devices, zero={zero}": make_shared_step(zero) for zero in range(4)
  }
  return {"one device": one_device_step, **steps}


class _Mlp(nn.Module):
  """The MLP of a transformer's block."""

  width: int
  parallel: bool

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies both layers to x, float[rows, width]."""
    first: Callable[..., nn.Dense] = nn.Dense
    second: Callable[..., nn.Dense] = nn.Dense
    if self.parallel:
      first, second = column_dense, row_dense
    x = nn.gelu(first(4 * self.width, name="first")(x))
    return second(self.width, name="second")(x)


def tensor_steps(
  width: int = _WIDTH, rows: int = _ROWS
) -> dict[str, Contestant]:
  """Returns forward and backward passes of an MLP, on one device and on two."""
  mesh = meshes.make({meshes.TENSOR: _DEVICES})
  x = jax.random.normal(jax.random.key(0), (rows, width))
  params = _Mlp(width, False).init(jax.random.key(1), x)
  # Columns of the first matrix and rows of the second: one sum at the end.
  first = {"kernel": P(None, meshes.TENSOR), "bias": P(meshes.TENSOR)}
  second = {"kernel": P(meshes.TENSOR, None), "bias": P()}
  specs = {"params": {"first": first, "second": second}}

  def gradient(parallel: bool) -> Callable[..., Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
      output: Any = _Mlp(width, parallel).apply(params, x)
      return jnp.mean(output**2)

    return jax.value_and_grad(loss, argnums=(0, 1))

  shared = jax.shard_map(
    gradient(True),
    mesh=mesh,
    in_specs=(specs, P()),
    out_specs=(P(), (specs, P())),
  )
  placed = meshes.place(params, mesh, specs), meshes.place(x, mesh)
  return {
    "one device": turns.fixed_call(jax.jit(gradient(False)), params, x),
    "two devices": turns.fixed_call(jax.jit(shared), *placed),
  }


def reductions() -> dict[str, Contestant]:
  """Returns gradients that are reduced at the end, and layer by layer."""
  problem = _image_mlp(_SMALL_BATCH)
  mesh = meshes.make({meshes.DATA: _DEVICES})
  key = jax.random.key(0)
  params = meshes.place(problem.init(key), mesh)
  batch = meshes.place_batch(problem.batches(0, 1)(0, 0), mesh)

  def contestant(**options: Any) -> Contestant:
    """Returns the step with `options` of `wait_free.gradient`."""
    assert problem.pieces is not None  # an MLP has layers
    call = wait_free.gradient(problem.pieces, meshes.DATA, **options)
    step = jax.shard_map(
      lambda *args: call(*args)[1],
      mesh=mesh,
      in_specs=(P(), P(meshes.DATA), P()),
      out_specs=P(),
      check_vma=False,  # JAX cannot check the ring's replication
    )
    return turns.fixed_call(jax.jit(step), params, batch, key)

  return {
    "all at the end": contestant(bucket_bytes=_ALL_IN_ONE_BUCKET),
    "wait-free": contestant(),
    "wait-free, ring": contestant(reduce="ring"),
  }


def shapes(devices: int) -> dict[str, dict[str, int]]:
  """Returns collective -> mesh (axis -> size), for those that run on so many
  devices."""
  meshes_of = dict.fromkeys(collectives.COLLECTIVES, {"all": devices})
  # `hierarchical` needs two axes: nodes of two devices.
  del meshes_of["hierarchical"]
  if devices % 2 == 0 and devices > 2:
    meshes_of["hierarchical"] = {"inside": 2, "between": devices // 2}
  return meshes_of


def _make_sums(
  name: str, devices: int, size: float
) -> tuple[Contestant, Contestant]:
  """Returns contestants that run a collective of `size` MB per device: with the
  sum in new memory, and in place."""
  mesh, reduce = meshes.make(shapes(devices)[name]), collectives.lookup(name)
  spec = P(tuple(mesh.axis_names))
  axis = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]
  # A row for each device, in float32.
  zeros = np.zeros((devices, max(round(size * 1e6 / 4), 1)), np.float32)
  call = jax.shard_map(
    lambda x: reduce(x[0], axis)[None],
    mesh=mesh,
    in_specs=spec,
    out_specs=spec,
    check_vma=False,
  )
  # The second takes the memory of its argument for the sum.
  new, in_place = jax.jit(call), jax.jit(call, donate_argnums=0)
  # The sum of zeros is zeros, so repeated calls do not overflow.
  # Two arrays, because the second is donated.
  argument, donated_argument = (
    meshes.place(zeros, mesh, spec) for _ in range(2)
  )
  updated = turns.repeated(in_place, donated_argument)
  return turns.fixed_call(new, argument), updated


def cost(name: str, size: float, devices: int) -> costs.Cost:
  """Returns the cost of a collective on `size` MB of float32, on one link."""
  nbytes, shape = 4 * round(size * 1e6 / 4), shapes(devices)[name]
  if name == "hierarchical":
    return costs.add(*costs.hierarchical(nbytes, *shape.values(), grain=4))
  return costs.COSTS[name](nbytes, devices, grain=4)


def fit(
  small: tuple[costs.Cost, float], large: tuple[costs.Cost, float]
) -> costs.LinkSpeed:
  """Returns the link on which two costs take their seconds; each argument is
  (cost, seconds). If that link has a negative latency or bandwidth, the latency
  is 0, and the link fits the larger cost alone."""
  # steps x latency + bytes x (1 / bandwidth) = seconds, for both.
  coefficients = [[c.steps, c.bytes] for c, _ in (small, large)]
  latency, seconds_per_byte = np.linalg.solve(
    coefficients, [t for _, t in (small, large)]
  )
  if latency < 0 or seconds_per_byte <= 0:
    latency, seconds_per_byte = 0.0, large[1] / large[0].bytes
  return costs.link(1 / seconds_per_byte, latency)


def measure(
  name: str, devices: int, size: float, rounds: int
) -> npt.NDArray[np.float64]:
  """Measures a collective of `size` MB per device, in turns with psum.

  Returns:
    float64[2, 2, rounds]: seconds of the collective and of psum, each with the
    sum in new memory and in place.
  """
  sums: tuple[Contestant, ...] = _make_sums(name, devices, size)
  if name != "psum":
    sums += _make_sums("psum", devices, size)
  # The clock is too coarse for one call of a small collective.
  calls = 8 if size < 8 else 1
  contestants = {str(i): contestant for i, contestant in enumerate(sums)}
  seconds = list(turns.take_turns(contestants, rounds, calls).values())
  # psum has two contestants only, which are then both halves.
  return np.stack([seconds[:2], seconds[-2:]])


def cells(
  name: str,
  devices: int,
  size: float,
  times: npt.NDArray[np.float64],
  link: costs.LinkSpeed | None = None,
) -> list[float | None | Measured]:
  """Returns the cells of a row, from the times of `measure`.

  The cells are the milliseconds in new memory and in place; with a link, those
  of the model and their ratio to the measured ones; and the ratios to psum.
  """
  milliseconds = [
    1e3 * float(np.median(one_form_times)) for one_form_times in times[0]
  ]
  if name == "psum":  # the baseline of the others
    # Its ratios to itself are left empty.
    return [*milliseconds, *[None] * (2 if link is None else 4)]
  # Only large rings have targets: latency dominates the time of small ones.
  targets = _TARGETS if (name, size) == ("ring", _LARGE_MB) else ("", "")
  ratios = map(Measured, times[0] / times[1], targets)
  if link is None:
    return [*milliseconds, *ratios]
  model = 1e3 * costs.seconds(cost(name, size, devices), link)
  return [*milliseconds, model, model / milliseconds[1], *ratios]


def _measure_collectives(
  report: BenchReport, rounds: int, keeps_memory: bool
) -> None:
  """Measures all collectives in this process."""
  values = {"ms": ".2f", "ms in place": ".2f"}
  if keeps_memory:
    values |= {"model ms": ".2f", "model / measured": ".2f"}
  title_end = ", with glibc set to keep freed memory" if keeps_memory else ""
  for devices in (2, 8):
    sizes, collective_names = [_LARGE_MB], ["psum", "ring"]
    link = None
    rings: dict[float, npt.NDArray[np.float64]] = {}  # MB -> times of the ring
    if keeps_memory:
      # The link is fitted to the ring, so rings are measured first.
      sizes, collective_names = [_SMALL_MB, _LARGE_MB], list(shapes(devices))
      fit_points = []
      for size in sizes:
        rings[size] = measure("ring", devices, size, rounds)
        seconds = float(np.median(rings[size][0, 1]))
        fit_points.append((cost("ring", size, devices), seconds))
      link = fit(*fit_points)
      print(
        f"\nmodel: {link.bandwidth / 1e9:.2f} GB/s each way, and"
        f" {1e6 * link.latency:.0f} us a message",
        flush=True,
      )
    table = report.table(
      f"collectives of {devices} devices{title_end}",
      "collective, MB",
      values,
      {"time / psum": ".2f", "in place: time / psum": ".2f"},
    )
    for size, name in itertools.product(sizes, collective_names):
      is_measured = name == "ring" and size in rings
      times = (
        rings[size] if is_measured else measure(name, devices, size, rounds)
      )
      row = cells(name, devices, size, times, link)
      table.row(f"{name}, {size:g} MB", *row)


def run(report: BenchReport, rounds: int = 3) -> None:
  """Prints steps on two devices against one, and collectives against psum."""
  jax.config.update("jax_num_cpu_devices", _DEVICES)
  parts = (
    (f"data parallel: MLP of {_HIDDEN}, Adam, batch {_BATCH}", data_steps),
    (f"tensor parallel: MLP {_WIDTH}-{4 * _WIDTH}, {_ROWS} rows", tensor_steps),
    (f"reducing gradients: MLP of {_HIDDEN}, batch {_SMALL_BATCH}", reductions),
  )
  for title, make_contestants in parts:
    # The first is the baseline of the others.
    (base_name, baseline), *variants = make_contestants().items()
    contestants = {
      name: lambda contestant=contestant: contestant
      for name, contestant in variants
    }
    table = report.table(
      title,
      f"against {base_name}",
      {"ms": ".1f"},
      {f"speed / {base_name}": ".2f"},
    )
    for name, base_seconds, seconds in turns.against(
      baseline, contestants, rounds, calls=3
    ):
      ms = 1e3 * float(np.median(seconds))
      table.row(name, ms, Measured(base_seconds / seconds))
  command = [sys.executable, "-m", f"{__package__}.parallel", str(rounds)]
  # glibc reads its variables when a process starts.
  for environment in ({}, _KEEP_MEMORY):
    report.add_from(command, {**os.environ, **environment})


if __name__ == "__main__":  # the process that measures collectives
  jax.config.update("jax_num_cpu_devices", 8)
  child = BenchReport()
  keeps_memory = _KEEP_MEMORY.items() <= os.environ.items()
  _measure_collectives(child, int(sys.argv[1]), keeps_memory)
  child.save(sys.argv[2])
