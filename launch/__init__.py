"""Commands. Flags, files, logs and clocks live here and nowhere else."""
