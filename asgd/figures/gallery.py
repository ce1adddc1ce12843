"""docs/figures.md: all figures with stored verdicts, and which claims hold.

The page depends only on docs/figures/*.json, so it contains only what was
trained, judged and stored.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd import safe_files, text_table
from asgd.experiment import checks, storage
from asgd.figures import fields, statistics, verdicts
from asgd.figures.fields import FieldCheck

_PAGE, _FOLDER = "figures.md", "figures"
_VERSIONS = ("jax", "numpy", "scipy", "python")
_TITLE = "# Figures of papers, and what holds here\n"
_METHOD = """\
## How claims are judged

Each figure is a file in `configs/figures`: an experiment, claims about it as
data, and the values that the paper published. `asgd reproduce NAME` trains it
and prints for each claim whether it holds at this size, on the seeds for
judging: PASS if the interval of its effect lies in the claimed range, FAIL if
it lies outside, UNDECIDED if it contains a bound or there are too few seeds.
All parts of a claim must hold. Settings were tuned on other seeds, and a claim
that fails is kept. Runs are compared seed by seed. With `--quick` the command
trains a small version of the figure. `asgd reproduce --all --quick` took 47
minutes on two cores, without the figure that needs CIFAR-10.

The kind of a claim decides its interval, unless the claim names a statistic. A
claim that runs have an order, or rise or fall, has the median and the interval
of the sign test: with five seeds, this is their range, at 93.8 %. Any other
claim has the mean and the interval of Student's t at 95 %; for a ratio, the
geometric mean. A claim whose values may be infinite, as of a run that diverges
or never arrives, names the sign test. The percentage in a row shows which
of them it is.

