"""The long options of sbatch, to tell a misspelt one before the job is submitted.

From `man sbatch` of Slurm 24.05; and those of Pyxis, the container plugin of many GPU clusters.
"""

from zorse_megatron.schema.text.suggest import did_you_mean

_SBATCH = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint
container container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task
deadline delay-boot dependency distribution error exclude exclusive export export-file extra
extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task
gres gres-flags help hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type
mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue
nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket
open-mode output overcommit oversubscribe parsable partition power prefer priority profile
propagate qos quiet reboot requeue reservation resv-ports segment signal sockets-per-node
spread-job stepmgr switches test-only thread-spec threads-per-core time time-min tmp tres-bind
tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes wckey wrap
"""
_PYXIS = """
container-entrypoint container-entrypoint-log container-env container-image container-mount-home
container-mounts container-name container-readonly container-remap-root container-save
container-workdir container-writable no-container-entrypoint no-container-mount-home
no-container-remap-root
"""
KNOWN = frozenset((_SBATCH + _PYXIS).split())


def is_known(name: str) -> bool:
    """Whether sbatch takes it: an option, or the beginning of one."""
    return any(known.startswith(name) for known in KNOWN)


def closest(name: str) -> str:
    """Return a remedy for an unknown option."""
    return f"{did_you_mean(name, KNOWN)} An option of another plugin goes to sbatch itself."
