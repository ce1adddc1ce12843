"""Simulators: replay a Trace on one machine, in the trace's time.

  trace --choose--> host | chunk | rounds --> SimulationState, Records

`choice` picks an engine for a server, its workers and a trace. `stepwise` is
the host engine: it calls one compiled program for each row, and defines the
results. `chunk` compiles many messages into one program, `rounds` computes
gradients in flight in one vmap; `tickets` plans both. `sharded` replays a
server in shards, `peers` a run without a server. Start with `simulation`.
"""

from asgd.simulator.choice import (
  AUTO,
  CHUNK,
  ENGINES,
  HOST,
  ROUNDS,
  Choice,
  JobShapes,
  choose,
)
from asgd.simulator.chunk import make_chunk
from asgd.simulator.peer_statistics import consensus, mean_params
from asgd.simulator.peers import (
  LinkTraffic,
  OnePeer,
  PeerRecords,
  PeerRow,
  Peers,
  PeerSteps,
  Taken,
  array_bytes,
  compile_peer,
  join_records,
  packed_bytes,
  peer_records,
)
from asgd.simulator.records import concatenate, end_of_message, fetch, records
from asgd.simulator.rounds import make_rounds
from asgd.simulator.sharded import Sharded, ShardOptions, run_sharded
from asgd.simulator.simulation import (
  SimulationState,
  Simulator,
  TraceRun,
  initial,
  run_whole,
)
from asgd.simulator.steps import (
  ALONE,
  Steps,
  WorkerDevices,
  as_totals,
  compile_divided,
  compile_steps,
  compile_work,
  start,
  worker_indices,
)
from asgd.simulator.stepwise import StepwiseRun, begin_host, make_host
from asgd.simulator.tickets import NotCompiled
from asgd.simulator.traffic import ReceivedMessage, Sent, Traffic
