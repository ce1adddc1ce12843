"""Shows a run, while it trains, on a local page that refreshes itself.

  asgd watch WORKDIR

prints the address of the page: its cells, and for those in training the rate,
the loss, histograms of staleness and gap, the workers' time, bytes, faults and
recoveries. --port=N chooses the port (0: any that is free). Ctrl-C ends the
page, and the run continues. Only programs on this machine can open the page.
The command waits for a folder that does not exist yet, if its parent exists.

  asgd watch WORKDIR --cell=NAME --picture=FILE.svg

writes the panels of a cell to a file, and ends.
"""

import argparse
import functools
import http.server
import signal
import sys
import time
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

from asgd import safe_files
from asgd.pages import page, panels, run_files

from . import command_flags, command_line

_REFRESH_SECONDS = 1.0  # seconds between two requests of the page
# After so many seconds without a write a cell is silent; its process writes
# progress.json once a second while messages arrive.
_SILENT_SECONDS = 30.0
_MAX_SHOWN = 4  # cells with panels
# Only programs of this machine can reach it.
_HOST = "127.0.0.1"
_POLL_SECONDS = 0.2  # seconds between two looks at a folder that is waited for


def _ago_text(seconds: float) -> str:
  """Returns a time that has passed as text."""
  for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
    if seconds >= 2 * length:  # "2 hours", but "119 minutes"
      return f"{seconds / length:.0f} {unit} ago"
  return f"{seconds:.0f} s ago"


@functools.lru_cache(maxsize=1024)
def _panels(cell_folder: Path, last_write: float) -> panels.Panels:
  """Returns the panels of a cell, which are drawn again after a write only."""
  del last_write  # the time of the last write, which is part of the cache's key
  return panels.cell_panels(run_files.read_cell(cell_folder))


def _state(cell_folder: Path, ago: float) -> str:
  """Returns the state of a cell that is not finished: training; stopped; or
  silent, if its process was killed or is in a long step."""
  if not run_files.is_locked(cell_folder):
    return "stopped"
  return "training" if ago < _SILENT_SECONDS else "silent"


def _read_cells(workdir: Path) -> list[tuple[panels.Panels, float]]:
  """Returns the panels of each cell, and the seconds since its last write."""
  cells = []
  for cell_folder in run_files.cell_folders(workdir):
    last_write = run_files.last_write(cell_folder)
    cell_panels = _panels(cell_folder, last_write)
    # A shared disk's clock may be ahead.
    seconds_ago = max(time.time() - last_write, 0.0)
    # A finished cell keeps its state, however long ago it was written.
    if cell_panels.state != run_files.FINISHED:
      cell_panels = cell_panels._replace(state=_state(cell_folder, seconds_ago))
    cells.append((cell_panels, seconds_ago))
  return cells


def _shown_cells(
  cells: list[tuple[panels.Panels, float]], name: str | None
) -> list[panels.Panels]:
  """Returns the cells to show: the named one, else those in training, else the
  one that was written last."""
  # A name that is not known shows the others: the page stays useful.
  named = [cell for cell, _ in cells if cell.name == name]
  training = [cell for cell, _ in cells if cell.state == "training"]
  latest = [cell for cell, _ in sorted(cells, key=lambda pair: pair[1])[:1]]
  return (named or training or latest)[:_MAX_SHOWN]


def render(workdir: Path, cell: str | None = None) -> str:
  """Returns the page of a run as it is now.

  Args:
    workdir: folder of the run.
    cell: name of the cell to show; None: those in training.

  Raises:
    ValueError: the folder is no run's.
  """
  cells = _read_cells(workdir)
  n_finished = sum(cell.state == run_files.FINISHED for cell, _ in cells)
  return page.render(
    workdir.resolve().name,
    f"{n_finished} of {len(cells)} cells that have begun are finished",
    "watch.html",
    cells=[(cell_panels, _ago_text(ago)) for cell_panels, ago in cells],
    shown=_shown_cells(cells, cell),
    milliseconds=round(1000 * _REFRESH_SECONDS),
  )


# Pixels of a picture: its charts, and each lane and each event below them.
_CHARTS_HEIGHT, _LANE_HEIGHT, _LINE_HEIGHT = 330, 22, 21


