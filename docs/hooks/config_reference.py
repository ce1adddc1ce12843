"""Generates the reference of config keys: the tables of
docs/reference/config.md, and a JSON schema for editors and other programs.

  python docs/hooks/config_reference.py

Keys, types and defaults are from `asgd.experiment.schema` and the sections of
the engines. The meaning of each key is written by hand in the page: the command
keeps it, and copies it to the JSON schema as the description.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `launch` has the list of engines
from asgd.experiment import checks, protocol, schema  # noqa: E402
from asgd.text_table import format_markdown  # noqa: E402
from launch.flags import ENGINES  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "config.md"
SCHEMA = PAGE.with_name("config.schema.json")
KEYS = schema.sections(ENGINES)
# A table of the page. Its name, in the comment, is that of a section, or one of
# the two below: keys that all engines share, and keys of some engines.
_TABLE = re.compile(r"(<!-- keys: (\w+) -->\n\n)((?:\|.*\n)*)")
_SHARED, _OF_ENGINES = "shared", "engines"
# A row of a table: (key, meaning).
_ROW = re.compile(r'^\| <a id="config\.([\w.]+)">.* \| (.*) \|$', re.M)
_LINK_TO_KEYS = re.compile(r"; \[\w+\]\(#[^)]*\)$")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_TYPE_WORDS = {  # JSON type -> the word for it in the page
  "string": "text",
  "object": "dict",
  "boolean": "True or False",
  "null": "None",
}


def words(accepted: Mapping[str, Any]) -> str:
  """Returns a short text for the values that a JSON schema accepts."""
  if "anyOf" in accepted:
    return " or ".join(words(choice) for choice in accepted["anyOf"])
  if "enum" in accepted:
    return ", ".join(f"`{value!r}`" for value in accepted["enum"])
  kind = accepted.get("type", "any")
  if isinstance(kind, list):
    return " or ".join(words({"type": choice}) for choice in kind)
  if kind == "array":
    return f"list of: {words(accepted['items'])}"
  least, above = accepted.get("minimum"), accepted.get("exclusiveMinimum")
  bound = "" if least is None else f" from {least:g}"
  bound = bound if above is None else f" above {above:g}"
  most = accepted.get("maximum", checks.MOST_NUMBER)
  return _TYPE_WORDS.get(kind, kind) + bound + (
    f" to {_format_number(most)}" if most < checks.MOST_COUNT else ""
  )


def _format_number(number: float) -> str:
  """Returns a number as text: integers with commas and without decimals."""
  return f"{int(number):,}" if number == int(number) else f"{number:g}"


def _keys_in(table: str) -> list[str]:
  """Returns the dotted keys in a table of the page."""
  if table == _SHARED:
    return [*schema.SHARED_KEYS]
  if table == _OF_ENGINES:
    return [key for key in KEYS if key not in schema.SHARED_KEYS]
  return [f"{table}.{key}" for key in schema.keys_of(KEYS[table])]


def _node(key: str) -> Any:
  """Returns the Setting or section of the schema for a dotted key."""
  section, _, inner = key.partition(".")
  return schema.keys_of(KEYS[section])[inner] if inner else KEYS[section]


def _cells(key: str) -> tuple[str, str, str]:
  """Returns the cells (name, type, default) of a key's row."""
  node, last = _node(key), key.rpartition(".")[2]
  name = f'<a id="config.{key}"></a>`{last}`'
  if isinstance(node, schema.Setting):
    kind = words(checks.schema_of(node.check))
    return name, kind, f"`{schema.default_of(node)!r}`"
  if isinstance(node, schema.NamedSection):
    return name, "dict", f"`{schema.default_of(node)!r}`"
  return name, "dict", "see its keys"


def page(text: str) -> str:
  """Returns the page with tables that agree with the code."""
  meanings = dict(_ROW.findall(text))

  def table(match: re.Match[str]) -> str:
    header = ["key", "type", "default", "meaning"]
    rows = [[*_cells(key), meanings.get(key, "")] for key in _keys_in(match[2])]
    if match[2] == _OF_ENGINES:
      header.insert(1, "engines")
      for key, row in zip(_keys_in(match[2]), rows, strict=True):
        engines = (name for name, x in ENGINES.items() if key in x.sections)
        row.insert(1, ", ".join(engines))
    return match[1] + format_markdown(header, rows) + "\n"

  return _TABLE.sub(table, text)


def _key_schema(key: str, node: Any, meanings: Mapping[str, str]) -> Any:
  """Returns the JSON schema of a key and of the keys in its section."""
  meaning = _LINK.sub(r"\1", _LINK_TO_KEYS.sub("", meanings[key]))
  common = {"description": meaning}
  if isinstance(node, schema.Setting | schema.NamedSection):
    common["default"] = schema.default_of(node)
  if isinstance(node, schema.Setting):
    accepted = checks.schema_of(node.check)
    if isinstance(common["default"], list):
      accepted = {"anyOf": [accepted, *_without_list(accepted)]}
    return accepted | common
  return common | {
    "type": "object",
    "properties": {
      inner: _key_schema(f"{key}.{inner}", inner_node, meanings)
      for inner, inner_node in schema.keys_of(node).items()
    },
    # Arguments of the model or function that the section names.
    "additionalProperties": isinstance(
      node, schema.NamedSection | schema.Section
    ),
  }


def _without_list(accepted: Mapping[str, Any]) -> list[Any]:
  """Returns JSON schemas of values that may replace a list: a single item, and
  one text with commas in place of a list of texts. If the schema does not
  describe the items, the value is any number or text."""
  items = accepted.get("items")
  if items is None:
    return [{"type": ["number", "string"]}]
  has_texts = "string" in _types(items)
  return [items, {"type": "string"}] if has_texts else [items]


def _types(accepted: Mapping[str, Any]) -> set[str]:
  """Returns the JSON types that a JSON schema accepts."""
  if "anyOf" in accepted:
    return set().union(*map(_types, accepted["anyOf"]))
  if "enum" in accepted:
    has_text = any(isinstance(value, str) for value in accepted["enum"])
    return {"string"} if has_text else set()
  kind = accepted.get("type", "string")
  return {kind} if isinstance(kind, str) else {*kind}


def json_schema(text: str) -> dict[str, Any]:
  """Returns the JSON schema of a config, with the meanings of the page."""
  meanings = dict(_ROW.findall(text))
  keys = {key: _key_schema(key, node, meanings) for key, node in KEYS.items()}
  run_keys = (*schema.RUN_KEYS, "workers", *_keys_in(_OF_ENGINES))
  run = {key: {"$ref": f"#/properties/{key}"} for key in run_keys}
  title = {"type": "string", "minLength": 1}
  known_recipe = {"enum": sorted(protocol.recipes())}
  user_recipe = {"type": "string", "pattern": r"^[\w.]+:[\w.]+$"}  # MODULE:NAME
  recipe = {"anyOf": [known_recipe, user_recipe]}
  run |= {"recipe": recipe, "title": title, "engine": {"enum": [*ENGINES]}}
  keys["engine"] |= {"enum": [*ENGINES]}
  keys["runs"] |= {
    "type": "object",
    "minProperties": 1,
    # A run also accepts options of its recipe and settings of its engine.
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
  """Writes the page and the JSON schema."""
  text = page(PAGE.read_text())
  PAGE.write_text(text)
  SCHEMA.write_text(json.dumps(json_schema(text), indent=1) + "\n")


if __name__ == "__main__":
  main()
