"""The algebra of values: what each holds, what has been summed into it, and what every op makes of that.

It knows neither ranks nor tapes: pure functions from specs to specs.
"""
