"""A model with a leaf for each codec, so that one run is of all of them."""

import jax
import jax.numpy as jnp
import numpy as np

from asgd import compression

OPTIONS = {
  "threshold": {"tau": 0.05},
  "adaptive_threshold": {"tau": 0.05},
  "top_k": {"density": 0.2},
  "dgc": {"density": 0.2, "warm_up": 0},
  "random_k": {"density": 0.5},
  "qsgd": {"levels": 3},
  "powersgd": {"rank": 2},
}
# Codecs of one's own have a leaf each: those of CODECS, by their names.
CODECS = {
  name: compression.named(name, **OPTIONS.get(name, {}))
  for name in compression.CODECS
}
PARAMS = {name: np.zeros((4, 6), np.float32) for name in CODECS}


def every_codec():
  """Returns a codec that has each leaf of PARAMS encoded by its own."""

  def init(like):
    return {name: CODECS[name].init(x) for name, x in like.items()}

  def encode(state, tree, key):
    out = {name: CODECS[name].encode(state[name], tree[name], key)
      for name in tree}
    codes, states = ({n: x[i] for n, x in out.items()} for i in range(2))
    return codes, states

  def decode(code):
    return {name: CODECS[name].decode(x) for name, x in code.items()}

  return compression.Codec(init, encode, decode)


def halves():
  """A codec of one's own that decodes half of a message."""
  return compression.identity()._replace(decode=lambda code: code[:1])


def loss(params, x):
  """A quadratic, of which each leaf has the same."""
  distances = [(w - x) ** 2 for w in params.values()]
  return 0.5 * jnp.mean(sum(distances))


def batch(worker, job):
  """Returns float32[4, 6]: where a job pulls."""
  rng = np.random.default_rng((worker, job))
  return rng.normal(1.0, 0.1, (4, 6)).astype(np.float32)


ROOT = jax.random.key(0)
