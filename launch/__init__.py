"""Commands. Flags, files, logs and clocks live here and nowhere else."""

import signal
import sys

if sys.argv[:1] == ["-m"]:
  # While libraries are imported, Ctrl-C just ends the command: an exception
  # would come out of one of them as a page, or be swallowed there.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
