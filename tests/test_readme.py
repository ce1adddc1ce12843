"""What the README says can be run runs as it is written."""

import re
from pathlib import Path

import kit
import pytest

README = (kit.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_snippets_run_one_after_the_other(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  own_loop, compare, live = BLOCKS
  names = {}
  exec(own_loop, names)
  assert names["loss"](names["state"].params) < 1
  exec(compare, names)
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert [line[0] for line in lines] == ["asgd", "nag_asgd", "dana_zero"]
  first = names["loss"](names["params"], names["data"])
  asgd_loss, nag_loss, dana_loss = (float(line[1]) for line in lines)
  assert dana_loss < asgd_loss < first < 1e3 < nag_loss
  exec(live, names)
  loss, staleness, same = capsys.readouterr().out.split()
  assert float(loss) < first / 2
  assert float(staleness) > 1
  assert same == "True"


@pytest.mark.parametrize("path", re.findall(r"\]\(((?!http)[^)#]+)", README))
def test_the_files_it_links_exist(path):
  assert (kit.ROOT / Path(path)).exists()
