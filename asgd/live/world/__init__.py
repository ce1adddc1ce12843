"""A simulated world in which a live run can be repeated, fault for fault.

The shards, workers, links, journals and shared memory are those of a real run.
The clock, the network, the disk and the choice of the process that runs next
are simulated. All of them follow from a seed, as in the tests of FoundationDB
and TigerBeetle, so a failure can be repeated.

  seed -> Scenario (a case and its faults) -> WorldRun.run -> SeedResult
                                                 |
    commands: driver + hosts, which are processes of the Scheduler
                                                 |
                      checks of the finished run's files (Broken if one fails)

  scheduler     processes that take turns, and simulated time
  injections    faults: drawn from a seed, and armed until they apply
  network       sockets with connections that break and frames that are lost
  storage       files and memory: torn writes, a full disk, changed bytes
  hosts         hosts (`asgd.live.hosts`) as processes of the world
  run           WorldRun: starts of the driver, injection of faults, checks
  server_run, table_run, batch_run, peer_run
                WorldRun of each protocol: cases, driver, checks
  scenario, server_makers
                the server's cases and participants
  invariants, trace_checks, peer_checks
                checks of the server's and the peers' files
  broken        the error of a failed check, and helpers of checks
  explore       runs many seeds; explains a seed that fails by its fewest faults

Begin with `run`, then `scheduler`.
"""
