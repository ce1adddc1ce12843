"""The devices of a live worker: the keys `devices` and `parallel` of a config's
section `live`."""

import math

from asgd import simulator
from asgd.experiment.schema import Run


def of_run(run: Run, *, axis: int = 0) -> simulator.WorkerDevices:
  """Returns the devices of each worker; one device without a section `live`.

  Data parallelism divides the axis of the examples, `axis`, of each array of a
  batch over the devices of a worker.
  """
  live = run.config.get("live")
  if live is None:
    return simulator.ALONE
  return simulator.WorkerDevices(live["devices"], live["parallel"], axis)


def check(run: Run) -> None:
  """Raises ValueError if the devices of a worker cannot share its batch."""
  config = run.config
  live, batch = config["live"], config["batch_size"]
  devices = live["devices"]
  # With "tensor" each device has the whole batch, and a part of the model.
  if live["parallel"] == "data" and batch % devices:
    raise ValueError(
      f"config.live.devices {devices} must divide config.batch_size {batch}, or"
      " each device would do the whole batch; use"
      f" {math.gcd(devices, batch)}, or another batch size"
    )
