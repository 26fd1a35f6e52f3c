"""Workers in container images: a job's image on this node, and a round's workers in it.

Read in this order:

- ``client``: Docker or Podman, whichever is here
- ``command_lines``: what they are told
- ``node_containers``: the images that jobs need, and a round's container
- ``process``: that container, seen from the agent
- ``old_images``: which images go when the disk is full
- ``saved_image``: an image as the runtimes save it and load it
- ``bucket_images``: images on their way to the bucket and back
- ``build``: one made from a Dockerfile on this node
"""
