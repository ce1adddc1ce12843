"""Norms of trees of any float dtype."""

import jax.numpy as jnp
import pytest

from asgd import norms


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
  "size, value", [(10, 2.0**-14), (10, 512.0), (2**17, 1.0), (2**18, 512.0)]
)
def test_squares_and_counts_need_no_room_in_the_dtype(size, value, dtype):
  tree = {"a": jnp.full(size, value, dtype), "b": jnp.full((), value, dtype)}
  assert norms.rms(tree) == value
