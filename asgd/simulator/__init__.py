"""Simulators: obey a Trace on one machine, with the time of another."""

from asgd.simulator.host import (
  Host,
  Simulation,
  concatenate,
  end_of_message,
  make_host,
)

__all__ = ["Host", "Simulation", "concatenate", "end_of_message", "make_host"]
