"""Makes published schedules: tables, from the order of tasks on each device.

Most schedules write the order of each device: 1F1B is some forwards, then one
backward and one forward in turn. If the best order depends on the times of
tasks, a rule chooses each device's next task in a simulation (`play`), and the
choices become the order. A user's rule works in the same way (`custom`).

  # gpipe, 3 stages, 3 microbatches      # one_f_one_b
  0 | F0 F1 F2 .  .  .  .  B0 B1 B2      0 | F0 F1 F2 .  .  B0 .  B1 .  B2
  1 | .  F0 F1 F2 .  .  B0 B1 B2 .       1 | .  F0 F1 .  B0 F2 B1 .  B2 .
  2 | .  .  F0 F1 F2 B0 B1 B2 .  .       2 | .  .  F0 B0 F1 B1 F2 B2 .  .

Each is a function of this package and an entry of `SCHEDULES`. Synchronous
schedules take `batches`, the number of batches with a flush between them, and
`microbatches`, the size of each. `build` passes its options to the schedule's
function. `make` derives these from the stages and microbatches of a run, and
from the traits that the schedule declares.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd import names
from asgd.pipeline import analyze, validate
from asgd.pipeline import table as table_lib
from asgd.pipeline.schedules.asynchronous import (
  ftpipe,
  pipedream,
  pipedream_2bw,
  pipemare,
  stale,
)
from asgd.pipeline.schedules.flush import (
  breadth_first,
  gpipe,
  interleaved,
  one_f_one_b,
)
from asgd.pipeline.schedules.layout import Traits, listed
from asgd.pipeline.schedules.play import Rule, RuleState
from asgd.pipeline.schedules.two_directions import chimera, dualpipe, dualpipe_v
from asgd.pipeline.schedules.user_rules import custom, fill
from asgd.pipeline.schedules.zero_bubbles import (
  v_half,
  v_min,
  zb_h1,
  zb_h2,
  zb_v,
  zero_bubble,
)
from asgd.pipeline.table import KNOWN, Schedule, check_positive

_MAX_FORWARDS = 10**7  # of a table that `build` makes

SCHEDULES: dict[str, Callable[..., Schedule]] = {
  maker.__name__: maker
  for maker in (
    *(gpipe, one_f_one_b, interleaved, breadth_first, chimera),
    *(dualpipe, dualpipe_v, zero_bubble, zb_h1, zb_h2, zb_v, v_half, v_min),
    *(pipedream, pipedream_2bw, stale, pipemare, ftpipe, custom),
  )
}


class OptionError(ValueError):
  """An option of a run that does not fit. The text of the error begins with
  the option's name; a caller writes `runs.LABEL.` before it, which gives the
  key of a config."""

  def __init__(self, key: str, why: str):
    super().__init__(f"{key} {why}")
    self.key = key


def build(name: str, **options: Any) -> Schedule:
  """Builds a table by the name of its schedule.

  Args:
    name: a name of `SCHEDULES`.
    **options: the arguments of that function.

  Returns:
    A valid Schedule.

  Raises:
    ValueError: for an unknown name or option, naming the nearest known one, and
      for a table of more than 10 million forwards.

  Example:
    >>> from asgd.pipeline import schedules
    >>> schedules.build("gpipe", stages=2, microbatches=3).slots
    8
  """
  maker = _maker(name)
  count = forwards(options)
  if count > _MAX_FORWARDS:
    raise ValueError(
      f"{name} would have {count:,} forwards (stages x microbatches x batches),"
      f" and {_MAX_FORWARDS:,} are the most: lower one of these"
    )
  return names.call("schedule", name, maker, options)


def forwards(options: Mapping[str, object]) -> int:
  """Returns a lower bound of the number of forwards in the table that a maker
  would return for these options. A value that is no number counts as 1: the
  maker refuses it.

  Example:
    >>> from asgd.pipeline import schedules
    >>> schedules.forwards({"stages": 4, "microbatches": 8})
    32
  """
  keys = ("devices", "stages", "chunks", "microbatches", "batches")
  # A list of devices stands for the number of devices that it names.
  counts = [options.get(key) for key in keys]
  counts[0] = len(listed(counts[0]) or ()) or counts[0]
  integers = (int(n) for n in counts if isinstance(n, (int, np.integer)))
  return math.prod(max(number, 1) for number in integers)


def describe(name: str) -> Traits:
  """Returns the traits of a schedule of `SCHEDULES`, with its options. For the
  path of a table it returns traits without options. Raises ValueError for an
  unknown name, naming the nearest known one.

  Example:
    >>> from asgd.pipeline import schedules
    >>> schedules.describe("interleaved").options
    ('chunks', 'group')
  """
  if table_lib.is_file(name):
    return Traits(())
  return _maker(name).traits


def make(
  name: str,
  *,
  stages: int | None,
  total: int,
  batch: int,
  every: int | None = None,
  **options: Any,
) -> Schedule:
  """Returns the table of a run. If the schedule flushes, it is the table of one
  update, which the run repeats; if not, it has all microbatches.

  Args:
    name: a name of `SCHEDULES`, or the path of a file that holds a table.
    stages: S; None takes the stages of the table in a file.
    total: microbatches of the run.
    batch: microbatches of an update if `every` is None and the schedule flushes
      or sums gradients.
    every: microbatches of one update. None: 1 for an asynchronous schedule that
      sums no gradients; for a file without a flush, those of its table; else
      `batch`.
    **options: those of `describe(name).options`. `rule` may be a
      function or its name, MODULE:FUNCTION.

  Returns:
    A valid Schedule.

  Raises:
    OptionError: for a value that does not fit the others, naming its key.
    ValueError: as `build` and `validate.validate`, and for a table without a
      backward.

  Example:
    Two updates, each of 4 microbatches, are two times the same table.

    >>> from asgd.pipeline import schedules
    >>> table = schedules.make("one_f_one_b", stages=2, total=8, batch=4)
    >>> table.microbatches, table.every, table.flush
    (4, 4, True)
  """
  make_table = _read_file if table_lib.is_file(name) else _make_by_name
  table = make_table(name, stages, total, batch, every, options)
  if (validate.rows(table).weight < 0).any():
    raise ValueError("its table has no backward: there is nothing to train")
  return table


def _maker(name: str):
  """Returns the maker of a schedule, also for a name such as "1F1B"."""
  name = names.canonical(name, SCHEDULES)
  return names.lookup("schedule", name, SCHEDULES)


def _make_by_name(
  name: str,
  stages: Any,
  total: int,
  batch: int,
  every: int | None,
  options: dict[str, Any],
) -> Schedule:
  """Returns the table of a schedule of `SCHEDULES`, as `make`."""
  maker = _maker(name)
  traits, parameters = maker.traits, inspect.signature(maker).parameters
  for key in options:
    names.lookup(f"option of {name}", key, dict.fromkeys(traits.options))
  check_positive(stages=stages, total=total, batch=batch)
  if "stages" in parameters:
    options["stages"] = stages
  elif traits.listed:
    devices = options.setdefault("devices", list(range(stages)))
    if listed(devices, stages) is None:
      why = f"must be a device for each of {stages} stages, not {devices!r}"
      raise OptionError("devices", why)
  else:
    stages_per_device = traits.chunks
    if "chunks" in parameters:
      stages_per_device = options.setdefault("chunks", stages_per_device)
      _check_option("chunks", stages_per_device)
    if stages % stages_per_device:
      missing_stages = stages_per_device - stages % stages_per_device
      raise OptionError(
        "stages",
        f"{stages} are no multiple of the {stages_per_device} stages on each"
        f" device of {name}: set stages={stages + missing_stages}",
      )
    options["devices"] = stages // stages_per_device
  if "max_activations" in parameters:
    options.setdefault("max_activations", stages)
  if "rule" in parameters:
    options["rule"] = _rule_of(options.get("rule"))
  flushes = options.get("flush", traits.flush)
  if every is None:
    every = batch if flushes or traits.sums else 1
  _check_option("every", every)
  if total % every:
    raise OptionError(
      "every",
      f"{every} does not divide the {total} microbatches of the run; use a"
      f" divisor such as {math.gcd(total, every)}",
    )
  # A run repeats the table of one update, or has one table in all.
  options["microbatches"] = every if flushes else total
  if "every" in parameters:
    options["every"] = every
  return build(name, **options)


def _check_option(key, value):
  try:
    check_positive(**{key: value})
  except ValueError as error:
    raise OptionError(key, str(error).removeprefix(f"{key} ")) from None


def _rule_of(rule: Any) -> Any:
  """Returns a function, or imports the function MODULE:NAME."""
  if callable(rule):
    return rule
  module, _, attribute = (rule if isinstance(rule, str) else "").partition(":")
  try:
    return getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError, ValueError, TypeError) as error:
    raise OptionError(
      "rule",
      "must name a function, as in 'my_module:my_rule', not"
      f" {rule!r} ({error})",
    ) from None


def _read_file(
  path: str,
  stages: int | None,
  total: int,
  batch: int,
  every: int | None,
  options: Mapping[str, Any],
) -> Schedule:
  """Reads a user's table. It must have the microbatches of the run."""
  if options:
    why = f"is no option of a table in a file: {path} is complete; drop it"
    raise OptionError(next(iter(options)), why)
  try:
    table = validate.validate(table_lib.read(Path(path)))
  except OSError as error:
    why = f"{path} cannot be read: {error.strerror}"
    raise OptionError("schedule", why) from error
  if unknown_actions := sorted(set(table.action.tolist()) - set(KNOWN)):
    raise OptionError(
      "schedule",
      f"{path} has actions {unknown_actions}, for which there are no functions"
      " here: use asgd.pipeline.executor, or drop them",
    )
  if stages is not None and stages != table.stages:
    why = f"{stages} are not the {table.stages} of {path}: drop it"
    raise OptionError("stages", why)
  if every is None and table.flush:
    every = batch
  if every is not None and every != table.every:
    raise OptionError(
      "every",
      f"{every!r} is not that of {path}, which has {table.every} microbatches"
      f" in an update: set every={table.every}, or leave it out and set"
      f" microbatches={table.every}",
    )
  n_needed = table.every if table.flush else total
  if table.microbatches != n_needed or total % table.every:
    raise OptionError(
      "schedule",
      f"{path} has {table.microbatches} microbatches, {table.every} in an"
      f" update; the run has {total}. A table that flushes must contain one"
      " update, and the run a multiple of it; any other table must contain all"
      " microbatches of the run",
    )
  return table


