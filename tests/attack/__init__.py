"""Random programs that are run for real: what the check accepts must compute one device's numbers, and nothing crashes.

Read `script.py` first (a program as text, rank by rank), then `writing.py` and its helpers `weights.py` and `losses.py`
(programs that are right by construction), `wild.py` (the same with mistakes), `subjects.py` (all families of programs),
`trial.py` (what is asked of one program), and `campaign.py` (ten thousand of them).
"""
