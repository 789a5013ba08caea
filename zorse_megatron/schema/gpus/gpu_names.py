"""GPU names that a cluster file may not use: ambiguous ones, and unsupported vendors."""

import re
from collections.abc import Iterable

from zorse_megatron.errors import Problem
from zorse_megatron.schema.gpus.device_names import VENDOR
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS, squeezed
from zorse_megatron.schema.text.quantities import spell_bandwidth
from zorse_megatron.schema.text.suggest import did_you_mean

# What a name may have after the model's that does not say which memory: "A100 SXM4", "V100 PCIe".
_FORM = re.compile(r"(sxm\d?|pcie|nvlink)$")
# Chips, clocks and memory of their own, under the numbers of desktop cards.
_LAPTOP = re.compile(r"laptop|mobile|notebook|max-?q|\d{4}m$", re.IGNORECASE)
# What others call their accelerators -> whose they are, and what runs there in place of CUDA.
_OTHERS = tuple(
    (re.compile(pattern, re.IGNORECASE), what, platform)
    for pattern, what, platform in (
        (r"AMD|Instinct|Radeon|MI\d{2,3}|RX ?\d{4}|W[5-7]\d00\b", "a GPU of AMD", "ROCm"),
        (
            r"Intel|Gaudi|Habana|Ponte ?Vecchio|Max ?1\d{3}\b",
            "a device of Intel",
            "oneAPI or Gaudi",
        ),
        (r"(Google )?(Cloud )?TPU", "a TPU", "XLA"),
        (r"(AWS )?(Trainium|Inferentia|trn\d|inf\d)", "a device of AWS", "Neuron"),
        (r"(Huawei )?Ascend", "a device of Huawei", "CANN"),
        (r"Apple|M[1-5]( (Pro|Max|Ultra))?$", "a GPU of Apple", "Metal"),
    )
)


def is_foreign(name: str) -> bool:
    """Whether it names an accelerator that plans cannot be trained on, well known or not.

    >>> is_foreign("MI300X"), is_foreign("AMD Radeon PRO W6800"), is_foreign("T4")
    (True, True, False)
    """
    return any(pattern.match(name.strip()) for pattern, _, _ in _OTHERS)


def variants(name: str) -> tuple[GpuKind, ...]:
    """Return the well-known kinds of a model whose name does not say which.

    >>> [kind.name for kind in variants("Tesla V100 PCIe")]
    ['V100-PCIE-32', 'V100-PCIE-16']
    >>> [kind.name for kind in variants("A100 SXM4")], variants("T4"), variants("Z1")
    (['A100-80', 'A100-40'], (), ())
    """
    spelled = squeezed(VENDOR.sub("", name))
    form = _FORM.search(spelled)
    model = _FORM.sub("", spelled)
    kinds = [
        kind
        for kind in GPU_KINDS.values()
        if "-" in kind.name and squeezed(kind.name.partition("-")[0]) == model
    ]
    is_pcie = form is not None and form[1] == "pcie"
    fitting = [kind for kind in kinds if form is None or (kind.link_type == "pcie") == is_pcie]
    return tuple(fitting or kinds)


def unknown_kind(name: str, where: str, known: Iterable[str], *, expected: str) -> Problem:
    """Say what is wrong with a name that is none of `known`, and what may have been meant."""
    for pattern, what, platform in _OTHERS:
        if pattern.match(name.strip()):
            return Problem(
                where=where,
                found=f'"{name}", {what}',
                expected="GPUs of NVIDIA",
                remedy="Plans are trained over CUDA and NCCL; nothing here was run on "
                f"{platform}. Leave it out; or, only to plan, describe it under gpu_kinds.",
            )
    if _LAPTOP.search(name):
        return Problem(
            where=where,
            found=f'"{name}", a GPU of a laptop',
            expected=expected,
            remedy="Laptops have other chips than the desktop cards of the same number: run zorse "
            "profile measure there, which says what to write under gpu_kinds.",
        )
    several = variants(name)
    if several:
        return Problem(
            where=where,
            found=f'"{name}", which does not say which one',
            expected=f"one of {', '.join(map(_described, several))}",
            remedy="Say which one; nvidia-smi shows name and memory.",
        )
    return Problem(
        where=where,
        found=f'"{name}", which is not a known kind of GPU',
        expected=expected,
        remedy=did_you_mean(name, known) + " Or describe it under gpu_kinds.",
    )


def _described(kind: GpuKind) -> str:
    memory = f"{kind.advertised_gb} GB at {spell_bandwidth(kind.memory_bytes_per_s)}"
    return f"{kind.name} ({memory}, {kind.link_type})"
