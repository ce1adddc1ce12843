"""Advises whether to train a config on several machines, and how.

  asgd advise digits
  asgd advise --config=configs/fashion.py --machines=16 --bandwidth=0.125
  asgd advise --config=my_config.py --config.only=baseline \\
    --config.durations.name=heterogeneous --json

measures on this machine the time of a step, the bytes of a message, and the
curvature of the loss. From these it predicts ways of training on --machines
like this one, with the relative speeds of the run's durations: one machine,
rounds on a mesh, asynchronous workers of a server, such workers with a codec,
and local steps. It prints the recommended way with its recipe, number of
workers, learning rate, memory and speed-up, the reason for each, and the
command. The advice is for the config's run of one worker, or else for its first
run; --config.only selects another.

Nothing is written. Bandwidths are 10^9 bytes per second in each direction. In
live runs the server takes 1 to 2 ms for a message (--service), and workers
start in 14 s (--start).
"""

import os
import shutil
import textwrap
from typing import Any

from asgd import output
from asgd.experiment import advice as advice_lib
from asgd.experiment import problem as problem_lib
from asgd.experiment import schema
from asgd.experiment import ways as ways_lib
from asgd.experiment.engines import learning_rates
from asgd.orders.network import Network
from asgd.parallel.memory import GB

from . import flags
from .command_flags import ADVISE

_MAX_MACHINES = 256
_DEFAULT_MACHINES = 8  # for a config of one worker
_MAX_COLUMNS = 100  # of the printed sentences
# Beyond these limits a number is a misprint.
_MIN_NUMBER, _MAX_NUMBER = 1e-9, 1e15


def _cluster(
  values: dict[str, Any], config: Any, durations: Any
) -> ways_lib.Machines:
  """Returns the machines and links that the flags, the config and the durations
  of a run describe."""
  machines = values["machines"]
  if machines is None:
    config_workers = max(config["workers"])
    machines = config_workers if config_workers > 1 else _DEFAULT_MACHINES
  else:
    flags.in_range("machines", machines, 1, _MAX_MACHINES)
  for name in ("latency", "service", "start"):
    flags.in_range(name, values[name], 0, _MAX_NUMBER)
  for name in ("bandwidth", "memory"):
    if values[name] is not None:
      flags.in_range(name, values[name], _MIN_NUMBER, _MAX_NUMBER)
  bandwidth = values["bandwidth"] * 1e9
  network = Network(
    latency=values["latency"] * 1e-6,
    service=values["service"] * 1e-3,
    up=bandwidth,
    down=bandwidth,
    port=bandwidth,
  )
  memory = values["memory"]
  if memory is None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB
  return ways_lib.Machines(
    machines,
    network,
    memory * GB,
    values["start"],
    ways_lib.slowness(durations, machines),
  )


def _show(name: str, step_costs: Any, rule: Any, advice: Any) -> None:
  """Prints measurements, ways and advice."""
  columns = min(shutil.get_terminal_size().columns, _MAX_COLUMNS)
  print(f"measured on this machine, for {name}")
  lines = advice_lib.describe(step_costs, rule)
  all_topics = {**lines, **advice.reasons}
  width = max(map(len, all_topics)) + 2

  def show(topic: str, text: str) -> None:
    wrapped = textwrap.wrap(text, max(columns - width, 24))
    print(topic.ljust(width) + f"\n{'':{width}}".join(wrapped))

  for topic, text in lines.items():
    show(topic, text)
  rows = [
    [way.name, f"{way.workers}", f"{way.speed:.3g}", f"{way.staleness:.1f}"]
    for way in advice.ways
  ]
  print("\n" + output.table(["way", "workers", "speed-up", "staleness"], rows))
  for topic, text in advice.reasons.items():
    show(topic, text)


def main(*, config: schema.Resolved | None = None, **values: Any) -> None:
  """Prints the advice for the flags, see `command_flags.ADVISE`."""
  defaults = {name: default for name, (_, default, _) in ADVISE.items()}
  values = {**defaults, **values}
  if config is None:
    config = flags.load_config("configs/digits.py")
  runs = sorted(  # stable: those of one worker first
    config.runs.values(), key=lambda run: max(run.config["workers"]) > 1
  )
  run = runs[0]
  rule = ways_lib.step_rule(run, config.config)
  # Engines without a server have no durations of a run.
  durations = run.config.get("durations", config.config["durations"])
  cluster = _cluster(values, config.config, durations)
  dataset, problem = problem_lib.load(
    {**config.config, **run.config}, data_dir=values["data_dir"]
  )
  batches = learning_rates.budget_batches(run, problem)
  step_costs = ways_lib.measure(problem, rule, batches)
  advice = advice_lib.advise(step_costs, cluster, rule, run.config)
  if run.recipe != advice.recipe:
    text = f" It replaces the recipe {run.recipe} of the run {run.label}"
    if any(".momentum=" in flag for flag in advice.flags):
      text += f", and keeps its momentum of {rule.momentum:g}"
    advice.reasons["recipe"] += f"{text}."
  _show(f"the run {run.label} on {dataset.name}", step_costs, rule, advice)
  replaced = {word.partition("=")[0] for word in advice.flags}
  words = ["asgd train"]
  words += [
    word
    for word in flags.config_words()
    if word.partition("=")[0] not in replaced
  ]
  if values["data_dir"] is not None:
    words.append(f"--data_dir={values['data_dir']}")
  print("\n" + " \\\n  ".join([*words, *advice.flags]))
  if advice.way.name in (ways_lib.ASYNCHRONOUS, ways_lib.CODED, ways_lib.LOCAL):
    print(
      "simulates it, which shows the loss at that staleness; --engine=ray"
      " trains it on a cluster"
    )
  result = advice._asdict()
  result |= {"way": advice.way._asdict()}
  result |= {"ways": [way._asdict() for way in advice.ways]}
  flags.add_json(run=run.label, measured=step_costs._asdict(), **result)


if __name__ == "__main__":
  _FLAGS = flags.define("advise")
  flags.run(
    lambda: main(**{name: holder.value for name, holder in _FLAGS.items()}),
    "advise",
  )
