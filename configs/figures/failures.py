"""Workers that fail and are replaced: what each protocol loses.

Eight workers on handwritten digits, in simulated time. A worker fails after 20
to 1,000 batches on average; 10 batch times later a replacement computes the
lost batch again (durations `failing`). ASGD loses the time of the failed
workers only. The others wait for the replacement: SSGD after one batch, SSP
after three, model averaging after ten. Claims compare with computed values.

  asgd reproduce failures
  python -m launch.train --config=configs/figures/failures.py

250 cells, about 15 minutes on two cores; --quick under 3 minutes.
"""

import ml_collections

N = 8  # workers
BATCH, ROUNDS = 16, 800  # rounds of all workers
MTBFS = 20, 50, 200, 1000  # mean batches between two failures of a worker
MTTR = 10.0  # time to replace a worker, in mean batch times
NEVER = 10**7  # an mtbf without failures: a cell has thousands of batches
RARE = 200  # an mtbf at which two failures in a round are rare
OFTEN = MTBFS[1]  # the mtbf of claims about the loss and about all protocols
STEPS = 10  # batches of a worker between two averages
BOUND = 3  # of SSP, clocks
GATE = 4 * N  # updates; without failures no message is that old
RATE = 0.2  # for the mean gradient of all workers, as in peers_or_server
LOSS = 0.5  # the training loss to reach, also by the quick size
E = 2.718281828459045  # the config imports no math
RUNS = {  # label -> title, entry
  "asgd": ("ASGD", dict(recipe="asgd", learning_rate=RATE / N)),
  "gate": (
    "ASGD, gate",
    dict(
      recipe="asgd", learning_rate=RATE / N, gate=dict(max_staleness=GATE)
    ),
  ),
  "ssp": (
    "SSP",
    dict(
      recipe="asgd",
      learning_rate=RATE / N,
      order=dict(name="stale_synchronous", bound=BOUND),
    ),
  ),
  "average": (
    "averaging",
    dict(recipe="model_averaging", steps=STEPS, learning_rate=RATE),
  ),
  "ssgd": ("SSGD", dict(recipe="ssgd", learning_rate=RATE)),
}
TITLES = {label: title for label, (title, _) in RUNS.items()}


def cell(label, mtbf):
  return f"{label}-{mtbf}" if mtbf < NEVER else f"{label}-never"


def cells(*labels, mtbf=OFTEN):
  return [cell(label, mtbf) for label in labels]


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(32,))
  config.runs = ml_collections.ConfigDict(
    {
      cell(label, mtbf): dict(
        entry,
        title=f"{title}, {'never' if mtbf == NEVER else mtbf}",
        durations=dict(
          # Batches vary little: a round without a failure takes about 1.
          name="failing", variation=0.02, mtbf=float(mtbf), mttr=MTTR
        ),
      )
      for label, (title, entry) in RUNS.items()
      for mtbf in (*MTBFS, NEVER)
    },
    sort_keys=False,
  )
  config.workers = (N,)
  # Ten, because the times of failures differ much between seeds.
  config.seeds = tuple(range(10))
  config.batch_size = BATCH
  config.examples = ROUNDS * N * BATCH
  config.evaluations = 2
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden, config.seeds, config.evaluations = (), (0,), 1
    config.examples = 2 * STEPS * N * BATCH  # two rounds of averaging
    config.only = [
      cell(label, mtbf) for label in RUNS for mtbf in (OFTEN, NEVER)
    ]
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


# Explanations of verdicts, from the numbers of the full run.
NOTES = {
  "rare failures cost SSGD more": (
    "SSGD keeps 0.72 of its throughput in the geometric mean, and 0.71 by the"
    " closed form. 800 rounds have so few failures that seeds differ by a"
    " tenth."
  ),
}


# Computed values. A batch takes time 1, M is the MTBF and R the MTTR.


def availability(mtbf):
  """Returns the fraction of time in which a worker works: M / (M + R)."""
  return mtbf / (mtbf + MTTR)


def asynchronous_throughput(mtbf):
  """Returns the throughput of a worker that never waits: the inverse of the
  mean time of a batch that starts again at each failure."""
  return 1 / ((mtbf + MTTR) * (E ** (1 / mtbf) - 1))


