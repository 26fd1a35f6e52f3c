"""The command line: one module per verb, and all printing.

``main`` is the way in, ``verbs`` the table, ``settings`` what the verbs are told (flag, environment, file, default),
``terminal`` how it looks. Each verb's module is loaded when that verb is used, and holds a function ``verb`` (or
one named as the verb) whose docstring is its help, or an ``app`` with verbs below it.
"""
