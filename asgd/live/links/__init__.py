"""Links: how frames travel between a worker and the shards."""
