"""The live runtime of tables: shards and workers as objects in hosts.

What is written down, in the run's folder (times are the run's seconds):

  shard-K.csv    the order of shard K: JOIN (another holder has the place; `job`
                 counts those before it), SEND (a pull was answered), RECEIVE (a
                 push was applied; `job` are the jobs that the worker has
                 finished with it), LEAVE (gone for good); `seq` is the number
                 of the request, `version` that of the shard before it. MOVE
                 (ranges of keys went to other shards; `job` counts how often,
                 `totals` are the cuts of all tables, one after the other)
  trace-K.csv    of worker K: SEND or KEEP as a job begins, before anything is
                 asked for, with `totals` the number of rows it had taken from
                 each shard; RECEIVE once all shards have its updates; LOST and
                 LEAVE by the driver
  records-K.bin  of worker K: a record of each job that was received

There is no order of all shards, as a pull from several is not atomic: a replay
(`asgd.tables.replay`) obeys each shard's order, and each worker's.

In the memory of the run, per shard: an image, and the requests since, each
written before its row. A shard that is killed comes back from both to the same
bits; what it had not written is asked again. A worker that is killed is
replaced: another takes its place without rows. The last message of a worker is
in the memory of the run, too, before any shard has it: where some shards lack
it, the next holder sends it to them (its rows of these jobs have no `totals`),
and jobs that no shard has are done again.

Ranges move when all workers have ended the same clock, and rest: no message is
on its way then, and all shards have applied the same ones. The driver asks
shards for the rows that others are to have, which they keep until they are told
of the new ranges; a shard that dies meanwhile is asked, or told, again.
"""
