"""Gradient compression: codecs, and messages as packed bytes.

A `Codec` turns a message into a smaller code, and the code back into a message.
It is pure; a state at the worker holds the elements that were not sent yet
(`error_feedback`).

    message --encode--> code --packing.pack--> bytes --> unpack --decode-->
    message

A `Reducer` is the counterpart for devices in step: a mean of compressed
gradients over a mesh axis. Where to begin: `codec.py` (the contract), then
`sparse.py` (a short codec), `messages.py` (worker and server) and `packing/`.
"""

from asgd.compression.codec import Codec as Codec
from asgd.compression.codec import Residual as Residual
from asgd.compression.codec import Symbols as Symbols
from asgd.compression.codec import Values as Values
from asgd.compression.codec import clip as clip
from asgd.compression.codec import error_feedback as error_feedback
from asgd.compression.codec import fitted as fitted
from asgd.compression.codec import identity as identity
from asgd.compression.codec import in_words as in_words
from asgd.compression.demo import demo as demo
from asgd.compression.dgc import dgc as dgc
from asgd.compression.floats import bf16 as bf16
from asgd.compression.floats import e3m0 as e3m0
from asgd.compression.floats import fp16 as fp16
from asgd.compression.floats import int8 as int8
from asgd.compression.messages import Coded as Coded
from asgd.compression.messages import Parts as Parts
from asgd.compression.messages import blank as blank
from asgd.compression.messages import compressed as compressed
from asgd.compression.messages import decode as decode
from asgd.compression.messages import decoding as decoding
from asgd.compression.messages import layout as layout
from asgd.compression.messages import residual_norm as residual_norm
from asgd.compression.messages import shapes as shapes
from asgd.compression.messages import split as split
from asgd.compression.named import CODECS as CODECS
from asgd.compression.named import REDUCERS as REDUCERS
from asgd.compression.named import as_codec as as_codec
from asgd.compression.named import named as named
from asgd.compression.named import named_reducer as named_reducer
from asgd.compression.onebit_adam import onebit_adam as onebit_adam
from asgd.compression.powersgd import powersgd as powersgd
from asgd.compression.powersgd import powersgd_reducer as powersgd_reducer
from asgd.compression.quantization import qsgd as qsgd
from asgd.compression.quantization import terngrad as terngrad
from asgd.compression.reducers import Reducer as Reducer
from asgd.compression.reducers import average as average
from asgd.compression.signs import onebit as onebit
from asgd.compression.signs import sign as sign
from asgd.compression.sparse import random_k as random_k
from asgd.compression.sparse import top_k as top_k
from asgd.compression.thresholds import adaptive_threshold as adaptive_threshold
from asgd.compression.thresholds import threshold as threshold
from asgd.compression.updates import compressed_updates as compressed_updates
from asgd.compression.updates import last_update as last_update
from asgd.compression.updates import rebuild as rebuild
