"""Topologies: accuracy, distance and traffic against the number of peers.

D-PSGD on a ring, on the static exponential graph and on the full graph, and SGP
on the one-peer exponential graph, with 4 to 32 peers on handwritten digits. All
have the same batch size per peer, learning rate and number of epochs.

  python -m launch.reproduce gossip_topology
  python -m launch.train --config=configs/figures/gossip_topology.py

80 cells, about 10 minutes on two cores; --quick under 3 minutes.
"""

import ml_collections

# Powers of two: the exponential graph then has log2(N) neighbours.
WORKERS = 4, 8, 16, 32
RUNS = {
  "ring": dict(recipe="d_psgd", topology="ring"),
  "exponential": dict(recipe="d_psgd", topology="exponential"),
  "full": dict(recipe="d_psgd", topology="full"),
  "one-peer": dict(recipe="sgp"),
}
TITLES = {
  "ring": "ring",
  "exponential": "exponential",
  "full": "full",
  "one-peer": "one-peer exponential (SGP)",
}


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64))
  runs = {
    label: dict(run, title=TITLES[label], momentum=0.9)
    for label, run in RUNS.items()
  }
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.workers = WORKERS
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 8  # per peer
  config.epochs = 20.0  # over all peers: 32 peers have few rounds
  config.learning_rate = 0.05
  config.learning_rate_schedule = dict(warmup_epochs=1.0, decay_epochs=(14.0,))
  # The first is half-way: the rate, and with it the distance, is still high.
  config.evaluations = 2
  config.curvature_checks = 0
  if arg == "tiny":
    config.model.hidden, config.workers, config.seeds = (), (4,), (0,)
    config.epochs, config.evaluations = 0.1, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def claims():
  return [*accuracy_claims(), *distance_claims(), *traffic_claims()]


def accuracy_claims():
  return [
    dict(
      name="accuracy, exponential",
      says=(
        "up to 32 peers the exponential graph is within 2 points of the full"
      ),
      kind="difference",
      column="test_accuracy",
      of="exponential@32",
      to="full@32",  # the most peers
      above=-0.02,
      below=0.02,
    ),
    dict(
      name="accuracy, ring",
      says="up to 32 peers the ring is within 2 points of the full graph",
      kind="difference",
      column="test_accuracy",
      of="ring@32",
      to="full@32",
      above=-0.02,
      below=0.02,
    ),
  ]


def distance_claims():
  return [
    dict(
      name="distance",
      # |lambda_2| of the mixing matrix: 0 for the full graph, near 1 for a
      # large ring.
      says=(
        "the larger |lambda_2|, the further peers are apart: ring beyond"
        " exponential beyond full"
      ),
      kind="ordering",
      order="falls",
      column="consensus",
      runs=["ring@32", "exponential@32", "full@32"],
    ),
    dict(
      name="distance on a ring",
      says="on a ring, the more peers, the further they are apart",
      kind="monotone",
      order="rises",
      column="consensus",
      runs="ring",  # all its numbers of peers
    ),
  ]


def traffic_claims():
  return [
    dict(
      name="traffic, ring",
      says=(
        "with 32 peers a peer receives 2 messages per round on the ring and 31"
        " on the full graph"
      ),
      kind="ratio",
      column="bytes_per_peer",
      of="full@32",
      to="ring@32",
      # 31 / 2, apart from headers.
      above=15.4,
      below=15.6,
    ),
    dict(
      name="traffic, one peer",
      says="with one peer per round 1, on the exponential graph 5",
      kind="ratio",
      column="bytes_per_peer",
      of="exponential@32",
      to="one-peer@32",
      # log2(32) = 5 neighbours.
      above=4.9,
      below=5.1,
    ),
  ]


def panel(title, column, ylabel, **options):
  return dict(
    title=title,
    column=column,
    xlabel="peers",
    ylabel=ylabel,
    series={
      TITLES[label]: [(n, f"{label}@{n}") for n in WORKERS] for label in RUNS
    },
    xlog=True,
    **options,
  )


def get_figure():
  return dict(
    title="Topologies: accuracy, distance and traffic",
    paper=(
      "Assran, Loizou, Ballas, Rabbat, Stochastic Gradient Push for Distributed"
      " Deep Learning, ICML 2019, arXiv 1811.10792; Ying et al., Exponential"
      " Graph is Provably Efficient for Decentralized Deep Training, NeurIPS"
      " 2021, arXiv 2110.13363; both on ImageNet"
    ),
    finding=(
      "Rings and exponential graphs have the accuracy of the full graph, within"
      " 2 points, with up to 32 peers and far fewer messages."
    ),
    about=(
      "Peers on four graphs, on handwritten digits: the accuracy of the mean"
      " model, the consensus distance at the end (the root mean square over"
      " peers and parameters of the distance to the mean), and the bytes of a"
      " peer and of a link in 20 epochs."
    ),
    claims=claims(),
    panels=[
      panel("accuracy", "test_accuracy", "accuracy (%)", scale=100),
      panel("distance", "consensus", "consensus distance", yscale="log"),
      panel(
        "traffic of a peer", "bytes_per_peer", "MB", scale=1e-6, yscale="log"
      ),
      panel(
        "traffic of a link", "bytes_per_link", "MB", scale=1e-6, yscale="log"
      ),
    ],
    quick={
      "workers": (4, 32),
      "epochs": 5.0,
      "learning_rate_schedule.decay_epochs": (4.0,),
    },
    tuned="nothing: rate, momentum and epochs are those tried first",
  )
