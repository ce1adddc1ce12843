"""Live tables of keyed rows against Ray's parameter server, and each other."""

import numpy as np

from . import table_speed, turns

_ROWS = 100_000


def run(rounds: int = 5) -> None:
  """Prints jobs of 1,000 rows against Ray's loop, then ratings by workers."""
  print(f"pull and push of 1,000 rows of 64 float32, of {_ROWS:,}\n")
  with table_speed.running():
    with table_speed.contestants(_ROWS) as contestants:
      taken = turns.take_turns(contestants, rounds)
    table = turns.TimingTable(["", "ms", "of sparse", "range"])
    for name, seconds in taken.items():
      ratio = turns.ratio_cells(seconds / taken["sparse"])
      table.row(name, f"{100 * np.median(seconds):.2f}", *ratio)
    print("\nmatrix factorisation by SSP, on two shards\n", flush=True)
    table = turns.TimingTable(["workers", "ratings/s", "of one", "range"])
    rates = [[table_speed.ratings_per_second(w) for w in (1, 4)] for _ in "123"]
  one, four = np.transpose(rates)
  table.row("1", f"{np.median(one):,.0f}", "", "")
  table.row("4", f"{np.median(four):,.0f}", *turns.ratio_cells(four / one))
