"""Deep Gradient Compression: top-k with momentum at the worker.

Where elements wait for a long time in a residual, a momentum at the server
would see them late and all at once. So the worker has the momentum, adds up
velocities rather than gradients, and forgets both of what it sent.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks
from asgd.compression import leaves
from asgd.compression.codec import OWN, Code, Codec, Values, clipped, zeros
from asgd.compression.sparse import check_density, count_of, kept, largest

_STAGES = 4  # of a warm-up
_RATIO = 0.25  # of densities of a stage and the one before
_MOST = 2**31 - 1  # messages that are counted


class DGCState(NamedTuple):
  """State of `dgc`."""

  count: jax.Array  # int32[], messages encoded
  velocity: optax.Updates  # u, like a message
  residual: optax.Updates  # v, like a message: what is still to be sent


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
  """Deep Gradient Compression, with a velocity of each worker.

    g <- g min(1, clip_norm N^-1/2 / ||g||_2)   over all leaves
    u <- gamma u + g;   v <- v + u                    (momentum correction)
    u <- gamma (u + g);   v <- v + u + g              for Nesterov's
    sent = v where |v| is among the k largest of its leaf, else 0
    v <- 0, u <- 0 where it was sent                  (factor masking)

  The server makes plain SGD steps, without a momentum. Leaves of one dimension
  or none (biases, gains) are sent whole, as the velocity u (u + g for
  Nesterov's), and have no residual.

  During a warm-up the densities are 1/4, 1/16, 1/64, 1/256, each for a quarter
  of it, and never below `density`: the published sparsity is 75, 93.75,
  98.4375, 99.6 and then 99.9 %, an epoch each.

  A config and the calls of `asgd` give the codec the N and the epoch of their
  run (`fitted`). Elsewhere both are arguments.

  Args:
    density: in (0, 1], of the elements of each leaf.
    momentum: gamma, in [0, 1); 0 is top-k with error feedback.
    nesterov: which of the two forms.
    warm_up: epochs until the final density; 0: none. In messages: warm_up=1
      and epoch=MESSAGES.
    clip_norm: largest norm of the gradient of a whole batch; each worker's is
      clipped to N^-1/2 of it, as if they were independent. None: any.
    workers: N, of which a batch's gradient is the mean; None: those of the run.
    epoch: messages of one worker in a pass over the data; None: those of the
      run.

  Returns:
    A Codec, by leaf. It has error feedback of its own, v.

  Raises:
    ValueError: for a value out of its range; when it encodes, for `workers` or
      `epoch` that it needs and that neither a run nor an argument gave.

  Source:
    Lin et al., "Deep gradient compression: reducing the communication bandwidth
    for distributed training", ICLR 2018, arXiv:1712.01887; their border is
    that of a sample, here it is exact.

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
    checks.whole("workers", workers)
  if epoch is not None:
    checks.positive("epoch", epoch)
  if clip_norm is not None:
    checks.positive("clip_norm", clip_norm)
  densities, starts = _stages(density, warm_up * (epoch or 0))
  missing = _missing(warm_up, clip_norm, workers, epoch)

  def encode(state, tree, key):
    del key
    if missing:
      raise ValueError(f"dgc needs {missing}")
    if clip_norm is not None and workers is not None:
      tree = clipped(tree, clip_norm / workers**0.5)
    grads, structure = jax.tree.flatten(tree)
    stage = (state.count >= jnp.asarray(starts, jnp.int32)).sum()
    old = jax.tree.leaves(state.velocity), jax.tree.leaves(state.residual)
    rows = []
    for g, u, v in zip(grads, *old, strict=True):
      u = momentum * (u + g) if nesterov else momentum * u + g
      out = u + g if nesterov else u
      if g.ndim < 2 or not g.size:  # sent whole
        rows.append((leaves.as_leaf(out.reshape(-1), g), u, v))
        continue
      v = v + out
      counts = [count_of(each, g.size) for each in densities]
      mask = largest(v.reshape(-1), jnp.asarray(counts, jnp.int32)[stage])
      code = leaves.as_leaf(kept(v.reshape(-1), mask), g)
      rest = [jnp.where(mask.reshape(g.shape), 0, x) for x in (u, v)]
      rows.append((code, *rest))
    codes, velocity, residual = (
      structure.unflatten([row[i] for row in rows]) for i in range(3)
    )
    return codes, DGCState(state.count + 1, velocity, residual)

  def for_run(run_workers: int, run_epoch: float | None) -> Codec:
    size = {"workers": workers or run_workers, "epoch": epoch or run_epoch}
    options = {"nesterov": nesterov, "warm_up": warm_up, "clip_norm": clip_norm}
    return dgc(density, momentum=momentum, **options, **size)

  fit = for_run if missing else None
  return Codec(_init, encode, _decode, feedback=OWN, for_run=fit)


def _missing(warm_up, clip_norm, workers, epoch):
  """Returns what has to be known of a run, and is not, in words."""
  words = []
  if clip_norm is not None and workers is None:
    words.append("workers=, whose gradients are averaged, for clip_norm")
  if warm_up and epoch is None:
    words.append(
      "epoch=, the messages of a worker in one pass over the data, or warm_up=0"
    )
  return " and ".join(words)


def _stages(density: float, messages: float) -> tuple[list[float], list[int]]:
  """Returns the densities of a warm-up of so many messages and of what comes
  after it, and the messages from which on each but the first holds."""
  if not messages:
    return [density], []
  densities = [max(_RATIO ** (i + 1), density) for i in range(_STAGES)]
  starts = [math.ceil(messages * (i + 1) / _STAGES) for i in range(_STAGES)]
  return [*densities, density], [min(start, _MOST) for start in starts]


def _init(like: base.Params) -> DGCState:
  leaves.check(like)
  return DGCState(jnp.int32(0), zeros(like), zeros(like))


def _decode(code: Code) -> optax.Updates:
  def one(leaf: leaves.Leaf) -> jax.Array:
    whole = not isinstance(leaf.code, Values)
    return leaf.code if whole else leaf.code.values

  return leaves.decode_all(one, code)
