"""The protocols of asgd: one value each, in a module of its name.

`asgd.experiment.protocol` describes the fields of a value, and finds the value
of a run or of a cell's folder.
"""

# No re-exports: `asgd.experiment` imports and registers the values.
