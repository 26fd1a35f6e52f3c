"""Flag > environment > file > default; and what is wrong is named where it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuctl.cli.settings import file as settings_file
from gpuctl.cli.settings.resolve import KEYS, load, parse_nodes
from gpuctl.cluster.errors import BadInput
from tests.paths import ROOT

EXAMPLE = ROOT / "examples" / "gpuctl.yaml"


def write(folder: Path, text: str) -> Path:
    (folder / "gpuctl.yaml").write_text(text)
    return folder


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    env = {"GPUCTL_NODES": "3", "GPUCTL_SLOTS": "7"}
    write(tmp_path, "# mine\nnodes: 2\nslots: 8\nmax_restarts: 5\n")
    settings = load({"nodes": "4"}, env, tmp_path)
    assert (settings.nodes, settings.slots, settings.max_restarts, settings.cluster) == ((4, 4), 7, 5, "default")
    sources = {key: setting.source for key, setting in settings.found.items()}
    assert sources["nodes"] == "flag"
    assert sources["slots"] == "env GPUCTL_SLOTS"
    assert sources["max_restarts"] == "gpuctl.yaml:4"
    assert sources["cluster"] == "default"


def test_the_nearest_file_upward_counts(tmp_path: Path) -> None:
    write(tmp_path, "nodes: 2\nslots: 2\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write(tmp_path / "a", "nodes: 3\n")
    settings = load({}, {}, inner)
    assert settings.nodes == (3, 3)
    assert settings.slots is None


def test_variables_for_the_workers_add_up(tmp_path: Path) -> None:
    write(tmp_path, "env:\n  A: file\n  B: file\n  C: yes\n")
    settings = load({"env": ["A=flag", "D=x=y"]}, {"GPUCTL_ENV": "B='from env'"}, tmp_path)
    assert settings.env == {"A": "flag", "B": "from env", "C": "yes", "D": "x=y"}
    assert settings.found["env.C"].source == "gpuctl.yaml:4"


@pytest.mark.parametrize(("text", "meant"), [("4", (4, 4)), ("2:4", (2, 4)), ("1", (1, 1)), (" 3 ", (3, 3))])
def test_a_number_of_nodes_is_one_number_or_two(text: str, meant: tuple[int, int]) -> None:
    assert parse_nodes(text) == meant


@pytest.mark.parametrize("text", ["0", "4:2", "abc", "-1", "", "2:", ":4", "1:2:3", "1.5", "0:3", "٤"])
def test_other_numbers_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|has) "):
        parse_nodes(text)


def test_yaml_that_reads_2_4_as_sixty_times_two_plus_four_is_not_asked(tmp_path: Path) -> None:
    assert load({}, {}, write(tmp_path, "nodes: 2:4\n")).nodes == (2, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: a\nnodse: 4\n", r"gpuctl\.yaml:2: unknown key 'nodse'; did you mean 'nodes'\?"),
        ("nodes: [1, 2]\n", r"gpuctl\.yaml:1: nodes must be a single value, not a list"),
        ("env: 3\n", r"gpuctl\.yaml:1: env must be a map of K: V, not '3'"),
        ("env:\n  A: {b: c}\n", r"gpuctl\.yaml:2: env\.A must be a single value, not a map"),
        ("cluster: a\n\nnodes: 4:2\n", r"gpuctl\.yaml:3: nodes: 4:2 has a minimum above the maximum; did you mean 2:4"),
        ("slots: many\n", r"gpuctl\.yaml:1: slots: many is not a whole number; use 1 or more"),
        ("slots: 1\nslots: 2\n", r"gpuctl\.yaml:2: 'slots' is given twice"),
        ("nodes: 4\n  slots: 2\n", r"gpuctl\.yaml:2: slots: not YAML: mapping values are not allowed here"),
        ("nodes: 'a\n", r"gpuctl\.yaml:\d: nodes: not YAML: "),
        ("- nodes\n", r"gpuctl\.yaml:1: expected keys such as `nodes: 4`, not a list"),
        ("nodes\n", r"gpuctl\.yaml:1: expected keys"),
        ("cluster: Big_One\n", r"gpuctl\.yaml:1: cluster: Big_One is not a name"),
    ],
)
def test_a_corrupt_file_is_refused_with_its_line_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        load({}, {}, write(tmp_path, text))


def test_a_file_of_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpuctl.yaml").write_bytes(b"\xff\xfe\x00nodes")
    with pytest.raises(BadInput, match="not a YAML text file"):
        load({}, {}, tmp_path)


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        ({"nodes": "abc"}, {}, "--nodes abc is not a number of nodes; use a number such as 4"),
        ({"max_restarts": "-1"}, {}, "--max-restarts -1 is too few; use 0 or more"),
        ({}, {"GPUCTL_NPROC": "0"}, "GPUCTL_NPROC=0 is too few; use 1 or more"),
        ({}, {"GPUCTL_BACKEND": "team-state"}, "GPUCTL_BACKEND=team-state is not a URL that `pulumi login` takes; use"),
        ({"image": "--privileged"}, {}, "--image --privileged is not the name of an image"),
        ({}, {"GPUCTL_IMAGE": "two words"}, "GPUCTL_IMAGE=two words is not the name of an image; use one such as"),
        ({"env": ["A"]}, {}, "--env A is not NAME=VALUE"),
        ({}, {"GPUCTL_ENV": "A='"}, "GPUCTL_ENV: No closing quotation"),
    ],
)
def test_a_flag_and_a_variable_are_refused_by_name(
    tmp_path: Path, flags: dict[str, str], env: dict[str, str], said: str
) -> None:
    with pytest.raises(BadInput, match=f"^{re.escape(said)}"):
        load(flags, env, tmp_path)


def test_the_annotated_example_has_every_key_with_its_default(tmp_path: Path) -> None:
    example, defaults = load({}, {}, EXAMPLE.parent), load({}, {}, tmp_path)
    for key in KEYS:
        assert getattr(example, key.name) == getattr(defaults, key.name), key.name
    text = EXAMPLE.read_text()
    assert re.findall(r"^(\w+):", text, re.MULTILINE) == [key.name for key in KEYS]
    prose = " ".join(re.sub(r"^# ?", "", line) for line in text.splitlines())
    for key in KEYS:
        assert key.about.rstrip(".") in prose, f"the example does not say of {key.name}: {key.about}"


def test_an_example_with_another_value_is_found_out(tmp_path: Path) -> None:
    """The test above reads values, not only names."""
    write(tmp_path, EXAMPLE.read_text().replace("max_restarts: 0", "max_restarts: 1"))
    assert load({}, {}, tmp_path).max_restarts == 1
    assert settings_file.nearest(tmp_path) == tmp_path / "gpuctl.yaml"


def test_what_a_verb_does_not_use_keeps_nobody_from_it(tmp_path: Path) -> None:
    """Such as `gpuctl down` with a wrong number of nodes."""
    env = {"GPUCTL_NODES": "abc", "GPUCTL_SLOTS": "-1"}
    settings = load({"cluster": "one"}, env, tmp_path, only=("cluster",))
    assert (settings.cluster, settings.nodes, settings.slots) == ("one", (1, 1), None)
    with pytest.raises(BadInput, match="GPUCTL_NODES=abc is not"):
        load({"cluster": "one"}, env, tmp_path, only=("cluster", "nodes"))


def test_a_settings_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "gpuctl.yaml"
    file.mkdir()
    with pytest.raises(BadInput, match=r"gpuctl\.yaml is not a readable file"):
        load({}, {}, tmp_path)
    file.rmdir()
    file.symlink_to("gpuctl.yaml")
    with pytest.raises(BadInput, match=r"gpuctl\.yaml is not a readable file"):
        load({}, {}, tmp_path)
