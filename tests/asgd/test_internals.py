"""A library that lacks what is used of it is refused by one clear error."""

import jax
import pytest

from asgd import internals


@pytest.mark.parametrize(
  "path", ["jax.extend.core.Gone", "jax._src.gone.thing", "jax.gone.thing"]
)
def test_what_a_version_lacks_is_named_with_the_versions_that_have_it(
  path, monkeypatch
):
  needs = ["numpy<3,>=2.0", 'jax<0.11,>=0.10; python_version > "3"']
  monkeypatch.setattr(internals.metadata, "requires", lambda name: needs)
  with pytest.raises(ImportError) as told:
    internals.imported(path)
  assert str(told.value) == (
    f"asgd uses {path}, which jax {jax.__version__} does not have: pip install"
    " 'jax<0.11,>=0.10'"
  )


def test_what_is_required_is_read_from_the_package(monkeypatch):
  assert internals.requirement("jax")[:4] in ("jax<", "jax>")
  assert internals.requirement("ray")[:4] in ("ray<", "ray>")  # of an extra
  for needs in (["ray[default]>=2,<3; extra == 'ray'"], None):
    monkeypatch.setattr(internals.metadata, "requires", lambda _, n=needs: n)
    assert internals.requirement("ray") == ("ray>=2,<3" if needs else "ray")
