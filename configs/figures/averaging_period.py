"""Parameter averaging: how rarely workers may average, and their momentum.

Eight workers take H = 1 to 100 steps of SGD with momentum between two averages
of their parameters. At an average a worker keeps its momentum, resets it, or
averages it, too; with SlowMo the averages have a momentum. After Stich,
"Local SGD converges fast and communicates little", ICLR 2019, arXiv 1805.09767,
and Wang, Tantia, Ballas and Rabbat, "SlowMo", ICLR 2020, arXiv 1910.00643.

  asgd reproduce averaging_period
  python -m launch.train --config=configs/figures/averaging_period.py

110 cells; --quick, on handwritten digits, under 3 minutes on two cores.
"""

import ml_collections

WORKERS = 8
PERIODS = 1, 5, 10, 20, 50, 100  # H, steps between two averages
STATES = "kept", "reset", "averaged"  # a worker's momentum after an average
FLAT = 10, 20  # periods that are claimed to cost nothing
SLOW = 10, 20, 50, 100  # periods of SlowMo
RATE, MOMENTUM = 0.02, 0.9  # tuned below; the same for all periods


# Explanations of verdicts, from the numbers of the full run.
NOTES = {
  "then worse, reset": (
    "With its momentum reset at every average, H = 1 is SGD without momentum,"
    " which all other periods beat: the loss at H = 100 is 0.85 times that."
  ),
  f"traffic, H = {PERIODS[-1]}": (
    "Only whole rounds are sent, and 9 rounds of 100 steps fit into the 937"
    " steps of a worker: it is 1 / 104."
  ),
}


def label(state, period):
  return f"{state}-{period}"


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="fashion")
  config.model = dict(name="mlp", hidden=(64,))
  runs = {}
  for period in PERIODS:
    for state in STATES:
      runs[label(state, period)] = dict(
        recipe="model_averaging",
        steps=period,
        optimizer_state=state,
        momentum=MOMENTUM,
        title=f"H = {period}, momentum {state}",
      )
    if period in SLOW:
      runs[label("slowmo", period)] = dict(
        recipe="slowmo",
        steps=period,
        momentum=MOMENTUM,
        title=f"H = {period}, SlowMo",
      )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.workers = (WORKERS,)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 32
  # Four epochs are 937 steps per worker: 9 rounds at H = 100.
  config.epochs = 4.0
  config.learning_rate = RATE
  config.evaluations = 8
  config.evaluation_examples = 2000
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.data.name, config.model.hidden = "digits", ()
    config.workers, config.seeds, config.batch_size = (2,), (0,), 8
    config.examples, config.evaluations = 400, 1
    # H = 5 has several rounds in 400 examples.
    config.only = [label(state, 5) for state in STATES]
    config.only += [label("slowmo", 10), label("averaged", 1)]
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def compared(name, says, of, to, **bounds):
  return dict(
    name=name,
    says=says,
    kind="ratio",
    column="test_loss",
    of=of,
    to=to,
    **bounds,
  )


def claims():
  least, most = PERIODS[0], PERIODS[-1]
  for state in STATES:
    yield compared(
      f"flat, {state}",
      "at H = 10 and 20 the test loss is at most a twentieth above that of H ="
      " 1",
      [label(state, period) for period in FLAT],
      [label(state, least)],
      below=1.05,
    )
    yield compared(
      f"then worse, {state}",
      f"at H = {most} the test loss is over a twentieth above that of H = 1",
      [label(state, most)],
      [label(state, least)],
      above=1.05,
    )
  for period in (*FLAT, most):
    yield compared(
      f"averaging the state helps, H = {period}",
      "with averaged momentum the test loss is lower than with kept or reset"
      " momentum",
      [label("averaged", period)],
      [label("kept", period), label("reset", period)],
      below=1.0,
    )
    yield compared(
      f"SlowMo helps, H = {period}",
      "SlowMo, which resets the momentum, has a lower loss than reset alone",
      [label("slowmo", period)],
      [label("reset", period)],
      below=1.0,
    )
  for period in (10, most):
    yield dict(
      name=f"traffic, H = {period}",
      says=f"the bytes are 1 / {period} of those of H = 1, within 2 %",
      kind="ratio",
      column="bytes_up",
      # Each average sends the parameters once, for every H.
      of=[label("kept", period)],
      to=[label("kept", least)],
      above=0.98 / period,
      below=1.02 / period,
    )
  yield dict(
    name="traffic of the state",
    says="averaging the momentum doubles the bytes",
    kind="ratio",
    column="bytes_up",
    of=[label("averaged", 10)],
    to=[label("kept", 10)],
    # Twice: parameters and momentum; headers are not doubled.
    above=1.95,
    below=2.05,
  )


def panels():
  series = {
    f"momentum {state}": [(p, label(state, p)) for p in PERIODS]
    for state in STATES
  }
  # SlowMo at H = 1 would be another algorithm, so it begins at 10.
  series["SlowMo"] = [(p, label("slowmo", p)) for p in SLOW]
  by_period = dict(xlabel="H, steps between averages", xlog=True, series=series)
  return [
    dict(by_period, title="test loss", column="test_loss", ylabel="nats"),
    dict(
      by_period,
      title="test accuracy",
      column="test_accuracy",
      ylabel="accuracy (%)",
      scale=100.0,
    ),
    dict(
      by_period,
      title="traffic up",
      column="bytes_up",
      ylabel="MB",
      scale=1e-6,
      yscale="log",
    ),
    dict(
      by_period,
      title="accuracy by traffic up",
      column="test_accuracy",
      ylabel="accuracy (%)",
      scale=100.0,
      xcolumn="bytes_up",  # the x of a cell is its traffic
      xscale=1e-6,
      xlabel="MB",
    ),
  ]


def get_figure():
  return dict(
    title="How rarely parameters may be averaged",
    paper=(
      "Stich: Local SGD converges fast and communicates little, ICLR 2019,"
      " arXiv 1805.09767; Wang, Tantia, Ballas, Rabbat: SlowMo, ICLR 2020,"
      " arXiv 1910.00643"
    ),
    finding=(
      "Averaging every 10 or 20 steps costs no loss, and SlowMo helps; that"
      " 100 steps are too many does not show in four epochs."
    ),
    about=(
      "Eight workers with equally many batches in all; the last average is of"
      " the last whole round. SlowMo has beta = 0.5 and resets the momentum."
    ),
    columns={},
    claims=list(claims()),
    notes=NOTES,
    panels=panels(),
    quick={"data.name": "digits", "epochs": 40.0, "batch_size": 8},
    tuned=(
      "the rate on seeds 100 and 101 at H = 1 and 20 with kept momentum: of"
      " 0.02, 0.05, 0.1 and 0.2 the two smallest are equally good at H = 1, and"
      " 0.02 is better at 20"
    ),
  )
