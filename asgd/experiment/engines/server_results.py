"""Columns of results, and texts on them, that runs of a server share."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from asgd import base, orders
from asgd.experiment import storage
from asgd.experiment.engines import Column, allocations, networks, traffic
from asgd.experiment.engines.parameter_server import ServerPlan


def summary(records: base.Records) -> dict[str, float]:
  """Returns the columns of an evaluation, from the records of its messages."""
  messages = float(records.message_norm.sum())
  # A job that pushes nothing has a row of norm 0, which no server has refused.
  accepted = records.accepted[records.accepted | (records.message_norm != 0)]
  return {
    "train_loss": float(records.loss.mean()),
    "staleness_mean": float(records.staleness.mean()),
    "staleness_max": int(records.staleness.max()),
    "gap_mean": float(records.gap.mean()),
    "gap_max": float(records.gap.max()),
    # Parameter change per unit of message: plain SGD's learning rate.
    "effective_rate": float(records.update_norm.sum()) / max(messages, 1e-30),
    "accepted": float(accepted.mean()) if accepted.size else 1.0,
  }


def columns(
  plan: ServerPlan,
  records: base.Records,
  update: int,
  trace: base.Trace | None = None,
) -> dict[str, Any]:
  """Returns the columns of a result that simulated and live runs have. Backup
  tasks are counted from the trace, if there is one."""
  row = {"order": plan.order["name"], "messages": len(records.loss)}
  if plan.allocation is not None:
    row |= {"allocation": allocations.describe(plan.allocation)}
  row |= {"updates": update, **summary(records)}
  # Copies of jobs, and those of which the copy came first.
  if trace is not None and plan.order["name"] == "backup_tasks":
    started, first_backups = orders.count_backups(trace)
    row |= {"backup_started": started, "backup_first": first_backups}
  return row | traffic.columns(plan, records)


def broken(
  plan: ServerPlan, part: Any, done: int, cell: str, which: str
) -> str | None:
  """Returns a text on the first record that is not finite; None if all are.

  Args:
    part: records of the latest messages, of a server or of peers.
    done: messages of the cell so far.
    which: text about the message, with names of columns in braces.
  """
  # A NaN anywhere in an update shows in its norm.
  finite = np.isfinite(part.loss) & np.isfinite(part.update_norm)
  if finite.all():
    return None
  first_row = int(np.argmin(finite))  # the first False
  row = {name: column[first_row] for name, column in part._asdict().items()}
  message = done - len(finite) + first_row + 1
  words = "the loss is {loss} and the update {update_norm}".format_map(row)
  words += f" at message {message}, {which.format_map(row)}"
  return not_finite(plan, words, cell)


def not_finite(plan: ServerPlan, what: str, cell: str) -> str:
  """Returns the error of a run that is not finite, with remedies."""
  limit, bound = plan.curvature_limit, ""
  # The limit turns a divergence into a number that the user can compare.
  if storage.is_finite(limit):
    bound = f". This algorithm at {plan.workers} workers is stable up to a"
    bound += f" sharpness of {limit:.3g} at that rate"
  return (
    f"{cell}: {what}, with learning rate {plan.learning_rate:g}{bound}: lower"
    " --config.learning_rate, use fewer workers or a longer warm-up"
  )


COLUMNS = (
  Column("staleness", "staleness_mean"),
  Column("max", "staleness_max"),
  Column("gap", "gap_mean"),
  Column("eff. rate", "effective_rate"),
  Column("rate x sharp.", "rate_x_sharpness"),
  Column("quadratic limit", "rate_x_sharpness_limit"),
)


def describe(result: Mapping[str, Any]) -> str:
  """Returns staleness, gap and stability of a cell in a few words."""
  text = (
    "staleness mean {staleness_mean:.1f} max {staleness_max}, gap mean"
    " {gap_mean:.2g} max {gap_max:.2g}, effective learning rate"
    " {effective_rate:.2g}"
  ).format_map(result)
  reached = result["rate_x_sharpness"]
  # NaN if the sharpness was not estimated.
  if storage.is_finite(reached):
    limit = result["rate_x_sharpness_limit"]
    limit = f"{limit:.2g}" if storage.is_finite(limit) else "-"
    text += f", rate x sharpness up to {reached:.2g} (quadratic limit {limit})"
  if "spread_mean" in result:
    text += (
      f", {result['shards']} shards {result['spread_mean']:.2g} messages apart"
    )
  if result.get("backup_started"):
    text += (
      f", {result['backup_first']} of {result['backup_started']} backup tasks"
      " came first"
    )
  if result["accepted"] < 1:
    text += f", {100 * result['accepted']:.1f} % of the messages accepted"
  if "codec" in result or "codec_down" in result:
    text += (
      f", {result['bytes_up'] / 1e6:.3g} MB up ({result['compression_up']:.3g}"
      f" times less than dense), {result['bytes_down'] / 1e6:.3g} MB down"
    )
  if "codec_down" in result:
    text += f" ({result['compression_down']:.3g} times less)"
  text += networks.describe(result)
  if result.get("residual_lost"):
    text += (
      f", RMS {result['residual_lost']:.2g} that codecs had kept to send later"
      " lost with workers"
    )
  if "allocation" in result:
    text += f", {result['allocation']}"
  workers = result["workers"]
  took_part = result.get("took_part", workers)
  if took_part < workers:
    text += (
      f"; only {took_part} of {workers} workers took part: what is said of this"
      " many is not known from it"
    )
  return text
