"""When a server saturates: throughput against workers, with 1, 2 and 4 shards.

Asynchronous SGD on handwritten digits, in simulated time, over a network
(config.network). A batch takes 1 on average (gamma, V = 0.1), each way 0.05,
and the port of a shard transfers a complete message in 0.1. Messages that reach
a port at the same time wait in a queue.

Without queues a worker's cycle takes c = 1 + 2 x 0.05 + 2 x b / B (b: bytes of
a message at the busiest shard; B: its bandwidth). At most B / b messages pass
per unit of time. So the throughput of N workers is N / c up to N = c B / b, the
"knee", and B / b above.

  asgd reproduce saturation
  python -m launch.train --config=configs/figures/saturation.py

90 cells, about 3 minutes on two cores; --quick under 3 minutes.
"""

import ml_collections

WORKERS = 1, 4, 8, 16, 32, 64
MESSAGES = 1280  # per cell, for every number of workers
BATCH = 8
NBYTES = 9664  # per message: 64 x 32 and 32 x 10 weights, and biases
# shards -> bytes of a message at the busiest shard; rows divide unequally.
BUSIEST = {1: 9664, 2: 4864, 4: 2496}
PORT = 10 * NBYTES  # bytes per unit of time: ten messages
LATENCY = 0.05  # one way, mean batch times
SHARDS = {1: "one", 2: "two", 4: "four"}
TITLES = {1: "1 shard", 2: "2 shards", 4: "4 shards"}


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(32,))
  runs = {}
  for shards, label in SHARDS.items():
    runs[label] = dict(
      recipe="asgd",
      title=TITLES[shards],
      server=dict(shards=shards, consistent=True),
    )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.network = dict(latency=LATENCY, port=PORT)  # for each shard
  config.durations = dict(name="gamma", variation=0.1)
  config.workers = WORKERS
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = BATCH
  config.examples = MESSAGES * BATCH
  config.learning_rate = 0.02
  config.evaluations = 1
  config.curvature_checks = 0
  if arg == "tiny":
    config.workers, config.seeds, config.examples = (2,), (0,), 8 * BATCH
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def cycle(shards):
  """Returns the time from ticket to ticket of a worker that never queues."""
  # The batch, both ways, and the port for message and ticket.
  return 1 + 2 * LATENCY + 2 * BUSIEST[shards] / PORT


def capacity(shards):
  """Returns the most messages that pass in a unit of time."""
  return PORT / BUSIEST[shards]


def knee(shards):
  """Returns the number of workers above which throughput does not grow."""
  return cycle(shards) * capacity(shards)


def ratio(name, says, of, to, above, below):
  return dict(
    name=name, says=says, kind="ratio", column="throughput",
    of=of, to=to, above=above, below=below,
  )


def knee_claims(shards, least):
  """Returns the claims on both sides of the knee; `least` workers are below
  it."""
  label, name, knee_workers = SHARDS[shards], TITLES[shards], knee(shards)
  one = f"{label}@1"
  says_flat = (
    f"{least} workers each have over 0.93 times the throughput of one worker"
  )
  says_knee = (
    f"64 workers have {knee_workers:.1f} times the throughput of one, as"
    " computed from bytes and bandwidth, less 5 % for the beginning of a run"
  )
  bounds = 0.93 * least, 1.02 * least
  return [
    ratio(
      f"below the knee, {name}", says_flat, f"{label}@{least}", one, *bounds
    ),
    ratio(
      *(f"knee, {name}", says_knee, f"{label}@64", one),
      *(0.95 * knee_workers, 1.02 * knee_workers),
    ),
  ]


def at_one_shard():
  """Returns the claims about the port of one shard, with 64 workers."""
  # Little's law: 64 workers at 10 messages a unit of time have a cycle of 6.4.
  wait = 6.4 - cycle(1)
  says_wait = (
    "by Little's law the messages of 64 workers at one shard wait"
    f" 64 / 10 - {cycle(1):.1f} = {wait:.1f}, less 8 % for the beginning"
  )
  says_busy = "with 64 workers a single port is busy for over 97 % of the time"
  bound = dict(kind="bound", of="one@64")
  return [
    dict(bound, name="queues", says=says_wait, column="queue_wait")
    # 8 %: at the beginning the queue is empty.
    | dict(above=0.92 * wait, below=1.02 * wait),
    dict(
      bound, name="the port is busy", says=says_busy, column="link_utilisation"
    )
    | dict(above=0.97),
  ]


def claims():
  beyond = "with one shard, 64 workers have no more throughput than 32"
  two = (
    "with 64 workers two shards have 1.9 to 2.1 times the throughput of one"
  )
  four = "four shards have 3.6 to 4.1 times the throughput of one"
  return [
    *knee_claims(1, 8),
    *knee_claims(2, 16),
    *knee_claims(4, 32),
    ratio("beyond the knee", beyond, "one@64", "one@32", 0.98, 1.02),
    ratio("two shards", two, "two@64", "one@64", 1.9, 2.1),
    ratio("four shards", four, "four@64", "one@64", 3.6, 4.1),
    *at_one_shard(),
  ]


def panel(title, column, ylabel, **options):
  return dict(
    title=title,
    column=column,
    xlabel="workers",
    ylabel=ylabel,
    series={
      TITLES[shards]: [(n, f"{label}@{n}") for n in WORKERS]
      for shards, label in SHARDS.items()
    },
    xlog=True,
    **options,
  )


def computed():
  return [
    dict(
      title=f"computed, {TITLES[shards]}",
      source="computed: the smaller of N / c and B / b",
      points=[(n, min(n / cycle(shards), capacity(shards))) for n in WORKERS],
      of=TITLES[shards],
      line="--",
      marker="",
    )
    for shards in SHARDS
  ]


def get_figure():
  return dict(
    title="When a parameter server saturates",
    paper=(
      "Li et al., Scaling Distributed Machine Learning with the Parameter"
      " Server, OSDI 2014, shards a server to spread its traffic; the sweep, in"
      " simulated time, is ours"
    ),
    finding=(
      "A server saturates at the number of workers that is computed from bytes"
      " and bandwidth; this number grows in proportion to the shards."
    ),
    about=(
      "Messages per mean batch time, the fraction of time in which the busiest"
      " port is busy, and how long a message and its ticket wait there, against"
      " the number of workers, with one, two and four shards."
    ),
    columns={},
    claims=claims(),
    panels=[
      panel(
        *("throughput", "throughput", "messages a batch time"),
        yscale="log",
        published=computed(),
      ),
      panel("ports", "link_utilisation", "busiest port busy (%)", scale=100),
      panel("queues", "queue_wait", "time in queues (batches)"),
    ],
    quick={"examples": 640 * BATCH},  # half of the messages
    tuned="nothing",
  )
