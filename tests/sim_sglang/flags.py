"""SGLang's own flags: which a release knows, what it refuses, and the `server_args` it resolves them to.

The flags of a release are the fields of the `server_args=` line in its recorded start-up log, so nothing is listed here
twice; only what that line cannot tell (aliases, types of absent values, GPU defaults, the speculation rules) is.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sim_sglang.profiles import Profile
from sim_sglang.release import Release

ALIASES = {
    "model_path": ["--model"],
    "tp_size": ["--tensor-parallel-size", "--tp"],
    "dp_size": ["--data-parallel-size", "--dp"],
    "pp_size": ["--pipeline-parallel-size", "--pp"],
    "speculative_draft_model_path": ["--speculative-draft-model"],
}
# Set in the recorded runs, so that their lines do not show that they are switches.
SWITCHES = {"skip_tokenizer_init", "disable_cuda_graph", "disable_overlap_schedule", "enable_multimodal"}
INTEGERS = re.compile(
    r"(speculative_(num_steps|eagle_topk|num_draft_tokens)|max_running_requests|max_total_tokens|context_length"
    r"|max_mamba_cache_size|cuda_graph_max_bs\w*|max_queued_requests|nccl_port|stream_interval)$"
)
LISTS = re.compile(r"cuda_graph_bs\w*$")
GPU_DEFAULTS: dict[str, Any] = {
    "device": "cuda",
    "load_format": "auto",
    "attention_backend": "flashinfer",
    "sampling_backend": "flashinfer",
    "grammar_backend": "xgrammar",
    "disable_cuda_graph": False,
    "chunked_prefill_size": 8192,
}
UNSET: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 30000,
    "skip_tokenizer_init": False,
    "disable_overlap_schedule": False,
    "max_total_tokens": None,
}
DEFAULT_GRAPH_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 40, 44, 48)
STEPS_WITHOUT_TOPK = "TypeError: '>' not supported between instances of 'NoneType' and 'int'"


class Refused(Exception):
    """The server ends before it starts a child: text for stderr and the exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.text, self.status = text, status


@dataclass
class ServerArgs:
    """Resolved arguments, in the order and spelling that the release prints them."""

    release: Release
    texts: dict[str, str]
    values: dict[str, Any]
    given: set[str]
    notes: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def line(self) -> str:
        """The `server_args=` line, longer than 4096 bytes as the real one."""
        shown = {name: repr(self.values[name]) if name in self.values else text for name, text in self.texts.items()}
        if self.release.at_least("0.5.20"):
            return "server_args={" + ", ".join(f"'{name}': {text}" for name, text in shown.items()) + "}"
        return "server_args=ServerArgs(" + ", ".join(f"{name}={text}" for name, text in shown.items()) + ")"

    def plain(self) -> dict[str, Any]:
        """As JSON over HTTP shows them; what is no plain value is shown as its text."""
        return {name: self.values[name] if name in self.values else _literal(text) for name, text in self.texts.items()}

    @property
    def draft_tokens(self) -> int:
        return self.get("speculative_num_draft_tokens") or 0

    @property
    def steps(self) -> int:
        return self.get("speculative_num_steps") or 0

    @property
    def tp(self) -> int:
        return int(self.get("tp_size") or 1)

    @property
    def on_cpu(self) -> bool:
        return bool(self.get("device") == "cpu")

    @property
    def api_key(self) -> str | None:
        key: str | None = self.get("api_key")
        return key

    @property
    def graph_batches(self) -> list[int]:
        """Batch sizes that graphs are captured for; none if captures are switched off."""
        if self.get("disable_cuda_graph") or self.on_cpu:
            return []
        most = self.get("cuda_graph_max_bs_decode") or self.get("cuda_graph_max_bs") or DEFAULT_GRAPH_BATCHES[-1]
        return [size for size in DEFAULT_GRAPH_BATCHES if size <= most]

    @property
    def radix(self) -> bool:
        """Does the prefix cache keep states of a hybrid model? (It needs more state slots for each request.)"""
        strategy = self.get("mamba_radix_cache_strategy") or self.get("mamba_scheduler_strategy")
        return not self.get("disable_radix_cache") and strategy != "no_buffer"


def parse(release: Release, profile: Profile, argv: Sequence[str]) -> ServerArgs:
    """Read a command line as this release does; raises Refused for flags it does not know."""
    texts = recorded_args(release)
    given = {name: value for name, value in vars(_parser(release, texts).parse_args(argv)).items() if value is not None}
    on_cpu = given.get("device") == "cpu"
    values = UNSET | ({} if on_cpu else GPU_DEFAULTS) | given
    args = ServerArgs(release, texts, values, set(given))
    model = given["model_path"]
    args.values = {
        "tokenizer_path": model,
        "served_model_name": model,
        "random_seed": random.randrange(1 << 30),
        "mem_fraction_static": profile.mem_fraction,
        "tp_size": 1,
    } | values
    if on_cpu:
        args.notes.append("Cuda graph is disabled because of using torch native attention backend")
    return args


def resolve(args: ServerArgs, profile: Profile) -> None:
    """Settle what the flags leave open, as `__post_init__` does; notes down what it says meanwhile. Raises Refused."""
    _resolve_speculation(args, profile)
    _resolve_hybrid(args, profile)
    if args.get("skip_tokenizer_init") and args.release.at_least("0.5.14"):
        args.notes.append(
            "skip_tokenizer_init=True: string-based stop conditions (stop, stop_regex) and min_new_tokens are"
            " unavailable."
        )


