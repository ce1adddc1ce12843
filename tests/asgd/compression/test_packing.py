"""Packed codes: round trips of the same bits, sizes, hand-packed bytes, places
beyond 2**31, and bytes that are no packed code."""

import struct
import tracemalloc
import zlib

import jax
import jax.numpy as jnp
import kit
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asgd.compression import Symbols, Values, packing
from asgd.compression.packing import bits, gaps, layouts
from asgd.compression.packing.bits import BadCode

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(x) for x in (np.float16, BFLOAT16, np.float32, np.float64)]
HEADER = 24
ONE = np.ones(1, np.float32)


def packed(code):
  return packing.pack(packing.layout(code), code)


def payload(code):
  """What follows the header."""
  return list(packed(code)[HEADER:])


def check_round_trip(code):
  """Returns the bytes."""
  layout = packing.layout(code)
  data = packing.pack(layout, code)
  assert HEADER <= len(data) <= layout.most
  kit.same_bits(packing.unpack(layout, data), code)
  return data


def symbols(numbers, levels=1, dtype=np.int8, scales=ONE):
  return Symbols(np.asarray(numbers, dtype), scales, levels)


def drawn(rng, count, density, levels=1, dtype=np.int8):
  """Symbols, of which so many are not 0."""
  sizes = rng.integers(1, levels + 1, count) * rng.choice([-1, 1], count)
  return symbols(sizes * (rng.random(count) < density), levels, dtype)


COUNTS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 40, 1000, 4097])
DENSITIES = st.sampled_from([0, 0.001, 0.05, 0.4, 0.8, 1])


@st.composite
def some_symbols(draw):
  levels, dtype = draw(
    st.sampled_from(
      [(1, "int8"), (3, "int8"), (7, "int8"), (127, "int8"), (1, "int16")]
      + [(300, "int16"), (100_000, "int32"), (2**31 - 1, "int32")]
    )
  )
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  code = drawn(rng, draw(COUNTS), draw(DENSITIES), levels, dtype)
  scales = rng.random(draw(st.integers(0, 3)), np.float32)
  return Symbols(code.symbols, scales, levels, draw(st.booleans()))


@st.composite
def some_floats(draw):
  """Of any bits: NaN of every kind, infinities, subnormal numbers, -0.0."""
  dtype, count = draw(st.sampled_from(FLOATS)), draw(COUNTS)
  rng = np.random.default_rng(draw(st.integers(0, 2**32)))
  x = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
  special = [0.0, -0.0, np.nan, np.inf, -np.inf]
  chosen = rng.random(count) < 0.3
  x[chosen] = rng.choice(special, count).astype(dtype)[chosen]
  x[rng.random(count) >= draw(DENSITIES)] = 0
  if count % 2 == 0:
    x = x.reshape(2, -1)
  bare = lambda x: Values(x, coded=False)  # noqa: E731
  return draw(st.sampled_from([Values, bare, lambda x: x]))(x)


@settings(max_examples=200, deadline=None)
@given(
  st.dictionaries(
    st.sampled_from("abcdef"), st.one_of(some_symbols(), some_floats())
  )
)
def test_the_same_bits_come_back(code):
  check_round_trip(code)


def test_what_is_around_the_numbers_comes_back():
  code = {
    "key": np.arange(4, dtype=np.uint32),
    "count": np.int64(3),
    "mask": np.array([True, False]),
    "nested": [(), None, (np.float32(-0.0), np.zeros((2, 0, 3)))],
    "values": Values(np.float16([[0, np.nan], [-0.0, np.inf]])),
  }
  code = jax.tree.map(np.asarray, code)
  check_round_trip(code)
  scales = np.float32([[0.5, np.nan], [1, -0.0]])
  check_round_trip(symbols([3, -3, 0], 3, scales=scales))


