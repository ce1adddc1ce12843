"""Checks of arguments: what is refused, and how errors show it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asgd import checks, names

NO_NUMBERS = (
  *("3", None, [1.0], {}, True, math.nan, math.inf, 10**400),
  *(np.True_, jnp.bool_(True), 0.5 + 0j, jnp.ones(2)),
)


NUMBERS = checks.fraction, checks.positive, checks.nonnegative, checks.portion


@pytest.mark.parametrize("check", NUMBERS)
@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: str(value)[:9])
def test_what_is_no_finite_number_is_named(check, value):
  with pytest.raises(ValueError, match=r"^rate must be .*, not "):
    check("rate", value)


def test_numbers_of_numpy_are_numbers():
  checks.fraction("rate", np.float32(0.5))
  checks.positive("rate", np.int64(3))
  checks.nonnegative("rate", np.zeros(()))
  checks.portion("rate", jnp.ones(()))


@pytest.mark.parametrize("check", NUMBERS)
def test_a_traced_number_passes_and_a_concrete_one_is_checked(check):
  jax.eval_shape(functools.partial(check, "rate"), -1.0)
  with pytest.raises(ValueError, match=r"^rate must be .*, not Array\(-1"):
    check("rate", jnp.float32(-1.0))


def test_a_size_that_is_traced_is_refused_with_the_remedy():
  remedy = "workers must be .*: name it in static_args"
  with pytest.raises(ValueError, match=remedy):
    jax.eval_shape(functools.partial(checks.integer, "workers"), 2)
  with pytest.raises(ValueError, match=remedy):
    checks.integer("workers", jnp.int32(2))


def test_a_jax_array_is_never_taken_for_a_number_left_at_zero():
  assert checks.is_zero(0.0) and checks.is_zero(np.zeros(()))
  assert not checks.is_zero(jnp.zeros(())) and not checks.is_zero(0.5)


def test_a_whole_number_may_have_a_largest():
  assert checks.integer("depth", np.int32(9), most=9) == 9
  with pytest.raises(ValueError, match="^depth must be at most 9, not 10$"):
    checks.integer("depth", 10, most=9)


@pytest.mark.parametrize("value", ["no", 1, 0, None, np.ones(2)], ids=repr)
def test_a_flag_is_true_or_false(value):
  checks.flag("wide", True)
  checks.flag("wide", np.False_)
  checks.flag("wide", None, none="as it comes")
  with pytest.raises(ValueError, match="^wide must be True or False, not "):
    checks.flag("wide", value)


def test_an_array_is_shown_on_one_line():
  assert checks.shown(np.eye(2)) == "array([[1., 0.], [0., 1.]])"


def test_a_long_value_is_shown_without_its_middle():
  assert checks.shown([1, 2]) == "[1, 2]"
  text = checks.shown("a" * 5000 + "z")
  assert len(text) == 120
  assert text.startswith("'aaa") and text.endswith("z'") and "[...]" in text


def make(rate: float, name="plain", *, steps: int | None = None, every=(1,)):
  return rate + 1, name.upper(), steps and steps + 1, [*every]


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"rate": "fast"}, "rate must be a number, not 'fast'"),
    ({"rate": 1.0, "name": None}, "name must be a text, not None"),
    ({"rate": 1.0, "steps": "x"}, "steps must be a number or None, not 'x'"),
    ({"rate": 1.0, "every": 2}, "every must be a list, not 2"),
  ],
)
def test_an_argument_of_the_wrong_kind_is_named(kwargs, message):
  with pytest.raises(ValueError) as caught:
    names.call("maker", "make", make, kwargs)
  assert str(caught.value) == message


def test_a_failure_of_another_reason_is_left_as_it_is():
  def fail(rate=1.0):
    return rate + "x"

  with pytest.raises(TypeError):
    names.call("maker", "fail", fail, {"rate": 2.0})
