"""The live runtime of gossip: peers that exchange messages directly.

  driver (cluster) -- introduces, pauses, replaces --> peers
  peer (rounds, pairs, arrivals) -- frames, by outbox --> peers

Each peer is an object in a host, a thread or a process, and has a journal. No
process sees all messages. Begin with `peer.LivePeer`. Its subclasses `Rounds`,
`Pairs` and `PeerArrivals` decide the next step of a peer; `PeerRows`
(`peer_rows`) writes the step to the journal and applies it.
"""
