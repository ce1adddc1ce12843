"""Each command of the documentation that trains is run, at the tiny size of
its config, and its cells are counted.

A command that names no run trains two; `test_configs` trains each. A command
that says no more than a config, or a figure, is in `test_configs` and
`asgd/figures/test_tiny_figures`. Workers that would be processes of Ray are
threads.
"""

import ast
import re
import shlex

import kit
import pytest
import tiny
from tiny import drawn_images, no_limits

FILES = [kit.ROOT / "README.md", kit.ROOT / "CONTRIBUTING.md"]
FILES += sorted((kit.ROOT / "docs").rglob("*.md"))
FILES += sorted((kit.ROOT / "configs").rglob("*.py"))
FILES += sorted((kit.ROOT / "launch").glob("*.py"))
COMMAND = re.compile(
  r"(?:^|&& |`)\s*(?:\S*python -m launch\.|asgd )(\w+) ([^`\n]*)", re.MULTILINE
)
TRAINING = "train", "reproduce", "compare", "chaos"
OF_CELLS = "replay", "timeline"  # of those that a command before has trained
OF_CONFIG = "train", "chaos"  # a first word is the name of a config
# Commands that other tests run: words of them, and the test.
ELSEWHERE = {
  "chaos --config": (
    "launch/test_chaos.py::test_processes_are_killed_and_nothing_is_lost"
  ),
  "chaos --simulate": (
    "launch/test_chaos.py::test_seeds_of_a_simulated_world_are_tallied"
  ),
  "compare --config": (
    "launch/test_compare.py::test_in_order_the_simulation_is_the_live_run"
  ),
  # Each worker has to do several jobs, which real time decides.
  "compare runs/": (
    "launch/test_compare.py::test_in_order_the_simulation_is_the_live_run"
  ),
  "mesh_gpt.py --config.mesh.axes=data:2,tensor:2,pipe:2": (  # the default
    "test_configs.py::test_each_run_trains_at_the_tiny_size_and_its_cells_count"
  ),
  "reproduce --all": (
    "launch/test_reproduce.py::"
    "test_all_figures_but_those_without_data_are_trained"
  ),
  "--num_processes=2": (
    "asgd/experiment/test_mesh_engine.py::test_two_processes_agree_with_one"
  ),
}
# Flags that train nothing; and folders and files that a reader has to name.
NOTHING = "--list", "--help", "--dry_run", "--compile", "reproduce --docs"
PLACEHOLDERS = "...", "{name}", "WORKDIR", "NAME", "FOLDER", "FILE", "DIR/"
PLACEHOLDERS += ("a-n4-s0",)
# Pages that go on with what another page has trained.
AFTER = {"seeing.md": "live.md"}


def commands():
  """Returns the commands that train, or are of what was trained, in their
  order: (file, module, words). A config is the flag --config."""
  found = []
  for path in FILES:
    text = path.read_text()
    if path.suffix == ".py":
      text = ast.get_docstring(ast.parse(text)) or ""
    for module, rest in COMMAND.findall(re.sub(r"\\\n\s*", "", text)):
      if module not in (*TRAINING, *OF_CELLS):
        continue
      words = shlex.split(rest)
      name = re.fullmatch(r"(\w+)(:\w+)?", words[0]) if words else None
      if module in OF_CONFIG and name:
        words[0] = f"--config=configs/{name[1]}.py{name[2] or ''}"
      line = " ".join([module, *words])
      if not any(text in line for text in (*NOTHING, *PLACEHOLDERS)):
        found.append((path, module, words))
  return found


def is_elsewhere(module, words):
  """Whether another test runs a command."""
  line = " ".join([module, *words])
  return any(text in line for text in ELSEWHERE)


def config_of(word):
  """Returns the file of --config=FILE, without a variant."""
  name = re.fullmatch(r"--config=configs/([\w/]+)\.py(?::\w+)?", word)[1]
  return kit.ROOT / "configs" / f"{name}.py"


def runs_on_ray(config):
  """Whether all runs of a config are on Ray."""
  return 'config.engine = "ray"' in config.read_text()


def two_runs(config):
  """Returns the flag that trains the last two runs of a config."""
  runs = kit.load_config_file(config).get_config("tiny").runs
  return f"--config.only={','.join([*runs][-2:])}"


def at_tiny(words, place):
  """Returns the words of a command at the tiny size, in a folder of tests."""
  live, out = False, []
  for word in words:
    key, _, value = word.partition("=")
    if key == "--config":
      live |= runs_on_ray(config_of(word))
      out.append(f"--config={config_of(word)}:tiny")
      if not any(word.startswith("--config.only=") for word in words):
        out.append(two_runs(config_of(word)))
    elif key == "--fault":  # the first job: there are few
      out.append(f"{key}={value.rpartition(':')[0]}:1")
    elif key in ("--engine", "--config.engine"):
      live = True
    elif key not in ("--address", "--workdir"):
      out.append(word.replace("runs/", f"{place}/", 1))
  return [*out, "--engine=threads"] if live else out


def is_plain(module, words):
  """Whether a command is of a config, or of a figure, and no more."""
  if module == "reproduce":
    return not is_elsewhere(module, words)
  config = words[0] if module == "train" else ""
  return at_tiny(words, "") == (at_tiny([config], "") if config else None)


def cases():
  """Returns page -> the commands of it that are run here, each once unless it
  says in which folder."""
  found, seen = {}, set()
  for path, module, words in commands():
    key = module, *at_tiny(words, "")
    once = key in seen and not any("--workdir" in word for word in words)
    if is_elsewhere(module, words) or is_plain(module, words) or once:
      continue
    seen.add(key)
    found.setdefault(path.name, []).append((module, words))
  for page, before in AFTER.items():
    found[before] += found.pop(page)
  return found


INCOMPLETE = 3  # exit status of a command that says what is missing
CASES = cases()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("no_pictures", "commands_as_here")
@pytest.mark.usefixtures(drawn_images.__name__, no_limits.__name__)
@pytest.mark.parametrize("page", CASES)
def test_the_commands_of_a_page_run_and_their_cells_count(page, tmp_path):
  for number, (module, words) in enumerate(CASES[page]):
    arguments = at_tiny(words, tmp_path)
    if module == "train":
      given = [w for w in words if w.startswith("--workdir=runs/")]
      name = given[0].partition("/")[2] if given else str(number)
      # The rounds that a lost peer missed are not made up for.
      line = " ".join(words)
      misses = "gossip_live" in line and "--fault=kill" in line
      status = INCOMPLETE if misses else 0
      tiny.train(tmp_path / name, *arguments, status=status)
    else:
      kit.call(module, *arguments, status=0)


def test_commands_without_more_are_of_configs_and_figures_that_are_trained():
  plain = [(m, w) for _, m, w in commands() if is_plain(m, w)]
  for module, (first, *_) in plain:
    if module == "train":
      assert config_of(first).is_file(), first
    else:
      assert (kit.ROOT / "configs" / "figures" / f"{first}.py").is_file(), first
  assert len(plain) > 40


def test_other_tests_run_the_rest():
  lines = [" ".join([module, *words]) for _, module, words in commands()]
  for text, place in ELSEWHERE.items():
    assert any(text in line for line in lines), text
    file, test = place.split("::")
    assert f"def {test}(" in (kit.ROOT / "tests" / file).read_text(), place
