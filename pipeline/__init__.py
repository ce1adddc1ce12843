"""Pipeline parallelism: schedules are tables, and everything obeys a table.

`table` is the table and its text, CSV and JSON forms, `schedules` makes the
tables of the literature, `validate` rejects what cannot be run, `analyze` reads
facts off a table, and `executor` obeys it. Stages keep their weights in servers
of `asgd`; a stashed weight is a ticket.
"""
