"""A shard as an object in a host: one thread serves, another runs calls.

Workers on the shard's machine reach it by its socket. A worker on another
machine opens a session by a call (`links.remote`), sends frames in calls, and
waits for the answers. The files of a run are on the driver's machine, so the
lead writes the spans and faults of such workers, too (`links.notes`).

The host runs the methods of `HostedShard` in its thread. Only another thread,
the serving thread, touches the shard: `server.submit` passes calls to it.
"""

import functools
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
from asgd.live.links.remote import Packet, Session, Token
from asgd.live.links.sockets import ShardServer, UnixNetwork
from asgd.live.shard import Shard, ShardStorage
from asgd.live.shard.images import Image
from asgd.live.slots import MESSAGES, message_stamp

ENDED = "ended"  # the result of `run` if the shard was asked to end


class HostedShard:
  """One incarnation of a shard. Its server answers frames at once."""

  def __init__(self, inside: Inside, server: ShardServer, run: Path):
    """`inside` has the functions of the host; `run` is the run's folder."""
    self.server, self._end_result = server, Future[str]()
    self.clock = inside.clock  # the seconds since the run began
    # (worker, restarts) of each worker loop that opened a session at any time.
    self._remote_workers: set[tuple[int, int]] = set()
    self._sessions: dict[Token, Session] = {}
    self._run, self._write_span = run, spans.SpanWriter(run)
    # `serve` occupies a thread until the end; the host then calls `end_run`.
    inside.run_later(server.serve, "end_run")

  def end_run(self, call: Future[None]) -> None:
    """Ends `run`, with the error of the server if `serve` raised one."""
    if error := call.exception():
      self._end_result.set_exception(error)
    else:
      self._end_result.set_result(ENDED)

  def run(self) -> Future[str]:
    """Returns a Future. Its result is ENDED after the shard was asked to end;
    an error of the server becomes the error of the Future."""
    return self._end_result

  def ask(self, call: Callable[[Shard], Any]) -> Future[tuple[Any] | None]:
    """Calls a function with the shard, in the serving thread.

    Returns:
      (answer,), with NumPy arrays; None if the server has ended. The server's
      error is raised by `run`.
    """
    answer: Future[tuple[Any] | None] = Future()

    def finish(ended_call: Future[Any]) -> None:
      error = ended_call.exception()
      if isinstance(error, Disconnected):
        answer.set_result(None)
      elif error is not None:
        answer.set_exception(error)
      else:
        answer.set_result((ended_call.result(),))

    # Only NumPy crosses the boundary of a process.
    server_call = self.server.submit(lambda shard: jax.device_get(call(shard)))
    server_call.add_done_callback(finish)
    return answer

  def end(self) -> Future[tuple[None] | None]:
    """Writes pending output, and ends."""
    answer = self.ask(_flush)
    answer.add_done_callback(lambda ended_call: self.server.end())
    return answer

  def interrupt(self) -> None:
    """Ends at once: nothing more is written or sent."""
    self.server.end()

  def close(self) -> None:
    """Ends the server, waits for its thread, and closes the shard's files."""
    self.server.end()
    self.server.ended.wait()
    self.server.shard.close()

  # Workers on other machines.

  def open(self, token: Token) -> Future[None]:
    """Opens a session for a worker. Open calls of `listen` in the worker's
    earlier sessions are answered."""
    self._remote_workers.add(token[:2])

    def make_session(shard: Shard) -> None:
      for session_token, session in self._sessions.items():
        if session_token[:2] == token[:2]:
          session.release()
      memory = shard.state.slots.memory
      self._sessions[token] = Session(memory, self.server.submit)

    return self.server.submit(make_session)

  def deliver(self, token: Token, data: bytes, message: Any) -> Future[None]:
    """Handles a frame of a session, with the message if it is a PUSH. A
    BadFrame ends the session, as it ends the connection of a socket."""
    frame = frames.unpack(data)

    def handle_frame(shard: Shard) -> None:
      session = self._sessions[token]
      try:
        session.check_sender(frame)
        is_connected = shard.role.connections.get(frame.worker) == session.send
        # The shard writes the message to its slot, as a worker on this machine
        # does itself. A late PUSH must not reach the slot of another ticket.
        if (
          message is not None and is_connected and shard.state.can_write(frame)
        ):
          memory = shard.state.slots.memory
          stamp = message_stamp(frame.worker, frame.seq)
          memory.write(MESSAGES, frame.message, message, stamp)
        shard.handle(frame, session.send, self.clock())
      except (BadCode, frames.BadFrame):
        self._end_session(shard, token)
        raise

    return self.server.submit(handle_frame)

  def listen(self, token: Token) -> Future[list[Packet]]:
    """Returns the next frames of a session, once there are some. Raises
    KeyError if the session has ended."""
    answer: Future[list[Packet]] = Future()

    def fail(call: Future[Any]) -> None:
      if (error := call.exception()) is not None:
        answer.set_exception(error)

    listen_call = self.server.submit(
      lambda shard: self._sessions[token].listen(answer)
    )
    listen_call.add_done_callback(fail)
    return answer

  def worker_exited(self, worker: int, restarts: int) -> None:
    """Ends the sessions of a worker that has exited. A socket needs no such
    call: the kernel closes it."""

    def end_sessions(shard: Shard) -> None:
      for token in list(self._sessions):
        if token[:2] == (worker, restarts):
          self._end_session(shard, token)

    if (worker, restarts) in self._remote_workers:
      self.server.submit(end_sessions)

  def _end_session(self, shard: Shard, token: Token) -> None:
    """Ends a session and the tickets of its worker, as a broken connection
    does."""
    if session := self._sessions.pop(token, None):
      session.release()
      shard.disconnect(session.worker, self.clock(), session.send)

  def write_spans(self, worker: int, job_spans: Sequence[spans.Span]) -> None:
    """Writes the spans of a worker's job, in times of `clock`. The last span is
    the push that ends the job."""
    for span in job_spans:
      self._write_span(worker, span)

  def write_fault(self, fault: faults.Fault) -> None:
    """Writes a fault of a worker."""
    faults.append_fault(self._run, fault)


