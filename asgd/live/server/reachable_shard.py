"""A shard that workers on other machines reach by calls of its host.

A worker that is not on its shards' machine sees neither their sockets nor their
memory. It opens a session with each shard (`links.remote`), sends it frames,
and waits for the answers; a PUSH brings its message along and a TICKET its
parameters. The files of a run are on the driver's machine, so the lead writes
the spans and faults of these workers, too (`links.notes`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from asgd.compression.packing import BadCode
from asgd.live import faults, frames, spans
from asgd.live.frames import Frame
from asgd.live.hosts import Inside
from asgd.live.links.base import ShardFeeder
from asgd.live.server.hosted_shard import HostedShard
from asgd.live.slots import MESSAGES, PARAMS, UPDATES, message_stamp

Token = tuple[int, int, str]  # worker, life, a random text: names a session


class Session:
  """A shard's end: frames for one worker. The thread that serves the shard
  makes all calls."""

  def __init__(self, memory: Any, defer: Callable[[Callable], Any]):
    """`defer` calls something after what is being done now."""
    self.worker = -1  # not known yet
    self._speaker: tuple[str, int] | None = None
    self._memory, self._defer = memory, defer
    self._out: list[tuple[bytes, Any]] = []
    self._listener: Future[list] | None = None  # takes what is sent next

  def hear(self, frame: Frame) -> None:
    """Takes note of a frame of the worker; raises BadFrame if it is not of a
    worker, or of another."""
    if frame.kind in frames.OF_SHARDS:
      raise frames.BadFrame(f"no worker says {frame}")
    self._speaker = frames.speaker(frame, self._speaker)
    self.worker = frame.worker

  def say(self, frame: Frame) -> None:
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


class ReachableShard(HostedShard):
  """A shard that workers on other machines reach by calls of its host."""

  def __init__(self, inside: Inside, server: ShardFeeder, run: Path):
    """`run` is the folder of the run."""
    super().__init__(inside, server)
    self.clock = inside.clock  # the seconds since the run began
    self._sessions: dict[Token, Session] = {}
    self._run, self._write_span = run, spans.SpanWriter(run)

  def open(self, token: Token) -> Future[None]:
    """Opens a session for a worker, which listens to none before any more."""

    def make(shard):
      for each, session in self._sessions.items():
        if each[:2] == token[:2]:
          session.release()
      memory = shard.state.slots.memory
      self._sessions[token] = Session(memory, self._server.submit)

    return self._server.submit(make)

  def tell(self, token: Token, data: bytes, message: Any) -> Future[None]:
    """Takes a frame of a session, and the message of a PUSH. A BadFrame ends
    the session, as it would a connection."""
    frame = frames.unpack(data)

    def take(shard):
      session = self._sessions[token]
      try:
        session.hear(frame)
        holds = shard.role.peers.get(frame.worker) == session.say
        if message is not None and holds and shard.state.accepts(frame):
          memory = shard.state.slots.memory
          stamp = message_stamp(frame.worker, frame.seq)
          memory.write(MESSAGES, frame.message, message, stamp)
        shard.handle(frame, session.say, self.clock())
      except (BadCode, frames.BadFrame):
        self._end(shard, token)
        raise

    return self._server.submit(take)

  def listen(self, token: Token) -> Future[list[tuple[bytes, Any]]]:
    """Returns the next frames of a session, once there are some. Raises
    KeyError if the session has ended."""
    answer: Future[list] = Future()

    def fail(call):
      if (error := call.exception()) is not None:
        answer.set_exception(error)

    listen = self._server.submit(
      lambda shard: self._sessions[token].listen(answer)
    )
    listen.add_done_callback(fail)
    return answer

  def gone(self, worker: int, life: int) -> None:
    """See the base: no connection has reported it."""

    def drop(shard):
      for token in list(self._sessions):
        if token[:2] == (worker, life):
          self._end(shard, token)

    self._server.submit(drop)

  def _end(self, shard, token):
    if session := self._sessions.pop(token, None):
      session.release()
      shard.gone(session.worker, self.clock(), session.say)

  def write_spans(self, worker: int, told: Sequence[spans.Span]) -> None:
    """Writes spans of a worker, in times of `clock`; the last is the push that
    ends a job."""
    for span in told:
      self._write_span(worker, span)

  def write_fault(self, fault: faults.Fault) -> None:
    """Writes a fault of a worker."""
    faults.append_fault(self._run, fault)
