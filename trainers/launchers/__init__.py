"""How a node's worker processes are started and ended.

Read in this order:

- ``torchrun``: one round's workers, with torchrun's own launcher
- ``warm_interpreter``: a process with torch imported, which forks a launcher for each round
- ``preload``: what it imports beforehand
- ``worker_processes``: what torch's launcher does with processes, made quicker
- ``descendants``: finding what a worker has started, to end it
- ``process_group``: the same for any other launcher, of which ``adapters`` has one module each
- ``adapter``: what such a module is told, and tells
- ``key_value_store``: where the processes of some learn each other's ports
- ``container_entry``: the same in an image of the user's
- ``worker_site``: what Python runs first in the interpreters that a worker starts
"""
