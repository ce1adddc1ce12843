"""The packed wire format: a code in the fewest bytes of several forms.

Sender and receiver know the `CodeLayout` of a code (its structure, shapes,
dtypes and levels). So a message holds only numbers: a header with a checksum,
then streams of leaves, each in the smallest of its forms.

    messages.pack -> streams.pack -> bits (dense), gaps (positions)
"""

from asgd.compression.packing.bits import BadCode as BadCode
from asgd.compression.packing.layouts import CodeLayout as CodeLayout
from asgd.compression.packing.layouts import layout as layout
from asgd.compression.packing.messages import first_length as first_length
from asgd.compression.packing.messages import pack as pack
from asgd.compression.packing.messages import unpack as unpack
