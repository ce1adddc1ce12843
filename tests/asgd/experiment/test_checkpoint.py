"""Checkpoints: everything comes back, sharing included, or it is refused."""

import errno
from typing import NamedTuple

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest

from asgd import algorithms, orders, problems, simulator
from asgd import worker as worker_lib
from asgd.experiment import checkpoint, storage
from asgd.experiment.engines import simulate
from asgd.orders import durations

PROBLEM = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
WORKERS = 4


@pytest.fixture
def checkpoints(tmp_path):
  opened = checkpoint.Checkpoints(tmp_path / "checkpoints")
  yield opened
  opened.close()


def steps(tmp_path):
  names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
  return {name for name in names if name.isdigit()}


# Trees.


class Pair(NamedTuple):
  first: object
  second: object


def tree(value=1.0):
  return {
    "a/b": np.full((2, 3), value, np.float32),
    "list": [Pair(np.int32(3), np.zeros((0, 4))), (np.bool_(True), None)],
    "half": jnp.full(3, value, jnp.bfloat16),
    "large": np.full((300, 100), value, np.float32),  # stored by itself
  }


def test_a_tree_comes_back_with_its_names_dtypes_and_empty_arrays(checkpoints):
  checkpoints.save(1, tree(), {"rows": [1, None]})
  saved = checkpoints.restore(lambda saved: saved)
  assert saved.notes == {"rows": [1, None]}
  assert set(saved.arrays) == {
    *("['a/b']", "['half']", "['large']"),
    *("['list'][0].first", "['list'][0].second", "['list'][1][0]"),
  }
  kit.same(saved.tree(tree(0.0)), jax.tree.map(np.asarray, tree()))


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ({"a/b": np.zeros((2, 3))}, "another model, algorithm or schedule"),
    ({**tree(), "more": np.zeros(1)}, r"\(\['more'\]\)"),
    ({**tree(), "half": np.zeros(4)},
     r"\['half'\] has shape \(3,\), not \(4,\): it is of another model"),
  ],
)
def test_a_tree_of_another_structure_or_shape_is_refused(
  checkpoints, template, message
):
  checkpoints.save(1, tree(), {})
  saved = checkpoints.restore(lambda saved: saved)
  with pytest.raises(ValueError, match=message):
    saved.tree(template)


def test_shapes_that_are_not_known_are_not_checked(checkpoints):
  checkpoints.save(1, {"x": np.arange(5)}, {})
  saved = checkpoints.restore(lambda saved: saved)
  template = checkpoint.any_shapes({"x": np.zeros(0)})
  np.testing.assert_array_equal(saved.tree(template)["x"], np.arange(5))


def test_the_newest_of_two_is_restored_and_no_more_are_kept(
  checkpoints, tmp_path
):
  for step in (9, 11, 13):
    checkpoints.save(step, tree(step), {"step": step})
  assert checkpoints.restore(lambda saved: saved.notes) == {"step": 13}
  assert steps(tmp_path) == {"11", "13"}


def test_a_step_that_is_there_is_not_written_again(checkpoints):
  checkpoints.save(9, tree(1), {"first": True})
  checkpoints.save(9, tree(2), {"first": False})
  assert checkpoints.restore(lambda saved: saved.notes) == {"first": True}


def test_nothing_to_restore_is_none(checkpoints):
  assert checkpoints.restore(lambda saved: saved) is None


def cut(path):
  path.write_text(path.read_text()[:-20])


def test_all_damaged_is_none_and_says_so_for_each(
  checkpoints, tmp_path, capsys
):
  for step in (7, 9):
    checkpoints.save(step, tree(step), {})
    (meta,) = (tmp_path / "checkpoints" / str(step) / "meta").glob("metadata*")
    cut(meta)
  assert checkpoints.restore(lambda saved: saved) is None
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 2
  for line, step in zip(lines, ("9", "7"), strict=True):
    assert f"checkpoints/{step} is damaged or of another model" in line
    assert (tmp_path / f"damaged-{step}").is_dir()


def test_a_bit_that_changed_on_disk_is_seen(checkpoints, tmp_path, capsys):
  for step in (7, 9):
    checkpoints.save(step, {"x": kit.normal(10_000, seed=step)}, {"step": step})
  files = (tmp_path / "checkpoints" / "9" / "arrays").rglob("*")
  files = [path for path in files if path.is_file()]
  kit.flip(max(files, key=lambda path: path.stat().st_size))
  assert checkpoints.restore(lambda saved: saved.notes) == {"step": 7}
  assert "checkpoints/9 is damaged" in capsys.readouterr().err


def test_a_note_that_changed_on_disk_is_seen(checkpoints, tmp_path, capsys):
  for step in (7, 9):
    checkpoints.save(step, {"x": np.zeros(2)}, {"step": step, "job": 41})
  (meta,) = (tmp_path / "checkpoints" / "9" / "meta").glob("metadata*")
  text = meta.read_text()
  assert text.count(": 41") == 1
  meta.write_text(text.replace(": 41", ": 43"))
  assert checkpoints.restore(lambda saved: saved.notes["step"]) == 7
  assert "the checksum does not match" in capsys.readouterr().err


