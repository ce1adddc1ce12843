"""Parameters that a worker rebuilds from what a shard sends."""

import jax
import live_stores
import numpy as np
import pytest
from kit import bits

import asgd
from asgd import base, compression, simulator
from asgd.compression.packing import BadCode
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.rebuilt_params import OutOfStep, RebuiltParams
from asgd.live.shard.updates import WHOLE, SentUpdates
from asgd.live.slots import PARAMS, UPDATES

CODEC = compression.named("threshold", tau=0.1)
PARAMS_AND_STATS = base.Variables(
  {"w": np.ones((20, 20), np.float32)}, {"mean": np.zeros(3, np.float32)}
)


class Shard:
  """A server whose updates are codes, and what it sends to worker 0."""

  def __init__(self):
    recipe = asgd.asgd(0.5, workers=1)
    algorithm = compression.compressed_updates(recipe.algorithm, CODEC)
    self.server = recipe._replace(algorithm=algorithm).server()
    steps = simulator.compile_steps(self.server, None)
    self.state = simulator.start(self.server, PARAMS_AND_STATS)
    self.updates = SentUpdates(steps, self.state)
    self.memory = live_stores.Memory()
    self.receive, self.seq = jax.jit(self.server.receive), 0

  def send(self):
    """Returns the frame of a ticket."""
    key, params = (0, self.seq), jax.device_get(self.state.params)
    after = self.updates.write(self.memory, 0, key, params, writes=True)
    self.memory.write(PARAMS, 0, params, 0)
    self.seq += 1
    frame = Frame(frames.TICKET, *key, version=int(self.state.version))
    frame = frame._replace(params=0, message=0)
    if after == WHOLE:
      return frame._replace(flag=frames.WHOLE)
    return frame._replace(flag=frames.UPDATES, value=float(after))

  def update(self, number=1.0):
    """Receives a message; a new object for the statistics."""
    message = jax.tree.map(lambda x: number + 0 * x, PARAMS_AND_STATS)
    ticket = self.server.send(self.state, np.int32(0))
    self.state, _ = self.receive(self.state, ticket, message)
    self.updates.count_update(self.state)


def test_it_comes_to_the_bits_of_the_shard_and_to_its_statistics():
  shard = Shard()
  rebuilt, flags = RebuiltParams(CODEC, PARAMS_AND_STATS), []
  for updates in (0, 1, 0, 3):
    for number in range(updates):
      shard.update(number + 0.5)
    frame = shard.send()
    flags.append(frame.flag)
    assert bits(rebuilt.take(shard.memory, frame)) == bits(shard.state.params)
  assert flags == [frames.WHOLE, *[frames.UPDATES] * 3]
  kept = shard.send()._replace(flag=frames.KEPT)
  assert bits(rebuilt.take(shard.memory, kept)) == bits(shard.state.params)
  # An update that is not finite is no code: the parameters are sent.
  shard.update(np.nan)
  assert shard.send().flag == frames.WHOLE


def test_what_does_not_follow_or_unpack_is_refused_and_changes_nothing():
  shard = Shard()
  rebuilt, new = (RebuiltParams(CODEC, PARAMS_AND_STATS) for _ in range(2))
  rebuilt.take(shard.memory, shard.send())
  shard.update()
  frame = shard.send()
  with pytest.raises(OutOfStep):
    new.take(shard.memory, frame)
  there, stamp = shard.memory[UPDATES, 0]
  for spoilt in (there[:30], there[:-1], there ^ 1):
    shard.memory[UPDATES, 0] = spoilt, stamp
    with pytest.raises(BadCode):
      rebuilt.take(shard.memory, frame)
  shard.memory[UPDATES, 0] = there, stamp
  assert bits(rebuilt.take(shard.memory, frame)) == bits(shard.state.params)
