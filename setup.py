"""Which packages are installed, and from where; pyproject.toml has the rest.

launch/ and configs/ are folders of the checkout, with short names for those who
work in it. Installed, such general names would get in the way of others, so
they become asgd.launch and asgd.configs. setuptools finds packages only under
the names of their folders; this renames them.
"""

from setuptools import find_namespace_packages, setup

_MOVED = "launch", "configs"


def _found(*names):
  """Returns packages with those below them; those of configs need no
  __init__.py."""
  within = [pattern for name in names for pattern in (name, f"{name}.*")]
  return find_namespace_packages(include=within, exclude=["*__pycache__*"])


setup(
  packages=[
    *_found("asgd", "pipeline"),
    *(f"asgd.{name}" for name in _found(*_MOVED)),
  ],
  package_dir={f"asgd.{name}": name for name in _MOVED},
)
