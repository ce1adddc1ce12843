"""What the benchmarks refuse, before they start anything, and their list."""

import kit
import pytest

from launch.bench import __main__ as command

MISTAKES = {
  "name": (["serve"], "unknown benchmark 'serve'; did you mean 'server'"),
  "rounds": (["parallel", "--rounds=0"], "--block and --seconds must be"),
  "seconds": (["server", "--seconds=nan"], "--seconds must be positive"),
  "text": (["server", "--sizes=1,x"], "--sizes must be numbers of MB"),
  "none": (["server", "--sizes=0"], "--sizes must be above 0 to 100000 MB"),
  "nan": (["server", "--sizes=nan"], "--sizes must be above 0 to 100000 MB"),
  "links": (["network", "--links=udp"], "should be one of <threads|tc>"),
  "peer": (["pipeline", "--peer=/nix"], "--peer=/nix: there is no such progr"),
  "files": (["--table"], "--table needs the FILEs that --json=FILE has wri"),
  "file": (["--table", "/no.json"], "No such file or directory: '/no.json'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name):
  arguments, message = MISTAKES[name]
  result = kit.call("bench", *arguments)
  kit.assert_one_line(result, message)
  assert result.stdout == ""


def test_without_a_name_all_are_listed():
  listed = kit.call("bench").stdout.splitlines()
  assert [line.split()[2] for line in listed] == list(command.BENCHMARKS)
