"""Objects in threads or in processes of Ray, which are called by method.

`base` says what a host does, `threads` and `actors` do it. A host has one
object, calls its methods one at a time, and may be killed with it at any time;
another then takes its place. What outlives it are files (see `Inside`).
"""

from asgd.live.hosts.base import Call, Gone, Host, Hosts, Inside, Make

__all__ = ["Call", "Gone", "Host", "Hosts", "Inside", "Make"]
