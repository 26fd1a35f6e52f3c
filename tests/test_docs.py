"""What the pages under ``docs/`` say is so."""

from __future__ import annotations

import ast
import doctest
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpuctl
from gpuctl.cli.commands.jobs.train import _RESERVED
from gpuctl.cli.settings.resolve import KEYS
from gpuctl.cli.signals import Terminated
from gpuctl.cli.verbs import VERBS
from gpuctl.cluster import layout
from gpuctl.cluster.errors import CHECKPOINT_LOST, INTERRUPTED, BadInput, GpuctlError
from gpuctl.cluster.membership import rounds
from tests.paths import ROOT
from tools.docs import cli_reference, hooks, records_reference

DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAPERS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FLOORS = ("cli", "stacks", "bootstrap", "trainers", "cluster")
MESSAGES = re.findall(r"^\*\*`(.+)`\*\*$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


@cache
def _texts() -> tuple[str, ...]:
    """All strings of the program, with ``…`` where a value goes."""
    found = []
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(found)


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_the_program_says_what_troubleshooting_explains(message: str) -> None:
    pattern = re.compile(".*".join(re.escape(piece.strip()) for piece in message.split("…")), re.DOTALL)
    assert any(pattern.search(text) for text in _texts())


def _pages(nav: Any) -> Iterator[str]:
    """Those that a part of the navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(part)


def test_the_navigation_names_every_page_once() -> None:
    assert sorted(_pages(SITE["nav"])) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_index_leads_to_every_section() -> None:
    """A reader who begins there finds a page of each; the index names all of those that are not decisions."""
    index = (DOCS / "index.md").read_text()
    pages = {page for page in _pages(SITE["nav"]) if not page.startswith("decisions/")} - {"index.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_the_build_fails_for_a_link_that_leads_nowhere_and_loads_nothing_from_elsewhere() -> None:
    assert SITE["strict"] is True
    checks = {kind: set(values.values()) for kind, values in SITE["validation"].items()}
    assert checks == {"nav": {"warn"}, "links": {"warn"}}
    assert SITE["theme"]["font"] is False
    assert "repo_url" not in SITE
    fetched = [*SITE["extra_css"], *SITE.get("extra_javascript", [])]
    assert [path for path in fetched if not (DOCS / path).is_file()] == []


def _slug(heading: str) -> str:
    """The anchor of a heading, on GitHub and on the site."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: str(paper.relative_to(ROOT)))
def test_an_anchor_in_a_link_is_a_heading_there(paper: Path) -> None:
    wrong = []
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", paper.read_text()):
        target = paper.parent / link if link else paper
        if anchor not in map(_slug, re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)):
            wrong.append(f"{link}#{anchor}")
    assert [one for one in wrong if "reference/cli.md#" not in one] == []  # whose headings are made by the build


def test_what_a_page_includes_is_there_and_no_formatter_has_torn_the_line_that_says_so() -> None:
    """``ruff format`` takes it for Python in a block of Python, unless ``<!-- fmt: off -->`` is before the block."""
    lines = [line for paper in PAPERS for line in re.findall(r"^\W*8\W*<\W*--.*$", paper.read_text(), re.MULTILINE)]
    included = [re.fullmatch(r'--8<-- "([^":]+)(?::(\w+))?"', line) for line in lines]
    assert [line for line, found in zip(lines, included, strict=True) if not found] == []
    sections = [((ROOT / found[1]).read_text(), found[2]) for found in included if found]
    assert [name for text, name in sections if name and f"--8<-- [start:{name}]" not in text] == []
    assert len(sections) >= 5


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: str(paper.relative_to(ROOT)))
def test_a_link_to_elsewhere_is_over_tls(paper: Path) -> None:
    assert re.findall(r"\]\((http:[^)]*)\)", paper.read_text()) == []


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("../examples/gpuctl.yaml", "https://example.org/blob/main/examples/gpuctl.yaml"),
        ("../tests/fakes/stores/", "https://example.org/tree/main/tests/fakes/stores"),
        ("guides/jobs.md", "guides/jobs.md"),
        ("../no/such/file.py", "../no/such/file.py"),
        ("../../elsewhere", "../../elsewhere"),
    ],
)
def test_links_to_files_outside_of_the_site_lead_to_the_repository(link: str, becomes: str) -> None:
    assert hooks.in_repository(link, DOCS, "https://example.org") == becomes


