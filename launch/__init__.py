"""The commands of `asgd`: flags, exit statuses and printed lines.

    asgd NAME --flag=... -> launch/NAME.py -> flags.run(main) -> asgd, pipeline

`__main__` finds the command's module, `flags` parses its command line and turns
errors into one line and a status. A function that can be imported belongs to
`asgd` or `pipeline`. Begin with `train.py`.
"""

import gc
import os
import signal
import sys

if os.path.basename("".join(sys.argv[:1])) in ("-m", "asgd"):
  # Ctrl-C during the import of libraries ends the command at once. Otherwise
  # KeyboardInterrupt is raised inside a library, which prints a page of
  # traceback or swallows it.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  # Imported modules stay: garbage collections during the import would find
  # nothing and take a tenth of the time. `flags.run` enables them again.
  gc.disable()