def stall(mtbf):
  """Returns the mean time by which failures delay a round of one batch.

  A batch fails k times with p^k, p = 1 - exp(-1 / M), and each failure costs R
  and half a batch. The round waits for the worker with the most failures.
  """
  p = 1 - E ** (-1 / mtbf)
  most = sum(1 - (1 - p**k) ** N for k in range(1, 20))
  return (MTTR + 0.5) * most


def throughput_claims():
  pairs = [(f"asgd-{mtbf}", mtbf) for mtbf in MTBFS]
  common = dict(kind="ratio", column="speed", to="asgd-never")
  for run, mtbf in pairs:
    yield dict(
      common,
      name=f"survivors, MTBF {mtbf}",
      says=(
        "the throughput of ASGD is that of the workers at work, MTBF / (MTBF +"
        f" MTTR) = {availability(mtbf):.3f}, within a twentieth"
      ),
      of=run,
      above=0.95 * availability(mtbf),
      below=1.05 * availability(mtbf),
    )
  # At an MTBF of 20 repeated batches cost 2.5 %.
  for run, mtbf in pairs[:2]:
    yield dict(
      common,
      name=f"survivors and lost batches, MTBF {mtbf}",
      says=(
        "if the time of repeated batches is counted as lost, it is"
        f" {asynchronous_throughput(mtbf):.3f}, within 2 %"
      ),
      of=run,
      above=0.98 * asynchronous_throughput(mtbf),
      below=1.02 * asynchronous_throughput(mtbf),
    )


def round_claims():
  for mtbf in MTBFS[:-1]:
    yield dict(
      name=f"SSGD stalls, MTBF {mtbf}",
      says=(
        "a round waits for its last replacement: failures add"
        f" {stall(mtbf):.2f} batch times to its mean time, within a fifth"
      ),
      kind="difference",
      column="round",
      of=f"ssgd-{mtbf}",
      to="ssgd-never",
      above=0.8 * stall(mtbf),
      below=1.2 * stall(mtbf),
    )


def order_claims():
  def faster(name, says, of, to, column="speed", **bounds):
    return dict(
      name=name, says=says, kind="ratio", column=column, of=of, to=to, **bounds
    )

  yield faster(
    "asynchrony multiplies the throughput",
    f"at an MTBF of {MTBFS[0]} ASGD computes over 2.5 times as many examples in"
    " a unit of time as SSGD",
    *(f"asgd-{MTBFS[0]}", f"ssgd-{MTBFS[0]}"),
    above=2.5,
  )
  yield faster(
    "rare failures cost SSGD more",
    f"even at an MTBF of {RARE} SSGD loses over a quarter of its throughput",
    *(f"ssgd-{RARE}", "ssgd-never"),
    below=0.75,
  )
  yield faster(
    "and ASGD little",
    f"at an MTBF of {RARE} ASGD loses less than a tenth (computed:"
    f" {1 - availability(RARE):.3f})",
    *(f"asgd-{RARE}", "asgd-never"),
    above=0.9,
  )
  yield dict(
    name="averaging is between",
    says=(
      f"at an MTBF of {OFTEN} the throughput of averaging, which waits after"
      f" {STEPS} batches, is above that of SSGD and below that of ASGD"
    ),
    kind="ordering",
    order="rises",
    column="speed",
    runs=cells("ssgd", "average", "asgd"),
  )
  yield dict(
    name="SSP is between",
    says=(
      f"at an MTBF of {OFTEN} the throughput of SSP with s = {BOUND} is above"
      " that of SSGD and below that of ASGD"
    ),
    kind="ordering",
    order="rises",
    column="speed",
    runs=cells("ssgd", "ssp", "asgd"),
  )
  yield faster(
    "time to loss",
    f"at an MTBF of {MTBFS[0]} ASGD reaches a training loss of {LOSS} over 2"
    " times sooner than SSGD",
    *(f"ssgd-{MTBFS[0]}", f"asgd-{MTBFS[0]}"),
    column="time to loss",
    above=2.0,
  )


