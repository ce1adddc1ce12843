"""The packed wire: a code as the fewest bytes of several forms.

Both sides know the `CodeLayout` of a code (its structure, shapes, dtypes and
levels), so a message tells its numbers alone: a header with a checksum, then
each leaf in the smallest of its forms.
"""

from asgd.compression.packing.bits import BadCode as BadCode
from asgd.compression.packing.layouts import CodeLayout as CodeLayout
from asgd.compression.packing.layouts import layout as layout
from asgd.compression.packing.messages import first_length as first_length
from asgd.compression.packing.messages import pack as pack
from asgd.compression.packing.messages import unpack as unpack
