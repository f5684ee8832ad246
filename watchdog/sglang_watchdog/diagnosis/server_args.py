"""Reads the effective settings out of SGLang's `server_args=` line. Values of secrets are dropped here.

Through 0.5.18 the line is `server_args=ServerArgs(model_path='…', …)`, from 0.5.20 on `server_args={'model_path': …}`.
Neither is Python that can be evaluated: some values print as `<Class.X: 1>` or as a call.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping

from sglang_watchdog.domain.secrets import redact_mapping

PREFIX = "server_args="
_SCALAR = r"None|True|False|-?\d+(?:\.\d+)?(?:e-?\d+)?|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[[^\[\](){}<>]*\]"
_KEYWORD = re.compile(rf"(?<=[(, ])(\w+)=({_SCALAR})(?=[,)]|$)")
_ITEM = re.compile(rf"(?<=[{{, ])['\"](\w+)['\"]: ({_SCALAR})(?=[,}}]|$)")

# What a report shows of them: what memory and speed depend on, in this order.
_SHOWN = (
    *("model_path", "tp_size", "dp_size", "pp_size", "context_length", "mem_fraction_static", "max_running_requests"),
    *("max_total_tokens", "cuda_graph_max_bs", "cuda_graph_max_bs_decode", "disable_cuda_graph"),
    *("chunked_prefill_size", "kv_cache_dtype", "disable_radix_cache", "max_mamba_cache_size"),
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk"),
    "speculative_num_draft_tokens",
)


def parse_server_args(text: str) -> dict[str, object]:
    """The settings in a `server_args=…` line, secrets removed. Empty where the line holds none.

    A line that was cut off, or that holds values that are no literals, gives what can be read of it.
    """
    begin = text.find(PREFIX)
    if begin < 0:
        return {}
    body = text[begin + len(PREFIX) :].strip()
    return redact_mapping(_as_python(body) or _by_pattern(body))


def shown(server_args: Mapping[str, object]) -> dict[str, object]:
    """The few settings that a report is about, those that are set."""
    return {name: server_args[name] for name in _SHOWN if server_args.get(name) not in (None, False)}


def _as_python(body: str) -> dict[str, object]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `1if` and the like, told to whoever runs the diagnosis
            tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {name: value for name, node in _named_nodes(tree) if (value := _literal(node)) is not _NOT_LITERAL}


def _named_nodes(tree: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match tree:
        case ast.Call(keywords=keywords):
            yield from ((keyword.arg, keyword.value) for keyword in keywords if keyword.arg)
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value


_NOT_LITERAL = object()


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NOT_LITERAL


def _by_pattern(body: str) -> dict[str, object]:
    pattern = _ITEM if body.startswith("{") else _KEYWORD
    found: dict[str, object] = {}
    for name, value in pattern.findall(body):
        try:
            found.setdefault(name, ast.literal_eval(value))
        except (ValueError, SyntaxError):
            continue
    return found
