"""The shared kernel: the words every floor uses, and the few primitives by which machines agree.

Read in this order: ``records`` (what is said), ``bucket`` (where it is kept), ``ledger`` (how one writer wins),
``rank0`` (who leads), ``sightings`` (what rank 0 sees of the nodes), ``rounds`` (what it decides, a pure function),
``mingle`` (how a node takes part).
"""
