"""Pipeline parallelism: schedules are tables, and everything obeys a table.

`schedule` is the table and its text, CSV and JSON forms, `generate` makes the
tables of the literature, `validate` rejects what cannot be run, `analyze` reads
facts off a table. Stages keep their weights in servers of `asgd`; a stashed
weight is a ticket.
"""
