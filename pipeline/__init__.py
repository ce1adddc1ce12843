"""Pipeline parallelism: schedules are tables, and everything obeys a table.

`table` is the table and its text, CSV and JSON forms, `schedules` makes the
tables of the literature, `validate` rejects what cannot be run, `analyze` reads
facts off a table, and `executor` obeys it. Stages keep their weights in servers
of `asgd`; a stashed weight is a ticket. `pipeline.train` trains layers of one's
own, in one call.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from pipeline.facade import train
else:

  def __getattr__(name: str) -> Any:
    """Imports `train`, and the experiments of asgd with it, at its first
    use."""
    if name != "train":
      raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline.facade import train

    return train
