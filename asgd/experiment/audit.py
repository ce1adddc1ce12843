"""Audits a finished live run: the last step of `asgd chaos`.

The run's protocol decides which findings there are. For a server:

jobs      each job was received once, at the lead and at every shard
updates   each acknowledged message is an update and a row of the records;
          without a log (config.server.log=0), rolled back updates count, too
deaths    workers that were killed left in the trace and did no more work;
          workers that left in the trace were killed or took too long
order     the protocol allows the trace
replay    the replayed trace gives the same records and parameters, to the bit
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd.experiment import protocol, storage
from asgd.experiment import replay as replay_lib
from asgd.experiment.findings import Failure as Failure
from asgd.experiment.findings import Finding as Finding


def _replay_findings(
  folder: Path, result: Any, records: Any, data_dir: str | None
) -> Iterator[Finding]:
  """Replays a cell; yields comparisons with its result and records."""
  # [1] The digest covers all bits of the parameters, so it decides the rest.
  replayed = replay_lib.replay(folder, data_dir=data_dir)
  recorded_digest = result["params_sha256"]
  digests = f"parameters {replayed.digest[:12]}, live {recorded_digest[:12]}"
  yield Finding("replay", digests, replayed.digest == recorded_digest)
  # [2] For a run with rollbacks the audit returns None instead of records.
  if records is not None:
    # A recorded loss may be NaN, which here counts as equal to NaN.
    columns: Iterable[tuple[np.ndarray, np.ndarray]]
    columns = zip(records, replayed.records, strict=True)
    is_same = all(np.array_equal(*pair, equal_nan=True) for pair in columns)
    text = "the same" if is_same else "NOT those of the replay"
    yield Finding("records", text, is_same)
  # [3] The evaluation of the replayed parameters gives the reported score.
  score, score_name = replayed.evaluation, "accuracy"
  computed, reported = score.accuracy, result["test_accuracy"]
  if reported is not None:
    text = f"{100 * computed:.2f} %, live {100 * reported:.2f} %"
  else:  # the task has no accuracy
    score_name = "test loss"
    computed = score.loss
    reported = result["test_loss"]
    text = f"{computed:.4g}, live {reported:.4g}"
  # Other parameters have another score: that is one finding, "replay", not two.
  yield Finding(
    score_name, text, replayed.digest != recorded_digest or computed == reported
  )


def findings(
  plan: Any,
  folder: Path,
  failures: Sequence[Failure] = (),
  *,
  data_dir: str | None = None,
) -> Iterator[Finding]:
  """Yields the findings of a finished cell.

  Args:
    plan: the plan of the cell.
    folder: the folder of the cell.
    failures: those that `asgd chaos` injected; they explain deaths in the
      trace.
    data_dir: folder of the data set; None: the default.
  """
  result = storage.read_json(folder / "result.json")
  if result is None:
    yield Finding("result", f"{folder} has no result.json", False)
    return
  audit = protocol.of(plan.run).live.audit
  try:
    # `audit` yields its findings and returns the records for the replay. It
    # reads files without checks: their faults become findings.
    records = yield from audit(plan, folder, result, failures)
  except (ValueError, OSError) as error:
    yield Finding("files", str(error), False)
    return
  try:
    yield from _replay_findings(folder, result, records, data_dir)
  except ValueError as error:
    yield Finding("replay", str(error), False)
