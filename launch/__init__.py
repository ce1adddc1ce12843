"""Commands. Flags, files, logs and clocks live here and nowhere else."""

import gc
import os
import signal
import sys

if os.path.basename("".join(sys.argv[:1])) in ("-m", "asgd"):
  # While libraries are imported, Ctrl-C just ends the command: an exception
  # would come out of one of them as a page, or be swallowed there.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  # What is imported stays: to look for garbage in it takes a tenth of the time.
  # `flags.run` looks again.
  gc.disable()
