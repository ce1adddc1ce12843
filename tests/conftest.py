"""What all tests share: eight CPU devices, as a pipeline's tests need several
and JAX makes them once in a process, and how and where programs are compiled.

`XLA_FLAGS= JAX_DISABLE_MOST_OPTIMIZATIONS=0 python -m pytest ...` compiles them
as XLA does on its own."""

import gc
import importlib
import linecache
import os
import sys
import threading
from importlib import metadata
from pathlib import Path

# Processes, those that tests start among them, compile a program once.
_COMPILED = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# What runs for a moment is not optimised, here and in processes of tests: most
# of compiling was that.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Lowered operations do not name the lines that made them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# A process that is killed as it writes leaves half an entry.
_HALF = "Error reading persistent compilation cache entry"
os.environ.setdefault("PYTHONWARNINGS", f"ignore:{_HALF}")
# Code generation that takes half of the time: a small program is not divided
# among threads. XLA ends a process that names a flag it does not have.
if metadata.version("jaxlib").startswith("0.10."):
  _FLAGS = "use_fusion_emitters=false", "parallel_codegen_split_count=1"
  _FLAGS = " ".join(f"--xla_cpu_{name}" for name in _FLAGS)
  os.environ.setdefault("XLA_FLAGS", _FLAGS)
# Processes that tests start, more than a hundred, read what one has compiled;
# and the next run does: to rewrite asserts is half of the time to collect.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tracing makes many objects and few cycles: 7 % of the time was spent on those.
gc.set_threshold(50_000, 10, 10)

from launch import platforms  # noqa: E402  imports no JAX

# As in a command. Otherwise libtpu writes lines to stderr at the first use of
# JAX, which may be in a test of stderr.
platforms.choose()

import jax  # noqa: E402  reads the environment
import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)

# JAX makes an MLIR context for each program that it lowers, and registers all
# dialects in it: 4 ms and a megabyte. Here each thread uses one for a while.
_LOWERED = 100  # programs, until their constants are freed with the context
_contexts = threading.local()
_make_context = mlir.make_ir_context


def _shared_context():
  """Returns the MLIR context of this thread."""
  if not getattr(_contexts, "left", 0):
    _contexts.context, _contexts.left = _make_context(), _LOWERED
  _contexts.left -= 1
  return _contexts.context


mlir.make_ir_context = _shared_context

# Programs that JAX keeps for later calls.
_KEPT = 3000
_COMPILE = "/jax/core/compile/backend_compile_duration"
_since = {"programs": 0}  # JAX was last made to forget them


def _count(event, seconds, **details):
  _since["programs"] += event == _COMPILE


jax.monitoring.register_event_duration_secs_listener(_count)

# Files that take more than 5 s of a core: all of their tests are `slow`. The
# longest start first, so that no worker computes alone at the end.
SLOW = (
  *("test_configs", "test_tiny_figures"),
  *("test_tutorial", "test_cluster_contract"),
  *("test_golden", "test_others", "test_world", "test_docs"),
  *("test_engine_contract", "test_processes"),
  *("test_mesh_engine", "test_train_live"),
  *("test_images", "test_damage", "test_chaos", "test_ahead"),
  *("test_chunk", "test_train", "test_plan", "test_problem"),
  *("test_errors_of_calls", "test_hybrid", "test_recovery"),
  *("test_commands", "test_replay"),
  *("test_compare", "test_facade", "test_probe", "test_data_parallel"),
  *("test_follower", "test_schedules", "test_own_code", "test_contract"),
  *("test_cluster", "test_iterators", "test_messages", "test_checkpoint"),
  *("test_codecs", "test_encoder", "test_compiled", "test_code"),
  *("test_run_plan", "test_traffic", "test_examples", "test_low_rank"),
  *("test_circular", "test_parts", "test_diagnosis", "test_executor"),
  *("test_compressed", "test_engine", "test_local_work", "test_statistics"),
  *("test_optimizers", "test_missing_cells"),
  *("test_reproduce", "test_config_reference"),
  *("test_tables", "test_choco", "test_threads", "test_site"),
  *("test_stages", "test_sentences", "test_door_calls", "test_allocation"),
  *("test_ray_runtime", "test_on_ray"),
  *("test_packaging", "test_cut", "test_tensor"),
  *("test_comparison", "test_live_cells", "test_coordinated", "test_peers"),
  *("test_residence", "test_own_protocol"),
  *("test_device_rooms", "test_layer_worker"),
  *("test_optax_contract", "test_readme"),
  *("test_partition", "test_networks"),
  *("test_coordinator", "test_parameter_server", "test_notebooks"),
  *("test_advise", "test_recurrent", "test_collectives"),
)


def pytest_collection_modifyitems(items):
  """Sorts tests by file, without moving them inside of a file, and marks those
  of files that take long."""
  rank = {name: number for number, name in enumerate(SLOW)}
  items.sort(key=lambda item: rank.get(item.path.stem, len(SLOW)))
  for item in items:
    if item.path.stem in rank:
      item.add_marker("slow")


def pytest_collection_finish():
  """Exempts imported modules and collected tests from garbage collection."""
  gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
  """After a file JAX forgets what it compiled, if that is much by now."""
  yield
  if _since["programs"] > _KEPT:
    jax.clear_caches()
    _since["programs"] = 0


@pytest.fixture
def float64():
  """64-bit arrays in the thread of the test."""
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module")
def commands_as_here():
  """Commands have the devices of this process: they run the same compiled
  programs, and come to the same bits."""
  count = jax.config.jax_num_cpu_devices
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAX_NUM_CPU_DEVICES", str(count))
    yield


@pytest.fixture(scope="module")
def commands_without_pictures(tmp_path_factory):
  """Commands that are started find no matplotlib."""
  folder = tmp_path_factory.mktemp("no_pictures")
  (folder / "matplotlib.py").write_text("raise ImportError")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    yield


@pytest.fixture(scope="module")
def ray_session():
  """One session of Ray for the runs of a file, which use it in place of their
  own."""
  pytest.importorskip("ray")
  from asgd.experiment import ray_runtime

  ray_runtime.start()
  yield
  ray_runtime.stop()


@pytest.fixture
def no_pictures(monkeypatch):
  """An experiment's report draws nothing in this test; its fixtures may."""
  monkeypatch.setattr("asgd.experiment.figure.draw", lambda *args: [])


@pytest.fixture
def wide_terminal(monkeypatch):
  """Tables that are printed are not cut."""
  monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def blank_pictures(monkeypatch):
  """Pictures are drawn, but not rendered: their files are empty."""
  monkeypatch.setattr(
    "asgd.safe_files.save_figure", lambda figure, path, **options: path.touch()
  )


@pytest.fixture
def write_module(tmp_path, monkeypatch):
  """A function that writes a module, and returns it as just imported."""
  monkeypatch.syspath_prepend(tmp_path)
  # Bytecode of the same second and size would be taken for the new text's.
  monkeypatch.setattr(sys, "dont_write_bytecode", True)

  def write(name, text):
    (tmp_path / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    linecache.checkcache()
    return importlib.import_module(name)

  return write
