"""The hosts of a live cell: threads of this process, or processes of Ray.

Each participant (worker, shard, peer) is made in its host from the plan of the
cell. Threads share the driver's plan. A process of Ray rebuilds the plan from
the resolved config and the data in Ray's object store.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asgd.checks import shortened
from asgd.experiment import cells
from asgd.experiment.engines import networks
from asgd.live import processes
from asgd.live.deadlines import Ladder
from asgd.live.hosts import Hosts
from asgd.live.hosts.site import Site
from asgd.live.links import throttled_hosts
from asgd.live.setup import Setup
from asgd.live.spans import SpanWriter
from asgd.orders import protocol
from asgd.orders.network import Network

_DEADLINES = "late_mads", "late_seconds", "start_seconds"  # of a Ladder
_PLACEMENT = {"pack": "DEFAULT", "spread": "SPREAD"}  # Ray's strategies


class LiveCell(NamedTuple):
  """The inputs from which hosts and participants of a live cell are made."""

  plan: Any  # of the cell, an engines.Plan
  cell: cells.Cell
  dataset: Any  # of the experiment
  setup: Setup
  folder: Path  # of the cell, absolute
  memory: Path  # folder of shared memory and sockets
  # time.monotonic() at the cell's time 0. If the cell resumes, the time between
  # its processes does not count.
  start_time: float
  network: Network | None = None  # delays calls between threads

  @property
  def settings(self) -> Mapping[str, Any]:
    """Section `live` of the config."""
    return self.plan.run.config["live"]

  @property
  def write_span(self) -> SpanWriter | None:
    """Writer of the workers' spans; None if the config does not ask for them.
    """
    return SpanWriter(self.folder) if self.settings["spans"] else None


class CellHosts(NamedTuple):
  """The hosts in which the participants of a live cell run."""

  hosts: Hosts
  make_plan: Callable[[], Any]  # returns the plan of the cell, in any host
  are_processes: bool  # each host then compiles its functions itself
  leave_seconds: float = 2.0  # for participants to write files at the end


# (LiveCell, Machine) -> CellHosts
MakeHosts = Callable[[LiveCell, Any], CellHosts]
# (config, dataset, cell) -> plan. It is a module's function, so that other
# processes can import it.
Rebuild = Callable[[Mapping[str, Any], Any, Any], Any]


def ladder(settings: Mapping[str, Any]) -> Ladder:
  """Returns the deadlines of workers, from the section `live`."""
  return Ladder(*(settings[key] for key in _DEADLINES))


def default_setup(plan: Any) -> Setup:
  """Returns the setup of a protocol without the rules of a dense server."""
  deadlines = ladder(plan.run.config["live"])
  return Setup(protocol.Rules(), plan.workers, plan.messages, ladder=deadlines)


def thread_hosts(live: LiveCell, machine: Any) -> CellHosts:
  """Returns hosts that are threads of this process."""
  processes.allow_open_files()  # a worker holds several files and sockets
  workers = live.plan.workers
  hosts = throttled_hosts.make_hosts(
    live.network, workers, began=live.start_time
  )
  hosts.show = machine.show
  return CellHosts(hosts, lambda: live.plan, are_processes=False)


def ray_hosts(rebuild: Rebuild, live: LiveCell, machine: Any) -> CellHosts:
  """Returns hosts that are actors of Ray, which is started unless it runs."""
  # One cell: Ray's processes need no others.
  config = cells.single_cell_config(live.plan.run, live.cell)
  dataset_reference = machine.ray_reference(live.dataset)  # which starts Ray
  # Imported here, because the module imports Ray.
  from asgd.live.hosts.actors import ActorHosts

  ray_site, settings = site(live, machine.profile), live.settings
  resources = {
    "num_cpus": settings["worker_cpus"],
    "num_gpus": settings["worker_gpus"],
    "resources": settings["resources"],
    "accelerator_type": settings["accelerator"],
    "scheduling_strategy": _PLACEMENT[settings["placement"]],
  }
  hosts = ActorHosts(ray_site, resources=resources)
  hosts.show = machine.show
  arguments = rebuild, config, dataset_reference, live.cell
  plan_maker = functools.partial(make_plan, *arguments)
  # Seconds that a process has to write its files: a profile takes longest.
  leave_seconds = 60.0 if ray_site.profile else 10.0 if ray_site.spans else 2.0
  return CellHosts(
    hosts, plan_maker, are_processes=True, leave_seconds=leave_seconds
  )


def make_plan(
  rebuild: Rebuild, config: Mapping[str, Any], dataset: Any, cell: Any
) -> Any:
  """Makes the plan of a cell in a process that received config and data."""
  import ray

  if isinstance(dataset, ray.ObjectRef):
    try:
      dataset = ray.get(dataset)  # fails if the driver, its owner, has exited
    except ray.exceptions.RaySystemError as error:  # it cannot be unpickled
      line = shortened(str(error).strip().splitlines()[-1], 200)
      raise ValueError(
        f"functions or data cannot be read in another process ({line}): their"
        " modules must be importable there: put their folder on PYTHONPATH"
        " before Ray starts, or define them in the script that is run"
      ) from error
  return rebuild(config, dataset, cell)


def site(live: LiveCell, profile: str | None = None) -> Site:
  """Returns the site of a live cell. `profile` is the folder for a profile of
  worker 0, if each host is a process."""
  settings = live.settings
  # Workers without a reserved accelerator use the CPU: on a GPU that JAX sees,
  # it would take most of the memory from other programs.
  uses_accelerator = settings["worker_gpus"] or settings["accelerator"]
  uses_accelerator = uses_accelerator or "TPU" in settings["resources"]
  return Site(
    live.setup,
    str(live.folder),
    str(live.memory),
    live.start_time,
    compress=networks.dtype_on_wire(live.plan.run.config),
    spans=settings["spans"],
    devices=settings["devices"],
    platform=None if uses_accelerator else "cpu",
    gpus=settings["worker_gpus"],
    cluster_seconds=settings["cluster_seconds"],
    profile=profile and str(Path(profile).absolute()),
  )
