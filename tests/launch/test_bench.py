"""What the benchmarks refuse, before they start anything."""

import kit
import pytest

MISTAKES = {
  "nothing": ([], "which benchmark? one of: simulator, server"),
  "name": (["serve"], "unknown benchmark 'serve'; did you mean 'server'"),
  "rounds": (["parallel", "--rounds=0"], "--block and --seconds must be"),
  "seconds": (["server", "--seconds=nan"], "--seconds must be positive"),
  "text": (["server", "--sizes=1,x"], "--sizes must be numbers of MB"),
  "none": (["server", "--sizes=0"], "--sizes must be above 0 to 100000 MB"),
  "nan": (["server", "--sizes=nan"], "--sizes must be above 0 to 100000 MB"),
  "links": (["network", "--links=udp"], "should be one of <threads|tc>"),
  "peer": (["pipeline", "--peer=/nix"], "--peer=/nix: there is no such progr"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name):
  arguments, message = MISTAKES[name]
  result = kit.call("bench", *arguments)
  kit.assert_one_line(result, message)
  assert result.stdout == ""
