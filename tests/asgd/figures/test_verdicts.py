"""Claims about cells whose results are written down here."""

import json
import math
from pathlib import Path

import kit
import numpy as np
import pytest

from asgd.figures import columns, drawing, figure_file, verdicts

COUNTS = {"a": (4, 8), "b": (4, 8), "one": (1,)}
INF = math.inf


def table(made=None, **values):
  """A CellTable of accuracies: label=(of 4 workers, of 8), each by seed."""
  cells = {}
  for label, of_workers in values.items():
    for workers, by_seed in zip(COUNTS[label], of_workers, strict=True):
      for seed, value in enumerate(by_seed):
        result = {"test_accuracy": value, "diverged": value is None}
        cells[label, workers, seed] = columns.CellResult(result, Path())
  return columns.CellTable(cells, made or {})


def figure(*claims, **fields):
  given = {"title": "t", "paper": "p", "about": "a", "claims": list(claims)}
  return figure_file.read("mine", given | fields, COUNTS)


def claim(kind, **data):
  return dict(
    {"name": "c", "says": "s", "kind": kind, "column": "test_accuracy"}, **data
  )


def judged(data, of, counts=COUNTS):
  made = {"fails": {"kind": "first", "column": "test_accuracy", "below": 0.5}}
  (said,) = verdicts.judge(
    figure(data, columns=made).claims, table(made, **of), counts
  )
  return said


FIVE = [0.5, 0.6, 0.7, 0.8, 0.9]
MORE = [value + 0.05 for value in FIVE]


def test_pairs_are_taken_seed_by_seed():
  """Seeds spread far more than two runs of a seed differ."""
  data = claim("ordering", order="rises", runs=["a@8", "b@8"])
  said = judged(data, {"a": (FIVE, FIVE), "b": (FIVE, MORE)})
  assert said.verdict == "PASS"
  (part,) = said.parts
  assert part.part.what == "a@8 < b@8"
  assert part.interval.effect == pytest.approx(0.05)
  back = claim("ordering", order="falls", runs=["a@8", "b@8"])
  said = judged(back, {"a": (FIVE, FIVE), "b": (FIVE, MORE)})
  assert said.verdict == "FAIL"


def test_groups_are_compared_one_with_each():
  data = claim("ordering", order="falls", runs=["b@8", ["a@4", "a@8"]])
  said = judged(data, {"a": (FIVE, MORE), "b": (FIVE, MORE)})
  assert [each.part.what for each in said.parts] == ["b@8 > a@4", "b@8 > a@8"]
  assert [each.verdict for each in said.parts] == ["PASS", "FAIL"]  # ties


def test_monotone_along_the_workers_of_a_run():
  data = claim("monotone", order="rises", runs="a")
  assert judged(data, {"a": (FIVE, MORE)}).verdict == "PASS"
  few = judged(data, {"a": (FIVE[:3], MORE[:3])})
  assert few.verdict == "UNDECIDED"
  assert few.parts[0].why == "3 seeds; the sign test needs 5"


@pytest.mark.parametrize(
  ("bounds", "verdict"),
  [
    ({"above": 0.02}, "PASS"),
    ({"above": 0.05}, "UNDECIDED"),
    ({"below": 0.02}, "FAIL"),
    ({"above": 0.0, "below": 0.1}, "PASS"),
  ],
)
def test_a_difference_lies_between_its_bounds(bounds, verdict):
  near = [v + 0.05 + 0.001 * i for i, v in enumerate(FIVE)]
  near[0] -= 0.002
  data = claim("difference", of="b@4", to="a@4", **bounds)
  assert judged(data, {"a": (FIVE, FIVE), "b": (near, near)}).verdict == verdict


def test_a_ratio_and_a_bound():
  of = {"a": (FIVE, FIVE), "b": ([3 * v for v in FIVE],) * 2}
  said = judged(claim("ratio", of="b@4", to="a@4", above=2.9), of)
  assert said.verdict == "PASS"
  assert said.parts[0].interval.effect == pytest.approx(3)
  assert judged(claim("bound", of="a@4", above=0.3), of).verdict == "PASS"
  assert judged(claim("bound", of="a@4", above=0.7), of).verdict == "UNDECIDED"


