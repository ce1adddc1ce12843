"""Deep Gradient Compression: top-k with momentum at the worker.

Small elements wait for a long time in a residual; a momentum at the server
would then get them late and all at once. So the worker has the momentum. It
adds up velocities, not gradients, and resets both where an element was sent.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks
from asgd.compression import leaves
from asgd.compression.codec import OWN, Code, Codec, Values, clipped, zeros
from asgd.compression.sparse import check_density, count_of, largest, masked

_STAGES = 4  # number of stages of a warm-up
_DENSITY_RATIO = 0.25  # density of a stage / density of the stage before
_MAX_COUNT = 2**31 - 1  # the message count is an int32


class DGCState(NamedTuple):
  """State of `dgc`."""

  count: jax.Array  # type: ignore[assignment] # int32[], messages encoded
  velocity: optax.Updates  # u, like a message
  residual: optax.Updates  # v, like a message: the part not sent yet


def dgc(
  density: float = 0.001,
  *,
  momentum: float = 0.9,
  nesterov: bool = False,
  warm_up: float = 4.0,
  clip_norm: float | None = None,
  workers: int | None = None,
  epoch: float | None = None,
) -> Codec:
  """Deep Gradient Compression, with a velocity at each worker.

    g <- g min(1, clip_norm N^-1/2 / ||g||_2)   over all leaves
    u <- gamma u + g;   v <- v + u                    (momentum correction)
    u <- gamma (u + g);   v <- v + u + g              for Nesterov's momentum
    sent = v where |v| is among the k largest of its leaf, else 0
    v <- 0, u <- 0 for each element that was sent     (factor masking)

  The server takes plain SGD steps, without a momentum. Leaves of at most one
  dimension (biases, gains) are sent in full, as the velocity u (u + g for
  Nesterov's), and have no residual.

  A warm-up has four stages of equal length, with densities of 1/4, 1/16, 1/64
  and 1/256, but never below `density`. With the defaults these are the
  published sparsities: 75, 93.75, 98.4375, 99.6 and then 99.9 %, an epoch each.

  A config and the calls of `asgd` give the codec the N and the epoch of their
  run (`fitted`). In other code pass both as arguments.

  Args:
    density: the share of each leaf's elements that is sent, in (0, 1].
    momentum: gamma, in [0, 1); with 0 it is top-k with error feedback.
    nesterov: whether the momentum is Nesterov's.
    warm_up: epochs until the final density; 0: none. To give it in messages,
      set warm_up=1 and epoch=MESSAGES.
    clip_norm: largest norm of the gradient of a global batch. Each worker's
      gradient is clipped to clip_norm / sqrt(N), which assumes independent
      gradients. None: no limit.
    workers: N, the number of gradients in a mean; None: the run's workers.
    epoch: messages of one worker in a pass over the data; None: those of the
      run.

  Returns:
    A Codec, by leaf. Its error feedback is v.

  Raises:
    ValueError: for a value out of its range. `encode` raises it if `workers` or
      `epoch` is needed, and neither the run nor the caller gave it.

  Source:
    Lin et al., "Deep gradient compression: reducing the communication bandwidth
    for distributed training", ICLR 2018, arXiv:1712.01887. There the threshold
    comes from a sample; here it is exact.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec = compression.dgc(0.5, momentum=0.5, warm_up=0)
    >>> g, key = jnp.array([[4.0, 1.0]]), jax.random.key(0)
    >>> code, state = codec.encode(codec.init(g), g, key)
    >>> print(codec.decode(code), state.velocity, state.residual)
    [[4. 0.]] [[0. 1.]] [[0. 1.]]
    >>> g = jnp.array([[2.0, 1.0]])
    >>> code, state = codec.encode(state, g, key)  # u = [2, 1.5], v = [2, 2.5]
    >>> print(codec.decode(code))
    [[0.  2.5]]
  """
  check_density(density)
  checks.fraction("momentum", momentum)
  checks.nonnegative("warm_up", warm_up)
  if workers is not None:
    checks.integer("workers", workers)
  if epoch is not None:
    checks.positive("epoch", epoch)
  if clip_norm is not None:
    checks.positive("clip_norm", clip_norm)
  densities, starts = _stages(density, warm_up * (epoch or 0))
  missing_arguments = _missing_arguments(warm_up, clip_norm, workers, epoch)

  def encode(state, tree, key):
    del key
    if missing_arguments:
      raise ValueError(f"dgc needs {missing_arguments}")
    # [0] Local clipping: the sum of N independent gradients of norm c / sqrt(N)
    # has a norm of about c.
    if clip_norm is not None and workers is not None:
      tree = clipped(tree, clip_norm / workers**0.5)
    grads, structure = jax.tree.flatten(tree)
    # How many stages have begun: the index into `densities`.
    stage = (state.count >= jnp.asarray(starts, jnp.int32)).sum()
    velocities = jax.tree.leaves(state.velocity)
    residuals = jax.tree.leaves(state.residual)
    rows: list[Any] = []  # (code, u, v) of each leaf
    for g, u, v in zip(grads, velocities, residuals, strict=True):
      # [1] Momentum correction: accumulate velocities, not gradients.
      u = momentum * (u + g) if nesterov else momentum * u + g
      step = u + g if nesterov else u
      if g.ndim < 2 or not g.size:  # sent in full
        rows.append((leaves.as_leaf(step.reshape(-1), g), u, v))
        continue
      v = v + step
      # [2] Select the largest elements, at the density of the current stage.
      # The counts are constants; only their index is traced.
      counts = [count_of(stage_density, g.size) for stage_density in densities]
      mask = largest(v.reshape(-1), jnp.asarray(counts, jnp.int32)[stage])
      code = leaves.as_leaf(masked(v.reshape(-1), mask), g)
      # [3] Factor masking: forget velocity and residual of sent elements.
      unsent = [jnp.where(mask.reshape(g.shape), 0, x) for x in (u, v)]
      rows.append((code, *unsent))
    codes, velocity, residual = (
      jax.tree.unflatten(structure, [row[i] for row in rows]) for i in range(3)
    )
    return codes, DGCState(state.count + 1, velocity, residual)

  def for_run(run_workers: int, run_epoch: float | None) -> Codec:
    options: Any = {"workers": workers or run_workers}
    options["epoch"] = epoch or run_epoch
    options |= {"nesterov": nesterov, "warm_up": warm_up}
    options["clip_norm"] = clip_norm
    return dgc(density, momentum=momentum, **options)

  fit_to_run = for_run if missing_arguments else None
  return Codec(_init, encode, _decode, feedback=OWN, for_run=fit_to_run)


def _missing_arguments(
  warm_up: float,
  clip_norm: float | None,
  workers: int | None,
  epoch: float | None,
) -> str:
  """Returns a text that lists the missing arguments; "" if none is missing."""
  words = []
  if clip_norm is not None and workers is None:
    words.append("workers=, the number of averaged gradients, for clip_norm")
  if warm_up and epoch is None:
    words.append(
      "epoch=, the messages of a worker in one pass over the data, or warm_up=0"
    )
  return " and ".join(words)


def _stages(density: float, messages: float) -> tuple[list[float], list[int]]:
  """Returns (densities, starts) for a warm-up of `messages` messages.

  The last density is the final one. starts[i] is the message at which
  densities[i + 1] begins."""
  if not messages:
    return [density], []
  densities = [max(_DENSITY_RATIO ** (i + 1), density) for i in range(_STAGES)]
  starts = [math.ceil(messages * (i + 1) / _STAGES) for i in range(_STAGES)]
  return [*densities, density], [min(start, _MAX_COUNT) for start in starts]


def _init(like: base.Params) -> DGCState:
  """Returns the state before the first message."""
  leaves.check(like)
  return DGCState(jnp.int32(0), zeros(like), zeros(like))


def _decode(code: Code) -> optax.Updates:
  """Returns the message of a code; some of its leaves were sent in full."""

  def decode_leaf(leaf: leaves.Leaf) -> jax.Array:
    is_full = not isinstance(leaf.code, Values)
    return leaf.code if is_full else leaf.code.values

  return leaves.decode_all(decode_leaf, code)
