"""Means of tensors between workers that otherwise train apart.

- ``interface``: what a strategy asks for, whoever the workers are
- ``group``: workers that are the ranks of one torch process group
"""
