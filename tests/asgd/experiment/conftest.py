"""Results without limits of curvature, but for the contract of engines: it has
results of other processes, too."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def limits(request):
  if request.path.stem != "test_engine_contract":
    request.getfixturevalue("no_limits")
