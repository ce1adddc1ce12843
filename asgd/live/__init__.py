"""Live runs: server shards and workers that run at the same time."""
