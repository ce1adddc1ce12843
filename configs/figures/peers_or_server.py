"""Peers or a server: six ways to exchange over networks of 12 speeds.

Eight workers on handwritten digits, in simulated time. A batch takes 1 on
average (gamma, V = 0.1). All links, and the port of the server, have the same
bandwidth: a message takes 0.01 to 0.8. Each way has a latency of 0 to 0.5. The
server is synchronous with one or four shards, or asynchronous; peers
are all-reduce SGD, D-PSGD on a ring with messages that travel during the jobs,
and AD-PSGD.

  asgd reproduce peers_or_server
  python -m launch.train --config=configs/figures/peers_or_server.py

360 cells, about 8 minutes on two cores; --quick under 3 minutes.
"""

import ml_collections

N = 8  # workers, or peers
BATCH, ROUNDS = 16, 80  # rounds of all workers
NBYTES = 9664  # per message: 64 x 32 and 32 x 10 weights, and biases
TRANSFERS = 0.01, 0.05, 0.2, 0.8  # mean batch times per message on a link
LATENCIES = 0.0, 0.1, 0.5
LOSS = 0.8  # the training loss to reach, also by the quick size
RATE = 0.2  # for the mean gradient of all workers, and for a peer
SYNC = dict(recipe="ssgd", learning_rate=RATE)
RUNS = {  # label -> title, entry
  "server": ("server", SYNC),
  "shards": ("server of 4 shards", SYNC),
  # An update has one message, not the mean of N.
  "async": (
    "asynchronous server", dict(recipe="asgd", learning_rate=RATE / N)
  ),
  "reduce": ("all-reduce", SYNC),
  "ring": ("D-PSGD, ring", dict(recipe="d_psgd", learning_rate=RATE)),
  "pairs": (
    "AD-PSGD", dict(recipe="ad_psgd", topology="full", learning_rate=RATE)
  ),
}
TITLES = {label: title for label, (title, _) in RUNS.items()}
SLOWEST, FASTEST = len(TRANSFERS) - 1, 0  # indices into TRANSFERS and LATENCIES
HIGHEST = len(LATENCIES) - 1


# Explanations of verdicts, from the numbers of the full run.
NOTES = {
  "shards": (
    "The shards divide the port's work, but each worker's link still carries"
    " whole messages: it is 2.03 times as fast. The ports are busy for 40 % of"
    " the time, instead of 77 %."
  ),
  "bytes in total": (
    "Each gradient costs two messages in both: one to each neighbour, or one to"
    " and one from the server. On the ring the messages of the last round"
    " arrive after the end: it is 1.97 times."
  ),
}


def all_reduce_time(transfer, latency):
  """Returns the time of a ring all-reduce: 2 (N - 1) steps.

  In each step a worker sends 1 / N of the gradient to its successor.
  """
  return 2 * (N - 1) * (latency + transfer / N)


def network_settings(label, transfer, latency):
  """Returns the settings of a run on a network."""
  durations = dict(name="gamma", variation=0.1)
  if label == "reduce":
    # All workers wait for each other, so the exchange adds the same time to
    # each batch.
    return dict(
      durations=dict(durations, offset=all_reduce_time(transfer, latency))
    )
  bandwidth = NBYTES / transfer
  links = dict(latency=latency, up=bandwidth, down=bandwidth)
  # Only a server has a port, which all its messages pass.
  if label in ("server", "shards", "async"):
    links["port"] = bandwidth
  settings = dict(durations=durations, network=links)
  if label == "shards":
    settings["server"] = dict(shards=4, consistent=True)
  return settings


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(32,))
  config.runs = {
    f"{label}-{i}-{j}": dict(
      entry,
      title=f"{title}, {transfer:g}, {latency:g}",
      **network_settings(label, transfer, latency),
    )
    for label, (title, entry) in RUNS.items()
    for i, transfer in enumerate(TRANSFERS)
    for j, latency in enumerate(LATENCIES)
  }
  config.workers = (N,)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = BATCH
  config.examples = ROUNDS * N * BATCH
  config.evaluations = 1  # the accuracy at the end
  config.curvature_checks = 0
  if arg == "tiny":
    config.model.hidden, config.seeds = (), (0,)
    config.examples = 2 * N * BATCH
    config.only = [
      f"{label}-{i}-{HIGHEST}" for label in RUNS for i in (FASTEST, SLOWEST)
    ]
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def ratio(name, says, of, to, *, column="speed", **bounds):
  return dict(
    name=name, says=says, kind="ratio", column=column, of=of, to=to, **bounds
  )