def test_arrays_of_jax_are_packed_as_those_of_numpy():
  x = jnp.zeros(1000, jnp.bfloat16).at[jnp.array([7, 900])].set(-1.5)
  ternary = Symbols(jnp.int8([1, 0, -1]), jnp.float32([0.5]), 1)
  code = {"v": Values(x), "s": ternary, "raw": jnp.arange(3)}
  of_numpy = jax.tree.map(np.asarray, code)
  layout = packing.layout(code)
  assert layout == packing.layout(of_numpy)
  assert layout == packing.layout(jax.eval_shape(lambda: code))
  assert packing.pack(layout, code) == packing.pack(layout, of_numpy)
  kit.same_bits(packing.unpack(layout, packing.pack(layout, code)), of_numpy)


def test_arrays_that_are_not_in_one_piece_are_packed():
  x = np.zeros((100, 6), np.float32)
  x[50, 4] = -1
  code = {"t": Values(x.T), "s": symbols(np.tile([1, -1, 0], 9)[::2])}
  check_round_trip(code)


def test_what_is_unpacked_has_memory_of_its_own():
  code = {"raw": np.ones(3), "v": Values(np.ones(3)), "s": symbols([1, -1])}
  layout = packing.layout(code)
  data = bytearray(packing.pack(layout, code))
  found = packing.unpack(layout, data)
  data[:] = bytes(len(data))
  kit.same_bits(found, code)
  found["raw"][:] = 2  # can be written to


# By hand. Scales of 1.0 are the bytes 0, 0, 128, 63.
SCALE = [0, 0, 128, 63]


def test_dense_ternary_symbols_are_five_to_a_byte():
  # 0, 1, 0, -1 are the digits 1, 2, 1, 0; the fifth is not there.
  assert payload(symbols([0, 1, 0, -1])) == [0, 1 + 2 * 3 + 1 * 9, *SCALE]
  # Each fifth of six, filled up to ten, is a digit of two bytes.
  first, second = 2 + 0 * 3 + 2 * 9, 2 + 0 * 3 + 2 * 9
  numbers = [1, 1, -1, -1, 1, 1]
  mixed = symbols([*numbers, 0])
  assert payload(mixed)[:3] == [0, first + 27, second]
  # Without a zero, a bit for each that is below 0.
  assert payload(symbols(numbers)) == [1, 0b001100, *SCALE]


def test_symbols_of_more_levels_take_the_bits_that_they_need():
  # From -3 to 3 as 0 to 6, here 3, 6, 0 and 5. The two low bits, 3, 2, 0 and 1:
  # the second half onto the first is 3 + 0 * 4 and 2 + 1 * 4, and again. The
  # high bits are those of a byte.
  low, high = 3 + 6 * 16, 0b1010
  assert payload(symbols([0, 3, -3, 2], 3)) == [0, low, high, *SCALE]
  assert payload(symbols([7, -7], 7)) == [0, 14 | 0 << 4, *SCALE]
  assert payload(symbols([127, -127], 127)) == [0, 254, 0, *SCALE]


