"""Data: image sets, text and sentences, and batches as pure functions.

`load` reads an image set, `from_arrays` makes one of arrays, and `make_batches`
cuts any arrays of examples into batches; characters are in `asgd.data.text`,
sentences in `asgd.data.sentences`.
"""

from asgd.data.batches import ExampleBatches, augment, make_batches
from asgd.data.download import DataError
from asgd.data.images import DATASETS, Dataset, load
from asgd.data.own import as_dataset, from_arrays
from asgd.data.sentences import Sentences
from asgd.data.text import Text
