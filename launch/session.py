"""What the commands that train have in common: flags, folder and signals."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags

from launch import checkpoints, cli, experiment, outputs

CONFIG = cli.define_config()
flags.declare_key_flag("config")  # with the others here: commands adopt them
OUT = flags.DEFINE_string(
  "out", None, "Folder for results. Default: the next free runs/CONFIG-NNN."
)
RESUME = flags.DEFINE_bool(
  "resume", False, "Go on with this experiment where it stopped."
)
DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "The dataset's folder or file. Default: look for it."
)
_FREE = ("on_nan", "checkpoint_seconds")  # may differ when resuming


class Signals:
  """Remembers the first request to stop; a second one interrupts at once."""

  def __init__(self):
    self.received = 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, self._handle)

  def _handle(self, number, frame):
    del frame
    if self.received:
      raise KeyboardInterrupt
    self.received = number


def build(example: str) -> experiment.Experiment:
  """Builds the experiment that the flags describe.

  Args:
    example: a config to name where there is none.

  Raises:
    ValueError: for anything wrong with them.
  """
  if CONFIG.value is None:
    raise ValueError(f"no --config; try --config={example}")
  config = experiment.override(CONFIG.value, cli.overrides())
  live = config.get("live", {})
  devices = live.get("devices", 1) if isinstance(live, Mapping) else 1
  if experiment.check_devices(devices) > 1:  # before JAX counts them
    jax.config.update("jax_num_cpu_devices", devices)
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as error:
    raise ValueError(
      f"JAX finds no device: {error}; see the variable JAX_PLATFORMS"
    ) from error
  return experiment.build(config, data_dir=DATA_DIR.value)


def open_folder(
  exp: experiment.Experiment,
  *,
  suffix: str = "",
  identity: Mapping[str, Any] | None = None,
) -> Path:
  """Finds or makes the folder of this experiment and of no other.

  Args:
    exp: what is run.
    suffix: of the default name.
    identity: what else distinguishes it.

  Raises:
    ValueError: if the folder holds something else, or this and not --resume.
  """
  config = exp.config
  held = {
    "config": {k: v for k, v in config.items() if k not in _FREE},
    "dataset": {
      "name": exp.dataset.name,
      "sha256": checkpoints.digest(exp.dataset[2:]),
    },
    **(identity or {}),
    "free": {
      **{k: config[k] for k in _FREE},
      "data source": exp.dataset.source,
      "jax": f"{jax.__version__} on {jax.default_backend()}",
    },
  }
  name = Path(flags.FLAGS["config"].config_filename.split(":")[0]).stem
  folder = outputs.open_folder(
    OUT.value, name + suffix, held, resume=RESUME.value
  )
  print(f"data: {exp.dataset.source}\nresults go to {folder}")
  return folder
