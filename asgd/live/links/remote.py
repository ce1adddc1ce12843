"""Frames between machines: Ray calls that carry arrays with them.

A worker that is not on its shards' machine opens a session with each shard's
actor (`asgd.live.server.hosted_shard`). A PUSH brings its message along and a
TICKET its parameters, as NumPy arrays in Ray's own serialization; a message
of a codec, or updates, travel as packed bytes. That costs about a millisecond a
frame; all else is as on one machine.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from asgd.compression import packing
from asgd.live import deadlines, frames
from asgd.live.frames import Frame
from asgd.live.links.base import Disconnected
from asgd.live.slots import MESSAGES, PARAMS, UPDATES, WrongSlot, message_stamp

_LISTEN = 1.0  # seconds between two looks at a shard that does not answer
_PAUSE = 0.2  # seconds between two tries to connect
_SECONDS = 60.0  # to fetch a slot's content
Token = tuple[int, int, str]  # worker, restarts, a random text: names a session


class Session:
  """A shard's end: frames for one worker. The thread that serves the shard
  makes all calls."""

  def __init__(self, memory: Any, defer: Callable[[Callable], Any]):
    """`defer` makes a call after the present one has ended."""
    self.worker = -1  # not known yet
    self._speaker: tuple[str, int] | None = None
    self._memory, self._defer = memory, defer
    self._out: list[tuple[bytes, Any]] = []
    self._listener: Future[list] | None = None  # takes the next frames sent

  def identify(self, frame: Frame) -> None:
    """Takes note of a frame of the worker; raises BadFrame if it is not of a
    worker, or of another."""
    if frame.kind in frames.OF_SHARDS:
      raise frames.BadFrame(f"no worker says {frame}")
    self._speaker = frames.speaker(frame, self._speaker)
    self.worker = frame.worker

  def send(self, frame: Frame) -> None:
    """Sends a frame, and the parameters or updates that it names, when the
    worker listens: an answer is often two frames."""
    memory, params = self._memory, None
    if frame.kind == frames.TICKET:
      if frame.flag == frames.UPDATES:
        stamp = message_stamp(frame.worker, frame.seq)
        params = memory.read(UPDATES, frame.message, stamp)
      elif frame.flag == frames.WHOLE or not memory.sends_updates:
        params = memory.read_copy(PARAMS, frame.params)
    self._out.append((frames.pack(frame), params))
    if self._listener is not None and len(self._out) == 1:
      self._defer(lambda shard: self._flush())

  def listen(self, answer: Future[list]) -> None:
    """Answers with the next frames, once there are some; a listener before this
    one is released."""
    self.release()
    self._listener = answer
    if self._out:
      self._flush()

  def release(self) -> None:
    """Answers the listener, with no frame if there is none."""
    if self._listener is not None:
      self._flush()

  def _flush(self):
    listener, self._listener = self._listener, None
    if listener is not None:
      out, self._out = self._out, []
      listener.set_result(out)


class _FarMemory:
  """Slots of references to the contents that a worker received or will send;
  codes are packed."""

  def __init__(self, messages: Any):
    """Starts with nothing; messages are of a `packing.CodeLayout`, or as they
    are."""
    packs = isinstance(messages, packing.CodeLayout)
    self._packing = messages if packs else None
    self._slots: dict[tuple[int, int], tuple[Any, int]] = {}

  def write(self, kind: int, slot: int, tree: Any, stamp: int) -> None:
    if kind == MESSAGES and self._packing is not None:
      tree = np.frombuffer(packing.pack(self._packing, tree), np.uint8)
    self._slots[kind, slot] = tree, stamp

  def read(self, kind: int, slot: int, stamp: int) -> Any:
    tree, written = self._slots[kind, slot]
    if written != stamp:
      raise WrongSlot("what the shard sent", kind, slot)
    return tree

  device_view = read

  def stamp(self, kind: int, slot: int) -> int:
    return self._slots[kind, slot][1]


class RayLink:
  """A worker's way to shards on another machine; see `base.WorkerLink`."""

  def __init__(
    self, site: Any, worker: int, restarts: int, messages: Sequence[Any] = ()
  ):
    """Connects to no shard of a `Site` yet. `messages` are the formats of each
    shard's messages as in `slots.SharedMemory`, dense by default."""
    import ray

    shards = site.setup.shards
    self._ray, self._site, self._owner = ray, site, (worker, restarts)
    self._actors: list[Any] = [None] * shards
    self._generations = [0] * shards  # of the actor that replaces one it is 1
    self._tokens: list[Any] = [None] * shards  # of its sessions
    self._listening: list[Any] = [None] * shards  # pending calls of `listen`
    self._inbox: list[tuple[int, Frame]] = []
    self._woken = threading.Event()
    messages = messages or [None] * shards
    self.memories = [_FarMemory(like) for like in messages]

  def send(self, shard: int, frame: Frame) -> None:
    """See `base.WorkerLink`; a PUSH takes its message along."""
    message = None
    if frame.kind == frames.PUSH:
      stamp = message_stamp(frame.worker, frame.seq)
      message = self.memories[shard].read(MESSAGES, frame.message, stamp)
      message = jax.tree.map(np.asarray, message)
    actor = self._actors[shard]
    if actor is None:
      raise Disconnected(shard)
    args = self._tokens[shard], frames.pack(frame), message
    delivered = actor.call.remote("deliver", args)
    patience = deadlines.DEAD * self._site.setup.ladder.start
    end = time.monotonic() + patience
    while not self._ray.wait([delivered], timeout=_LISTEN)[0]:
      if self._successor(shard) or time.monotonic() > end:
        self._actors[shard] = None
        raise Disconnected(shard)
    self._fetch(shard, delivered)

  def _fetch(self, shard, ref):
    try:
      return self._ray.get(ref, timeout=_SECONDS)
    except self._ray.exceptions.RayError as error:
      self._actors[shard] = None
      raise Disconnected(shard) from error

  def receive(self, seconds: float | None) -> tuple[int, Frame] | None:
    """See `base.WorkerLink`."""
    end = time.monotonic() + (1e9 if seconds is None else seconds)
    while not self._inbox:
      if None in self._actors:  # `send` noticed it, and may not have raised
        raise Disconnected(self._actors.index(None))
      pause = min(end - time.monotonic(), _LISTEN / 2)
      done, _ = self._ray.wait(self._listening, timeout=max(pause, 0.0))
      for ref in done:
        self._take(self._listening.index(ref), ref)
      if self._woken.is_set() or (not self._inbox and pause <= 0):
        self._woken.clear()
        return None
    return self._inbox.pop(0)

  def _take(self, shard, ref):
    said = self._fetch(shard, ref)
    self._listen(shard)
    for data, params in said:
      frame = frames.unpack(data)
      memory = self.memories[shard]
      if params is not None and frame.flag == frames.UPDATES:
        stamp = message_stamp(frame.worker, frame.seq)
        memory.write(UPDATES, frame.message, params, stamp)
      elif params is not None:
        memory.write(PARAMS, frame.params, params, int(frame.value))
      self._inbox.append((shard, frame))

  def _listen(self, shard):
    actor = self._actors[shard]
    args = (self._tokens[shard],)
    self._listening[shard] = actor.call.remote("listen", args)

  def _find(self, shard, generation):
    name = self._site.actor_name("shard", shard, generation)
    return self._ray.get_actor(name)

  def find_lead(self) -> Any:
    """Returns the lead's actor, or its successor, with or without a session.
    Raises ValueError if there is none now."""
    generation = self._generations[0]
    with contextlib.suppress(ValueError):
      return self._find(0, generation + 1)
    return self._find(0, generation)

  def _successor(self, shard):
    """Whether another actor has replaced that of a shard."""
    with contextlib.suppress(ValueError):
      return bool(self._find(shard, self._generations[shard] + 1))
    return False

  def connect(self, shard: int) -> bool:
    """Opens a session with a shard; see `base.WorkerLink`."""
    token = (*self._owner, uuid.uuid4().hex)
    try:
      actor = self._find(shard, self._generations[shard])
      # It may be starting, which takes longer than a worker may be silent.
      opened = actor.call.remote("open", (token,))
      self._ray.get(opened, timeout=_LISTEN)
    except (ValueError, self._ray.exceptions.RayError):
      self._generations[shard] += self._successor(shard)
      time.sleep(_PAUSE)
      return False
    self._actors[shard], self._tokens[shard] = actor, token
    self._inbox = [item for item in self._inbox if item[0] != shard]
    self._listen(shard)
    return True

  def wake(self) -> None:
    """Ends a `receive`, soon; may be called from a signal handler."""
    self._woken.set()
