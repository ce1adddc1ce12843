"""Orders: which worker sends and receives when, as data."""

from asgd.orders import durations, makers, network, play, protocol, trace
from asgd.orders.makers import (
  asynchronous,
  backup_workers,
  build,
  bulk_synchronous,
  fixed_delay,
  stale_synchronous,
  start,
)
from asgd.orders.trace import HEADER, check, dump, load, staleness
