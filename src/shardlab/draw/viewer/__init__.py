"""Interactive page of a step: one HTML file with all data, which needs no server and no network.

Read `page.py` first: it puts the data and the scripts together. `columns.py` packs the tables of a step, of which
`step_tables.py` makes those of a program and its timelines, and `trace_file.py` those of a trace. The scripts, plain
modules that Node can test, are in `assets`: `model.js` unpacks the data, and `viewer.js` puts the parts together.
"""
