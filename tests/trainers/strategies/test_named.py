from __future__ import annotations

import pytest

from gpuctl import DGC, Cast, Compressed, DiLoCo, Int8, LocalSGD, PowerSGD, TopK
from gpuctl.cluster.jobs.strategy import OPTIONS, REQUIRED, parse
from gpuctl.trainers.strategies.interface import GradientExchange
from gpuctl.trainers.strategies.named import named

VALUES = {
    "ratio": "0.5",
    "chunk": "64",
    "warmup_steps": "7",
    "bucket_mb": "3",
    "momentum": "0.5",
    "clip": "2",
    "rank": "2",
    "every": "9",
    "codec": "bf16",
    "balance": "speed",
    "inner": "each",
    "rate": "0.4",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_name_of_the_command_line_is_one_with_every_option(name: str) -> None:
    text = ",".join(f"{option}={VALUES[option]}" for option in OPTIONS[name])
    made = named(parse(f"{name}:{text}"))
    required = ",".join(f"{option}={VALUES[option]}" for option in REQUIRED.get(name, ()))
    plain = named(parse(f"{name}:{required}" if required else name))
    if isinstance(made, GradientExchange) and isinstance(plain, GradientExchange):
        assert (made.bucket_mb, plain.bucket_mb) == (3.0, 25.0)


def test_options_reach_what_they_are_of() -> None:
    top_k = named(parse("topk:ratio=0.02,chunk=512,warmup_steps=7"))
    assert isinstance(top_k, Compressed) and isinstance(top_k.codec, TopK)
    assert (top_k.codec.ratio, top_k.codec.chunk, top_k.warmup_steps) == (0.02, 512, 7)
    int8 = named(parse("int8:chunk=64"))
    assert isinstance(int8, Compressed) and isinstance(int8.codec, Int8) and int8.codec.chunk == 64
    assert repr(named(parse("fp16"))) == "Compressed(Cast('fp16'))"
    dgc = named(parse("dgc:ratio=0.01,momentum=0.5,clip=2,warmup_steps=9"))
    assert isinstance(dgc, DGC) and (dgc.ratio, dgc.momentum, dgc.clip, dgc.warmup_steps) == (0.01, 0.5, 2.0, 9)
    local_sgd = named(parse("localsgd:every=9,warmup_steps=7,codec=bf16,balance=speed,inner=each"))
    assert isinstance(local_sgd, LocalSGD) and isinstance(local_sgd.codec, Cast)
    assert (local_sgd.every, local_sgd.warmup_steps, local_sgd.balance, local_sgd.inner) == (9, 7, "speed", "each")
    diloco = named(parse("diloco:codec=int8,rate=0.4,momentum=0.5"))
    assert isinstance(diloco, DiLoCo) and isinstance(diloco.codec, Int8)
    assert (diloco.every, diloco.rate, diloco.momentum, diloco.balance) == (500, 0.4, 0.5, "equal")
    powersgd = named(parse("powersgd:rank=2"))
    assert isinstance(powersgd, PowerSGD) and powersgd.rank == 2
