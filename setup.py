"""Which packages are installed, and from where; pyproject.toml has the rest.

pipeline/, launch/ and configs/ are folders of the checkout, with short names
for those who work in it. Installed, such general names would hide a user's own
modules, or be hidden by them, so they become asgd.pipeline, asgd.launch and
asgd.configs. setuptools finds packages only under the names of their folders;
this renames them. The link asgd/pipeline shows type checkers and editors the
installed name, and lets the checkout run uninstalled.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

_MOVED = "pipeline", "launch", "configs"


def _found(*names):
  """Returns packages with those below them; those of configs need no
  __init__.py."""
  within = [pattern for name in names for pattern in (name, f"{name}.*")]
  return find_namespace_packages(include=within, exclude=["*__pycache__*"])


def _readme():
  """Returns README.md as a package index can show it: without links to files
  of the checkout, and without the figure and its caption."""
  text = (Path(__file__).parent / "README.md").read_text()
  text = re.sub(r"^!\[.*\]\(.*\)\n\n(\*.*(\n.+)*\n\n)?", "", text, flags=re.M)
  return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]+\)", r"\1", text)


setup(
  long_description=_readme(),
  long_description_content_type="text/markdown",
  packages=[
    *(name for name in _found("asgd") if not name.startswith("asgd.pipeline")),
    *(f"asgd.{name}" for name in _found(*_MOVED)),
  ],
  package_dir={f"asgd.{name}": name for name in _MOVED},
)
