"""Gradient compression: codecs, and messages as packed bytes.

A `Codec` turns a message into a smaller code and back; it is pure, and keeps
what it did not send (`error_feedback`) in a state of the worker's.
"""

from asgd.compression.codec import Codec as Codec
from asgd.compression.codec import Symbols as Symbols
from asgd.compression.codec import Values as Values
from asgd.compression.codec import clip as clip
from asgd.compression.codec import error_feedback as error_feedback
from asgd.compression.codec import identity as identity
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
from asgd.compression.updates import compressed_updates as compressed_updates
from asgd.compression.updates import last_update as last_update
