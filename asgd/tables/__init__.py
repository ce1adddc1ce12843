"""Tables of keyed rows: a parameter server that workers pull rows from.

  worker: Work -> Client -- Push -->  TableServer -> Table (RowFunction)
                         <-- Rows --  ConsistencyRules: waits, and rows to send

- `table` returns the settings of a run, `Work` is the computation of workers.
- `Table` has rows by key on the shards of a server. `Client` and `TableServer`
  are the two sides of the consistency models (`Consistency`).
- `Simulation` and `OverNetwork` run both sides in simulated time (`TableRun`).
- `shard`, `worker` and `requests` are the participants of a live run
  (`asgd.live.tables`), where shards order requests independently; `replay`
  recomputes such a run.

Begin with `settings.table`, then `simulation`. See docs/tables.md.
"""

import sys

from asgd import names
from asgd.tables import filters as filters
from asgd.tables import functions as functions
from asgd.tables import keys as keys
from asgd.tables import replay as replay
from asgd.tables import tasks as tasks
from asgd.tables.client import Client as Client
from asgd.tables.client import TableSpec as TableSpec
from asgd.tables.consistency import CONSISTENCIES as CONSISTENCIES
from asgd.tables.consistency import Consistency as Consistency
from asgd.tables.consistency import ConsistencyRules as ConsistencyRules
from asgd.tables.consistency import rules as rules
from asgd.tables.filters import FILTERS as FILTERS
from asgd.tables.functions import RowFunction as RowFunction
from asgd.tables.messages import KeyCache as KeyCache
from asgd.tables.messages import KeyList as KeyList
from asgd.tables.messages import Push as Push
from asgd.tables.messages import Rows as Rows
from asgd.tables.messages import RowValues as RowValues
from asgd.tables.messages import ValueCodec as ValueCodec
from asgd.tables.over_network import OverNetwork as OverNetwork
from asgd.tables.ranges import Move as Move
from asgd.tables.ranges import RangeClocks as RangeClocks
from asgd.tables.ranges import Ranges as Ranges
from asgd.tables.ranges import by_load as by_load
from asgd.tables.ranges import moves as moves
from asgd.tables.rows import KeyedRows as KeyedRows
from asgd.tables.server import TableServer as TableServer
from asgd.tables.settings import TableSettings as TableSettings
from asgd.tables.settings import Work as Work
from asgd.tables.settings import table as table
from asgd.tables.simulation import Read as Read
from asgd.tables.simulation import Simulation as Simulation
from asgd.tables.simulation import TableRun as TableRun
from asgd.tables.table import Table as Table
from asgd.tables.tasks import Tasks as Tasks

RECIPES = {"table": table}  # recipes that this protocol trains

# The error for a call of this module suggests this call.
_recipe = "asgd.table(0.1, workers=8)"
sys.modules[__name__].__class__ = names.RecipeModule
