"""Live runs: servers, workers and peers that run at the same time.

  driver (cluster) -> supervisor -> hosts -> shards, workers, peers
  worker.WorkerLoop <- frames, over links -> shard (journal, slots, records)

- `hosts`: threads, processes of Ray, or a simulated world (`world`).
- `links`: how frames travel; `frames` and `slots`: their formats and memory.
- `shard`, `worker`: the participants of a dense server; `server` puts them into
  hosts. `gossip`, `tables` and `sandblaster` are the other protocols.
- `supervisor`, `deadlines`, `faults`, `store`: parties that fail, and the files
  from which they are restored.

Each decision is a row of a journal, so a run replays to the same bits. Begin
with `worker`, then `shard.shard`; docs/architecture.md follows one message.
"""
