"""Shows a run, while it trains, on a local page that refreshes itself.

  asgd watch WORKDIR

prints the address of the page: its cells, and for those in training the rate,
the loss, histograms of staleness and gap, the workers' time, bytes, faults and
recoveries. --port=N chooses the port (0: any that is free). Ctrl-C ends it, and
the run continues. Only programs on this machine can open the page.

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
from http import HTTPStatus
from pathlib import Path
from typing import Any

from asgd import safe_files
from asgd.pages import page, panels, run_files

from . import command_flags

_REFRESH = 1.0  # seconds between two looks of the page
_SILENT = 30.0  # seconds without a write, after which a cell is silent
_SHOWN = 4  # most cells whose panels are shown
_HOST = "127.0.0.1"
_USAGE_ERROR = 2


def _ago(seconds: float) -> str:
  """Returns a time that has passed as text."""
  for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
    if seconds >= 2 * length:
      return f"{seconds / length:.0f} {unit} ago"
  return f"{seconds:.0f} s ago"


@functools.lru_cache(maxsize=1024)
def _panels(place: Path, written: float) -> panels.Panels:
  """Returns the panels of a cell, which are drawn again after a write only."""
  del written
  return panels.of_cell(run_files.read_cell(place))


def _state(place: Path, ago: float) -> str:
  """Returns the state of a cell that is not finished: training; stopped; or
  silent, if its process was killed or is in a long step."""
  if not run_files.is_held(place):
    return "stopped"
  return "training" if ago < _SILENT else "silent"


def _look(workdir: Path) -> list[tuple[panels.Panels, float]]:
  """Returns the panels of each cell, and the seconds since its last write."""
  cells = []
  for place in run_files.cells_of(workdir):
    written = run_files.last_write(place)
    drawn, ago = _panels(place, written), max(time.time() - written, 0.0)
    if drawn.state != run_files.FINISHED:
      drawn = drawn._replace(state=_state(place, ago))
    cells.append((drawn, ago))
  return cells


def _chosen(
  cells: list[tuple[panels.Panels, float]], name: str | None
) -> list[panels.Panels]:
  """Returns the cells whose panels are shown: the named one, else those in
  training, else the one that was written last."""
  named = [cell for cell, _ in cells if cell.name == name]
  training = [cell for cell, _ in cells if cell.state == "training"]
  last = [cell for cell, _ in sorted(cells, key=lambda each: each[1])[:1]]
  return (named or training or last)[:_SHOWN]


def render(workdir: Path, cell: str | None = None) -> str:
  """Returns the page of a run as it is now.

  Args:
    workdir: folder of the run.
    cell: name of the cell whose panels are shown; None: those in training.

  Raises:
    ValueError: the folder is no run's.
  """
  cells = _look(workdir)
  ended = sum(each.state == run_files.FINISHED for each, _ in cells)
  return page.render(
    workdir.resolve().name,
    f"{ended} of {len(cells)} cells that have begun are finished",
    "watch.html",
    cells=[(each, _ago(ago)) for each, ago in cells],
    shown=_chosen(cells, cell),
    milliseconds=round(1000 * _REFRESH),
  )


_HEIGHT, _OF_LANE, _OF_LINE = 330, 22, 21  # of a picture, in pixels


def picture(workdir: Path, cell: str | None = None) -> str:
  """Returns the panels of a cell as an SVG file; see `render`."""
  cells = _look(workdir)
  known = [drawn.name for drawn, _ in cells]
  if cell is not None and cell not in known:
    raise ValueError(
      f"{workdir} has no cell {cell!r} that has begun; known:"
      f" {', '.join(known)}"
    )
  drawn = next(iter(_chosen(cells, cell)), None)
  if drawn is None:
    raise ValueError(f"{workdir} has no cell that has begun: wait for one")
  lanes, lines = drawn.strip.lanes if drawn.strip else [], drawn.events
  height = _HEIGHT + _OF_LANE * len(lanes)
  height += _OF_LINE * (len(lines) + 2) if lines else 0
  lead = f"{drawn.name}, {drawn.state}"
  content = {"cell": drawn, "height": height}
  return page.render(drawn.name, lead, "picture.html", **content)


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers with the page of the server's run."""

  server: "PageServer"

  def do_GET(self) -> None:  # noqa: N802  a name of the base class
    """Sends the page, or why there is none."""
    host = self.headers.get("Host", "").rpartition(":")[0]
    address = urllib.parse.urlsplit(self.path)
    if host not in (_HOST, "localhost"):
      # A page of another site could have its name lead here.
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
    self.send_header("Cache-Control", "no-store")
    self.end_headers()
    self.wfile.write(content)

  def log_message(self, *_: Any) -> None:
    """Logs nothing: the page asks every second."""


class PageServer(http.server.ThreadingHTTPServer):
  """Serves the page of one run, on this machine only."""

  daemon_threads = True

  def __init__(self, workdir: Path, port: int):
    """Raises ValueError if the folder is no run's, or the port is in use."""
    self.workdir = workdir
    run_files.cells_of(workdir)
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


def main(words: list[str]) -> None:
  """Serves the page until Ctrl-C."""
  parser = argparse.ArgumentParser("asgd watch", description=__doc__)
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
    server = PageServer(options.workdir, options.port)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(_USAGE_ERROR)
  with server:
    print(f"{options.workdir} at {server.address} (Ctrl-C ends it)", flush=True)
    try:
      server.serve_forever()
    except KeyboardInterrupt:
      print()


if __name__ == "__main__":
  signal.signal(signal.SIGINT, signal.default_int_handler)  # see __init__
  main(sys.argv[1:])
