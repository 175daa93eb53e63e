"""Export checkpoints to serving stacks, check them, and import other projects' drafters."""

STACK_NAMES = (
    *("vllm", "sglang", "trtllm", "speculators", "transformers", "llamacpp", "openvino", "tgi", "lmdeploy", "official"),
    "stitched",
)
