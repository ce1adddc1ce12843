"""What every recipe, transform, order, clock and schedule says of itself: each
argument by its name, a source or that there is none, the equation where the
source is a paper, and an example that can be copied. That the examples are
right is checked where they stand, by --doctest-modules."""

import ast
import builtins
import doctest
import inspect
import re
import types

import pytest

from asgd import algorithms, compression, orders, transforms
from asgd.orders import durations, makers
from asgd.pipeline import schedules


def functions_of(module):
  """The functions of a module by their names, also those of its parts."""
  return {
    name: value
    for name, value in vars(module).items()
    if isinstance(value, types.FunctionType) and not name.startswith("_")
  }


def own(module):
  """The functions that a module defines itself."""
  return {
    name: function
    for name, function in functions_of(module).items()
    if function.__module__ == module.__name__
  }


WITH_EQUATIONS = {
  **{f"algorithms.{k}": v for k, v in algorithms.ALL.items()},
  **{f"transforms.{k}": v for k, v in functions_of(transforms).items()},
  **{f"schedules.{k}": v for k, v in schedules.SCHEDULES.items()},
  "schedules.fill": schedules.fill,
  **{f"compression.{k}": v for k, v in compression.CODECS.items()},
  **{f"reducers.{k}": v for k, v in compression.REDUCERS.items()},
}
_COMPOSE = "average", "clip", "error_feedback", "named", "named_reducer"
DOCUMENTED = {
  **WITH_EQUATIONS,
  **{f"compression.{k}": getattr(compression, k) for k in _COMPOSE},
  **{f"orders.{k}": v for k, v in own(makers).items()},
  "orders.backup_tasks": orders.backup_tasks,
  "orders.with_stops": orders.with_stops,
  **{f"durations.{k}": v for k, v in own(durations).items()},
}

SECTION = re.compile(r"^(Args|Returns|Raises|Source|Example):$", re.MULTILINE)
ARGUMENT = re.compile(r"^  (\*{0,2}\w+(?:, \w+)*): ", re.MULTILINE)
YEAR = re.compile(r"\b(19|20)\d\d\b")


def sections(function):
  """The text of a docstring before its sections, and theirs by their names."""
  first, *rest = SECTION.split(inspect.getdoc(function) or "")
  return first, dict(zip(rest[::2], rest[1::2], strict=True))


def unbound(source):
  """The names that a piece of code reads and does not bind."""
  read, bound = set(), set(dir(builtins))
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Name):
      (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
    elif isinstance(node, ast.alias):
      bound.add((node.asname or node.name).partition(".")[0])
    elif isinstance(node, ast.arg):
      bound.add(node.arg)
    elif isinstance(node, ast.FunctionDef | ast.ExceptHandler):
      bound.add(node.name)
  return read - bound


def missing(function, *, equation=False):
  """What a docstring leaves out, in words."""
  text, parts = sections(function)
  summary, _, rest = text.partition("\n")
  if not summary.endswith(".") or rest.partition("\n")[0]:
    yield "a summary of one line"
  if "Returns" not in parts:
    yield "Returns"
  named = {
    name.strip().lstrip("*")
    for names in ARGUMENT.findall(parts.get("Args", ""))
    for name in names.split(",")
  }
  takes = set(inspect.signature(function).parameters)
  yield from (f"the argument {name}" for name in sorted(takes - named))
  yield from (f"no argument {name}" for name in sorted(named - takes))
  source = parts.get("Source", "").strip()
  if not source.startswith("none") and not YEAR.search(source):
    yield "a source with its year, or `none`"
  elif equation and not source.startswith("none") and "\n\n  " not in text:
    yield "the equation of its source, indented by two spaces"
  examples = doctest.DocTestParser().get_examples(parts.get("Example", ""))
  if not any(example.want for example in examples):
    yield "an example with its output"
  if any(doctest.SKIP in example.options for example in examples):
    yield "an example that is not skipped"
  names = unbound("".join(example.source for example in examples))
  yield from (f"an import of {name}" for name in sorted(names))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_docstring_leaves_nothing_out(name):
  equation = name in WITH_EQUATIONS
  assert list(missing(DOCUMENTED[name], equation=equation)) == []


def test_all_that_is_registered_is_looked_at():
  assert {"algorithms.asgd", "transforms.scale_by_sent_rate"} <= set(DOCUMENTED)
  assert {"schedules.custom", "durations.gamma"} <= set(DOCUMENTED)
  public = {f"orders.{name}" for name in vars(makers)["_MAKERS"]}
  assert public | {"orders.build", "orders.named", "orders.start"} == {
    name for name in DOCUMENTED if name.startswith("orders.")
  }
  assert public <= {f"orders.{name}" for name in functions_of(orders)}


def bare(rate, *steps, **options):
  return rate, steps, options


def documented(rate):
  """Returns a rate.

    r = r

  Args:
    rate: of anything.

  Returns:
    It.

  Source:
    Somebody 2020.

  Example:
    >>> import math
    >>> math.floor(1.5)
    1
  """
  return rate


@pytest.mark.parametrize(
  "old, new, words",
  [
    ("Returns a rate.\n", "Returns a rate\n", ["a summary of one line"]),
    ("Returns:", "Gives:", ["Returns"]),
    ("  rate: of", "  rates: of", ["the argument rate", "no argument rates"]),
    ("2020", "some day", ["a source with its year, or `none`"]),
    ("  r = r", "r = r", ["the equation of its source, indented by two"]),
    ("Somebody 2020.\n", "none.\n", []),
    ("\n  1", "", ["an example with its output"]),
    ("(1.5)", "(1.5)  # doctest: +SKIP", ["an example that is not skipped"]),
    ("import math", "import cmath", ["an import of math"]),
  ],
)
def test_what_is_left_out_is_named(old, new, words):
  def changed(rate):
    return rate

  text = inspect.cleandoc(documented.__doc__)
  assert list(missing(documented, equation=True)) == []
  assert old in text
  changed.__doc__ = text.replace(old, new)
  found = list(missing(changed, equation=True))
  assert [word[: len(w)] for word, w in zip(found, words, strict=True)] == words


def test_a_function_without_a_docstring_lacks_everything():
  assert list(missing(bare)) == [
    "a summary of one line",
    "Returns",
    *("the argument options", "the argument rate", "the argument steps"),
    "a source with its year, or `none`",
    "an example with its output",
  ]
