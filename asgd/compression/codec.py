"""The contract of codecs, and functions that compose codecs.

A codec turns a tree of float arrays (a gradient, a displacement, a difference
of models) into a code, and the code into a tree again. The code is sent as
packed bytes. Both functions are compiled into a worker's work and a server's
receive.

A code is a tree of arrays of fixed shapes, because compiled programs need them.
It has the same number of elements as the message, but smaller numbers or many
zeros; packing makes it small. `Symbols` and `Values` describe how;
other arrays are sent unchanged.

Index letters used in shape comments:
  L  elements of a leaf
  K  scales of a leaf
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base

Code = Any  # a tree of arrays, Symbols and Values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Symbols:
  """A leaf as small integers. They are packed into few bits each or, if most
  are 0, as positions and values."""

  symbols: jax.Array  # int8, int16 or int32 [L], from -levels to levels
  scales: jax.Array  # float32[K], factors of symbols in `decode`
  levels: int = dataclasses.field(metadata={"static": True})  # 1 or more
  # Whether an entropy code is used for positions, if these are sent.
  coded: bool = dataclasses.field(default=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Values:
  """A leaf of mostly zeros; positions and values of the other elements are
  packed. A -0.0 is sent like a number that is not 0."""

  values: jax.Array  # float[L], of any float dtype
  # See Symbols.
  coded: bool = dataclasses.field(default=True, metadata={"static": True})


# How a codec relates to `error_feedback`.
OPTIONAL = "optional"  # the codec works with and without it
NEEDED = "needed"  # the codec is biased: later messages must send its errors
OWN = "own"  # the codec keeps its errors itself, in a state field `residual`


class Codec(NamedTuple):
  """A smaller form of a message, as pure functions.

  `init` reads shapes and dtypes only. `encode` makes the code of a finite tree
  of the same shapes; it draws random numbers from `key`, the key of the
  worker's job. `decode` needs only the code, and returns the same bits in any
  compiled program.
  """

  init: Callable[[base.Params], Any]  # shapes -> state
  # (state, tree, key) -> (code, state)
  encode: Callable[[Any, optax.Updates, jax.Array], tuple[Code, Any]]
  decode: Callable[[Code], optax.Updates]
  unbiased: bool = False  # whether the mean of decode(encode(x)) over keys is x
  feedback: str = OPTIONAL  # or NEEDED, or OWN
  # (state, residual) -> the part that `error_feedback` keeps; None: all of it
  limit: Callable[[Any, optax.Updates], optax.Updates] | None = None
  # E ||decode(encode(x)) - x||^2 <= (1 - delta) ||x||^2 for each x, if leaves
  # are large and `encode` has no memory; None: no such delta is known
  delta: float | None = None
  # (workers, messages that each sends in an epoch; None: data have no end) ->
  # the codec for such a run; None: the same codec fits all runs
  for_run: Callable[[int, float | None], "Codec"] | None = None


def check_complete(codec: Codec, why: str) -> None:
  """Raises ValueError for a codec that leaves a part of a message for later
  ones, or with errors that may be larger than its input. `why` begins the error
  text."""
  is_coarse = codec.delta is not None and codec.delta <= 0
  if is_coarse or codec.feedback != OPTIONAL:
    raise ValueError(
      f"{why}, and this codec leaves out a part that a later message would have"
      " to add, or its errors may be larger than its input: use bf16"
    )


def fitted(codec: Any, workers: int, epoch: float | None) -> Any:
  """Returns a codec, or a reducer, that fits the size of a run.

  Args:
    codec: a Codec or a Reducer; one without `for_run` is returned unchanged.
    workers: N; the mean is over their messages.
    epoch: messages that each worker sends, on average, in one pass over the
      data; None for data without an end.

  Example:
    >>> from asgd import compression
    >>> codec = compression.clip(compression.dgc(clip_norm=1.0), norm=8.0)
    >>> codec = compression.fitted(codec, workers=4, epoch=100)
    >>> codec.for_run is None
    True
  """
  if codec.for_run is None:
    return codec
  return codec.for_run(workers, epoch)


def fit_then_compose(codec: Codec, compose: Callable[[Codec], Any]) -> Any:
  """Returns the `for_run` of compose(codec): it fits `codec`, then composes."""
  if codec.for_run is None:
    return None
  return lambda *size: compose(fitted(codec, *size))


def identity() -> Codec:
  """The codec that sends the message unchanged.

  Returns:
    A Codec. The code is the message itself.

  Source:
    none.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.identity(), jnp.array([1.0, -2.0])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(codec.decode(code))
    [ 1. -2.]
  """
  return Codec(
    lambda like: (),
    lambda state, tree, key: (tree, state),
    lambda code: code,
    unbiased=True,
    delta=1.0,
  )


class Residual(NamedTuple):
  """State of `error_feedback`."""

  residual: optax.Updates  # like a message: the part not sent yet
  inner: Any  # state of the codec


def error_feedback(codec: Codec) -> Codec:
  """Makes a codec send its errors with later messages.

    sent = codec(message + residual)
    residual <- message + residual - sent

  The residual does not contain the learning rate, so the rate may change
  between messages.

  Args:
    codec: any that does not keep a residual itself.

  Returns:
    A Codec. Its state holds the residual, in the messages' dtypes.

  Raises:
    ValueError: for a codec that keeps a residual itself (`dgc`, `demo`).

  Source:
    Seide et al., "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs", Interspeech 2014.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec = compression.error_feedback(compression.threshold(1.0))
    >>> x, key = jnp.array([1.5, 0.75]), jax.random.key(0)
    >>> code, state = codec.encode(codec.init(x), x, key)
    >>> print(codec.decode(code), state.residual)  # 1.5 - 1 is left
    [1. 0.] [0.5  0.75]
    >>> code, state = codec.encode(state, x, key)
    >>> print(codec.decode(code), state.residual)
    [1. 1.] [1.  0.5]
  """
  if codec.feedback == OWN:
    raise ValueError(
      "the codec already has error feedback: leave error_feedback out"
    )

  def init(like: base.Params) -> Residual:
    return Residual(zeros(like), codec.init(like))

  def encode(state, tree, key):
    total = optax.tree.add(state.residual, tree)
    code, inner = codec.encode(state.inner, total, key)
    # The residual is measured from the decoded numbers, which the server uses.
    residual = optax.tree.sub(total, codec.decode(code))
    if codec.limit is not None:
      residual = codec.limit(inner, residual)
    return code, Residual(residual, inner)

  for_run = fit_then_compose(codec, error_feedback)
  return Codec(init, encode, codec.decode, feedback=OWN, for_run=for_run)


def clip(codec: Codec, norm: float) -> Codec:
  """Clips a message to a global norm before the codec encodes it.

    message <- message min(1, norm / ||message||_2)

  Put it around `error_feedback`. Then the residual of earlier messages is not
  clipped again.

  Args:
    codec: any.
    norm: the largest L2 norm of a message; above 0.

  Returns:
    A Codec.

  Raises:
    ValueError: for a norm that is not above 0.

  Source:
    none.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec = compression.clip(compression.identity(), norm=1.0)
    >>> x = jnp.array([4.0])
    >>> print(codec.encode(codec.init(x), x, jax.random.key(0))[0])
    [1.]
  """
  if not norm > 0:
    raise ValueError(f"norm must be above 0, not {norm}; leave the clip out")

  def encode(state, tree, key):
    return codec.encode(state, clipped(tree, norm), key)

  for_run = fit_then_compose(codec, lambda codec: clip(codec, norm))
  # Clipping shortens messages: their mean is not x, and the codec's delta does
  # not include this error.
  other_fields = {"unbiased": False, "delta": None, "for_run": for_run}
  return codec._replace(encode=encode, **other_fields)


def zeros(like: Any) -> Any:
  """Returns a tree of zeros with the shapes and dtypes of another."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def in_words(codec: Codec) -> Codec:
  """Makes a codec send positions as words of 4 bytes, without an entropy code.

  Messages have more bytes; the decoded values are the same.

  Args:
    codec: any.

  Returns:
    A Codec with the same state.

  Source:
    Strom 2015. Its messages are words of 31 bits of position and one of sign,
    or these words in a Golomb code.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> from asgd.compression import packing
    >>> codec, sizes = compression.top_k(0.001), []
    >>> x = jnp.zeros(10_000).at[::1000].set(1.0)
    >>> for each in codec, compression.in_words(codec):
    ...   code, _ = each.encode(each.init(x), x, jax.random.key(0))
    ...   sizes.append(len(packing.pack(packing.layout(code), code)))
    >>> sizes  # 24 bytes are the header
    [82, 106]
  """

  def is_leaf(node: Any) -> bool:
    return isinstance(node, Symbols | Values)

  def without_coding(node: Any) -> Any:
    if is_leaf(node):
      return dataclasses.replace(node, coded=False)
    return node

  def encode(state, tree, key):
    code, state = codec.encode(state, tree, key)
    return jax.tree.map(without_coding, code, is_leaf=is_leaf), state

  for_run = fit_then_compose(codec, in_words)
  return codec._replace(encode=encode, for_run=for_run)


