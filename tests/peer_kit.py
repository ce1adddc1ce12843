"""Helpers of the tests of simulated peers: each kind of peer is compiled
once."""

import functools

import jax
import numpy as np
import optax

from asgd import base, simulator, stacking
from asgd import worker as worker_lib
from asgd.gossip import peer as peer_lib

# They say whom a peer hears and when, not what it computes.
_ORDER = {"topology", "overlap", "adapt_first"}
_gradient_worker = functools.cache(worker_lib.gradient_worker)
_compiled = {}


def compiled(recipe, loss):
  """Returns peer and worker of a recipe, the same for recipes that differ in
  topology and order alone."""
  made = recipe.build
  options = [(k, made.options[k]) for k in sorted({*made.options} - _ORDER)]
  slots = recipe.gossip.topology.slots if made.name == "choco_sgd" else 0
  key = made.name, made.learning_rate, repr(options), slots, loss
  key += recipe.at_server, recipe.at_worker
  if key not in _compiled:
    if recipe.worker is None and recipe.steps == 1:
      worker = _gradient_worker(loss, recipe.at_worker)
    else:
      worker = recipe.make_worker(loss)
    # With the recipe, so that no other gets the address of what it holds.
    _compiled[key] = recipe.peer(), worker, recipe
  return _compiled[key][:2]


def peers(recipe, trace, params, loss, batch, starts=(), how=None):
  """Returns the peers of a recipe before the first row of a trace; all begin
  with `params`, or each with its own of `starts`. `how` stands for the recipe's
  gossip, with as many slots."""
  result = simulator.Peers(
    *(how or recipe.gossip, *compiled(recipe, loss), params, trace),
    batch=stacking.job_batches(batch, recipe.steps),
    root=jax.random.key(0),
  )
  for peer, start in zip(result.peers, starts, strict=False):
    peer.state = peer_lib.with_params(peer.state, start)
  return result


def still(params, batch):
  """A loss without a gradient: peers only average."""
  del batch
  return 0.0 * optax.tree.sum(params)


def ends_of_rounds(trace, peers):
  """Returns the row after each round, of so many peers that mix in it."""
  mixes = np.flatnonzero(trace.action == base.MIX)
  return (mixes[peers - 1 :: peers] + 1).tolist()
