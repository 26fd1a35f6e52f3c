"""What makes a machine a node, and what a node does.

Read in this order:

- ``user_data``, ``node_spec``: what a rented machine is told when it first boots
- ``boot``: the program that makes it a node; standard library only, it travels in user-data
- ``identity``, ``gpus``, ``ports``: what a node is, what it has
- ``wake``: what an agent's loop waits for
- ``network``: its interfaces, the variables that NCCL needs, who can reach it
- ``agent``: the process that takes part in the cluster
- ``rendezvous``: taking part without a cluster, for as long as a command runs
- ``torchrun_plugin``: the same for torchrun, by its own flags
- ``jobs``: jobs on a node: their code, images and folders
- ``environments``: the packages of a job's script
- ``launch``, ``containers``: starting a round's workers, in a warm interpreter or in an image
- ``mirror``: files that a script keeps, copied to the bucket and back
- ``monitors``: a cloud's notice, a job that hangs
- ``job_shell``, ``jupyter``: where a job's workers run, for people
- ``tensorboard``: TensorBoard over what is in the bucket
"""
