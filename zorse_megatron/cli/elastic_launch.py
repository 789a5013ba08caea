"""Writes the batch script of a job that goes on with the nodes that are left."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.cli.elastic_options import ElasticOptions
from zorse_megatron.cli.launch_options import partitions_of, sbatch_options_of
from zorse_megatron.launch.as_written import with_checksum
from zorse_megatron.launch.batch_script import BatchOptions
from zorse_megatron.launch.components import components_of
from zorse_megatron.launch.elastic.elastic_script import elastic_script
from zorse_megatron.launch.training_command import training_of
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.cluster.fewer_gpus import nodes_without, with_gpus


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """A job, with all of its nodes, as `zorse launch --elastic` was told of it."""

    plan: Path
    cluster: Path
    given: tuple[str, ...]
    """The training command."""
    partitions: tuple[str, ...]
    sbatch: tuple[str, ...]
    python: str
    elastic: ElasticOptions

    def script(self, nodes: Collection[str], title: str) -> str:
        """Return the batch script that asks for these nodes of the cluster file."""
        whole = self.whole()
        lost = {node.name for node in whole.nodes} - set(nodes)
        cluster = self._without(lost) if lost else whole
        known = {"", *(node.name for node in cluster.nodes), *cluster.gpu_kinds}
        pairs = partitions_of(self.partitions)
        gone = {node.name for node in whole.nodes} | set(whole.gpu_kinds)
        usable = {k: part for k, part in pairs.items() if k in known or k not in gone}
        training = training_of(self.given, plan=str(self.plan), cluster=str(self.cluster))
        options = BatchOptions(
            python=self.python,
            names_nodes=True,
            more=sbatch_options_of(self.sbatch),
            survives_nodes=True,
        )
        text = elastic_script(
            components_of(cluster, usable),
            training,
            options,
            supervised=self._words(),
            given=self.given,
            title=title,
        )
        return with_checksum(text)

    def whole(self) -> Cluster:
        """The cluster with all nodes."""
        return load_cluster(self.cluster)

    def _without(self, lost: Collection[str]) -> Cluster:
        whole, source = self.whole(), str(self.cluster)
        return with_gpus(whole, nodes_without(whole, lost, source=source), source=source)

    def _words(self) -> list[str]:
        words = [str(self.plan), "--cluster", str(self.cluster), *self.elastic.words()]
        words += _repeated("--partition", self.partitions)
        return words + _repeated("--sbatch", self.sbatch)


def _repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]
