"""The server: versions, staleness, gaps, accumulation and gates, by hand."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import base, norms, server
from asgd.transforms import scale_by_staleness


def make(every=1, **kwargs):
  algorithm = base.as_algorithm(optax.sgd(1.0))
  return server.make_server(algorithm, every=every, **kwargs)


def send(made, state, worker=0):
  return made.send(state, jnp.int32(worker))


def params(*values):
  return jnp.array(values, jnp.float32)


def test_a_ticket_says_who_when_and_what():
  made = make()
  state = made.init(params(1.0, 2.0))
  ticket = send(made, state, worker=3)
  assert (int(ticket.worker), int(ticket.version)) == (3, 0)
  np.testing.assert_array_equal(ticket.params, [1.0, 2.0])


def test_staleness_and_gap_of_two_workers():
  made = make()
  state = made.init(params(1.0, 2.0))
  first, second = send(made, state, 0), send(made, state, 1)
  state, report = made.receive(state, first, params(3.0, 4.0))
  assert (int(report.staleness), float(report.gap)) == (0, 0.0)
  np.testing.assert_array_equal(state.params, [-2.0, -2.0])
  state, report = made.receive(state, second, params(0.0, 0.0))
  assert int(report.staleness) == 1
  # Moved by (3, 4): a norm of 5 over the root of two parameters.
  np.testing.assert_allclose(report.gap, 5 / np.sqrt(2), rtol=1e-6)
  assert int(state.version) == 2


def test_norms_are_root_mean_squares():
  made = make()
  state = made.init(params(0.0, 0.0))
  _, report = made.receive(state, send(made, state), params(3.0, 4.0))
  np.testing.assert_allclose(report.message_norm, np.sqrt(12.5), rtol=1e-6)
  np.testing.assert_allclose(report.update_norm, np.sqrt(12.5), rtol=1e-6)


def test_every_n_messages_make_one_update_of_their_mean():
  made = make(every=3)
  state = made.init(params(0.0))
  tickets = [send(made, state, w) for w in range(3)]
  norms = []
  for ticket, value in zip(tickets, (1.0, 2.0, 6.0), strict=True):
    before = state
    state, report = made.receive(state, ticket, params(value))
    norms.append(float(report.update_norm))
  np.testing.assert_array_equal(before.params, [0.0])
  np.testing.assert_array_equal(state.params, [-3.0])
  assert (int(before.version), int(state.version)) == (0, 1)
  np.testing.assert_allclose(norms, [0.0, 0.0, 3.0], rtol=1e-6)
  assert int(state.inbox.count) == 0
  np.testing.assert_array_equal(state.inbox.total, [0.0])


def spy():
  """An algorithm whose update is the staleness it is told, at rate 1."""

  def update(updates, state, params, *, worker, staleness, sent_params):
    told = jnp.stack([worker, staleness]).astype(jnp.float32)
    return jnp.concatenate([told, sent_params[:1]]), state

  return base.Algorithm(lambda params: (), update)


def test_an_update_of_several_messages_is_told_the_oldest_delay():
  made = server.make_server(spy(), every=2)
  state = made.init(params(0.0, 0.0, 0.0))
  old = send(made, state, 5)
  for _ in range(2):  # two updates pass
    for _ in range(2):
      state, _ = made.receive(state, send(made, state, 1), params(0, 0, 0))
  assert int(state.version) == 2
  fresh = send(made, state, 7)
  for order in ((old, fresh), (fresh, old)):
    end = state
    for ticket in order:
      end, _ = made.receive(end, ticket, params(0, 0, 0))
    told = np.asarray(end.params - state.params)
    np.testing.assert_allclose(told, [5.0, 2.0, 0.0])


def test_at_server_scales_each_message_by_its_own_delay():
  made = make(every=2, at_server=scale_by_staleness())
  state = made.init(params(0.0))
  old = send(made, state, 0)
  for _ in range(4):
    for _ in range(2):
      state, _ = made.receive(state, send(made, state, 1), params(0.0))
  fresh = send(made, state, 1)
  state, _ = made.receive(state, old, params(8.0))  # staleness 4: 2
  state, _ = made.receive(state, fresh, params(6.0))  # staleness 0: 6
  np.testing.assert_array_equal(state.params, [-4.0])


@pytest.mark.parametrize("every", [1, 2])
def test_a_dropped_message_changes_nothing(every):
  made = make(every=every, gate=server.max_staleness(0))
  state = made.init(params(1.0))
  stale = send(made, state)
  for _ in range(every):
    state, report = made.receive(state, send(made, state), params(1.0))
    assert bool(report.accepted)
  after, report = made.receive(state, stale, params(100.0))
  assert not bool(report.accepted)
  assert int(report.staleness) == 1
  assert float(report.update_norm) == 0.0
  jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_finite_gate_keeps_parameters_finite(value):
  made = make(gate=server.finite)
  state = made.init(params(1.0, 2.0))
  after, report = made.receive(state, send(made, state), params(0.0, value))
  assert not bool(report.accepted)
  jax.tree.map(np.testing.assert_array_equal, after, state)
  after, report = made.receive(state, send(made, state), params(1.0, 1.0))
  assert bool(report.accepted)
  np.testing.assert_array_equal(after.params, [0.0, 1.0])


def test_sends_current_is_false_only_for_a_look_ahead():
  assert make().sends_current
  ahead = base.Algorithm(
    lambda params: (),
    lambda updates, state, params=None, **extra_args: (updates, state),
    lambda opt_state, params, *, worker: params + 1,
  )
  assert not server.make_server(ahead).sends_current


def test_rms_of_an_empty_tree_is_zero():
  assert float(norms.rms({"a": jnp.zeros((0, 3))})) == 0.0
  assert float(norms.rms(())) == 0.0


def test_rms_is_taken_over_all_elements_of_all_leaves():
  rng = np.random.default_rng(0)
  tree = [rng.normal(size=s) for s in ((3, 4, 5), (7,), ())]
  flat = np.concatenate([np.ravel(x) for x in tree])
  np.testing.assert_allclose(
    norms.rms([jnp.asarray(x) for x in tree]),
    np.sqrt(np.mean(flat**2)),
    rtol=1e-6,
  )


def test_rms_of_a_leaf_that_is_summed_in_pieces():
  for shape in ((300, 150), (1, 70_000), (131_072,)):
    leaf = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    known = np.sqrt(np.mean(leaf.astype(np.float64) ** 2))
    np.testing.assert_allclose(norms.rms(leaf), known, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(norms.rms)(leaf), known, rtol=1e-6)


_EVERY = [(x, "every must be a positive whole") for x in (0, -1, 1.5, True)]
test_every_must_be_a_positive_whole_number = kit.refuses(
  _EVERY, lambda every: make(every=every)
)
test_a_negative_bound_is_refused = kit.refuses(
  [(-1, "bound must be 0 or more, not -1")], server.max_staleness
)
test_a_parameter_that_cannot_be_trained_is_named = kit.refuses(
  [
    (
      {"w": jnp.ones(2), "table": [np.arange(3)]},
      r"parameter \['table'\]\[0\] is of .* float32",
    ),
    (np.arange(3), "parameter itself is of .* float32"),
    ({"mask": jnp.ones(2, bool)}, r"parameter \['mask'\] is of .* float32"),
  ],
  lambda params: make().init(params),
)


def test_statistics_may_be_of_any_dtype():
  variables = base.Variables({"w": jnp.ones(2)}, {"count": jnp.int32(0)})
  assert make().init(variables).params.stats["count"].dtype == jnp.int32


def test_a_norm_over_many_leaves_is_a_loop_with_the_same_sum():
  few = [np.float32(1 + 0.1 * i) * np.ones((2, 3)) for i in range(100)]
  many = [*few, np.full((2, 3), 0.3, np.float32), np.zeros((0, 3))]

  def additions(tree):
    equations = jax.make_jaxpr(norms.rms)(tree).eqns
    return sum(str(equation.primitive) == "add" for equation in equations)

  assert additions(few) >= 99
  assert additions(many) < 9
  expected = np.sqrt(np.mean(np.square(np.concatenate(many))))
  np.testing.assert_allclose(jax.jit(norms.rms)(many), expected, rtol=1e-5)