def test_a_threshold_is_where_a_line_crosses():
  of = {"a": ([-1.0, -2.0], [3.0, 2.0])}
  data = claim(
    "threshold", runs=[("a@4", 1), ("a@8", 2)], level=0.0, below=2.0
  )
  (part,) = judged(data, of).parts
  assert part.part.values == {0: 1.25, 1: 1.5}
  assert math.isnan(verdicts.crossing([1, 2], [1, 2], 0))
  for odd in (math.nan, INF):  # it is not known whether it did so before
    assert math.isnan(verdicts.crossing([1, 2, 3], [odd, -1, 1], 0))
    assert math.isnan(verdicts.crossing([1, 2], [-1, odd], 0))
  never = judged(data, {"a": ([1.0, 2.0], [3.0, 2.0])})
  assert "2 of 2 seeds have no value" in never.parts[0].why


def test_who_fails_first():
  """A run that never fails does so at infinity; a diverged one has no value."""
  data = claim("ordering", order="rises", runs=["a", "b"]) | {"column": "fails"}
  of = {"a": (FIVE, [0.1] * 5), "b": (FIVE, FIVE)}
  said = judged(data, of)
  assert set(said.parts[0].part.values.values()) == {INF}
  assert said.verdict == "PASS"
  both = judged(data, {"a": of["a"], "b": of["a"]})
  assert set(both.parts[0].part.values.values()) == {0.0}
  assert both.verdict == "FAIL"
  neither = judged(data, {"a": of["b"], "b": of["b"]})  # up to 8 workers
  assert neither.verdict == "UNDECIDED"
  assert "infinite ones" in neither.parts[0].why


def test_what_diverged_is_infinite():
  of = {"a": (FIVE, [None, *FIVE[1:]])}
  said = judged(claim("bound", of="a@8", above=0.3, statistic="sign"), of)
  assert said.parts[0].part.values[0] == INF
  assert said.verdict == "PASS"
  assert judged(claim("bound", of="a@8", above=0.3), of).verdict == "UNDECIDED"
  # It ended early, but is not fast.
  result = {"simulated_time": 2.0, "messages": 4, "diverged": True}
  speed = {"x": dict(kind="quotient", of="messages", by="simulated_time")}
  cells = {("a", 4, 0): columns.CellResult(result, Path())}
  own = columns.CellTable(cells, speed)
  assert own.values("simulated_time", "a", 4) == {0: INF}
  assert own.values("x", "a", 4) == {0: 2.0}


def test_what_was_not_run_is_undecided():
  few = {"a": (4,)}
  data = claim("ordering", order="rises", runs=["a@4", "b@4"])
  said = judged(data, {"a": (FIVE, FIVE)}, few)
  assert said.parts[0].why == "not run at this size"
  data = claim("monotone", order="rises", runs="a")
  assert judged(data, {"a": (FIVE, FIVE)}, few).verdict == "UNDECIDED"
  # One seed of one cell: the other four must not decide alone.
  of = {"a": (FIVE, FIVE), "b": (FIVE, FIVE[:4])}
  data = claim("difference", of="b@8", to="a@8", above=-1.0)
  (part,) = judged(data, of).parts
  assert part.why == "1 of 5 seeds have no value, or infinite ones"


def test_a_part_survives_json():
  data = claim("ordering", order="rises", runs=["a", "b"]) | {"column": "fails"}
  of = {"a": (FIVE, [0.1] * 5), "b": (FIVE, FIVE)}
  said = judged(data, of)
  kept = json.loads(json.dumps(verdicts.as_data(said), allow_nan=False))
  assert verdicts.part_of(kept["parts"][0]) == said.parts[0].part


def test_points_are_of_each_seed_and_of_the_paper(tmp_path):
  panel = {
    "title": "p",
    "column": "test_accuracy",
    "xlabel": "x",
    "ylabel": "y",
    "series": {"A": [(4, "a@4"), (8, "a@8")]},
    "minus": "one",
    "published": [{"title": "t", "source": "s", "points": [(4, 0.25)]}],
  }
  data = figure(claim("bound", of="one", above=0.0), panels=[panel])
  of = table(a=([0.75, 0.5], [None, 1.0]), one=([0.25, 0.5],))
  rows = drawing.points(data, of, COUNTS)
  assert [row["value"] for row in rows] == [0.5, 0.0, INF, 0.5, 0.25]
  assert [row.get("diverged") for row in rows[:3]] == [False, False, True]
  drawing.draw(data, rows, tmp_path / "drawn", "heading")
  first = (tmp_path / "drawn.svg").read_bytes()
  drawing.draw(data, rows, tmp_path / "drawn", "heading")
  assert (tmp_path / "drawn.svg").read_bytes() == first
  for suffix in (".png", ".svg", ".pdf"):
    assert (tmp_path / "drawn").with_suffix(suffix).stat().st_size


