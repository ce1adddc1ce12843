"""The live runtime of gossip: peers that exchange messages with each other.

Each peer is an object in a host, a thread or a process, and has a journal. No
process sees all messages: the driver watches the peers and replaces those that
exit.
"""
