"""The live runtime of tables: shards and workers as objects in hosts.

  driver (cluster) -- starts, watches, moves ranges --> shards and workers
  worker (worker)  -- pull, push, listen --> shard (shard)

Begin with `worker.WorkerHost.run` and `shard.ShardHost.handle`. Files of a run,
in its folder (`files`, `job_journal`; times are the run's seconds):

  shard-K.csv    trace of shard K: JOIN, SEND, RECEIVE, LEAVE, MOVE (see
                 `asgd.tables.shard`). `seq` is the number of the request,
                 `version` the shard's version before it. `job` is for JOIN the
                 incarnation, for RECEIVE the jobs that the worker has finished,
                 for MOVE the new version of the division. `totals` of MOVE are
                 the cuts of all tables, one table after the other
  trace-K.csv    trace of worker K: SEND or KEEP when a job begins, before its
                 first request, with the number of rows taken from each shard in
                 `totals`; RECEIVE once all shards have its updates; the driver
                 adds LOST and LEAVE
  records-K.bin  records of worker K: one for each received job

A pull from several shards is not atomic, so the traces of shards have no common
order. A replay (`asgd.tables.replay`) follows the order of each trace.

The memory of the run has, for each shard, an image and the requests since the
image, each written before its trace row. A killed shard is rebuilt from both to
the same bits, and workers resend requests that were not logged. A killed worker
is replaced by its next incarnation, which begins without rows of tables.

The memory also has the last message of each worker, saved before any shard has
it. If only some shards have the message, the next incarnation sends it to the
others (the rows of these jobs have no `totals`). Jobs that no shard has are
computed again.

Ranges of rows move to other shards while all workers rest after the same clock:
then no message is under way, and all shards have applied the same messages. The
driver asks each shard for the rows that other shards get. The shard has these
rows until the driver sends the new ranges; if a shard is killed meanwhile, the
driver repeats its request.
"""
