"""Live runs: workers and server shards that really wait for one another."""