def test_a_panel_without_points_is_drawn_empty(tmp_path):
  """A quick version may leave out all cells of a panel."""
  axes = {"title": "p", "column": "test_accuracy", "xlabel": "x", "ylabel": "y"}
  panel = axes | {"series": {"A": [(4, "a@4"), (8, "a@8")]}, "xlog": True}
  data = figure(claim("bound", of="one", above=0.0), panels=[panel])
  drawing.draw(data, [], tmp_path / "drawn", "heading")
  assert (tmp_path / "drawn.svg").stat().st_size


BOUND = claim("bound", of="a@4", above=0.0)
STEPS = claim("ordering", order="rises", runs=["a@4", "a@8"])
CROSSES = claim(
  "threshold", runs=[("a@4", 1), ("a@8", 2)], level=0.0, below=2.0
)
PANEL = {
  "title": "p",
  "column": "test_accuracy",
  "xlabel": "x",
  "ylabel": "y",
  "series": {"A": [(4, "a@4")]},
}
KNOWN = {"title": "t", "source": "s", "points": [(4, 0.25)]}


MISTAKES = (
  ([], "has no claims"),
  ([BOUND | {"of": "ab@4"}], "claim 'c', of: unknown run 'ab'; did you mean"),
  ([BOUND | {"of": "a@5"}], "has no cells with '5' workers, only with 4, 8"),
  ([BOUND | {"of": "a"}], "has several numbers of workers; write a@N"),
  ([BOUND | {"column": "test_acuracy"}], "did you mean 'test_accuracy'"),
  ([BOUND | {"statistic": "z"}], "unknown statistic of claim 'c': 'z'"),
  ([BOUND | {"kind": "boud"}], "did you mean 'bound'"),
  ([BOUND | {"abov": 1}], "has no key 'abov'; did you mean 'above'"),
  ([claim("bound", of="a@4")], "needs 'above' or 'below'"),
  ([claim("ratio", of="a@4", above=1)], "of kind 'ratio' needs 'to'"),
  ([BOUND | {"below": -1.0}], "above 0.0 is not below -1.0"),
  ([claim("ordering", runs=["a@4", "a@8"])], "needs 'order', rises or falls"),
  ([BOUND, BOUND], "two claims have the name 'c'"),
  ([BOUND | {"says": ""}], "claim 'c': says must be a text, not ''"),
  ([claim("threshold", runs=["a@4", "a@8"], level=1, above=0)], "pairs ("),
  ([BOUND | {"above": math.nan}], "above must be a number from"),
  ([BOUND | {"above": None}], "leave it out for no bound"),
  ([BOUND | {"note": 5}], "claim 'c': note must be a text"),
  ([BOUND | {"kind": ["bound"]}], "claim 'c': kind must be a text"),
  *(
    ([BOUND | {"of": of}], "of must be a cell, or a list of cells")
    for of in ([[]], [], 3, None, [[["a@4"]]], {"a@4": 1})
  ),
  ([STEPS | {"runs": ["a@4"]}], "runs must be two or more cells or groups"),
  ([STEPS | {"runs": "a"}], "runs must be two or more cells or groups"),
  ([STEPS | {"by": "x"}], "by must be a number from 0"),
  ([STEPS | {"by": math.nan}], "by must be a number from 0"),
  ([STEPS | {"kind": "monotone", "runs": "one"}], "'one' is one cell"),
  ([STEPS | {"kind": "monotone", "runs": "a@4"}], "unknown run"),
  ([claim("ratio", of="a@4", to="zz", above=1)], "'c', to: unknown run 'zz'"),
  ([claim("ratio", of="a@4", to="one", above=0)], "a number above 0"),
  ([CROSSES | {"level": math.nan}], "level must be a number"),
  ([CROSSES | {"level": "k"}], "level must be a number"),
  ([CROSSES | {"runs": [("a@4", "x"), ("a@8", 1)]}], "x must be a number"),
  ([CROSSES | {"runs": [("a@4", 1), ("a@8", 1)]}], "each at another x"),
  ([CROSSES | {"runs": 7}], "runs must be a list of pairs (cell, x)"),
  (["c"], "claim 0 must be a dict, not 'c'"),
)


test_a_mistake_is_named = kit.refuses(
  MISTAKES, lambda claims: figure(*claims), plain=True, longest=700
)


