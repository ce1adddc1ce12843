"""What is said of a live run while it goes."""

import event_files
import kit
import numpy as np
import pytest

from asgd.experiment import live_figures


def records(*rows):
  """(update, worker, staleness, gap) of each message."""
  update, worker, staleness, gap = zip(*rows, strict=True) if rows else [()] * 4
  return kit.records(
    len(update),
    update=np.array(update, np.int32),
    worker=np.array(worker, np.int32),
    staleness=np.array(staleness, np.int32),
    gap=np.array(gap, np.float32),
    bytes_up=np.full(len(update), 60),
    bytes_down=np.full(len(update), 40),
  )


def test_rates_are_counts_by_seconds():
  counter = live_figures.Counter(3, 10.0)
  counter.add(
    12.0, records((1, 0, 0, 0.5), (2, 2, 1, 1.5), (2, 0, 1, 1.0), (3, 0, 2, 1))
  )
  seen = counter.figures(0.5)  # of two shards
  assert seen.updates == 3 / 2
  assert seen.messages == 2
  np.testing.assert_array_equal(seen.workers, [1.5, 0, 0.5])
  np.testing.assert_array_equal(seen.staleness, [1, 2, 1])
  assert seen.staleness_mean == 1
  assert seen.gap == 1
  assert seen.bytes == 400


def test_only_the_last_seconds_count():
  counter = live_figures.Counter(1, 0.0)
  counter.add(1.0, records((1, 0, 9, 9.0)))
  for second in range(2, 12):
    counter.add(float(second), records((second, 0, 1, 2.0)))
  seen = counter.figures()
  assert seen.messages == seen.updates == 1
  np.testing.assert_array_equal(seen.staleness, [0, 5])
  assert seen.gap == 2


def test_rates_fall_when_nothing_comes():
  counter = live_figures.Counter(1, 0.0)
  counter.add(1.0, records((1, 0, 0, 0.0), (2, 0, 0, 0.0)))
  assert counter.figures().messages == 2
  counter.add(4.0, records())
  assert counter.figures().messages == 2 / 4
  for second in (5.0, 6.0, 7.0):
    counter.add(second, records())
  seen = counter.figures()
  assert seen.messages == 0
  assert np.isnan(seen.gap)
  assert np.isnan(seen.staleness_mean)


def test_neither_start_up_nor_what_was_done_before_a_stop_is_counted():
  counter = live_figures.Counter(1, 0.0)
  for second in range(1, 4):
    counter.add(float(second), records())
  counter.add(4.0, records((1001, 0, 0, 0.0)))
  assert counter.figures().messages == 1
  assert counter.figures().updates == 1


@pytest.mark.parametrize(
  "counts, text",
  [
    ([3, 10, 55, 30, 2], "0:3 1:10 2:55 3:30 4+:2 %"),
    ([0, 0, 0, 7], "0:0 1:0 2:0 3:100 %"),
    ([5], "0:100 %"),
    ([], "-"),
    ([0, 0], "-"),
    # Of width two; the first takes what is below, the last what is above.
    ([1] + 9 * [0] + 10 * [10] + [0, 1],
     "0-11:21 12-13:20 14-15:20 16-17:20 18-19:20 20+:1 %"),
    ([0] * 31 + [100] + [0] * 8 + [1], "0-31:99 32+:1 %"),
  ],
)
def test_a_histogram_in_words(counts, text):
  assert live_figures.histogram(counts) == text


def test_a_sparkline_has_a_block_a_bin():
  assert live_figures.sparkline([0, 7, 1, 0]) == "▁█▂"
  assert live_figures.sparkline([]) == live_figures.sparkline([0]) == ""
  assert len(live_figures.sparkline(np.ones(100, int))) == 8


@pytest.mark.parametrize(
  "rate, text",
  [
    (0, "0 B/s"),
    (999.4, "999 B/s"),
    (12345, "12.3 kB/s"),
    (7.1e7, "71 MB/s"),
    (3e9, "3 GB/s"),
  ],
)
def test_bytes_have_a_unit(rate, text):
  assert f"{live_figures.bytes_text(rate)}/s" == text


def figures(workers):
  return live_figures.Figures(
    980.0, 985.0, np.array(workers, float), np.array([1, 1, 8]), 1e-4, 7.1e7
  )


def test_the_line_tells_of_each_worker_or_of_the_slowest():
  few = live_figures.long_text(figures([240, 250]))
  assert few == (
    "980 updates/s, 71 MB/s, messages/s of each worker 240 250, staleness 0:10"
    " 1:10 2:80 %"
  )
  many = live_figures.long_text(figures([10] * 8 + [3, 20]))
  assert "each worker 3 (worker 8) to 20 (worker 9), median 10," in many


def test_the_bar_gets_a_few_words():
  text = live_figures.short_text(figures([240, 250]))
  assert text == "▂▂█ 980 upd/s 71 MB/s worker 240-250/s"


def test_the_lead_has_its_share_of_the_parameters():
  params = {"w": np.zeros((100, 64), np.float32)}
  assert live_figures.lead_share(params, 1) == 1
  assert live_figures.lead_share(params, 4) == 0.25


def events(folder):
  """Reads a board: tag -> [(step, value)]."""
  found = {}
  for path in folder.iterdir():
    for event in event_files.read(path):
      for value in event.summary.value:
        held = value.simple_value
        if value.HasField("histo"):
          held = list(value.histo.bucket)
        found.setdefault(value.tag, []).append((event.step, held))
  return found


def test_the_board_has_curves_and_the_histogram(tmp_path):
  pytest.importorskip("tensorboardX")
  board = live_figures.Board(tmp_path)
  board.write(0.0, 10, figures([240, 250]))
  board.write(0.9, 20, figures([1, 1]))  # too early
  board.write(1.0, 30, figures([2, 3]))
  board.close()
  found = events(tmp_path)
  assert found["live/updates_per_second"] == [(10, 980.0), (30, 980.0)]
  assert found["live_workers/1_messages_per_second"] == [(10, 250), (30, 3)]
  assert found["live/staleness"][0] == (10, [1, 1, 8])
  means = [step for step, _ in found["live/staleness_mean"]]
  assert means == [10, 30]
  rates = {f"live/{name}_per_second" for name in ("updates", "messages")}
  each = {f"live_workers/{w}_messages_per_second" for w in range(2)}
  others = {"live/staleness_mean", "live/gap", "live/bytes_per_second"}
  assert set(found) == rates | each | others | {"live/staleness"}


def test_without_tensorboardx_there_is_no_board(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
  board = live_figures.Board(tmp_path / "board")
  board.write(0.0, 1, figures([1]))
  board.close()
  assert not (tmp_path / "board").exists()
