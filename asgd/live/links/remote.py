"""Frames between machines: Ray calls that carry arrays with them.

A worker on another machine than its shards opens a session with each shard's
actor (`asgd.live.server.hosted_shard`). A PUSH carries its message and a TICKET
its parameters, as NumPy arrays in Ray's own serialization. Messages of a codec
and updates travel as packed bytes. A frame takes about a millisecond.

  worker                                  shard's actor
  RayLink.send     -- deliver(frame) -->  Session.check_sender, Shard.handle
  RayLink.receive  -- listen() -------->  Session.listen: the call stays open
                   <-- frames ----------  until Session.send has a frame for it

`RayLink` is the worker's end, `Session` the shard's end.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd.compression import packing
from asgd.live import deadlines, frames
from asgd.live.frames import Frame
from asgd.live.links.base import Disconnected
from asgd.live.slots import MESSAGES, PARAMS, UPDATES, WrongSlot, message_stamp

_CHECK_SECONDS = 1.0  # between two checks of a shard that does not answer
_PAUSE = 0.2  # seconds between two tries to connect
_FETCH_SECONDS = 60.0  # to fetch a result that is ready
Token = tuple[int, int, str]  # worker, restarts, a random text: names a session
# (packed frame, its parameters or updates, if it carries any)
Packet = tuple[bytes, Any]


class Session:
  """The shard's end of a session: the frames for one worker. Only the thread
  that serves the shard calls its methods."""

  def __init__(
    self, memory: Any, defer: Callable[[Callable[[Any], None]], Any]
  ):
    """`memory` has the shard's slots. `defer(f)` calls f(shard) after the
    present call of the shard has ended."""
    self.worker = -1  # -1 until the first frame
    self._sender: tuple[str, int] | None = None
    self._memory, self._defer = memory, defer
    self._packets: list[Packet] = []  # for the next listener
    self._listener: Future[list[Packet]] | None = None

  def check_sender(self, frame: Frame) -> None:
    """Stores the sender of the first frame. Raises BadFrame if the sender is
    not a worker, or not the worker that sent the earlier frames."""
    if frame.kind in frames.SHARD_KINDS:
      raise frames.BadFrame(f"no worker sends {frame}")
    self._sender = frames.sender_of(frame, self._sender)
    self.worker = frame.worker

  def send(self, frame: Frame) -> None:
    """Sends a frame, with the parameters or updates that the frame names.

    The session sends the frame when the worker listens and the present call has
    ended: a call often answers with two frames, which then travel together.
    """
    memory, content = self._memory, None
    if frame.kind == frames.TICKET:
      # The content is read now: its slot may be written again later.
      if frame.flag == frames.UPDATES:
        stamp = message_stamp(frame.worker, frame.seq)
        content = memory.read(UPDATES, frame.message, stamp)
      # With updates the worker already has the parameters of a KEPT ticket.
      elif frame.flag == frames.WHOLE or not memory.has_updates:
        content = memory.read_copy(PARAMS, frame.params)
    self._packets.append((frames.pack(frame), content))
    if self._listener is not None and len(self._packets) == 1:
      self._defer(lambda shard: self._flush())

  def listen(self, answer: Future[list[Packet]]) -> None:
    """Sets the result of `answer` to the next frames once there are some.
    Releases the earlier listener."""
    self.release()
    self._listener = answer
    if self._packets:
      self._flush()

  def release(self) -> None:
    """Answers the listener at once; its list of frames may be empty."""
    if self._listener is not None:
      self._flush()

  def _flush(self) -> None:
    """Answers the listener with the frames so far."""
    listener, self._listener = self._listener, None
    if listener is not None:
      packets, self._packets = self._packets, []
      listener.set_result(packets)


class _LocalSlots:
  """A shard's slots at a worker on another machine: references to the contents
  that the worker received or will send.

  The class has the methods of `slots.SharedMemory` that a worker calls.
  """

  def __init__(self, messages: Any):
    """Makes empty slots. Messages are packed if `messages` is a
    `packing.CodeLayout`; with any other value they are dense."""
    is_packed = isinstance(messages, packing.CodeLayout)
    self._code_layout = messages if is_packed else None
    # (kind, slot) -> (content, stamp)
    self._slots: dict[tuple[int, int], tuple[Any, int]] = {}

  def write(self, kind: int, slot: int, tree: Any, stamp: int) -> None:
    if kind == MESSAGES and self._code_layout is not None:
      code: Any = packing.pack(self._code_layout, tree)
      tree = np.frombuffer(code, np.uint8)
    self._slots[kind, slot] = tree, stamp

  def read(self, kind: int, slot: int, stamp: int) -> Any:
    tree, actual_stamp = self._slots[kind, slot]
    if actual_stamp != stamp:
      raise WrongSlot("what the shard sent", kind, slot)
    return tree

  device_view = read

  def stamp(self, kind: int, slot: int) -> int:
    return self._slots[kind, slot][1]


class _Opening(NamedTuple):
  """A session that a shard has not confirmed yet."""

  actor: Any
  token: Token
  call: Any  # the open call of `open`


class RayLink:
  """The sessions of a worker with shards on another machine; see
  `base.WorkerLink`.

  Each replacement of a shard is an actor with the next generation in its name.
  """

  def __init__(
    self, site: Any, worker: int, restarts: int, messages: Sequence[Any] = ()
  ):
    """Connects to no shard of a `Site` yet. `messages` has the format of each
    shard's messages as in `slots.SharedMemory`; dense by default."""
    import ray  # workers on the driver's machine run without it

    shards = site.setup.shards
    self._ray, self._site = ray, site
    self._worker_and_restarts = worker, restarts
    # The lists have an entry per shard. An actor is None without a session.
    self._actors: list[Any] = [None] * shards
    self._generations = [0] * shards  # number of replacements of the actor
    self._tokens: list[Any] = [None] * shards  # of the present session
    self._openings: list[_Opening | None] = [None] * shards
    self._listen_calls: list[Any] = [None] * shards  # open calls of `listen`
    self._inbox: list[tuple[int, Frame]] = []
    self._wake_event = threading.Event()
    messages = messages or [None] * shards
    self.memories = [_LocalSlots(message_format) for message_format in messages]

  def send(self, shard: int, frame: Frame) -> None:
    """See `base.WorkerLink`; a PUSH carries its message."""
    message = None
    if frame.kind == frames.PUSH:
      stamp = message_stamp(frame.worker, frame.seq)
      message = self.memories[shard].read(MESSAGES, frame.message, stamp)
      # Only NumPy crosses the boundary of a process.
      message = jax.tree.map(np.asarray, message)
    actor = self._actors[shard]
    if actor is None:
      raise Disconnected(shard)
    args = self._tokens[shard], frames.pack(frame), message
    deliver_call = actor.call.remote("deliver", args)
    # `ladder.start` covers the time in which the shard compiles.
    patience = deadlines.DEAD_FACTOR * self._site.setup.ladder.start
    deadline = time.monotonic() + patience
    while not self._ray.wait([deliver_call], timeout=_CHECK_SECONDS)[0]:
      if self._has_successor(shard) or time.monotonic() > deadline:
        self._actors[shard] = None
        raise Disconnected(shard)
    self._fetch(shard, deliver_call)

  def _fetch(self, shard: int, ref: Any) -> Any:
    """Returns the result of a call that has ended; raises Disconnected."""
    try:
      return self._ray.get(ref, timeout=_FETCH_SECONDS)
    except self._ray.exceptions.RayError as error:
      self._actors[shard] = None
      raise Disconnected(shard) from error

  def receive(self, seconds: float | None) -> tuple[int, Frame] | None:
    """See `base.WorkerLink`."""
    deadline = time.monotonic() + (1e9 if seconds is None else seconds)
    while not self._inbox:
      if None in self._actors:  # the caller of `send` may ignore its error
        raise Disconnected(self._actors.index(None))
      # Ray cannot be woken, so `wake` ends the wait after half a second.
      pause = min(deadline - time.monotonic(), _CHECK_SECONDS / 2)
      ended_calls, _ = self._ray.wait(
        self._listen_calls, timeout=max(pause, 0.0)
      )
      for ref in ended_calls:
        self._receive_packets(self._listen_calls.index(ref), ref)
      if self._wake_event.is_set() or (not self._inbox and pause <= 0):
        self._wake_event.clear()
        return None
    return self._inbox.pop(0)

  def _receive_packets(self, shard: int, ref: Any) -> None:
    """Adds the frames that a call of `listen` returned to the inbox, and calls
    `listen` again."""
    packets = self._fetch(shard, ref)
    self._listen(shard)
    for data, content in packets:
      frame = frames.unpack(data)
      memory = self.memories[shard]
      # The contents get the stamps that they have at the shard.
      if content is not None and frame.flag == frames.UPDATES:
        stamp = message_stamp(frame.worker, frame.seq)
        memory.write(UPDATES, frame.message, content, stamp)
      elif content is not None:
        memory.write(PARAMS, frame.params, content, int(frame.value))
      self._inbox.append((shard, frame))

  def _listen(self, shard: int) -> None:
    """Asks a shard for its next frames: a long poll."""
    actor = self._actors[shard]
    args = (self._tokens[shard],)
    self._listen_calls[shard] = actor.call.remote("listen", args)

  def _find_actor(self, shard: int, generation: int) -> Any:
    """Returns the actor of a shard; raises ValueError if there is none."""
    name = self._site.actor_name("shard", shard, generation)
    return self._ray.get_actor(name)

  def find_lead(self) -> Any:
    """Returns the lead's actor, or its successor, with or without a session.
    Raises ValueError if there is none now."""
    generation = self._generations[0]
    with contextlib.suppress(ValueError):
      return self._find_actor(0, generation + 1)
    return self._find_actor(0, generation)

  def _has_successor(self, shard: int) -> bool:
    """Whether another actor has replaced the present one of a shard."""
    with contextlib.suppress(ValueError):
      return bool(self._find_actor(shard, self._generations[shard] + 1))
    return False

  def connect(self, shard: int) -> bool:
    """Opens a session with a shard; see `base.WorkerLink`."""
    # The actor may take longer to start than the lead waits for a silent
    # worker. So this returns after a second, and the caller can send frames.
    # The next try waits for the same call: an open call takes a thread of the
    # actor.
    try:
      opening = self._openings[shard] or self._open(shard)
      self._openings[shard] = None
      if not self._ray.wait([opening.call], timeout=_CHECK_SECONDS)[0]:
        if self._has_successor(shard):
          self._generations[shard] += 1
        else:
          self._openings[shard] = opening
        return False
      self._ray.get(opening.call, timeout=_FETCH_SECONDS)
    except (ValueError, self._ray.exceptions.RayError):
      self._generations[shard] += self._has_successor(shard)
      time.sleep(_PAUSE)
      return False
    actor, token, _ = opening
    self._actors[shard], self._tokens[shard] = actor, token
    # Drop the frames of the earlier session: the shard sends them again.
    self._inbox = [item for item in self._inbox if item[0] != shard]
    self._listen(shard)
    return True

  def _open(self, shard: int) -> _Opening:
    """Asks a shard's actor for a session. Raises ValueError if there is none
    now."""
    # The random text distinguishes the frames of this session from those of an
    # earlier session.
    token = (*self._worker_and_restarts, uuid.uuid4().hex)
    actor = self._find_actor(shard, self._generations[shard])
    return _Opening(actor, token, actor.call.remote("open", (token,)))

  def wake(self) -> None:
    """Ends a `receive`, soon; may be called from a signal handler."""
    self._wake_event.set()
