"""A user's problem: a loss, parameters and data that a caller gives.

`Objects` accepts them in several forms, and checks them before anything runs.
Each error is a ValueError about the caller's arguments.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from asgd import algorithms, base, checks, models
from asgd import losses as losses_lib
from asgd.problems import descriptions, streams, user_code
from asgd.problems import own_params as params_lib
from asgd.problems.problem import Evaluation, Pieces, Problem, whole_loss

_NAN = float("nan")
# Columns of an evaluation's row that a caller gets beside those of `evaluate`.
RESULT_COLUMNS = (
  *("message", "update", "time", "seconds", "megabytes", "train_loss"),
  *("staleness_mean", "gap_mean"),
)
_INPUTS = "x", "image", "images", "input", "inputs", "tokens"  # keys of a dict


# Models.

_AS_PARAMS = (
  ": give a model that holds its arrays as params, with a loss (model, batch)"
)


def input_of(batch: base.Batch) -> Any:
  """Returns the input of a model: the first element of a tuple, the input of a
  dict, or the only array."""
  if isinstance(batch, Mapping):
    input_keys = [key for key in _INPUTS if key in batch]
    if input_keys[:1] == ["x"] or len(input_keys) == 1:
      return batch[input_keys[0]]
    if input_keys:
      raise ValueError(
        f"a batch is a dict of {', '.join(batch)}, and"
        f" {' and '.join(input_keys)} may be the model's input: call it"
        f" {_INPUTS[0]!r}, or give a loss (params, batch)"
      )
    raise ValueError(
      f"a batch is a dict of {', '.join(batch)}, none of which is known as a"
      f" model's input: call it {_INPUTS[0]!r}, or give a loss (params, batch)"
    )
  return batch[0] if isinstance(batch, (tuple, list)) else batch


class _ModelLoss(NamedTuple):
  """A model and a criterion, which together are a loss."""

  model: models.Model
  criterion: Callable[[jax.Array, base.Batch], jax.Array]
  example: jax.ShapeDtypeStruct  # of the model's input

  def init(self, key: jax.Array) -> Any:
    """Draws parameters."""
    return self.model.init(key, self.example)

  def outward(self, params: Any) -> Any:
    """Returns parameters in the form of the model's package."""
    return self.model.outward(params, self.example)

  def loss(self) -> Callable[..., Any]:
    """Returns the loss, with the statistics of the batch as aux."""

    def prepare(batch, key, dtype):
      del key, dtype
      return input_of(batch)

    return whole_loss(Pieces(self.model, prepare, self.criterion))


def _read_model(loss: Sequence[Any], first_batch: base.Batch) -> _ModelLoss:
  """Reads a loss that is given as a pair (model, criterion)."""
  if len(loss) != 2:
    raise ValueError(
      "a loss that is a pair must be (model, criterion), not"
      f" {checks.shown(loss)}"
    )
  model, criterion = loss
  is_linen = isinstance(model, nn.Module)
  if callable(model) and not is_linen and streams.takes(model, "rngs"):
    model = models.own.of_nnx(model)
  elif isinstance(model, tuple | list) or hasattr(model, "apply"):
    model = models.own.as_model(model)
  if not isinstance(model, models.Model):
    raise ValueError(
      "a loss that is a pair must be (model, criterion), the model a flax"
      " module, a pair (init, apply), a transformed function of Haiku, or a"
      f" function rngs -> nnx module, not {checks.shown(model)}"
      f"{_AS_PARAMS if params_lib.is_model(model) else ''}"
    )
  if not callable(criterion) or not streams.accepts(criterion, 2):
    raise ValueError(
      "the criterion beside a model must be a function (output, batch) ->"
      f" scalar, not {checks.shown(criterion)}"
    )
  # Parameters are made for one example: they do not depend on the batch size.
  x = jnp.asarray(input_of(first_batch))
  example = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
  return _ModelLoss(model, criterion, example)


