"""Interactive page of a step: one HTML file with all its data, usable without a server or a network.

Read `page.py` first: it combines the data and the scripts. `columns.py` packs tables. `step_tables.py` makes the tables
of a program and its timelines, and `trace_file.py` those of a trace. The scripts in `assets` are plain modules that
Node can test: `model.js` unpacks the data, and `viewer.js` combines the parts of the page.
"""
