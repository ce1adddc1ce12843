"""Models, each a tuple of flax layers that a pipeline can cut anywhere.

`build` makes one by name; `init`, `apply` and `count` work on any of them, or
on a slice of layers. GPT is in `asgd.models.transformer`, BERT in
`asgd.models.encoder`.
"""

from collections.abc import Callable

from asgd import names
from asgd.models import encoder, transformer
from asgd.models.images import (
  BasicBlock,
  Classifier,
  ConvPool,
  Dense,
  Flatten,
  Head,
  Stem,
  WideBlock,
  cnn,
  mlp,
  pad_shortcut,
  resnet,
  resnet20,
  wide_resnet,
  wrn16_4,
)
from asgd.models.layers import Layers, apply, count, init

MODELS: dict[str, Callable[..., Layers]] = {
  model.__name__: model
  for model in (mlp, cnn, resnet20, wrn16_4, transformer.gpt, encoder.bert)
}


def build(name: str, classes: int, **kwargs) -> Layers:
  """Builds one of MODELS by name, with so many logits and its options.

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
  maker = names.lookup("model", name, MODELS)
  return names.call("model", name, maker, {"classes": classes, **kwargs})