def test_a_ratio_is_of_positive_numbers():
  """Of two negative ones none is known."""
  data = claim("ratio", of="b@4", to="a@4", above=0.5)
  for one, other in ((-1.0, -1.0), (1.0, -1.0), (0.0, 0.0), (1.0, 0.0)):
    of = {"b": ([one] * 5,) * 2, "a": ([other] * 5,) * 2}
    said = judged(data, of)
    assert said.verdict == "UNDECIDED"
    assert "5 of 5 seeds have no value" in said.parts[0].why


PANELS = (
  ({"minus": "zz"}, "panel 'p', minus: unknown run 'zz'"),
  ({"minus": "a"}, "panel 'p', minus: run 'a' has several"),
  ({"scale": "x"}, "panel 'p': scale must be a finite number"),
  ({"ylim": 5}, "panel 'p': ylim must be a pair"),
  ({"ylim": (2, 1)}, "panel 'p': ylim must be a pair"),
  ({"xlog": True, "series": {"A": [(0, "a@4")]}}, "xlog cannot show x = 0"),
  ({"series": {"A": [(math.nan, "a@4")]}}, "x must be a number"),
  ({"series": {"A": [1, 2]}}, "A must be pairs (x, cell), not 1"),
  ({"series": [(1, "a@4")]}, "panel 'p': series must be a dict"),
  ({"series": {"A": [(4, "a")]}}, "series 'A': run 'a' has several"),
  ({"published": [{"title": "t", "source": "s"}]}, "needs 'points'"),
  ({"published": [KNOWN | {"points": []}]}, "points must be a list"),
  ({"published": [KNOWN | {"points": [(1, "y")]}]}, "y must be a number"),
  ({"published": [KNOWN | {"of": "B"}]}, "unknown of, in published 't'"),
  ({"published": [KNOWN | {"line": "x"}]}, "line must be one of"),
  ({"title": 5}, "panel 0: title must be a text"),
)


test_a_panel_that_cannot_be_drawn_is_named = kit.refuses(
  PANELS, lambda fields: figure(BOUND, panels=[PANEL | fields]), plain=True
)


FIELDS = (
  ({"tuned": 5}, "tuned must be a text"),
  ({"turns": "no"}, "turns must be True or False"),
  ({"quick": "x"}, "quick must be a dict"),
  ({"columns": [1]}, "columns must be a dict"),
  ({"notes": ["c"]}, "notes must be a dict of texts"),
  ({"notes": {"c": 5}}, "notes must be a dict of texts"),
  ({"notes": {"d": "x"}}, "unknown claim in notes: 'd'"),
  (
    {"claims": [BOUND | {"note": "a"}], "notes": {"c": "b"}},
    "claim 'c' has two notes; drop one",
  ),
  ({"claims": 5}, "claims must be a list"),
  ({"panels": [PANEL, PANEL]}, "two panels have the name 'p'"),
)


test_a_field_of_the_figure_is_named = kit.refuses(
  FIELDS, lambda fields: figure(BOUND, **fields)
)


def test_a_note_is_kept_apart_from_its_claim_or_with_it():
  other = BOUND | {"name": "d", "note": "why d"}
  claims = figure(BOUND, other, notes={"c": "why c"}).claims
  assert [claim.note for claim in claims] == ["why c", "why d"]
  assert [claim.note for claim in figure(BOUND).claims] == [""]


def test_numbers_of_numpy_are_numbers_and_texts_one_line():
  own = BOUND | {"above": np.float32(0.25), "says": "a\n b"}
  (read,) = figure(own).claims
  assert read.data["above"] == 0.25
  assert type(read.data["above"]) is float
  assert read.says == "a b"


RECORDS = {
  "worker": [0, 1, 0, 1, 1, 0],
  "time": [1.0, 1.0, 2.0, 3.0, 3.5, 5.0],
  "staleness": [0, 1, 1, 1, 0, 3],
  "gap": [1.0, 1.0, 2.0, 3.0, math.nan, math.nan],  # it has diverged
  # Messages of 1 example, updates of 2 at the rate 0.5.
  "message_norm": [2.0, 4.0, 4.0, 2.0, 2.0, 4.0],
  "update_norm": [0.0, 1.0, 0.0, 1.0, 0.0, 1.0],
}


