"""What unpacking raises."""


class BadCode(ValueError):
  """Bytes that are no packed code of a layout."""
