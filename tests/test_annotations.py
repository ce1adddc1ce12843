"""Each public function says the types of its arguments and of what it returns,
so that a user's type checker and editor know them. So does each long private
function, for those who read the code; it also has a docstring."""

import ast

import kit

FILES = sorted(
  path
  for room in ("asgd", "pipeline", "launch")
  for path in (kit.ROOT / room).rglob("*.py")
)
_OF_CLASSES = "__init__", "__call__"
_SHORT = 5  # lines of a private function that may lack both


def _without_types(function, *, is_method):
  """Yields arguments without an annotation; "" is what the function returns."""
  given = function.args
  several = [arg for arg in (given.vararg, given.kwarg) if arg]
  arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *several]
  static = {getattr(x, "id", "") for x in function.decorator_list}
  for argument in arguments[is_method and "staticmethod" not in static :]:
    if argument.annotation is None:
      yield argument.arg
  if function.returns is None and function.name != "__init__":
    yield ""


def missing(source):
  """Yields (function, argument) without an annotation; "" is what it returns.
  Private names and classes are left out."""
  for node in ast.parse(source).body:
    is_class = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    for function in node.body if is_class else [node]:
      if not isinstance(function, ast.FunctionDef):
        continue
      name = function.name
      if name.startswith("_") and not (is_class and name in _OF_CLASSES):
        continue
      for argument in _without_types(function, is_method=is_class):
        yield name, argument


def missing_in_private(source):
  """Yields (function, argument), as `missing` does, of the private functions
  and methods that are not short; (function, "docstring") if it has none."""
  for node in ast.walk(ast.parse(source)):
    if not isinstance(node, ast.Module | ast.ClassDef):
      continue
    for function in node.body:
      if not isinstance(function, ast.FunctionDef):
        continue
      name, is_method = function.name, isinstance(node, ast.ClassDef)
      if not name.startswith("_") or name.startswith("__"):
        continue
      if function.end_lineno - function.lineno + 1 <= _SHORT:
        continue
      for argument in _without_types(function, is_method=is_method):
        yield name, argument
      if not ast.get_docstring(function):
        yield name, "docstring"


def _found(search):
  found = {str(path): list(search(path.read_text())) for path in FILES}
  return {path: names for path, names in found.items() if names}


def test_public_functions_are_annotated():
  assert len(FILES) > 300
  assert _found(missing) == {}


def test_long_private_functions_are_annotated_and_have_docstrings():
  assert _found(missing_in_private) == {}


def test_what_lacks_an_annotation_is_named():
  source = """
def f(a: int, b, *c, d=1, **e) -> int: ...
def g(a: int): ...
def _h(a): ...
class A:
  def __init__(self, a): ...
  def __call__(self) -> int: ...
  def i(self) -> int: ...
  @staticmethod
  def j(a): ...
class _B:
  def k(self, a): ...
"""
  assert list(missing(source)) == [
    *(("f", "b"), ("f", "d"), ("f", "c"), ("f", "e"), ("g", "")),
    *(("__init__", "a"), ("j", "a"), ("j", "")),
  ]


def test_what_a_long_private_function_lacks_is_named():
  source = '''
def _short(a):
  1
  2
  3
  4
def _f(a, *, b: int):
  1
  2
  3
  4
  5
def _complete(a: int) -> int:
  """Has both."""
  2
  3
  4
  5
def public(a):
  1
  2
  3
  4
  5
class _A:
  def __init__(self, a):
    1
    2
    3
    4
    5
  def _g(self) -> int:
    1
    2
    3
    4
    5
  @staticmethod
  def _h(a) -> int:
    """Lacks a type."""
    2
    3
    4
    5
'''
  assert list(missing_in_private(source)) == [
    *(("_f", "a"), ("_f", ""), ("_f", "docstring")),
    *(("_g", "docstring"), ("_h", "a")),
  ]
