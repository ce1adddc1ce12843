"""The page of `asgd watch`, fetched while a run goes on and afterwards."""

import contextlib
import csv
import html
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from xml.etree import ElementTree

import kit
import numpy as np
import pytest

from asgd.experiment import (
  cell_files,
  cell_progress,
  folder,
  live_files,
  report,
)
from asgd.live import journal
from asgd.pages import panels, run_files
from launch import watch

ATTACK = "<script>alert(1)</script> & co"


@contextlib.contextmanager
def serving(workdir):
  """Serves a run's page; yields a function that fetches it."""
  server = watch.PageServer(workdir, 0)
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  thread.start()

  def fetch(path="", **headers):
    request = urllib.request.Request(server.address + path, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
      return answer.read().decode()

  try:
    yield fetch
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


class Looking(kit.StopAfter):
  """A bar that fetches the page after each update."""

  def __init__(self, fetch, messages=float("inf")):
    super().__init__(messages)
    self._fetch, self.counted, self.pages = fetch, 0, []

  def update(self, cell, progress):
    super().update(cell, progress)
    self.counted += progress.messages
    self.pages.append((self.counted, self._fetch()))


def facts(text):
  """Returns the numbers above the charts of a page's first panels."""
  pairs = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)
  return {name: html.unescape(value) for name, value in reversed(pairs)}


def staleness(text):
  """Returns the counts of the histogram of staleness, by the least staleness
  of each bar."""
  chart = text.partition("<figcaption>Staleness")[2].partition("</svg>")[0]
  bars = re.findall(r"<title>(\d+)[^:]*: ([\d,]+) messages", chart)
  return {int(low): int(count.replace(",", "")) for low, count in bars}


def assert_agrees(text, place):
  """Asserts that a page has the numbers of a finished cell's records."""
  records = cell_files.read_records(place)
  count = len(records["loss"])
  assert facts(text)["messages"] == f"{count:,} of {count:,}"
  bars, most = staleness(text), records["staleness"].max() + 1
  counts, _ = np.histogram(records["staleness"], [*bars, max(most, *bars) + 1])
  assert list(bars.values()) == counts.tolist()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """(folder of a finished simulated run, its page, pages while it went on)."""
  workdir = tmp_path_factory.mktemp("watched") / "a <b> run"
  runs = {"a": {"recipe": "asgd", "title": ATTACK}}
  exp = kit.tiny(runs=runs)
  folder.open_folder(str(workdir), "x", exp)
  with serving(workdir) as fetch, pytest.MonkeyPatch.context() as patch:
    patch.setattr(cell_progress, "_FIRST_WRITE", 0.0)
    assert "no cell has begun yet" in fetch()
    bar = Looking(fetch)
    kit.train(exp, workdir, bar=bar)
    report.write(workdir, exp)
    return workdir, fetch(), bar.pages


def test_a_simulated_run_is_shown_while_it_goes_on(finished):
  _, _, pages = finished
  counted, first = pages[0]
  assert facts(first)["messages"] == f"{counted} of 24"
  assert sum(staleness(first).values()) == counted
  assert "training" in first
  # Tables count clocks, so the axis is not called updates.
  assert ">staleness</text>" in first and ">updates</text>" not in first
  for panel in ("Rate", "Loss", "Staleness", "Gap", "Bytes"):
    assert f"<figcaption>{panel}" in first
  assert 'rect class="compute"' in first


def test_the_page_of_a_finished_run_has_the_numbers_of_its_results(finished):
  workdir, text, _ = finished
  assert_agrees(text, workdir / "cells" / "a-n2-s0")
  with (workdir / "results.csv").open() as file:
    (row,) = csv.DictReader(file)
  shown = facts(text)
  assert shown["test loss"] == f"{float(row['test_loss']):.4g}"
  assert shown["accuracy"] == f"{100 * float(row['test_accuracy']):.1f} %"
  mean = float(row["staleness_mean"])
  assert shown["staleness"] == f"{mean:.3g}"
  # The report has the same panels.
  assert_agrees(
    (workdir / "report.html").read_text(), workdir / "cells/a-n2-s0"
  )


def test_names_are_text(finished):
  workdir, text, _ = finished
  assert "<h1>a &lt;b&gt; run</h1>" in text
  assert "<script>alert" not in text
  place = workdir / "cells" / "a-n2-s0"
  odd = workdir / "cells" / "<script>alert(1)<!-- &"
  shutil.copytree(place, odd)
  try:
    with serving(workdir) as fetch:
      text = fetch("?cell=%3Cscript%3Ealert(1)%3C!--%20%26")
  finally:
    shutil.rmtree(odd)
  assert "<script>alert" not in text
  assert "<h2>&lt;script&gt;alert(1)&lt;!-- &amp; <span" in text


