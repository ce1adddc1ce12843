"""The parties of a dense parameter server in hosts, and their cluster.

`asgd.live.shard` decides what a shard does and `asgd.live.worker` what a worker
does; here both become objects that hosts run (`asgd.live.hosts`), in threads,
in processes, and in a simulated world.
"""