def picture(workdir: Path, cell: str | None = None) -> str:
  """Returns the panels of a cell as an SVG file; see `render`."""
  cells = _read_cells(workdir)
  names = [cell_panels.name for cell_panels, _ in cells]
  if cell is not None and cell not in names:
    raise ValueError(
      f"{workdir} has no cell {cell!r} that has begun; known:"
      f" {', '.join(names)}"
    )
  cell_panels = next(iter(_shown_cells(cells, cell)), None)
  if cell_panels is None:
    raise ValueError(f"{workdir} has no cell that has begun: wait for one")
  lanes = cell_panels.strip.lanes if cell_panels.strip else []
  lines = cell_panels.events
  height = _CHARTS_HEIGHT + _LANE_HEIGHT * len(lanes)
  # Two more lines: the heading of the events, and a margin.
  height += _LINE_HEIGHT * (len(lines) + 2) if lines else 0
  lead = f"{cell_panels.name}, {cell_panels.state}"
  content = {"cell": cell_panels, "height": height}
  return page.render(cell_panels.name, lead, "picture.html", **content)


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers with the page of the server's run."""

  server: "PageServer"

  def do_GET(self) -> None:  # noqa: N802  a name of the base class
    """Sends the page, or why there is none."""
    # The name under which the browser reached this server.
    host = self.headers.get("Host", "").rpartition(":")[0]
    address = urllib.parse.urlsplit(self.path)
    if host not in (_HOST, "localhost"):
      # Another site may resolve its own name to this machine (DNS rebinding),
      # to read the page from the browser.
      self.send_error(HTTPStatus.FORBIDDEN, "open the printed address")
      return
    if address.path != "/":
      self.send_error(HTTPStatus.NOT_FOUND)
      return
    (name,) = urllib.parse.parse_qs(address.query).get("cell", [None])[:1]
    try:
      content = render(self.server.workdir, name).encode()
    except (ValueError, OSError) as error:
      # The text of the error may have characters that a status line may not.
      self.send_error(HTTPStatus.NOT_FOUND, "no run", str(error))
      return
    self.send_response(HTTPStatus.OK)
    self.send_header("Content-Type", "text/html; charset=utf-8")
    self.send_header("Content-Length", str(len(content)))
    # The page changes every second.
    self.send_header("Cache-Control", "no-store")
    self.end_headers()
    self.wfile.write(content)

  def log_message(self, *_: Any) -> None:
    """Logs nothing: the page asks every second."""


class PageServer(http.server.ThreadingHTTPServer):
  """Serves the page of one run, on this machine only."""

  daemon_threads = True  # a request does not delay Ctrl-C

  def __init__(self, workdir: Path, port: int):
    """Raises ValueError if the folder is no run's, or the port is in use."""
    self.workdir = workdir
    # Fail now for a folder without a run, not at the first request.
    run_files.cell_folders(workdir)
    try:
      super().__init__((_HOST, port), _Handler)
    except (OSError, OverflowError) as error:
      raise ValueError(
        f"port {port} cannot be used ({error}): choose another with --port, or"
        " --port=0 for any that is free"
      ) from error

  @property
  def address(self) -> str:
    """The address of the page."""
    return f"http://{_HOST}:{self.server_port}/"


class _Parser(argparse.ArgumentParser):
  """A parser with errors of one line, as those of other commands."""

  def error(self, message: str) -> NoReturn:
    """Fails without argparse's usage."""
    command_line.fail(f"{message}; asgd watch --help describes the flags")


def wait_for_folder(workdir: Path, sleep: Callable[[float], None]) -> None:
  """Waits for the folder of a run that may still start. Returns at once if the
  folder exists, and if the folder above it does not: then it is a mistake.

  Args:
    workdir: folder of the run.
    sleep: waits so many seconds between two looks.
  """
  if workdir.exists() or not workdir.absolute().parent.is_dir():
    return
  print(
    f"waiting for {workdir}, which does not exist yet: start asgd train"
    f" --workdir={workdir} (Ctrl-C ends it)",
    flush=True,
  )
  # A run makes its folder first, and then its config.json.
  while not ((workdir / "config.json").exists() or workdir.is_file()):
    sleep(_POLL_SECONDS)


def main(words: list[str]) -> None:
  """Serves the page until Ctrl-C."""
  # argparse, not absl: this command must start at once.
  parser = _Parser("asgd watch", description=__doc__)
  parser.add_argument("workdir", nargs="?", type=Path, help="folder of a run")
  for name, (kind, default, text) in command_flags.WATCH.items():
    parser.add_argument(f"--{name}", type=kind, default=default, help=text)
  options = parser.parse_args(words)
  try:
    if options.workdir is None:
      raise ValueError("no run is named: write asgd watch WORKDIR")
    if options.picture:
      safe_files.write(
        Path(options.picture), picture(options.workdir, options.cell)
      )
      print(options.picture)
      return
    wait_for_folder(options.workdir, time.sleep)
    server = PageServer(options.workdir, options.port)
  except (ValueError, OSError) as error:
    command_line.fail(str(error))
  except KeyboardInterrupt:  # while it waited
    print()
    return
  with server:
    print(f"{options.workdir} at {server.address} (Ctrl-C ends it)", flush=True)
    try:
      server.serve_forever()
    except KeyboardInterrupt:
      print()


if __name__ == "__main__":
  signal.signal(signal.SIGINT, signal.default_int_handler)  # see __init__
  main(sys.argv[1:])