def test_everything_that_is_generated_has_its_place_on_one_page() -> None:
    marks = [name for paper in PAPERS for name in re.findall(r"^<!-- generated: (\w+) -->$", paper.read_text(), re.M)]
    assert sorted(marks) == sorted(hooks.GENERATED)


@pytest.mark.parametrize("folder", ["docs/internals", "."])
def test_paths_that_pages_for_developers_name_are_there(folder: str) -> None:
    texts = "".join(path.read_text() for path in (ROOT / folder).glob("*.md"))
    named = re.findall(rf"`((?:tests|tools|docs|examples|{'|'.join(FLOORS)})/[\w./*-]*)`", texts)
    assert named
    files = (path.rstrip("/") for path in named)
    assert [path for path in files if not any(ROOT.glob(path)) and not (ROOT / f"{path}.py").is_file()] == []


# -- reference ---------------------------------------------------------------------------------------------------------


def test_the_reference_of_the_command_line_has_every_verb_and_what_its_help_says() -> None:
    page = cli_reference.as_markdown()
    headings = re.findall(r"^###+ `gpuctl (.+)`$", page, re.MULTILINE)
    assert [name for name in headings if " " not in name] == list(VERBS)
    assert {"ckpt ls", "ckpt pull", "buckets rm", "config show"} <= set(headings)
    assert "gpuctl train [OPTIONS] SCRIPT [ARGS]..." in page
    assert "| `-n, --nodes N|MIN:MAX` | Number of nodes; 2:4 accepts from 2 to 4. |" in page
    assert "| `--notice S` | Seconds between notice and end; 0: no notice (default: 30). |" in page
    for about in (verb.about for verb in VERBS.values()):
        assert about in page
    assert "[default:" not in page and "[required]" not in page


def test_the_reference_of_settings_is_the_annotated_file_itself() -> None:
    page = (DOCS / "reference/gpuctl-yaml.md").read_text()
    assert '--8<-- "examples/gpuctl.yaml"' in page
    keys = re.findall(r"^(\w+):", (ROOT / "examples/gpuctl.yaml").read_text(), re.MULTILINE)
    assert keys == [key.name for key in KEYS]


INTERNAL = {
    "GPUCTL_METADATA": "tests put a server of their own in the place of the metadata service",
    "GPUCTL_NODE_DIR": "marks the processes of a local node",
    "GPUCTL_ROOT": "tests boot into a folder",
    "GPUCTL_STACK": "marks Pulumi's processes",
}
"""Variables that no user sets or reads."""


