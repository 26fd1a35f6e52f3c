"""How nodes reach each other and what their network can do.

- ``addresses``: IP addresses, as sockets need them
- ``records``: what a node's network looks like from the node
- ``devices``: GPUs and network cards, as the kernel lists them
- ``tcp_probe``: whether a port can be reached
- ``verification``: what ``gpuctl verify`` measured, and what follows from it
"""
