"""Orders: which worker sends and receives when, as data.

  rules + durations --> Dispatcher (`protocol`) --> rows --> base.Trace

`makers` has one function for each protocol; `build` calls them by name. Makers
play a `Dispatcher` with drawn `durations`, event by event (`play`), or compute
its rows in NumPy columns (`columns`), optionally over a `network`. `trace`
defines the rows, and the `Ledger` that tracks open tickets. `checking` finds
rows that a protocol forbids.
Start with the example in `trace`.
"""

from asgd.orders import (
  checking,
  durations,
  makers,
  network,
  own,
  partial_reads,
  play,
  protocol,
  shards,
  stops,
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
from asgd.orders.stops import with_stops
from asgd.orders.trace import HEADER, dump, load, staleness
