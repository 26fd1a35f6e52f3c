"""Bytes between processes.

- ``socket_bytes``: what the TCP sockets of this process have carried, as the kernel counts it
"""
