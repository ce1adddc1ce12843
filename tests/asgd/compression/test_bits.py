"""A worker keeps exactly what a server does not get, though their programs are
compiled apart, by a compiler that joins products and sums."""

import jax
import kit
import ml_dtypes
import numpy as np
import pytest

from asgd import compression
from asgd.compression import codec as codec_lib

# One for each way to decode; others copy, or multiply by 1.
CODECS = {
  "threshold": {"tau": 0.3},  # rounded to bfloat16
  "onebit": {},
  "qsgd": {"levels": 7, "bucket": 64},
  "int8": {},
  "e3m0": {},
  "bf16": {},
  "powersgd": {"rank": 3},
  "demo": {"decay": 1.0},
}


@pytest.mark.parametrize("name", CODECS)
def test_a_server_decodes_what_the_worker_took_off(name):
  codec = compression.named(name, **CODECS[name])
  if codec.feedback != codec_lib.OWN:
    codec = codec_lib.error_feedback(codec)
  tree = {
    "float32": np.float32(kit.normal(64, 48)),
    "bfloat16": kit.normal(32, 16).astype(ml_dtypes.bfloat16),
  }
  key = jax.random.key(0)
  code, state = jax.jit(codec.encode)(codec.init(tree), tree, key)
  sent = jax.jit(codec.decode)(code)
  kit.same(state.residual, jax.tree.map(lambda a, b: a - b, tree, sent))
