"""Event files, as TensorBoard itself reads them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader  # type: ignore[import-untyped]

from gpuctl.trainers.metrics.tensorboard_events import EventFile

TAGS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)


def read(folder: Path) -> list[tuple[int, float, dict[str, float]]]:
    (file,) = folder.iterdir()
    version, *events = LegacyEventFileLoader(str(file)).Load()
    assert version.file_version == "brain.Event:2"
    return [(e.step, e.wall_time, {v.tag: v.simple_value for v in e.summary.value}) for e in events]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**62),
            st.floats(0, 2e9),
            st.dictionaries(TAGS, st.floats(allow_nan=False, width=32), max_size=5),
        ),
        max_size=5,
    )
)
def test_tensorboard_reads_what_was_written(events: list[tuple[int, float, dict[str, float]]]) -> None:
    with TemporaryDirectory() as name:
        file = EventFile(Path(name))
        for event in events:
            file.scalars(*event)
        assert not events or read(Path(name)) == events


def test_a_value_beyond_32_bits_is_infinite(tmp_path: Path) -> None:
    EventFile(tmp_path).scalars(1, 2.0, {"up": 1e300, "down": -1e300, "nan": float("nan")})
    ((_, _, values),) = read(tmp_path)
    assert (values["up"], values["down"]) == (float("inf"), float("-inf"))
    assert values["nan"] != values["nan"]
