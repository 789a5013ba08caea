"""The short forms of `cluster.yaml`, spelled out.

`gpus: 8 x A100-40`, `link: NVSwitch 220 GB/s` and `nics: 4 x 100 Gb/s` become the objects that
`cluster_file.py` describes. What is not a short form is left as it is: if it is wrong, the strict
reader says so at its place.
"""

import re
from typing import Any

_COUNT = re.compile(r"\s*(\d{1,9})\s*[xX×*]\s*(.*\S)\s*", re.DOTALL)  # noqa: RUF001


def spelled_out(value: Any) -> Any:
    """Return the value of a cluster file without short forms."""
    if not isinstance(value, dict):
        return value
    result = dict(value)
    if isinstance(result.get("nodes"), list):
        result["nodes"] = [_node(node) for node in result["nodes"]]
    if isinstance(result.get("switches"), list):
        names = result["switches"]
        result["switches"] = [{"name": n} if isinstance(n, str) else n for n in names]
    return result


def _node(node: Any) -> Any:
    if isinstance(node, str):
        return {"instance": node}
    if not isinstance(node, dict):
        return node
    forms = {"gpus": _gpus, "link": _link, "nics": _nics}
    return {key: forms[key](item) if key in forms else item for key, item in node.items()}


def _gpus(value: Any) -> Any:
    """`8 x A100-40`, or a list of such texts and of objects, or one object."""
    entries = value if isinstance(value, list) else [value]
    if value is None or not all(isinstance(entry, str | dict) for entry in entries):
        return value
    return [_counted(entry, "kind") if isinstance(entry, str) else entry for entry in entries]


def _link(value: Any) -> Any:
    """`NVSwitch`, or with its bandwidth: `PCIe 10 GB/s`."""
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return {**value, "type": value["type"].lower()}
    if not isinstance(value, str):
        return value
    link_type, _, bandwidth = value.strip().partition(" ")
    spelled = {"type": link_type.lower()}
    return {**spelled, "bandwidth": bandwidth.strip()} if bandwidth else spelled


def _nics(value: Any) -> Any:
    """`400 Gb/s` or `4 x 100 Gb/s`."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return _counted(value, "bandwidth")
    return value


def _counted(value: Any, key: str) -> dict[str, Any]:
    match = _COUNT.fullmatch(value) if isinstance(value, str) else None
    return {"count": int(match[1]), key: match[2]} if match else {key: value}
