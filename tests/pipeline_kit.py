"""Tables that tests of the pipeline share, made without `schedules`.

A test imports it with `import pipeline_kit`; see `pythonpath` in
pyproject.toml.
"""

from asgd.pipeline import table as table_lib


def one_f_one_b(stages, microbatches, *, every=None, flush=True, backward="B"):
  """Returns 1F1B; `backward` is "B" or "IW"."""
  orders = []
  for stage in range(stages):
    depth = min(stages - 1 - stage, microbatches)
    order = [("F", stage, m) for m in range(depth)]
    for m in range(microbatches):
      if depth + m < microbatches:
        order.append(("F", stage, depth + m))
      order += [(action, stage, m) for action in backward]
    orders.append(order)
  every = every or microbatches
  return table_lib.lay_out("1f1b", orders, every=every, flush=flush)


def gpipe(stages, microbatches, actions="FB", *, batches=1, flush=True):
  """Returns GPipe: all of a batch's forwards, then its backwards."""
  each = microbatches // batches
  orders = [
    [
      (action, stage, m)
      for first in range(0, microbatches, each)
      for action in actions
      for m in range(first, first + each)
    ]
    for stage in range(stages)
  ]
  return table_lib.lay_out("gpipe", orders, every=each, flush=flush)


def table(*lines, every=2, flush=False):
  """Reads a table that is drawn line by line."""
  head = f"# t; every {every}" + ("; flush" if flush else "")
  return table_lib.from_text("\n".join([head, *lines]))


def orders(made):
  """Returns the blocks of each device of a table, in their order."""
  out = [[] for _ in range(made.devices)]
  for task in made.tasks:
    blocks = out[task.device]
    if blocks and blocks[-1][0].time == task.time:
      blocks[-1] += (task,)
    else:
      blocks.append((task,))
  return out
