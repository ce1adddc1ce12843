"""`asgd advise`: what it prints, as text and as JSON, and what it refuses."""

import json

import kit
import pytest

TINY = "--config=configs/digits.py:tiny", "--config.only=nag_asgd"
SENTENCES = "distribute", "recipe", "learning rate", "memory"


def test_it_says_not_to_distribute_a_run_of_a_second():
  result = kit.call("advise", *TINY, status=0)
  lines = result.stdout.splitlines()
  assert lines[0] == "measured on this machine, for the run nag_asgd on digits"
  topics = [line.partition("  ")[0] for line in lines]
  assert set(SENTENCES) <= set(topics)
  (why,) = (line for line in lines if line.startswith("distribute"))
  assert "No. One machine trains all" in why
  said = " ".join(result.stdout.split())
  assert "It replaces the recipe nag_asgd of the run nag_asgd, and" in said
  assert "the mean of" in said
  assert lines[lines.index("asgd train \\") + 1 :] == [
    "  --config=configs/digits.py:tiny \\",
    "  --engine=simulate \\",
    "  --config.runs.advised.recipe=asgd \\",
    "  --config.runs.advised.momentum=0.9 \\",
    "  --config.only=advised \\",
    "  --config.learning_rate=0.005 \\",
    "  --config.workers=1",
  ]


def test_json_has_the_same_as_numbers():
  free = "--service=0", "--latency=0", "--start=0", "--machines=4"
  result = kit.call("advise", *TINY, *free, "--json", status=0)
  found = json.loads(result.stdout)
  assert found["run"] == "nag_asgd"
  names = [way["name"] for way in found["ways"]]
  assert found["way"] in found["ways"] and names[0] == "one machine"
  assert found["measured"]["parameters"] == 610
  assert found["way"]["workers"] > 1  # nothing but steps takes time
  assert {*SENTENCES, "way", "speed-up"} == set(found["reasons"])
  assert "measured on this machine" in result.stderr


def test_the_machines_have_the_speeds_of_the_run(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(
    "def get_config():\n"
    "  slow = {'name': 'constant', 'slowdown': [1, 9]}\n"
    "  run = {'recipe': 'asgd', 'durations': slow}\n"
    "  return {'runs': {'a': run}, 'epochs': 0.1, 'model': {'name': 'mlp',"
    " 'hidden': []}}\n"
  )
  free = "--service=0", "--latency=0", "--start=0", "--machines=2"
  result = kit.call("advise", f"--config={path}", *free, "--json", status=0)
  found = json.loads(result.stdout)
  speeds = {way["name"]: way["speed"] for way in found["ways"]}
  assert speeds["asynchronous"] < 1.3  # 1 + 1 / 9


@pytest.mark.slow
def test_a_model_of_another_engine_is_advised():
  words = "--config=configs/pipeline_gpt.py:tiny", "--config.only=gpipe"
  result = kit.call("advise", *words, status=0)
  assert "for the run gpipe on digits" in result.stdout
  assert "--engine=simulate" in result.stdout


@pytest.mark.parametrize(
  ("words", "message"),
  [
    ([], "no --config; try --config=configs/digits.py"),
    ([*TINY, "--machines=0"], "--machines must be from 1 to 256, not 0"),
    ([*TINY, "--machines=257"], "--machines must be from 1 to 256"),
    ([*TINY, "--bandwidth=0"], "--bandwidth must be from 1e-09 to 1e+15"),
    ([*TINY, "--latency=-1"], "--latency must be from 0 to 1e+15, not -1"),
    ([*TINY, "--service=nan"], "--service must be from 0 to 1e+15, not nan"),
    ([*TINY, "--memory=0"], "--memory must be from 1e-09 to 1e+15"),
    ([*TINY, "--start=-1"], "--start must be from 0 to 1e+15, not -1"),
    ([*TINY, "--bandwidth=1e30"], "must be from 1e-09 to 1e+15, not 1e+30"),
    (
      [*TINY, "--machines=many"],
      "--machines=many must be a whole number, as in --machines=4",
    ),
    ([*TINY, "--machines=1e30"], "must be a whole number, as in --machines=4"),
    ([*TINY, "--memory=much"], "--memory=much must be a number, as in"),
    ([*TINY, "--machine=4"], "did you mean --machines=4?"),
    ([*TINY, "--config.only=nag_agsd"], "did you mean 'nag_asgd'?"),
    (
      [
        "--config=configs/matrix_factorisation.py:tiny",
        "--config.only=essp",
      ],
      "whose messages are no gradients of all parameters",
    ),
  ],
)
def test_a_wrong_flag_is_one_line_with_the_remedy(words, message):
  result = kit.call("advise", *words)
  kit.assert_one_line(result, message)
  assert result.stdout == ""
