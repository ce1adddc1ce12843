"""Clusters: start, watch over and replace shards and workers."""