# The objects of one run.


class Objects:
  """A caller's loss, parameters, data and recipe for one run, as a Problem.

  Processes receive it like the data of an experiment, but without the
  evaluation, which only the driver calls.
  """

  name = "given"
  source = "the caller's"

  def __init__(
    self,
    loss: Any,
    params: Any,
    dataset: Any,
    recipe: Any,
    *,
    batch_size: int | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    pieces: Pieces | None = None,
    objects: Mapping[str, Any] | None = None,
  ):
    """Reads and checks the objects; for arguments see `asgd.simulate`.

    Args:
      loss: a function, or a pair (model, criterion).
      params: see `own_params.read`; None: the model draws them.
      dataset: see `streams.read_data`.
      recipe: an `algorithms.Recipe`, or the settings of another protocol.
      batch_size: examples in a batch, if the data are examples.
      evaluate: parameters -> a number or a dict of numbers.
      pieces: the pieces of a loss that can be cut.
      objects: the objects, by key of a config; each object replaces the value
        of its key.
    """
    self.recipe, self.evaluate, self._pieces = recipe, evaluate, pieces
    self.objects = dict(objects or {})
    # Descriptions of the functions that the run names, by their names.
    self.functions: dict[str, str] = {}
    if evaluate and not (callable(evaluate) and streams.accepts(evaluate, 1)):
      raise ValueError(
        "evaluate must be a function of the parameters that returns a number or"
        f" a dict of numbers, not {checks.shown(evaluate)}"
      )
    self._stream = streams.read_data(dataset, batch_size)
    # [1] The loss and the parameters: from a model, or the caller's.
    self._model: _ModelLoss | None = None
    self._constants = ""  # a checksum of the leaves that are not trained
    if isinstance(loss, nn.Module):
      raise ValueError(
        "the loss is a flax module: give a pair, (module, criterion), with"
        " criterion(output, batch) -> scalar"
      )
    if isinstance(loss, (tuple, list)):
      self._model = model = _read_model(loss, self._stream.first)
      parameters = params_lib.read(model.init if params is None else params)
      self._init = lambda key: model.model.inward(parameters.init(key))
      self._loss = losses_lib.as_loss(model.loss())
      self._outward = model.outward
    else:
      parameters = params_lib.read(params)
      self._constants = parameters.model.digest() if parameters.model else ""
      self._init, self._outward = parameters.init, parameters.outward
      self._loss = parameters.loss_of(losses_lib.as_loss(loss))
    # [2] Trace everything once.
    self._check()
    # [3] Describe the objects for the results folder.
    self._identity = self._identify(loss, params, dataset, batch_size)

  def __getstate__(self):
    """Leaves out the evaluation, see the class."""
    return {**self.__dict__, "evaluate": None}

  @property
  def identity(self) -> dict[str, Any]:
    """Description in a results folder, as data for JSON."""
    descriptions_of_objects = {
      key: descriptions.describe_object(value)
      for key, value in self.objects.items()
    }
    return {**self._identity, **self.functions, **descriptions_of_objects}

  @property
  def size(self) -> int:
    """Examples in a batch; 1 if the number is not known."""
    return self._stream.size

  @property
  def sequential(self) -> bool:
    """Whether the data are iterators."""
    return self._stream.sequential

  @property
  def stored(self) -> Iterable[tuple[str, Any]]:
    """(label, arrays) of data that are in memory, or are indexed."""
    return self._stream.stored()

  @property
  def per_epoch(self) -> int | None:
    """Batches in one pass over the data; None if it has no end."""
    return self._stream.per_epoch

  def problem(self) -> Problem:
    """Returns the Problem for runtimes."""
    return self._problem(self._stream)

  def _problem(self, stream: streams.Stream) -> Problem:
    """Returns the Problem with the batches of a stream."""
    resize = stream.resize

    def rebatch(size: int) -> Problem:
      assert resize is not None
      return self._problem(resize(size))

    return Problem(
      self._init,
      self._loss,
      self._evaluate,
      stream.batches,
      stream.first,
      stream.per_epoch or 1,
      self._pieces,
      rebatch if resize else None,
      statistics_decay=self._decay,
      sequential=stream.sequential,
    )

  @functools.cached_property
  def _decay(self) -> float:
    """The part of statistics that the server keeps in an update."""
    if self._model is None:
      return models.DECAY
    return self._model.model.decay(self._model.example)

  def outward(self, params: Any) -> Any:
    """Returns parameters in the caller's form."""
    return self._outward(params)

  @property
  def notes(self) -> dict[str, Any]:
    """Facts for cell.json that may change when a cell resumes: the checksum of
    `evaluate`, by its source and constants; {} without it."""
    if self.evaluate is None:
      return {}
    description = descriptions.describe_object(self.evaluate)
    return {"evaluate": description.rpartition(" ")[2]}

  def _evaluate(self, params: Any) -> Evaluation:
    """Returns the result of the caller's evaluation; NaN if there is none."""
    if self.evaluate is None:
      return Evaluation(_NAN, _NAN)
    # Copy: the caller may keep them, and a runtime donates its buffers.
    result = self.evaluate(self.outward(jax.tree.map(jnp.array, params)))
    evaluation = as_evaluation(result)
    for column in RESULT_COLUMNS:
      if f"test_{column}" in evaluation.more:
        raise ValueError(
          f"evaluate returned {column!r}, which is the name of a column that"
          f" every evaluation has: return another name, such as 'my_{column}'"
        )
    return evaluation

  def _check(self) -> None:
    """Traces a job and its update now, so that no error follows in the run."""
    first, recipe = self._stream.first, self.recipe
    shapes = check_loss(self._init, self._loss, first)
    if isinstance(recipe, algorithms.Recipe):  # plans check other protocols
      self._check_job(shapes)

  def _check_job(self, shapes: Any) -> None:
    """Traces a job and its update, for a recipe of gradients or models."""
    first, recipe = self._stream.first, self.recipe
    # `eval_shape` computes nothing, so these checks take little time.
    server = recipe.server(statistics_decay=self._decay)
    jax.eval_shape(server.init, shapes)  # raises for integer parameters
    worker = recipe.make_worker(self._loss)

    def job(params, batch, key):
      state = server.init(params)
      ticket = server.send(state, jnp.int32(0))
      message, start = ticket.params, worker.init(state.params)
      # Local workers need stacked batches: trace their update only.
      if recipe.steps == 1:
        _, message, _ = worker.work(start, ticket, batch, key)
      return server.receive(state, ticket, message)

    description = descriptions.describe_recipe(recipe)
    try:
      jax.eval_shape(job, shapes, first, jax.random.key(0))
    except Exception as error:
      failure = f"{description} cannot train these parameters"
      with checks.user_code(failure, _remedy_for(error)):
        raise

  def _identify(
    self, loss: Any, params: Any, dataset: Any, batch_size: int | None
  ) -> dict[str, Any]:
    """Returns the description in a results folder, as data for JSON."""
    stream, key = self._stream, jax.random.key(0)
    # Two batches represent data that are not in memory. An iterator without a
    # state may start elsewhere in each call, so its shapes represent it.
    # Seed 0 and one worker: the checksum must not depend on the run's seed.
    batches = stream.batches(0, 1)
    samples = [stream.first, *(batches(0, job) for job in range(2))]
    if not stream.repeatable:
      samples = [jax.tree.map(np.zeros_like, stream.first)]
    # Data in memory are in the checksum as a whole.
    kinds: Any = np.ndarray, jax.Array, tuple, list, dict
    leaves = jax.tree.leaves(dataset) if isinstance(dataset, kinds) else []
    array_kinds = np.ndarray, jax.Array, np.generic, int, float
    arrays_in_memory = [x for x in leaves if isinstance(x, array_kinds)]
    arrays = [jax.device_get(self._init(key)), *samples, *arrays_in_memory]
    checksum = hashlib.sha256(self._constants.encode())
    # dtype and shape, too: the same bytes may be another array.
    for leaf in map(np.ascontiguousarray, jax.tree.leaves(arrays)):
      checksum.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    protocol_entry = {}
    if not isinstance(self.recipe, algorithms.Recipe):
      protocol_entry = {"protocol": self.recipe.protocol}
    return {
      **protocol_entry,
      "name": self.name,
      "sha256": checksum.hexdigest(),
      "loss": user_code.name_of(loss),
      "params": user_code.name_of(params),
      "data": user_code.name_of(dataset),
      "batch_size": batch_size,
      "recipe": descriptions.describe_recipe(self.recipe),
      "build": descriptions.plain_arguments(self.recipe),
      "code": descriptions.digest_of_code(
        self.recipe, loss, params, dataset
      ),
    }


