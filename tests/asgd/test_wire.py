"""Trees as bytes: places, round trips, rounding, and what is refused."""


import jax
import jax.numpy as jnp
import kit
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import base, wire

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TREE = {
  "w": np.arange(6, dtype=np.float32).reshape(2, 3),
  "b": [np.float64(0.5), np.zeros((0, 3), np.float32)],
  "n": (np.arange(17, dtype=np.int8), np.array([True, False])),
}


def buffer_of(layout):
  return np.zeros(layout.nbytes, np.uint8)


def test_leaves_lie_one_after_the_other_at_multiples_of_64_bytes():
  layout = wire.layout(TREE)
  places = {f.path: (f.offset, f.stop) for f in layout.fields}
  assert places == {
    "['b'][0]": (0, 8),
    "['b'][1]": (64, 64),  # empty
    "['n'][0]": (64, 81),
    "['n'][1]": (128, 130),
    "['w']": (192, 216),
  }
  assert layout.nbytes == 256


def test_what_is_written_is_read():
  layout = wire.layout(TREE)
  buffer = buffer_of(layout)
  wire.write(layout, TREE, buffer)
  kit.same_bits(wire.read(layout, buffer), jax.tree.map(np.asarray, TREE))


DTYPES = ("float32", "float16", "bfloat16", "int32", "uint8", "bool", "int4")
leaves = st.builds(
  lambda shape, dtype, seed: (
    np.random.default_rng(seed).normal(size=shape).astype(np.dtype(dtype))
  ),
  st.lists(st.integers(0, 4), max_size=3).map(tuple),
  st.sampled_from(DTYPES),
  st.integers(0, 9),
)
trees = st.recursive(
  leaves,
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.sampled_from("abc"), inner)
    | st.builds(base.Variables, inner, inner)
    | st.none()
  ),
  max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(trees, st.integers(0, 70))
def test_round_trips_of_any_tree(tree, more):
  layout = wire.layout(tree)
  buffer = np.full(layout.nbytes + more, 7, np.uint8)
  wire.write(layout, tree, buffer)
  kit.same_bits(wire.read(layout, buffer), jax.tree.map(np.asarray, tree))
  used = np.zeros(buffer.shape, bool)
  for field in layout.fields:
    assert not used[field.offset : field.stop].any()
    used[field.offset : field.stop] = True
  np.testing.assert_array_equal(buffer[~used], 7)


def test_jax_arrays_are_written_as_numpy_arrays_are():
  tree = {"w": jnp.arange(6.0).reshape(2, 3), "h": jnp.ones(3, jnp.bfloat16)}
  layout = wire.layout(tree)
  one, two = buffer_of(layout), buffer_of(layout)
  wire.write(layout, tree, one)
  wire.write(layout, jax.tree.map(np.asarray, tree), two)
  np.testing.assert_array_equal(one, two)


def test_numbers_and_foreign_byte_orders_are_written_in_the_machines_own():
  layout = wire.layout({"x": 1.5, "y": np.arange(3, dtype=">i4")})
  assert [f.stored for f in layout.fields] == [np.float64, np.int32]
  buffer = buffer_of(layout)
  wire.write(layout, {"x": 2.5, "y": np.arange(3, dtype=np.int32)}, buffer)
  tree = wire.read(layout, buffer)
  assert tree["x"] == 2.5
  np.testing.assert_array_equal(tree["y"], [0, 1, 2])


def test_arrays_in_strides_are_written_in_their_own_order():
  tree = np.arange(12.0).reshape(3, 4).T[::2]
  layout = wire.layout(tree)
  buffer = buffer_of(layout)
  wire.write(layout, tree, buffer)
  np.testing.assert_array_equal(wire.read(layout, buffer), tree)


def test_reading_makes_views_that_cannot_be_written():
  layout = wire.layout(TREE)
  buffer = buffer_of(layout)
  wire.write(layout, TREE, buffer)
  tree = wire.read(layout, buffer)
  for x in jax.tree.leaves(tree):
    assert not x.flags.writeable
    assert not x.size or np.shares_memory(x, buffer)
  buffer[:] = 0
  assert not tree["w"].any()


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_anything_with_a_buffer_will_do(kind):
  layout = wire.layout(TREE)
  buffer = kind(bytearray(layout.nbytes))
  wire.write(layout, TREE, buffer)
  found = wire.read(layout, bytes(buffer))
  kit.same_bits(found, jax.tree.map(np.asarray, TREE))


def test_a_tree_without_elements_needs_no_bytes():
  for tree in ((), None, {"a": np.zeros((0, 2))}):
    layout = wire.layout(tree)
    assert layout.nbytes == 0
    wire.write(layout, tree, b"" if tree is None else bytearray())
    kit.same_bits(wire.read(layout, b""), tree)


# Compression.


def compressed(x):
  layout = wire.layout(x, compress="bfloat16")
  buffer = buffer_of(layout)
  wire.write(layout, x, buffer)
  return wire.read(layout, buffer)


def test_only_wide_floats_are_compressed():
  kinds = ("float32", "float64", "float16", "bfloat16", "int32", "bool")
  tree = {kind: np.zeros(2, np.dtype(kind)) for kind in kinds}
  layout = wire.layout(tree, compress="bfloat16")
  stored = {field.path[2:-2]: field.stored.name for field in layout.fields}
  narrow = {"float32": "bfloat16", "float64": "bfloat16"}
  assert stored == {kind: narrow.get(kind, kind) for kind in kinds}
  kit.same_bits(compressed(tree), tree)


