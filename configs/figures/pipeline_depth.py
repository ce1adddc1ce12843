"""Pipelines without a flush: what depth costs, and which optimizers bear it.

A GPT on Python's language reference in 2, 4, 8 and 16 stages. PipeDream stashes
weights, or uses the latest in the backward, or predicts them; PipeDream-2BW is
one update late at every depth. SGD, AdamW and Muon are compared with and
without a delay of one update. After Narayanan et al., "Memory-efficient
pipeline-parallel DNN training" (2BW), ICML 2021, arXiv 2006.09503, and Zmushko
et al., "One-step gradient delay is not a barrier for large-scale asynchronous
pipeline parallel LLM pretraining", ICML 2026, arXiv 2606.30634.

  asgd reproduce pipeline_depth
  python -m launch.train --config=configs/figures/pipeline_depth.py

95 cells, an hour on two cores; --quick under 3 minutes.
"""

import ml_collections

DEPTHS = 2, 4, 8, 16
MICROBATCHES = 16  # per update of GPipe and 2BW
MIDDLE_DEPTH = 4  # stages of the runs that compare optimizers
KINDS = {  # label -> title, keys
  "stash": ("stash", dict(schedule="pipedream")),
  "latest": ("latest weights", dict(schedule="pipedream", weights="latest")),
  "predicted": ("predicted", dict(schedule="pipedream", predict=True)),
  "2bw": ("2BW", dict(schedule="pipedream_2bw", every=MICROBATCHES)),
}
# label -> title, keys. Rates are per microbatch; GPipe and 2BW multiply them by
# 16.
OPTIMIZERS = {
  "sgd": ("SGD", dict(momentum=0.9, learning_rate=0.1 / MICROBATCHES)),
  "adamw": (
    "AdamW", dict(optimizer="adamw", learning_rate=0.003 / MICROBATCHES)
  ),
  "muon": ("Muon", dict(optimizer="muon", learning_rate=0.01 / MICROBATCHES)),
}


def label(kind, depth):
  return f"{kind}-{depth}"


def depths_of(kind):
  """Returns the depths of a kind: all, or the smallest and the largest."""
  return DEPTHS if kind in ("stash", "2bw") else (DEPTHS[0], DEPTHS[-1])


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="pydoc", context=32)
  # 14 blocks, embedding and head are 16 layers, for up to 16 stages.
  config.model = dict(name="gpt", depth=14, width=32, heads=2)
  config.engine = "pipeline"
  config.pipeline = dict(
    stages=2, cuts="parameters", microbatches=MICROBATCHES
  )
  sgd = OPTIMIZERS["sgd"][1]
  runs = {}
  for kind, (title, keys) in KINDS.items():
    for depth in depths_of(kind):
      runs[label(kind, depth)] = dict(
        keys, recipe="asgd", stages=depth, title=f"{title}, {depth} stages"
      ) | dict(sgd)
  for depth in DEPTHS[:3]:  # 16 stages would idle for half of the time
    runs[label("gpipe", depth)] = dict(
      recipe="asgd", schedule="gpipe", stages=depth, **sgd,
      title=f"GPipe, {depth} stages",
    )
  for name in ("adamw", "muon"):
    title, keys = OPTIMIZERS[name]
    for kind in ("gpipe", "2bw"):
      schedule = dict(schedule="gpipe") if kind == "gpipe" else KINDS[kind][1]
      runs[f"{kind}-{name}"] = dict(
        schedule, recipe="asgd", stages=MIDDLE_DEPTH, title=f"{kind}, {title}"
      ) | dict(keys)
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 2  # per microbatch: an update has 32 windows
  config.examples = 1536  # 48 updates of 16 microbatches
  config.learning_rate_schedule = dict(warmup_examples=256)
  config.clip_norm = 1.0
  config.curvature_checks = 0
  config.evaluations = 4
  config.evaluation_examples = 64
  config.on_nan = "record"
  if arg == "tiny":
    # XLA compiles an MLP in a fraction of the time of a GPT.
    config.data, config.evaluation_examples = dict(name="digits"), 4
    config.model = dict(name="mlp", hidden=(8,))
    config.seeds, config.examples, config.evaluations = (0,), 64, 1
    config.learning_rate_schedule = dict()
    config.only = [label(kind, 2) for kind in (*KINDS, "gpipe")]
    config.only += ["2bw-muon"]
    config.runs["2bw-muon"].stages = 2
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def bubble(depth):
  """Returns GPipe's bubble: (p - 1) / (m + p - 1), p stages, m microbatches."""
  return (depth - 1) / (MICROBATCHES + depth - 1)


