"""JAX's platform on a machine that has libtpu but no TPU.

With libtpu installed, for instance to compile for TPUs ahead of time, JAX looks
for a TPU in every process, and libtpu prints several lines about its failure.
"""

import importlib.util
import os
import pkgutil
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path

# A TPU, an NVIDIA GPU (in WSL, too), an AMD GPU.
_DEVICES = "accel*", "vfio/[0-9]*", "nvidia[0-9]*", "nvidiactl", "dxg", "kfd"
_GOOGLE_VENDOR = "0x1ae0"  # Google's, on the PCI bus; JAX looks for it, too
_GPU_PLUGINS = "xla_cuda", "xla_rocm"  # plugins that need one of these devices
# Variables by which a user, or the TPU's machine, configures a TPU.
_TPU_SETTINGS = (
  *("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "COLAB_TPU_ADDR", "TPU_NAME"),
  *("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"),
  *("TPU_PROCESS_ADDRESSES", "TPU_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"),
)


def choose(
  environment: MutableMapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
  """Sets JAX_PLATFORMS=cpu if JAX would look for a TPU in vain.

  That is, libtpu is installed, this machine has no accelerator, no plugin for
  another one is installed, and no variable configures a TPU. `root` is the
  folder of dev and sys. Processes that this one starts inherit the variable;
  those of other machines of a Ray cluster do not.
  """
  # The user's settings take precedence.
  if any(name in environment for name in _TPU_SETTINGS):
    return
  if importlib.util.find_spec("libtpu") is None:  # JAX looks for no TPU
    return
  # Device files; a TPU may also be known only to the PCI bus.
  if any(next((root / "dev").glob(name), None) for name in _DEVICES):
    return
  vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
  if any(path.read_text().strip() == _GOOGLE_VENDOR for path in vendors):
    return
  # A plugin of another accelerator must keep its chance. Without any plugin
  # `all` is true.
  if all(name.startswith(_GPU_PLUGINS) for name in _plugins()):
    environment["JAX_PLATFORMS"] = "cpu"


def _plugins() -> list[str]:
  """Returns the names of JAX's installed plugins."""
  names = [entry.name for entry in metadata.entry_points(group="jax_plugins")]
  # jax_plugins is a namespace package, which may have several folders.
  package = importlib.util.find_spec("jax_plugins")
  paths = (package and package.submodule_search_locations) or ()
  return names + [module.name for module in pkgutil.iter_modules(paths)]
