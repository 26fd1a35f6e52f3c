"""Spot prices of Azure's retail price API, from a server with its shapes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gpuctl.cli.commands.costs.offers import verb
from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.catalog.instance_types import Price, catalog
from gpuctl.stacks.clouds.azure import spot_prices as azure_spot_prices
from gpuctl.stacks.clouds.azure.spot_prices import spot_prices

SIZE = "Standard_NC24ads_A100_v4"
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def item(**changes: Any) -> dict[str, Any]:
    """As the API has it (learn.microsoft.com, "Azure Retail Prices REST API overview")."""
    usual = {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": 0.7345,
        "unitPrice": 0.7345,
        "armRegionName": "eastus",
        "location": "US East",
        "effectiveStartDate": "2026-11-01T00:00:00Z",
        "meterId": "000",
        "meterName": "NC24ads A100 v4 Spot",
        "productId": "DZH318Z08NRP",
        "skuId": "DZH318Z08NRP/001",
        "productName": "Virtual Machines NCads A100 v4 Series",
        "skuName": "Standard_NC24ads_A100_v4 Spot",
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": SIZE,
    }
    return {**usual, **changes}


@dataclass
class PriceList:
    """One item a page. ``failing``: statuses to answer with first."""

    items: list[dict[str, Any]]
    failing: list[int] = field(default_factory=list)
    body: str = ""
    url: str = ""
    filters: list[str] = field(default_factory=list)

    def ask(self, regions: list[str], pauses: list[float] | None = None) -> list[Price]:
        waited = pauses if pauses is not None else []
        return spot_prices(regions, self.url, NOW, waited.append)


@contextmanager
def serving(prices: PriceList) -> Iterator[PriceList]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = {name: value[0] for name, value in parse_qs(urlsplit(self.path).query).items()}
            prices.filters.append(query["$filter"])
            status = prices.failing.pop() if prices.failing else 200
            at = int(query.get("$skip", 0))
            wanted = [one for one in prices.items if f"armSkuName eq '{one['armSkuName']}'" in query["$filter"]]
            link = None
            if at + 1 < len(wanted):
                link = f"{prices.url}?$filter={query['$filter']}&$skip={at + 1}"
            page = {"BillingCurrency": "USD", "Items": wanted[at : at + 1], "NextPageLink": link, "Count": 1}
            self.send_response(status)
            self.end_headers()
            self.wfile.write((prices.body or json.dumps(page)).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    prices.url = f"http://127.0.0.1:{server.server_port}/api/retail/prices"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield prices
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_every_type_of_azures_in_the_catalog_is_asked_for_and_all_pages_are_read() -> None:
    types = [machine.name for machine in catalog().types if machine.provider == "azure"]
    items = [item(armSkuName=name, retailPrice=1.0 + place) for place, name in enumerate(types)]
    items += [item(armSkuName=types[0], armRegionName=region) for region in ("westeurope", "japaneast")]
    with serving(PriceList(items)) as prices:
        found = prices.ask(["eastus", "westeurope"])
    assert {(price.type, price.region): price.spot for price in found} == {
        **{(name, "eastus"): 1.0 + place for place, name in enumerate(types)},
        (types[0], "westeurope"): 0.7345,
    }
    assert all(price.on_demand is None and price.zones == {} for price in found)
    assert prices.filters[0].startswith("serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armSku")


@pytest.mark.parametrize(
    "other",
    [
        {"productName": "Virtual Machines NCads A100 v4 Series Windows"},
        {"meterName": "NC24ads A100 v4 Low Priority"},
        {"meterName": "NC24ads A100 v4"},
        {"type": "Reservation"},
        {"type": "DevTestConsumption"},
        {"unitOfMeasure": "1/Month"},
        {"currencyCode": "EUR"},
        {"effectiveStartDate": "2026-12-01T00:00:00Z"},
        {"effectiveStartDate": "2026-10-01T00:00:00Z"},
    ],
)
def test_only_the_price_of_today_of_a_linux_machine_as_spot_counts(other: dict[str, Any]) -> None:
    for items in ([item(), item(retailPrice=0.1, **other)], [item(retailPrice=0.1, **other), item()]):
        with serving(PriceList(items)) as prices:
            assert [price.spot for price in prices.ask(["eastus"])] == [0.7345]


def test_a_list_that_is_asked_too_often_is_asked_again_later() -> None:
    pauses: list[float] = []
    with serving(PriceList([item()], failing=[429, 503])) as prices:
        assert [price.spot for price in prices.ask(["eastus"], pauses)] == [0.7345]
    assert sorted(pauses) in ([1.0, 1.0], [1.0, 4.0])


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        (PriceList([], failing=[400] * 100), "Azure's price list answered 400; try again later"),
        (PriceList([], failing=[500] * 100), "Azure's price list answered 500; try again later"),
        (PriceList([], body="<html>"), "the response is not from Azure's price list; is there a proxy in between?"),
        (PriceList([], body="[]"), "the response is not from Azure's price list; is there a proxy in between?"),
        (PriceList([item()]), "Azure reports no spot price in esatus; check the region's name, such as eastus"),
    ],
)
def test_a_list_that_tells_nothing_is_one_line(prices: PriceList, said: str) -> None:
    with serving(prices), pytest.raises(GpuctlError) as refused:
        prices.ask(["esatus"])
    assert str(refused.value) == said


def test_a_list_that_does_not_answer_is_one_line() -> None:
    with serving(PriceList([])) as prices:
        pass
    with pytest.raises(GpuctlError, match=r"Azure's price list does not answer: .*; try again later"):
        prices.ask(["eastus"])


def test_the_verb_refreshes_and_then_lists_what_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path))
    catalog.cache_clear()
    with serving(PriceList([item(effectiveStartDate="2020-01-01T00:00:00Z")])) as prices:
        monkeypatch.setattr(azure_spot_prices, "RETAIL_PRICES", prices.url)
        verb(provider="azure", refresh=True, gpu="A100", output="json")
    told = capsys.readouterr()
    catalog.cache_clear()
    assert told.err.splitlines()[-1] == "1 spot price of azure in eastus"
    (spot,) = {one["spot_usd_per_hour"] for one in json.loads(told.out)["offers"] if one["name"] == SIZE}
    assert spot == 0.7345
