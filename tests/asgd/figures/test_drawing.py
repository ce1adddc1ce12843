"""The points of a figure: at numbers of their own, at a column, of a file."""

import kit
import pytest

from asgd.experiment import folder
from asgd.figures import columns, drawing, figure_file


def made(places=(None,) * 3, **panel):
  cells = {
    ("a", 4, seed): columns.CellResult(
      dict(diverged=False, test_loss=seed + 1.0, bytes_up=1e6 * (seed + 1)),
      place,
    )
    for seed, place in enumerate(places)
  }
  figure = figure_file.read(
    "it",
    {
      **dict.fromkeys(("title", "paper", "about"), "what"),
      "claims": [
        dict(
          name="c", says="s", kind="bound", column="test_loss", of=["a"],
          above=0,
        )
      ],
      "panels": [
        dict(
          title="p", xlabel="x", ylabel="y", series={"mine": [(7, "a")]},
          **{"column": "test_loss", **panel},
        )
      ],
    },
    {"a": [4]},
  )
  table = columns.CellTable(cells, {})
  return drawing.points(figure, table, {"a": [4]})


def test_the_x_of_a_cell_is_given_or_the_mean_of_a_column():
  assert [row["x"] for row in made()] == [7] * 3
  rows = made(xcolumn="bytes_up", xscale=1e-6)
  assert [row["x"] for row in rows] == [2.0] * 3
  assert [row["value"] for row in rows] == [1.0, 2.0, 3.0]


def test_a_histogram_has_the_shares_of_what_each_cell_counted(tmp_path):
  places = [tmp_path / str(seed) for seed in range(3)]
  counts = "-2,3\n-1,9\n", "-1,5\n"
  for place, counted in zip(places[:2], counts, strict=True):
    place.mkdir()
    (place / "staleness.csv").write_text(f"differential,rows\n{counted}")
  rows = made(places, column="staleness.csv", scale=100.0)
  # Of the value that seed 1 has not met there are none; seed 2 has no file.
  assert [(row["seed"], row["x"], row["value"]) for row in rows] == [
    *((0, 5, 25), (0, 6, 75), (1, 5, 0), (1, 6, 100)),
  ]
  for key, value in {"minus": "a", "xcolumn": "bytes_up"}.items():
    with pytest.raises(ValueError, match=f"{key} '{value}' is not for"):
      made(places, column="staleness.csv", **{key: value})


@pytest.mark.parametrize("clock", ["time", "seconds"])
def test_a_run_is_a_curve_along_its_evaluations(monkeypatch, clock):
  """Seed 2 has diverged after one of them; places are seeds here. The clock of
  a live run has another name."""

  def read_rows(place):
    del place
    seed = next(seeds)
    return [
      {clock: i + seed / 2, "test_loss": 10.0 * i + seed}
      for i in range(1 if seed == 2 else 2)
    ]

  seeds = iter(range(3))
  monkeypatch.setattr(folder, "read_rows", read_rows)
  rows = made(along="time", scale=2.0)
  assert [(row["x"], row["seed"], row["value"]) for row in rows] == [
    *((0.5, seed, 2.0 * seed) for seed in range(3)),
    *((1.25, seed, 2.0 * (10 + seed)) for seed in range(2)),
  ]


test_a_curve_that_cannot_be_drawn_is_refused = kit.refuses(
  [
    ({"along": "clock"}, "unknown along: 'clock'; known: epoch, time"),
    ({"along": "time", "xcolumn": "bytes_up"}, "has xcolumn 'bytes_up': drop"),
  ],
  lambda panel: made(**panel),
)
