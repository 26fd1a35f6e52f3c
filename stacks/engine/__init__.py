"""Pulumi, run through its Automation API.

Read in this order:

- ``automation``: a cluster's stack, made, changed and taken away
- ``events``: what Pulumi says meanwhile
- ``errors``: why it failed, for people
- ``deployment``: a stack's state
- ``pulumi_process``: its CLI as a process
- ``interrupts``: Ctrl-C while it is at work
- ``pulumi_install``, ``pulumi_release``: its CLI and plug-ins, found or installed
"""
