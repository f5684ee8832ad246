"""Lines of every good start that hold words of failure: a reader of logs must not take them for one.

Which of them a release prints, and where, was recorded; the model's folder is the only thing put in.
"""

from __future__ import annotations

from sim_sglang.flags import ServerArgs

ROTARY = (
    "Ignore import error when loading sglang.srt.models.mimo_v2: cannot import name 'Qwen2_5_VisionRotaryEmbedding'"
    " from 'transformers.models.qwen2_5_vl.modeling_qwen2_5_vl'"
)
HELION = "Ignore import error when loading sglang.srt.models.inkling: No module named 'helion'"
OLD_RESPONSES = """Can not initialize OpenAIServingResponses, error: Traceback (most recent call last):
  File "/opt/sglang/site/sglang/srt/entrypoints/http_server.py", line 323, in lifespan
  File "/opt/sglang/site/sglang/srt/entrypoints/openai/serving_responses.py", line 30, in <module>
ModuleNotFoundError: No module named 'openai_harmony'
"""
NEW_RESPONSES = (
    "OpenAI Responses API (/v1/responses) disabled: OpenAIServingResponses init failed"
    " (ModuleNotFoundError: No module named 'openai_harmony')"
)


def _no_generation_config(args: ServerArgs) -> list[str]:
    model = args.get("model_path")
    text = (
        f"Failed to load generation config for {model}: {model} does not appear to have a file named"
        f" generation_config.json. Checkout '(hub)' for available files.."
        " Proceeding without generation config."
    )
    return [text] if args.release.at_least("0.5.12") and not args.release.at_least("0.5.18") else []


def before_arguments(args: ServerArgs) -> list[str]:
    """Main, while it resolves its arguments."""
    return _no_generation_config(args)


def around_arguments() -> list[str]:
    """Main, just before the `server_args=` line."""
    return ["Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit"]


def behind_arguments() -> list[str]:
    """Main, behind the `server_args=` line."""
    return [
        "No HuggingFace chat template found",
        "No chat template found, defaulting to 'string' content format",
    ]


def scheduler_imports(args: ServerArgs) -> list[str]:
    """A scheduler, before it joins its group."""
    if not args.release.at_least("0.5.10"):
        return ["Mamba selective_state_update backend initialized: triton"]
    return _no_generation_config(args)


def model_imports(args: ServerArgs) -> list[str]:
    """A scheduler, before it loads weights."""
    return [HELION, ROTARY] if args.release.at_least("0.5.14") else []


def application_startup(args: ServerArgs) -> list[str]:
    """Main, between uvicorn's `Waiting for application startup` and `Application startup complete`."""
    lines = []
    if args.get("skip_tokenizer_init"):
        lines = [
            "Failed to get yes/no token IDs dynamically: 'NoneType' object has no attribute 'encode'",
            "Using fallback token IDs for yes/no (9693/2152)",
        ]
    return [*lines, NEW_RESPONSES if args.release.at_least("0.5.14") else OLD_RESPONSES]
