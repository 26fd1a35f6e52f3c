"""Questions to AWS before anything is made: ``checks``, with ``limits`` and ``permissions``."""
