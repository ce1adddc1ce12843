"""Synchronous parallelism: many devices take one step together.

  meshes --> data_parallel, zero, tensor, circular, halo --> hybrid.make_step
         --> islands (local steps), peers (rounds of gossip)
  workloads, memory, costs --> strategies    the planner: `asgd plan`
  hybrid, transfers --> ahead, hlo           compiled without the devices
  supervisor --> processes                   several processes, one mesh

A step is a function (state, batch, key) -> (state, metrics) over a mesh; it
gives the numbers of one device, up to the order of sums. `collectives` and
`wait_free` are algorithms by themselves. Begin with `data_parallel.make_step`,
then `hybrid`.
"""
