"""A module per verb, in the sections of ``gpuctl --help``: ``machines``, ``costs``, ``jobs``, ``nodes``, ``other``."""
