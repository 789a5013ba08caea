"""What the documents name exists: links, files, commands, flags, messages; what they show is so."""

import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripts.flag_tables import decided_table, refused_table
from tests.unit.in_process import run_program
from zorse_megatron.cli import command_group
from zorse_megatron.cli.main import app
from zorse_megatron.cli.perturbed import link_names
from zorse_megatron.cli.workload import named_model
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.topology import topology_of
from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.flags.table import machine_rows
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.launch import pretrain_command
from zorse_megatron.launch.pretrain_command import split_command
from zorse_megatron.schedule.lower import lower_plan

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("patches/*.md"))
)
# Files of other projects, and those that a user or the demo makes.
NOT_OURS = {
    "plan.json",
    "plan.stock.json",
    "stock.json",
    "next.json",
    "left.json",
    "profile.json",
    "trace.json",
    "pretrain_gpt.py",
}
NOT_OURS |= {"timeline.png"}
NOT_OURS |= {"compare.json", "scales.json", "bars.png"}
NOT_OURS |= {"memory-by-chunks.json", "memory-by-chunks.png", "memory-rank0.json"}
NOT_OURS |= {"offload.json", "config.json", "corrected.json", "workstation.json", "tiny.json"}
NOT_OURS |= {"doctor.json", "doctor/doctor.json", "adapter_config.json", "time-on-gpu.json"}
NOT_OURS |= {"zorse-manifest.json", "zorse-writer.json", "metadata.json", "integrity.json"}
PLACEHOLDERS = {"MEGATRON_FLAGS", "PATH", "DIR", "FILE"}
OF_PIP_AND_SLURM = {"--index-url", "--no-build-isolation", "--gpus-per-task"}
# Where this repository stands in a command that is run elsewhere.
ELSEWHERE = "/path/to/zorse-megatron/"
# Packages whose modules' own flags are looked at.
OURS = ("scripts.", "zorse_megatron")


def text_of(document):
    return (ROOT / document).read_text(encoding="utf-8")


def commands_in(document):
    """Lines of fenced blocks that begin like a command; blocks may be indented in a list."""
    starts = ("make ", "zorse ", "srun ", "torchrun ", "python ", "pip ", "git ")
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", text_of(document), re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(starts)]


def all_commands():
    return [(document, line) for document in DOCUMENTS for line in commands_in(document)]


def words_in_code(document):
    """Words of inline code and of commands."""
    inline = re.findall(r"`([^`\n]+)`", text_of(document))
    return {word for text in (*inline, *commands_in(document)) for word in text.split()}


