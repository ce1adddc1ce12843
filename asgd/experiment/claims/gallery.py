"""docs/figures.md: all figures whose verdicts are kept, and what holds of each.

The page is a function of docs/figures/*.json alone: it says no more than what
was run, judged and kept.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asgd.experiment import storage
from asgd.experiment.claims import verdicts

_PAGE, _FOLDER = "figures.md", "figures"
_VERSIONS = ("jax", "numpy", "scipy", "python")
_HEAD = """\
# Figures of papers, and what holds here

Each figure is a file in `configs/figures`: an experiment, claims about it as
data, and what the paper published. `python -m launch.reproduce NAME` trains it
and says of each claim whether it holds at this size, on the seeds it is judged
by: PASS if the interval of its effect lies where the claim says, FAIL if it
lies outside, UNDECIDED if it reaches over the border or there are too few
seeds. All parts of a claim must hold. What was tuned was tuned on other seeds,
and a claim that fails stays. Numbers are taken seed by seed: an interval of
93.8 % is the range of five seeds around their median, as the one-sided sign
test at 5 % has it; one of 95 % is Student's around the mean (of ratios the
geometric mean).

This page is written by `python -m launch.reproduce --docs` from the verdicts in
`docs/figures`; do not edit it.
"""


def read(docs: Path) -> dict[str, dict[str, Any]]:
  """Returns the verdicts that are kept: name -> NAME.json. ValueError for a
  file that is none."""
  out = {}
  for path in sorted((docs / _FOLDER).glob("*.json")):
    data = storage.read_json(path)
    kept = data is not None and data.get("figure") == path.stem
    if not kept or data.get("version") != verdicts.VERSION:
      raise ValueError(
        f"{path} holds no verdicts of that figure, of version"
        f" {verdicts.VERSION}; remove it, or make it anew"
        f" with python -m launch.reproduce {path.stem} --docs"
      )
    out[path.stem] = data
  return out


def keep(place: Path, name: str, docs: Path) -> None:
  """Puts the verdicts and the picture of a figure's folder into docs/figures;
  ValueError where there is no docs/, or no picture."""
  kept = docs / _FOLDER
  for suffix in (".json", ".svg"):
    if not (place / name).with_suffix(suffix).exists():
      raise ValueError(f"{place}/{name}{suffix} is not there, to be kept")
  if not docs.is_dir():
    raise ValueError(f"{docs} is not there: --docs is for a checkout")
  kept.mkdir(exist_ok=True)
  for suffix in (".json", ".svg"):
    shutil.copy((place / name).with_suffix(suffix), kept)


def page(docs: Path) -> str:
  """Returns the page, from the verdicts that are kept."""
  figures = read(docs)
  parts = [_HEAD, _summary(figures)]
  parts += [_section(name, data) for name, data in figures.items()]
  return "\n".join(parts)


def write(docs: Path) -> Path:
  """Writes the page; returns where it is."""
  path = docs / _PAGE
  storage.write_atomically(path, page(docs))
  return path


def _table(header, rows) -> str:
  lines = [header, ["---"] * len(header), *rows]
  cleaned = ([str(c).replace("|", "\\|") for c in line] for line in lines)
  return "\n".join(f"| {' | '.join(line)} |" for line in cleaned) + "\n"


def _count(claims, verdict) -> int:
  return sum(claim["verdict"] == verdict for claim in claims)


def _summary(figures: Mapping[str, Mapping[str, Any]]) -> str:
  rows = []
  for name, data in figures.items():
    claims = data["claims"]
    counts = [_count(claims, v) for v in ("PASS", "FAIL", "UNDECIDED")]
    rows.append(
      [f"[{data['title']}](#{_anchor(data)})", f"`{name}`", *counts]
      + [data["size"], _minutes(data["seconds"])]
    )
  header = ["figure", "name", "PASS", "FAIL", "UNDECIDED", "size", "training"]
  return _table(header, rows)


def _anchor(data) -> str:
  kept = "".join(c for c in data["title"].lower() if c.isalnum() or c in " -")
  return "-".join(kept.split())


def _minutes(seconds: float) -> str:
  return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _effect(part) -> str:
  low, high = (_number(part[key]) for key in ("low", "high"))
  if not part["coverage"]:
    return _number(part["effect"])
  share = f"{100 * part['coverage']:.1f}".removesuffix(".0")
  return f"{_number(part['effect'])} ({low} to {high}, {share} %)"


def _number(value: Any) -> str:
  return verdicts.number(None if value is None else float(value))


def _part_text(part) -> str:
  bounds = verdicts.bounds_text(verdicts.part_of(part))
  said = f"{part['what']}: {_effect(part)}, claimed {bounds}"
  return f"{said}; {part['why']}" if part["why"] else said


def _short(claim) -> list[str]:
  """The row of a claim: the first part that does not hold, if there is one."""
  parts, verdict = claim["parts"], claim["verdict"]
  held = _count(parts, "PASS")
  shown = next(part for part in parts if part["verdict"] == verdict)
  text = _part_text(shown)
  if len(parts) > 1:
    text = f"{held} of {len(parts)} parts hold; {text}"
  says = f"**{claim['name']}**: {claim['says']}"
  return [f"**{verdict}**", says, text, claim["note"]]


def _details(claims) -> list[str]:
  """The table of all parts, folded."""
  header = ["claim", "cells", "effect (interval)", "claimed", "verdict"]
  rows = []
  for claim in claims:
    for part in claim["parts"]:
      bounds = verdicts.bounds_text(verdicts.part_of(part))
      where = claim["name"], part["what"], _effect(part)
      rows.append([*where, bounds, part["verdict"]])
  summary = f"<summary>All {len(rows)} parts</summary>\n"
  table = _table(header, rows)
  return ['<details markdown="1">', summary, table, "</details>\n"]


def _section(name: str, data: Mapping[str, Any]) -> str:
  claims, machine = data["claims"], data["machine"]
  seeds = ", ".join(map(str, data["seeds"]))
  versions = ", ".join(f"{key} {data['versions'][key]}" for key in _VERSIONS)
  size = f"the {data['size']} size"
  if data["cells"] < data["of_cells"]:
    size += f", of which {data['cells']} of {data['of_cells']} cells have run"
  quick = " --quick" if data["size"] == "quick" else ""
  lines = [
    f"## {data['title']}\n",
    f"{data['paper']}\n",
    f"{data['about']}\n",
    f"![{data['title']}]({_FOLDER}/{name}.svg)\n",
    f"`python -m launch.reproduce {name}{quick}`: {size}, {data['cells']} cells"
    f" ({data['diverged']} diverged), {data['messages']:,} gradients, seeds"
    f" {seeds}, {_minutes(data['seconds'])} of training, of all cells together,"
    f" on {machine['cores']} cores ({machine['devices']}; {versions}).\n",
    f"Tuned: {data['tuned'] or 'nothing'}.\n",
    _table(
      ["verdict", "claim", "what decides", "why"], list(map(_short, claims))
    ),
    *_details(claims),
  ]
  if data["published"]:
    lines.append("Drawn beside it:\n")
    of_source: dict[str, list[str]] = {}
    for known in data["published"]:
      titles = of_source.setdefault(known["source"], [])
      titles += [known["title"]] * (known["title"] not in titles)
    lines += [f"- {'; '.join(v)}: {k}." for k, v in of_source.items()]
    lines.append("")
  return "\n".join(lines)
