"""A live server shard, in parts: the state that rows of the journal change,
the role that decides on rows, and the recovery that obeys them again."""

from asgd.live.shard.shard import Shard, ShardStorage
