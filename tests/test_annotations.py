"""Each public function says the types of its arguments and of what it returns,
so that a user's type checker and editor know them."""

import ast

import kit

FILES = sorted(
  path
  for room in ("asgd", "pipeline")
  for path in (kit.ROOT / room).rglob("*.py")
)
_OF_CLASSES = "__init__", "__call__"


def missing(source):
  """Yields (function, argument) without an annotation; "" is what it returns.
  Private names and classes are left out."""
  for node in ast.parse(source).body:
    is_class = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    for function in node.body if is_class else [node]:
      if not isinstance(function, ast.FunctionDef):
        continue
      name, given = function.name, function.args
      if name.startswith("_") and not (is_class and name in _OF_CLASSES):
        continue
      several = [arg for arg in (given.vararg, given.kwarg) if arg]
      arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *several]
      static = {getattr(x, "id", "") for x in function.decorator_list}
      for argument in arguments[is_class and "staticmethod" not in static :]:
        if argument.annotation is None:
          yield name, argument.arg
      if function.returns is None and name != "__init__":
        yield name, ""


def test_public_functions_are_annotated():
  assert len(FILES) > 300
  found = {str(path): list(missing(path.read_text())) for path in FILES}
  assert {path: names for path, names in found.items() if names} == {}


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