def loss_claims():
  for label, title in TITLES.items():
    if label == "ssgd":
      continue
    yield dict(
      name=f"loss of {title}",
      says=(
        f"an MTBF of {OFTEN} leaves the final test loss within 0.02 nats of"
        " that without failures"
      ),
      kind="difference",
      column="test_loss",
      of=cell(label, OFTEN),
      to=cell(label, NEVER),
      above=-0.02,
      below=0.02,
    )
  yield dict(
    name="loss of SSGD",
    says=(
      "rounds take longer, but compute the same: the test loss is equal, but"
      " for the rounding of sums"
    ),
    kind="difference",
    column="test_loss",
    of=[f"ssgd-{mtbf}" for mtbf in MTBFS],
    to="ssgd-never",
    above=-1e-3,
    below=1e-3,
  )
  yield dict(
    name="messages beyond the gate",
    says=(
      f"at an MTBF of {OFTEN} a gate at a staleness of {GATE} drops the"
      " messages of replacements: 1 / MTBF of all, within a fifth"
    ),
    kind="bound",
    column="accepted",
    of=cell("gate", OFTEN),
    above=1 - 1.2 / OFTEN,
    below=1 - 0.8 / OFTEN,
  )


def claims():
  return [
    *(*throughput_claims(), *round_claims()),
    *(*order_claims(), *loss_claims()),
  ]


def panels():
  by_mtbf = dict(
    xlabel="MTBF (batches)",
    xlog=True,
    series={
      TITLES[label]: [(mtbf, cell(label, mtbf)) for mtbf in MTBFS]
      for label in RUNS
    },
  )
  computed_style = dict(line=":", marker="")
  return [
    dict(
      by_mtbf,
      title="goodput",
      column="speed",
      ylabel="of the work of 8 workers (%)",
      # From examples in a unit of time to percent.
      scale=100.0 / (BATCH * N),
      published=[
        dict(
          computed_style,
          title="MTBF / (MTBF + MTTR)",
          source="computed: the availability of a worker",
          points=[(mtbf, 100 * availability(mtbf)) for mtbf in MTBFS],
          of=TITLES["asgd"],
        ),
        dict(
          computed_style,
          title="rounds of SSGD",
          source=(
            "computed: 1 / (1 + (MTTR + 1/2) sum over k of 1 - (1 - p^k)^N), p"
            " = 1 - exp(-1 / MTBF)"
          ),
          points=[(mtbf, 100 / (1 + stall(mtbf))) for mtbf in MTBFS],
          of=TITLES["ssgd"],
        ),
      ],
    ),
    dict(
      by_mtbf, title="final test loss", column="test_loss", ylabel="nats"
    ),
    dict(
      by_mtbf,
      title="time",
      column="time to loss",
      ylabel=f"time to loss {LOSS}",
      yscale="log",
    ),
    dict(
      by_mtbf,
      title="largest staleness",
      column="staleness_max",
      ylabel="updates",
      yscale="symlog",
    ),
  ]


def get_figure():
  return dict(
    title="Workers that fail and are replaced",
    paper=(
      "Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section"
      " 4.1: with asynchronous SGD a machine that fails stops itself alone,"
      " with synchronous SGD all; the rates and closed forms are ours"
    ),
    finding=(
      "Without barriers the workers at work keep their throughput, while"
      " rounds wait for replacements; no final loss changes."
    ),
    about=(
      "Eight workers fail after MTBF batches on average, and a replacement"
      f" computes the lost batch again {MTTR:g} batch times later, on the"
      " parameters of the lost batch. The goodput is the throughput in percent"
      " of eight workers that never fail or wait."
    ),
    columns={
      "speed": dict(kind="quotient", of="examples", by="simulated_time"),
      "round": dict(kind="quotient", of="simulated_time", by="updates"),
      "time to loss": dict(kind="reach", loss=LOSS),
    },
    claims=claims(),
    notes=NOTES,
    panels=panels(),
    quick={
      "seeds": (0, 1, 2, 3, 4),
      "examples": 200 * N * BATCH,
      "only": [
        cell(label, mtbf)
        for label in RUNS
        for mtbf in (*MTBFS[:3], NEVER)
      ],
    },
    tuned=(
      "nothing: the rates are those of peers_or_server, for the mean gradient"
      " of all workers, and an eighth of it for a single message"
    ),
  )