def test_rounding_is_to_the_nearest_and_ties_go_to_even():
  ulp = 2.0**-7
  x = np.float32([1, 1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 0.51 * ulp, -3, 0, -0.0])
  np.testing.assert_array_equal(
    compressed(x), np.float32([1, 1, 1 + 2 * ulp, 1 + ulp, -3, 0, -0.0])
  )
  assert np.signbit(compressed(x)[-1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_relative_error_is_at_most_a_256th(dtype):
  # All mantissas of 12 bits, one to each side of them, at several exponents.
  mantissa = 1 + np.arange(2**12) / 2**12
  around = np.nextafter(dtype(mantissa)[:, None], dtype([0, 2]))
  values = np.concatenate([dtype(mantissa), around.ravel()])
  x = np.concatenate([values * dtype(2.0) ** e for e in (-126, -1, 0, 1, 126)])
  error = np.abs(compressed(x).astype(np.float64) - x)
  relative = error / np.abs(x.astype(np.float64))
  assert relative.max() <= 2.0**-8
  # And that is what it can be: 1 + 2^-8 is a tie, and goes to 1.
  assert relative.max() > 0.99 * 2.0**-8
  np.testing.assert_array_equal(compressed(-x), -compressed(x))


def test_what_is_too_large_becomes_infinite_and_nan_stays():
  x = np.array([3.3961e38, 3.3963e38, -1e300, np.inf, np.nan])
  largest = float(ml_dtypes.finfo(BFLOAT16).max)
  np.testing.assert_array_equal(
    compressed(x), [largest, np.inf, -np.inf, np.inf, np.nan]
  )


def test_a_compressed_leaf_is_read_as_a_copy():
  x = np.ones(3, np.float32)
  layout = wire.layout(x, compress="bfloat16")
  buffer = buffer_of(layout)
  wire.write(layout, x, buffer)
  out = wire.read(layout, buffer)
  assert not out.flags.writeable
  buffer[:] = 0
  np.testing.assert_array_equal(out, 1)


# Layouts.


def test_a_layout_reads_shapes_only():
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), TREE
  )
  assert wire.layout(structs) == wire.layout(TREE)


def test_layouts_of_other_trees_differ():
  layout = wire.layout(TREE)
  others = [
    {**TREE, "w": TREE["w"].T},
    {**TREE, "w": TREE["w"].astype(np.float16)},
    {**TREE, "w": [TREE["w"]]},
    {**TREE, "b": tuple(TREE["b"])},
    {**TREE, "v": np.zeros(1)},
    {k: v for k, v in TREE.items() if k != "n"},
  ]
  layouts = [*map(wire.layout, others), wire.layout(TREE, compress="bfloat16")]
  assert layout not in layouts


# Errors.


def refused(tree, message, buffer=None):
  layout = wire.layout(TREE)
  buffer = buffer_of(layout) if buffer is None else buffer
  with pytest.raises(ValueError, match=message):
    wire.write(layout, tree, buffer)
  assert not np.any(np.frombuffer(buffer, np.uint8))


def test_a_tree_that_is_another_is_refused_and_nothing_written():
  refused({**TREE, "v": TREE["w"]}, r"only the tree has \['v'\]")
  lacks = {k: v for k, v in TREE.items() if k != "w"}
  refused(lacks, r"only the layout has \['w'\], only the tree has nothing")
  refused({**TREE, "b": tuple(TREE["b"])}, "the layout is of a PyTreeDef")
  refused(
    {**TREE, "w": TREE["w"].T},
    r"the leaf \['w'\] is float32\[3, 2\], but the layout has float32\[2, 3\]",
  )
  refused(
    {**TREE, "w": TREE["w"].astype(np.float64)},
    r"\['w'\] is float64\[2, 3\], but the layout has float32",
  )


def test_a_buffer_that_does_not_fit_is_refused():
  nbytes = wire.layout(TREE).nbytes
  refused(TREE, "has 255 bytes, the layout needs 256", bytearray(nbytes - 1))
  refused(TREE, "the buffer is read-only", bytes(nbytes))
  floats = np.zeros(nbytes // 4, np.float32)
  refused(TREE, r"must be uint8\[256\] in one piece, not float32", floats)
  refused(TREE, "in one piece", np.zeros((nbytes, 1), np.uint8))
  with pytest.raises(ValueError, match="in one piece"):
    wire.read(wire.layout(TREE), np.zeros(2 * nbytes, np.uint8)[::2])
  with pytest.raises(ValueError, match="has 3 bytes, the layout needs 256"):
    wire.read(wire.layout(TREE), bytes(3))


def test_leaves_that_are_not_numbers_are_refused():
  with pytest.raises(ValueError, match=r"\['k'\] has dtype key.*key_data"):
    wire.layout({"k": jax.random.key(0)})
  with pytest.raises(ValueError, match="is no number"):
    wire.layout(np.array(["a"]))


def test_an_unknown_compression_is_refused():
  with pytest.raises(ValueError, match="compress must be one of .*'zip'"):
    wire.layout(TREE, compress="zip")
