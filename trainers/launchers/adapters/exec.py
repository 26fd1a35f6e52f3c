"""Any program, once on each node: it finds who is there in its environment, and does the rest itself.

No MPI is pretended. ``PMI_…`` variables that nobody serves make each process a world of its own; those of Slurm and
Open MPI do the same to libraries that look for them, so they are there only where asked for (``exec:slurm``,
``exec:ompi``), for programs that read their rank and nothing else.
"""

from __future__ import annotations

from gpuctl.trainers.launchers.adapter import Launcher, Process


def variables(_process: Process) -> dict[str, str]:
    return {}


def slurm(process: Process) -> dict[str, str]:
    """As ``srun`` sets them (https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES)."""
    world = process.world
    hosts = ",".join(world.hosts)
    return {
        "SLURM_PROCID": str(process.rank),
        "SLURM_NTASKS": str(world.size),
        "SLURM_LOCALID": str(process.local_rank),
        "SLURM_NODEID": str(world.rank),
        "SLURM_NNODES": str(len(world.hosts)),
        "SLURM_NTASKS_PER_NODE": str(world.nproc),
        "SLURM_JOB_ID": str(world.round),
        "SLURM_JOB_NAME": world.job,
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_STEP_NODELIST": hosts,
    }


def ompi(process: Process) -> dict[str, str]:
    """As Open MPI's ``mpirun`` sets them (https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html)."""
    world = process.world
    return {
        "OMPI_COMM_WORLD_RANK": str(process.rank),
        "OMPI_COMM_WORLD_SIZE": str(world.size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process.local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(world.nproc),
        "OMPI_COMM_WORLD_NODE_RANK": str(process.local_rank),
        "OMPI_UNIVERSE_SIZE": str(world.size),
    }


LAUNCHER = Launcher("exec", variables, ends_softly=True, options={"slurm": slurm, "ompi": ompi})
