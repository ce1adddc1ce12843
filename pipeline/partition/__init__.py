"""Which nodes of a network make a stage, and which devices hold it."""
