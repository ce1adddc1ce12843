"""Problems: training tasks.

A `Problem` joins data and model: initial parameters, a loss on a batch, an
evaluation, and batches as a function of (worker, job). Runtimes access data and
model only by a Problem.

    data, layers -> tasks.classification(...) -> Problem -> runtime

`tasks.py` has problems with a model and a gradient. `factorisation`,
`embeddings`, `topics`, `clustering` and `sparse_logistic` train tables; `own`
reads a user's loss and data. Begin with `problem.py`.
"""

from asgd.problems.problem import (
  Batches,
  Evaluation,
  Keyed,
  Pieces,
  Problem,
  Updates,
  carrying,
  dtype_of,
  whole_loss,
)
from asgd.problems.tasks import (
  classification,
  classify_sentences,
  language,
  quadratic,
  regression,
)
