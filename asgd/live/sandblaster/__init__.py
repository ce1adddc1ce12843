"""Sandblaster in real time: a driver, and shards and workers in hosts.

The driver (`driver`) has the coordinator, which knows numbers only. It calls
shards (`shard`, with files `store`) and workers (`worker`), which bring
parameters and gradients to one another themselves. What is computed is that of
`asgd.sandblaster.SandblasterSimulation`, to the same bits.
"""
