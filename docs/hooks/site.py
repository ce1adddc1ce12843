"""Hooks that `mkdocs build` calls.

They add pages with the text of files in the project's root, such as the README
as the home page, and fill in lists of docstrings (`reference_tables`).
"""

import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))  # for launch/, which is not installed
import reference_tables  # noqa: E402

# Page -> the file of the root with its text. These pages, and figures.md, are
# in the navigation only if they exist.
FROM_ROOT = {
  "index.md": "README.md",
  "contributing.md": "CONTRIBUTING.md",
  "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)]+)\)")


def _exists(page: str) -> bool:
  return (ROOT / FROM_ROOT.get(page, f"docs/{page}")).exists()


def _without_missing(nav):
  """Returns the navigation without optional pages that do not exist."""
  existing = []
  for entry in nav:
    ((title, content),) = entry.items()  # content: a page, or a list of entries
    if isinstance(content, list):
      content = _without_missing(content)
    elif content in {*FROM_ROOT, "figures.md"} and not _exists(content):
      content = None
    if content:
      existing.append({title: content})
  return existing


def _relink(markdown: str) -> str:
  """Returns the text of a file of the root with links relative to docs/. Links
  to files that are not pages become text."""

  def link(match):
    bang, text, target = match.groups()  # bang: "!" of an image
    if target.startswith("docs/"):
      return f"{bang}[{text}]({target.removeprefix('docs/')})"
    for page, source in FROM_ROOT.items():
      if target.partition("#")[0] == source:
        return f"[{text}]({target.replace(source, page)})"
    return text

  return _LINK.sub(link, markdown)


def on_config(config):
  """Removes optional pages that do not exist from the navigation."""
  config.nav = _without_missing(config.nav)
  return config


def on_files(files, config):
  """Adds the pages of `FROM_ROOT`."""
  for page, source in FROM_ROOT.items():
    if _exists(page):
      text = _relink((ROOT / source).read_text())
      files.append(File.generated(config, page, content=text))
  return files


def on_page_markdown(markdown, **_):
  """Fills in lists of docstrings."""
  return reference_tables.fill(markdown)