def bandwidth_claims():
  return [
    ratio(
      "a fast network",
      "on the fastest network a ring is under 1.25 times as fast as a server",
      "ring-0-0",
      "server-0-0",
      above=1.0,
      below=1.25,
    ),
    ratio(
      "the port first: server",
      "at 0.2 per message the synchronous server loses over half its speed",
      "server-2-0",
      "server-0-0",
      below=0.5,
    ),
    ratio(
      "the port first: ring",
      "the ring loses under a tenth",
      "ring-2-0",
      "ring-0-0",
      above=0.9,
    ),
    ratio(
      "the port first: all-reduce",
      "all-reduce loses under a third",
      "reduce-2-0",
      "reduce-0-0",
      above=2 / 3,
    ),
    ratio(
      "a slow network",
      "on the slowest a ring is over 4 times as fast as the server",
      "ring-3-0",
      "server-3-0",
      above=4.0,
    ),
    ratio(
      "shards",
      "four shards make the server on the slowest over 2.5 times as fast",
      "shards-3-0",
      "server-3-0",
      # Four ports instead of one; their messages wait for each other.
      above=2.5,
    ),
    ratio(
      "asynchronous server",
      "on the slowest, asynchrony makes it under 1.5 times as fast",
      "async-3-0",
      "server-3-0",
      below=1.5,
    ),
  ]


def latency_claims():
  return [
    ratio(
      "latency: ring",
      "a latency of half a batch costs the ring under a twentieth",
      "ring-0-2",
      "ring-0-0",
      above=0.95,
    ),
    ratio(
      "latency: all-reduce",
      "it costs all-reduce, which has 14 steps in turn, over three quarters",
      "reduce-0-2",
      "reduce-0-0",
      # 14 steps of 0.5 each are seven batch times.
      below=0.25,
    ),
    ratio(
      "latency: AD-PSGD",
      "AD-PSGD waits for two latencies: it has half of its speed, within 5 %",
      "pairs-0-2",
      "pairs-0-0",
      # 1 / 2: a batch, and 0.5 each way.
      above=0.475,
      below=0.525,
    ),
  ]


def other_claims():
  return [
    ratio(
      "bytes in total",
      "peers of a ring send more bytes than workers and server together, which"
      " send twice the bytes down",
      "ring-0-0",
      "async-0-0",
      column="bytes_down",
      above=2.02,  # twice, and a little for the first tickets
    ),
    dict(
      name="accuracy",
      says="after as many epochs peers are within 3 points of the server",
      kind="difference",
      column="test_accuracy",
      of=["ring-0-0", "pairs-0-0"],
      to="server-0-0",
      above=-0.03,
    ),
    ratio(
      "time to loss",
      f"on the slowest network the ring reaches a loss of {LOSS} over 3 times"
      " sooner than the server",
      "server-3-0",
      "ring-3-0",
      column="time to loss",
      above=3.0,
    ),
  ]


def panel(
  title, column, ylabel, points_of, *, at="a message on a link", **options
):
  return dict(
    title=title,
    column=column,
    xlabel=f"time of {at} (batches)",
    ylabel=ylabel,
    series={TITLES[label]: points_of(label) for label in RUNS},
    **options,
  )


def along_transfers(label, latency=0):
  return [(x, f"{label}-{i}-{latency}") for i, x in enumerate(TRANSFERS)]


def along_latencies(label):
  return [(x, f"{label}-0-{j}") for j, x in enumerate(LATENCIES)]


def panels():
  by_bandwidth = dict(xlog=True, yscale="log")
  return [
    panel(
      "no latency",
      "speed",
      "gradients a batch time",
      along_transfers,
      **by_bandwidth,
    ),
    panel(
      "latency 0.5",
      "speed",
      "gradients a batch time",
      lambda label: along_transfers(label, HIGHEST),  # the index of 0.5
      **by_bandwidth,
    ),
    panel(
      "fastest links",
      "speed",
      "gradients a batch time",
      along_latencies,
      at="one way",
      yscale="log",
    ),
    panel(
      "no latency, by the loss",
      "time to loss",
      f"time to loss {LOSS}",
      along_transfers,
      **by_bandwidth,
    ),
  ]


def get_figure():
  return dict(
    title="Peers or a server, by bandwidth and latency",
    paper=(
      "Lian et al., Can Decentralized Algorithms Outperform Centralized"
      " Algorithms?, NeurIPS 2017, arXiv 1705.09056, figures 3 and 4, with"
      " ResNet-20 on CIFAR-10 and CNTK; AD-PSGD: Lian et al., ICML 2018,"
      " arXiv 1710.06952"
    ),
    finding=(
      "On a slow network a ring is over 4 times as fast as a server; four"
      " shards give 2.0 times, not 2.5, as workers' links carry whole messages."
    ),
    about=(
      "Gradients in a unit of time (a mean batch) of eight workers, and the"
      f" time until the training loss is {LOSS}, against bandwidth and latency."
      " All links and the server's port have one bandwidth."
    ),
    columns={
      "speed": dict(kind="quotient", of="messages", by="simulated_time"),
      "time to loss": dict(kind="reach", loss=LOSS),
    },
    claims=[*bandwidth_claims(), *latency_claims(), *other_claims()],
    notes=NOTES,
    panels=panels(),
    quick={
      "examples": 40 * N * BATCH,  # half of the rounds
      "only": [
        f"{label}-{i}-{j}"
        for label in RUNS
        for i, j in ((0, 0), (2, 0), (3, 0), (0, HIGHEST))
      ],
    },
    tuned=(
      "nothing: the rate is one that all-reduce SGD had in gossip_limits, on"
      " seeds 100 and 101; the loss is one that the quick size reaches"
    ),
  )
