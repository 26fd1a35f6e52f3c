"""Jobs on a node: their code, their packages or images, their folders.

Read in this order:

- ``node_jobs``: what is prepared before a round needs it, and what is dropped once a job is over
- ``workspace``: a job's folder
- ``runtimes``: what its workers are run with
- ``interpreters``: warm interpreters, one for each environment
- ``old_jobs``: when the folders of finished jobs are deleted
"""
