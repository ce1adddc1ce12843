"""A simulated world in which a live run can be repeated, fault for fault.

The shards, workers, links, journals and shared memory are those of a real run;
what is simulated is what they stand on: the clock, the network, the disk, and
which of the processes goes on at each moment. All of it follows from a seed
(as FoundationDB and TigerBeetle test): what goes wrong once goes wrong again.

  scheduler   processes that take turns, and the time between two turns
  injections  faults: what a seed draws, and which are armed
  network     sockets that can be cut, and frames that can be lost
  storage     files and memory that can be torn, filled and damaged
  hosts       hosts (`asgd.live.hosts`) as processes of the world
  run         a run: commands, the faults that come, and the checks
  broken      an invariant that does not hold, and what checks share
  server_run, table_run, batch_run, peer_run
              the runs of a protocol: cases, driver, and what must hold
  peer_checks what must hold of peers, read from their files
  scenario, server_makers, invariants, reference
              parts of the server's: cases, parties, checks, what a trace
              must say, computed in another way
  explore     many seeds; of one that fails the shortest list of faults, and
              where it differs first from a run that passes
"""
