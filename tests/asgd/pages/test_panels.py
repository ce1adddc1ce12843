"""Charts of a cell: the limits of their axes."""

import numpy as np
import pytest

from asgd.pages import panels


@pytest.mark.parametrize("loss", [0.0, 2.5, -3.0, 4.6e25])
def test_a_curve_of_one_value_is_in_the_middle_of_its_axis(loss):
  points = {"a": [(1, loss)]}
  chart = panels._curves("Loss", "messages", points, from_zero=False)
  ((_, _, (_, y)),) = chart.lines
  low, high = panels._range(np.array([loss]), from_zero=False)
  assert low < loss < high
  top = panels.SIZE.top, panels.SIZE.height - panels.SIZE.bottom
  assert y == pytest.approx(sum(top) / 2)
