"""What schedules declare of themselves, and the table of a run that says no
more than its stages and microbatches."""

import numpy as np
import pytest

from asgd.pipeline import schedules
from asgd.pipeline import table as table_lib

SIZES = dict(stages=4, total=24, batch=8)


def of_run(name, **options):
  return schedules.make(name, **{**SIZES, **options})


def same_tables(one, other):
  for mine, theirs in zip(one, other, strict=True):
    np.testing.assert_array_equal(mine, theirs)


def first_of_the_network(device, state):
  return state.first("B") or state.first("F")


DEFAULTS = {
  "gpipe": lambda: schedules.gpipe(4, 8),
  "one_f_one_b": lambda: schedules.one_f_one_b(4, 8),
  "interleaved": lambda: schedules.interleaved(2, 2, 8),
  "breadth_first": lambda: schedules.breadth_first(2, 2, 8),
  "chimera": lambda: schedules.chimera(4, 8),
  "dualpipe": lambda: schedules.dualpipe(4, 8),
  "dualpipe_v": lambda: schedules.dualpipe_v(2, 8),
  "zero_bubble": lambda: schedules.zero_bubble(range(4), 8, max_activations=4),
  "zb_h1": lambda: schedules.zb_h1(4, 8),
  "zb_h2": lambda: schedules.zb_h2(4, 8),
  "zb_v": lambda: schedules.zb_v(2, 8),
  "v_half": lambda: schedules.v_half(2, 8),
  "v_min": lambda: schedules.v_min(2, 8),
  "pipedream": lambda: schedules.pipedream(4, 24),
  "pipedream_2bw": lambda: schedules.pipedream_2bw(4, 24, every=8),
  "stale": lambda: schedules.stale(4, 24),
  "pipemare": lambda: schedules.pipemare(4, 24),
  "ftpipe": lambda: schedules.ftpipe(range(4), 24),
  "custom": lambda: schedules.custom(
    first_of_the_network, devices=range(4), microbatches=8
  ),
}


def test_every_schedule_has_a_default_here():
  assert list(DEFAULTS) == list(schedules.SCHEDULES)


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_run_of_a_schedule_is_its_table(name):
  options = {"rule": first_of_the_network} if name == "custom" else {}
  table = of_run(name, **options)
  assert table.name == name
  same_tables(table, DEFAULTS[name]())
  same_tables(of_run(name.replace("_", "-"), **options), table)
  assert table.flush == schedules.describe(name).flush
  weights = {"pipedream_2bw": "2bw"}
  weights |= dict.fromkeys(("stale", "pipemare", "ftpipe"), "latest")
  default = "latest" if table.flush else weights.get(name, "stash")
  assert schedules.weights_of(table) == default
  again = [name == "ftpipe"] * (table.stages - 1) + [False]
  assert list(schedules.recompute_of(table)) == again


def test_options_are_those_that_do_not_follow_from_the_run():
  assert schedules.describe("gpipe").options == ("reverse",)
  assert schedules.describe("interleaved").options == ("chunks", "group")
  assert schedules.describe("zb_v").options == ()
  assert schedules.describe("ftpipe").options == (
    *("devices", "stage_depth", "supremum"),
  )
  assert schedules.describe("custom").options == ("rule", "devices", "flush")
  assert schedules.describe("my.csv").options == ()
  partitioners = {
    name: traits.partitioner
    for name, maker in schedules.SCHEDULES.items()
    if (traits := maker.traits).partitioner
  }
  assert partitioners == {
    "pipedream": "pipedream",
    **dict.fromkeys(("ftpipe", "custom"), "mixed_pipe"),
  }
  with pytest.raises(ValueError, match="did you mean 'gpipe'"):
    schedules.describe("gpip")


def test_options_and_every_change_the_table():
  same_tables(of_run("gpipe", every=4), schedules.gpipe(4, 4))
  same_tables(
    of_run("gpipe", reverse=True), schedules.gpipe(4, 8, reverse=True)
  )
  same_tables(of_run("interleaved", chunks=4), schedules.interleaved(1, 4, 8))
  same_tables(of_run("stale", every=2), schedules.stale(4, 24, every=2))
  same_tables(
    of_run("pipedream", replicas=[2, 1, 1, 1]),
    schedules.pipedream(4, 24, replicas=(2, 1, 1, 1)),
  )
  same_tables(
    of_run("ftpipe", devices=[0, 1, 0, 1]), schedules.ftpipe((0, 1, 0, 1), 24)
  )
  table = of_run("custom", rule=first_of_the_network, flush=False)
  assert (table.every, table.microbatches, table.flush) == (1, 24, False)
  assert schedules.weights_of(table) == "stash"


