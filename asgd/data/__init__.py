"""Data: image sets, text and sentences, and batches as pure functions.

    load("fashion") -> Dataset;   make_batches(images, labels, ...)(worker, job)

`load` reads an image set, `from_arrays` makes one from arrays, and
`make_batches` divides any arrays of examples into batches. `columns` reads a
Hugging Face data set, `iterators` the batches of a user's iterators. Characters
are in `asgd.data.text`, sentences in `asgd.data.sentences`; `ratings`,
`documents`, `words` and `sparse` are for problems on tables. Begin with
`batches.py`.
"""

from asgd.data import columns
from asgd.data.batches import ExampleBatches, augment, make_batches
from asgd.data.download import DataError
from asgd.data.images import DATASETS, Dataset, load
from asgd.data.own import as_dataset, from_arrays
from asgd.data.sentences import Sentences
from asgd.data.text import Text
