"""`features.target=ends`: a run whose target's blocks are only in the servers that compute its states."""

from __future__ import annotations

from drafttrain.core.errors import UserError
from drafttrain.runs.options import RunOptions

ENDS = "ends"
WHOLE_ENGINES = ("llamacpp",)  # read targets as files that the trainer writes


def ends_alone(options: RunOptions) -> bool:
    """Whether the trainer loads the target without its blocks."""
    return options.features.target == ENDS


def check_target(options: RunOptions, in_memory: bool) -> None:
    """Raise UserError where a run without the target's blocks needs them.

    in_memory: a caller has loaded the target already. Families that need blocks are refused where they are built.
    """
    features, target, measure = options.features, options.target, options.measure
    if not ends_alone(options):
        return
    if in_memory:
        raise UserError("features.target is ends, but the target is in memory already; leave it out")
    if features.name != "engine":
        raise UserError(
            f"features.target is ends, but features={features.name} runs the target's blocks in the trainer; set "
            "features=engine, or features.target=whole"
        )
    if target.weights is not None:
        raise UserError(
            f"features.target is ends, but target.weights={target.weights} quantises the blocks in the trainer; leave one out"
        )
    setting, size = target.shared_by
    if size != 1 or target.placement not in ("auto", "replicated"):
        conflict = f"{setting}={size}" if size != 1 else f"target.placement={target.placement}"
        raise UserError(f"features.target is ends, but {conflict} divides the blocks among processes; leave one out")
    if measure.every and measure.engine is None:
        raise UserError(
            f"measure.every is {measure.every}, but with features.target=ends our decoder has no blocks to decode with; set "
            "measure.engine=vllm too, or leave measure.every out"
        )
    if measure.engine in WHOLE_ENGINES:
        raise UserError(
            f"measure.engine is {measure.engine}, for which the trainer writes the whole target; with features.target=ends set "
            "measure.engine=vllm"
        )
