"""A shard as an object in a host: it serves beside the calls of its methods.

Workers on its machine reach it by its sockets. A worker on another one sees
neither these nor its memory: it opens a session by a call (`links.remote`),
sends frames in calls, and waits for the answers. The files of a run are on the
driver's machine, so the lead writes the spans and faults of these workers, too
(`links.notes`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, compression, simulator
from asgd.compression.packing import BadCode
from asgd.live import faults, frames, slot_formats, spans
from asgd.live.hosts import Inside
from asgd.live.hosts.site import Site, receive_in_one_thread
from asgd.live.links.base import Disconnected
from asgd.live.links.remote import Session, Token
from asgd.live.links.sockets import ShardServer, UnixNetwork
from asgd.live.shard import Shard, ShardStorage
from asgd.live.slots import MESSAGES, message_stamp

ENDED = "ended"  # how a shard ends that was asked to


class HostedShard:
  """One incarnation of a shard, which is served from the start."""

  def __init__(self, inside: Inside, server: ShardServer, run: Path):
    """`inside` is of its host, `run` the folder of the run."""
    self.server, self._ended = server, Future[str]()
    self.clock = inside.clock  # the seconds since the run began
    self._far: set[tuple[int, int]] = set()  # (worker, restarts) with sessions
    self._sessions: dict[Token, Session] = {}
    self._run, self._write_span = run, spans.SpanWriter(run)
    inside.later(server.serve, "served")

  def served(self, call: Future[None]) -> None:
    """The server has ended, or raises what ended it."""
    if error := call.exception():
      self._ended.set_exception(error)
    else:
      self._ended.set_result(ENDED)

  def run(self) -> Future[str]:
    """Returns ENDED once it was asked to end, or raises what ended it."""
    return self._ended

  def ask(self, call: Callable[[Shard], Any]) -> Future[tuple[Any] | None]:
    """Calls something with the shard, in the serving thread.

    Returns:
      (answer,), with NumPy arrays; None if the server has ended: `run` raises
      what ended it.
    """
    answer: Future[tuple[Any] | None] = Future()

    def finish(done):
      error = done.exception()
      if isinstance(error, Disconnected):
        answer.set_result(None)
      elif error is not None:
        answer.set_exception(error)
      else:
        answer.set_result((done.result(),))

    asked = self.server.submit(lambda shard: jax.device_get(call(shard)))
    asked.add_done_callback(finish)
    return answer

  def end(self) -> Future[tuple[None] | None]:
    """Writes pending output, and ends."""
    answer = self.ask(_flush)
    answer.add_done_callback(lambda done: self.server.end())
    return answer

  def interrupt(self) -> None:
    """Ends at once: nothing more is written or sent."""
    self.server.end()

  def close(self) -> None:
    """Returns when nothing is served any more, and its files are closed."""
    self.server.end()
    self.server.ended.wait()
    self.server.shard.close()

  # Workers on other machines.

  def open(self, token: Token) -> Future[None]:
    """Opens a session for a worker, which listens to none before any more."""
    self._far.add(token[:2])

    def make(shard):
      for each, session in self._sessions.items():
        if each[:2] == token[:2]:
          session.release()
      memory = shard.state.slots.memory
      self._sessions[token] = Session(memory, self.server.submit)

    return self.server.submit(make)

  def deliver(self, token: Token, data: bytes, message: Any) -> Future[None]:
    """Takes a frame of a session, and the message of a PUSH. A BadFrame ends
    the session, as it would a connection."""
    frame = frames.unpack(data)

    def take(shard):
      session = self._sessions[token]
      try:
        session.identify(frame)
        holds = shard.role.peers.get(frame.worker) == session.send
        if message is not None and holds and shard.state.accepts(frame):
          memory = shard.state.slots.memory
          stamp = message_stamp(frame.worker, frame.seq)
          memory.write(MESSAGES, frame.message, message, stamp)
        shard.handle(frame, session.send, self.clock())
      except (BadCode, frames.BadFrame):
        self._end(shard, token)
        raise

    return self.server.submit(take)

  def listen(self, token: Token) -> Future[list[tuple[bytes, Any]]]:
    """Returns the next frames of a session, once there are some. Raises
    KeyError if the session has ended."""
    answer: Future[list] = Future()

    def fail(call):
      if (error := call.exception()) is not None:
        answer.set_exception(error)

    listen = self.server.submit(
      lambda shard: self._sessions[token].listen(answer)
    )
    listen.add_done_callback(fail)
    return answer

  def worker_exited(self, worker: int, restarts: int) -> None:
    """Takes note that an incarnation of a worker has exited: a connection has
    reported that already, a session has not."""

    def drop(shard):
      for token in list(self._sessions):
        if token[:2] == (worker, restarts):
          self._end(shard, token)

    if (worker, restarts) in self._far:
      self.server.submit(drop)

  def _end(self, shard, token):
    if session := self._sessions.pop(token, None):
      session.release()
      shard.disconnect(session.worker, self.clock(), session.send)

  def write_spans(self, worker: int, times: Sequence[spans.Span]) -> None:
    """Writes spans of a worker, in times of `clock`; the last is the push that
    ends a job."""
    for span in times:
      self._write_span(worker, span)

  def write_fault(self, fault: faults.Fault) -> None:
    """Writes a fault of a worker."""
    faults.append_fault(self._run, fault)


def _flush(shard):
  shard.state.messages.flush()


class ShardMaker(NamedTuple):
  """Makes a shard; it travels to the process of the shard."""

  site: Site
  network: UnixNetwork
  make_server: Callable[[], base.Server]
  steps: simulator.Steps | None  # compiled in this process; None: not yet
  index: int
  params: Any  # the shard's part, before the first message
  image: tuple[Any, Any] | None  # of a checkpoint, for when memory is lost
  resumed: bool

  def __call__(self, inside: Inside) -> HostedShard:
    """Compiles, opens the files, and listens."""
    site, index, setup = self.site, self.index, self.site.setup
    server = self.make_server()
    if self.steps is None:  # in a separate process
      receive_in_one_thread(server, self.params)
    steps = self.steps or simulator.compile_steps(
      server, None, wire=site.compress, keeps_messages=True
    )
    if not setup.totals:  # compiles before the first message comes
      state = simulator.start(server, self.params)
      ticket = steps.send(state, jnp.int32(0))
      message = compression.blank(server.codec, self.params)
      received = steps.receive(state, ticket, message, np.float32(0.0))
      jax.block_until_ready(received)
    state = simulator.start(server, self.params)
    updates = compression.last_update(state.opt_state) is not None
    like = slot_formats.contents(server.codec, self.params, updates=updates)
    memory, run = site.open_memory(index, *like, state), Path(site.run)
    store = ShardStorage.open(run, index, memory, self.image, disk=inside.disk)
    shard = Shard(
      *(index, setup, steps, state, store),
      now=inside.clock(),
      resumed=self.resumed,
    )
    lead = site.socket(0) if index and setup.consistent else None
    served = ShardServer(
      *(shard, site.socket(index)),
      clock=inside.clock,
      lead=lead,
      network=self.network,
    )
    return HostedShard(inside, served, run)
