"""A checkpoint as files that other programs read.

- ``pull``: from the bucket to a folder
- ``reassembly``: tensors put together from their pieces
- ``safetensors``: the file format
"""
