"""Topics of documents on a parameter server: LDA by Gibbs sampling.

The table counts how often each word is assigned to each topic. 4 simulated
workers sample topics with counts that are up to 3 clocks old. Documents are
generated from ten known topics, the rows and columns of a grid of words; all
runs find these topics. The variant `pydoc` uses pages of Python's manual, and
`newsgroups` the 20 newsgroups, if scikit-learn has them on disk. Both need
scikit-learn (asgd[sklearn]).

  python -m launch.train --config=configs/lda.py
  python -m launch.train --config=configs/lda.py:pydoc
"""

import ml_collections

VARIANTS = {
  "pydoc": dict(
    problem=dict(
      documents="pydoc", topics=20, alpha=0.1, words=dict(most=2000)
    ),
    seeds=(0,),
  ),
  "newsgroups": dict(
    problem=dict(
      documents="newsgroups", topics=20, alpha=0.1, words=dict(least=20)
    ),
    seeds=(0,),
    batch_size=200,
  ),
  "tiny": dict(
    problem=dict(topics=3), workers=(2,), seeds=(0,), epochs=1.0, evaluations=1
  ),
}


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.problem = dict(
    # alpha: the prior weight of each topic in a document.
    name="asgd.problems.topics:lda", topics=10, alpha=0.3
  )
  config.runs = dict(
    one=dict(
      recipe="table",
      consistency="bulk_synchronous",
      title="one worker",
      workers=(1,),
    ),
    ssp=dict(recipe="table", consistency="ssp", bound=3, title="SSP 3"),
    essp=dict(recipe="table", consistency="essp", bound=3, title="ESSP 3"),
  )
  config.workers = (4,)
  config.seeds = (0, 1, 2)
  config.batch_size = 15  # documents
  config.epochs = 60.0  # sweeps over all documents
  config.evaluations = 10
  config.curvature_checks = 0
  if arg is not None:
    if arg not in VARIANTS:
      raise ValueError(f"unknown variant {arg!r}; known: {', '.join(VARIANTS)}")
    config.update(VARIANTS[arg])
  return config.lock()
