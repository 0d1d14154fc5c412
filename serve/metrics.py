"""What the server counts and times, in the Prometheus text format. Every server has a registry of its own."""

import time
from collections.abc import Awaitable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics

from muse_fn.serve.grammar_trial import TooSlow
from muse_fn.serve.jobs import Finish, Load

T = TypeVar("T")
FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)


class Metrics:
    """All families of one server; the methods are plain calls and safe from any thread. Times are seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"muse_fn_{name}_seconds", text, registry=self.registry, buckets=buckets)
            for name, (text, buckets) in _TIMES.items()
        }
        self._gauges = {name: Gauge(f"muse_fn_{name}", text, registry=self.registry) for name, text in _STATES.items()}
        self._counters = {
            name: Counter(f"muse_fn_{name}", text, labels, registry=self.registry)
            for name, (text, labels) in _COUNTS.items()
        }

    def queued(self, seconds: float) -> None:
        """A job began to be read after so long in the queue."""
        self._histograms["queue_time"].observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A job's first token came so long after it was submitted."""
        self._histograms["time_to_first_token"].observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A further token came so long after the one before."""
        self._histograms["inter_token_latency"].observe(seconds)

    def finished(self, finish: Finish, seconds: float) -> None:
        """A job ended, so long after it was submitted."""
        self._histograms["request_latency"].observe(seconds)
        self._counters["requests_finished"].labels(finish).inc()

    def prompt_tokens(self, count: int, cached: int) -> None:
        """A prompt of so many tokens was admitted; `cached` of them were known already."""
        self._counters["prompt_tokens"].inc(count)
        self._counters["prefix_cache_queries"].inc(count)
        self._counters["prefix_cache_hits"].inc(cached)

    def generated(self, count: int = 1) -> None:
        """So many tokens were drawn."""
        self._counters["generation_tokens"].inc(count)

    def preempted(self, count: int = 1) -> None:
        """So many jobs had to give their place back."""
        self._counters["preemptions"].inc(count)

    def aborted(self, count: int = 1) -> None:
        """So many jobs were given up because nobody waits for them any more."""
        self._counters["aborts"].inc(count)

    def refused(self) -> None:
        """A request was turned away because the queue is full or the server does not take any."""
        self._counters["refusals"].inc()

    def bad_row(self, count: int = 1) -> None:
        """So many rows of logits were not finite."""
        self._counters["nan_rows"].inc(count)

    def captured(self, count: int = 1) -> None:
        """So many steps were captured."""
        self._counters["captures"].inc(count)

    def replayed(self, count: int = 1) -> None:
        """So many captured steps were replayed."""
        self._counters["replays"].inc(count)

    def grammar_built(self, seconds: float) -> None:
        """A grammar was compiled."""
        self._histograms["grammar_build"].observe(seconds)

    def grammar_timed_out(self) -> None:
        """A grammar took too long to compile and was refused."""
        self._counters["grammar_timeouts"].inc()

    async def timing_grammar(self, build: Awaitable[T]) -> T:
        """What the build gives, which is counted whether it gives something, refuses, or takes too long."""
        began = time.monotonic()
        try:
            return await build
        except TooSlow:
            self.grammar_timed_out()
            raise
        finally:
            self.grammar_built(time.monotonic() - began)

    def response(self, route: str, status: int) -> None:
        """An HTTP response: `route` is the path of the table, never what a client wrote."""
        self._counters["http_responses"].labels(route, str(status)).inc()

    def text(self, load: Load | None, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type; gauges are set from `load` first."""
        if load is not None:
            used = load.blocks_used / load.blocks if load.blocks else 0.0
            values = (load.running, load.waiting, used, load.blocks_used, load.blocks_cached, load.blocks)
            for gauge, value in zip(self._gauges.values(), values, strict=True):
                gauge.set(value)
        if "application/openmetrics-text" in accept:
            return as_openmetrics(self.registry), OPENMETRICS
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


_TIMES = {
    "time_to_first_token": ("From submission to the first token.", SLOW),
    "inter_token_latency": ("Between two tokens of one choice.", FAST),
    "request_latency": ("From submission to the end of one choice.", SLOW),
    "queue_time": ("From submission to the first prompt token read.", SLOW),
    "grammar_build": ("Compiling a grammar.", FAST),
}
_STATES = {  # in the order in which `Metrics.text` sets them
    "requests_running": "Choices that are being generated.",
    "requests_waiting": "Choices that wait in the queue.",
    "kv_cache_usage_ratio": "Share of the cache's blocks that are held by running choices.",
    "kv_cache_blocks_used": "Blocks held by running choices.",
    "kv_cache_blocks_cached": "Blocks that hold known prefixes and are free to be taken.",
    "kv_cache_blocks": "All blocks.",
}
_COUNTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Prompt tokens admitted.", ()),
    "generation_tokens": ("Tokens drawn.", ()),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", ()),
    "prefix_cache_hits": ("Prompt tokens found there.", ()),
    "preemptions": ("Running choices that gave their place back.", ()),
    "aborts": ("Choices given up because nobody waits for them.", ()),
    "refusals": ("Requests turned away for lack of room.", ()),
    "nan_rows": ("Rows of logits that were not finite.", ()),
    "captures": ("Steps captured.", ()),
    "replays": ("Captured steps replayed.", ()),
    "grammar_timeouts": ("Grammars that took too long to compile.", ()),
    "requests_finished": ("Choices that ended.", ("reason",)),
    "http_responses": ("Responses by route and status.", ("route", "status")),
}
