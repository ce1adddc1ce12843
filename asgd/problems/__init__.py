"""Problems: what is trained, as functions.

A `Problem` joins data and model: initial parameters, a loss on a batch, an
evaluation, and batches as a function of (worker, job). A runtime sees nothing
else of either.
"""

from asgd.problems.problem import (
  Batches,
  Evaluation,
  Keyed,
  Pieces,
  Problem,
  Updates,
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