This page is written by `asgd reproduce --docs` from the verdicts in
`docs/figures`; do not edit it.
"""
_MAX_EXAMPLES = 2  # claims that hold in the row of a figure


def _is_value(value: Any) -> bool:
  """Whether a value is None, or a number as `verdicts.plain` returns it."""
  return value in (None, "inf", "-inf") or type(value) in (int, float)


# The fields of NAME.json, as `reproduce.judge` and `verdicts.as_data` write
# them.
_TEXT = FieldCheck(fields.text, "a text")
_NOTE = FieldCheck(fields.note, "a text")
_COUNT = FieldCheck(checks.whole_number(0), "a whole number")
_LIST = FieldCheck(fields.any_list, "a list")
_MAPPING = FieldCheck(fields.mapping, "a dict")
_VALUE = FieldCheck(fields.must(_is_value, "a number"), "a number or null")
_BOUND = FieldCheck(
  fields.must(lambda v: v is not None and _is_value(v), "a number"), "a number"
)
_VERDICT = FieldCheck(fields.named(statistics.VERDICTS), "a verdict")
_STORED_FIELDS: fields.Table = {
  **dict.fromkeys(("title", "paper", "about"), _TEXT),
  "tuned": _NOTE,
  "finding": FieldCheck(fields.note),  # not needed: older files have none
  "size": FieldCheck(fields.named(("full", "quick")), "full or quick"),
  "seeds": FieldCheck(checks.several(checks.whole_number(0)), "a list"),
  **dict.fromkeys(("cells", "of_cells", "diverged", "messages"), _COUNT),
  "seconds": FieldCheck(checks.number(), "a number"),
  **dict.fromkeys(("versions", "machine"), _MAPPING),
  **dict.fromkeys(("published", "claims"), _LIST),
}
_CLAIM_FIELDS: fields.Table = {
  **dict.fromkeys(("name", "says", "kind", "column", "statistic"), _TEXT),
  "note": _NOTE,
  "verdict": _VERDICT,
  "parts": _LIST,
}
_PART_FIELDS: fields.Table = {
  "what": _TEXT,
  "verdict": _VERDICT,
  "why": _NOTE,
  **dict.fromkeys(("effect", "low", "high"), _VALUE),
  **dict.fromkeys(("above", "below"), _BOUND),
  "coverage": FieldCheck(checks.number(0, 1), "a number"),
  "ratio": FieldCheck(checks.flag, "True or False"),
  "values": _MAPPING,
}


def _check(data: Mapping[str, Any]) -> None:
  """Raises ValueError for stored verdicts that are damaged."""

  # Fields that a later version adds are allowed.
  def check(where: str, value: Any, table: fields.Table) -> None:
    fields.check(where, value, table, closed=False)

  check("it", data, _STORED_FIELDS)
  check("versions", data["versions"], dict.fromkeys(_VERSIONS, _TEXT))
  # The page shows two facts of the machine; the others may change.
  machine_check = FieldCheck(checks.anything, "of the machine")
  machine = dict.fromkeys(("cores", "devices"), machine_check)
  check("machine", data["machine"], machine)
  for i, line in enumerate(data["published"]):
    check(f"published {i}", line, {"title": _TEXT, "source": _TEXT})
  for i, claim in enumerate(data["claims"]):
    check(f"claim {i}", claim, _CLAIM_FIELDS)
    for j, part in enumerate(claim["parts"]):
      where = f"part {j} of claim {claim['name']!r}"
      check(where, part, _PART_FIELDS)
      seeds = [seed for seed in part["values"] if seed.isdecimal()]
      values = dict.fromkeys(part["values"], _VALUE)
      check(where, part["values"], values)
      if len(seeds) < len(part["values"]):
        raise ValueError(
          f"{where} has a value under a key that is not a seed number"
        )
    # The claim's verdict must follow from its parts, also in an edited file.
    verdict = statistics.conclude([part["verdict"] for part in claim["parts"]])
    # `conclude` of no parts is UNDECIDED, which a file could claim.
    if not claim["parts"] or verdict != claim["verdict"]:
      raise ValueError(f"claim {claim['name']!r} contradicts its parts")


def read(docs: Path) -> dict[str, dict[str, Any]]:
  """Returns the stored verdicts: name -> NAME.json. Raises ValueError for a
  file without verdicts, or a damaged one."""
  stored = {}
  for path in sorted((docs / _FOLDER).glob("*.json")):
    data = storage.read_json(path)
    remedy = f"remove it, or rewrite it with asgd reproduce {path.stem} --docs"
    # A file that was copied under another name is not that figure's.
    owner = {"figure": path.stem, "version": verdicts.VERSION}
    if data is None or any(data.get(key) != owner[key] for key in owner):
      raise ValueError(
        f"{path} holds no verdicts of that figure, of version"
        f" {verdicts.VERSION}; {remedy}"
      )
    try:
      _check(data)
    except ValueError as error:
      raise ValueError(f"{path} is damaged: {error}; {remedy}") from None
    stored[path.stem] = data
  return stored


def check_destination(docs: Path, name: str, *, size: str = "full") -> None:
  """Checks, before training, that the verdicts can be written to docs/. Raises
  ValueError if not. Quick verdicts do not replace those of the full size."""
  figures = docs / _FOLDER
  if not docs.is_dir():
    raise ValueError(
      f"{docs} does not exist: --docs needs a checkout; run it in the"
      " checkout's root, or leave --docs out"
    )
  # A folder that cannot be written must be found before hours of training.
  for path in (docs, figures):
    if path.exists() and not (path.is_dir() and os.access(path, os.W_OK)):
      raise ValueError(
        f"{path} cannot be written, but --docs stores verdicts there; make it"
        " writable, or leave --docs out"
      )
  picture, path = figures / f"{name}.svg", figures / f"{name}.json"
  if picture.exists() and not path.exists():
    raise ValueError(
      f"{picture} belongs to no figure, but --docs would overwrite it; rename"
      " the figure's file"
    )
  if size == "quick" and (storage.read_json(path) or {}).get("size") == "full":
    raise ValueError(
      f"{path} has the verdicts of the full size, which --quick would replace:"
      " leave out --quick or --docs, or remove the file"
    )


def copy_to_docs(workdir: Path, name: str, docs: Path) -> None:
  """Copies the verdicts and the picture of a figure's folder to docs/figures.
  Raises the errors of `check_destination`, and ValueError without a picture of
  these verdicts."""
  data = storage.read_json(workdir / f"{name}.json") or {}
  check_destination(docs, name, size=data.get("size", "full"))
  figures = docs / _FOLDER
  # Check both files before either is copied.
  for suffix in (".json", ".svg"):
    if not (workdir / f"{name}{suffix}").exists():
      raise ValueError(
        f"{workdir}/{name}{suffix} does not exist, so --docs cannot copy it"
      )
  # The picture is drawn after the verdicts are written, by Matplotlib.
  times = [
    (workdir / f"{name}{suffix}").stat().st_mtime_ns
    for suffix in (".json", ".svg")
  ]
  if times[1] < times[0]:
    raise ValueError(
      f"{workdir}/{name}.svg is older than the verdicts, so --docs cannot copy"
      " it: pip install 'asgd[viz]', and run the command again"
    )
  safe_files.make_folder(figures)
  for suffix in (".json", ".svg"):
    content = (workdir / f"{name}{suffix}").read_bytes()
    safe_files.write(figures / f"{name}{suffix}", content)


def _one_line(value: Any) -> Any:
  """Returns data with each text on one line, and without HTML tags."""
  if isinstance(value, Mapping):
    return {key: _one_line(each) for key, each in value.items()}
  if isinstance(value, list):
    return [_one_line(each) for each in value]
  if isinstance(value, str):
    # Only a "<" that may begin a tag: "a < b" stays readable.
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", " ".join(value.split()))
  return value


def page(docs: Path) -> str:
  """Returns the text of the page, from the stored verdicts."""
  figures = _one_line(read(docs))
  parts = [_TITLE, _summary(figures), _findings(figures)]
  parts += [_figure_row(name, data) for name, data in figures.items()]
  parts.append(_METHOD)
  parts += [_figure_section(name, data) for name, data in figures.items()]
  return "\n".join(parts)


def write(docs: Path) -> Path:
  """Writes the page and returns its path. Raises ValueError without verdicts;
  an existing page then stays unchanged."""
  path = docs / _PAGE
  if not read(docs):
    raise ValueError(
      f"{docs / _FOLDER} holds no verdicts, so {path} is not changed; run asgd"
      " reproduce NAME --docs in a checkout's root"
    )
  safe_files.write(path, page(docs))
  return path


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  return text_table.format_markdown(header, rows) + "\n"


def _count(claims: Sequence[Mapping[str, Any]], verdict: str) -> int:
  return sum(claim["verdict"] == verdict for claim in claims)


def _counts_text(claims: Sequence[Mapping[str, Any]]) -> str:
  """Returns the number of claims of each verdict as text: "8 PASS, 4 FAIL"."""
  counts = {verdict: _count(claims, verdict) for verdict in statistics.VERDICTS}
  return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _summary(figures: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the first paragraphs: the verdicts of all claims together, and how
  to read the rows of figures below."""
  claims = [claim for data in figures.values() for claim in data["claims"]]
  return (
    f"{len(figures)} figures judge {len(claims)} claims of the literature, at"
    f" the size of small machines: **{_counts_text(claims)}**"
    " ([how claims are judged](#how-claims-are-judged)). The table has what"
    " each found; first come those with a claim that fails. Below it, a row"
    " for each figure shows its first claims that hold, and every claim that"
    " fails, with the reason. A title leads to all claims, their numbers and"
    " intervals, and the figure in full size.\n"
  )


