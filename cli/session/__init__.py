"""Steps that several verbs share.

- ``open_cluster``: from settings to a cluster
- ``node_access``: its nodes, and the way to them
- ``job_upload``, ``verify_job``: jobs
- ``rental_plan``: from ``up``'s flags to a request
- ``renting``: the plan, the question and the cluster
- ``pulumi_consent``: whether Pulumi may be installed
- ``public_ip``: ``--ssh-from me``
- ``down_by_tag``, ``bucket_use``: what is left, without a record of it
"""
