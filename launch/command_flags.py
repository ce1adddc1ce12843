"""The commands and their flags, as plain data.

`command_line` prints --help from them and finds mistakes in a command line;
`flags` gives them to absl. This module imports nothing that takes time. Values
of other modules are copied here, and tests compare them with their origin.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# A flag: (kind, default, help). A kind is str, int, float, bool, list, the
# names of an enum, or OPTIONAL: a flag that takes a text or stands alone.
Flag = tuple[Any, Any, str]
OPTIONAL = "optional"
WITHOUT_TEXT = "true"  # absl's value of an OPTIONAL flag that stands alone

# Copies of names of the library, which tests compare with their origin.
ENGINES = "simulate", "threads", "ray", "mesh", "pipeline"
LIVE_ENGINES = "threads", "ray"
FAILURE_KINDS = "worker", "shard", "hang", "driver", "term"  # of `chaos`
FAULTS = "kill", "hang", "slow", "nan", "lose", "double", "reorder"
PROTOCOLS = "server", "tables", "sandblaster", "gossip"
RECIPES = "asgd", "dc_asgd_a", "gap_aware", "dana_zero", "dana_dc"
OPTIMIZERS = "sgd", "momentum", "adagrad", "adam", "adafactor"
PRECISIONS = "float32", "mixed", "mixed_main_gradients", "cast", "bfloat16"
ACTIVATIONS = "plain", "sequence", "full"
WEIGHTS = "latest", "stash", "2bw", "vertical"


class Usage(NamedTuple):
  """The arguments and flags of a command."""

  arguments: str  # of the usage line
  flags: Mapping[str, Flag]
  max_words: int = 0  # limit of positional arguments
  config: str = ""  # an example of --config, if the command takes a config
  # Flags and config keys on the first screen of --help; (): all of them.
  first_screen: tuple[str, ...] = ()


# Flags that several commands share.
_QUIET = (bool, False, "Print only warnings and errors.")
_JSON = (
  bool,
  False,
  "Print the results as one JSON object; other output goes to stderr.",
)
_TRUST = (
  bool,
  False,
  "Allow code that is named in a folder of another user to run.",
)
_COMPILE = (
  "Compile the programs of the config for v5e:4x4, v5p:4x4x4, two slices"
  " v5e:2x2*2, or GPUs h100:8, and compare them with the planner. This machine"
  " needs none of these devices."
)
_WORKDIR = (
  "Folder of results. Default: the runs/CONFIG-NNN that already holds this"
  " experiment, or the next free one."
)
# Flags of every command that trains; `flags.training_command` passes them on.
TRAINING: dict[str, Flag] = {
  "workdir": (str, None, _WORKDIR),
  "data_dir": (str, None, "Folder or file of the data. Default: search it."),
  "engine": (ENGINES, None, "Engine of all runs, in place of the config's."),
  "memory_dir": (str, "/dev/shm", "Folder for the shared memory of live runs."),
  "grace_seconds": (float, 20.0, "Seconds for live workers to end their jobs."),
  "address": (str, None, "Ray cluster to join. Default: one on this machine."),
  "allow_network": (
    bool,
    False,
    "Allow Ray to listen on other network interfaces (docs/howto/security.md).",
  ),
}
_FAULT = (
  "Faults to inject, as KIND:WORKER:SEQ,... (kill:1:20; slow:1:20:SECONDS), at"
  f" job SEQ of the worker, from 0. Kinds: {', '.join(FAULTS)}."
)
_TRAIN: dict[str, Flag] = {
  **TRAINING,
  "jobs": (str, "auto", "Simulated cells at once: auto, a number, or ray."),
  "cells": (str, "1/1", "Share of the cells to train, I/N."),
  "dry_run": (bool, False, "Print cells, messages and time; train nothing."),
  "fault": (list, [], _FAULT),
  "processes": (int, 0, "Processes for a pipeline's stages. 0: threads."),
  "gpus_per_process": (float, 0.0, "GPUs that Ray reserves for a process."),
  "spans": (bool, False, "Write the time spans of stages in the last batch."),
  "num_processes": (int, 1, "Processes of a mesh, on all its machines."),
  "process_id": (int, None, "Index of this process, from 0."),
  "coordinator": (str, None, "HOST:PORT of process 0; or auto."),
  "start_seconds": (float, 60.0, "Limit for a mesh's processes to start."),
  "profile": (str, None, "Folder for a JAX trace of 5 s of training."),
  "wandb": (bool, False, "Write runs for Weights & Biases, offline."),
  "compile": (str, None, _COMPILE),
  "list": (bool, False, "List recipes, schedules, engines, models, data."),
  "quiet": _QUIET,
  "json": _JSON,
}
_CHAOS: dict[str, Flag] = {
  # --engine takes live engines only: a simulated run has nothing to kill.
  **TRAINING,
  "engine": (LIVE_ENGINES, "ray", "Engine of all runs."),
  "mtbf": (float, 5.0, "Mean seconds between two failures."),
  "seconds": (float, 60.0, "How long to inject, while messages arrive."),
  "kinds": (list, list(FAILURE_KINDS), "Kinds of failures to inject."),
  "seed": (int, 0, "Seed of the failures' times and victims."),
  "patience": (float, 180.0, "Seconds without an event: then a run has hung."),
  "simulate": (int, 0, "Number of simulated runs, for seeds from --seed on."),
  "protocol": (PROTOCOLS, "server", "Protocol of --simulate."),
  "faults": (list, None, "With --simulate=1, indices of the faults to keep."),
  "jobs": (int, 1, "Processes for --simulate."),
  "json": _JSON,
}
_COMPARE: dict[str, Flag] = {
  **TRAINING,
  "durations_of": (str, None, "Take job times from this WORKDIR/cells/NAME."),
  "trust": _TRUST,
  "out": (str, None, "Folder to write to. Default: the cell's folder."),
  "quiet": _QUIET,
  "json": _JSON,
}
_REPLAY: dict[str, Flag] = {
  "data_dir": TRAINING["data_dir"],
  "trust": _TRUST,
  "restore": (bool, False, "Rewrite params.msgpack from the replay."),
}
_REPRODUCE: dict[str, Flag] = {
  **{key: TRAINING[key] for key in ("workdir", "data_dir", "memory_dir")},
  "all": (bool, False, "Reproduce all figures."),
  "quick": (bool, False, "Train a small version: minutes on two cores."),
  "list": (bool, False, "List the figures."),
  "docs": (bool, False, "Copy the verdicts to docs/ and rewrite the page."),
  "quiet": _QUIET,
  "json": _JSON,
}
_TIMELINE: dict[str, Flag] = {
  "out": (str, None, "File. Default: timeline.json in the run's folder."),
}
WATCH: dict[str, Flag] = {
  "port": (int, 8642, "Port of the page. 0: any that is free."),
  "cell": (str, None, "With --picture: the cell to draw."),
  "picture": (str, None, "FILE.svg to write, instead of serving the page."),
}
PLAN: dict[str, Flag] = {
  "params": (str, None, "Parameters: 1.5e9, 350M, 1.5B."),
  "data_dir": (str, None, "Folder or file of the config's data."),
  "devices": (int, None, "Number of devices."),
  "bandwidth": (float, None, "GB/s of a device's link, in each direction."),
  "latency": (float, 5.0, "Latency of a message in microseconds."),
  "node": (int, 1, "Devices of a node, with links of --node_bandwidth."),
  "node_bandwidth": (float, None, "GB/s inside a node."),
  "memory": (float, 80.0, "GB of a device."),
  "flops": (float, 100.0, "TFLOP/s that a device reaches (not its peak)."),
  "batch": (
    int,
    None,
    "Examples of a step. Default: the config's, or 8 for each device.",
  ),
  "microbatch": (
    int,
    None,
    "Examples of a microbatch. Default: what the planner finds fastest.",
  ),
  "optimizer": (str, "adam", f"One of {', '.join(OPTIMIZERS)}."),
  "precision": (str, "mixed", f"One of {', '.join(PRECISIONS)}."),
  "activations": (str, "plain", f"One of {', '.join(ACTIVATIONS)}."),
  "variation": (float, 0.1, "Coefficient of variation of batch times."),
  "overlap": (bool, False, "Reduce gradients during the backward (wait-free)."),
  "shards": (int, None, "Parameter-server shards. Default: one per device."),
  "recipes": (list, list(RECIPES), "Asynchronous recipes."),
  "out": (str, None, "Picture to write: FILE.png, .svg or .pdf."),
  "depth": (int, None, "Blocks of the GPT."),
  "width": (int, None, "Features of the GPT's residual stream."),
  "heads": (int, None, "Attention heads of the GPT."),
  "context": (int, None, "Positions of a sequence (2048)."),
  "vocabulary": (int, None, "Size of the vocabulary (51200)."),
  "compile": (str, None, _COMPILE),
}
ADVISE: dict[str, Flag] = {
  "data_dir": TRAINING["data_dir"],
  "machines": (
    int,
    None,
    "Most workers to consider. Default: the most in the config, or 8.",
  ),
  "bandwidth": (float, 1.25, "GB/s of a machine's link, in each direction."),
  "latency": (float, 50.0, "Latency of a message in microseconds."),
  "service": (float, 1.5, "Milliseconds that the server takes for a message."),
  "memory": (float, None, "GB of a machine. Default: that of this one."),
  "start": (float, 14.0, "Seconds until the workers of a live run train."),
  "json": _JSON,
}
_WEIGHTS_HELP = (
  f"Which weights backwards read: {', '.join(WEIGHTS)}. Default: latest for a"
  " schedule that flushes; for others what its paper uses, else stash."
)
DRAW_SCHEDULE: dict[str, Flag] = {
  "schedule": (str, None, "Name of a schedule; asgd --list has all."),
  "table": (str, None, "FILE.txt, .csv or .json of a table."),
  "weights": (str, None, _WEIGHTS_HELP),
  "transfers": (str, "buffered", "Or rendezvous: sends wait for receives."),
  "measured": (str, None, "FILE.json of spans of a run."),
  "out": (str, None, "Folder to write to. Default: none."),
  "max_in_flight": (int, None, "Most forwards allowed in flight on a device."),
  "own": (list, [], "Times of user-defined actions, as NAME=TIME,..."),
  "options": (list, [], "Options of the schedule, as KEY=VALUE,..."),
}
# Times of `draw_schedule`. Each is one number, or one for each stage. The
# defaults, in parentheses, are those of the analysis.
TIMES = {
  "forward": "Time of a forward (1).",
  "backward": "Time of a backward (that of input + weight).",
  "input": "Time of a backward of inputs (1).",
  "weight": "Time of a backward of weights (1).",
  "transfer": "Time from a stage to the next one, on another device (0).",
  "transfer_back": "Time of a transfer of gradients (as transfer).",
  "overlap": "Time of a forward and a backward that run together (their sum).",
}
# Options of schedules. The parameters of a schedule's function are its options.
# If only one schedule takes an option, its name ends the text, in parentheses.
SCHEDULE_OPTIONS = {
  "stages": "Stages, one on each device.",
  "devices": "Number of devices, or the device of each stage (0,1,1,0).",
  "chunks": "Stages of each device.",
  "microbatches": "Microbatches of a batch.",
  "batches": "Batches to draw (1).",
  "every": "Microbatches of an update.",
  "max_activations": "Most stored activations of a device (zero_bubble).",
  "replicas": "Devices of each stage, as 2,1 (pipedream).",
  "group": "Microbatches that pass a stage before the next one (interleaved).",
  "reverse": "Backwards start with the last microbatch (gpipe).",
  "stage_depth": "Distance of each stage from the end, as 2,1,0 (ftpipe).",
  "supremum": "Least upper bound of the staleness (ftpipe).",
  "anneal": "Updates until the rate's correction has ended (pipemare).",
  "decay": "Decay of the discrepancy's correction, in (0, 1) (pipemare).",
}
_BENCH: dict[str, Flag] = {
  "rounds": (int, None, "Rounds of measurements. Default: 2, 3 or 5."),
  "block": (int, None, "Updates in a round (simulator). Default: by model."),
  "sizes": (list, None, "MB of parameters (server). Default: 0.1,1,10,100."),
  "seconds": (float, None, "Seconds for each compared program. Default: 3."),
  "links": (("threads", "tc"), None, "How links are made slow (network)."),
  "peer": (str, None, "Python with torch (simulator, pipeline)."),
  "large": (bool, None, "Orders of 10 M rows or 100,000 workers (orders)."),
  "all": (bool, False, "Run all, one after the other."),
  "json": (OPTIONAL, None, "Write numbers as JSON to FILE, or print them."),
  "table": (bool, False, "Print the table of FILEs that --json has written."),
  "page": (str, None, "With --table: put it in this page instead."),
}


def _text_flags(help_texts: Mapping[str, str]) -> dict[str, Flag]:
  """Returns text flags without defaults."""
  return {name: (str, None, text) for name, text in help_texts.items()}


# Flags and keys on the first screen of a long --help.
_FIRST_SCREEN = (
  *("workdir", "engine", "jobs", "dry_run", "list", "quiet", "json"),
  *("runs", "only", "workers", "seeds", "epochs", "batch_size"),
  *("learning_rate", "evaluations"),
)
_CELL_FOLDER = "WORKDIR/cells/NAME"  # the folder of one cell
COMMANDS: dict[str, Usage] = {  # in the order of the list that --help prints
  "train": Usage(
    "--config=CONFIG", _TRAIN, config="digits", first_screen=_FIRST_SCREEN
  ),
  "replay": Usage(_CELL_FOLDER, _REPLAY, max_words=1),
  "chaos": Usage("--config=CONFIG | --simulate=N", _CHAOS, config="digits"),
  "compare": Usage(
    f"{_CELL_FOLDER} | WORKDIR... | --config=CONFIG",
    _COMPARE,
    max_words=24,
    config="straggler_digits",
  ),
  "reproduce": Usage("FIGURE", _REPRODUCE, max_words=1),
  "timeline": Usage(_CELL_FOLDER, _TIMELINE, max_words=1),
  "show": Usage("WORKDIR", {}, max_words=1),
  "new": Usage("DIR", {}, max_words=1),
  "watch": Usage("WORKDIR", WATCH, max_words=1),
  "advise": Usage("--config=CONFIG", ADVISE, config="digits"),
  "plan": Usage("--config=CONFIG | --params=N", PLAN, config="pipeline_gpt"),
  "draw_schedule": Usage(
    "--schedule=NAME | --table=FILE",
    {**DRAW_SCHEDULE, **_text_flags(SCHEDULE_OPTIONS), **_text_flags(TIMES)},
  ),
  "bench": Usage("[NAME]", _BENCH, max_words=20),
  "completion": Usage("bash | zsh", {}, max_words=1),
}
# Commands that take a config as their first word, instead of --config.
CONFIG_COMMANDS = tuple(
  name
  for name, command in COMMANDS.items()
  if command.config and not command.max_words
)
