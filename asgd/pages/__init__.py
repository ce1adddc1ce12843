"""HTML pages of results: reports, comparisons, and the page of a running job.

  run_files.read_cell(folder) -> panels.cell_panels(cell) -> page.render(...)

Nothing here imports JAX, so `asgd watch` starts at once and takes no device.
Pages need no network and no other file. The templates escape all text.
"""
