"""The commands of `asgd`: flags, exit statuses and printed lines.

    asgd NAME --flag=... -> __main__ -> command_line.dispatch  (no library)
                         -> NAME.py -> flags.run(main) -> asgd, pipeline

`command_flags` has the flags of all commands as plain data. `command_line`
prints --help and refuses wrong flags before JAX is imported. `flags` reads the
values, and turns errors into one line and a status. Functions that users import
are in `asgd` and `pipeline`. Read `train.py` first.
"""

import gc
import os
import signal
import sys

from . import command_line, platforms

# sys.argv[0] is "-m" while the package of `python -m launch.NAME` is imported,
# and the path of the script for `asgd`. Any other import of this package has
# no effects.
if os.path.basename("".join(sys.argv[:1])) in ("-m", "asgd"):
  # Ctrl-C during the import of libraries ends the command at once. Otherwise
  # KeyboardInterrupt is raised inside a library, which prints a page of
  # traceback or swallows it.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  # Imported modules stay: garbage collections during the import would find
  # nothing and take a tenth of the time. `flags.run` enables them again.
  gc.disable()
  # JAX reads its environment variables when it is imported.
  platforms.choose()
  # `python -m launch.NAME` imports this package first, and then its module,
  # which imports JAX.
  command_line.dispatch_module(__name__)
