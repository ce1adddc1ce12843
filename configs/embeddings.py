"""Word embeddings on a parameter server; workers pull the rows of a batch.

Skip-gram with negative sampling on words of Python's manual. 4 simulated
workers pull the rows of their pairs and negatives, by SSP and ESSP; one worker
uses plain SGD. All end at a test loss of 2.68 to 2.69. The variant `file`
trains on the text in the file --data_dir.

  python -m launch.train --config=configs/embeddings.py
  python -m launch.train --config=configs/embeddings.py:file --data_dir=FILE
"""

import ml_collections

VARIANTS = {
  "file": dict(problem=dict(text="file")),
  "tiny": dict(
    problem=dict(dimension=4, most=200),
    workers=(2,),
    seeds=(0,),
    epochs=0.02,
    evaluations=1,
  ),
}


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.problem = dict(
    name="asgd.problems.embeddings:skip_gram", dimension=32
  )
  config.runs = dict(
    sgd=dict(recipe="asgd", title="one worker, SGD", workers=(1,)),
    ssp=dict(recipe="table", consistency="ssp", bound=3, title="SSP 3"),
    essp=dict(recipe="table", consistency="essp", bound=3, title="ESSP 3"),
  )
  config.workers = (4,)
  config.seeds = (0, 1, 2)
  config.batch_size = 256
  config.epochs = 5.0
  # Large: the loss is a mean over 256 pairs, and few of them contain a word.
  config.learning_rate = 8.0
  # Without this decay, late updates make the loss jump.
  config.learning_rate_schedule = dict(
    decay_epochs=(2.0, 3.5), decay_factor=0.35
  )
  config.evaluations = 10
  config.curvature_checks = 0
  if arg is not None:
    if arg not in VARIANTS:
      raise ValueError(f"unknown variant {arg!r}; known: {', '.join(VARIANTS)}")
    config.update(VARIANTS[arg])
  return config.lock()
