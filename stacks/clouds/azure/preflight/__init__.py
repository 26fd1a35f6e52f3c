"""Questions to Azure before anything is made: ``checks``, with ``limits`` and ``permissions``."""
