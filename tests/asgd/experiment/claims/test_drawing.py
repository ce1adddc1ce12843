"""The points of a figure: at numbers of their own, or at a column."""

from asgd.experiment.claims import columns, drawing, figure_file


def made(**panel):
  cells = {
    ("a", 4, seed): columns.CellResult(
      dict(diverged=False, test_loss=seed + 1.0, bytes_up=1e6 * (seed + 1)),
      None,
    )
    for seed in range(3)
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
          title="p", column="test_loss", xlabel="x", ylabel="y",
          series={"mine": [(7, "a")]}, **panel,
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
