"""Reads what TensorBoard would read."""

import struct


def read(path):
  """Returns the events of a file, each with checksums that are right."""
  from tensorboardX.proto import event_pb2
  from tensorboardX.record_writer import masked_crc32c

  data, events = path.read_bytes(), []
  while data:
    (size,) = struct.unpack("<Q", data[:8])
    parts = data[:8], data[12 : 12 + size]
    sums = data[8:12], data[12 + size : 16 + size]
    for part, found in zip(parts, sums, strict=True):
      assert struct.pack("<I", masked_crc32c(part)) == found
    events.append(event_pb2.Event.FromString(parts[1]))
    data = data[16 + size :]
  return events
