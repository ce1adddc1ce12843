"""Orders: which worker sends and receives when, as data."""

from asgd.orders import (
  checking,
  durations,
  makers,
  network,
  play,
  protocol,
  shards,
  trace,
)
from asgd.orders.backups import count_backups
from asgd.orders.checking import check
from asgd.orders.makers import (
  asynchronous,
  backup_tasks,
  backup_workers,
  build,
  bulk_synchronous,
  fixed_delay,
  stale_synchronous,
  start,
)
from asgd.orders.trace import HEADER, dump, load, staleness
