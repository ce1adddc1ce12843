"""Strategies as a table, as bars of text and as a picture."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asgd import output, safe_files
from asgd.parallel import memory
from asgd.parallel import strategies as strategies_lib
from asgd.parallel.strategies import ONE, Strategy


def tabulate(strategies: Sequence[Strategy]) -> str:
  """Returns a table with a row for each strategy."""
  rows = []
  for strategy in strategies:
    sizes = strategy.bytes, strategy.state, strategy.activations
    compute, send = strategy.compute, strategy.communication
    times = compute, send, send / compute, strategy.waiting, strategy.seconds
    row = [strategy.name, "yes" if strategy.fits else "no"]
    row += [f"{size / memory.GB:.3g}" for size in sizes]
    rows.append([*row, f"{strategy.microbatch}", *(f"{t:.3g}" for t in times)])
  head = ["strategy", "fits", "GB", "state", "activations", "microbatch"]
  head += ["compute", "send", "send/compute", "wait", "s/step"]
  return output.table(head, rows)


def advice(strategies: Sequence[Strategy]) -> list[str]:
  """Returns lines with the best strategies, or with the smallest if all need
  too much memory."""
  lines = []
  if not any(strategy.fits for strategy in strategies):
    smallest = min(strategies, key=lambda strategy: strategy.bytes)
    lines.append(
      f"nothing fits: the least is {smallest.bytes / memory.GB:.3g} GB a"
      f" device, by {smallest.name}; use more devices, a smaller microbatch or"
      " activations=full"
    )
  titles = {False: "best", True: "best of those that do not wait"}
  for stale, title in titles.items():
    best = strategies_lib.best(strategies, stale=stale)
    if best is not None:
      lines.append(
        f"{title}: {best.name}, {best.bytes / memory.GB:.3g} GB a device and"
        f" {best.seconds:.3g} s a step"
      )
  return lines + _one_device(strategies)


def _one_device(strategies: Sequence[Strategy]) -> list[str]:
  """Returns a line on one device alone, if there are other strategies that fit.
  """
  one_device = next((x for x in strategies if x.name == ONE), None)
  other_strategies = [x for x in strategies if x is not one_device]
  fastest = strategies_lib.best(other_strategies, stale=False)
  if one_device is None or fastest is None:
    return []
  slowdown = one_device.seconds / fastest.seconds
  if not one_device.fits:
    predicate = f"does not fit: it needs {one_device.bytes / memory.GB:.3g} GB"
  elif slowdown > 1:
    predicate = f"is {slowdown:.3g} times slower than {fastest.name}"
  else:
    predicate = "is the fastest: do not distribute"
  return [f"{ONE} alone, {one_device.seconds:.3g} s a step, {predicate}"]


def bars(
  strategies: Sequence[Strategy], limit: float, columns: int = 100
) -> str:
  """Returns the memory and the time of each strategy as bars. A bar of memory
  reaches to twice the limit, and `|` marks the limit. A bar of time has `#` for
  computing, `=` for sending and `.` for waiting; all have the same scale."""
  name_width = max(len(strategy.name) for strategy in strategies)
  width = max((columns - name_width - 6) // 2, 10)
  fitting = [strategy for strategy in strategies if strategy.fits]
  longest = max((strategy.seconds for strategy in fitting), default=0.0)
  # If nothing fits, the longest bar is the slowest strategy.
  longest = longest or max(strategy.seconds for strategy in strategies)
  title = f"memory, | is {limit / memory.GB:g} GB".ljust(width)
  marks = f"# compute = send . wait, to {longest:.3g} s"
  lines = [f"{'':{name_width}} {title}  {marks}"]
  for strategy in strategies:
    filled = min(round(strategy.bytes / (2 * limit) * width), width)
    memory_bar = ["#" if i < filled else " " for i in range(width)]
    memory_bar[width // 2] = "|"
    if strategy.bytes > 2 * limit:
      memory_bar[-1] = ">"
    # Round the ends of the three parts to characters: if the parts were
    # rounded, the errors in the length of the bar would add up.
    times = strategy.compute, strategy.communication, strategy.waiting
    ends = [
      round(end / longest * width) if longest else 0
      for end in itertools.accumulate(times)
    ]
    time_bar = ""
    for mark, end in zip("#=.", ends, strict=True):
      time_bar += mark * (min(end, width) - len(time_bar))
    if ends[-1] > width:
      time_bar = time_bar[:-1] + ">"
    fit_mark = "  " if strategy.fits else " x"
    line = f"{strategy.name:{name_width}}{fit_mark} {''.join(memory_bar)}"
    lines.append(f"{line} {time_bar}".rstrip())
  return "\n".join(lines) + "\n"


def draw(
  strategies: Sequence[Strategy], limit: float, path: Path, heading: str
) -> None:
  """Draws memory and time of each strategy; needs matplotlib (`viz`)."""
  # Imported here: it is an optional dependency.
  import matplotlib
  from matplotlib.figure import Figure

  with matplotlib.rc_context({"font.size": 8}):
    size = 7.2, 1.3 + 0.2 * len(strategies)
    figure = Figure(figsize=size, layout="constrained")
    _draw(figure.subplots(1, 2, sharey=True), strategies, limit)
    figure.suptitle(f"{heading}\npale: does not fit")
    safe_files.save_figure(figure, path, dpi=200)


def _draw(axes: Any, strategies: Sequence[Strategy], limit: float) -> None:
  """Draws memory on the left, with its limit, and time on the right."""
  left, right = axes
  names = [strategy.name for strategy in strategies]
  palette = "#332288", "#CC6677", "#DDCC77"  # from dark to light, in grey too
  panels = (
    (left, memory.GB, ("state", "activations"), "GB a device"),
    (right, 1.0, ("compute", "communication", "waiting"), "seconds a step"),
  )
  for axis, unit, parts, label in panels:
    start = [0.0] * len(strategies)
    for i, part in enumerate(parts):
      values = [getattr(strategy, part) / unit for strategy in strategies]
      opacities = [1.0 if strategy.fits else 0.35 for strategy in strategies]
      colors = [(palette[i], opacity) for opacity in opacities]
      axis.barh(names, values, left=start, color=colors)
      # An empty bar for the legend, as the bars of strategies may be pale.
      axis.barh([names[0]], [0], color=palette[i], label=part)
      start = [a + b for a, b in zip(start, values, strict=True)]
    axis.set_xlabel(label)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right")
  left.axvline(limit / memory.GB, color="black", ls="--", lw=1)
  left.set_xlim(0, 2 * limit / memory.GB)
  times = [strategy.seconds for strategy in strategies if strategy.fits]
  if times:
    right.set_xlim(0, 1.05 * max(times))
  left.invert_yaxis()
