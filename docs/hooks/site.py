"""Hooks of `mkdocs build`, beside the rendering of pages.

The home page is the README, pages of the project's root are taken over where
they exist, and tables come from the code (`reference_tables`).
"""

import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))  # commands are in launch/, which is not installed
import reference_tables  # noqa: E402

# Pages with a file of the root as their text. They, and figures.md, are in the
# navigation if they exist.
FROM_ROOT = {
  "index.md": "README.md",
  "contributing.md": "CONTRIBUTING.md",
  "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)]+)\)")


def _exists(page: str) -> bool:
  return (ROOT / FROM_ROOT.get(page, f"docs/{page}")).exists()


def _kept(nav):
  """The navigation without optional pages that are not there."""
  kept = []
  for entry in nav:
    ((title, below),) = entry.items()
    if isinstance(below, list):
      below = _kept(below)
    elif below in {*FROM_ROOT, "figures.md"} and not _exists(below):
      below = None
    if below:
      kept.append({title: below})
  return kept


def _relinked(markdown: str) -> str:
  """Links of a file of the root, as they are in docs/; those to files that are
  not pages become text."""

  def link(match):
    bang, text, target = match.groups()
    if target.startswith("docs/"):
      return f"{bang}[{text}]({target.removeprefix('docs/')})"
    for page, source in FROM_ROOT.items():
      if target.partition("#")[0] == source:
        return f"[{text}]({target.replace(source, page)})"
    return text

  return _LINK.sub(link, markdown)


def on_config(config):
  """Drops pages that are not there from the navigation."""
  config.nav = _kept(config.nav)
  return config


def on_files(files, config):
  """Adds the pages with their text in the root."""
  for page, source in FROM_ROOT.items():
    if _exists(page):
      text = _relinked((ROOT / source).read_text())
      files.append(File.generated(config, page, content=text))
  return files


def on_page_markdown(markdown, **_):
  """Fills in tables and lists of docstrings."""
  return reference_tables.fill(markdown)
