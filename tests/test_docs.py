"""Scripts in docs/ can at least be read by the shell that runs them."""

import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.sh")))
def test_a_script_is_one_of_bash(path):
  subprocess.run(["bash", "-n", str(path)], check=True)