def _flush(shard: Shard) -> None:
  shard.state.messages.flush()


@functools.lru_cache(maxsize=32)
def _compile(
  server: base.Server,
  steps: simulator.Steps,
  structure: jax.tree_util.PyTreeDef,
  shapes: tuple[tuple[tuple[int, ...], Any], ...],
) -> None:
  """Compiles a shard's programs for parameters of the given shapes. Cached, as
  threads compile once for all starts of their shards."""
  zeros = [np.zeros(shape, dtype) for shape, dtype in shapes]
  params = jax.tree.unflatten(structure, zeros)
  state = simulator.start(server, params)
  ticket = steps.send(state, jnp.int32(0))
  message = compression.blank(server.codec, params)
  result = steps.receive(state, ticket, message, np.float32(0.0))
  jax.block_until_ready(result)


class ShardMaker(NamedTuple):
  """Makes a HostedShard. It is pickled and sent to the shard's process."""

  site: Site
  network: UnixNetwork
  make_server: Callable[[], base.Server]
  steps: simulator.Steps | None  # compiled in this process; None: not yet
  shard: int  # index
  params: Any  # the shard's part, before the first message
  image: Image | None  # of a checkpoint; used if the memory is lost
  resumed: bool  # as in `ServerMakers.shard`

  def __call__(self, inside: Inside) -> HostedShard:
    """Makes a shard, in its host.

    Compiles the programs before the shard listens, because a shard that listens
    must answer at once.
    """
    site, index, setup = self.site, self.shard, self.site.setup
    # [1] Compile.
    server = self.make_server()
    if self.steps is None:  # in a separate process
      receive_in_one_thread(server, self.params)
    steps = self.steps or simulator.compile_steps(
      server, None, wire=site.compress, keeps_messages=True
    )
    if not setup.totals:  # with totals, `steps.stage` is used instead
      leaves, structure = jax.tree.flatten(self.params)
      shapes = tuple((np.shape(leaf), leaf.dtype) for leaf in leaves)
      _compile(server, steps, structure, shapes)
    # [2] Open the memory and the files.
    state = simulator.start(server, self.params)
    updates = compression.last_update(state.opt_state) is not None
    slot_contents = slot_formats.contents(
      server.codec, self.params, updates=updates
    )
    memory, run = site.open_memory(index, *slot_contents, state), Path(site.run)
    storage = ShardStorage.open(
      run, index, memory, self.image, disk=inside.disk
    )
    # [3] Recover, and listen.
    shard = Shard(
      *(index, setup, steps, state, storage),
      now=inside.clock(),
      resumed=self.resumed,
    )
    lead = site.socket(0) if index and setup.consistent else None
    shard_server = ShardServer(
      *(shard, site.socket(index)),
      clock=inside.clock,
      lead=lead,
      network=self.network,
    )
    return HostedShard(inside, shard_server, run)
