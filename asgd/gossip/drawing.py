"""Pictures of topologies."""

from typing import Any

import numpy as np

from asgd.gossip.topology import Topology, second_eigenvalue


def draw(topology: Topology, *, size: float = 2.4) -> Any:
  """Draws each round of a topology: peers in a circle, links by their weight.

  Args:
    topology: the topology to draw.
    size: the size of a round, in inches.

  Returns:
    A matplotlib Figure, made without pyplot.
  """
  from matplotlib.figure import Figure

  rounds, n = topology.period, topology.workers
  figure = Figure(figsize=(size * rounds, size + 0.3), layout="constrained")
  angle = np.pi / 2 - 2 * np.pi * np.arange(n) / n
  x, y = np.cos(angle), np.sin(angle)
  for k in range(rounds):
    axes = figure.add_subplot(1, rounds, k + 1)
    links, weights = topology.links[k], topology.matrices[k]
    for receiver, sender in np.argwhere(links):
      is_two_way = links[sender, receiver]
      if is_two_way and sender < receiver:  # one line for both directions
        continue
      axes.annotate(
        "",
        (x[receiver], y[receiver]),
        (x[sender], y[sender]),
        arrowprops={
          "arrowstyle": "-" if is_two_way else "-|>",
          "color": "0.35",
          "linewidth": 0.4 + 2 * weights[receiver, sender],
          "shrinkA": 6,
          "shrinkB": 6,
        },
      )
    axes.scatter(x, y, 1200 / max(n, 8), zorder=2)
    if n <= 32:
      for i in range(n):
        axes.annotate(
          *(str(i), (x[i], y[i])),
          ha="center",
          va="center",
          color="white",
          fontsize=7,
        )
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.axis("off")
    axes.set_title(f"round {k}" if rounds > 1 else "", fontsize=8)
  figure.suptitle(
    f"{topology.name}, {n} peers, |λ₂| = {second_eigenvalue(topology):.3f}",
    fontsize=9,
  )
  return figure
