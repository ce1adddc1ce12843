"""Simulators: obey a Trace on one machine, with the time of another."""

from asgd.simulator.host import (
  Group,
  Host,
  Row,
  Simulation,
  Steps,
  as_totals,
  compile_steps,
  compile_work,
  concatenate,
  end_of_message,
  fetch,
  make_host,
  records,
  start,
)
from asgd.simulator.sharded import Sharded, run_sharded

__all__ = [
  "Group",
  "Host",
  "Row",
  "Sharded",
  "Simulation",
  "Steps",
  "as_totals",
  "compile_steps",
  "compile_work",
  "concatenate",
  "end_of_message",
  "fetch",
  "make_host",
  "records",
  "run_sharded",
  "start",
]
