"""A job's source made into packages in a folder, by uv.

Read in this order:

- ``lock``: a source resolved for this node
- ``driver``: whether a torch of the job's own can work here
- ``build``: a lock installed
- ``conda``, ``conda_tool``: both for an environment.yml, by rattler
- ``uv``: uv as a program, and its errors in a line
"""
