"""The shared kernel: what every machine agrees on. It imports no torch, and nothing of the other floors.

Read in this order: ``records`` (what is written), ``layout`` (under which keys), ``storage`` (where it is kept),
``agreement`` (how one writer wins), ``membership`` (who leads, who lives, and what round a job is in), ``jobs`` (the
queue, and the code that is sent), ``environments`` (the packages that a script needs), ``checkpoints`` and
``snapshots`` (what training keeps), ``network`` (who can reach whom), ``views`` (what people ask of a cluster).

``worker_context`` is what an agent tells its workers. Small things that all of it uses: ``errors``, ``clock``,
``concurrency``, ``retry``, ``shared_key``, ``atomic_write``, ``disk``, ``distribution``.
"""
