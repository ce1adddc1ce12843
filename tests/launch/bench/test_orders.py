"""The benchmark of orders measures each protocol, made in both ways."""

import pytest

from launch.bench import orders
from launch.bench.report import BenchReport


def test_each_protocol_is_measured_by_workers(monkeypatch, capsys):
  monkeypatch.setattr(orders, "_WORKERS", (4, 8))
  monkeypatch.setattr(orders, "_MESSAGES", 40)
  monkeypatch.setattr(orders, "_PLAYED_MESSAGES", 20)
  report = BenchReport()
  orders.run(report, rounds=2)
  names = [*orders._protocols(8, 1)]
  assert [row["name"] for row in report.rows] == 2 * names
  assert all(row["values"]["us, 8"] > 0 for row in report.rows)
  assert "growth" in capsys.readouterr().out


def test_the_first_call_does_not_count(monkeypatch):
  monkeypatch.setattr(orders, "_WORKERS", (4, 8))
  monkeypatch.setattr(orders, "_protocols", lambda *_: {"any": None})
  seconds = iter([9.0, 1.0, 2.0, 1.0, 2.0])
  report = BenchReport()
  orders._by_workers(report, "t", lambda *_: next(seconds), 2)
  (row,) = report.rows
  assert row["measured"]["growth to 8,192 workers"]["range"] == [2.0, 2.0]


@pytest.mark.process
def test_a_large_order_is_made_in_a_process_of_its_own(monkeypatch):
  monkeypatch.setattr(orders, "_LARGE", {16: 64})
  name = "bulk synchronous"
  monkeypatch.setattr(orders, "_protocols", lambda *sizes: {name: sizes})
  monkeypatch.setattr(orders, "_make", None)  # this process makes none
  report = BenchReport()
  orders.run(report, large=True)
  (row,) = report.rows
  assert row["name"] == f"{name}, 16"
  assert row["values"]["M rows"] > 0
  assert 0 < row["measured"]["GB at most"]["median"] < 4
