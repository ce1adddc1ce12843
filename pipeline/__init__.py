"""Pipeline parallelism: a schedule is a table, which an executor executes.

  schedules -> table -> validate -> executor -> lanes, on threads or processes
                  `---> analyze, render

- `table`: the table and its text, CSV and JSON forms.
- `schedules`: makes the tables of the literature.
- `partition`: cuts a model into stages and assigns devices.
- `validate`: rejects tables that cannot be run.
- `analyze`: computes bubbles, memory and staleness from a table.
- `executor`: executes a table; `processes` does so in several processes.
- `engine`: the engine `pipeline` of experiments.

This folder is at the top of the checkout, and installed below asgd, as a
user's own code may have a `pipeline.py`. asgd/pipeline is a link to it.

Stages keep their weights in servers of `asgd`; a stashed weight is a ticket.
Read `asgd.pipeline.train` first, which trains a user's layers in one call, then
`table` and `executor`.
"""

import importlib
from importlib import util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from asgd.pipeline import (
    analyze,
    executor,
    partition,
    processes,
    render,
    schedules,
    table,
    validate,
  )
  from asgd.pipeline.facade import train
else:

  def __getattr__(name: str) -> Any:
    """Imports `train` or a module of the package at its first use: `train`
    imports all of asgd.experiment."""
    if name == "train":
      return importlib.import_module(f"{__name__}.facade").train
    if name.startswith("_") or not util.find_spec(f"{__name__}.{name}"):
      raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
