"""Current prices of spot machines: Azure's retail price API, which asks nobody who they are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.catalog.instance_types import Price, catalog

RETAIL_PRICES = "https://prices.azure.com/api/retail/prices"
_VERSION = "2023-01-01-preview"
_AT_ONCE = 4
_TIMEOUT_S = 30
_PAUSES_S = (1.0, 4.0, 15.0)
"""Between one attempt and the next; it refuses those who ask often."""


def spot_prices(
    regions: Sequence[str],
    url: str | None = None,
    now: datetime | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> list[Price]:
    """The current spot prices; see ``Cloud``. Zones have no prices of their own.

    Args:
        regions: names of those whose prices are wanted.
        url: of the price API; ``None``: Azure's own.
        now: the time at which prices are in force; ``None``: this moment.
        pause: sleeps for so many seconds before a request is repeated.
    """
    types = [machine.name for machine in catalog().types if machine.provider == "azure" and machine.spot]
    today = (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(partial(_of_type, url=url or RETAIL_PRICES, today=today, pause=pause), types)
        found = [price for answer in answers for price in answer if price.region in regions]
    if not found:
        raise GpuctlError(
            f"Azure reports no spot price in {', '.join(regions)}", "check the region's name, such as eastus"
        )
    return found


def _of_type(name: str, url: str, today: str, pause: Callable[[float], None]) -> list[Price]:
    """A type's price in all regions. Of several prices the last that is in force counts."""
    latest: dict[str, tuple[str, float]] = {}
    for item in _items(name, url, pause):
        since = item.get("effectiveStartDate", "")
        if _spot_hour(item, name) and since <= today and since >= latest.get(item["armRegionName"], ("", 0.0))[0]:
            latest[item["armRegionName"]] = since, float(item["retailPrice"])
    return [Price(type=name, region=region, spot=usd) for region, (_, usd) in sorted(latest.items())]


def _spot_hour(item: dict[str, Any], name: str) -> bool:
    """Whether an item is the price of a Linux machine as spot. ``Low Priority`` is what batch jobs alone may have."""
    return (
        item.get("armSkuName") == name
        and item.get("meterName", "").endswith(" Spot")
        and "Windows" not in item.get("productName", "")
        and (item.get("unitOfMeasure"), item.get("currencyCode")) == ("1 Hour", "USD")
        and item.get("type") == "Consumption"
        and bool(item.get("armRegionName"))
    )


def _items(name: str, url: str, pause: Callable[[float], None]) -> Iterator[dict[str, Any]]:
    wanted = f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armSkuName eq '{name}'"
    query = urlencode({"api-version": _VERSION, "$filter": f"{wanted} and contains(meterName, 'Spot')"})
    link = f"{url}?{query}"
    while link:
        page = _page(link, pause)
        yield from page["Items"]
        link = (page.get("NextPageLink") or "").replace(" ", "%20")  # it is not always quoted


def _page(link: str, pause: Callable[[float], None]) -> dict[str, Any]:
    waits = iter(_PAUSES_S)
    while True:
        try:
            with urlopen(Request(link, headers={"Accept": "application/json"}), timeout=_TIMEOUT_S) as answer:
                return _priced(answer.read())
        except HTTPError as error:
            why, again = f"answered {error.code}", error.code == 429 or error.code >= 500
        except (OSError, HTTPException) as error:
            why, again = f"does not answer: {error}", True
        wait = next(waits, None)
        if wait is None or not again:
            raise GpuctlError(f"Azure's price list {why}", "try again later")
        pause(wait)


def _priced(body: bytes) -> dict[str, Any]:
    try:
        page: dict[str, Any] = json.loads(body)
        page["Items"]
    except (KeyError, TypeError, ValueError) as error:
        raise GpuctlError("the response is not from Azure's price list", "is there a proxy in between?") from error
    return page
