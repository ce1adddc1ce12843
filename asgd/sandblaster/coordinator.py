"""The coordinator of L-BFGS, which holds no parameters.

It makes one request after the other, and each depends only on the answers so
far. So it can be restarted from its `State` after the last iteration and the
answers since then. It refers to vectors by name:

  point, gradient           x and g of the last iterate; gradient is y while a
                            pair is computed
  direction                 d; it is s while a pair is computed
  trial, trial_gradient     x + a d, and the gradient there
  s0, y0, s1, y1, ...       the history: differences of points and of gradients
  message/EVALUATION/JOB    a worker's message: the sum of its gradients
"""

import math
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from asgd.sandblaster import line_search
from asgd.sandblaster.commands import Command
from asgd.sandblaster.settings import Settings

_EPSILON = 2.0**-52  # of float64: pairs with less curvature are skipped


class Begin(NamedTuple):
  """Requests that workers fetch `trial` and start the jobs of an evaluation."""

  evaluation: int


class Await(NamedTuple):
  """Requests the loss of a job, once the shards have its message."""

  evaluation: int
  job: int


Request = Command | Begin | Await


def message_name(evaluation: int, job: int) -> str:
  """Returns the name of the vector that a worker sends for a job.

  Example:
    >>> message_name(3, 0)
    'message/3/0'
  """
  return f"message/{evaluation}/{job}"


class Pair(NamedTuple):
  """A pair (s, y) of the history."""

  slot: int  # its vectors are s{slot} and y{slot}
  rho: float  # 1 / (y . s)


class State(NamedTuple):
  """The coordinator's state after an iteration; plain data."""

  number: int = 0  # of the next command
  iteration: int = -1  # steps taken; -1: the first loss is not computed
  evaluations: int = 0  # of the complete batch
  loss: float = math.nan  # f of the point
  square: float = math.nan  # g . g
  step: float = 0.0  # the last step taken
  gamma: float = 1.0  # s . y / y . y of the last pair, scales the initial H
  pairs: tuple[Pair, ...] = ()  # oldest first
  fallbacks: int = 0  # count of times that the history was cleared
  reason: str = ""  # why the run has ended; "" while it runs

  @property
  def norm(self) -> float:
    """The norm of the gradient."""
    return math.sqrt(self.square) if self.square >= 0 else self.square


_Stream = Generator[Request, float | None, Any]


class _CommandMaker:
  """Numbers commands and evaluations; makes the next Command when called."""

  def __init__(self, state: State):
    self.number, self.evaluation = state.number, state.evaluations

  def __call__(self, operation, target, source="", factor=1.0) -> Command:
    command = Command(self.number, operation, target, source, float(factor))
    self.number += 1
    return command