def test_the_reference_has_every_variable_that_a_user_or_a_script_may_meet_and_no_other() -> None:
    code = "".join(path.read_text() for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
    found = set(re.findall(r"(?<![A-Z_])GPUCTL_[A-Z0-9_]*[A-Z0-9]", code)) | {key.variable for key in KEYS}
    page = (DOCS / "reference/environment.md").read_text()
    rows = set(re.findall(r"^\| `(GPUCTL_\w+)` \|", page, re.MULTILINE))
    assert set(INTERNAL) - found == set()
    assert found - set(INTERNAL) - rows == set(), "missing on the page"
    assert rows - (found - set(INTERNAL)) == set(), "not in the code"


def test_the_reference_has_a_row_for_each_setting_and_names_all_that_a_job_may_not_set() -> None:
    page = (DOCS / "reference/environment.md").read_text()
    settings = page.partition("## Settings")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| `(\w+)`", settings, re.MULTILINE) == [(k.variable, k.name) for k in KEYS]
    reading = page.partition("## Read by your script")[2].partition("Outside of a job")[0]
    assert set(re.findall(r"`([A-Z_]+)`", reading)) == _RESERVED


def test_the_reference_of_exit_codes_is_that_of_the_code() -> None:
    page = (DOCS / "reference/exit-codes.md").read_text()
    command, job = (re.findall(r"^\| ([\d][^|]*) \|", part, re.MULTILINE) for part in page.split("## Of a job"))
    hangup, end = Terminated(signal.SIGHUP).exit_code, Terminated(signal.SIGTERM).exit_code
    pipe = 128 + signal.SIGPIPE
    assert command == [
        str(code) for code in sorted((0, GpuctlError.exit_code, BadInput.exit_code, hangup, INTERRUPTED, pipe, end))
    ]
    assert job == ["0", "1 to 125", str(CHECKPOINT_LOST), str(rounds._STALLED_CODE), "128 + n", str(INTERRUPTED)]


def test_the_reference_of_python_has_every_public_name() -> None:
    page = (DOCS / "reference/python-api.md").read_text()
    assert {name: home for name, home in gpuctl._HOMES.items() if f"::: {home}.{name}\n" not in page} == {}
    assert set(gpuctl._HOMES) == set(gpuctl.__all__) - {"__version__"}


def test_the_table_of_keys_has_every_key_and_names_records_that_exist() -> None:
    assert doctest.testmod(records_reference).failed == 0
    table = records_reference.layout_table()
    patterns = [
        re.sub(r"\\?<[^>]*>", "[^/]+", re.escape(line.split()[0]).replace("…", ".*")) for line in table.splitlines()
    ]
    spelt = {
        "CLUSTER": layout.CLUSTER,
        "node": layout.node("n"),
        "network": layout.network("n"),
        "boot_report": layout.boot_report("n"),
        "boot_log": layout.boot_log("n"),
        "package": layout.package("a1", "gpuctl.whl"),
        "ssh_host": layout.ssh_host("n"),
        "machine_usage": layout.machine_usage("n"),
        "code": layout.code("a1"),
        "environment_request": layout.environment_request("a1"),
        "environment_build": layout.environment_build("a1"),
        "environment": layout.environment("a1"),
        "environment_archive": layout.environment_archive("a1", "b2"),
        "environment_use": layout.environment_use("a1", "j"),
        "wheel": layout.wheel("a1", "x.whl"),
        "image_name": layout.image_name("n"),
        "image": layout.image("a1"),
        "image_layer": layout.image_layer("a1"),
        "job_spec": layout.job_spec("j"),
        "verification": layout.verification("j", 1),
        "cancel": layout.cancel("j"),
        "rounds": f"{layout.rounds('j')}/1",
        "node_exit": layout.node_exit("j", 1, "n"),
        "logs": f"{layout.chunks(layout.logs('j'), 1, 'n')}/1.jsonl",
        "metrics": f"{layout.chunks(layout.metrics('j'), 1, 'n')}/1.jsonl",
        "tensorboard": f"{layout.tensorboard('j')}/1-n/events",
        "checkpoints": f"{layout.checkpoints('j')}/ledger/1",
        "files": f"{layout.files('j')}/ledger/1",
        "runs": f"{layout.runs('i')}/1",
        "run": f"{layout.run('i', 1)}/cluster.json",
    }
    functions = {name for name, value in vars(layout).items() if callable(value)}
    assert functions - set(spelt) == {"exits", "chunks"}, "which are folders of others"
    assert {name for name, key in spelt.items() if not any(re.fullmatch(p, key) for p in patterns)} == set()
    code = "".join(path.read_text() for path in (ROOT / "cluster").rglob("*.py"))
    records = set(re.findall(r"\b[A-Z][a-z]+[A-Z0-9][A-Za-z]*|\b(?:Round|Verification)\b", re.sub(r"\$\w+", "", table)))
    assert "MachineUsage" in records
    assert {name for name in records if not re.search(rf"^class {name}\(", code, re.MULTILINE)} == set()


def test_the_reference_of_records_has_every_record_with_its_fields() -> None:
    page = records_reference.records_as_markdown()
    sources = {path.stem: path.read_text() for path in records_reference.RECORDS.glob("*.py")}
    assert set(records_reference.MODULES) == set(sources) - {"__init__", "codec"}
    classes = re.findall(r"^class (\w+)\(msgspec", "".join(sources.values()), re.MULTILINE)
    assert sorted(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == sorted(classes)
    assert (
        "| `lease_s` | `float` | `3.0` | Seconds without a change of heartbeat after which a node is taken for lost. |"
        in page
    )
