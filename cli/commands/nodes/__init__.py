"""Verbs that log in to nodes: ``ssh``, ``exec``, ``cp`` and ``forward``.

``command_words`` is about lines that end with ``-- CMD``.
"""
