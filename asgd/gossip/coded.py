"""Exchanges of peers with encoded messages."""

import functools

from asgd.compression.codec import Codec, check_complete
from asgd.gossip.orders import Gossip
from asgd.gossip.peer import Rule


@functools.lru_cache(maxsize=32)  # equal rules are compiled once
def _coded_rule(rule: Rule, codec: Codec) -> Rule:
  """Returns a rule with encoded messages."""
  assert rule.coded is not None
  coded: Rule = rule.coded(codec)
  return coded


def with_codec(exchange: Gossip, codec: Codec) -> Gossip:
  """Returns an exchange with encoded messages. Raises ValueError for a rule
  that has a codec already, and for a codec that is too coarse for models."""
  if exchange.rule.coded is None:
    raise ValueError(
      "the recipe has a codec of its messages already: set its option codec="
    )
  check_complete(codec, "peers send models, not changes as in choco_sgd")
  rule = _coded_rule(exchange.rule, codec)
  return exchange._replace(rule=rule, compressed=True)
