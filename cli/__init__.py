"""The command line: one module per verb, and all printing.

``main`` is the way in, ``verbs`` the table, ``settings`` what the verbs are told (flag, environment, file, default),
``terminal`` how it looks. Each verb's module is loaded when that verb is used, and holds a ``verb`` function whose
docstring is its help.
"""
