"""The protocols of asgd: one value each, in a module of its name."""
