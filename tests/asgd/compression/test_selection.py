"""The threshold is where sorting puts it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd.compression import selection

LENGTH = 12  # of all examples: one program

find = jax.jit(selection.threshold)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
  st.lists(st.integers(0, 2**31 - 2), min_size=LENGTH, max_size=LENGTH)
  | st.lists(st.integers(0, 3), min_size=LENGTH, max_size=LENGTH),
  st.integers(1, LENGTH),
)
def test_k_numbers_reach_the_border_or_the_kth_is_it(numbers, k):
  numbers = np.int32(numbers)
  threshold = int(find(numbers, k))
  kth = np.sort(numbers)[-k]
  assert (numbers >= threshold).sum() == (numbers >= kth).sum()


@pytest.mark.parametrize("k", [1, 100, 69_000])
def test_a_sample_of_many_numbers_misleads_nobody(k):
  """Where its places are the only ones with large numbers, or small ones."""
  spread = np.random.default_rng(0).permutation(70_000).astype(np.int32)
  stride = -(-spread.size // 4096)
  regular = np.arange(spread.size, dtype=np.int32)
  regular[::stride] += 1 << 30
  for numbers in (spread, regular, regular[::-1].copy()):
    reached = (numbers >= int(find(numbers, k))).sum()
    assert reached == k


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_patterns_are_in_the_order_of_magnitudes(dtype):
  with jax.enable_x64(True):
    x = jnp.asarray([0.0, -0.5, 1.0, -3.0, 3.5, 60000.0], dtype)
    numbers = np.asarray(selection.magnitudes(x))
  assert (np.diff(numbers) > 0).all()
  assert numbers[0] == 0
  assert numbers.dtype == (np.int64 if dtype == "float64" else np.int32)