class Coordinator:
  """Runs L-BFGS by making requests, which its caller answers.

  Example:
    >>> from asgd.sandblaster import Coordinator, Settings
    >>> coordinator = Coordinator(Settings(portions=2))
    >>> coordinator.request
    Command(number=0, operation='copy', target='trial', source='point', \
factor=1.0)
    >>> coordinator.answer(None)
    >>> coordinator.request.operation, coordinator.request.target
    ('allocate', 'trial_gradient')
  """

  def __init__(
    self,
    settings: Settings,
    state: State | None = None,
    answers: Iterable[float | None] = (),
  ):
    """Starts, or resumes from a state and the answers since then."""
    self.state = state or State()
    self.answers: list[float | None] = []  # since that state
    self.news: list[str] = []  # lines for the user
    self._settings = settings
    self._stream = self._run(self.state)
    # The open request; None: the run has ended, for `state.reason`.
    self.request: Request | None = next(self._stream, None)
    for answer in answers:
      self.answer(answer)

  def answer(self, value: float | None) -> None:
    """Answers the open request."""
    self.answers.append(value)
    try:
      self.request = self._stream.send(value)
    except StopIteration:
      self.request = None

  def _complete_iteration(self, state: State, command: _CommandMaker) -> State:
    """Stores and returns the state after an iteration, with the numbers of the
    next command and evaluation; drops the iteration's answers."""
    self.state = state._replace(
      number=command.number, evaluations=command.evaluation
    )
    self.answers = []
    return self.state

  def _run(self, state: State) -> _Stream:
    """Yields the requests of L-BFGS from a state on, and gets their answers."""
    command = _CommandMaker(state)

    # [1] The loss and gradient of the first point.
    if state.iteration < 0:
      yield command("copy", "trial", "point")
      loss = yield from self._evaluate(command)
      yield command("copy", "gradient", "trial_gradient")
      square = yield command("dot", "gradient", "gradient")
      state = state._replace(iteration=0, loss=loss, square=square)
      state = self._complete_iteration(state, command)
    while not state.reason:
      reason = self._end_reason(state)
      if not reason:
        # [2] A line search along the direction of L-BFGS; if it finds no
        # descent, one along steepest descent.
        descent = yield from self._search_step(command, state)
        if descent is None and state.pairs:
          state = state._replace(pairs=(), fallbacks=state.fallbacks + 1)
          self.news.append(
            f"iteration {state.iteration + 1}: the line search found no descent"
            " along the direction of L-BFGS; steepest descent is tried once"
          )
          descent = yield from self._search_step(command, state)
        # [3] The step, or the end of the run.
        if descent is not None:
          state = yield from self._take_step(command, state, *descent)
        else:
          reason = (
            f"no descent: the line search of iteration {state.iteration + 1}"
            " found no step along steepest descent that decreases the loss"
            f" {state.loss:.6g}, where the gradient's norm is {state.norm:.3g}"
          )
      if reason:
        self.news.append(f"stopped: {reason}")
        state = state._replace(reason=reason)
      state = self._complete_iteration(state, command)

  def _end_reason(self, state: State) -> str:
    """Returns why the run ends at a state; "" if it continues."""
    if not (math.isfinite(state.loss) and math.isfinite(state.square)):
      return (
        f"not finite: the loss is {state.loss} and the gradient's norm"
        f" {state.norm} after {state.iteration} iterations"
      )
    tolerance = self._settings.tolerance
    if state.norm <= tolerance:
      return (
        f"converged: the gradient's norm is {state.norm:.3g}, at most"
        f" {tolerance:g}"
      )
    return ""

  def _evaluate(self, command: _CommandMaker) -> _Stream:
    """Computes the loss, which it returns, and `trial_gradient` at `trial`:
    means over the portions, summed in their order, plus the weight decay."""
    settings, evaluation = self._settings, command.evaluation
    command.evaluation += 1
    yield command("allocate", "trial_gradient")
    yield Begin(evaluation)
    loss = 0.0
    for job in range(settings.jobs):
      loss += yield Await(evaluation, job)
      message = message_name(evaluation, job)
      yield command("axpy", "trial_gradient", message)
      yield command("discard", message)
    loss /= settings.portions
    yield command("scale", "trial_gradient", factor=1 / settings.portions)
    decay = settings.weight_decay
    if decay:
      yield command("axpy", "trial_gradient", "trial", decay)
      loss += decay / 2 * (yield command("dot", "trial", "trial"))
    return loss

  def _search_step(self, command: _CommandMaker, state: State) -> _Stream:
    """Searches for a step along a new direction. Moves `trial` to this step and
    returns (step, loss); returns None if no step decreases the loss."""
    yield from self._compute_direction(command, state)
    slope = yield command("dot", "gradient", "direction")
    if not slope < 0:
      return None
    tried_steps: list[line_search.Tried] = []
    options = self._settings.search
    while True:
      advice = line_search.advise(state.loss, slope, tried_steps, options)
      if advice.done:
        break
      trial_loss = yield from self._try(command, advice.step)
      trial_slope = yield command("dot", "trial_gradient", "direction")
      tried_steps.append(
        line_search.Tried(advice.step, trial_loss, trial_slope)
      )
    if not advice.found:
      return None
    # `trial` must be at the step to take.
    if advice.step != tried_steps[-1].step:
      trial_loss = yield from self._try(command, advice.step)
    return advice.step, trial_loss

  def _try(self, command: _CommandMaker, step: float) -> _Stream:
    """Moves `trial` to a step along the direction; returns the loss there."""
    yield command("copy", "trial", "point")
    yield command("axpy", "trial", "direction", step)
    return (yield from self._evaluate(command))

  def _compute_direction(self, command: _CommandMaker, state: State) -> _Stream:
    """Computes d = -H g by the two-loop recursion (Nocedal and Wright,
    algorithm 7.4); without pairs, steepest descent of length at most 1."""
    alphas = []
    yield command("copy", "direction", "gradient")
    # [1] From the newest pair to the oldest.
    for slot, rho in reversed(state.pairs):
      alpha = rho * (yield command("dot", f"s{slot}", "direction"))
      alphas.append(alpha)
      yield command("axpy", "direction", f"y{slot}", -alpha)
    # [2] The initial H is gamma. Without pairs the direction is no longer than
    # 1: the loss has no known scale yet.
    scale = state.gamma if state.pairs else min(1.0, 1 / state.norm)
    yield command("scale", "direction", factor=scale)
    # [3] From the oldest pair to the newest.
    for slot, rho in state.pairs:
      beta = rho * (yield command("dot", f"y{slot}", "direction"))
      yield command("axpy", "direction", f"s{slot}", alphas.pop() - beta)
    yield command("scale", "direction", factor=-1.0)

  def _take_step(
    self, command: _CommandMaker, state: State, step: float, loss: float
  ) -> _Stream:
    """Moves `point` to `trial`, and adds the new pair to the history.

    The differences s and y are computed in `direction` and `gradient`, so a
    skipped pair overwrites nothing of the history.
    """
    yield command("copy", "direction", "trial")
    yield command("axpy", "direction", "point", -1.0)
    yield command("copy", "point", "trial")
    yield command("scale", "gradient", factor=-1.0)
    yield command("axpy", "gradient", "trial_gradient")
    curvature = yield command("dot", "gradient", "direction")
    y_square = yield command("dot", "gradient", "gradient")
    pairs, gamma = state.pairs, state.gamma
    if curvature > _EPSILON * y_square:  # else H would not stay positive
      slot = len(pairs)
      if slot == self._settings.history:  # reuse the slot of the oldest pair
        slot, pairs = pairs[0].slot, pairs[1:]
      yield command("copy", f"s{slot}", "direction")
      yield command("copy", f"y{slot}", "gradient")
      pairs = (*pairs, Pair(slot, 1 / curvature))
      gamma = curvature / y_square
    yield command("copy", "gradient", "trial_gradient")
    square = yield command("dot", "gradient", "gradient")
    return state._replace(
      iteration=state.iteration + 1,
      loss=loss,
      square=square,
      step=step,
      gamma=gamma,
      pairs=pairs,
    )
