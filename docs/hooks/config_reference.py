"""Writes the keys of a config from the code: the tables of
docs/reference/config.md, and a JSON schema for editors and other programs.

  python docs/hooks/config_reference.py

Keys, types and defaults are from `asgd.experiment.schema` and the sections of
the engines. The page itself has the meaning of each key. It stays as it is
written there, and becomes the description in the JSON schema.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the commands, which have the list of engines
from asgd.experiment import checks, protocol, schema  # noqa: E402
from asgd.text_table import format_markdown  # noqa: E402
from launch.flags import ENGINES  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "config.md"
SCHEMA = PAGE.with_name("config.schema.json")
KEYS = schema.sections(ENGINES)
# A table of the page. It has the keys of a section, those that all engines
# share, or those of some engines.
_TABLE = re.compile(r"(<!-- keys: (\w+) -->\n\n)((?:\|.*\n)*)")
_SHARED, _OF_ENGINES = "shared", "engines"
_ROW = re.compile(r'^\| <a id="config\.([\w.]+)">.* \| (.*) \|$', re.M)
_TO_KEYS = re.compile(r"; \[\w+\]\(#[^)]*\)$")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_WORDS = {
  "string": "text",
  "object": "dict",
  "boolean": "True or False",
  "null": "None",
}


def words(of: Mapping[str, Any]) -> str:
  """Returns the values that a JSON schema accepts, in a few words."""
  if "anyOf" in of:
    return " or ".join(words(each) for each in of["anyOf"])
  if "enum" in of:
    return ", ".join(f"`{value!r}`" for value in of["enum"])
  kind = of.get("type", "any")
  if isinstance(kind, list):
    return " or ".join(words({"type": each}) for each in kind)
  if kind == "array":
    return f"list of: {words(of['items'])}"
  low, above = of.get("minimum"), of.get("exclusiveMinimum")
  bound = "" if low is None else f" from {low:g}"
  bound = bound if above is None else f" above {above:g}"
  most = of.get("maximum", checks.MOST_NUMBER)
  return _WORDS.get(kind, kind) + bound + (
    f" to {_amount(most)}" if most < checks.MOST_COUNT else ""
  )


def _amount(number: float) -> str:
  """Returns a number with commas, without the decimals of a whole one."""
  return f"{int(number):,}" if number == int(number) else f"{number:g}"


def _names(table: str) -> list[str]:
  """Returns the dotted keys that a table of the page has."""
  if table == _SHARED:
    return [*schema.SHARED_KEYS]
  if table == _OF_ENGINES:
    return [key for key in KEYS if key not in schema.SHARED_KEYS]
  return [f"{table}.{key}" for key in schema.keys_of(KEYS[table])]


def _node(key: str) -> Any:
  """Returns what the schema has for a dotted key."""
  section, _, inner = key.partition(".")
  return schema.keys_of(KEYS[section])[inner] if inner else KEYS[section]


def _cells(key: str) -> tuple[str, str, str]:
  """Returns the name, type and default of a key, as the page shows them."""
  node, last = _node(key), key.rpartition(".")[2]
  name = f'<a id="config.{key}"></a>`{last}`'
  if isinstance(node, schema.Setting):
    kind = words(checks.schema_of(node.check))
    return name, kind, f"`{schema.default_of(node)!r}`"
  if isinstance(node, schema.NamedSection):
    return name, "dict", f"`{schema.default_of(node)!r}`"
  return name, "dict", "see its keys"


def page(text: str) -> str:
  """Returns the page with its tables as the code has them."""
  meanings = dict(_ROW.findall(text))

  def table(match: re.Match[str]) -> str:
    header = ["key", "type", "default", "meaning"]
    rows = [[*_cells(key), meanings.get(key, "")] for key in _names(match[2])]
    if match[2] == _OF_ENGINES:
      header.insert(1, "engines")
      for key, row in zip(_names(match[2]), rows, strict=True):
        kinds = (name for name, x in ENGINES.items() if key in x.sections)
        row.insert(1, ", ".join(kinds))
    return match[1] + format_markdown(header, rows) + "\n"

  return _TABLE.sub(table, text)


def _described(key: str, node: Any, meanings: Mapping[str, str]) -> Any:
  """Returns the JSON schema of a key and of those below it."""
  said = _LINK.sub(r"\1", _TO_KEYS.sub("", meanings[key]))
  about = {"description": said}
  if isinstance(node, schema.Setting | schema.NamedSection):
    about["default"] = schema.default_of(node)
  if isinstance(node, schema.Setting):
    accepted = checks.schema_of(node.check)
    if isinstance(about["default"], list):
      accepted = {"anyOf": [accepted, *_alone(accepted)]}
    return accepted | about
  return about | {
    "type": "object",
    "properties": {
      inner: _described(f"{key}.{inner}", below, meanings)
      for inner, below in schema.keys_of(node).items()
    },
    # Arguments of a model, or of another thing that the section names.
    "additionalProperties": isinstance(
      node, schema.NamedSection | schema.Section
    ),
  }


def _alone(accepted: Mapping[str, Any]) -> list[Any]:
  """Returns what stands for a list: a single value of it, and for a list of
  texts one text, with commas between them. For a list that a schema does not
  describe it is any value."""
  items = accepted.get("items")
  if items is None:
    return [{"type": ["number", "string"]}]
  of_texts = "string" in _kinds(items)
  return [items, {"type": "string"}] if of_texts else [items]


def _kinds(of: Mapping[str, Any]) -> set[str]:
  """Returns the types that a JSON schema accepts."""
  if "anyOf" in of:
    return set().union(*map(_kinds, of["anyOf"]))
  if "enum" in of:
    return {"string"} if any(isinstance(x, str) for x in of["enum"]) else set()
  kind = of.get("type", "string")
  return {kind} if isinstance(kind, str) else {*kind}


def json_schema(text: str) -> dict[str, Any]:
  """Returns the JSON schema of a config, with the meanings of the page."""
  meanings = dict(_ROW.findall(text))
  keys = {key: _described(key, node, meanings) for key, node in KEYS.items()}
  of_a_run = (*schema.RUN_KEYS, "workers", *_names(_OF_ENGINES))
  run = {key: {"$ref": f"#/properties/{key}"} for key in of_a_run}
  name = {"type": "string", "minLength": 1}
  # A user's own recipe is MODULE:FUNCTION.
  named = {"enum": sorted(protocol.recipes())}
  recipe = {"anyOf": [named, {"type": "string", "pattern": r"^[\w.]+:[\w.]+$"}]}
  run |= {"recipe": recipe, "title": name, "engine": {"enum": [*ENGINES]}}
  keys["engine"] |= {"enum": [*ENGINES]}
  keys["runs"] |= {
    "type": "object",
    "minProperties": 1,
    # Others are options of the recipe, and settings of the engine.
    "additionalProperties": {"type": "object", "properties": run},
  }
  return {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A config of asgd",
    "type": "object",
    "properties": keys,
    "required": ["runs"],
    "additionalProperties": False,
  }


def main() -> None:
  """Writes both files."""
  text = page(PAGE.read_text())
  PAGE.write_text(text)
  SCHEMA.write_text(json.dumps(json_schema(text), indent=1) + "\n")


if __name__ == "__main__":
  main()
