"""Hosts: objects in threads or in processes of Ray, called by method.

  driver --start--> Hosts --make--> Host (thread, process) --call--> its object

A host has one object and calls its methods one at a time. It may be killed with
its object at any time; a new host of the same kind and index then succeeds it.
Only files outlive a host (see `Inside`). `base` defines the interface,
`threads` and `actors` implement it, `sockets` carries calls between processes
of one machine. Start with the example of `base.Hosts`.
"""

from asgd.live.hosts.base import Call, Host, HostExited, Hosts, Inside, Make

__all__ = ["Call", "Host", "HostExited", "Hosts", "Inside", "Make"]
