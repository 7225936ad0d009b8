"""Write plans as configurations of other frameworks.

Read `write` (the framework of a recipe, and the comparison of a step with its file) and then the module of a framework.
Each module translates a step into values by meaning, with the table of keys with which `shardlab explain` reads files
(`frameworks/settings.py`), and renders these as the framework's own file. A written configuration is read back and
compared with the step, so a comment can list every difference.
"""
