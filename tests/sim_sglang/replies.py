"""What the endpoints answer, as values: pure functions of the engine's state and the request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sim_sglang.engine import Engine

WORDS = ("the", "server", "draws", "tokens", "from", "a", "table", "and", "means", "nothing", "by", "them")
CREATED = 1_780_000_000


@dataclass(frozen=True)
class Asked:
    """A request for tokens in one of the three dialects."""

    path: str
    prompt_tokens: int
    max_tokens: int
    stream: bool
    model: str

    @classmethod
    def of(cls, path: str, body: dict[str, Any]) -> Asked:
        """Raises ValueError and its like for what cannot be understood."""
        match path:
            case "/generate":
                prompt = body.get("text") or body.get("input_ids") or ""
                limit = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
            case "/v1/completions":
                prompt, limit = body["prompt"], body.get("max_tokens", 16)
            case _:
                prompt = " ".join(str(one["content"]) for one in body["messages"])
                limit = body.get("max_completion_tokens") or body.get("max_tokens", 128)
        size = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        return cls(path, max(1, size), int(limit), bool(body.get("stream")), str(body.get("model") or ""))


def words(count: int, end: int) -> str:
    """`count` words of the text that is `end` words long by now."""
    return "".join(f" {WORDS[i % len(WORDS)]}" for i in range(end - count, end))


def whole(engine: Engine, asked: Asked, rid: str, count: int, seconds: float) -> dict[str, Any]:
    text = words(count, count)
    if asked.path == "/generate":
        return {"text": text, "output_ids": list(range(count)), "meta_info": _meta(engine, asked, rid, count, seconds)}
    return _openai(asked, rid, text, done=True, part=False) | {"usage": _usage(asked, count)}


def part(engine: Engine, asked: Asked, rid: str, new: int, count: int, done: bool) -> dict[str, Any]:
    """One event of a stream: /generate repeats the text so far, the OpenAI dialects send what is new."""
    if asked.path == "/generate":
        finish = None if not done else {"type": "length", "length": count}
        meta = _meta(engine, asked, rid, count, 0.0) | {"finish_reason": finish}
        return {"text": words(count, count), "output_ids": list(range(count)), "meta_info": meta}
    return _openai(asked, rid, words(new, count), done=done, part=True)


def _openai(asked: Asked, rid: str, text: str, *, done: bool, part: bool) -> dict[str, Any]:
    chat = asked.path == "/v1/chat/completions"
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if done else None}
    if chat:
        choice["delta" if part else "message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = ("chat.completion.chunk" if part else "chat.completion") if chat else "text_completion"
    return {"id": rid, "object": kind, "created": int(time.time()), "model": asked.model, "choices": [choice]}


def _usage(asked: Asked, count: int) -> dict[str, int]:
    total = asked.prompt_tokens + count
    return {"prompt_tokens": asked.prompt_tokens, "completion_tokens": count, "total_tokens": total}


def _meta(engine: Engine, asked: Asked, rid: str, count: int, seconds: float) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": {"type": "length", "length": count},
        "prompt_tokens": asked.prompt_tokens,
        "completion_tokens": count,
        "cached_tokens": 0,
        "e2e_latency": seconds,
    }
    if engine.stats.accept_len:
        meta["spec_accept_length"] = engine.stats.accept_len
        meta["spec_verify_ct"] = max(1, round(count / engine.stats.accept_len))
    return meta


def model_info(engine: Engine) -> dict[str, Any]:
    args = engine.args
    return {
        "model_path": args.get("model_path"),
        "tokenizer_path": args.get("tokenizer_path"),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }


def models(engine: Engine) -> dict[str, Any]:
    name = engine.args.get("served_model_name")
    card = {"id": name, "object": "model", "created": CREATED, "owned_by": "sglang", "root": name}
    return {"object": "list", "data": [card | {"max_model_len": engine.info["max_req_input_len"] + 6}]}


def server_info(engine: Engine, internal_state: dict[str, Any]) -> dict[str, Any]:
    version = {"version": str(engine.args.release)}
    return {**engine.args.plain(), **engine.info, "internal_states": [internal_state], **version}


def load(engine: Engine, path: str) -> Any:
    stats = engine.stats
    if path == "/get_load":
        return [
            {
                "dp_rank": 0,
                "num_reqs": stats.running + stats.queued,
                "num_waiting_reqs": stats.queued,
                "num_tokens": stats.used_tokens,
                "ts_tic": time.monotonic(),
            }
        ]
    core = {"dp_rank": 0, "num_running_reqs": stats.running, "num_waiting_reqs": stats.queued}
    return {"version": str(engine.args.release), "dp_rank_count": 1, "loads": [core]}


def metrics(engine: Engine) -> str:
    """Prometheus text; the values are those of the last output, so they go stale with a dead scheduler."""
    args, stats = engine.args, engine.stats
    labels = f'{{engine_type="unified",model_name="{args.get("served_model_name")}",pp_rank="0",tp_rank="0"}}'
    total = engine.info["max_total_num_tokens"]
    gauges = {
        "num_running_reqs": stats.running,
        "num_queue_reqs": stats.queued,
        "num_used_tokens": stats.used_tokens,
        "token_usage": round(stats.used_tokens / max(1, total), 4),
        "gen_throughput": stats.speed,
        "max_total_num_tokens": total,
    }
    if args.draft_tokens:
        gauges["spec_accept_length"] = stats.accept_len
        rate = args.release.accept_rate(stats.accept_len, args.draft_tokens) if stats.accept_len else 0.0
        gauges["spec_accept_rate"] = round(rate, 4)
    counters = {"generation_tokens_total": stats.generated, "num_requests_total": stats.finished}
    lines = []
    for kind, values in (("gauge", gauges), ("counter", counters)):
        for name, value in values.items():
            lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{labels} {value}"]
    return "\n".join(lines) + "\n"