def recorded_args(release: Release) -> dict[str, str]:
    """Each field of the recorded `server_args=` line with its value as text, in order."""
    log = release.template().read_text(errors="replace")
    at = log.index("server_args=") + len("server_args=")
    line = log[at : log.index("\n", at)]
    node = ast.parse(line, mode="eval").body
    if isinstance(node, ast.Call):
        pairs: list[tuple[str, ast.expr]] = [(str(one.arg), one.value) for one in node.keywords]
    else:
        assert isinstance(node, ast.Dict)
        pairs = [(ast.literal_eval(key), value) for key, value in zip(node.keys, node.values, strict=True) if key]
    return {name: line[value.col_offset : value.end_col_offset] for name, value in pairs}


class _Parser(argparse.ArgumentParser):
    """Prints no usage of five hundred flags before the error."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"usage: {self.prog} [-h] --model-path MODEL_PATH ...\n{self.prog}: error: {message}", 2)


def _parser(release: Release, texts: dict[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(prog=release.program, usage=argparse.SUPPRESS)
    for name, text in texts.items():
        options = [f"--{name.replace('_', '-')}", *ALIASES.get(name, ())]
        if not name.startswith("_"):
            parser.add_argument(*options, dest=name, **_kind(release, name, text))
    if release.at_least("0.5.14"):
        parser.add_argument("--mamba-scheduler-strategy", dest="mamba_radix_cache_strategy")
    if release.at_least("0.5.14") and not release.at_least("0.5.20"):
        parser.add_argument("--cuda-graph-max-bs", type=int, dest="cuda_graph_max_bs_decode")
    return parser


def _kind(release: Release, name: str, text: str) -> dict[str, Any]:
    if text == "False" or name in SWITCHES:
        return {"action": "store_true", "default": None}
    if LISTS.match(name):
        return {"type": int, "nargs": "+"}
    if INTEGERS.match(name):
        return {"type": int}
    if name == "model_path":
        return {"required": True}
    if name == "speculative_algorithm":
        return {"choices": _algorithms(release)}
    value = _literal(text)
    if type(value) in (int, float):
        return {"type": type(value)}
    return {"nargs": "*"} if isinstance(value, list | tuple) else {}


def _algorithms(release: Release) -> list[str]:
    since = {"0.4": ["EAGLE", "EAGLE3", "NEXTN"], "0.5.2": ["STANDALONE"], "0.5.4": ["NGRAM"], "0.5.11": ["DFLASH"]}
    later = {"0.5.16": ["DSPARK"], "0.5.23": ["UNO"]}
    return [name for first, names in (since | later).items() if release.at_least(first) for name in names]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


# -- the speculation rules of ServerArgs.__post_init__


def _resolve_speculation(args: ServerArgs, profile: Profile) -> None:
    algorithm = args.get("speculative_algorithm")
    if not algorithm:
        return
    if "max_running_requests" not in args.given:
        args.values["max_running_requests"] = 48
        if args.release.at_least("0.5.4"):
            args.notes.append(
                "Max running requests is reset to 48 for speculative decoding."
                " You can override this by explicitly setting --max-running-requests."
            )
    if algorithm == "NGRAM":
        args.values.setdefault("speculative_num_draft_tokens", 12)
        return
    if algorithm == "NEXTN":
        args.values["speculative_algorithm"] = "EAGLE"
    if args.release.at_least("0.5.14") and args.get("disable_overlap_schedule"):
        args.notes.append("Non-overlap (synchronous) spec v2 is used for eagle/eagle3/standalone speculative decoding.")
    _resolve_steps(args, profile)


def _resolve_steps(args: ServerArgs, profile: Profile) -> None:
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    steps, topk, drafts = (args.get(name) for name in names)
    if (steps, topk, drafts) == (None, None, None):
        steps, topk, drafts = profile.default_steps, 1, profile.default_steps + 1
    elif steps is None:
        raise Refused(traceback(args.release, ["server_args.py", "speculative_hook.py"], "AssertionError"), 1)
    elif topk is None:
        raise Refused(traceback(args.release, ["server_args.py", "speculative_hook.py"], STEPS_WITHOUT_TOPK), 1)
    elif topk == 1 and drafts != steps + 1:
        args.notes.append(
            "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when speculative_eagle_topk == 1"
        )
        drafts = steps + 1
    args.values.update(zip(names, (steps, topk, drafts), strict=True))


def _resolve_hybrid(args: ServerArgs, profile: Profile) -> None:
    if not profile.state or not args.draft_tokens:
        return
    strategy = args.get("mamba_scheduler_strategy")
    if args.release.at_least("0.5.10") and not args.release.at_least("0.5.14") and strategy == "no_buffer":
        text = (
            f"ValueError: Speculative decoding for {profile.architecture} is not compatible with radix cache when using"
            " --mamba-scheduler-strategy no_buffer.To use radix cache with speculative decoding, please use"
            " --mamba-scheduler-strategy extra_buffer and set SGLANG_ENABLE_SPEC_V2=1."
        )
        raise Refused(traceback(args.release, ["server_args.py"], text), 1)


def traceback(release: Release, files: Sequence[str], error: str) -> str:
    """A traceback through SGLang's files that ends in this error."""
    folder = "/opt/sglang/site/sglang"
    frames = [f'  File "{folder}/launch_server.py", line 68, in <module>']
    for name in files:
        inside = "srt/arg_groups" if name.endswith("_hook.py") and release.at_least("0.5.14") else "srt"
        shown = name if release.at_least("0.5.14") or not name.endswith("_hook.py") else "server_args.py"
        frames.append(f'  File "{folder}/{inside}/{shown}", line 448, in __post_init__')
    return "\n".join(["Traceback (most recent call last):", *frames, error])
