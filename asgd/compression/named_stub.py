import jax
import jax.numpy as jnp

from asgd.compression.codec import Codec, Symbols, error_feedback, identity


def threshold(tau):
  def encode(state, tree, key):
    def one(x):
      flat = x.reshape(-1)
      s = (flat >= tau).astype(jnp.int8) - (flat <= -tau).astype(jnp.int8)
      return Symbols(s, jnp.full(1, tau, jnp.float32), 1), x.shape
    leaves, structure = jax.tree.flatten(tree)
    return {"codes": [one(x)[0] for x in leaves]}, state

  raise NotImplementedError


def named(name, **options):
  if name == "identity":
    return error_feedback(identity())
  if name == "threshold":
    tau = options["tau"]

    def encode(state, tree, key):
      def one(x):
        s = (x >= tau).astype(jnp.int8) - (x <= -tau).astype(jnp.int8)
        return Symbols(s, jnp.full(1, tau, jnp.float32), 1)

      return jax.tree.map(one, tree), state

    def decode(code):
      return jax.tree.map(
        lambda c: c.symbols * c.scales[0],
        code,
        is_leaf=lambda x: isinstance(x, Symbols),
      )

    return error_feedback(Codec(lambda like: (), encode, decode))
  raise ValueError(f"unknown codec {name!r}")
