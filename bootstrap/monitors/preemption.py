"""The cloud's word that it will take this machine, from its metadata service to the agent.

A watcher is a thread that asks again and again, whatever becomes of the service: it may be away, refuse or talk
nonsense, and the notice may still come afterwards. How long is left is reckoned by the service's own clock, which it
sends with every answer, so it does not matter what time this machine thinks it is.

AWS also *recommends* to rebalance: that a machine is more likely to be taken than others. It is said and shown, and
nothing else: such words come for whole groups at once, most of the machines live on, and leaving costs a round.

Sources: Amazon EC2 user guide, "Spot Instance interruption notices" and "EC2 instance rebalance recommendations";
Compute Engine, "Spot VMs" and "View and query VM metadata"; Azure, "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import calendar
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from gpuctl.bootstrap.boot.metadata import Metadata

CLOUDS = ("aws", "gcp", "azure")
"""Who gives notices."""
EVERY_S = 1.0
"""From one question to the next; also after one that failed. One that took longer is followed at once."""
LONG_POLL_S = 30.0
"""Google answers when something is not as it was told last (``last_etag``), or after this time."""
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
WARM_UP_S = 150.0
"""Azure turns events on for a machine that asks for the first time, and may take two minutes for the answer."""

_LATE_S = 5.0
"""Taken as left where the time is up by the cloud's clock, though the machine is still there."""
_MOST_S = 900.0
"""No cloud gives notice so long before: such a time is not believed."""
_TAKES = ("Preempt", "Terminate")
"""Azure's events after which the machine is gone; the others are about maintenance."""


@dataclass(frozen=True, slots=True)
class CloudNotice:
    """A preemption or maintenance notice, as the cloud gave it."""

    lead_s: float
    """Seconds until the machine is taken."""
    source: str
    event: str = ""
    """Azure's id of it, by which it is acknowledged; empty where it takes other machines too, since the first to say
    that it is ready would have all of them taken (Azure, "Scheduled Events for Linux VMs": ``StartRequests``)."""


class PreemptionWatcher:
    """Polls the cloud for preemption notices. Raises nothing: what goes wrong is printed, once for each kind of
    trouble.

    ``on_notice(lead_s, source)`` is called once, from the watcher's thread; ``on_risk`` with words to show, empty once
    they do not hold any more. ``promised_s`` is what Google gives, which says no time: 30, and up to 120 on request.
    """

    def __init__(
        self,
        metadata: Metadata,
        on_notice: Callable[[float, str], None],
        on_risk: Callable[[str], None],
        say: Callable[[str], None],
        *,
        promised_s: float = 30.0,
        every_s: float = EVERY_S,
        long_poll_s: float = LONG_POLL_S,
    ) -> None:
        self._metadata = metadata
        self._on_notice = on_notice
        self._on_risk = on_risk
        self._say = say
        self._promised_s = {"aws": 120.0, "gcp": promised_s, "azure": 30.0}[metadata.provider]
        self._every_s = every_s
        self._long_poll_s = long_poll_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)
        self._word: CloudNotice | None = None
        self._risk = ""
        self._me = ""
        self._asked_before = False
        self._etag = ""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The node is leaving: whatever it had to save is saved. Azure is told that it may take the machine now."""
        self._ended.set()
        word, self._word = self._word, None
        if word and word.event:
            request = {"StartRequests": [{"EventId": word.event}]}
            try:
                Metadata(self._metadata.provider, endpoint=self._metadata.endpoint).post(AZURE_EVENTS, request)
            except (OSError, HTTPException) as error:
                self._say(f"the notice could not be acknowledged: {error}")
            else:
                self._say("notice acknowledged: the cloud may reclaim this machine")

    def _watch(self) -> None:
        trouble = ""
        ask = {"aws": self._ask_aws, "gcp": self._ask_gcp, "azure": self._ask_azure}[self._metadata.provider]
        while not self._ended.is_set():
            asked_at = time.monotonic()
            try:
                self._word = ask()
                trouble = ""
            except (OSError, ValueError, LookupError, TypeError, AttributeError, HTTPException) as error:
                if str(error) != trouble:
                    self._say(f"cannot check for preemption, trying again: {error}")
                trouble = str(error)
            if self._word:
                self._on_notice(self._word.lead_s, self._word.source)
                return
            self._ended.wait(max(0.0, asked_at + self._every_s - time.monotonic()))

    def _ask_aws(self) -> CloudNotice | None:
        told = self._metadata.get("/latest/meta-data/spot/instance-action")
        if told is not None:
            action = json.loads(told)
            return CloudNotice(self._left(_zulu(action["time"])), f"aws: {action['action']}")
        advice = self._metadata.get("/latest/meta-data/events/recommendations/rebalance")
        self._advised(f"at risk since {json.loads(advice)['noticeTime']}" if advice else "")
        return None

    def _ask_gcp(self) -> CloudNotice | None:
        """Ask GCP's metadata server. Without the last answer's etag, a change between two questions would be missed
        until the second one ends."""
        path, wait = "/computeMetadata/v1/instance/preempted", ""
        if self._etag:
            wait = f"?wait_for_change=true&timeout_sec={self._long_poll_s:g}&last_etag={quote(self._etag, safe='')}"
        self._etag = ""  # after trouble, begin with the truth
        told = self._metadata.need(path + wait, self._long_poll_s + 10).strip()
        if told not in ("TRUE", "FALSE"):
            raise ValueError(f"{path} is {told[:80]!r}")
        self._etag = self._metadata.etag
        return CloudNotice(self._promised_s, "gcp: preempted") if told == "TRUE" else None

    def _ask_azure(self) -> CloudNotice | None:
        """The events of every machine of the set are told to each of them."""
        if not self._me:
            self._me = self._metadata.instance().id
        told = json.loads(self._metadata.need(AZURE_EVENTS, 0.0 if self._asked_before else WARM_UP_S))
        self._asked_before = True
        for event in told["Events"]:
            taken = {name.lower() for name in event["Resources"]}
            if event["EventType"] in _TAKES and self._me.lower() in taken:
                acknowledged_by = event["EventId"] if len(taken) == 1 else ""
                return CloudNotice(self._azure_left(event), f"azure: {event['EventType']}", acknowledged_by)
        return None

    def _azure_left(self, event: dict[str, Any]) -> float:
        """``NotBefore`` is empty once the event has started."""
        if event.get("EventStatus") == "Started" or not event.get("NotBefore"):
            return _LATE_S
        return self._left(parsedate_to_datetime(event["NotBefore"]).timestamp())

    def _left(self, end: float) -> float:
        """Seconds until ``end`` of the service's clock; if that cannot be, what the cloud promises."""
        try:
            now = parsedate_to_datetime(self._metadata.date).timestamp()
        except ValueError:
            now = time.time()
        left = end - now
        return max(left, _LATE_S) if left < _MOST_S else self._promised_s

    def _advised(self, risk: str) -> None:
        if risk == self._risk:
            return
        self._risk = risk
        self._say(f"the cloud reports a risk of preemption: {risk}" if risk else "no longer at risk")
        self._on_risk(risk)


def _zulu(text: str) -> float:
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