def test_what_cannot_be_rebuilt_is_put_aside_and_the_one_before_it_used(
  checkpoints, tmp_path, capsys
):
  for step in (5, 9):
    checkpoints.save(step, {"w": np.full(3, step)}, {"rows": step})

  def rebuild(most):
    def check(saved):
      if saved.notes["rows"] > most:
        raise ValueError(f"it is of row {saved.notes['rows']}")
      return saved.arrays["['w']"].tolist()

    return check

  assert checkpoints.restore(rebuild(9)) == [9] * 3
  assert checkpoints.restore(rebuild(7)) == [5] * 3
  assert "it is of row 9" in capsys.readouterr().err
  assert (tmp_path / "damaged-9").is_dir()
  assert checkpoints.restore(rebuild(4)) is None
  # Another checkpoint of the same number that is damaged, too.
  checkpoints.save(9, {"w": np.full(3, 9)}, {"rows": 9})
  assert checkpoints.restore(rebuild(4)) is None
  assert (tmp_path / "damaged-9-again").is_dir()


@pytest.mark.parametrize(
  "error",
  [
    OSError(errno.EMFILE, "Too many open files"),
    PermissionError(errno.EACCES, "Permission denied"),
    ValueError("PERMISSION_DENIED: Failed to open: manifest.ocdbt"),
    MemoryError(),
  ],
)
def test_a_checkpoint_that_cannot_be_read_now_is_left(
  checkpoints, tmp_path, monkeypatch, error
):
  checkpoints.save(9, tree(), {})

  def fails(*_, **__):
    raise error

  with monkeypatch.context() as patched:
    patched.setattr(checkpoints._manager, "restore", fails)
    with pytest.raises(OSError, match="cannot read the checkpoint .*/9 "):
      checkpoints.restore(lambda saved: saved)
  # Nor is it damaged if the memory of the device is full.
  with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
    checkpoints.restore(lambda saved: raise_full())
  assert steps(tmp_path) == {"9"}
  assert checkpoints.restore(lambda saved: saved.notes) == {}


def raise_full():
  raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def test_two_leaves_of_one_name_are_refused(checkpoints):
  @jax.tree_util.register_pytree_with_keys_class
  class Twins:
    def __init__(self, *values):
      self.values = values

    def tree_flatten_with_keys(self):
      key = jax.tree_util.GetAttrKey("x")
      return [(key, value) for value in self.values], None

    @classmethod
    def tree_unflatten(cls, _, values):
      return cls(*values)

  with pytest.raises(ValueError, match="the same name"):
    checkpoints.save(1, Twins(np.zeros(1), np.ones(1)), {})


def test_a_digest_sees_values_dtypes_and_shapes():
  x = np.arange(6.0)
  different = [
    x,
    x.astype(np.float32),
    x.reshape(2, 3),
    np.nextafter(x, 9),
    np.zeros(6),
  ]
  assert len({storage.digest({"x": y}) for y in different}) == len(different)
  with jax.enable_x64(True):
    assert storage.digest([jnp.asarray(x)]) == storage.digest([x])


# Simulations.


def simulation_of(name, events):
  """Returns (host, simulation, records, run) after some events."""
  recipe = algorithms.build(name, 0.01, WORKERS)
  host = simulator.make_host(
    recipe.server(), worker_lib.gradient_worker(PROBLEM.loss, recipe.at_worker)
  )
  trace = orders.build(
    recipe.order, durations.homogeneous(), workers=WORKERS, messages=40
  )

  def run(simulation, end):
    return host.run(
      simulation,
      trace,
      end,
      batch=PROBLEM.batches(0, WORKERS),
      root=jax.random.key(0),
    )

  simulation, records = run(start(host), events)
  return host, simulation, records, run


def start(host):
  return host.init(PROBLEM.init(jax.random.key(0)), WORKERS)


def save(checkpoints, simulation, records):
  tree, notes = simulate._pack(simulation)
  checkpoints.save(simulation.event, {**tree, "records": records}, notes)


def restore(checkpoints, host):
  return checkpoints.restore(lambda saved: simulate._unpack(saved, start(host)))


@pytest.mark.parametrize("name", sorted(algorithms.RECIPES))
def test_a_restored_run_goes_on_to_the_same_bits(checkpoints, name):
  # 23 rows: tickets in flight, and a half-full inbox where messages wait.
  host, simulation, records, run = simulation_of(name, 23)
  save(checkpoints, simulation, records)
  restored, kept, _ = restore(checkpoints, host)
  assert restored.event == 23
  jax.tree.map(np.testing.assert_array_equal, kept, records)
  # The original goes first: a restored state must share no buffer with it.
  expected, _ = run(simulation, 60)
  actual, _ = run(restored, 60)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)
  assert storage.digest(actual) == storage.digest(expected)


def test_tickets_that_share_parameters_still_share_them(checkpoints):
  host, simulation, records, _ = simulation_of("asgd", 5)
  before = {
    (worker, job): ticket
    for worker, tickets in enumerate(simulation.tickets)
    for job, ticket in tickets.items()
  }
  assert len({id(t.params) for t in before.values()}) < len(before)
  save(checkpoints, simulation, records)
  restored, *_ = restore(checkpoints, host)
  assert [list(t) for t in restored.tickets] == [
    list(t) for t in simulation.tickets
  ]
  for (worker, job), ticket in before.items():
    again = restored.tickets[worker][job]
    assert int(again.version) == int(ticket.version)
    for (other, its_job), its_ticket in before.items():
      if its_ticket.params is ticket.params:
        assert restored.tickets[other][its_job].params is again.params
