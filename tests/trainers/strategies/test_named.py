from __future__ import annotations

import pytest

from gpuctl import DGC, Compressed, Int8, PowerSGD, TopK
from gpuctl.cluster.jobs.strategy import OPTIONS, REQUIRED, parse
from gpuctl.trainers.strategies.named import named

VALUES = {
    "ratio": "0.5",
    "chunk": "64",
    "warmup_steps": "7",
    "bucket_mb": "3",
    "momentum": "0.5",
    "clip": "2",
    "rank": "2",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_name_of_the_command_line_is_one_with_every_option(name: str) -> None:
    text = ",".join(f"{option}={VALUES[option]}" for option in OPTIONS[name])
    made = named(parse(f"{name}:{text}"))
    assert made.bucket_mb == 3.0
    required = ",".join(f"{option}={VALUES[option]}" for option in REQUIRED.get(name, ()))
    assert named(parse(f"{name}:{required}" if required else name)).bucket_mb == 25.0


def test_options_reach_what_they_are_of() -> None:
    top_k = named(parse("topk:ratio=0.02,chunk=512,warmup_steps=7"))
    assert isinstance(top_k, Compressed) and isinstance(top_k.codec, TopK)
    assert (top_k.codec.ratio, top_k.codec.chunk, top_k.warmup_steps) == (0.02, 512, 7)
    int8 = named(parse("int8:chunk=64"))
    assert isinstance(int8, Compressed) and isinstance(int8.codec, Int8) and int8.codec.chunk == 64
    assert repr(named(parse("fp16"))) == "Compressed(Cast('fp16'))"
    dgc = named(parse("dgc:ratio=0.01,momentum=0.5,clip=2,warmup_steps=9"))
    assert isinstance(dgc, DGC) and (dgc.ratio, dgc.momentum, dgc.clip, dgc.warmup_steps) == (0.01, 0.5, 2.0, 9)
    powersgd = named(parse("powersgd:rank=2"))
    assert isinstance(powersgd, PowerSGD) and powersgd.rank == 2
