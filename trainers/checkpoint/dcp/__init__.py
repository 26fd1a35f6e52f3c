"""``BucketWriter`` and ``BucketReader``: ``torch.distributed.checkpoint`` (DCP) on a bucket, whole or absent.

::

    dcp.save(state, storage_writer=BucketWriter("s3://bucket/run", step=100))
    dcp.load(state, storage_reader=BucketReader("s3://bucket/run"))

What is written is what ``Checkpointer`` writes: parts of raw tensor bytes with a digest for each block, a manifest, and
last of all, by the coordinator, an entry in the ledger (see ``commit_log``). A save that dies at any moment
leaves parts that no entry names; a later round sweeps them. So ``gpuctl ckpt`` lists, verifies and pulls such
checkpoints, ``Checkpointer`` restores one whose state has the same names (``{"model": …, "optimizer": …}`` of
``get_state_dict``), and ``BucketReader`` reads what ``Checkpointer`` has saved.

*Values.* DCP pickles what is no tensor, and unpickles it when it loads. We never unpickle what lies in a bucket: write
access must not be code execution. So a value is kept as JSON, as ``treespec.flatten_state`` has it, and what that
cannot hold is refused by name while it is saved. DCP's planner still wants a pickle to load. It gets one that its own
process made a moment before, of the plain value. Only the values of a ``DefaultSavePlanner`` are kept: the bytes of any
other planner mean something to that planner alone.

*Memory.* A save holds at most ten parts of a sixteenth of ``limits.memory_bytes`` each (160 MiB by default): eight on
their way, one that is being filled and one that is being let go. The tensors stay where they are; ``dcp.async_save``
makes a host copy of them before that. A load holds ``limits.memory_bytes`` at most, besides its targets and a copy of
those that have another dtype than what was saved.

*Shares.* A large tensor that several ranks hold is cut among them (see ``partition``); DCP would give it to one.

Read in this order: ``flatten`` (names), ``partition`` (which rank writes what), ``part_stream`` (parts of bytes),
``writer``, ``reader``.
"""