@cache
def megatron_and_torchrun_sources():
    """The text of the files that define their flags; neither is imported."""
    megatron = Path(next(iter(importlib.util.find_spec("megatron").submodule_search_locations)))
    torch = Path(importlib.util.find_spec("torch").origin).parent
    files = [
        *(megatron / "training").rglob("*.py"),
        *(megatron / "core").glob("*.py"),
        *(megatron / "core" / "transformer").glob("*.py"),
        *(megatron / "core" / "optimizer").glob("*.py"),
        *(megatron / "core" / "distributed").glob("*.py"),
        torch / "distributed" / "run.py",
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@cache
def words_in_their_sources():
    return frozenset(re.findall(r"\w+", megatron_and_torchrun_sources()))


@cache
def help_of(program):
    """What a script or a module prints with --help."""
    ended = run_program(program, "--help")
    assert not ended.status, ended.stderr
    return ended.stdout


@cache
def our_flags():
    """Every flag of our own commands."""
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    commands = [name.replace("_", "-") for name in names] + [
        "profile correct",
        "profile measure",
        "checkpoint verify",
    ]
    helps = [CliRunner().invoke(app, ["--help"]).stdout]
    helps += [CliRunner().invoke(app, [*c.split(), "--help"]).stdout for c in commands]
    scripts = [*ROOT.glob("scripts/**/*.py"), ROOT / "zorse_megatron" / "demo.py"]
    programs = [path for path in sorted(scripts) if "__main__" in path.read_text(encoding="utf-8")]
    helps += [help_of(path) for path in programs]
    return set(re.findall(r"--[\w-]+", "\n".join(helps))) | {
        "--zorse-plan",
        "--zorse-cluster",
        "--zorse-trace",
        "--zorse-metrics",
        "--zorse-memory",
        "--zorse-memory-limit",
        "--zorse-host-memory-limit",
        "--zorse-update",
        "--zorse-damaged-checkpoint",
        "--zorse-silence-limit",
        "--zorse-rebalance",
        "--zorse-status",
        "--zorse-lora",
    }


def removed_flags():
    """Those that an error names the way now for."""
    return {*pretrain_command._REMOVED, *(name.split()[-1] for name in command_group.REMOVED)}


def is_flag_of_others(flag):
    """Megatron defines flags by name, or from a field's name, with `no-` for a false one."""
    plain = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    return (
        flag in OF_PIP_AND_SLURM
        or not words_in_their_sources().isdisjoint({plain, f"no_{plain}"})
        or flag in megatron_and_torchrun_sources()
    )


def test_there_are_documents_and_commands():
    assert {"README.md", "docs/how-it-works.md", "docs/limits.md"} <= set(DOCUMENTS)
    assert len(all_commands()) > 10


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#]+)\)", text_of(document)):
        if not link.startswith("https://"):
            assert ((ROOT / document).parent / link).is_file(), link


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_exist(document):
    """Words in code that look like a file; a bare name may be short for one in the package."""
    for word in words_in_code(document):
        name = word.removeprefix(ELSEWHERE).rstrip(",;")
        if not re.fullmatch(r"[\w./-]+\.(py|md|json|toml|patch|png)", name) or name in NOT_OURS:
            continue
        places = (ROOT, ROOT / "zorse_megatron", (ROOT / document).parent)
        assert any((place / name).is_file() for place in places), name


TABLE = re.compile(r"^ *(\|.+\|)\n *\|[-:| ]+\|\n((?: *\|.*\|\n)+)", re.MULTILINE)
FIGURE = re.compile(r"[-+*]*[\d,]+(\.\d+|\.?\d* ?(s|ms|%|x|[KMGT]i?B|tokens/s))(?![\w.])")
MADE_BY = re.compile(
    r"predicted|simulated|emulated|calculated|on (\d )?CPU|data sheet|measured by .* on GPU", re.I
)
# A table of figures that nobody had to run anything for.
VERSIONS = {("docs/gpus.md", "Compute capability"), ("docs/limits.md", "")}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_say_what_made_their_figures(document):
    """In their headings, where at least every third cell is a figure."""
    for headings, body in TABLE.findall(text_of(document)):
        cells = [cell.strip() for row in body.splitlines() for cell in row.split("|")[1:-1]]
        figures = [cell for cell in cells if FIGURE.match(cell)]
        is_of_versions = (document, headings.split("|")[1].strip()) in VERSIONS
        if 3 * len(figures) >= len(cells) and not is_of_versions:
            assert MADE_BY.search(headings), headings


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_exist(document):
    gone = removed_flags() if document == "CHANGELOG.md" else set()
    for word in words_in_code(document):
        flag = word.partition("=")[0].strip(",;.")
        if re.fullmatch(r"--[a-z0-9](-?[a-z0-9]+)*", flag):
            assert flag in our_flags() | gone or is_flag_of_others(flag), flag


def test_a_flag_that_does_not_exist_would_be_found():
    assert not is_flag_of_others("--no-such-flag-anywhere")


@pytest.mark.slow
@pytest.mark.parametrize(("document", "line"), all_commands())
def test_commands_can_be_run(document, line):
    program, *words = shlex.split(line)
    match program:
        case "make":
            targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            variables = re.findall(
                r"^([A-Z]\w*) [?:]=", (ROOT / "Makefile").read_text(), re.MULTILINE
            )
            assert {word for word in words if "=" not in word} <= set(targets)
            assert {word.partition("=")[0] for word in words if "=" in word} <= set(variables)
        case "zorse":
            check_our_command(words)
        case "srun":
            assert words[0] == "zorse"
            check_our_command(words[1:])
        case "torchrun" if "zorse_megatron" in words:
            check_our_command(words[words.index("zorse_megatron") + 1 :])
        case "torchrun":
            check_training_command(words)
        case "python":
            check_python_command(words)
        case "git":
            assert words[0] == "apply"
            assert (ROOT / words[1].removeprefix(ELSEWHERE)).is_file()
        case _:
            assert words[0] == "install"


def check_our_command(words):
    command = words[: 2 if words[0] == "profile" else 1]
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    ours = words[: words.index("--")] if "--" in words else words
    assert all(word in shown.stdout for word in ours if word.startswith("--"))


def check_training_command(words):
    """Our part of the command splits as `zorse_megatron.pretrain` splits it."""
    if "-m" in words:
        assert words[words.index("-m") + 1] == "zorse_megatron.pretrain"
        words = words[words.index("-m") + 2 :]
    known = [word for word in words if not word.endswith(".py")]
    command = split_command(known)
    assert command.plan is not None
    assert set(command.megatron) <= PLACEHOLDERS | {"--nproc-per-node", "5"}


def check_python_command(words):
    if words[0] == "-c":
        compile(words[1], "command", "exec")
        return
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
        shown = help_of(words[1]) if words[1].startswith(OURS) else ""
    else:
        assert (ROOT / words[0]).is_file()
        shown = help_of(ROOT / words[0])
    assert all(word in shown for word in words if word.startswith("--"))


def test_the_lists_of_limits_are_those_of_the_table():
    text = text_of("docs/limits.md")
    # Where it fails: run scripts/flag_tables.py, and put what it prints there.
    assert refused_table() in text
    assert decided_table() in text
    without_gpu = text.partition("## Flags that are refused without a GPU")[2]
    listed = set(re.findall(r"^\| `(--[\w-]+)` \|", without_gpu, re.MULTILINE))
    assert listed == {r.flag for r in machine_rows() if r.without == "GPU" and not r.added}


WITH_ALL_LINKS = b"""
nodes:
  - name: NODE
    gpus: 2 x A100-40
    link: NVSwitch 220 GB/s
    nics: 9 Gb/s
    region: WEST
    switch: SWITCH
  - {name: lines, gpus: 2 x V100-16, link: NVLink 40 GB/s, nics: 9 Gb/s, region: WEST}
  - {name: host, gpus: 2 x T4, link: PCIe 6 GB/s, nics: 9 Gb/s, region: EAST}
switches: [{name: SWITCH, region: WEST, uplink: {bandwidth: 8 Gb/s}}]
between_regions: [{bandwidth: 5 Gb/s, latency: 10 ms}]
"""
# What stands for both of two alike in the document.
SHOWN_AS = {
    "lines/": "NODE/",
    "host/": "NODE/",
    "gpu1-pcie": "gpu0-pcie",
    "gpu1-fabric": "gpu0-fabric",
    "gpu1>gpu0": "gpu0>gpu1",
    ":EAST>WEST": ":WEST>EAST",
}


def test_links_are_named_as_shown():
    comm = GraphComm(topology_of(parse_cluster(WITH_ALL_LINKS), None))
    names = "\n".join(link_names(comm, 6))
    for name, shown in SHOWN_AS.items():
        assert name in names
        names = names.replace(name, shown)
    rows = re.findall(r"^\| (`.+`) \| [^|]+ \|$", text_of("docs/simulator.md"), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\S+[/:]\S+)`", row)}
    assert listed == set(names.split())


def test_the_actions_of_a_plan_are_as_shown():
    assert f"```\n{lower_plan(UNEVEN_PLAN)}\n```" in text_of("docs/how-it-works.md")


def test_messages_are_those_of_the_code():
    sources = "\n".join(p.read_text(encoding="utf-8") for p in ROOT.glob("zorse_megatron/**/*.py"))
    messages = re.findall(r"^- `(.+?)`: ", text_of("docs/troubleshooting.md"), re.MULTILINE)
    assert len(messages) > 40
    assert [message for message in messages if message not in sources] == []


def test_files_and_modules_that_documents_name_are_there():
    folders = ("zorse_megatron", "scripts", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files = {"/" + path.relative_to(ROOT).as_posix() for path in paths}
    lost = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        named = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
        lost += [f"{document}: {name}" for name in named if not _is_file_of(name, files)]
        modules = re.findall(r"\bzorse_megatron(?:\.\w+)+", text)
        lost += [f"{document}: {name}" for name in modules if not _is_module(name)]
    assert not lost


def _is_file_of(name, files):
    return any(file.endswith("/" + name) for file in files)


def _is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_the_table_of_the_page_is_calculated_from_models_and_gpus():
    page = (ROOT / "docs" / "planner.md").read_text()
    table = page[page.index("| Model, calculated |") :].partition("\n\n")[0]
    rows = [line.strip(" |").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 4
    for name, counts, tokens, state, *read in rows:
        model = named_model(name.lower()).model
        of = model.experts
        assert counts == f"{of.num_experts}, {of.per_token}"
        weights = 3 * of.num_experts * of.ffn_hidden_size * model.hidden_size  # of a layer
        assert tokens == f"{weights / (of.per_token * model.hidden_size):,.0f}"
        assert state == f"{18e-9 * model.num_parameters:.0f} GB"
        of_a_token = 6 * weights * of.per_token / of.num_experts
        for said, kind in zip(read, (GPU_KINDS["A100-40"], GPU_KINDS["L4"]), strict=True):
            read_s = 12 * weights / kind.memory_bytes_per_s
            equal = read_s * 0.6 * kind.peak.bfloat16_flops_per_s / of_a_token
            assert float(said.replace(",", "")) == float(f"{equal:.2g}")


def test_once_to_each_rank_is_fewer_bytes_than_once_to_each_expert():
    """The 82,000 tokens of the page: as above, by what a token crosses to three other ranks."""
    model = named_model("qwen3-30b-a3b").model
    of, ranks = model.experts, 4
    once = (ranks - 1) * of.share_of_tokens(of.num_experts // ranks)
    each = of.per_token * (ranks - 1) / ranks
    at = 3 * of.num_experts * of.ffn_hidden_size / of.per_token
    assert at * each / once == pytest.approx(82_000, rel=0.01)