@pytest.mark.parametrize(
  ("made", "expected"),
  [
    (dict(kind="share", column="staleness", above=0.5), 4 / 6),
    (dict(kind="share", column="staleness", above=0.5, since=0.5), 2 / 3),
    # Durations 1 and 3 of worker 0, 2 and 0.5 of worker 1.
    (dict(kind="share", column="duration", below=0.75), 0.25),
    (dict(kind="deviation", column="staleness"), 1.0),
    (dict(kind="share", column="gap", above=2.5), INF),
    (dict(kind="deviation", column="gap"), INF),
    # g_b^2 = 10 and g_B^2 = 4: |G|^2 = (2 4 - 10) / 1 is no square.
    (dict(kind="noise_scale"), INF),
  ],
)
def test_columns_of_the_records(made, expected, tmp_path):
  np.savez(tmp_path / "records.npz", **RECORDS)
  result = {"messages": 6, "updates": 3, "examples": 6, "learning_rate": 0.5}
  result["diverged"] = made.get("column") == "gap"
  cell = columns.CellResult(result, tmp_path)
  own = columns.CellTable({("a", 4, 0): cell}, {"x": made})
  assert own.values("x", "a", 4)[0] == pytest.approx(expected)
  shares = own.profiles("staleness.csv", "a", 4)[0]
  assert shares == pytest.approx({0: 2 / 6, 1: 3 / 6, 3: 1 / 6})


def test_the_noise_scale_of_known_gradients(tmp_path):
  """|G|^2 = 1 and tr(S) = 8: 1 + 8 / b of messages, 1 + 8 / 2 b of updates."""
  norms = {"message_norm": [3.0, 3.0], "update_norm": [0.0, 0.5 * 5**0.5]}
  np.savez(tmp_path / "records.npz", **norms)
  result = {"messages": 2, "updates": 1, "examples": 2, "learning_rate": 0.5}
  cell = columns.CellResult(result | {"diverged": False}, tmp_path)
  made = {"x": dict(kind="noise_scale")}
  own = columns.CellTable({("a", 4, 0): cell}, made)
  assert own.values("x", "a", 4)[0] == pytest.approx(8.0)
  # Unknown, if each message is an update.
  alone = cell._replace(result=cell.result | {"updates": 2})
  own = columns.CellTable({("a", 4, 0): alone}, made)
  assert math.isnan(own.values("x", "a", 4)[0])


CHANGE = {"kind": "change", "column": "train_loss"}
UNTIL = {"kind": "until", "column": "test_accuracy"}
FIRST = {"kind": "first", "column": "test_accuracy"}


COLUMNS = (
  ({"kind": "reech"}, "did you mean 'reach'"),
  ({"kind": "reach"}, "column 'x' needs 'loss'"),
  ({"kind": "until", "column": "test_loss"}, "needs either 'below' or 'above'"),
  (UNTIL | {"below": 0.1, "above": 0.2}, "needs either 'below' or"),
  ({"kind": "until", "column": "messages", "above": 1}, "unknown column"),
  ({"kind": "at", "column": "test_loss"}, "needs either 'time' or 'epoch'"),
  ({"kind": "at", "column": "test_loss", "time": "x"}, "time must be a number"),
  ({"kind": "first", "column": "test_accuracy"},
   "needs either 'below' or 'above'"),
  ({"kind": "quotient", "of": "nope", "by": "messages"},
   "column 'x': unknown of: 'nope'"),
  ({"kind": "reach", "los": 1}, "has no key 'los'"),
  ({"kind": "reach", "loss": "x"}, "loss must be a number"),
  ({"kind": "reach", "loss": math.nan}, "loss must be a number"),
  *(
    (CHANGE | {"since": since}, "column 'x': since must be a number from 0")
    for since in (1.0, 7, -0.5, "x", math.nan)
  ),
  (FIRST | {"below": "x"}, "below must be a number"),
  (FIRST | {"below": 0.1, "above": 0.2}, "needs either 'below' or"),
  (FIRST | {"column": "nope", "below": 1}, "unknown column of column 'x'"),
  ({"kind": "share", "column": "staleness"}, "needs either 'below' or"),
  ({"kind": "deviation", "column": "time"}, "unknown column"),
  (5, "unknown kind of column 'x': 5"),
)


# A "first" needs the kinds of the columns after it, too.
test_a_column_that_cannot_be_made_is_named = kit.refuses(
  COLUMNS,
  lambda made: figure(
    BOUND, columns={"first": FIRST | {"below": 0.5}, "x": made}
  ),
  plain=True,
)
