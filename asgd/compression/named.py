"""Codecs and reducers by name, for configs."""

from collections.abc import Callable, Mapping
from typing import Any

from asgd import checks, names
from asgd.compression import codec as codec_lib
from asgd.compression import user_codecs
from asgd.compression.codec import Codec, identity
from asgd.compression.demo import demo
from asgd.compression.dgc import dgc
from asgd.compression.floats import bf16, e3m0, fp16, int8
from asgd.compression.onebit_adam import onebit_adam
from asgd.compression.powersgd import powersgd, powersgd_reducer
from asgd.compression.quantization import qsgd, terngrad
from asgd.compression.reducers import Reducer, average
from asgd.compression.signs import onebit, sign
from asgd.compression.sparse import random_k, top_k
from asgd.compression.thresholds import adaptive_threshold, threshold

_SPARSE = threshold, adaptive_threshold, top_k, dgc, random_k
_FEW_LEVELS = onebit, sign, qsgd, terngrad
_OTHERS = powersgd, demo, bf16, fp16, int8, e3m0, identity
CODECS: dict[str, Callable[..., Codec]] = {
  maker.__name__: maker for maker in (*_SPARSE, *_FEW_LEVELS, *_OTHERS)
}
# Means over devices in step, other than the average over devices' codecs.
REDUCERS: dict[str, Callable[..., Reducer]] = {
  "powersgd": powersgd_reducer,
  "onebit_adam": onebit_adam,
}


def named(
  name: str,
  *,
  error_feedback: bool | None = None,
  clip: float | None = None,
  entropy_coding: bool = True,
  **options: Any,
) -> Codec:
  """Builds one of CODECS, or a user's codec, by name.

  Args:
    name: a name of CODECS, or MODULE:FUNCTION of a function (**options) ->
      Codec.
    error_feedback: whether a later message sends the part that was left out;
      None: if the codec needs it.
    clip: largest L2 norm of a message. It is clipped before the residual is
      added. None: no limit.
    entropy_coding: False sends positions as words of 4 bytes (`in_words`).
    **options: options of the codec.

  Returns:
    The Codec.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one, and
      for a value out of its range.

  Source:
    none.

  Example:
    >>> from asgd import compression
    >>> codec = compression.named("threshold", tau=0.001)
    >>> codec.feedback  # it was needed, so it was added
    'own'
    >>> codec.unbiased, compression.named("qsgd", levels=3).unbiased
    (False, True)
  """
  if name is None:
    raise ValueError(
      "a codec needs a name, not None: leave the codec out for dense messages,"
      f" or use one of {', '.join(sorted(CODECS))}"
    )
  reducers_only = [x for x in REDUCERS if x not in CODECS]
  if name in reducers_only:
    raise ValueError(
      f"{name} is only for devices in step (engine mesh); workers and peers"
      f" need another codec; known: {', '.join(sorted(CODECS))}"
    )
  codec = names.call(
    "codec", name, names.resolve("codec", name, CODECS), options
  )
  if not isinstance(codec, Codec):
    raise ValueError(
      f"codec {name!r} must return a compression.Codec, not"
      f" {checks.shown(codec)}"
    )
  # A user's codec is checked while it is traced; the library's are tested.
  if names.is_import(name):
    codec = user_codecs.checked(codec, checks.shown(name))
  checks.flag("error_feedback", error_feedback, none="where the codec needs it")
  if error_feedback is None:
    error_feedback = codec.feedback == codec_lib.NEEDED
  if error_feedback:
    if codec.feedback == codec_lib.OWN:
      raise ValueError(
        f"error_feedback: {name} already has error feedback; leave it out"
      )
    codec = codec_lib.error_feedback(codec)
  if clip is not None:
    checks.positive("clip", clip)
    # The clip wraps error feedback, so that only the message is clipped, not
    # the residual.
    codec = codec_lib.clip(codec, clip)
  checks.flag("entropy_coding", entropy_coding)
  return codec if entropy_coding else codec_lib.in_words(codec)


def as_codec(codec: Any, **options: Any) -> Codec:
  """Returns a value in any of the accepted forms as a Codec.

  Args:
    codec: a Codec; a name or a dict of a name and options, see `named`; or
      None, which sends everything.
    **options: options of `named`, the defaults for a codec that is given by
      name.

  Returns:
    The Codec.

  Raises:
    ValueError: see `named`, and for a value of another kind.

  Source:
    none.

  Example:
    >>> from asgd import compression
    >>> compression.as_codec({"name": "top_k", "density": 0.1}).feedback
    'own'
    >>> compression.as_codec("top_k", error_feedback=False).feedback
    'needed'
  """
  if codec is None:
    return identity()
  if isinstance(codec, str):
    codec = {"name": codec}
  if isinstance(codec, Mapping):
    if "name" not in codec:
      raise ValueError(
        f"codec {checks.shown(dict(codec))} has no name: add one of"
        f" {', '.join(sorted(CODECS))}"
      )
    # An error about an option is prefixed by "codec".
    with checks.section_errors("codec", codec):
      return named(**{**options, **codec})
  if not isinstance(codec, Codec):
    raise ValueError(
      "codec must be a name, a dict of a name and options, or a Codec of"
      f" asgd.compression, not {checks.shown(codec)}"
    )
  return codec


def named_reducer(name: str, **options: Any) -> Reducer:
  """Builds one of REDUCERS, or the average over devices' codecs, by name.

  Args:
    name: a name of REDUCERS, or see `named`.
    **options: of the reducer; for a codec see `named`.

  Returns:
    The Reducer.

  Raises:
    ValueError: see `named`.

  Source:
    none.

  Example:
    >>> from asgd import compression
    >>> reducer = compression.named_reducer("powersgd", rank=4)
    >>> reducer = compression.named_reducer("top_k", density=0.01)
    >>> compression.named_reducer("powersgd", ranks=4)
    Traceback (most recent call last):
    ValueError: reducer 'powersgd' takes no argument 'ranks'; did you mean \
'rank'? known: minimum_rate, rank, start
  """
  # A list, because a `name` of another type may have no hash.
  if name in list(REDUCERS):
    return names.call("reducer", name, REDUCERS[name], options)
  known_names = {*CODECS, *REDUCERS}
  if not names.is_import(name):
    names.check("codec", name, known_names)
  return average(named(name, **options))
