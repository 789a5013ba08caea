"""Reading `cluster.yaml`: short forms, strict checks, and everything made explicit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zorse_megatron.errors import ClusterError
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.cluster_file import ClusterFile
from zorse_megatron.schema.cluster.cluster_rules import problems_of
from zorse_megatron.schema.cluster.resolve import resolved
from zorse_megatron.schema.cluster.short_forms import spelled_out
from zorse_megatron.schema.text.file_kind import FileKind
from zorse_megatron.schema.text.strict import built, read_file
from zorse_megatron.schema.text.yaml_text import read_yaml

CLUSTER_FILE = FileKind(
    name="cluster",
    syntax="YAML",
    document="docs/cluster-file.md",
    error=ClusterError,
    root=ClusterFile,
    removed={"price_per_gpu_hour": "Prices are not counted: plan for the GPUs that you pay for."},
)


def load_cluster(path: str | Path) -> Cluster:
    """Read, check and return the cluster in a file. Raises ClusterError with every problem."""
    return parse_cluster(read_file(path, CLUSTER_FILE), source=str(path))


def parse_cluster(data: bytes, *, source: str = "cluster") -> Cluster:
    """Check and return the cluster in `data`; Problems call it `source`. Raises ClusterError."""
    value, lines, problems = read_yaml(data, source, CLUSTER_FILE)
    file: ClusterFile = built(
        spelled_out(value), problems, CLUSTER_FILE, source, rules=problems_of, lines=lines
    )
    return resolved(file)


def dump_cluster(content: Mapping[str, Any]) -> str:
    """Return the text of a cluster file; parts that nodes share are written for each."""
    return yaml.dump(
        dict(content), Dumper=_WithoutAnchors, sort_keys=False, allow_unicode=True, width=100
    )


class _WithoutAnchors(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Cluster files have no anchors: their reader refuses them."""
        return True
