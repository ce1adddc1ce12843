"""Live Sandblaster: a driver, with shards and workers in hosts.

The driver (`driver`) runs the coordinator, which handles scalars only. It calls
shards (`shard`, with files in `store`) and workers (`worker`). Workers
fetch parameters from the shards and push gradients to them directly. The result
is that of `asgd.sandblaster.SandblasterSimulation`, bit for bit. Begin with
`driver.Driver`.
"""
