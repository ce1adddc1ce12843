"""Checks of a user's codec, with errors that name it."""

import contextlib
from typing import Any

import jax

from asgd import base, checks, sharding
from asgd.compression.codec import Codec, fit_then_compose

# The contract of each function, for the error if it fails.
_CONTRACT = {
  "init": "takes the parameters' shapes and returns a state",
  "encode": "takes (state, message, key) and returns (code, state)",
  "decode": "takes the code alone and returns a tree like the message",
}


def _naming(
  codec_name: str, function: str
) -> contextlib.AbstractContextManager[Any]:
  """Returns a context in which errors name the codec, and the contract of its
  function."""
  return checks.user_code(
    f"codec {codec_name}: {function} fails",
    f"; {function} {_CONTRACT[function]}",
  )


def _shape_text(struct: Any) -> str:
  return f"{struct.dtype}{[*struct.shape]}"


def _leaves(tree: Any) -> dict[str, Any]:
  """Returns path -> leaf."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): x for path, x in leaves}


def _check_like(
  codec_name: str, result: str, actual: Any, like: str, expected: Any
) -> None:
  """Raises ValueError, naming the first leaf that differs, unless two trees
  have the same structure, shapes and dtypes. `result` and `like` name them."""
  # Texts instead of arrays, so that leaves can be compared and shown.
  texts = [jax.tree.map(_shape_text, tree) for tree in (actual, expected)]
  actual_leaves, expected_leaves = map(_leaves, texts)
  # A leaf that only one of the trees has differs, too.
  paths = (*expected_leaves, *actual_leaves)
  different = [
    path for path in paths
    if actual_leaves.get(path) != expected_leaves.get(path)
  ]
  # Equal leaves are not enough: a list and a tuple of them differ.
  structures: list[Any] = [jax.tree.structure(x) for x in (actual, expected)]
  if not different and structures[0] == structures[1]:
    return
  path = different[0] if different else ""
  if path:
    shown = [
      leaves.get(path, "missing") for leaves in (actual_leaves, expected_leaves)
    ]
  else:  # the tree is one leaf, or its inner nodes differ
    shown = [checks.shown(text).replace("'", "") for text in texts]
  raise ValueError(
    f"codec {codec_name}: {result} must have the structure, shapes and dtypes"
    f" of {like}; {f'leaf {path}' if path else 'it'} is {shown[0]}, and"
    f" should be {shown[1]}"
  )


def checked(codec: Codec, name: str) -> Codec:
  """Makes a codec raise errors that name it, when it is traced.

  Args:
    codec: a user's codec.
    name: the codec's name in errors.

  Returns:
    A Codec that computes the same. It raises a ValueError of one line if a
    function of the codec fails, if `encode` returns a state of other shapes
    than it got, or if `decode` does not return a tree like the message.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> from asgd.compression import user_codecs
    >>> wrong = compression.identity()._replace(decode=lambda code: code[:2])
    >>> codec, x = user_codecs.checked(wrong, "'mine:make'"), jnp.zeros(3)
    >>> codec.encode(codec.init(x), x, jax.random.key(0))
    Traceback (most recent call last):
    ValueError: codec 'mine:make': what decode returns must have the \
structure, shapes and dtypes of the message; it is float32[2], and should \
be float32[3]
  """

  def init(like: base.Params) -> Any:
    with _naming(name, "init"):
      return codec.init(like)

  def encode(state, tree, key):
    with _naming(name, "encode"):
      code, next_state = codec.encode(state, tree, key)
      # Shapes alone: the checks run while JAX traces.
      structs = jax.tree.map(sharding.shape_of, (code, next_state, state, tree))
    code_struct, next_struct, state_struct, tree_struct = structs
    with _naming(name, "decode"):
      decoded = jax.eval_shape(codec.decode, code_struct)
    result = "what decode returns"
    _check_like(name, result, decoded, "the message", tree_struct)
    # For a state of other shapes or dtypes, JAX would compile again.
    result = "the state of encode"
    _check_like(name, result, next_struct, "that of init", state_struct)
    return code, next_state

  for_run = fit_then_compose(codec, lambda codec: checked(codec, name))
  return codec._replace(init=init, encode=encode, for_run=for_run)
