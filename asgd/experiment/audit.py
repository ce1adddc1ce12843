"""Whether a live run is what it says: the audit that ends `asgd chaos`.

What there is to look at is a matter of the run's protocol. Of a server:

jobs      each was received once, at the lead and at every shard
updates   each acknowledged message is an update and a row of the records;
          without a log (config.server.log=0), how many were rolled back
deaths    workers that were killed are gone in the trace and did no more work,
          and workers that are gone in the trace were killed, or took too long
order     the trace is one that the protocol allows
replay    the trace leads to the same records and parameters, to the bit
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd.experiment import protocol, storage
from asgd.experiment import replay as replay_lib
from asgd.experiment.findings import Failure as Failure
from asgd.experiment.findings import Finding as Finding


def _replay(folder, result, records, data_dir) -> Iterator[Finding]:
  """The trace leads to the same."""
  replayed = replay_lib.replay(folder, data_dir=data_dir)
  live = result["params_sha256"]
  digests = f"parameters {replayed.digest[:12]}, live {live[:12]}"
  yield Finding("replay", digests, replayed.digest == live)
  if records is not None:
    well = all(
      np.array_equal(live_column, column, equal_nan=True)
      for live_column, column in zip(records, replayed.records, strict=True)
    )
    text = "the same" if well else "NOT those of the replay"
    yield Finding("records", text, well)
  score, name = replayed.evaluation, "accuracy"
  again, accuracy = score.accuracy, result["test_accuracy"]
  if accuracy is not None:
    text = f"{100 * again:.2f} %, live {100 * accuracy:.2f} %"
  else:  # of a task without
    name, again, accuracy = "test loss", score.loss, result["test_loss"]
    text = f"{again:.4g}, live {accuracy:.4g}"
  well = replayed.digest != live or again == accuracy
  yield Finding(name, text, well)


def findings(
  plan: Any,
  folder: Path,
  failures: Sequence[Failure] = (),
  *,
  data_dir: str | None = None,
) -> Iterator[Finding]:
  """Yields what there is to say of a finished cell, after these failures."""
  result = storage.read_json(folder / "result.json")
  if result is None:
    yield Finding("result", f"{folder} has no result.json", False)
    return
  audit = protocol.of(plan.run).live.audit
  try:
    # Files as they are: what is wrong with them is for the findings to say.
    records = yield from audit(plan, folder, result, failures)
  except (ValueError, OSError) as error:
    yield Finding("files", str(error), False)
    return
  try:
    yield from _replay(folder, result, records, data_dir)
  except ValueError as error:
    yield Finding("replay", str(error), False)
