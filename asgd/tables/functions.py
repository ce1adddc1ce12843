"""Functions at the server: they compute the rows after a push.

`add` adds increments, as Petuum's tables do. `by_row` takes gradients and runs
any optax transform on the pushed rows. Each row has its own state: a row that
no worker pushes keeps its moments, its count and its value.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import checks

ADD, PROXIMAL = "add", "proximal"  # names of functions


class RowFunction(NamedTuple):
  """A pure function at the server, and the state that it keeps for each row.

  `init` returns the state of some rows, a tree of arrays [n, ...]. `apply`
  returns the rows and their states after a push of values.
  """

  init: Callable[[Any], Any]  # rows [n, ...] -> state
  apply: Callable[[Any, Any, Any], tuple[Any, Any]]  # (rows, state, values)
  # Whether `apply` adds the values: a worker then knows the effect of its push.
  additive: bool = False
  name: str = "by_row"  # checked by problems that need a certain function
  # Whether `apply` gets, once per clock, the sum of all workers' values.
  aggregates: bool = False


def add() -> RowFunction:
  """Returns the function that adds pushed values to rows.

  Returns:
    A RowFunction without a state.

  Source:
    Ho et al., "More effective distributed ML via a stale synchronous parallel
    parameter server", NIPS 2013: Inc is the only change of their tables.

  Example:
    >>> from asgd import tables
    >>> tables.functions.add().apply(1.0, (), 0.5)
    (1.5, ())
  """
  return RowFunction(
    lambda rows: (),
    lambda rows, state, values: (rows + values, state),
    additive=True,
    name=ADD,
  )


def bucket(count: int) -> int:
  """Returns the number of rows to which `count` rows are padded for a compiled
  program: the next power of two, at least 8."""
  return 1 << max(count - 1, 7).bit_length()


def padded(rows: Any, count: int) -> Any:
  """Returns rows [n, ...] padded with zeros to [count, ...]."""
  if isinstance(rows, jax.Array):
    return jnp.pad(rows, [(0, count - len(rows))] + [(0, 0)] * (rows.ndim - 1))
  padded_rows = np.zeros((count, *rows.shape[1:]), rows.dtype)
  padded_rows[: len(rows)] = rows
  return padded_rows


def by_row(tx: optax.GradientTransformation) -> RowFunction:
  """Runs an optax transform on the pushed rows, each with its own state.

  The transform is mapped over the rows: it computes counts and norms per row.

  Args:
    tx: any transform of gradients, such as `optax.adagrad(0.1)`.

  Returns:
    A RowFunction that takes gradients.

  Source:
    Li et al., "Scaling distributed machine learning with the parameter
    server", OSDI 2014: user-defined functions at the server.

  Example:
    >>> import numpy as np
    >>> import optax
    >>> from asgd import tables
    >>> table = tables.Table(
    ...   np.ones((3, 2), np.float32), tables.functions.by_row(optax.sgd(0.5))
    ... )
    >>> table.push([1], np.array([[1.0, 2.0]], np.float32))
    >>> table.pull([0, 1]).tolist()
    [[1.0, 1.0], [0.5, 0.0]]
  """

  @jax.jit
  def update(rows, state, values):
    changes, state = jax.vmap(tx.update)(values, state, rows)
    return optax.apply_updates(rows, changes), state

  init = jax.jit(jax.vmap(tx.init))

  def on_padded(function, rows, *others):
    # Padding to a power of two of rows bounds the number of compilations.
    count, size = len(rows), bucket(len(rows))
    trees = jax.tree.map(lambda x: padded(x, size), (rows, *others))
    out = jax.tree.map(lambda x: x[:count], function(*trees))
    if not isinstance(rows, jax.Array):  # a table of NumPy arrays stays so
      out = jax.tree.map(np.array, out)
    return out

  return RowFunction(
    functools.partial(on_padded, init), functools.partial(on_padded, update)
  )


def proximal(
  learning_rate: float = 1.0, *, l1: float, messages: int = 1
) -> RowFunction:
  """Delayed block proximal steps: gradient descent on a block of features, with
  steps divided by the curvature, and an L1 penalty that sets weights to 0.

    g, u = sums of a clock's values / messages
    x = w - a g / u;   w <- sign(x) max(|x| - a l1 / u, 0)

  which minimises g y + (y - w)^2 u / (2 a) + l1 |y|. Rows are (w, u), float[2],
  where u is that of the last step. Values are (g, u). Rows without a pushed
  value, and rows with u = 0, stay as they are.

  Args:
    learning_rate: a, positive; 1 if u bounds the curvature and there is no
      delay. With delay it must be less: at most 1 / (L_var + tau L_cov).
    l1: the penalty of |w|, 0 or more.
    messages: divisor of the sums: the number of messages in a clock, if the
      values of each message are means over its examples.

  Returns:
    A RowFunction that is applied once per clock, to the sum of all workers'
    values.

  Raises:
    ValueError: for a value out of its range.

  Source:
    Li et al., "Communication efficient distributed machine learning with the
    parameter server", NIPS 2014, algorithm 3 and equation 3: the generalized
    proximal operator with a diagonal U.

  Example:
    >>> import numpy as np
    >>> from asgd import tables
    >>> function = tables.functions.proximal(l1=0.5)
    >>> rows, values = np.zeros((2, 2)), np.array([[-3.0, 2.0], [0.4, 1.0]])
    >>> function.apply(rows, (), values)[0].tolist()  # (3 - 0.5) / 2; |g| < l1
    [[1.25, 2.0], [0.0, 1.0]]
  """
  checks.positive("learning_rate", learning_rate)
  checks.nonnegative("l1", l1)
  checks.integer("messages", messages)

  def apply(rows, state, values):
    xp = jnp if isinstance(rows, jax.Array) else np
    w, g, u = rows[:, 0], values[:, 0] / messages, values[:, 1] / messages
    step = learning_rate / xp.where(u > 0, u, 1)
    x = w - step * g
    # + 0.0 removes the sign of zeros, so that equal rows have equal bits.
    new_weights = xp.sign(x) * xp.maximum(xp.abs(x) - step * l1, 0) + 0.0
    new_rows = xp.stack([new_weights, u], 1).astype(rows.dtype)
    return xp.where(u[:, None] > 0, new_rows, rows), state

  return RowFunction(
    lambda rows: (), apply, name=PROXIMAL, aggregates=True
  )


class FtrlState(NamedTuple):
  """State of `ftrl_proximal`."""

  z: optax.Updates  # like the parameters
  squares: optax.Updates  # n, sums of squared gradients


def ftrl_proximal(
  learning_rate: float = 0.1,
  *,
  beta: float = 1.0,
  l1: float = 0.0,
  l2: float = 0.0,
) -> optax.GradientTransformation:
  """FTRL-proximal: an adaptive rate per coordinate, and an L1 penalty.

    s = (sqrt(n + g^2) - sqrt(n)) / a;   n <- n + g^2;   z <- z + g - s w
    w <- 0 if |z| <= l1, else
    w <- -(z - sign(z) l1) / ((beta + sqrt(n)) / a + l2)

  Args:
    learning_rate: a, positive.
    beta: 0 or more; beta and l2 must not both be 0.
    l1: 0 or more.
    l2: 0 or more.

  Returns:
    An optax transform, which needs `params`.

  Raises:
    ValueError: for a value out of its range.

  Source:
    McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013,
    algorithm 1.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import tables
    >>> tx = tables.functions.ftrl_proximal(1.0, beta=1.0, l1=1.0)
    >>> w = jnp.zeros(2)
    >>> change, state = tx.update(jnp.array([3.0, 0.5]), tx.init(w), w)
    >>> print(change)  # (3 - 1) / (1 + 3); of the other |z| is below l1
    [-0.5  0. ]
  """
  checks.positive("learning_rate", learning_rate)
  for name, value in (("beta", beta), ("l1", l1), ("l2", l2)):
    checks.nonnegative(name, value)
  if not beta and not l2:
    raise ValueError(
      "beta and l2 are both 0, so a first gradient of 0 would give 0 / 0: set"
      " one of them above 0"
    )

  def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return FtrlState(zeros, zeros)

  def update_leaf(g, z, n, w):
    new_squares = n + g * g
    z = z + g - (jnp.sqrt(new_squares) - jnp.sqrt(n)) / learning_rate * w
    denominator = (beta + jnp.sqrt(new_squares)) / learning_rate + l2
    new_weights = jnp.where(
      jnp.abs(z) <= l1, 0, -(z - jnp.sign(z) * l1) / denominator
    )
    return new_weights - w, z, new_squares

  def update(updates, state, params=None):
    if params is None:
      raise ValueError("ftrl_proximal needs the parameters: pass params")
    results = jax.tree.map(
      update_leaf, updates, state.z, state.squares, params
    )
    change, z, squares = jax.tree.transpose(
      jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), results
    )
    return change, FtrlState(z, squares)

  return optax.GradientTransformation(init, update)
