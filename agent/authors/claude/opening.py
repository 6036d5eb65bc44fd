"""The parameters of every call of a model, without the messages."""

from coda_agent.agent.authors.claude.client import FALLBACKS
from coda_agent.agent.authors.claude.purse import Purse
from coda_agent.agent.judge.records import JsonObject

COMPACT_AT = 0.6
"""Share of the context window at which the server summarises what came before."""
COMPACT_TIER = 0.8
"""The same, of the length from which on all of a prompt costs more."""
TASK_BUDGETS = "task-budgets-2026-03-13"
TOLD = frozenset(
    f"claude-{name}" for name in (
        "fable-5-1", "fable-5", "mythos-5-1", "mythos-5", "opus-5-5", "opus-5", "opus-4-8",
        "opus-4-7", "sonnet-5-5", "haiku-5-5",
    )
)  # fmt: skip
"""Models that the documentation lists as seeing a task budget; the API does not say it of one."""
BETAS = ["context-management-2025-06-27", "compact-2026-01-12"]


def parameters(sent: JsonObject, purse: Purse, info: JsonObject, *, elsewhere: bool) -> JsonObject:
    """Choose them by `prompt.request`, and by what the API says.

    Of another server (`elsewhere`) nothing is asked but what it says it can do.
    """
    options, prices = purse.options, purse.prices

    def size(name: str, usual: int) -> int:
        told = info.get(name)
        return told if isinstance(told, int) and 0 < told < 10**9 else usual

    def can(*path: str) -> bool:
        told: object = info.get("capabilities")
        for name in (*path, "supported"):
            told = told.get(name) if isinstance(told, dict) else None
        return told is True if elsewhere else told is not False

    trigger = max(50_000, round(COMPACT_AT * size("max_input_tokens", 200_000)))
    if prices and (above := prices.tiers(options.model)[0].above):
        trigger = min(trigger, round(COMPACT_TIER * above))
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": trigger}}
    most = min(options.budget.answer, size("max_tokens", options.budget.answer))
    request: JsonObject = {"model": options.model, "max_tokens": most}
    request |= {"tools": sent["tools"], "system": sent["system"]}
    if not elsewhere:
        request["cache_control"] = {"type": "ephemeral"}
    if can("thinking", "types", "adaptive"):
        request["thinking"] = {"type": "adaptive", "display": "summarized"}
    if can("effort"):
        request["output_config"] = {"effort": options.effort}
    if can("context_management"):
        request |= {"context_management": {"edits": [edit]}, "betas": BETAS}
    allowed = info.get("allowed_fallback_models")
    # Only the one that was named: the budget has to know the price of whoever may answer.
    if isinstance(allowed, list) and options.fallback in allowed:
        request["fallbacks"] = [{"model": options.fallback}]
        request["betas"] = [*request.get("betas", ()), FALLBACKS]
    if "output_config" in request and (total := _task_budget(purse)):
        request["output_config"] = {"effort": options.effort, "task_budget": total}
        request["betas"] = [*request.get("betas", ()), TASK_BUDGETS]
    return request


def _task_budget(purse: Purse) -> JsonObject | None:
    """The tokens of answers that the dollars buy, for a countdown."""
    if not purse.prices or purse.options.model not in TOLD:
        return None
    total = round(purse.budget.usd / purse.prices.tiers(purse.options.model)[-1].output)
    return {"type": "tokens", "total": min(total, 1_000_000)} if total >= 20_000 else None
