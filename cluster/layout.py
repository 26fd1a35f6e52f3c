"""Where each record lives below a cluster's prefix: the one place that spells keys.

::

    cluster.json                               ClusterSpec
    past.json                                  PastCluster
    nodes/<node>.json                          NodeRecord
    net/<node>.json                            NodeNetwork
    boot/<node>.json                           BootReport
    boot/<node>.log                            what the steps of its boot printed
    boot/<sha256>/…                            gpuctl's wheel and its pins, for machines to install
    hosts/<node>.json                          SshHost
    rank0/<version>                            ledger of Rank0
    queue/<version>                            ledger of job ids: the line
    code/<sha256>.tar.zst                      packed folders, each once
    environments/requests/<digest>.json        ResolvedRequest
    environments/building/<digest>.json        EnvironmentBuild
    environments/built/<digest>/…              Environment and its archives
    environments/used/<digest>/<job>           empty: a job that ran in it
    environments/wheels/<sha256>/<name>        wheels that ``train --wheels`` has sent
    images/named/<name>.json                   ImageName
    images/built/<digest>.json                 StoredImage
    images/layers/<sha256>.zst                 its layers, each once
    stays/<node>.json                          MachineUsage
    jobs/<job>/spec.json                       JobSpec
    jobs/<job>/cancel                          CancelRequest
    jobs/<job>/rounds/<version>                ledger of Round
    jobs/<job>/exits/<round>/<node>.json       NodeExit
    jobs/<job>/logs/<round>/<node>/<n>.jsonl   what the workers printed
    jobs/<job>/metrics/<round>/<node>/<n>.jsonl
    jobs/<job>/tensorboard/<round>-<node>/…    event files
    jobs/<job>/checkpoints/ledger/<version>    ledger of CheckpointIndex
    jobs/<job>/checkpoints/<step>-r<round>…/…  their parts and manifests
    jobs/<job>/verification/<round>.json       Verification
    jobs/<job>/files/ledger/<version>          ledger of SnapshotIndex: what scripts wrote under $GPUCTL_CHECKPOINT_DIR
    jobs/<job>/files/blobs/<sha256>-r<round>…  the content of those files
    mingle/<id>/runs/<version>                 ledger of RunSpec: version n is run n of that ID, without a cluster
    mingle/<id>/<n>/…                          all of the above for that run, whose only job has the ID for its name
"""

from __future__ import annotations

CLUSTER = "cluster.json"
PAST = "past.json"
NODES = "nodes"
NETWORKS = "net"
BOOT = "boot"
MACHINE_USAGE = "stays"
HOSTS = "hosts"
RANK0 = "rank0"
QUEUE = "queue"
JOBS = "jobs"
MINGLE = "mingle"
ENVIRONMENTS = "environments"
IMAGES = "images"


def runs(run_id: str) -> str:
    return f"{MINGLE}/{run_id}/runs"


def run(run_id: str, number: int) -> str:
    return f"{MINGLE}/{run_id}/{number:06d}"


def node(name: str) -> str:
    return f"{NODES}/{name}.json"


def boot_report(name: str) -> str:
    return f"{BOOT}/{name}.json"


def boot_log(name: str) -> str:
    return f"{BOOT}/{name}.log"


def network(name: str) -> str:
    return f"{NETWORKS}/{name}.json"


def package(digest: str, name: str) -> str:
    return f"{BOOT}/{digest}/{name}"


def ssh_host(name: str) -> str:
    return f"{HOSTS}/{name}.json"


def machine_usage(name: str) -> str:
    return f"{MACHINE_USAGE}/{name}.json"


def code(digest: str) -> str:
    return f"code/{digest}.tar.zst"


def environment_request(digest: str) -> str:
    return f"{ENVIRONMENTS}/requests/{digest}.json"


def environment_build(request: str) -> str:
    return f"{ENVIRONMENTS}/building/{request}.json"


def environment(digest: str) -> str:
    return f"{ENVIRONMENTS}/built/{digest}/environment.json"


def environment_archive(digest: str, sha256: str) -> str:
    return f"{ENVIRONMENTS}/built/{digest}/{sha256}.tar.zst"


def environment_use(digest: str, job: str) -> str:
    return f"{ENVIRONMENTS}/used/{digest}/{job}"


def wheel(sha256: str, name: str) -> str:
    return f"{ENVIRONMENTS}/wheels/{sha256}/{name}"


def image_name(name: str) -> str:
    return f"{IMAGES}/named/{name}.json"


def image(digest: str) -> str:
    return f"{IMAGES}/built/{digest}.json"


def image_layer(sha256: str) -> str:
    return f"{IMAGES}/layers/{sha256}.zst"


def job_spec(job: str) -> str:
    return f"{JOBS}/{job}/spec.json"


def verification(job: str, number: int) -> str:
    return f"{JOBS}/{job}/verification/{number:06d}.json"


def cancel(job: str) -> str:
    return f"{JOBS}/{job}/cancel"


def rounds(job: str) -> str:
    return f"{JOBS}/{job}/rounds"


def exits(job: str, number: int) -> str:
    return f"{JOBS}/{job}/exits/{number:06d}"


def node_exit(job: str, number: int, name: str) -> str:
    return f"{exits(job, number)}/{name}.json"


def logs(job: str) -> str:
    return f"{JOBS}/{job}/logs"


def metrics(job: str) -> str:
    return f"{JOBS}/{job}/metrics"


def chunks(stream: str, number: int, name: str) -> str:
    """Folder of the chunks of one node in one round, under ``logs(job)`` or ``metrics(job)``."""
    return f"{stream}/{number:06d}/{name}"


def tensorboard(job: str) -> str:
    return f"{JOBS}/{job}/tensorboard"


def checkpoints(job: str) -> str:
    return f"{JOBS}/{job}/checkpoints"


def files(job: str) -> str:
    return f"{JOBS}/{job}/files"
