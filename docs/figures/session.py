"""Records the tutorial's run with a killed worker, as a picture of a terminal.

  python docs/figures/session.py docs/figures/session.svg

Runs the files of docs/tutorial.md: trains on Ray, kills the newest process of
the run, prints the rows of the kill in the trace, and replays the run.
"""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import rich.console
from rich._export_format import CONSOLE_SVG_FORMAT

from asgd.live import processes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
WIDTH = 100
# Without rich's fonts, which a browser would fetch from another site.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.S)


def show(console: rich.console.Console, command: str) -> None:
  """Prints a command as a shell shows it."""
  console.print(f"[bold green]$[/] [bold]{command}[/]", highlight=False)


def train(console: rich.console.Console, folder: Path) -> None:
  """Trains on Ray, and kills the newest process once the run has progressed."""
  command = "live.py", "ray", "runs/killed", "20000"
  show(console, "python " + " ".join(command))
  run = subprocess.Popen(
    [sys.executable, *command],
    cwd=folder,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  killed = False
  for line in run.stdout:
    text = line.rstrip().replace("dana_zero-n4-s0: ", "")
    console.print(text, highlight=False, no_wrap=True, overflow="ellipsis")
    if not killed and "updates/s" in line and not line.startswith("  0%"):
      newest = max(
        pid
        for pid in processes.descendants(run.pid)
        if "HostActor" in Path(f"/proc/{pid}/cmdline").read_text()
      )
      os.kill(newest, signal.SIGKILL)
      console.print(
        f"[bold red]    in another terminal:  kill -9 {newest}[/]",
        highlight=False,
      )
      killed = True
  if run.wait() or not killed:
    raise SystemExit("the run failed, or ended before a process was killed")


def main(out: Path) -> None:
  """Records the session, and writes the picture to `out`."""
  cnn, _, _, live, replay = re.findall(r"```python\n(.*?)```", PAGE, re.S)
  console = rich.console.Console(record=True, width=WIDTH, file=io.StringIO())
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    for file, text in (("cnn", cnn), ("live", live), ("replay", replay)):
      (folder / f"{file}.py").write_text(text)
    train(console, folder)
    for command in (
      r'grep -E "lost|leave|join" runs/killed/cells/*/trace-0.csv',
      "python replay.py",
    ):
      show(console, command)
      python = command.replace("python", sys.executable)
      done = subprocess.run(
        python, shell=True, cwd=folder, capture_output=True, text=True
      )
      console.print(done.stdout.rstrip(), highlight=False)
  title = "kill, recover, replay: the same bits"
  out.write_text(console.export_svg(title=title, code_format=FORMAT))


if __name__ == "__main__":
  main(Path(sys.argv[1]))
