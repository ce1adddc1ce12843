"""Shards and workers of a dense parameter server in hosts, and their cluster.

`asgd.live.shard` is the logic of a shard and `asgd.live.worker` that of a
worker. This package makes both into objects that hosts run
(`asgd.live.hosts`), in threads, in processes, and in a simulated world.
"""
