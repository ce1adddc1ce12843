"""Synchronous parallelism: many devices take one step together."""