def recompute_of(
  table: Schedule, recompute: bool | str | Sequence[int] | None = None
) -> tuple[bool, ...]:
  """Returns bool[S]: whether a stage stores only its inputs, and computes its
  forward again for the backward. The other stages store residuals.

  Args:
    table: any valid one.
    recompute: all (True), none (False), "but_last" (all but the last stage), or
      the stages. None is the default of the schedule with the table's name, and
      no stage if there is no such schedule.

  Raises:
    OptionError: for a stage that the table does not have.

  Example:
    >>> from asgd.pipeline import schedules
    >>> schedules.recompute_of(schedules.ftpipe(range(3), 4))
    (True, True, False)
    >>> schedules.recompute_of(schedules.pipedream(3, 4), [1])
    (False, True, False)
  """
  stages = range(table.stages)
  if recompute is None:
    recompute = SCHEDULES.get(table.name, custom).traits.recompute
  if isinstance(recompute, (list, tuple)):
    if set(recompute) - set(stages):
      why = f"must be stages from 0 to {stages[-1]}, not {list(recompute)}"
      raise OptionError("recompute", why)
    return tuple(stage in recompute for stage in stages)
  recomputes_last = bool(recompute) and recompute != "but_last"
  return (*[bool(recompute)] * (table.stages - 1), recomputes_last)


def weights_of(table: Schedule, weights: str | None = None) -> str:
  """Returns the choice of weights of backwards, as in `analyze.versions`.

  Args:
    table: any valid one.
    weights: the run's setting. None is "latest" if the table flushes, else the
      default of the schedule with the table's name; "stash" for an unknown one.

  Raises:
    OptionError: if the table flushes, and `weights` is neither "latest" nor
      "stash".
    ValueError: as `analyze.versions`.

  Example:
    >>> from asgd.pipeline import schedules
    >>> schedules.weights_of(schedules.pipedream(2, 4))
    'stash'
  """
  if weights is None:
    maker = SCHEDULES.get(table.name, custom)
    weights = "latest" if table.flush else maker.traits.weights
  if table.flush and weights not in ("latest", "stash"):
    why = f"is for asynchronous schedules, and {table.name} flushes: drop it"
    raise OptionError("weights", f"{weights!r} {why}")
  analyze.versions(table, weights)
  return weights
