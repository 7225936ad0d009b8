"""Write plans as configurations of other frameworks.

Read `write` (which framework a recipe is for, and what of a step its file cannot say) and then the module of a
framework. Each translates a step into meanings of the framework's table of keys, from which `explain` reads, and
renders these as the framework's own file. A written configuration is read back, so whatever it does not say is known,
and stands in a comment.
"""