def _remedy_for(error: Exception) -> str:
  """Returns the remedy for an update with wrong extra args, or ''."""
  text, argument_names = str(error), base.Delay._fields
  if not isinstance(error, TypeError) or not (
    "required keyword-only argument" in text
    or any(
      f"unexpected keyword argument '{name}'" in text for name in argument_names
    )
  ):
    return ""
  return (
    f"; a transform's update gets {', '.join(argument_names[:-1])} and"
    f" {argument_names[-1]} by keyword, and nothing else: name those that it"
    " reads, and add **extra_args for the others"
  )


def check_loss(
  init: Callable[[jax.Array], Any], loss: losses_lib.Loss, batch: base.Batch
) -> Any:
  """Traces parameters and their loss on a batch. Returns the parameters'
  shapes; raises ValueError if one of the two functions fails."""
  key = jax.random.key(0)
  with checks.user_code("params cannot be made", passes=(ValueError,)):
    shapes = jax.eval_shape(init, key)
  if not jax.tree.leaves(shapes):
    raise ValueError(
      f"there is nothing to train: init returned {checks.shown(shapes)}, which"
      " holds no array; return a tree of arrays (of Haiku, use hk.transform)"
    )
  failure = (
    f"the loss fails on the first batch, {streams.describe_batch(batch)}"
  )
  passed_errors = losses_lib.LossError, models.ModelError
  with checks.user_code(failure, passes=passed_errors):
    jax.eval_shape(loss, shapes, batch, key)
  return shapes