def power_below(x: jax.Array) -> jax.Array:
  """Returns powers of 2. x divided by them has a magnitude near 1, so sums and
  squares do not overflow.

  Args:
    x: float[...], 0 or more, finite.

  Returns:
    Like x: the largest power of 2 that is at most x. It is limited at both ends
    of the range, so that its inverse is a normal number, too.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd.compression.codec import power_below
    >>> print(power_below(jnp.array([5.0, 0.75])))
    [4.  0.5]
  """
  info = jnp.finfo(x.dtype)
  exponent = jnp.frexp(x)[1] - 1  # frexp: x = m 2^e with m in [0.5, 1)
  exponent = jnp.clip(exponent, info.minexp, info.maxexp - 2)
  return jnp.ldexp(jnp.ones_like(x), exponent)


def clipped(tree: optax.Updates, norm: float) -> optax.Updates:
  """Scales a tree of finite floats down to the global L2 norm `norm` (above 0)
  if its own is larger. Squares that would overflow are handled."""
  leaves = [x for x in jax.tree.leaves(tree) if x.size]
  if not leaves:
    return tree
  wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in leaves]
  # One unit for all leaves, so that their squares can be added.
  unit = power_below(jnp.stack([jnp.abs(x).max() for x in wide]).max())
  squares = [jnp.square(x / unit).sum() for x in wide]
  root = jnp.sqrt(jnp.stack(squares).sum())  # ||tree|| / unit
  # `root` is 1 or more, except for zeros and subnormal numbers: no 0 / 0.
  factor = jnp.minimum(norm / unit / jnp.maximum(root, 1.0), 1.0)
  return jax.tree.map(lambda x: (x * factor).astype(x.dtype), tree)
