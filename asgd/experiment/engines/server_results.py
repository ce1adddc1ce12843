"""Result columns of parameter-server runs, and the text that describes them.

Simulated and live runs share them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from asgd import base, orders
from asgd.experiment import storage
from asgd.experiment.engines import (
  Column,
  allocations,
  device_rooms,
  networks,
  traffic,
)
from asgd.experiment.engines.parameter_server import ServerPlan


def summary(records: base.Records) -> dict[str, float]:
  """Returns the columns of an evaluation, from the records of its messages."""
  message_norms = float(records.message_norm.sum())
  # A job that pushed nothing has a record of norm 0 that is not accepted. No
  # server has refused it, so the rate leaves the record out.
  accepted = records.accepted[records.accepted | (records.message_norm != 0)]
  return {
    "train_loss": float(records.loss.mean()),
    "staleness_mean": float(records.staleness.mean()),
    "staleness_max": int(records.staleness.max()),
    "gap_mean": float(records.gap.mean()),
    "gap_max": float(records.gap.max()),
    # The sum of the update norms, divided by that of the message norms; for
    # plain SGD this is the learning rate.
    "effective_rate": (
      float(records.update_norm.sum()) / max(message_norms, 1e-30)
    ),
    "accepted": float(accepted.mean()) if accepted.size else 1.0,
  }


def columns(
  plan: ServerPlan,
  records: base.Records,
  n_updates: int,
  trace: base.Trace | None = None,
) -> dict[str, Any]:
  """Returns the columns of a result that simulated and live runs have. Backup
  tasks and kept tickets are counted from the trace, which peers have not."""
  row = {"order": plan.order["name"], "messages": len(records.loss)}
  if plan.allocation is not None:
    row |= {"allocation": allocations.describe(plan.allocation)}
  row |= {"updates": n_updates, **summary(records)}
  # The number of jobs that were started twice, and how often the second copy
  # ended first.
  if trace is not None and plan.order["name"] == "backup_tasks":
    started, first_backups = orders.count_backups(trace)
    row |= {"backup_started": started, "backup_first": first_backups}
  row |= device_rooms.columns(plan, len(records.loss))
  kept = 0 if trace is None else _count_kept(trace)
  return row | traffic.columns(plan, records, kept)


def _count_kept(trace: base.Trace) -> int:
  """Returns the number of received messages on tickets that workers had kept.
  """
  kept, received = (
    trace.worker[rows].astype(np.int64) << 32 | trace.seq[rows]
    for rows in (trace.action == base.KEEP, trace.action == base.RECEIVE)
  )
  return int(np.isin(kept, received).sum())


def describe_first_not_finite(
  plan: ServerPlan, latest: Any, done: int, cell: str, template: str
) -> str | None:
  """Returns the error for the first record with a loss or update that is not
  finite; None if all are finite.

  Args:
    plan: the plan of the cell.
    latest: records of the latest messages, of a server or of peers.
    done: messages of the cell so far.
    cell: name of the cell.
    template: text about a message, with names of columns in braces.
  """
  # A NaN anywhere in an update shows in its norm.
  finite = np.isfinite(latest.loss) & np.isfinite(latest.update_norm)
  if finite.all():
    return None
  first_row = int(np.argmin(finite))  # the first False
  row = {name: column[first_row] for name, column in latest._asdict().items()}
  message = done - len(finite) + first_row + 1
  finding = "the loss is {loss} and the update {update_norm}".format_map(row)
  finding += f" at message {message}, {template.format_map(row)}"
  return divergence_error(plan, finding, cell)


def divergence_error(plan: ServerPlan, finding: str, cell: str) -> str:
  """Returns the error of a run with a loss or an update that is not finite:
  the finding, the cell's learning rate and remedies."""
  limit, bound = plan.curvature_limit, ""
  # The user can compare the largest stable sharpness with a measured one.
  if storage.is_finite(limit):
    bound = f". This algorithm at {plan.workers} workers is stable up to a"
    bound += f" sharpness of {limit:.3g} at that rate"
  return (
    f"{cell}: {finding}, with learning rate {plan.learning_rate:g}{bound}:"
    " lower --config.learning_rate, use fewer workers or a longer warm-up"
  )


COLUMNS = (
  Column("staleness", "staleness_mean"),
  Column("max", "staleness_max"),
  Column("gap", "gap_mean"),
  Column("eff. rate", "effective_rate"),
  Column("rate x sharp.", "rate_x_sharpness"),
  Column("quadratic limit", "rate_x_sharpness_limit"),
  *device_rooms.COLUMNS,
)


def describe(result: Mapping[str, Any]) -> str:
  """Returns staleness, gap and stability of a cell in a few words."""
  text = (
    "staleness mean {staleness_mean:.1f} max {staleness_max}, gap mean"
    " {gap_mean:.2g} max {gap_max:.2g}, effective learning rate"
    " {effective_rate:.2g}"
  ).format_map(result)
  product = result["rate_x_sharpness"]
  # NaN if the sharpness was not estimated.
  if storage.is_finite(product):
    limit = result["rate_x_sharpness_limit"]
    limit_text = f"{limit:.2g}" if storage.is_finite(limit) else "-"
    text += (
      f", rate x sharpness up to {product:.2g} (quadratic limit {limit_text})"
    )
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
  text += networks.describe(result) + device_rooms.describe(result)
  if result.get("residual_lost"):
    text += (
      f", lost with workers: codec residuals of RMS"
      f" {result['residual_lost']:.2g}"
    )
  if "allocation" in result:
    text += f", {result['allocation']}"
  workers = result["workers"]
  took_part = result.get("took_part", workers)
  if took_part < workers:
    text += (
      f"; only {took_part} of {workers} workers took part: do not read these"
      f" results as those of {workers} workers"
    )
  return text
