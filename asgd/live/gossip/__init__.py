"""The live runtime of gossip: peers that talk to each other.

Each peer is a thread or a process with a journal of its own. No process sees
all messages; the driver watches, and puts newcomers in the places of the dead.
"""
