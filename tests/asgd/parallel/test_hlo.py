"""Programs as text: who sends what, how often, and what is multiplied."""

import jax
import jax.numpy as jnp
import pytest

from asgd.parallel import hlo

PROGRAM = """\
HloModule jit_step, entry_computation_layout={(f32[4,129]{1,0:T(4,128)}, \
bf16[16]{0})->(f32[8,16]{1,0}, /*index=1*/pred[]{:T(512)})}, num_partitions=4

%started (p: f32[2,8]) -> f32[8,8] {
  %p = f32[2,8]{1,0} parameter(0)
  %gather.1 = f32[8,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, \
dimensions={0}, backend_config={"async_collective_fusion_config":{"a":"-1"}}
  ROOT %c = f32[8,8]{1,0} custom-call(%gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%later (p: f32[2,8]) -> f32[8,8] {
  %p = f32[2,8]{1,0} parameter(0)
  ROOT %gather.2 = f32[8,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, \
dimensions={0}, backend_config={"async_collective_fusion_config":{"a":"2"}}
}

%below (i: (s32[])) -> pred[] {
  %i = (s32[]) parameter(0)
  %end = s32[]{:T(128)} constant(5)
  %at = s32[] get-tuple-element(%i), index=0
  ROOT %lt = pred[] compare(%at, %end), direction=LT
}

%body (i: (s32[])) -> (s32[]) {
  %i = (s32[]) parameter(0)
  %x = f32[8,16]{1,0} constant({...})
  %w = f32[16,4]{1,0} constant({...})
  %y = f32[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
  %sent = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) \
collective-permute-start(%y), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  ROOT %r = (s32[]) tuple(%i)
}

ENTRY %main (a: f32[4,129], b: bf16[16]) -> (f32[8,16], pred[]) {
  %a = f32[4,129]{1,0:T(4,128)} parameter(0)
  %begin = f32[8,8]{1,0} fusion(%a), kind=kCustom, calls=%started
  %more = f32[8,8]{1,0} fusion(%a), kind=kCustom, calls=%later
  %turns = (s32[]) while(%t), condition=%below, body=%body
  %sums = (f32[8]{0}, /*index=1*/bf16[16]{0}) all-reduce(%u, %v), \
replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  ROOT %part = f32[2,4]{1,0} reduce-scatter(%z), \
replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}, dimensions={0}
}
"""


def test_each_collective_counts_once_for_each_array_and_turn():
  found = [one[:] for one in hlo.read(PROGRAM).collectives]
  ring = ((0, 1), (1, 0), (2, 3), (3, 2))
  columns = ((0, 2), (1, 3))
  assert found == [
    ("all-gather", ((0, 1, 2, 3),), "f32", 64, 1, True),
    ("collective-permute", ring, "f32", 32, 5, True),
    ("all-reduce", columns, "f32", 8, 1, False),
    ("all-reduce", columns, "bf16", 16, 1, False),
    # Of the whole array, before it is scattered over two devices.
    ("reduce-scatter", columns, "f32", 16, 1, False),
  ]


def test_arguments_have_the_bytes_of_their_tiles():
  program = hlo.read(PROGRAM)
  assert [a.bytes for a in program.arguments] == [4 * 129 * 4, 32]
  assert [*map(hlo.padded_bytes, program.arguments)] == [4 * 256 * 4, 32]
  assert [*map(hlo.padded_bytes, program.results)] == [512, 512]


def test_a_loop_multiplies_as_often_as_it_turns():
  assert hlo.read(PROGRAM).flops == 5 * 2 * 8 * 16 * 4


@pytest.mark.parametrize("window, labels, shapes, flops", [
  ("", "bf_io->bf", ((6, 5), (5, 7), (6, 7)), 2 * 6 * 5 * 7),
  # A batch of 3 products, as the TPU compiler writes it.
  (
    "window={size=3 stride=2 lhs_dilate=3}, ", "0bf_0io->0bf",
    ((3, 6, 5), (3, 5, 7), (3, 6, 7)), 3 * 2 * 6 * 5 * 7,
  ),
  # A convolution of 5 numbers with 3: at the ends one is not there.
  (
    "window={size=3 pad=1_1}, ", "b0f_0io->b0f",
    ((1, 5, 2), (3, 2, 4), (1, 5, 4)), 2 * 2 * 4 * (3 * 5 - 2),
  ),
])  # fmt: skip
def test_products_are_counted_as_convolutions(window, labels, shapes, flops):
  types = [f"f32[{','.join(map(str, shape))}]{{}}" for shape in shapes]
  text = (
    "HloModule m, entry_computation_layout={()->f32[]{}}\n\n"
    "ENTRY %main (a: f32[]) -> f32[] {\n"
    f"  %a = {types[0]} parameter(0)\n  %b = {types[1]} parameter(1)\n"
    f"  ROOT %c = {types[2]} convolution(%a, %b), {window}dim_labels={labels}\n"
    "}\n"
  )
  assert hlo.read(text).flops == flops


def test_programs_that_jax_lowered_are_read_too():
  def loss(w, x):
    def turn(h, _):
      return jnp.tanh(h @ w), None

    return jax.lax.scan(turn, x, None, length=6)[0].sum()

  w, x = jnp.ones((16, 16)), jnp.ones((4, 16))
  lowered = jax.jit(jax.grad(loss)).lower(w, x)
  # Forward, and two products of the backward; XLA counts each loop once.
  assert hlo.read(lowered.as_text(dialect="hlo")).flops == 3 * 6 * 2 * 4 * 256


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match="no compiled program"):
    hlo.read("HloModule empty")
  bad = PROGRAM.replace("[2,2]<=[2,2]T(1,0)", "?")
  with pytest.raises(ValueError, match="cannot read the devices"):
    hlo.read(bad)
