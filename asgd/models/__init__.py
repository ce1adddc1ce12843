"""Models, each a tuple of flax layers that a pipeline can cut anywhere.

    build(name, classes) -> layers;   init(layers, key, example) -> params
    apply(layers, params, x) -> (output, statistics)

`init` and `apply` also take a slice of layers, which is a pipeline stage.
Models of images are in `images.py`, GPT in `transformer.py`, LSTM in
`recurrent.py`, BERT in `encoder.py`; `own.py` adapts a user's model. Begin with
`layers.py`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from asgd import names
from asgd.models import encoder, own, recurrent, transformer
from asgd.models.images import (
  BasicBlock,
  Classifier,
  ConvPool,
  Dense,
  Flatten,
  Head,
  Stem,
  TowerConv,
  WideBlock,
  alexnet,
  cnn,
  mlp,
  pad_shortcut,
  resnet,
  resnet20,
  wide_resnet,
  wrn16_4,
)
from asgd.models.layers import Layers, apply, count, init
from asgd.models.own import DECAY, Model, ModelError

MODELS: dict[str, Callable[..., Layers]] = {
  model.__name__: model
  for model in (
    *(mlp, cnn, alexnet, resnet20, wrn16_4),
    *(transformer.gpt, recurrent.lstm, encoder.bert),
  )
}


def build(name: str, classes: int, **kwargs: Any) -> Layers | Model:
  """Builds a model by name, with `classes` logits; kwargs are its options.

  The name is one of MODELS, or MODULE:FUNCTION of a user's function that
  returns layers, a flax module, a pair (init, apply) or another form that
  `asgd.models.own.as_model` takes. A function with an argument `rngs` returns
  an nnx module.

  Raises ValueError for an unknown name or option, with the nearest known one.

  Example:
    >>> import jax
    >>> layers = build("resnet20", 10)
    >>> example = jax.ShapeDtypeStruct((1, 32, 32, 3), "float32")
    >>> shapes = jax.eval_shape(lambda key: init(layers, key, example),
    ...                         jax.random.key(0))
    >>> len(layers), count(shapes)
    (11, 269722)
  """
  maker = names.resolve("model", name, MODELS)
  if takes(name, ["classes"]):
    kwargs = {"classes": classes, **kwargs}
  if not names.is_import(name):
    return names.call("model", name, maker, kwargs)
  if takes(name, ["rngs"]):
    names.check_arguments("model", name, maker, [*kwargs, "rngs"])
    return own.of_nnx(functools.partial(maker, **kwargs))
  try:
    return own.as_model(names.call("model", name, maker, kwargs))
  except ValueError as error:
    raise ValueError(f"model {name!r}: {error}") from error


def takes(name: str, arguments: Iterable[str]) -> list[str]:
  """Returns those of `arguments` that a model's maker takes by name."""
  maker = names.resolve("model", name, MODELS)
  parameters = inspect.signature(maker).parameters
  return [argument for argument in arguments if argument in parameters]
