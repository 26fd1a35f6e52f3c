"""What runs on a bare machine until it is a node, and watches over it from then on. Standard library only, one file per
concern, Python >= 3.10: it travels in the user-data, and is all there is if everything after it fails.

On the machine::

    /etc/gpuctl/node.json              NodeSpec
    /opt/gpuctl/boot/gpuctl_boot/      this folder
    /opt/gpuctl/venv/                  gpuctl, once it is installed
    /var/lib/gpuctl/boot/<step>.done   markers: what was done is not done again, not by a reboot either
    /var/lib/gpuctl/node/              the agent's folder: identity.json, jobs/…
    /var/log/gpuctl-boot.log           also in the bucket, as boot/<node>.log, after every step
    /run/gpuctl/rank0.json             who is rank 0, kept current by the agent, gone with it; in containers too
    /run/gpuctl/busy                   touched by the agent while a job is here; the idle watch reads its time
    /run/gpuctl/ill                    what is wrong with a GPU, once no work is left: the idle watch has it replaced
    /run/gpuctl/leaving                claim: who made it takes the machine away, for the reason in it; nobody else does

In the bucket, below the cluster's prefix::

    boot/<node>.json                   how far it is: step, state (booting, ready, failed), reason, addresses, host keys
    boot/<node>.log                    what the steps printed

Read in this order: ``metadata`` (who this machine is), ``steps`` (what is done once), ``install`` with ``packages``,
``driver`` and ``scratch`` (what the steps do), ``gate`` (whether the GPUs are sound), ``store`` with ``sigv4`` (the
bucket), ``report`` (how far it is), ``idle`` (whether it is used), ``leave`` (taking it away). They import each other
relatively and nothing else of gpuctl.
"""

FROM_WHEEL = ("driver", "gate", "install", "packages", "scratch")
"""Modules that are not in user-data: a machine that is far enough to need them takes them from gpuctl's wheel."""
