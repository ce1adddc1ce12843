"""Finds words that a stranger must guess: `python tests/prose.py [PATH...]`.

Prose is the text of pages, docstrings and comments, and the strings that users
see: of errors, warnings, log lines, prints and flags. Code between backquotes
and examples are not prose. A word of `DIALECT` has a plain term of the field,
which `docs/glossary.md` gives; one of `UNNAMED` does not name the actor; one of
`OPENING` puts a clause where the name of the thing is needed. "In place" is a
term of the field: a buffer is updated in place. In docstrings and comments a
clause with `whose` becomes a phrase with "with" or "of", or a sentence.
"""

import ast
import functools
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

DIALECT = re.compile(
    r"\b((?<!in )places?|holders?|(?:is|are|was|were|be) told|tells?"
    r"|hears?|heard"
    r"|c[ao]mes? (?:to|of|back)|obey(?:s|ed)?|goes on|go on|gone"
    r"|of (?:its|their) own|(?:is|are) there|to be had|lets"
    r"|what (?:it|a|is|they|follows)|made anew)\b",
    re.IGNORECASE)
# "a worker whose job ends" names the actor; "tells whose it is" does not.
UNNAMED = re.compile(
    r"(?:^|[.;:(]\s*|\b(?:of|to|from|by|with|for|and|or|those|those,|says|see"
    r"|at|in|on|than|not)\s+)(who|whose|whoever)\b"
    r"|\b(whoever|nobody|somebody|anybody|everybody)\b",
    re.IGNORECASE)
# Of docstrings and comments, which are read line by line: marks both.
RELATIVE = re.compile(
    r"\b(who|whose|whoever|nobody|somebody|anybody|everybody)\b", re.IGNORECASE)
OPENING = re.compile(r"^(What|Whatever|That which|Of) ")
SHOWN = {"ValueError", "TypeError", "RuntimeError", "KeyError", "UsageError",
         "print", "warn", "info", "warning", "error", "DEFINE_string",
         "DEFINE_integer", "DEFINE_float", "DEFINE_bool", "DEFINE_boolean",
         "DEFINE_enum", "DEFINE_list", "DEFINE_multi_string"}


def of_page(text: str) -> Iterator[tuple[int, str, re.Pattern]]:
  """Yields (line number, prose, pattern of unnamed actors) of lines."""
  fenced = False
  for number, line in enumerate(text.splitlines(), 1):
    if line.lstrip().startswith("```"):
      fenced = not fenced
    elif not fenced:
      yield number, line, UNNAMED


def of_module(text: str) -> Iterator[tuple[int, str, re.Pattern]]:
  """Yields (line number, prose, pattern of unnamed actors) of docstrings,
  comments and shown strings."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
      doc = ast.get_docstring(node)
      if doc:
        start = node.body[0].lineno
        for shift, line in enumerate(doc.splitlines()):
          if not line.lstrip().startswith((">>>", "...")):
            yield start + shift, line, RELATIVE
    elif isinstance(node, ast.Call):
      called = getattr(node.func, "attr", getattr(node.func, "id", ""))
      if called in SHOWN or called.endswith(("Error", "Warning")):
        for part in ast.walk(node):
          if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.lineno, part.value, UNNAMED
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT and "noqa" not in token.string:
      yield token.start[0], token.string.lstrip("# "), RELATIVE


@functools.cache
def prose(path: pathlib.Path) -> list[tuple[int, str, re.Pattern]]:
  """Returns (line number, prose without its code, pattern of unnamed actors)
  of the lines of a page or a module."""
  read = of_page if path.suffix == ".md" else of_module
  return [
    (number, re.sub(r"`[^`]*`|https?:\S+", "CODE", line), unnamed)
    for number, line, unnamed in read(path.read_text(encoding="utf-8"))
  ]


def files(paths: list[pathlib.Path]) -> Iterator[pathlib.Path]:
  """Yields the pages and modules of files and folders, sorted."""
  for path in paths:
    if path.is_dir():
      yield from sorted(p for p in path.rglob("*")
                        if p.suffix in (".md", ".py"))
    else:
      yield path


def count(paths: list[pathlib.Path]) -> tuple[list[str], int]:
  """Returns a line for each word that is not plain, and the words of all."""
  marks, words = [], 0
  for path in files(paths):
    for number, line, unnamed in prose(path):
      words += len(line.split())
      found = [m.group().lower() for m in DIALECT.finditer(line)]
      found += [m.group(m.lastindex).lower() for m in unnamed.finditer(line)]
      if path.suffix == ".py":
        found += OPENING.findall(line)
      marks += [f"{path}:{number}: {word!r} in {line.strip()[:90]!r}"
                for word in found]
  return marks, words


def main() -> None:
  roots = sys.argv[1:] or ["README.md", "CONTRIBUTING.md", "docs", "asgd",
                           "pipeline", "launch", "configs", "examples"]
  marks, words = count([pathlib.Path(root) for root in roots])
  print("\n".join(marks))
  print(f"{len(marks)} marks in {words} words: "
        f"{1000 * len(marks) / max(words, 1):.1f} in 1,000")


if __name__ == "__main__":
  main()
