"""Which packages are installed, and from where; pyproject.toml has the rest.

pipeline/, launch/ and configs/ are folders of the checkout, with short names
for those who work in it. Installed, such general names would hide a user's own
modules, or be hidden by them, so they become asgd.pipeline, asgd.launch and
asgd.configs. setuptools finds packages only under the names of their folders;
this renames them. The link asgd/pipeline shows type checkers and editors the
installed name, and lets the checkout run uninstalled.
"""

from setuptools import find_namespace_packages, setup

_MOVED = "pipeline", "launch", "configs"


def _found(*names):
  """Returns packages with those below them; those of configs need no
  __init__.py."""
  within = [pattern for name in names for pattern in (name, f"{name}.*")]
  return find_namespace_packages(include=within, exclude=["*__pycache__*"])


setup(
  packages=[
    *(name for name in _found("asgd") if not name.startswith("asgd.pipeline")),
    *(f"asgd.{name}" for name in _found(*_MOVED)),
  ],
  package_dir={f"asgd.{name}": name for name in _MOVED},
)
