"""What all tests share: eight CPU devices, as a pipeline's tests need several
and JAX makes them once in a process."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# Files that take long, the longest first: two processes share files, and the
# last one should not be a long one.
SLOW = (
  *("test_launch", "test_serve", "test_train_pipeline", "test_executor"),
  *("test_train_sync", "test_processes", "test_ray_cluster", "test_chaos"),
  *("test_threads", "test_hybrid", "test_parts", "test_data_parallel"),
  *("test_compare", "test_shard", "test_spmd", "test_local_workers"),
  *("test_contract", "test_configs", "test_stage", "test_readme"),
)


def pytest_collection_modifyitems(items):
  """Sorts tests by file, without moving them inside of a file."""
  rank = {name: number for number, name in enumerate(SLOW)}
  items.sort(key=lambda item: rank.get(item.path.stem, len(SLOW)))


@pytest.fixture(scope="module")
def quick_compilation():
  """For equalities up to rounding: what runs for a moment is not optimised."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