def as_evaluation(result: Any, single_name: str = "value") -> Evaluation:
  """Returns the result of a user's evaluation as an Evaluation.

  Args:
    result: an Evaluation, a number, a dict of numbers by name, or None. The
      names "loss" and "accuracy" are those of a test.
    single_name: the name to use for a single number.

  Raises:
    ValueError: for anything else.

  Example:
    >>> as_evaluation({"loss": 0.5, "norm": 2})
    Evaluation(loss=0.5, accuracy=nan, measure=nan, more={'test_norm': 2.0})
  """
  if isinstance(result, Evaluation):
    return result
  values = {} if result is None else {single_name: result}
  values = dict(result) if isinstance(result, Mapping) else values
  try:
    # `float` refuses complex numbers, and adding 0.0 refuses texts.
    values = {
      str(k): float(np.asarray(v).item() + 0.0) for k, v in values.items()
    }
  except (TypeError, ValueError, OverflowError) as error:
    raise ValueError(
      "evaluate must return a number, or a dict of numbers, not"
      f" {checks.shown(result)}"
    ) from error
  # "loss" and "accuracy" are fields of an Evaluation. Other names get columns
  # with the prefix "test_".
  loss, accuracy = (values.pop(key, _NAN) for key in ("loss", "accuracy"))
  more = {f"test_{key}": value for key, value in values.items()}
  return Evaluation(loss, accuracy, more=more)
