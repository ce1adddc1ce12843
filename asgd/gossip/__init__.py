"""Gossip: training without a server, by peers that talk to each other.

Who tells whom is a `Topology`; how what is heard comes into a peer is a `Rule`;
`make_peer` joins a rule to a peer's own server into a `Peer`, which is pure
functions of one peer's state. `Gossip` says which of them an algorithm is made
of, and `orders` makes the traces that simulators obey.
"""

from asgd.gossip import orders, rules, topologies
from asgd.gossip.correction import correct_variance
from asgd.gossip.orders import PAIRS, ROUNDS, Gossip
from asgd.gossip.peer import Job, Peer, PeerState, Rule, make_peer, message_key
from asgd.gossip.topology import Topology