def claims():
  least, most = DEPTHS[0], DEPTHS[-1]
  for kind in ("stash", "latest"):
    yield dict(
      name=f"depth costs, {KINDS[kind][0]}",
      says=f"the test loss at {most} stages is above that at {least}",
      kind="ordering",
      order="rises",
      column="test_loss",
      runs=[label(kind, least), label(kind, most)],
    )
  yield dict(
    name="depth costs nothing, 2BW",
    says=f"at {most} stages the loss is within 0.02 nats of that at {least}",
    kind="difference",
    column="test_loss",
    of=[label("2bw", most)],
    to=[label("2bw", least)],
    above=-0.02,
    below=0.02,
  )
  yield dict(
    name="prediction helps",
    says=f"predicted weights have a lower test loss at {most} stages",
    kind="ordering",
    order="falls",
    column="test_loss",
    runs=[label("stash", most), label("predicted", most)],
  )
  for name, bounds, says in (
    ("adamw", dict(above=0.02), "over 0.02 nats above that without"),
    ("muon", dict(below=0.02), "less than 0.02 nats above that without"),
  ):
    # By Zmushko et al., one update of delay raises AdamW's loss, not Muon's.
    yield dict(
      name=f"one step of delay, {OPTIMIZERS[name][0]}",
      says=f"with a delay of one update the test loss is {says}",
      kind="difference",
      column="test_loss",
      of=[f"2bw-{name}"],
      to=[f"gpipe-{name}"],
      **bounds,
    )
  for depth in DEPTHS[:3]:
    yield dict(
      name=f"bubble of GPipe, {depth} stages",
      says=(
        "predicted from measured durations, it is (p - 1) / (m + p - 1) ="
        f" {bubble(depth):.3f}, within 0.05"
      ),
      kind="bound",
      column="bubble_predicted",
      of=[label("gpipe", depth)],
      above=bubble(depth) - 0.05,  # durations are measured, so they vary
      below=bubble(depth) + 0.05,
    )


def panels():
  by_depth = dict(xlabel="stages", xlog=True)
  return [
    dict(
      by_depth,
      title="test loss",
      column="test_loss",
      ylabel="nats",
      series={
        title: [(depth, label(kind, depth)) for depth in depths_of(kind)]
        for kind, (title, _) in KINDS.items()
      },
    ),
    dict(
      title=f"delay of one update, {MIDDLE_DEPTH} stages",
      column="test_loss",
      xlabel="updates of delay",
      ylabel="nats",
      series={
        title: [(0, gpipe), (1, late)]  # GPipe has no delay
        for title, gpipe, late in (
          ("SGD", *(label(kind, MIDDLE_DEPTH) for kind in ("gpipe", "2bw"))),
          ("AdamW", "gpipe-adamw", "2bw-adamw"),
          ("Muon", "gpipe-muon", "2bw-muon"),
        )
      },
    ),
    dict(
      by_depth,
      title=f"bubble of GPipe, {MICROBATCHES} microbatches",
      column="bubble_predicted",
      ylabel="idle time (%)",
      scale=100.0,
      series={"GPipe": [(d, label("gpipe", d)) for d in DEPTHS[:3]]},
      published=[
        dict(
          title="(p - 1) / (m + p - 1)",
          source="Huang et al., GPipe, NeurIPS 2019",
          points=[(d, 100 * bubble(d)) for d in DEPTHS],
          line=":",
          marker="",
        )
      ],
    ),
  ]


def notes():
  """Returns {name of a claim: why it fails}."""
  unequal = (
    "The formula assumes equal stages. Here equal parameters decide the cuts,"
    " and the slowest stage delays every microbatch"
  )
  return {
    f"one step of delay, {OPTIMIZERS['muon'][0]}": (
      "Muon loses less than AdamW, 0.30 against 0.44 nats, but not nothing:"
      " after 48 updates the loss still falls steeply, and the paper trains for"
      " thousands of updates."
    ),
    **{
      f"bubble of GPipe, {depth} stages": (
        f"{unequal}: with 2 stages one takes 1.3 times as long as the other."
      )
      for depth in DEPTHS[:3]
    },
  }


def get_figure():
  return dict(
    title="Depth of pipelines without a flush",
    paper=(
      "Narayanan et al.: Memory-efficient pipeline-parallel DNN training, ICML"
      " 2021, arXiv 2006.09503; Zmushko et al.: One-step gradient delay is not"
      " a barrier, ICML 2026, arXiv 2606.30634"
    ),
    about=(
      "With stashed, latest and predicted weights each microbatch is an update,"
      " with 2BW and GPipe 16 microbatches. Stage s of p is p - 1 - s updates"
      " late, with 2BW one update."
    ),
    columns={},
    claims=list(claims()),
    panels=panels(),
    notes=notes(),
    finding=(
      "From 2 to 16 stages PipeDream's loss rises by 0.4 nats, with stashed or"
      " latest weights. One update of delay costs AdamW more than Muon, but not"
      " nothing. Whether prediction helps, and whether 2BW loses nothing, is"
      " open."
    ),
    quick={
      "examples": 256,  # 8 updates
      "evaluations": 1,
      "model.depth": 2,  # with embedding and head enough for 4 stages
      "only": [
        label("stash", 2),
        *(label(kind, 4) for kind in ("stash", "2bw", "gpipe")),
        *(
          f"{kind}-{name}"
          for kind in ("gpipe", "2bw")
          for name in ("adamw", "muon")
        ),
      ],
    },
    tuned=(
      "rates per update on seed 100 without delay (one worker, batch 32): for"
      " SGD 0.1 of 0.05, 0.1 and 0.2, for AdamW 0.003 of 0.001, 0.003 and 0.01,"
      " for Muon 0.01 of 0.003, 0.01 and 0.03"
    ),
  )