def test_sparse_symbols_are_gaps_signs_and_sizes():
  numbers = np.zeros(20_000, np.int8)
  numbers[[5, 5 + 1 + 600]] = [-3, 2]
  # Gaps 5 and 600. With k = 8 they are 0 and 2 in unary, and low bits 5 and 88;
  # with k = 7 or 9 they take as much, or more.
  unary = 0b1001  # from the lowest: 1, and 001
  digits = [2 << 1 | 1, 1 << 1 | 0]  # (size - 1, whether below 0)
  assert payload(symbols(numbers, 3)) == [
    *(64 + 8, 2, 1, unary, 5, 88),
    # three bits each: two low ones four to a byte, the high one eight
    *(digits[0] % 4 | digits[1] % 4 << 2, digits[0] // 4 | digits[1] // 4 << 1),
    *SCALE,
  ]


def test_positions_without_an_entropy_code_are_words():
  numbers = np.zeros(20_000, np.int8)
  numbers[[5, 606]] = [-1, 1]
  code = Symbols(numbers, ONE, 1, coded=False)
  words = [5, 0, 0, 0, 606 % 256, 606 // 256, 0, 0]
  assert payload(code) == [2, 2, *words, 0b01, *SCALE]
  assert len(packed(symbols(numbers))) < len(packed(code))
  x = np.zeros(300, np.float32)
  x[200] = 1
  assert payload(Values(x, coded=False)) == [2, 1, 200, 0, 0, 0, *SCALE]
  # Where dense is smaller, that is sent.
  assert payload(Values(np.float16([1, 0, 1]), coded=False))[0] == 0


def test_values_are_positions_and_elements():
  x = np.zeros(300, np.float32)
  x[200] = 1
  assert payload(Values(x)) == [64 + 8, 1, 1, 1, 200, *SCALE]
  dense = np.float16([1, 0, 1])
  assert payload(Values(dense)) == [0, 0, 60, 0, 0, 0, 60]


def test_nothing_but_zeros_takes_three_bytes():
  assert payload(symbols(np.zeros(10**6))) == [64, 0, 0, *SCALE]
  assert payload(Values(np.zeros(10**6))) == [64, 0, 0]


def test_the_header_is_as_it_is_described():
  code = symbols([1, 0, -1])
  data = packed(code)
  checksum = packing.layout(code).checksum
  body = struct.pack("=4sHHIQ", b"asgc", 1, 0, checksum, len(data) - HEADER)
  assert data[:20] == body
  crc = zlib.crc32(data[:20] + data[24:])
  assert data[20:24] == crc.to_bytes(4, "little")


@pytest.mark.parametrize("density", [0.0003, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("levels", [1, 7])
def test_the_smallest_form_is_taken(density, levels):
  code = drawn(np.random.default_rng(3), 20_000, density, levels)
  length = len(packed(code))
  positions = np.flatnonzero(code.symbols)
  count, width = positions.size, 1 + (levels - 1).bit_length()
  forms = [20_000 // 5 if levels == 1 else 20_000 // 2]
  if levels == 1 and count == 20_000:
    forms.append(20_000 // 8)
  between = np.diff(positions, prepend=-1) - 1
  for k in range(20):
    unary = -(-int((between >> k).sum() + count) // 8)
    sizes = sum(
      -(-count * part // 8)
      for part in (8, 4, 2, 1)
      for number in (k, width)
      for _ in range(number // 8 if part == 8 else bool(number & part))
    )
    varints = sum(1 + max(n.bit_length() - 1, 0) // 7 for n in (count, unary))
    forms.append(varints + unary + sizes)
  assert length == HEADER + 1 + min(forms) + 4


def test_what_is_sent_is_near_the_entropy():
  rng = np.random.default_rng(0)
  for density in (0.0005, 0.001, 0.01, 0.05):
    code = drawn(rng, 2**20, density)
    p = np.count_nonzero(code.symbols) / 2**20
    entropy = -p * np.log2(p) - (1 - p) * np.log2(1 - p) + p  # and signs
    least = 2**20 * entropy / 8
    assert least < len(packed(code)) - HEADER < 1.04 * least + 10


def test_small_leaves_of_one_kind_are_one_stream():
  rng = np.random.default_rng(0)
  parts = [drawn(rng, 1000, 0.01) for _ in range(50)]
  code = {
    "small": parts,
    "large": drawn(rng, layouts.LARGE, 0.001),
    "wide": drawn(rng, 1000, 0.01, levels=3),
    "half": [Values(np.zeros(10, np.float16)) for _ in range(3)],
  }
  check_round_trip(code)
  kinds = [(x.kind, x.levels, x.count) for x in packing.layout(code).streams]
  assert [x for x in kinds if x[0] != "raw"] == [
    ("values", 0, 30),
    ("symbols", 1, layouts.LARGE),
    ("symbols", 1, 50_000),
    ("symbols", 3, 1000),
  ]
  joined = symbols(np.concatenate([x.symbols for x in parts]))
  # of each more there are its scales
  assert len(packed(parts)) == len(packed(joined)) + 4 * 49


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(0, 36))
@example(0, 1, 36)
def test_positions_beyond_2_to_the_31_come_back(seed, count, spread):
  rng = np.random.default_rng(seed)
  steps = rng.integers(1, 2**spread + 1, count)
  steps[rng.integers(count)] += 2**33
  positions = np.cumsum(steps) - 1
  coded = gaps.measure(positions)
  data = np.concatenate(gaps.encode(coded))
  assert data.size == coded.nbytes
  # An element after the last is room; an element less is none.
  length = int(positions[-1]) + 1
  _, _, k, unary = coded
  for each in (length, 2 * length):
    found = gaps.decode(data, count, k, unary, each)
    np.testing.assert_array_equal(found, positions)
  with pytest.raises(BadCode, match="beyond"):
    gaps.decode(data, count, k, unary, length - 1)
  assert gaps.least_nbytes(count, length - 1) <= coded.nbytes


def test_leaves_of_more_than_2_to_the_31_elements_are_counted():
  count = 2**31 + 8

  def most(leaf):
    return packing.layout(leaf).most - HEADER

  int8 = jax.ShapeDtypeStruct((count,), np.int8)
  scales = jax.ShapeDtypeStruct((2,), np.float32)
  assert most(Symbols(int8, scales, 1)) == 1 + -(-count // 5) + 8
  assert most(Symbols(int8, scales, 3)) == 1 + count // 4 + count // 8 + 8
  assert most(Symbols(int8, scales, 127)) == 1 + count + 8
  assert most(Values(jax.ShapeDtypeStruct((count, 2), BFLOAT16))) == (
    1 + 4 * count
  )
  assert most(jax.ShapeDtypeStruct((count,), np.float32)) == 4 * count


@pytest.mark.parametrize("width", range(33))
def test_numbers_of_any_width_come_back(width):
  for count in (0, 1, 7, 8, 9, 100):
    rng = np.random.default_rng(count)
    numbers = rng.integers(0, 2**width, count, np.uint64)
    data = bits.pack(numbers, width)
    assert sum(x.size for x in data) == bits.nbytes(count, width)
    data = np.concatenate([np.zeros(0, np.uint8), *data])
    found = bits.unpack(data, count, width, np.dtype(np.uint64))
    np.testing.assert_array_equal(found, numbers)


# What cannot be packed.


def test_what_no_layout_can_hold_is_refused():
  int8, scales = np.zeros(2, np.int8), ONE
  for leaf, words in (
    (jax.random.key(0), "send a random key as jax.random.key_data"),
    (Symbols(int8.astype(np.uint8), scales, 1), "must be int8"),
    (Symbols(int8.astype(np.int64), scales, 1), "must be int8"),
    (Symbols(int8, scales, 0), "must be from 1 to 127"),
    (Symbols(int8, scales, 128), "must be from 1 to 127"),
    (Values(int8), "must be floats of 16, 32 or 64 bits"),
  ):
    with pytest.raises(ValueError, match=words):
      packing.layout({"w": leaf})


def test_a_code_of_another_layout_is_refused():
  layout = packing.layout({"w": symbols([1, 0])})
  for code, words in (
    ({"v": symbols([1, 0])}, "the layout is of"),
    ({"w": symbols([1, 0], 3)}, "the layout is of"),
    ({"w": symbols([1, 0, 0])}, r"\['w'\].symbols is int8\[3\], but the"),
    ({"w": symbols([1, 0], dtype=np.int16)}, r"is int16\[2\]"),
  ):
    with pytest.raises(ValueError, match=words):
      packing.pack(layout, code)


@pytest.mark.parametrize("zeros", [0, 1000])  # dense, sparse
@pytest.mark.parametrize("number", [2, -2, 127, -128])
def test_symbols_beyond_their_levels_are_refused(number, zeros):
  code = {"w": symbols([1, number, *[0] * zeros])}
  with pytest.raises(ValueError, match=r"leaf \['w'\].*beyond the 1 levels"):
    packed(code)


def test_a_buffer_is_written_to_from_its_front_or_not_at_all():
  code = symbols([1, 0, -1])
  layout, data = packing.layout(code), packed(code)
  buffer = np.full(layout.most + 3, 7, np.uint8)
  assert packing.pack(layout, code, buffer) == len(data)
  assert bytes(buffer) == data + bytes([7] * (buffer.size - len(data)))
  of_bytes = bytearray(len(data))
  assert packing.pack(layout, code, memoryview(of_bytes)) == len(data)
  assert bytes(of_bytes) == data
  for room in (0, len(data) - 1):
    small = np.full(room, 7, np.uint8)
    with pytest.raises(ValueError, match=f"has {room} bytes, but the message"):
      packing.pack(layout, code, small)
    assert (small == 7).all()
  with pytest.raises(ValueError, match="read-only"):
    packing.pack(layout, code, bytes(layout.most))


# Hostile bytes.

MESSAGE = {  # every form
  "ternary": symbols([1, 0, -1, 1, 0, 1, 1]),
  "bits": symbols([3, 0, -2, 1, 1], 3),
  "signs": symbols([1, -1, -1], dtype=np.int16),
  "sparse": symbols(np.eye(1, 900, 700, dtype=np.int8)[0], 7),
  "values": Values(np.eye(1, 300, 5)[0].astype(np.float32)),
  "raw": np.float64([0.5]),
  "flags": np.array([True, False]),
}
LAYOUT = packing.layout(MESSAGE)
DATA = packing.pack(LAYOUT, MESSAGE)


def refused(data, words=None):
  with pytest.raises(BadCode, match=words) as caught:
    packing.unpack(LAYOUT, data)
  text = str(caught.value)
  assert "\n" not in text and len(text) < 600


def test_a_byte_that_was_changed_is_noticed():
  for i in range(len(DATA)):
    for flip in (1, 128, 255):
      data = bytearray(DATA)
      data[i] ^= flip
      refused(data)


@pytest.mark.parametrize(
  ("data", "words"),
  [
    (None, "a packed code is bytes, not of the type NoneType"),
    ("text", "not of the type str"),
    ([1, 2], "not of the type list"),
    (memoryview(DATA + DATA)[::2], "a strided buffer"),
    (np.zeros((40, 2), np.uint8)[:, 0], "a strided buffer"),
    (np.zeros(9, "datetime64[s]"), "not of the type ndarray"),
    (np.full(40, None), None),
  ],
)
def test_what_is_no_run_of_bytes_is_refused(data, words):
  refused(data, words)


def test_what_was_cut_or_has_grown_is_refused():
  for size in range(len(DATA)):
    refused(DATA[:size])
  refused(DATA + b"\0", "bytes after its header")
  refused(DATA + DATA)


def test_random_bytes_are_refused():
  rng = np.random.default_rng(0)
  for size in range(200):
    refused(rng.bytes(size))


def sealed(body, checksum=None, version=1):
  """Bytes with a header that says that they are a code."""
  checksum = LAYOUT.checksum if checksum is None else checksum
  head = struct.pack("=4sHHIQ", b"asgc", version, 0, checksum, len(body))
  crc = zlib.crc32(head + bytes(body))
  return head + crc.to_bytes(4, "little") + bytes(body)


def test_another_version_or_layout_is_refused():
  assert sealed(DATA[HEADER:]) == DATA
  refused(sealed(DATA[HEADER:], version=2), "has version 2, not 1: start all")
  other = packing.layout(dict(MESSAGE, raw=np.float32([0.5])))
  refused(sealed(DATA[HEADER:], other.checksum), "of another codec or other")
  fewer = {k: v for k, v in MESSAGE.items() if k != "signs"}
  refused(packed(fewer), "of another codec")


def test_bytes_that_are_sealed_are_a_code_of_the_layout_or_refused():
  rng = np.random.default_rng(0)
  accepted = 0
  for _ in range(700):
    body = bytearray(DATA[HEADER:])
    for _ in range(rng.integers(1, 4)):
      body[rng.integers(len(body))] = rng.integers(256)
    if rng.random() < 0.2:
      del body[rng.integers(len(body))]
    try:
      code = packing.unpack(LAYOUT, sealed(body))
    except BadCode:
      continue
    accepted += 1
    assert packing.layout(code) == LAYOUT
    packing.pack(LAYOUT, code)  # its symbols are within their levels
  assert accepted


def test_what_is_no_form_is_refused():
  """By hand, one leaf at a time."""

  def refuse(leaf, body, words):
    layout = packing.layout(leaf)
    with pytest.raises(BadCode, match=words):
      packing.unpack(layout, sealed(body, layout.checksum))

  ternary, bare = symbols([0] * 6), np.zeros(0, np.float32)
  ternary = Symbols(ternary.symbols, bare, 1)
  refuse(ternary, [0, 243, 0], "no five of -1, 0 and 1")
  refuse(ternary, [0, 0, 27], "no five")  # an eighth symbol is not -1
  refuse(ternary, [0, 0], "2 bytes are needed, but 1 are left")
  refuse(ternary, [1, 64], "bits that belong to no number")
  refuse(ternary, [2], "2 is no form of a stream of symbols")
  refuse(ternary, [64 + 41, 0, 0], "105 is no form")
  refuse(ternary, [64, 7, 1, 127, 0], "7 elements are claimed, of 6")
  refuse(ternary, [64, 2, 1, 1, 0], "1 positions are coded, but 2 are")
  refuse(ternary, [64, 1, 2, 1, 0, 0], "positions are coded, but 1 are")
  refuse(ternary, [64, 1, 1, 64, 0], "beyond the 6 elements")
  refuse(ternary, [66, 1, 1, 1 << 1, 2, 0], "beyond the 6 elements")
  refuse(ternary, [66, 1, 1, 1, 4, 0], "bits that belong to no number")
  refuse(ternary, [64, 1, 1, 1, 2], "bits that belong to no number")
  refuse(ternary, [64, 0, 0, 0], "1 bytes follow the last leaf")
  refuse(ternary, [64, *[255] * 6, 0], "a count takes more than 6 bytes")
  words = Symbols(ternary.symbols, bare, 1, coded=False)
  refuse(words, [2, 7, 0, 0, 0, 0, 0], "7 elements are claimed, of 6")
  refuse(words, [2, 1, 6, 0, 0, 0, 0], "beyond the 6 elements")
  refuse(words, [2, 2, *[3, 0, 0, 0] * 2, 0], "positions do not ascend")
  refuse(words, [2, 1, 0, 0, 0], "4 bytes are needed, but 3 are left")
  three = Symbols(ternary.symbols, bare, 3)
  refuse(three, [1, 0], "1 is no form")
  refuse(three, [0, 255, 15, 63], "a symbol is beyond the 3 levels")
  refuse(three, [64, 1, 1, 1, 2, 1], "a symbol is beyond the 3 levels")
  values = Values(np.zeros(2, np.float16))
  refuse(values, [64, 1, 1, 1, 0, 0], "a sparse value is 0")
  refuse(values, [1, 0], "1 is no form of a stream of values")
  refuse(np.array([True]), [2], "neither 0 nor 1")


def test_claims_allocate_nothing():
  count = 2**40
  leaf = Symbols(jax.ShapeDtypeStruct((count,), np.int8), ONE, 1)
  layout = packing.layout(leaf)
  values = packing.layout(Values(jax.ShapeDtypeStruct((count,), np.float32)))
  most = [255] * 5 + [127]  # 2**42 - 1
  half = [128] * 5 + [16]  # 2**39
  bodies = [
    [0, 1, 2],
    [1, 1, 2],
    [64, *most, 1, 1],
    [64, *half, *half, 1],
    [64, *half, 1, 255, 0],
    [64, 8, *most, 255, 0],
    [64 + 40, 3, 1, 7, *[255] * 30],
    [64 + 40, *half, 0],
  ]
  tracemalloc.start()
  try:
    for each in (layout, values):
      for body in bodies:
        with pytest.raises(BadCode):
          packing.unpack(each, sealed(body, each.checksum))
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < 200_000
