"""What an out-of-memory was about: which memory, and which of the server's allocations did not fit."""

from sglang_watchdog.diagnosis.timeline import Hit, Timeline
from sglang_watchdog.domain.failure import FailureClass as Class
from sglang_watchdog.domain.launch import Phase

# Parts of frames (`path:function`), of SGLang and of vLLM.
_RUN_FRAMES = (
    *("event_loop", "forward_batch_generation", "run_batch", "process_batch_result", "run_busy_loop", "execute_model"),
    *("get_new_batch_prefill", "get_next_batch_to_run"),
)
_HOST_FRAMES = ("memory_pool_host", "pool_host/", "alloc_with_host_register", "alloc_with_pin_memory")
_POOL_FRAMES = (
    *("memory_pool", "kv_cache_configurator", "pool_configurator", "_create_buffers", "kv_cache_mixin"),
    *("initialize_kv_cache", "allocate_kv_cache"),
)
_GRAPH_FRAMES = (
    *("init_cuda_graph", "init_all_cuda_graphs", "init_device_graphs", "cuda_graph_setup", "graph_runner.py:"),
    *("capture_model", "capture_one_batch_size"),
)
_WEIGHT_FRAMES = (
    *("load_model", "model_loader/", "_initialize_model", "initialize_model", "create_weights", "load_weights"),
    "process_weights_after_loading",
)
_FIRST_FRAMES = ("init_torch_distributed", "init_distributed", ":set_device", ":init_device", "ncclCommInitRank")
_BY_PHASE = {
    Phase.LOADING_WEIGHTS: Class.WEIGHTS_OOM,
    Phase.ALLOCATING_KV: Class.KV_CACHE_OOM,
    Phase.CAPTURING_GRAPHS: Class.CUDA_GRAPH_OOM,
    Phase.WARMING_UP: Class.RUNTIME_CUDA_OOM,
    Phase.READY: Class.RUNTIME_CUDA_OOM,
    Phase.SERVING: Class.RUNTIME_CUDA_OOM,
    Phase.STOPPING: Class.RUNTIME_CUDA_OOM,
}
# A pool of less than nothing: the weights left no memory for it, and nobody looked before the tensors were made.
_NEGATIVE = "Trying to create tensor with negative dimension"
GUESS = 0.5  # how sure an out-of-memory is of which nothing tells the stage: any line that does tell is better


def pins_host_memory(hit: Hit) -> bool:
    """Pinned host memory is asked of CUDA, which refuses it in the words for its own memory."""
    return _any(_HOST_FRAMES, hit) and not _any(_RUN_FRAMES, hit)


def judge_oom(hit: Hit, timeline: Timeline) -> tuple[Class, float]:
    """The frames tell, else the words, else how far the rank had come. A raw out-of-memory after the last pool is the
    graphs': their buffers are allocated before the first line about a capture. One before any weights is nobody's but
    that of who had the card already."""
    if pins_host_memory(hit):
        return Class.HOST_MEMORY_SHORTAGE, 0.8
    stage = _of_frames(hit) or _of_words(hit) or _BY_PHASE.get(hit.phase)
    if stage:
        return stage, 0.9
    first = _any(_FIRST_FRAMES, hit) or (hit.phase is Phase.STARTING and timeline.memory.before_weights_gib is None)
    return (Class.GPU_MEMORY_HELD, 0.75) if first else (Class.RUNTIME_CUDA_OOM, GUESS)


def is_negative_pool(text: str, frames: tuple[str, ...]) -> bool:
    """Of an exception whose words say nothing of memory."""
    return _NEGATIVE in text and any(part in frame for frame in frames for part in _POOL_FRAMES)


def _of_frames(hit: Hit) -> Class | None:
    for stage, parts in (
        (Class.RUNTIME_CUDA_OOM, _RUN_FRAMES),
        (Class.KV_CACHE_OOM, _POOL_FRAMES),
        (Class.CUDA_GRAPH_OOM, _GRAPH_FRAMES),
        (Class.WEIGHTS_OOM, _WEIGHT_FRAMES),
    ):
        if _any(parts, hit):
            return stage
    return None


def _of_words(hit: Hit) -> Class | None:
    if "graph failed" in hit.text or "draft extend failed" in hit.text:
        return Class.CUDA_GRAPH_OOM
    return Class.RUNTIME_CUDA_OOM if "warming up" in hit.text else None


def _any(parts: tuple[str, ...], hit: Hit) -> bool:
    return any(part in frame for frame in hit.frames for part in parts)
