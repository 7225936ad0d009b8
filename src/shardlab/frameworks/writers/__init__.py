"""Write plans as configurations of other frameworks.

Read `write` (the framework of a recipe, and the comparison of a step with its file) and then the module of a framework.
Each translates a step into meanings of the framework's table of keys, with which `explain` reads files, and renders
these as the framework's own file. A written configuration is read back and compared with the step, so a comment can
list every difference.
"""
