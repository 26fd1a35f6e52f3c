"""torchrun with gpuctl's agreement in place of its own rendezvous: ``torchrun --rdzv-backend=gpuctl``.

Read in this order:

- ``registration``: what every torchrun on the machine imports
- ``handler``: what torchrun asks of a rendezvous
- ``elastic_node``: this node in a run, as ``rendezvous`` has it, for the agent of torchrun
- ``agent_patch``: what a rendezvous alone cannot do: telling a lost node from a failure
"""
