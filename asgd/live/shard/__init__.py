"""A live server shard: the pure server on its slice, with a journal.

  frame -> Shard.handle -> Role decides -> Role.commit(row): [1] the state
    applies the row, [2] the journal gets it, [3] frames report it to others

The lead is shard 0: its journal is the trace of the run. In a consistent run
the other shards follow: they apply the lead's rows. Otherwise each shard orders
the messages itself. docs/glossary.md defines the terms.

- `shard.Shard` receives the frames; begin reading there.
- `role.Role` commits rows. `lead.Lead` (shard 0), `follower.Follower` and
  `follower.Independent` choose the rows.
- `state.ShardState` is a function of the journal; `slots.SlotTable` counts the
  uses of shared memory, `updates.SentUpdates` packs updates for workers.
- `recovery` replays the journal after a kill, from an image of `images`.
"""

from asgd.live.shard.shard import Shard, ShardStorage