def _findings(figures: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the table of what each figure found; those with most failed claims
  come first."""

  def failed(data: Mapping[str, Any]) -> int:
    return _count(data["claims"], statistics.FAIL)

  rows = []
  for data in sorted(figures.values(), key=failed, reverse=True):
    claims = data["claims"]
    counts = [_count(claims, verdict) for verdict in statistics.VERDICTS]
    title = f"[{data['title']}](#{_anchor(data)})"
    rows.append([title, data.get("finding") or "see its row", *counts])
  header = ["figure", "what holds here, and what does not"]
  return _table([*header, *statistics.VERDICTS], rows)


def _first_sentence(text: str) -> str:
  """Returns a text until the first full stop that ends a sentence."""
  return re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)[0]


def _figure_row(name: str, data: Mapping[str, Any]) -> str:
  """Returns the row of a figure on the front of the page: a thumbnail that
  leads to its section, and beside it the counts of verdicts and the main
  claims. docs/extra.css arranges these parts. The inner parts are Markdown, in
  which mkdocs corrects the links to pictures."""
  claims, anchor = data["claims"], _anchor(data)
  # Claims on several numbers of workers or delays may say the same.
  holding = {
    claim["says"]: claim
    for claim in reversed(claims)
    if claim["verdict"] == statistics.PASS
  }
  shown = list(reversed(holding.values()))[:_MAX_EXAMPLES]
  shown += [claim for claim in claims if claim["verdict"] == statistics.FAIL]
  bullets = []
  for claim in shown:
    reason = _first_sentence(claim["note"])
    why = f" *{reason}*" if claim["verdict"] == statistics.FAIL else ""
    claim_text = f"{claim['name']}: {claim['says'].rstrip('.')}."
    bullets.append(f"- **{claim['verdict']}** {claim_text}{why}")
  lines = [
    '<div class="figure-row" markdown="1">\n',
    f"[![{data['title']}]({_FOLDER}/{name}.svg)](#{anchor})\n",
    '<div markdown="1">\n',
    f"**[{data['title']}](#{anchor})**<br>\n{_counts_text(claims)};"
    f" {_command(name, data)}, {_duration_text(data['seconds'])}\n",
    *bullets,
    "\n</div>\n\n</div>\n",
  ]
  return "\n".join(lines)


def _anchor(data: Mapping[str, Any]) -> str:
  """Returns the link that Markdown gives a title: lower case, with hyphens."""
  title = data["title"].lower()
  characters = "".join(c for c in title if c.isalnum() or c in " -")
  return "-".join(characters.split())


def _command(name: str, data: Mapping[str, Any]) -> str:
  """Returns the command that trains a figure at its size, as code."""
  return f"`asgd reproduce {name}{' --quick' * (data['size'] == 'quick')}`"


def _duration_text(seconds: float) -> str:
  return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _effect_text(part: Mapping[str, Any]) -> str:
  """Returns a part's effect, with its interval if it has one."""
  low, high = (_number_text(part[key]) for key in ("low", "high"))
  if not part["coverage"]:  # no interval: too few seeds
    return _number_text(part["effect"])
  # 93.8 % and 95 %, not 95.0 %.
  percent = f"{100 * part['coverage']:.1f}".removesuffix(".0")
  return f"{_number_text(part['effect'])} ({low} to {high}, {percent} %)"


def _number_text(value: Any) -> str:
  return verdicts.number(None if value is None else float(value))


def _part_text(part: Mapping[str, Any]) -> str:
  """Returns a part in words: its cells, its effect, and the claimed bounds."""
  bounds = verdicts.bounds_text(verdicts.part_of(part))
  text = f"{part['what']}: {_effect_text(part)}, claimed {bounds}"
  return f"{text}; {part['why']}" if part["why"] else text


def _claim_row(claim: Mapping[str, Any]) -> list[str]:
  """Returns the row of a claim, with the first part that decides its
  verdict."""
  parts, verdict = claim["parts"], claim["verdict"]
  passed = _count(parts, statistics.PASS)
  # The first part with the claim's verdict decides it.
  deciding = next(part for part in parts if part["verdict"] == verdict)
  text = _part_text(deciding)
  if len(parts) > 1:
    text = f"{passed} of {len(parts)} parts hold; {text}"
  says = f"**{claim['name']}**: {claim['says']}"
  return [f"**{verdict}**", says, text, claim["note"]]


def _details(claims: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the table of all parts, folded."""
  header = ["claim", "cells", "effect (interval)", "claimed", "verdict"]
  rows = []
  for claim in claims:
    for part in claim["parts"]:
      bounds = verdicts.bounds_text(verdicts.part_of(part))
      cells = claim["name"], part["what"], _effect_text(part)
      rows.append([*cells, bounds, part["verdict"]])
  summary = f"<summary>All {len(rows)} parts</summary>\n"
  table = _table(header, rows)
  # markdown="1" makes the site render the table within the HTML tag.
  return ['<details markdown="1">', summary, table, "</details>\n"]


def _figure_section(name: str, data: Mapping[str, Any]) -> str:
  """Returns the section of a figure."""
  claims, machine = data["claims"], data["machine"]
  seeds = ", ".join(map(str, data["seeds"]))
  versions = ", ".join(f"{key} {data['versions'][key]}" for key in _VERSIONS)
  size = f"the {data['size']} size"
  # Verdicts can be stored before all cells have run.
  if data["cells"] < data["of_cells"]:
    size += f", of which {data['cells']} of {data['of_cells']} cells have run"
  lines = [
    f"## {data['title']}\n",
    f"{data['paper']}\n",
    f"{data['about']}\n",
    f"![{data['title']}]({_FOLDER}/{name}.svg)\n",
    f"{_command(name, data)}: {size}, {data['cells']} cells"
    f" ({data['diverged']} diverged), {data['messages']:,} gradients, seeds"
    f" {seeds}, {_duration_text(data['seconds'])} of training, of all cells"
    f" together, on {machine['cores']} cores ({machine['devices']};"
    f" {versions}).\n",
    f"Tuned: {(data['tuned'] or 'nothing').rstrip('.')}.\n",
    _table(
      ["verdict", "claim", "what decides", "why"], list(map(_claim_row, claims))
    ),
    *_details(claims),
  ]
  if data["published"]:
    # Several lines of one source are one entry.
    lines.append("Drawn beside it:\n")
    titles_by_source: dict[str, list[str]] = {}
    for line in data["published"]:
      titles = titles_by_source.setdefault(line["source"], [])
      titles += [line["title"]] * (line["title"] not in titles)
    lines += [f"- {'; '.join(v)}: {k}." for k, v in titles_by_source.items()]
    lines.append("")
  return "\n".join(lines)
