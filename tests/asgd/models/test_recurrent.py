"""The LSTM against its equations, and what every model promises."""

import jax
import kit
import numpy as np

from asgd import models

TOKENS, WIDTH = 7, 5
EXAMPLE = jax.ShapeDtypeStruct((1, 6), np.int32)


def make(**options):
  layers = models.build("lstm", TOKENS, width=WIDTH, **options)
  return layers, models.init(layers, jax.random.key(0), EXAMPLE)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def by_equations(params, x):
  """The LSTM of Hochreiter and Schmidhuber with forget gates, in NumPy.

    i, f, o = sigmoid(W x + U h + b),   g = tanh(W x + U h + b)
    c <- f c + i g;   h <- o tanh(c)
  """
  embed, recurrent, last = params
  x = np.asarray(embed["tokens"])[x]
  (cell,) = (
    p for p in jax.tree.leaves(recurrent, is_leaf=lambda p: "hi" in p)
  )

  def gate(name, x, h):
    inward, hidden = cell[f"i{name}"]["kernel"], cell[f"h{name}"]
    return x @ inward + h @ hidden["kernel"] + hidden["bias"]

  h = c = np.zeros((len(x), WIDTH))
  outputs = []
  for t in range(x.shape[1]):
    i, f, o = (sigmoid(gate(name, x[:, t], h)) for name in "ifo")
    c = f * c + i * np.tanh(gate("g", x[:, t], h))
    h = o * np.tanh(c)
    outputs.append(h)
  (dense,) = last.values()
  return np.stack(outputs, 1) @ dense["kernel"] + dense["bias"]


def test_it_follows_its_equations():
  layers, params = make()
  x = np.random.default_rng(0).integers(0, TOKENS, (3, 6), np.int32)
  found, _ = models.apply(layers, params, x)
  expected = by_equations(jax.device_get(params), x)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_it_has_the_parameters_of_eight_matrices():
  _, params = make(depth=2)
  lstm = 8 * WIDTH**2 + 4 * WIDTH
  assert [models.count(layer) for layer in params] == [
    *(TOKENS * WIDTH, lstm, lstm, (WIDTH + 1) * TOKENS)
  ]


test_mistakes_are_refused = kit.refuses(
  [
    ({"depth": 0}, "depth must be a positive whole number, not 0"),
    ({"width": True}, "width must be a positive whole number, not True"),
    ({"dropout": 1.0}, "dropout must be in"),
    ({"widht": 3}, "did you mean 'width'"),
  ],
  lambda options: models.build("lstm", TOKENS, **options),
)


