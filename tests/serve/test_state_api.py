"""Health, readiness, models, metrics and aborts."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from muse_fn.serve.app import make_app
from muse_fn.serve.jobs import Load
from muse_fn.serve.metrics import Metrics
from muse_fn.serve.service import Stage
from tests.serve.script import ScriptedEngine, bytes_tokens, make_service
from tests.serve.web import call, client, on_loop, post, until


@pytest.mark.parametrize(
    ("stage", "health", "live", "ready", "word"),
    [
        (Stage("ready"), "", 200, 200, "ready"),
        (Stage("starting"), "", 200, 503, "starting"),
        (Stage("draining"), "", 200, 503, "draining"),
        (Stage("ready"), "the card is gone", 503, 503, "broken"),
    ],
)
def test_live_and_ready(stage: Stage, health: str, live: int, ready: int, word: str) -> None:
    app = make_app(make_service(ScriptedEngine(health=health), stage=stage, keys=("k",)))
    first, second = call(app, "GET", "/health"), call(app, "GET", "/ready")
    assert (first.status_code, second.status_code) == (live, ready)
    assert second.json()["status"] == word
    assert first.json()["reason"] == (health or None)


def test_readiness_follows_the_stage() -> None:
    service = make_service(ScriptedEngine(), stage=Stage("starting"))
    app = make_app(service)
    assert call(app, "GET", "/ready").status_code == 503
    service.stage.name = "ready"
    assert call(app, "GET", "/ready").status_code == 200


@pytest.mark.parametrize("name", ["nano", "org/model", "a model:\u00e9"])
def test_the_model(name: str) -> None:
    app = make_app(make_service(ScriptedEngine(), name=name, created=5))
    (card,) = call(app, "GET", "/v1/models").json()["data"]
    assert (card["id"], card["object"], card["created"], card["max_model_len"]) == (name, "model", 5, 2048)
    assert card["meta"]["built_with"] == "Built with Muse Spark Open"
    assert call(app, "GET", f"/v1/models/{name}").json() == card
    missing = call(app, "GET", "/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_version_and_load() -> None:
    app = make_app(make_service(ScriptedEngine()))
    assert call(app, "GET", "/version").json()["built_with"] == "Built with Muse Spark Open"
    assert call(app, "GET", "/load").json() == {**Load(0, 0, 0, 0, 100)._asdict(), "stage": "ready"}


def test_an_abort_ends_the_request_of_that_id_only() -> None:
    async def scene() -> None:
        engine = ScriptedEngine([*bytes_tokens("ab"), asyncio.Event()])
        async with client(make_app(make_service(engine))) as session:

            async def asking(name: str) -> Any:
                body = {"prompt": "hi", "n": 2}
                return (await session.post("/v1/completions", json=body, headers={"x-request-id": name})).json()

            tasks = [asyncio.create_task(asking(name)) for name in ("one", "two")]
            await until(lambda: engine.running == 4)
            for name, count in (("other", 0), ("one", 2), ("one", 0)):
                answer = await session.post("/abort", json={"request_id": name})
                assert answer.json() == {"request_id": name, "aborted": count}
            found = await tasks[0]
            assert [choice["finish_reason"] for choice in found["choices"]] == ["abort", "abort"]
            assert engine.running == 2
            assert not tasks[1].done()
            await session.post("/abort", json={"request_id": "two"})
            await tasks[1]

    on_loop(scene())


@pytest.mark.parametrize("body", [{}, {"request_id": ""}, {"request_id": 5}, {"request_id": "x" * 129}])
def test_an_abort_needs_an_id(body: dict[str, Any]) -> None:
    assert post(make_app(make_service(ScriptedEngine())), "/abort", body).status_code == 400


def samples(text: str) -> dict[str, float]:
    """Value by name and labels; parsing is a test of the format too."""
    return {
        f"{sample.name}{sorted(sample.labels.items()) or ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_method_counts_what_it_says() -> None:
    metrics = Metrics()
    before = samples(metrics.text(None)[0].decode())
    metrics.queued(0.1)
    metrics.first_token(0.2)
    metrics.next_token(0.3)
    metrics.finished("stop", 0.4)
    metrics.prompt_tokens(10, 4)
    metrics.generated(3)
    metrics.preempted()
    metrics.aborted(2)
    metrics.refused()
    metrics.bad_row()
    metrics.captured()
    metrics.replayed(5)
    metrics.grammar_built(0.5)
    metrics.grammar_timed_out()
    metrics.response("/x", 200)
    after = samples(metrics.text(None)[0].decode())
    grown = {name: value - before.get(name, 0) for name, value in after.items() if "_created" not in name}
    grown = {name: value for name, value in grown.items() if value and "_bucket" not in name}
    expected = {
        "queue_time_seconds_count": 1,
        "queue_time_seconds_sum": 0.1,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.2,
        "inter_token_latency_seconds_count": 1,
        "inter_token_latency_seconds_sum": 0.3,
        "request_latency_seconds_count": 1,
        "request_latency_seconds_sum": 0.4,
        "requests_finished_total[('reason', 'stop')]": 1,
        "prompt_tokens_total": 10,
        "prefix_cache_queries_total": 10,
        "prefix_cache_hits_total": 4,
        "generation_tokens_total": 3,
        "preemptions_total": 1,
        "aborts_total": 2,
        "refusals_total": 1,
        "nan_rows_total": 1,
        "captures_total": 1,
        "replays_total": 5,
        "grammar_build_seconds_count": 1,
        "grammar_build_seconds_sum": 0.5,
        "grammar_timeouts_total": 1,
        "http_responses_total[('route', '/x'), ('status', '200')]": 1,
    }
    assert grown == {f"muse_fn_{name}": value for name, value in expected.items()}


def test_gauges_are_the_load_at_the_time_of_asking() -> None:
    found = samples(Metrics().text(Load(1, 2, 30, 4, 60))[0].decode())
    assert found["muse_fn_requests_waiting"] == 1
    assert found["muse_fn_requests_running"] == 2
    assert found["muse_fn_kv_cache_usage_ratio"] == 0.5
    assert found["muse_fn_kv_cache_blocks_used"] == 30
    assert found["muse_fn_kv_cache_blocks_cached"] == 4
    assert found["muse_fn_kv_cache_blocks"] == 60
    assert samples(Metrics().text(Load(0, 0, 0, 0, 0))[0].decode())["muse_fn_kv_cache_usage_ratio"] == 0


def test_two_servers_count_apart_and_both_formats_are_served() -> None:
    first, second = Metrics(), Metrics()
    first.generated()
    assert b"muse_fn_generation_tokens_total 0.0" in second.text(None)[0]
    app = make_app(make_service(ScriptedEngine()))
    plain = call(app, "GET", "/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    opened = call(app, "GET", "/metrics", headers={"accept": "application/openmetrics-text"})
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert opened.text.endswith("# EOF\n")
