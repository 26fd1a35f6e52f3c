"""The demo, and verbs about gpuctl itself.

- ``demo``: the verb; ``demo_runs`` is what it does, ``demo_digits`` what it trains, ``demo_plot`` its picture
- ``config``, ``completion``: settings, and what a shell completes
"""
