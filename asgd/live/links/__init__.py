"""Links: how frames travel between a worker and the shards.

  worker -- sockets.SocketLink --> sockets.ShardServer    on one machine
         -- remote.RayLink     --> the shard's Ray actor  between machines
         -- throttled          --> a thread, as slowly as over a network

`base` is the interface. On one machine parameters and messages are in shared
memory (`asgd.live.slots`), and frames carry the numbers of slots.
"""