def test_a_live_run_is_shown_while_it_goes_on(tmp_path, monkeypatch):
  pages = []

  class Bar(kit.StopAfter):
    def update(self, cell, progress):
      super().update(cell, progress)
      if len(pages) < 3:
        pages.append(watch.render(tmp_path))

  monkeypatch.setattr(kit, "StopAfter", Bar)
  for name in ("_FIRST_WRITE", "_INTERVAL", "_PAUSE_FACTOR"):
    monkeypatch.setattr(cell_progress, name, 0.0)
  place, result, _ = kit.train_live(tmp_path, stop=(40,), live={"spans": True})
  assert "training" in pages[0]
  assert 0 < sum(staleness(pages[0]).values()) <= result["messages"]
  with serving(tmp_path) as fetch:
    text = fetch()
    # A kill while a line was written leaves a part of it.
    for name in ("metrics.jsonl", "trace-0.csv", "spans-0.csv"):
      with (place / name).open("a") as file:
        file.write('{"message": 3')
    assert facts(fetch()) == facts(text)
  assert_agrees(text, place)
  sent = [panels.bytes_text(result[f"bytes_{way}"]) for way in ("up", "down")]
  assert facts(text)["bytes up, down"] == ", ".join(sent)
  assert 'rect class="wire"' in text
  assert "resumed at message" in text
  # The clock is that of the result: without the start-up of the workers.
  progress = run_files.read_progress(place)
  assert progress["seconds"] == pytest.approx(result["seconds"], abs=1e-6)
  first = live_files.first_ticket(journal.read_journal(place / "trace-0.csv"))
  assert first > 0
  starts = {
    (part.lane, round(part.start - first, 4))
    for part in cell_progress.read_work(place)
  }
  shown = {(lane, start) for lane, _, start, _ in progress["work"]}
  # Workers may have written a few spans after the last write of the file.
  assert len(shown & starts) > len(shown) / 2
  seconds = [point[0] for point in progress["points"]]
  assert seconds == sorted(seconds)
  assert seconds[-1] <= result["seconds"] + 1e-3


def test_a_cell_without_or_with_a_damaged_progress_has_no_panels(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  place = kit.write_live_cell(tmp_path, [])
  with serving(tmp_path) as fetch:
    assert "no message was received yet" in fetch()
    broken = '{"points": 3}', '{"messages": "x", "total": 3}', " " * 2**24
    for number, content in enumerate(("{", "[]", *broken)):
      (place / "progress.json").write_text(content)
      os.utime(place / "progress.json", (number, 2e9 + number))
      assert "no message was received yet" in fetch()


def test_the_state_of_a_cell_is_that_of_its_files(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  place = kit.write_live_cell(tmp_path, [])
  with serving(tmp_path) as fetch:
    assert "<td>stopped</td>" in fetch()
    (place / ".lock").touch()
    assert "<td>training</td>" in fetch()
    for path in place.iterdir():
      os.utime(path, (0, 0))
    assert "<td>silent</td>" in fetch()


def test_only_programs_of_this_machine_get_the_page(finished):
  workdir, text, _ = finished
  with serving(workdir) as fetch:
    for path, headers in (("", {"Host": "evil.example:80"}), ("etc", {})):
      with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(path, **headers)
      assert refused.value.code in (403, 404)
      refused.value.close()
    (workdir / "config.json").rename(workdir / "away")
    try:
      with pytest.raises(urllib.error.HTTPError) as gone:
        fetch()
      gone.value.close()
    finally:
      (workdir / "away").rename(workdir / "config.json")


def test_mistakes_get_one_line_with_the_remedy(finished, tmp_path, capsys):
  workdir, *_ = finished
  empty, other = tmp_path / "empty", tmp_path / "other"
  empty.mkdir(), other.mkdir()
  (other / "notes.txt").write_text("mine")
  taken = socket.socket()
  taken.bind(("127.0.0.1", 0))
  taken.listen()
  port = taken.getsockname()[1]
  mistakes = {
    (): "no run is named: write asgd watch WORKDIR",
    (tmp_path / "no" / "no",): "does not exist: name the folder of a run, or",
    (other / "notes.txt",): "is a file: name the folder",
    (empty,): "is empty, no run has begun in it: start asgd train",
    (other,): "has a config.json: name a folder that asgd train made",
    (workdir, f"--port={port}"): "choose another with --port",
    (workdir, "--port=99999"): "choose another with --port",
    (workdir, "--port=8642x"): "--port: invalid int value: '8642x'; asgd watch",
    (workdir, "--cell=nope", f"--picture={other}/p.svg"): "no cell 'nope'",
  }
  with taken:
    for words, said in mistakes.items():
      with pytest.raises(SystemExit) as end:
        watch.main(list(map(str, words)))
      assert end.value.code == 2
      (line,) = capsys.readouterr().err.splitlines()
      assert line.startswith("error: ")
      assert said in line


def test_it_waits_for_a_folder_whose_parent_exists(tmp_path, capsys):
  workdir = tmp_path / "run"
  # A run makes the folder, and writes config.json later.
  steps = iter([workdir.mkdir, (workdir / "config.json").touch])
  watch.wait_for_folder(workdir, lambda seconds: next(steps)())
  assert not list(steps)
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith(f"waiting for {workdir}, which does not exist yet")
  # A folder that exists, and a mistake, are not waited for.
  for path in (workdir, tmp_path / "no" / "no"):
    watch.wait_for_folder(path, lambda seconds: next(steps)())
  assert not capsys.readouterr().out


def test_ctrl_c_ends_the_wait(tmp_path, capsys, monkeypatch):
  def interrupted(seconds):
    raise KeyboardInterrupt

  clock = types.SimpleNamespace(sleep=interrupted)
  monkeypatch.setattr(watch, "time", clock)
  watch.main([str(tmp_path / "run")])
  said = capsys.readouterr()
  assert said.out.startswith("waiting for") and not said.err


def test_a_picture_is_a_file_of_svg(finished, tmp_path, capsys):
  workdir, *_ = finished
  path = tmp_path / "panels.svg"
  watch.main([str(workdir), "--cell=a-n2-s0", f"--picture={path}"])
  assert capsys.readouterr().out == f"{path}\n"
  root = ElementTree.parse(path).getroot()
  assert root.tag.endswith("}svg")
  rects = root.iter("{http://www.w3.org/2000/svg}rect")
  assert {"bar", "compute"} <= {rect.get("class") for rect in rects}


def test_it_does_not_import_jax():
  code = "import sys, launch.watch; sys.exit('jax' in sys.modules)"
  subprocess.run([sys.executable, "-c", code], cwd=kit.ROOT, check=True)
