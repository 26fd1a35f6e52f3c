"""Writes ``stacks/catalog/catalog.json``: machine types with GPUs, their regions and prices, with dates and sources.

    make catalog                  clones what it reads into build/catalog (needs a network)
    make catalog FROM=DIR         reads what lies in DIR already

DIR holds clones of ``REPOSITORIES`` as ``DIR/owner/name`` (a bare clone will do), and may hold gpuhunt's published
catalogs as ``DIR/gpuhunt/<provider>.csv`` with ``<provider>.version`` beside it. The same inputs give the same bytes.
What no input tells is in ``catalog_by_hand.json``. Of several prices the latest counts.

Not in the catalog, since gpuctl's programs cannot run them: AMD's GPUs, parts of a GPU (g6f, NVads A10), ARM (GB200,
A4X), bare metal, machines that take only Hyperdisks (A3 Ultra, A4, G4), and p6-b300, whose first card takes no EFA.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tools import catalog_inputs as inputs
from tools.catalog_inputs import Repository, Row, Told

KARPENTER_AWS = "aws/karpenter-provider-aws"
KARPENTER_GCP = "cloudpilot-ai/karpenter-provider-gcp"
KARPENTER_AZURE = "Azure/karpenter-provider-azure"
CYCLENERD = "Cyclenerd/google-cloud-pricing-cost-calculator"
REPOSITORIES = (KARPENTER_AWS, KARPENTER_GCP, KARPENTER_AZURE, CYCLENERD)
GPUHUNT = "https://dstack-gpu-pricing.s3.eu-west-1.amazonaws.com/v3"
PROVIDERS = ("aws", "gcp", "azure")
_HERE = Path(__file__).parent
_OUT = _HERE.parent / "stacks" / "catalog" / "catalog.json"
_DATE_OF = {"on_demand": "date", "spot": "spot_date"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--from", dest="folder", type=Path, help="where the inputs lie")
    parser.add_argument("--fetch", type=Path, help="clone and download the inputs to here first")
    parser.add_argument("--to", type=Path, default=_OUT)
    given = parser.parse_args()
    if given.fetch:
        fetch(given.fetch)
    folder = given.folder or given.fetch
    if folder is None:
        parser.error("add --from DIR, or --fetch DIR")
    given.to.write_text(rendered(catalog(folder)))


def fetch(folder: Path) -> None:
    """The newest of everything. What dstack does not publish at the moment is left out: it is not needed."""
    for name in REPOSITORIES:
        at = folder / name
        if at.exists():
            subprocess.run(["git", "-C", str(at), "pull", "--quiet", "--ff-only"], check=True)
        else:
            subprocess.run(["git", "clone", "--quiet", f"https://github.com/{name}", str(at)], check=True)
    for provider in PROVIDERS:
        try:
            with urlopen(f"{GPUHUNT}/{provider}/version", timeout=60) as answer:
                latest = answer.read().decode().strip()
            with urlopen(f"{GPUHUNT}/{provider}/{latest}/catalog.zip", timeout=600) as answer:
                packed = zipfile.ZipFile(io.BytesIO(answer.read()))
        except OSError as error:
            print(f"gpuhunt, {provider}: {error}; going on without")
            continue
        at = folder / "gpuhunt"
        at.mkdir(parents=True, exist_ok=True)
        (at / f"{provider}.csv").write_bytes(packed.read(f"{provider}.csv"))
        (at / f"{provider}.version").write_text(latest)


def catalog(folder: Path) -> Row:
    """What is written, from the inputs in ``folder``."""
    by_hand = json.loads((_HERE / "catalog_by_hand.json").read_text())
    sources: dict[str, str] = dict(by_hand["sources"])
    types, sold, regions = _aws(by_hand["gpus"], sources)
    told = list(_told(folder, sources))
    gcp_types, gcp_sold, gcp_regions = _gcp(folder, by_hand["types"], sources)
    azure_types = [_by_hand(one) for one in by_hand["types"] if one["provider"] == "azure"]
    azure = Repository(KARPENTER_AZURE, folder)
    azure_regions = inputs.azure_regions(azure.text("pkg/fake/locations.json"))
    all_types = sorted([*types, *gcp_types, *azure_types], key=_place)
    all_regions = {"aws": regions, "gcp": gcp_regions, "azure": azure_regions}
    there = {(one["name"], region) for one in all_types for region in all_regions[one["provider"]]}
    told += [Told(**one) for one in by_hand["prices"]]
    return {
        "date": max(one.date for one in told),
        "sources": [f"{name}: {text}" for name, text in sorted(sources.items())],
        "regions": {provider: sorted(names) for provider, names in all_regions.items()},
        "types": all_types,
        "prices": _prices(all_types, [one for one in told if one[:2] in there], {*sold, *gcp_sold}),
    }


def rendered(made: Row) -> str:
    """A row is a line, so that a difference reads well."""
    parts = [f'"date": {json.dumps(made["date"])}']
    for name in ("sources", "types", "prices"):
        rows = ",\n".join(_line(row) if isinstance(row, dict) else json.dumps(row) for row in made[name])
        parts.append(f'"{name}": [\n{rows}\n]')
    regions = ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in made["regions"].items())
    parts.insert(2, f'"regions": {{\n{regions}\n}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _aws(gpus: dict[str, Row], sources: dict[str, str]) -> tuple[list[Row], set[tuple[str, str]], list[str]]:
    """Types, where they are sold, and all regions."""
    found = find_spec("moto")
    assert found and found.origin, "moto is a dependency of the tests"
    answers = Path(found.origin).parent / "ec2" / "resources"
    sources["moto"] = (
        f"AWS, types and the regions that sell them: DescribeInstanceTypes and DescribeInstanceTypeOfferings, as moto "
        f"{version('moto')} keeps their answers (ec2/resources)."
    )
    types = list(inputs.aws_types(answers / "instance_types.json.gz", gpus, "moto"))
    sold = inputs.aws_regions(answers / "instance_type_offerings" / "region")
    pairs = {(one["name"], region) for one in types for region, names in sold.items() if one["name"] in names}
    return types, pairs, list(sold)


def _gcp(
    folder: Path, rows: Iterable[Row], sources: dict[str, str]
) -> tuple[list[Row], set[tuple[str, str]], list[str]]:
    """The same. Shapes and regions are generated, and GPUs and networks by hand."""
    lists = Repository(CYCLENERD, folder)
    sources["cyclenerd"] = (
        f"Google, vCPUs, memory and regions of its types: {CYCLENERD}@{lists.commit()[:12]}, tools/*.csv, from Compute "
        f"Engine's own lists, {lists.date('tools/machinetypes.csv')}."
    )
    shapes = inputs.gcp_shapes(lists.text("tools/machinetypes.csv"))
    sold = inputs.gcp_sold(lists.text("tools/machinetyperegion.csv"))
    gpus = inputs.gcp_sold(lists.text("tools/acceleratortyperegion.csv"))
    types, pairs = [], set()
    for row in (row for row in rows if row["provider"] == "gcp"):
        shape, _, hung_on = row["name"].partition("+")
        vcpus, memory = shapes[shape]
        types.append(_by_hand({**row, "vcpus": vcpus, "memory_gb": memory}))
        kind = f"nvidia-tesla-{hung_on.partition('x')[0]}"
        pairs |= {
            (row["name"], region)
            for region, names in sold.items()
            if shape in names and (not hung_on or kind in gpus.get(region, ()))
        }
    return types, pairs, inputs.gcp_regions(lists.text("tools/regions.csv"))


def _told(folder: Path, sources: dict[str, str]) -> Iterator[Told]:
    """All prices there are."""

    def read(name: str, path: str, label: str, about: str) -> str:
        there = Repository(name, folder)
        sources[label] = f"{about}: {name}@{there.commit()[:12]}, {path}."
        return there.text(path)

    path = "pkg/providers/pricing/zz_generated.pricing_aws.go"
    yield from inputs.karpenter_aws(
        read(KARPENTER_AWS, path, "karpenter-aws", "AWS, on demand, Linux"), "karpenter-aws"
    )
    path = "pkg/providers/pricing/initial-prices.json"
    text = read(KARPENTER_GCP, path, "karpenter-gcp", "Google, on demand and spot, without GPUs that are hung on")
    yield from inputs.karpenter_gcp(text, Repository(KARPENTER_GCP, folder).date(path), "karpenter-gcp")
    path = "pkg/providers/pricing/zz_generated.pricing.go"
    text = read(KARPENTER_AZURE, path, "karpenter-azure", "Azure, on demand, Linux, from its retail price API")
    yield from inputs.karpenter_azure(text, "karpenter-azure")
    for provider in PROVIDERS:
        rows = folder / "gpuhunt" / f"{provider}.csv"
        if not rows.exists():
            continue
        latest = rows.with_suffix(".version").read_text().strip()
        sources[f"gpuhunt-{provider}"] = f"{provider}, on demand and spot: dstack's gpuhunt, {provider} {latest}."
        yield from inputs.gpuhunt(rows.read_text(), latest, f"gpuhunt-{provider}")


def _prices(types: Iterable[Row], told: Iterable[Told], sold: set[tuple[str, str]]) -> list[Row]:
    """A row for each type and region that sells it; one without a price says only that."""
    best: dict[tuple[str, str], dict[str, Told]] = {}
    for one in told:
        kinds = best.setdefault((one.type, one.region), {})
        old = kinds.get(one.kind)
        if old is None or (one.date, -one.usd) > (old.date, -old.usd):
            kinds[one.kind] = one
    rows: list[Row] = []
    for name in (one["name"] for one in types):
        regions = sorted({where for type_, where in {*best, *sold} if type_ == name})
        rows += [_price(name, region, best.get((name, region), {})) for region in regions]
    return rows


def _price(name: str, region: str, kinds: dict[str, Told]) -> Row:
    row: dict[str, Any] = {"type": name, "region": region}
    row |= {kind: kinds[kind].usd for kind in _DATE_OF if kind in kinds}
    row |= {date: kinds[kind].date for kind, date in _DATE_OF.items() if kind in kinds}
    if kinds:
        row["source"] = " ".join(sorted({one.source for one in kinds.values()}))
    return row


def _by_hand(row: Row) -> Row:
    """With its keys in the order of all others."""
    order = ("provider", "name", "family", "gpu", "gpus", "gpu_memory_gb", "vcpus", "memory_gb", "network_gbps")
    rest = ("fabric", "fabric_cards", "spot", "source")
    return {key: row[key] for key in (*order, *rest) if key in row} | {"by_hand": True}


def _line(row: Row) -> str:
    """Whole numbers as such."""
    return json.dumps({key: int(of) if isinstance(of, float) and of.is_integer() else of for key, of in row.items()})


def _place(row: Row) -> tuple[int, str, int, int, str]:
    return PROVIDERS.index(row["provider"]), row["family"], row["gpus"], row["vcpus"], row["name"]


if __name__ == "__main__":
    main()
