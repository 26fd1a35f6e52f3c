"""The command line. All printing is here.

Read in this order:

- ``entry``: the command, before anything else is imported
- ``main``: the way in, and the exit code
- ``app``, ``verbs``: the table of verbs, each loaded only when it is used
- ``commands``: a module per verb
- ``session``: what several verbs do
- ``text_commands``, ``completions``: what all commands have in common, and what a shell offers
- ``command_words``: lines that end with ``-- CMD``
- ``settings``: flags, environment, ``gpuctl.yaml``
- ``render``: how it looks
- ``signals``: SIGTERM and SIGHUP are what Ctrl-C is
"""