def test_a_rule_may_be_named_by_its_place(tmp_path, monkeypatch):
  (tmp_path / "a_rule_of_mine.py").write_text(
    "def rule(device, state):\n  return state.first('B') or state.first('F')\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  same_tables(
    of_run("custom", rule="a_rule_of_mine:rule"), DEFAULTS["custom"]()
  )


def test_a_table_in_a_file_is_taken_as_it_is(tmp_path):
  path = tmp_path / "mine.csv"
  table = schedules.gpipe(2, 8)
  path.write_text(table_lib.to_csv(table))
  for stages in (None, 2):
    same_tables(of_run(str(path), stages=stages), table)
  path.write_text(table_lib.to_csv(schedules.stale(2, 24, every=2)))
  table = of_run(str(path), stages=None)
  assert (table.microbatches, table.every) == (24, 2)
  assert schedules.weights_of(table) == "latest"  # as it is named `stale`
  for options, key, words in (
    (dict(stages=3), "stages", "3 are not the 2 of"),
    (dict(stages=None, every=3), "every", "2 microbatches in an update.*=2"),
    (dict(stages=None, total=25), "schedule", "has 24 microbatches, 2 in an"),
    (dict(stages=None, reverse=True), "reverse", "is no option"),
  ):
    with pytest.raises(schedules.OptionError, match=words) as caught:
      of_run(str(path), **options)
    assert caught.value.key == key
  path = tmp_path / "mine.txt"
  path.write_text("# own; every 1\n0 | F0 tidy B0\n")
  with pytest.raises(schedules.OptionError, match=r"actions \['tidy'\]"):
    of_run(str(path), stages=None, total=1)
  path.write_text("# infers; every 1\n0 | F0\n")
  with pytest.raises(ValueError, match="no backward: there is nothing to"):
    of_run(str(path), stages=None, total=1)
  with pytest.raises(schedules.OptionError, match="cannot be read: No such"):
    of_run("none.txt", stages=None)


REFUSED = {
  "every": (("pipedream", dict(every=5)),
    "^every 5 does not divide the 24 .* divisor such as 1"),
  "zero": (("gpipe", dict(every=0)), "^every must be a positive whole number"),
  "chunks": (("interleaved", dict(chunks=0)), "^chunks must be a positive"),
  "odd stages": (("zb_v", dict(stages=3)),
    "^stages 3 are no multiple of the 2 stages on each device.*stages=4"),
  "devices": (("ftpipe", dict(devices=[0, 1])),
    r"^devices must be a device for each of 4 stages, not \[0, 1\]"),
  "text": (("ftpipe", dict(devices="0123")), "^devices must be a device for"),
  "no rule": (("custom", {}), "^rule must name a function"),
  "rule": (("custom", dict(rule="os:nothing")),
    "^rule must name .* 'my_module:my_rule', not 'os:nothing' .*no attribute"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_does_not_fit_is_named(name):
  (schedule, options), words = REFUSED[name]
  with pytest.raises(schedules.OptionError, match=words) as caught:
    of_run(schedule, **options)
  assert str(caught.value).startswith(caught.value.key)


def test_other_mistakes_are_those_of_the_maker():
  with pytest.raises(ValueError, match="option of gpipe 'chunks'"):
    of_run("gpipe", chunks=2)
  with pytest.raises(ValueError, match="stages must be even"):
    of_run("chimera", stages=3)
  with pytest.raises(ValueError, match="are the most: lower one of these"):
    of_run("stale", total=10**7)


def test_recomputation_is_of_all_stages_or_all_but_the_last_or_some():
  table = schedules.gpipe(3, 4)
  for said, expected in (
    (None, [False, False, False]),
    (False, [False, False, False]),
    (True, [True, True, True]),
    ("but_last", [True, True, False]),
    ([0, 2], [True, False, True]),
    ([], [False, False, False]),
  ):
    assert list(schedules.recompute_of(table, said)) == expected
  with pytest.raises(schedules.OptionError, match="^recompute must be stages"):
    schedules.recompute_of(table, [3])


def test_weights_must_fit_the_table():
  flushes, table = schedules.gpipe(2, 4), schedules.pipedream(2, 4)
  with pytest.raises(schedules.OptionError, match="^weights '2bw' is for asyn"):
    schedules.weights_of(flushes, "2bw")
  assert schedules.weights_of(flushes, "stash") == "stash"
  assert schedules.weights_of(table, "vertical") == "vertical"
  with pytest.raises(ValueError, match="weights must be one of"):
    schedules.weights_of(table, "newest")
  with pytest.raises(table_lib.ScheduleError, match="needs more microbatches"):
    schedules.weights_of(schedules.pipedream(4, 8), "2bw")
