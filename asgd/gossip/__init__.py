"""Gossip: training without a server, by peers that exchange messages.

  job -> peer's Server -> put -- message --> take -> mix (Rule, Topology)

- A `Topology` defines which peer receives from which, with weights by round.
- A `Rule` defines how received parameters change a peer (`rules`).
- `make_peer` combines a rule with a peer's server into a `Peer`: pure functions
  of one peer's state.
- `Gossip` holds the choices of an algorithm, and `orders` makes the traces that
  simulators replay. Live peers are in `asgd.live.gossip`.

Begin with `peer`, which defines the rows of a trace.
"""

from asgd.gossip import orders, rules, topologies
from asgd.gossip.correction import correct_variance
from asgd.gossip.orders import ARRIVALS, PAIRS, ROUNDS, Gossip
from asgd.gossip.peer import Job, Peer, PeerState, Rule, make_peer, message_key
from asgd.gossip.topology import Topology
from asgd.gossip.tracking import track
