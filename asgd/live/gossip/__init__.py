"""The live runtime of gossip: peers that exchange messages directly.

  driver (cluster) -- introduces, pauses, replaces --> peers
  peer (rounds, pairs, arrivals) -- frames, by outbox --> peers

Each peer is an object in a host, a thread or a process, and has a journal. No
process sees all messages. Begin with `peer.LivePeer`. Its subclasses `Rounds`,
`Pairs` and `PeerArrivals` decide the next step of a peer; `PeerRows`
(`peer_rows`) writes the step to the journal and applies it.

Rules of a live runtime, so that a run replays to the same bits
---------------------------------------------------------------
1. A peer calls the compiled functions of `asgd.simulator.compile_peer`, one
   call each, in the order of its rows. It changes nothing between rows.
2. Each peer writes a row to its journal before another process can see the
   effect: `put` before the code leaves the process, `take` before `mix`. Rows
   of different peers need no common order: `orders.merge` finds an order in
   which each `take` follows its `put`, and any such order gives the same bits.
3. A peer takes a message when it mixes it, not when it arrives. A message of a
   later round waits, and has no row, until the peer is in that round.
4. The codes of a mix are in the order of their `take` rows: sums depend on it.
5. A peer draws from `message_key` and `worker.job_key` only. Batches are a
   function of (worker, job).
6. The sent code is the one that `put` returned. If a wire packs the code,
   unpacking restores all its bits.
7. Pairs (AD-PSGD): both peers put, take and mix, and neither has another row
   between its put and its mix. So one of two that meet must be free to answer.
   Either each holds a lock during its three rows, or some peers only ask and
   the others only answer (`topologies.two_colours`).
8. When a peer exits, the process that notices it writes LOST, for the open job,
   and LEAVE to the peer's journal. The next incarnation begins with JOIN, which
   is `init` of the first parameters. Before anything else it adopts the loan of
   each neighbour: the parameters of the first one, and the rule's state for
   each. If `rule.introduces`, it then lends to each of these neighbours, which
   adopt the loan before they take a message of the new incarnation.
9. Under `share` all peers apply the same messages. So a new incarnation takes,
   of each neighbour, those messages that its first lender had not taken.
"""
